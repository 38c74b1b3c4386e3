"""NetMoE's numbers (ICLR 2025, as submitted): GPT models with 2 experts and 4 samples a GPU on 16 and 32 A800."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np

from megatron_moe_opt.kernels import place_samples
from megatron_moe_opt.planning.costs.curves import AlphaBeta
from megatron_moe_opt.planning.costs.described_cluster import describe, levels_of_ep
from megatron_moe_opt.planning.costs.known_clusters import GBIT, KNOWN_CLUSTERS, NETMOE_A800, TFLOPS, KnownCluster
from megatron_moe_opt.planning.offline.expert_order import stock_devices
from megatron_moe_opt.planning.predicting.baselines import fastermoe, fastmoe
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.placement_volume import Volume, placement_volume
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.planning.traces.routing_generator import TABLE5, like_table5
from megatron_moe_opt.planning.traces.routing_replay import replay
from megatron_moe_opt.planning.training.throughput import GpuSpeed
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind
from megatron_moe_opt.systems.netmoe import NETMOE
from megatron_moe_opt.topology.layouts import Layout
from tools.markdown_rows import head, row
from tools.papers.at_scale import gradients
from tools.papers.formulas.netmoe import LinkSeconds, placement_seconds
from tools.papers.published import Published, counted, fitted, follows, predicted

TOKENS, TOPK, SAMPLES = 1024, 2, 4
"""Tokens of a sample, experts of a token, and samples of a GPU (Table 3)."""
KNOWN = replace(NETMOE_A800, device=GpuSpeed(156 * TFLOPS, 0.6))
"""The paper's cluster. Volumes of Table 5 are those of fp32; products are taken in TF32 (data sheet of the A100)."""
MOVED = {2: (43.663, 44.455, 42.801, 43.619, 45.688), 4: (72.427, 72.340, 72.693, 72.217, 72.305)}
"""Percent of samples across nodes (Table 5), by nodes, of the models in order."""
MOVED_AT_ALL = {2: (91.394, 91.929, 91.799, 91.681, 92.469), 4: (96.427, 96.122, 96.292, 96.159, 96.391)}
SCATTER = {2: 2.63, 4: 5.34, 8: 10.31, 16: 21.49, 24: 33.82}
KM, PULP = {2: 0.08, 4: 0.48, 8: 1.48, 16: 10.82, 24: 31.09}, {2: 42.8, 4: 50.1, 8: 72.9, 16: 143.7, 24: 266.5}
EXPERTS = {2: 1.06, 4: 1.79, 8: 3.19, 16: 5.82, 24: 7.83}
"""Table 4: ms by samples a GPU, MoE-GPT-S on 16 GPUs."""


def stock_volume(hidden: int, nodes: int) -> tuple[float, float]:
    """Returns the MB between nodes and inside them of one all-to-all of float32 rows where routing is
    uniform, samples at home.
    """
    devices = 8 * nodes
    home = np.repeat(np.arange(devices), SAMPLES)
    tokens = np.full((len(home), devices), TOKENS * TOPK // devices)
    volume = placement_volume(tokens, home, np.arange(devices) // 8)
    return volume.inter * hidden * 4 / 2**20, volume.intra * hidden * 4 / 2**20


NUM = np.array([[1, 0, 2, 1], [1, 1, 1, 1], [0, 1, 1, 2], [3, 1, 0, 0]])
"""Fig. 2: tokens of four samples for four experts, an expert a device, two devices a node."""


def figure_2(*device: int) -> tuple[int, int]:
    """Returns the tokens between nodes, of each of the two, and inside both, with samples on these devices."""
    volume = placement_volume(NUM, np.array(device), np.array([0, 0, 1, 1]))
    return volume.inter // 2, volume.intra


@cache
def generated(model: str, nodes: int) -> dict[str, np.ndarray]:
    """Returns the MB of an all-to-all between nodes, inside them and on their devices, of routing as in a row of Table
    5: with samples at home ("stock") and placed knowing the next layer ("oracle"), over three seeds.
    """
    row = TABLE5[model][nodes]
    sent = {"stock": np.zeros(3), "oracle": np.zeros(3)}
    for seed in range(3):
        trace = like_table5(row, passes=12 // nodes, layers=2, seed=seed, tokens=128)
        device = stock_devices(2, trace.num_experts, row.devices)
        done = replay(trace.counts(), device, np.arange(row.devices) // 8, place_samples)
        for plan, volumes in sent.items():
            volumes += done.volumes[plan].sum(axis=(0, 1))
    return {plan: row.total * volumes / volumes.sum() for plan, volumes in sent.items()}


def less(model: str, nodes: int, side: int) -> float:
    """Returns the percent of the bytes between nodes (0) or inside them (1) that generated
    routing's placement saves.
    """
    volumes = generated(model, nodes)
    return 100 * (1 - volumes["oracle"][side] / volumes["stock"][side])


def _layer(
    hidden: int, nodes: int, samples: int = SAMPLES, known: KnownCluster = KNOWN, element: int = 4
) -> LayerOnCluster:
    layout = Layout(known.node * nodes, ep=known.node * nodes)
    cluster = describe(known, layout, hidden, 4 * hidden, "fp32" if element == 4 else "bf16")
    work = LayerWorkload(
        samples * TOKENS, hidden, 4 * hidden, False, 2 * layout.ep, TOPK, element, 16, ep=layout.ep,
        workers=levels_of_ep(known, layout),
    )  # fmt: skip
    return LayerOnCluster(work, cluster)


def _attention(hidden: int) -> float:
    """Returns the seconds of a layer's attention, forward and backward."""
    return (
        3 * 2 * SAMPLES * TOKENS * hidden * (4 * hidden + TOKENS) / (KNOWN.device.peak_flops * KNOWN.device.efficiency)
    )


@cache
def _placed(model: str, nodes: int, node: int = 8) -> tuple[LayerOnCluster, Prediction]:
    """Returns a layer with samples at home, and what `netmoe` takes with Table 5's saving of bytes between nodes.

    Args:
        node: GPUs of a node.
    """
    row = TABLE5[model][nodes]
    at_home = _layer(row.hidden, nodes, known=replace(KNOWN, node=node))
    placed = LayerOnCluster(replace(at_home.workload, placement_saving=row.reduction), at_home.cluster)
    return at_home, next(one for one in NETMOE.candidates(placed, NETMOE.open_options) if one.variant == "netmoe")


def all_to_all_speedup(model: str, nodes: int) -> float:
    """Returns the speed-up of the all-to-alls alone, as the simulator plays them (Fig. 7)."""
    at_home, ours = _placed(model, nodes)
    before, after = (
        sum(
            span.end - span.start
            for timeline in one.timelines
            for span in timeline.spans
            if span.op.kind in COLLECTIVES
        )
        for one in (fastmoe(at_home), ours)
    )
    return before / after


def link_times(model: str, nodes: int) -> tuple[float, float]:
    """Returns the ms of an all-to-all between nodes and inside them by eq. 1, without latencies: Table
    5's volumes with NetMoE.
    """
    inter, intra = LinkSeconds.of(KNOWN, 8 * nodes, latencies=False)(_with_netmoe(model, nodes))
    return 1e3 * inter, 1e3 * intra


def _with_netmoe(model: str, nodes: int) -> Volume:
    """Returns Table 5's volumes with NetMoE, in bytes."""
    row = TABLE5[model][nodes]
    return Volume(int(row.inter * 2**20), int(row.intra * 2**20), 0)


PROBLEMS, DEVICES = 100, 4
"""The number of `optimal`'s problems, and their devices: one sample a device, two devices a node, an expert a
device, 2,048 tokens a sample.
"""


@cache
def _small_problems() -> list[tuple[int, list[list[Volume]]]]:
    """Returns, for each problem, which of all placements the two stages choose, and both all-to-alls'
    volumes of all placements.
    """
    rng, found = np.random.default_rng(0), []
    devices, node = np.arange(DEVICES), np.arange(DEVICES) // 2
    placements = list(permutations(range(DEVICES)))
    for _ in range(PROBLEMS):
        mixes = rng.dirichlet(np.full(4, 0.3), DEVICES)
        topics = rng.dirichlet(np.full(DEVICES, 0.3), (2, 4))
        combine, dispatch = (rng.multinomial(2048, mixes @ of_layer) for of_layer in topics)
        chosen = tuple(np.asarray(place_samples(combine + dispatch, devices, node)))
        volumes = [[placement_volume(num, np.array(one), node) for num in (combine, dispatch)] for one in placements]
        found.append((placements.index(chosen), volumes))
    return found


def optimal(ratio: float) -> tuple[float, float]:
    """Returns the part of the problems in which the two stages reach eq. 5's optimum, and the most that they are above
    it.

    Args:
        ratio: beta_inter over beta_intra; without latencies.
    """
    links = LinkSeconds(AlphaBeta(0.0, ratio), AlphaBeta(0.0, 1.0))
    above = []
    for chosen, volumes in _small_problems():
        seconds = [placement_seconds(one, links) for one in volumes]
        above.append(seconds[chosen] / min(seconds) - 1)
    return sum(one < 1e-12 for one in above) / PROBLEMS, max(above)


@cache
def speedup(model: str, nodes: int, over: str, node: int = 8) -> float:
    """Returns the speed-up of a transformer layer, with Table 5's saving of bytes between nodes."""
    row = TABLE5[model][nodes]
    at_home, ours = _placed(model, nodes, node)
    theirs = {"FastMoE": fastmoe, "FasterMoE": fastermoe}[over](at_home)
    rest = _attention(row.hidden)
    return (theirs.seconds + rest) / (ours.seconds + rest)


def most(over: str) -> float:
    """Returns the largest speed-up of all models and both numbers of nodes, as the abstract has it."""
    return max(speedup(model, nodes, over) for model, rows in TABLE5.items() for nodes in rows)


def scatter(samples: int, known: KnownCluster = KNOWN, element: int = 4) -> float:
    """Returns the ms of one all-to-all of MoE-GPT-S on 16 GPUs."""
    on = _layer(768, 2, samples, known, element)
    return 1e3 * on.costs.curves[Kind.ALL_TO_ALL, "ep"].seconds(samples * TOKENS * TOPK * 768 * element)


def in_gigabits() -> KnownCluster:
    """Returns the cluster with Table 2's 100 GB/s a node read as 100 Gb/s."""
    return replace(KNOWN, between=replace(KNOWN.between, bandwidth=100 * GBIT))


_BYTES = (
    "4.3 to 4.8 times as long as 100 GB/s a node make it; read as 100 Gb/s, with 16-bit rows, it is 4.7 of 5.34 ms: "
    "the unit of Table 2 would change it"
)
SETTINGS = tuple((model, nodes) for model, rows in TABLE5.items() for nodes in rows)
NUMBERS: tuple[Published, ...] = (
    counted(
        "models and clusters whose links between nodes take longer than those inside, with NetMoE",
        10,
        "Appendix C, eq. 1",
        lambda: sum(inter > intra for inter, intra in (link_times(*one) for one in SETTINGS)),
    ),
    predicted(
        "models and clusters whose all-to-alls gain less than the bytes",
        10,
        "Fig. 7",
        lambda: sum(
            all_to_all_speedup(model, nodes) < 1 / (1 - TABLE5[model][nodes].reduction) for model, nodes in SETTINGS
        ),
        0.0,
    ),
    *(
        follows(
            f"sizes at which {name} takes less than scatter and experts",
            theirs,
            "Table 4",
            lambda times=times: sum(times[samples] < SCATTER[samples] + EXPERTS[samples] for samples in SCATTER),
            0.0,
        )
        for name, times, theirs in (("KM", KM, 5), ("PuLP", PULP, 0))
    ),
    counted("tokens a node sends, samples at home", 5, "Fig. 2(b), page 2", lambda: figure_2(0, 1, 2, 3)[0]),
    counted("tokens a node sends, samples 0 and 3 exchanged", 2, "Fig. 2(c), page 2", lambda: figure_2(3, 1, 2, 0)[0]),
    counted(
        "tokens saved inside a node, a device, samples 0 and 2 exchanged",
        1,
        "Fig. 4, page 7",
        lambda: (figure_2(3, 1, 2, 0)[1] - figure_2(2, 1, 3, 0)[1]) / 2,
    ),
    *(
        predicted(
            f"{model} on {nodes} nodes, MB {'between' if side == 0 else 'inside'} nodes, samples at home",
            theirs,
            "Table 5, page 19",
            lambda hidden=row.hidden, nodes=nodes, side=side: stock_volume(hidden, nodes)[side],
            0.05,
        )
        for model, rows in TABLE5.items()
        for nodes, row in rows.items()
        for side, theirs in enumerate((row.stock_inter, row.stock_intra))
    ),
    *(
        fitted(
            f"{model} on {nodes} nodes, MB {'between' if side == 0 else 'inside'} nodes, with NetMoE",
            theirs,
            "Table 5, page 19",
            lambda model=model, nodes=nodes, side=side: generated(model, nodes)["oracle"][side],
            0.06 * theirs,
        )
        for model, rows in TABLE5.items()
        for nodes, row in rows.items()
        for side, theirs in enumerate((row.inter, row.intra))
    ),
    *(
        fitted(
            f"{model} on {nodes} nodes, % less {'between' if side == 0 else 'inside'} nodes",
            round(100 * (1 - with_it / without), 2),
            "Table 5, page 19",
            lambda model=model, nodes=nodes, side=side: less(model, nodes, side),
            3.0 if side == 0 else 8.0,
        )
        for model, rows in TABLE5.items()
        for nodes, row in rows.items()
        for side, (with_it, without) in enumerate(((row.inter, row.stock_inter), (row.intra, row.stock_intra)))
    ),
    *(
        predicted(
            f"{model} on {nodes} nodes, samples on another {what}, %",
            theirs,
            "Table 5, page 19",
            lambda nodes=nodes, units=units: 100 * (1 - 1 / (nodes * units)),
            0.05,
            unmet=""
            if units > 1 or nodes > 2
            else "chance moves half of the samples; another origin than their own "
            "rank, such as where they were in the layer before, would change what is counted",
        )
        for what, units, shares in (("node", 1, MOVED), ("device", 8, MOVED_AT_ALL))
        for nodes, of_models in shares.items()
        for model, theirs in zip(TABLE5, of_models, strict=True)
    ),
    *(
        predicted(
            f"scatter with {samples} samples a GPU over that with 4",
            round(SCATTER[samples] / SCATTER[4], 3),
            "Table 4, page 9",
            lambda samples=samples: scatter(samples) / scatter(4),
            0.1,
        )
        for samples in SCATTER
        if samples != 4
    ),
    *(
        predicted(
            f"scatter with {samples} samples a GPU, ms",
            theirs,
            "Tables 2 and 4, pages 5 and 9",
            lambda samples=samples: scatter(samples),
            unmet=_BYTES,
        )
        for samples, theirs in SCATTER.items()
    ),
    predicted(
        "scatter with 4 samples a GPU, ms, 100 Gb/s a node, 16-bit rows",
        SCATTER[4],
        "Table 4, page 9",
        lambda: scatter(4, in_gigabits(), 2),
    ),
    predicted("over FastMoE, at most", 1.67, "abstract, Fig. 6, page 10", lambda: most("FastMoE")),
    predicted("over FasterMoE, at most", 1.37, "Fig. 6, page 10", lambda: most("FasterMoE")),
    follows(
        "over FastMoE at most, by Tables 4 and 5, MoE-GPT-S without attention",
        1.67,
        "abstract",
        lambda: (2 * SCATTER[4] + EXPERTS[4]) / (2 * SCATTER[4] * (1 - TABLE5["MoE-GPT-S"][2].reduction) + EXPERTS[4]),
        0.01,
        unmet="two all-to-alls of 5.34 ms of which 39.1 % are saved, and 1.79 ms of experts, give 1.50 at most; "
        "another share of communication in the models of Fig. 6 would change it",
    ),
)


def figures() -> Iterator[str]:
    """Yields a table of Figs. 6 and 7, of a transformer layer and of its all-to-alls."""
    yield from head(
        "Figs. 6 and 7", "nodes", "all-to-alls, by the bytes of Table 5", "as played",
        "time between nodes over inside, eq. 1", "over FastMoE", "over FasterMoE",
    )  # fmt: skip
    for model, rows in TABLE5.items():
        for nodes, of_nodes in rows.items():
            found = (f"{speedup(model, nodes, over):.2f}" for over in ("FastMoE", "FasterMoE"))
            inter, intra = link_times(model, nodes)
            actual = f"{all_to_all_speedup(model, nodes):.2f}", f"{inter / intra:.1f}"
            yield row(model, nodes, f"{1 / (1 - of_nodes.reduction):.2f}", *actual, *found)
    yield ""
    yield from head("Fig. 9: over FastMoE, GPUs", *(f"{nodes} x {node}" for node in (2, 4) for nodes in (2, 4)))
    for model in TABLE5:
        yield row(model, *(f"{speedup(model, nodes, 'FastMoE', node):.2f}" for node in (2, 4) for nodes in (2, 4)))
    yield ""
    yield from head(
        "Eq. 5: two nodes of", "beta between over inside", "t_inter / t_intra, least of Table 5",
        "two stages optimal, small problems", "above the optimum, at most",
    )  # fmt: skip
    for name, known in KNOWN_CLUSTERS.items():
        if known.data_centres > 2 or name == "parm-a":  # more than two nodes, or one
            continue
        gpus = 2 * known.node
        links = LinkSeconds.of(known, gpus)
        least = min(inter / intra for inter, intra in (links(_with_netmoe(model, 2)) for model in TABLE5))
        ratio = links.inter.beta / links.intra.beta
        part, above = optimal(ratio)
        yield row(name, f"{ratio:.2f}", f"{least:.2f}", f"{part:.0%}", f"{above:.0%}")


def scale() -> Iterator[str]:
    """Yields a table of two experts and four samples a GPU, EP over all nodes up to 128; 39 % less
    between nodes, Table 5's mean.
    """
    yield from head(
        "GPUs", "EP", "rows between nodes", "all-to-all, ms", "with 39 % less", "FastMoE's layer over `netmoe`'s",
        "gradients over DP, once a step, ms", texts=0,
    )  # fmt: skip
    for nodes in (4, 128, 1024, 12288):
        ep = 8 * min(nodes, 128)
        layout = Layout(8 * nodes, ep=ep)
        work = LayerWorkload(
            SAMPLES * TOKENS, 1024, 4096, False, 2 * ep, TOPK, 4, 16, ep=ep, workers=levels_of_ep(KNOWN, layout),
            placement_saving=0.39,
        )  # fmt: skip
        on = LayerOnCluster(work, describe(KNOWN, layout, 1024, 4096, "fp32"))
        size = SAMPLES * TOKENS * TOPK * 1024 * 4
        curve = on.costs.curves[Kind.ALL_TO_ALL, "ep"]
        ours = next(one for one in NETMOE.candidates(on, NETMOE.open_options) if one.variant == "netmoe")
        cells = (
            8 * nodes, ep, f"{1 - 8 / ep:.1%}", f"{curve.seconds(size) * 1e3:.2f}",
            f"{curve.seconds(0.61 * size) * 1e3:.2f}", f"{fastmoe(on).seconds / ours.seconds:.2f}",
            f"{1e3 * gradients(1024, 4096, 2 * ep, layout, on.cluster):.2f}",
        )  # fmt: skip
        yield row(*cells)
