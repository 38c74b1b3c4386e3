"""Runs Megatron-LM's own token-dispatcher tests with a dispatcher of ours in the place of stock `alltoall`.

Before them its own parser reads the recipes of recipes/slurm.

    torchrun --nproc-per-node 8 tools/megatron_checks/megatron_lm_tests.py MEGATRON_LM_CHECKOUT [--dispatcher monta]
        [PYTEST ARGUMENTS]

The tests are not part of this repository: give a checkout of Megatron-LM, for example at tag core_v0.16.1. Without a
GPU they run on CPU over Gloo; `--dispatcher alltoall` shows what stock passes there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_moe_opt

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_token_dispatcher.py", "test_a2a_token_dispatcher.py")


def put_in_place_of_alltoall(dispatcher: str) -> None:
    """Lets every configuration that asks for `alltoall` get `dispatcher`."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    post_init = TransformerConfig.__post_init__

    def substitute(self: Any) -> None:
        if self.moe_token_dispatcher_type == "alltoall":
            self.moe_token_dispatcher_type = dispatcher
        post_init(self)

    TransformerConfig.__post_init__ = substitute


def keep_process_groups() -> None:
    """Makes the groups of each parallel layout once: every test makes them anew, which takes Gloo seconds."""
    from megatron.core import parallel_state

    def variables() -> dict[str, Any]:
        return {
            name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name[1].isupper()
        }

    none, made = variables(), {}
    initialize = parallel_state.initialize_model_parallel

    def initialize_once(*args: Any, **kwargs: Any) -> None:
        layout = repr((args, sorted(kwargs.items())))
        if layout not in made:
            vars(parallel_state).update(none)
            initialize(*args, **kwargs)
            made[layout] = variables()
        vars(parallel_state).update(made[layout])

    parallel_state.initialize_model_parallel = initialize_once
    parallel_state.destroy_model_parallel = lambda: vars(parallel_state).update(none)


def parse_recipes(checkout: Path) -> int:
    """Returns the exit code of the dry run: 0 where the checkout takes the arguments of all recipes."""
    slurm = ROOT / "recipes" / "slurm"
    models = sorted(map(str, (slurm / "models").glob("*.sh")))
    command = [sys.executable, str(slurm / "check_recipe.py"), "--megatron-lm", str(checkout), *models]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, env=alone | {"PYTHONPATH": python_path}).returncode


def main() -> int:
    """Returns pytest's exit code, or the dry run's where that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--dispatcher", default="monta")
    arguments, for_pytest = parser.parse_known_args()

    first = os.environ.get("RANK", "0") == "0"
    recipes = parse_recipes(arguments.checkout.resolve()) if first else 0
    sys.path.insert(0, str(arguments.checkout.resolve()))
    os.chdir(arguments.checkout)
    if megatron_moe_opt.use_host_backend():
        torch.cuda.is_available = lambda: True  # the tests skip themselves without it
        keep_process_groups()
    megatron_moe_opt.register()
    if arguments.dispatcher != "alltoall":
        put_in_place_of_alltoall(arguments.dispatcher)

    folder = Path("tests/unit_tests/transformer/moe")
    quiet = [] if first else ["--tb=no", "--no-summary", "--no-header"]
    # Megatron-LM's conftest downloads data sets that these tests do not use.
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore", "-o", "addopts=", *quiet]
    return pytest.main([*options, *(str(folder / test) for test in TESTS), *for_pytest]) or recipes


if __name__ == "__main__":
    sys.exit(main())
