"""What Parm's Algorithm 1 says of a layer: the lines that it goes by, and its choice between S1 and S2."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from megatron_moe_opt.cli.console import table_of
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.parm import ParmFits, algorithm_1


def algorithm_1_of(workload: LayerWorkload, cluster: Cluster) -> Iterator[Table | str]:
    """Yields a table of the fitted lines, and a sentence; or why there are none.

    Nothing where tokens are split over TP: the paper's choice is between two ways to split replicated ones.
    """
    if workload.tp == 1 or workload.ep * workload.etp == 1:
        return
    try:
        fits = ParmFits.of(cluster)
    except ConfigurationError as error:
        yield f"Parm's Algorithm 1: {error}"
        return
    lines = {"EP&ESP-AlltoAll": fits.all_to_all, "MP-AllGather": fits.all_gather, "SAA": fits.saa}
    yield table_of(
        "Lines of Parm's Algorithm 1: alpha + beta * bytes",
        ("collective", "alpha (ms)", "beta (ms/MB)", "R²", "largest error"),
        [
            (name, f"{line.alpha * 1e3:.4f}", f"{line.beta * 1e9:.4f}", f"{line.r_squared:.4f}",
             f"{line.largest_error:.1%}")
            for name, line in lines.items()
        ],
    )  # fmt: skip
    t_d1, t_d2 = fits.seconds(workload, workload.tokens)
    yield (
        f"Parm's Algorithm 1: t_D1 {t_d1 * 1e3:.3f} ms, t_D2 {t_d2 * 1e3:.3f} ms: "
        f"{algorithm_1(workload, workload.tokens, fits)}"
    )
