"""Options of a MoE layer that several commands have alike. Each command says what they are by default."""

from __future__ import annotations

from typing import Annotated

import typer

Tokens = Annotated[int, typer.Option(min=1, help="Tokens of each rank.")]
Hidden = Annotated[int, typer.Option(min=1, help="Hidden size.")]
FfnHidden = Annotated[int, typer.Option(min=1, help="Hidden size inside an expert.")]
Experts = Annotated[int, typer.Option(min=1, help="Experts of the layer.")]
TopK = Annotated[int, typer.Option(min=1, help="Experts of a token.")]
Tp = Annotated[int, typer.Option(min=1, help="Tensor parallelism; above 1 with sequence parallelism.")]
Ep = Annotated[int | None, typer.Option(min=1, help="Expert parallelism.", show_default="ranks / expert-tp")]
ExpertTp = Annotated[int, typer.Option(min=1, help="Tensor parallelism inside an expert.")]
