"""moe-opt, and then what rank 0 had of its GPU's memory: `torchrun -m tools.gpu.with_memory FILE bench ...`.

Writes PyTorch's summary of its allocator: allocated and reserved bytes, their peaks, and how often memory ran out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from megatron_moe_opt.cli.main import main

file = Path(sys.argv.pop(1))
try:
    main()
finally:
    if os.environ.get("RANK", "0") == "0":
        file.write_text(torch.cuda.memory_summary(abbreviated=True))
