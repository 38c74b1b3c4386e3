"""`moe-opt profile`: the options, and the settings that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.layer_options import Ep, ExpertTp, FfnHidden
from megatron_moe_opt.cli.option_types import DType, finite


def profile(
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context parallelism.")] = 1,
    ep: Ep = None,
    expert_tp: ExpertTp = 1,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size: elements of a row.")] = 1024,
    ffn_hidden: FfnHidden = 1024,
    dtype: Annotated[DType, typer.Option(help="Elements of the rows.")] = DType.bf16,
    seconds: Annotated[
        float, typer.Option(min=1.0, callback=finite, help="Time to measure for; less time, smaller sizes.")
    ] = 90.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("cluster.json"),
) -> None:
    """Measure this cluster: what every move of rows, and an expert, costs on these ranks and groups.

    Runs on the ranks that torchrun or srun started, or on one process without them:
    torchrun --nproc-per-node 8 -m megatron_moe_opt.cli.main profile --tp 4 --expert-tp 4 --output cluster.json
    """
    from megatron_moe_opt.cli.profile.run import ProfileSettings, profile_cluster

    settings = ProfileSettings(tp, cp, ep, expert_tp, hidden, ffn_hidden, dtype.value, seconds)
    profile_cluster(settings, output)
