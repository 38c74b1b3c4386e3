"""moe-opt with NVTX ranges for layers, ops and chunks: `nsys profile python -m tools.gpu.with_nvtx bench`."""

from __future__ import annotations

import torch

from megatron_moe_opt.cli.main import main

with torch.autograd.profiler.emit_nvtx():
    main()
