"""Runs a Megatron script, unmodified, with our dispatchers: `python -m megatron_moe_opt.launch SCRIPT ARGS...`.

Under torchrun: `torchrun ... -m megatron_moe_opt.launch pretrain_gpt.py ... --moe-token-dispatcher-type monta`.
`--moe-opt-*` arguments are ours; all others go to the script.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from megatron_moe_opt import register, use_host_backend
from megatron_moe_opt.errors import ConfigurationError, ExtensionError
from megatron_moe_opt.gpu_settings import has_unusable_gpu
from megatron_moe_opt.integration.start_facts import facts_of
from megatron_moe_opt.options import Options, options_help, split_options
from megatron_moe_opt.runtime.job.same_start import say_together, start_alike
from megatron_moe_opt.systems.megatron_config import FAKE_GROUP
from megatron_moe_opt.versions import check_megatron

# Nothing above loads the extension or imports Megatron: where one is missing or stale, `main` says so in one sentence.


def run_script(path: Path, arguments: list[str]) -> None:
    """Runs the file as `__main__` would be run by `python path arguments...`.

    The module keeps this module's __spec__: a process that multiprocessing spawns (a checkpoint writer) imports its
    parent's main module again, and must import this one, which does nothing when imported, rather than the script.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    module.__spec__ = sys.modules["__main__"].__spec__
    module.__builtins__ = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [str(path), *arguments]
    # Not with this module's __future__ imports, which would make text of the script's annotations.
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)


def main(arguments: list[str], inside: AbstractContextManager[object] | None = None) -> None:
    """Registers the dispatchers, switches the host backend on where there is no GPU, and runs the script.

    Args:
        inside: entered before the script, which then runs inside it.
    """
    if not arguments or arguments[0].startswith("-"):
        print(options_help())
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    path, is_alone = Path(arguments[0]), FAKE_GROUP in arguments
    try:
        _, remaining = start_alike(lambda: _start(path, arguments[1:]), lambda started: facts_of(*started), is_alone)
        with inside or nullcontext():
            run_script(path, remaining)
    except SystemExit as error:
        if error.code:  # Megatron ends so where gradients are no numbers
            sys.last_value = error
        raise
    except (ConfigurationError, ExtensionError) as error:
        say_together(error, "moe-opt", is_alone)
        sys.last_value = error  # as Python has it of an error that nobody catches: auto/first_turns.py asks
        sys.exit(2)


def _start(path: Path, arguments: list[str]) -> tuple[Options, list[str]]:
    """Does all that comes before the script. Returns our options, and the script's arguments."""
    first_rank = os.environ.get("RANK", "0") == "0"
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file: give the path of a Megatron script such as pretrain_gpt.py")
    # Before anything imports Megatron: a checkout's own megatron.core comes before an installed one.
    sys.path.insert(0, str(path.resolve().parent))
    options, remaining = split_options(arguments)
    if first_rank and {"-h", "--help"} & set(remaining):
        print(options_help())
    if has_unusable_gpu():
        raise ConfigurationError(
            f"this node has a GPU, and PyTorch {torch.__version__} cannot use it: see what nvidia-smi and moe-opt "
            "doctor say, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    # Megatron warns, module by module and rank by rank, about libraries that exist for GPUs only.
    if not torch.cuda.is_available():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    check_megatron()
    if use_host_backend() and first_rank:
        print("moe-opt: no CUDA device, so Megatron-Core runs on CPU over Gloo", flush=True)
    register(options, refuse_unread=True)
    from megatron_moe_opt.integration.registry import check_named

    check_named(remaining)
    return options, remaining


if __name__ == "__main__":
    main(sys.argv[1:])
