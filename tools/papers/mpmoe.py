"""MPMoE's numbers (TPDS 2024): a layer of Table III, top-1, on Adira (64 A100) and Valor (16 V100).

Not printed, and assumed: the tokens B of a GPU of Figs. 10, 15 and 17 (4,096, 8,192 and 16,384 here) and of Fig. 16
(8,192), 16-bit elements. What is offloaded of T_M is the paper's [B, H]; the paper activates in place, Megatron's
experts activate again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import fmean

from megatron_moe_opt.planning.costs.described_cluster import describe, levels_of_ep
from megatron_moe_opt.planning.costs.known_clusters import ADIRA, VALOR, KnownCluster
from megatron_moe_opt.planning.predicting.baselines import fastermoe, fastmoe, tutel
from megatron_moe_opt.planning.predicting.layer_on_cluster import PIPELINE, LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.planning.training.known_models import KNOWN_MODELS
from megatron_moe_opt.schedules.memory_reuse import NONE, STRATEGIES
from megatron_moe_opt.schedules.schedule import COLLECTIVES, OF_EXPERTS
from megatron_moe_opt.systems.mpmoe import candidate
from megatron_moe_opt.topology.layouts import Layout
from tools.markdown_rows import head, row
from tools.papers.at_scale import gradients
from tools.papers.formulas.mpmoe import LayerElements
from tools.papers.published import Published, chosen, follows, predicted

MODELS = {
    name: (one.hidden, one.ffn)
    for name in ("MoE-GPT-S", "MoE-GPT-XL", "MoE-BERT-L")
    for one in [KNOWN_MODELS[f"mpmoe-{name.lower()[4:]}"]]
}
"""The models' d_model and d_hidden (Table III)."""
CLUSTERS: dict[str, tuple[KnownCluster, int]] = {"Adira": (ADIRA, 64), "Valor": (VALOR, 16)}
TOKENS = (4096, 8192, 16384)
COUNTS = (2, 4, 8)
K = 1024


@cache
def _on(cluster: str, gpus: int, model: str, tokens: int) -> LayerOnCluster:
    known, experts = CLUSTERS[cluster]
    hidden, ffn = MODELS[model]
    layout = Layout(gpus, ep=gpus)
    work = LayerWorkload(
        tokens, hidden, ffn, False, max(experts, gpus), 1, 2, 0, ep=gpus, workers=levels_of_ep(known, layout)
    )
    return LayerOnCluster(work, describe(known, layout, hidden, ffn))


@cache
def pipeline(cluster: str, gpus: int, model: str, tokens: int, count: int, strategy: str) -> Prediction:
    """Predicts a layer in so many partitions."""
    return candidate(_on(cluster, gpus, model, tokens), count, strategy)


def best(cluster: str, gpus: int, model: str, tokens: int, strategies: tuple[str, ...]) -> tuple[float, int, str]:
    """Returns seconds, partitions and strategy of the fastest."""
    return min(
        (pipeline(cluster, gpus, model, tokens, count, how).seconds, count, how)
        for count in COUNTS
        for how in strategies
    )


REUSE = tuple(name for name in STRATEGIES if name != NONE)


def speedups(over: str) -> list[float]:
    """Returns the speed-ups of MPMoE with the best of S1 to S4 over a baseline: both clusters, all
    models, all B (Fig. 10).
    """
    baseline = {"FastMoE": fastmoe, "FasterMoE": fastermoe}[over]
    return [
        baseline(_on(cluster, gpus, model, tokens)).seconds / best(cluster, gpus, model, tokens, REUSE)[0]
        for cluster, (_, gpus) in CLUSTERS.items()
        for model in MODELS
        for tokens in TOKENS
    ]


def communication(cluster: str, tokens: int, count: int | None = None) -> float:
    """Returns the ms of dispatch and combine of GPT-XL in so many partitions, or as FasterMoE sends them (Fig. 13)."""
    where = cluster, CLUSTERS[cluster][1], "MoE-GPT-XL", tokens
    one = fastermoe(_on(*where)) if count is None else pipeline(*where, count, NONE)
    spans = [span for timeline in one.timelines for span in timeline.spans if span.op.kind in COLLECTIVES]
    return 1e3 * sum(span.end - span.start for span in spans)


def fastest_count(tokens: int) -> int:
    """Returns the fastest number of partitions of GPT-XL without reuse on Adira (Fig. 14)."""
    return best("Adira", 64, "MoE-GPT-XL", tokens, (NONE,))[1]


def better(strategies: tuple[str, ...], others: tuple[str, ...], gpus: int) -> str:
    """Returns which of two kinds of strategies are faster, GPT-XL, B 8K, on Adira (Fig. 15)."""
    times = [best("Adira", gpus, "MoE-GPT-XL", 8 * K, kind)[0] for kind in (strategies, others)]
    return " and ".join(strategies if times[0] < times[1] else others)


def scaling(system: str, nodes: int = 8) -> float:
    """Returns the throughput on so many nodes of Adira over that on one (Fig. 17), mean over models and B."""

    def of(gpus: int, model: str, tokens: int) -> float:
        if system == "MPMoE":
            return best("Adira", gpus, model, tokens, REUSE)[0]
        return fastermoe(_on("Adira", gpus, model, tokens)).seconds

    return fmean(nodes * of(8, model, tokens) / of(8 * nodes, model, tokens) for model in MODELS for tokens in TOKENS)


def saving(count: int, model: str = "MoE-GPT-XL", tokens: int = 16 * K) -> float:
    """Returns phi (eq. 6)."""
    return LayerElements(tokens, *MODELS[model], 64).saving_ratio(count)


def middle_saving(count: int) -> float:
    """Returns the part of phi that is T_M's: H (n - 1) / n of eq. 5."""
    tokens, (hidden, ffn) = 16 * K, MODELS["MoE-GPT-XL"]
    layer = LayerElements(tokens, hidden, ffn, 64)
    return 2 * tokens * ffn * (count - 1) / count / (layer.model_states + 2 * layer.pipelined)


def _communicates(compute_less: float, total_less: float) -> float:
    """Returns the part of seq(n=1) in communication, from what tensor cores took of
    computation and of the whole (Fig. 16).
    """
    compute = total_less / compute_less  # of the time without tensor cores
    return (1 - compute) / (1 - total_less)


PARTS = 6
"""The number of partitions in Fig. 16."""


def in_sequence(model: str, count: int = PARTS) -> tuple[float, float]:
    """Returns the seconds of communication and of computation on Valor, of so many partitions one
    after another (Fig. 16).
    """
    costs = _on("Valor", 16, model, 8 * K).costs_with(holds=1)
    timelines = pipeline("Valor", 16, model, 8 * K, count, NONE).timelines
    ops = [op for timeline in timelines for op in timeline.schedule.ops]
    return tuple(sum(costs(op) for op in ops if op.kind in kinds) for kinds in (COLLECTIVES, OF_EXPERTS))


def of_sequence(model: str) -> float:
    """Returns the part of that time that the fastest of S1 to S4 takes (Fig. 16)."""
    return min(pipeline("Valor", 16, model, 8 * K, PARTS, how).terms[PIPELINE] for how in REUSE) / sum(
        in_sequence(model)
    )


_TWO = (
    "two lanes that hide behind each other give 2 at most, and here they are not equally long; FastMoE without tensor "
    "cores (Fig. 16: 1.3 to 1.35) would bring a part of the rest"
)
_FASTER = (
    "on equal links messages group by group take as long as all-to-alls; what NCCL loses on them is not in our curves: "
    "the seconds of Fig. 13 would change it"
)
NUMBERS: tuple[Published, ...] = (
    *(
        follows(
            f"saved with {count} partitions over 2",
            round(theirs / 23, 3),
            "Fig. 11",
            lambda count=count: saving(count) / saving(2),
            0.1,
            unmet=f"eq. 5 makes it {exact} for every model and B, and so for every mean, T_M alone {middle}: which "
            "tensors shared their buffers when it was measured would change it",
        )
        for count, theirs, exact, middle in ((4, 34, 2, 1.5), (8, 38, 2.5, 1.75))
    ),
    *(
        follows(
            f"saved with {count} partitions over 2, T_M alone",
            round(theirs / 23, 3),
            "Fig. 11",
            lambda count=count: middle_saving(count) / middle_saving(2),
            0.1,
        )
        for count, theirs in ((4, 34), (8, 38))
    ),
    predicted(
        "saved over FastMoE and FasterMoE, at most, B 16K",
        0.53,
        "section V-D",
        lambda: max(saving(8, model) for model in MODELS),
    ),
    *(
        predicted(
            f"{name} over {over}, mean",
            theirs,
            "Fig. 10",
            lambda over=over: fmean(speedups(over)),
            unmet=_TWO if over == "FastMoE" else _FASTER,
        )
        for name, over, theirs in (
            ("MPMoE-pb", "FasterMoE", 1.66),
            ("MPMoE-pm", "FasterMoE", 1.55),
            ("MPMoE-pb", "FastMoE", 2.34),
            ("MPMoE-pm", "FastMoE", 2.20),
        )
    ),
    predicted("over FasterMoE, at most", 2.32, "abstract, Fig. 10", lambda: max(speedups("FasterMoE")), unmet=_FASTER),
    predicted(
        "FasterMoE over FastMoE, by MPMoE over both",
        round(2.34 / 1.66, 3),
        "Fig. 10",
        lambda: fmean(fast / faster for faster, fast in zip(*map(speedups, ("FasterMoE", "FastMoE")), strict=True)),
    ),
    *(
        chosen(
            f"partitions at B = {tokens // K}K, GPT-XL",
            str(count),
            "Fig. 14",
            lambda tokens=tokens: str(fastest_count(tokens)),
            unmet=""
            if count == 8
            else "the described cluster has no cost of a partition but 10 us an op: what more it "
            "takes is measured (the experts' curve of a profile), and moves the borders up",
        )
        for tokens, count in ((4 * K, 2), (16 * K, 4), (32 * K, 8))
    ),
    chosen(
        "partitions as B grows from 1K to 32K, GPT-XL",
        "never fewer",
        "Fig. 14",
        lambda: (
            "never fewer" if (found := [fastest_count(K << power) for power in range(6)]) == sorted(found) else "fewer"
        ),
    ),
    *(
        chosen(
            f"communication on {cluster}, shorter: FasterMoE's or of {count} partitions, B = 16K",
            f"of {count} partitions",
            "Fig. 13",
            lambda cluster=cluster, count=count: (
                f"of {count} partitions"
                if communication(cluster, 16 * K, count) < communication(cluster, 16 * K)
                else "FasterMoE's"
            ),
            unmet="" if count < 8 else "eight times the latency of an all-to-all; " + _FASTER,
        )
        for cluster in CLUSTERS
        for count in COUNTS
    ),
    chosen(
        "better on 8 GPUs",
        "S1 and S2",
        "Fig. 15",
        lambda: better(("S1", "S2"), ("S3", "S4"), 8),
        unmet="T_M over PCIe takes longer than experts at 60 % of the peak: at 44 % S2 is the fastest (with one buffer "
        "for T_M, as in eq. 5, at 17 %)",
    ),
    *(
        chosen(f"better on {gpus} GPUs", "S4", "Fig. 15", lambda gpus=gpus: better(("S4",), ("S2",), gpus), unmet=unmet)
        for gpus, unmet in (
            (32, ""),
            (
                64,
                "S2 takes 1 % less where all-to-alls keep 0.8 of their speed beside copies over PCIe, as is assumed; "
                "at 0.76 S4 would be faster, and Fig. 3 prints no number",
            ),
        )
    ),
    predicted("throughput of MPMoE on 8 nodes over one", 5.76, "Fig. 17", lambda: scaling("MPMoE")),
    predicted("throughput of FasterMoE on 8 nodes over one", 5.4, "Fig. 17", lambda: scaling("FasterMoE")),
    follows("scaling to 8 nodes, %", 72, "Fig. 17", lambda: 100 * 5.76 / 8, 0.5),
    *(
        number
        for model, less, whole, more, by_profile, by_model in (
            ("MoE-BERT-L", 0.58, 0.26, 1.12, 0.70, 0.73),
            ("MoE-GPT-XL", 0.44, 0.23, 1.04, 0.77, 0.78),
        )
        for number in (
            predicted(
                f"{model}: communication in seq(n=1)",
                round(_communicates(less, whole), 3),
                "Fig. 16",
                lambda model=model: in_sequence(model, 1)[0] / sum(in_sequence(model, 1)),
            ),
            predicted(
                f"{model}: seq(n=6) over seq(n=1)",
                more,
                "Fig. 16",
                lambda model=model: sum(in_sequence(model)) / sum(in_sequence(model, 1)),
                0.05,
                unmet=""
                if more < 1.1
                else "six parts of the experts of BERT-L take longer than six times 10 us more: "
                "a measured expert over rows would tell",
            ),
            predicted(
                f"{model}: MPMoE-pb over seq(n=6)",
                by_profile,
                "Fig. 16",
                lambda model=model: of_sequence(model),
                unmet=""
                if model == "MoE-GPT-XL"
                else "86 % of seq(n=1) is communication here, and 75 % by the paper's "
                "percentages: there is less to hide",
            ),
            predicted(f"{model}: MPMoE-pm over seq(n=6)", by_model, "Fig. 16", lambda model=model: of_sequence(model)),
        )
    ),
    *(
        follows(
            f"of the ideal max(comm, comp), {model}",
            0.70,
            "Fig. 16",
            lambda less=less, whole=whole, more=more, hidden=hidden: (
                max(_communicates(less, whole) / (1 + more), 1 - _communicates(less, whole)) / (1 - hidden)
            ),
            0.05,
            unmet=unmet,
        )
        for model, less, whole, more, hidden, unmet in (
            (
                "BERT-L",
                0.58,
                0.26,
                0.12,
                0.30,
                "by its own percentages 95 % of the ideal, if the 12 % more of seq(n=6) are "
                "computation: the seconds of Fig. 16 would tell",
            ),
            ("GPT-XL", 0.44, 0.23, 0.04, 0.23, "77 % by its own percentages; as BERT-L"),
        )
    ),
)


def figures() -> Iterator[str]:
    """Yields tables of Figs. 11 and 13 to 17."""
    yield from head("Fig. 11: saved by eq. 6, mean of three models", *(f"{count} partitions" for count in COUNTS))
    printed = {"printed, B not said": ("23%", "34%", "38%")}
    for tokens in (K, 4 * K, 16 * K, 64 * K):
        means = (fmean(saving(count, model, tokens) for model in MODELS) for count in COUNTS)
        printed[f"B = {tokens // K}K"] = tuple(f"{mean:.0%}" for mean in means)
    yield from (row(name, *cells) for name, cells in printed.items())
    yield ""
    yield from head(
        "Fig. 13: ms of dispatch and combine, GPT-XL, forward and backward",
        "FasterMoE",
        *(f"{n} partitions" for n in COUNTS),
    )
    for cluster in CLUSTERS:
        for tokens in TOKENS:
            times = [f"{communication(cluster, tokens, count):.2f}" for count in (None, *COUNTS)]
            yield row(f"{cluster}, B = {tokens // K}K", *times)
    yield ""
    yield from head(
        "Fig. 14: GPT-XL on Adira, ms without reuse", *(f"{count} partitions" for count in COUNTS), "printed"
    )
    for tokens, fastest in ((4 * K, 2), (8 * K, "2 or 4"), (16 * K, 4), (32 * K, 8)):
        times = (pipeline("Adira", 64, "MoE-GPT-XL", tokens, count, NONE).seconds for count in COUNTS)
        yield row(f"B = {tokens // K}K", *(f"{one * 1e3:.2f}" for one in times), fastest)
    yield ""
    yield from head("Fig. 15: GPT-XL on Adira, B 8K, over no reuse", *REUSE)
    for gpus in (8, 32, 64):
        whole = best("Adira", gpus, "MoE-GPT-XL", 8 * K, (NONE,))[0]
        times = (best("Adira", gpus, "MoE-GPT-XL", 8 * K, (how,))[0] / whole for how in REUSE)
        yield row(f"{gpus} GPUs", *(f"{one:.2f}" for one in times))
    yield ""
    yield from head(
        "Fig. 16: ms on Valor, B 8K",
        "communication, n = 1",
        "computation, n = 1",
        "one after another, n = 6",
        "MPMoE, n = 6",
    )
    for model in ("MoE-BERT-L", "MoE-GPT-XL"):
        whole, parts = in_sequence(model, 1), sum(in_sequence(model))
        yield row(model, *(f"{1e3 * one:.1f}" for one in (*whole, parts, parts * of_sequence(model))))
    yield ""
    yield from head("Fig. 17: throughput over one node", "2 nodes", "4", "8", "printed at 8")
    for system, at_8 in (("MPMoE", 5.76), ("FasterMoE", 5.4)):
        yield row(system, *(f"{scaling(system, nodes):.2f}" for nodes in (2, 4, 8)), at_8)


def scale() -> Iterator[str]:
    """Yields a table of GPT-XL's layer, 8K tokens a GPU, an expert for each EP rank up to 1,024, 200 Gb/s a GPU."""
    yield from head(
        "GPUs", "EP = experts", "FastMoE, ms", "FasterMoE, ms", "Tutel, ms", "mpmoe, ms (partitions)",
        "FastMoE / mpmoe", "gradients over DP, once a step, ms", texts=0,
    )  # fmt: skip
    for gpus in (64, 1024, 8192, 98304):
        ep = min(gpus, 1024)
        layout = Layout(gpus, ep=ep)
        work = LayerWorkload(8 * K, 2048, 8192, False, ep, 1, 2, 16, ep=ep, workers=levels_of_ep(ADIRA, layout))
        on = LayerOnCluster(work, describe(ADIRA, layout, 2048, 8192))
        others = [build(on).seconds for build in (fastmoe, fastermoe, tutel)]
        ours = min((candidate(on, count, NONE) for count in range(1, 9)), key=lambda one: one.seconds)
        cells = (gpus, ep, *(f"{one * 1e3:.2f}" for one in others), f"{ours.seconds * 1e3:.2f} ({ours.parts})",
                 f"{others[0] / ours.seconds:.2f}",
                 f"{1e3 * gradients(2048, 8192, ep, layout, on.cluster):.2f}")  # fmt: skip
        yield row(*cells)
