"""Prints README's table of what to expect, as it is planned today.

python -m tools.predictions.expected_gains    6 to 9 minutes of a core
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_moe_opt.cli.plan.case import Case
from megatron_moe_opt.cli.plan.layout_search import Wanted, search
from megatron_moe_opt.cli.plan.named_sizes import Named
from megatron_moe_opt.cli.plan.settings import PlanSettings
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from tools.markdown_rows import row

PLACES = (
    ("qwen3-30b-a3b-like", "h100-ib400", 64),
    ("qwen3-30b-a3b-like", "a800-ib200", 64),
    ("qwen3-30b-a3b-like", "pcie", 32),
    ("deepseek-v3-like", "h100-ib400", 1024),
    ("deepseek-v3-like", "a800-ib200", 1024),
    ("deepseek-v3-like", "b200-nvl72", 576),
    ("mixtral-8x7b", "h100-ib400", 64),
    ("mixtral-8x7b", "pcie", 32),
)
"""Models, clusters and GPUs of the table's rows."""


def main() -> None:
    """Prints a row as soon as it is planned."""
    print("| model | on | chosen | times stock's tokens/s | without 1F1B overlap | times stock's tokens/s |")
    print("|---|---|---|---:|---|---:|", flush=True)
    for model, cluster, world in PLACES:
        cells = [cell for overlaps in (None, False) for cell in _gain(model, cluster, world, overlaps)]
        print(row(model, f"{world} of {cluster}", *cells), flush=True)


def _gain(model: str, cluster: str, world: int, overlaps: bool | None) -> Iterator[str]:
    """Yields what is chosen, and its tokens a second over those of stock in the layout that is best for stock."""
    sizes = dict.fromkeys(("--tp", "--cp", "--pp", "--vpp", "--ep", "--expert-tp"))
    settings = PlanSettings(
        cluster=cluster, cluster_numbers={}, model=Named(model, {}), sizes={"--world": world, **sizes},
        sequence_parallel=True, sequences=(4096,), micro_batch=1, micro_batches=1, recompute="none", overlaps=False,
        dtype="bf16", capacity_factor=None, imbalance=1.0, placement_saving=None, activation_budget=None,
    )  # fmt: skip
    found = search(settings, settings.model_shape(), Wanted(None, None, None, overlaps))
    best = found.cases[0]
    yield _named(best)
    yield f"{_tokens(best, best.chosen.variant) / _tokens(found.stock, ALLTOALL):.2f}"


def _named(case: Case) -> str:
    layout = case.site.layout
    cut = f", expert-TP {layout.expert_tp}" if layout.expert_tp > 1 else ""
    return f"`{case.chosen.variant}`, EP {layout.ep}{cut}" + (", 1F1B overlap" if case.settings.overlaps else "")


def _tokens(case: Case, variant: str) -> float:
    return case.step(case.candidate(variant)).tokens_per_second


if __name__ == "__main__":
    main()
