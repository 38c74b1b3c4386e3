"""Pretrain a Mixture-of-Experts GPT with Megatron-Core, on CPU over Gloo or on GPUs.

    torchrun --nproc-per-node 4 recipes/pretrain_moe_gpt.py --moe-token-dispatcher-type monta ...

The arguments have Megatron's names and meanings; recipes/README.md explains the recipe.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress

if __name__ == "__main__":
    # Megatron-Core warns on every rank about what it would like to be installed beside it.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    # Not at the top: the process that Megatron's checkpoint writer spawns imports this file again.
    from megatron_moe_opt import use_host_backend
    from megatron_moe_opt.errors import ConfigurationError

    # Before Megatron is imported: on a CPU it does without PyTorch's compiler, whose import takes longer than its own.
    with suppress(ConfigurationError):  # said by `main`, in one sentence on all ranks
        use_host_backend()
    from training_loop import main

    sys.exit(main())
