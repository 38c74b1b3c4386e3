"""HybridEP's numbers (arXiv 2510.19470): A800 nodes as data centres, PCIe 3.0 inside, 10 Gb/s between.

Not printed, and assumed for Table V: experts in every other of 12 layers, as in GShard; that all that does not
communicate takes what HybridEP took at 6 MB; that 90 % of the 10 Gb/s are reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from megatron_moe_opt.planning.costs.known_clusters import GB, GBIT, MB
from megatron_moe_opt.planning.predicting.expert_migration import MigrationLayer, least
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.training.known_models import KNOWN_MODELS
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.domains import ExpertDomains
from tools.markdown_rows import head, row
from tools.papers.formulas.hybridep import Stream
from tools.papers.formulas.hybridep_levels import Link, TimedPass, link_curves, predict, stock_seconds
from tools.papers.published import Published, chosen, counted, follows, predicted
from tools.predictions.data_centres import MigrationSettings, Scale
from tools.predictions.data_centres import scale as of_data_centres

TABLE_VII = {
    8: ((56, 24, 8, 0), (0, 8, 24, 56)),
    16: ((240, 112, 48, 16, 0), (0, 16, 48, 112, 240)),
    32: ((992, 480, 224, 96, 32, 0), (0, 32, 96, 224, 480, 992)),
}
"""Numbers of messages, of tokens and of experts, by EP size, for domains of 1, 2, 4, ..."""
TABLE_IV = {
    "Mix-1": (0.049, 8, 4.7, 0.75),
    "Mix-2": (0.049, 8, 2.35, 0.5),
    "AG-only-1": (0.099, 3, 0.094, 0),
    "AG-only-2": (0.099, 3, 0.047, 0),
}
"""Lat_PE in ms, D and P_E in MB, p."""
TABLE_V = {
    "Cluster-M": {6: (2.52, 2.48), 12: (4.26, 2.63), 24: (5.82, 2.74), 48: (7.62, 2.82), 96: (12.65, 3.01),
                  192: (20.35, 3.78)},
    "Cluster-L": {6: (3.74, 3.49), 12: (7.30, 3.53), 24: (10.69, 3.54), 48: (13.54, 3.85), 96: (18.59, 4.24),
                  192: (28.46, 5.20)},
}  # fmt: skip
"""Seconds of an iteration of Tutel and HybridEP, by MB of a GPU's rows."""
OTHERS = {
    "FasterMoE": {"Cluster-M": (2.58, 4.37, 5.90, 7.81, 12.80, 20.82),
                  "Cluster-L": (3.86, 7.50, 11.09, 13.88, 19.32, 29.43)},
    "SmartMoE": {"Cluster-M": (2.59, 4.34, 5.97, 7.80, 12.68, 20.91),
                 "Cluster-L": (3.82, 7.46, 10.94, 14.08, 19.25, 29.53)},
}  # fmt: skip
"""The other systems' times in Table V, in the order of TABLE_V."""
AVERAGE = {"Cluster-M": (1.03, 1.64, 2.15, 2.75, 4.22, 5.47), "Cluster-L": (1.09, 2.10, 3.08, 3.59, 4.49, 5.60)}
"""Speed-ups of Table V over the mean of the three."""
BANDWIDTHS = (0.125, 1.25)
"""GB/s between data centres, a GPU; ours, as all settings of Fig. 17."""
FIG_17 = {"a fixed domain": (1.05, 1.45), "a fixed p": (1.31, 3.76)}
"""Least and most over bandwidths, at 1,000 data centres."""
TABLE_VI = {
    ("Cluster-M", 24, 8): ((2, 2), 3.41, 2.54),
    ("Cluster-L", 24, 8): ((4, 1), 6.12, 3.48),
    ("Cluster-M", 48, 2): ((2, 8), 6.21, 2.81),
    ("Cluster-L", 48, 2): ((4, 8), 10.89, 3.86),
}
"""Domain sizes (section V-D), and seconds of Partition and + Migration, by cluster, MB of rows and MB of an expert.
What else an iteration takes on Cluster-S is not printed.
"""
COMPRESSION = 33.3
"""The compression of one entry in 50 with its place, float32."""
EXPERT_SIZES = (32, 16, 8, 4, 2)
"""Sizes of an expert in MB, of Fig. 13, at 16 MB of rows."""
CENTRES = {"Cluster-S": 1, "Cluster-M": 2, "Cluster-L": 4}
MOE_LAYERS = 6
ETHERNET, PCIE = Link(10 * GBIT * 0.9 / 8, 500e-6), Link(12.5 * GB, 14e-6)
"""The links of one of a data centre's 8 GPUs; the latencies are those of two-data-centres."""


def messages(ranks: int, size: int) -> tuple[int, int]:
    """Returns the messages of tokens and of experts, counted group by group."""
    domains = ExpertDomains((ranks,), (size,))
    groups = domains.all_to_all_groups(0), domains.gather_groups(0)
    tokens, experts = (sum(len(group) * (len(group) - 1) for group in of_kind) for of_kind in groups)
    return tokens, experts


def least_proportion(name: str, bandwidth: float) -> float:
    """Returns 1 - S / G of the domain size that takes least, as Table IV prints p."""
    pre_expert, data, expert, _ = TABLE_IV[name]
    stream = Stream(8, data * MB, expert * MB, bandwidth, pre_expert * 1e-3)
    return 1 - min((1, 2, 4, 8), key=lambda size: stream.seconds((8 - size) / 7)) / 8


def expert_millions(model: str) -> float:
    """Returns the millions of parameters of an expert that travels, of a model of Table II."""
    one = KNOWN_MODELS[f"hybridep-{model.lower()}"]
    return LayerWorkload(1, one.hidden, one.ffn, one.gated, one.experts, 1, 2, 0, ep=32).expert_bytes / 2 / 1e6


@cache
def _communication(
    cluster: str, data: float, expert: float, sizes: tuple[int, ...] | None = None
) -> tuple[float, float, tuple[int, ...]]:
    """Returns seconds of a layer, forward and backward: stock's, those of domains of these sizes, or of the fastest,
    and their sizes. `data` and `expert` are in MB.
    """
    centres = CENTRES[cluster]
    workers = (centres, 8) if centres > 1 else (8,)
    links = [ETHERNET, PCIE] if centres > 1 else [PCIE]
    passes = TimedPass(int(expert * MB)), TimedPass(int(expert * MB), Kind.REDUCE_SCATTER)
    layer = MigrationLayer(1024, int(data * MB / 1024), 1, 1, passes)
    choices = predict(layer, workers, link_curves(workers, links))
    choice = least(choices if sizes is None else [one for one in choices if one.domains.sizes == sizes])
    return stock_seconds(layer, workers, links), choice.seconds, choice.domains.sizes


def iteration(cluster: str, data: int, system: int) -> float:
    """Returns the seconds of an iteration as Table V has them, of Tutel (0) or HybridEP (1)."""
    rest = TABLE_V[cluster][6][1]
    return rest + MOE_LAYERS * _communication(cluster, data, 0.36)[system]


def ablated(cluster: str, data: float, expert: float, ratio: float) -> float:
    """Returns the seconds of an iteration of Table VI, experts compressed by `ratio`."""
    sizes, *_ = TABLE_VI[cluster, data, expert]
    return TABLE_V[cluster][6][1] + MOE_LAYERS * _communication(cluster, data, expert / ratio, sizes)[1]


def by_expert_size(cluster: str, expert: float) -> float:
    """Returns HybridEP's speed-up over Tutel with experts of so many MB that travel whole, 16 MB of rows (Fig. 13)."""
    rest, (stock, ours, _) = TABLE_V[cluster][6][1], _communication(cluster, 16, expert)
    return (rest + MOE_LAYERS * stock) / (rest + MOE_LAYERS * ours)


def domains(cluster: str, data: float, expert: float) -> str:
    """Returns the fastest domains, as "2 x 8"."""
    return " x ".join(map(str, _communication(cluster, data, expert)[2]))


@cache
def simulated(number: int) -> tuple[Scale, ...]:
    """Returns the results of so many data centres as tools/predictions/data_centres.py has them, at BANDWIDTHS: 8,192
    tokens of 1,024, top-4, experts of 8.4 MB, compressed 25-fold, forward alone.
    """
    outer = tuple(Link(rate * GB, 200e-6) for rate in BANDWIDTHS)
    settings = MigrationSettings(
        (number,), outer, (), 8192, 1024, 2048, 4, 1, False, 8192, 0, 2, 312e12 * 0.4, 25.0, 25.0, False, 10, 0.9
    )
    return tuple(of_data_centres(settings, settings.layer(), link, number) for link in outer)


def large_scale(case: str) -> tuple[float, float]:
    """Returns speed-ups over EP at 1,000 data centres, by bandwidth (Fig. 17)."""
    return tuple(one.speedup(one.fixed_domain if "domain" in case else one.fixed_p) for one in simulated(1000))


_TWO_REGIMES = (
    "from 6 to 24 MB the paper's iterations grow two to three times as fast a MB as from 24 to 192 MB, ours evenly: "
    "what batch, length and top-k made the MB would tell"
)
_REVERSED = (
    "the settings are ours, the paper's are not printed; at 1.25 GB/s 200 us a message decide, and a domain of 10 has "
    "a tenth of the messages: the bytes and latencies that Fig. 17 has would change it"
)
_SPEEDUPS = {("Cluster-L", data): _TWO_REGIMES for data in (12, 24)} | {
    (cluster, 192): "HybridEP's iteration grows in the paper and not in ours (above): what grows with the rows beside "
    "communication would tell"
    for cluster in TABLE_V
}
NUMBERS: tuple[Published, ...] = (
    *(
        counted(
            f"{kind}, EP {ranks}, domains of {2**power}",
            theirs,
            "Table VII",
            lambda ranks=ranks, power=power, number=number: messages(ranks, 2**power)[number],
        )
        for ranks, rows in TABLE_VII.items()
        for number, (kind, row) in enumerate(zip(("A2A", "AG"), rows, strict=True))
        for power, theirs in enumerate(row)
    ),
    *(
        counted(f"p of {name}, B in GB/s", p, "Table IV", lambda name=name: least_proportion(name, 128 * GB))
        for name, (_, _, _, p) in TABLE_IV.items()
    ),
    *(
        counted(
            f"p of {name}, B as printed",
            p,
            "Table IV",
            lambda name=name: least_proportion(name, 128 * GBIT),
            unmet=""
            if p == 0
            else "with 128 Gb/s fewer experts hide; the printed p follow from 128 GB/s, or from a "
            "Lat_PE 8 times as long",
        )
        for name, (_, _, _, p) in TABLE_IV.items()
    ),
    *(
        counted(f"P_E of {model}, M", theirs, "Table II", lambda model=model: expert_millions(model), 0.05)
        for model, theirs in (
            ("Llama-Tiny", 2.1),
            ("Mistral-Small", 4.7),
            ("GPT-Medium", 8.4),
            ("GPT-Large", 8.4),
        )
    ),
    *(
        chosen(
            f"domains of {cluster}, 48 MB and 2 MB",
            sizes,
            "section V-D",
            lambda cluster=cluster: domains(cluster, 48, 2),
        )
        for cluster, sizes in (("Cluster-S", "8"), ("Cluster-M", "2 x 8"), ("Cluster-L", "4 x 8"))
    ),
    *(
        chosen(
            f"domains of {cluster}, 24 MB and 8 MB",
            sizes,
            "section V-D",
            lambda cluster=cluster: domains(cluster, 24, 8),
            unmet="" if cluster == "Cluster-L" else "Lat_PE is not printed; what hides experts makes domains larger",
        )
        for cluster, sizes in (("Cluster-S", "4"), ("Cluster-M", "2 x 2"), ("Cluster-L", "4 x 1"))
    ),
    *(
        predicted(
            f"Tutel, {cluster}, {data} MB, s",
            tutel,
            "Table V",
            lambda cluster=cluster, data=data: iteration(cluster, data, 0),
            unmet=_TWO_REGIMES if cluster == "Cluster-L" and data in (12, 24, 48) else "",
        )
        for cluster, times in TABLE_V.items()
        for data, (tutel, _) in times.items()
    ),
    *(
        predicted(
            f"HybridEP, {cluster}, {data} MB, s",
            ours,
            "Table V",
            lambda cluster=cluster, data=data: iteration(cluster, data, 1),
            unmet="our domains hold all experts, and no row moves; what grows in the paper's with the rows beside "
            "communication is not printed"
            if data == 192
            else "",
        )
        for cluster, times in TABLE_V.items()
        for data, (_, ours) in times.items()
        if data > 6
    ),
    *(
        predicted(
            f"{system}, {cluster}, {data} MB, s",
            theirs,
            "Table V",
            lambda cluster=cluster, data=data: iteration(cluster, data, 0),
            unmet=_TWO_REGIMES if cluster == "Cluster-L" and data in (12, 24, 48) else "",
        )
        for system, clusters in OTHERS.items()
        for cluster, times in clusters.items()
        for data, theirs in zip(TABLE_V[cluster], times, strict=True)
    ),
    *(
        number
        for cluster, speedups in AVERAGE.items()
        for data, theirs, faster, smart in zip(
            TABLE_V[cluster], speedups, *(OTHERS[system][cluster] for system in OTHERS), strict=True
        )
        for number in (
            follows(
                f"Avg. Speedup, {cluster}, {data} MB, by the three systems' times",
                theirs,
                "Table V",
                lambda of=TABLE_V[cluster][data], faster=faster, smart=smart: (of[0] + faster + smart) / 3 / of[1],
                0.01,
            ),
            predicted(
                f"Avg. Speedup, {cluster}, {data} MB",
                theirs,
                "Table V",
                lambda cluster=cluster, data=data: iteration(cluster, data, 0) / iteration(cluster, data, 1),
                unmet=_SPEEDUPS.get((cluster, data), ""),
            ),
        )
    ),
    predicted(
        "Tutel's seconds a MB, Cluster-L over Cluster-M",
        round((28.46 - 3.74) / (20.35 - 2.52), 3),
        "Table V",
        lambda: _communication("Cluster-L", 192, 0.36)[0] / _communication("Cluster-M", 192, 0.36)[0],
    ),
    *(
        predicted(
            f"{system}, {cluster}, {data} MB and {expert} MB, s",
            theirs,
            "Table VI",
            lambda key=(cluster, data, expert), ratio=ratio: ablated(*key, ratio),
            unmet="2 MB of 16 or 32 GPUs take 0.03 and 0.1 s a layer at 10 Gb/s, and it would have to be 0.6 and 1.2; "
            "tokens that travel make 6.7 and 9.9 s of the iteration: whether experts travel under Partition would tell"
            if ratio == 1 and expert == 2
            else "",
        )
        for (cluster, data, expert), (_, *times) in TABLE_VI.items()
        for system, ratio, theirs in zip(("Partition", "+ Migration"), (1, COMPRESSION), times, strict=True)
    ),
    *(
        predicted(
            f"over Tutel, experts of 2 to 32 MB, {which}",
            theirs,
            "section V-C, Fig. 13",
            lambda of=of: of(by_expert_size(cluster, size) for cluster in TABLE_V for size in EXPERT_SIZES),
            unmet=unmet,
        )
        for which, theirs, of, unmet in (
            ("least", 1.18, min, ""),
            (
                "most",
                2.57,
                max,
                "at 16 MB of rows Tutel is predicted at 0.7 and 0.8 of what Table V has between 12 and 24 MB: "
                + _TWO_REGIMES,
            ),
        )
    ),
    *(
        predicted(
            f"at 1,000 data centres, {case}, {which}",
            theirs,
            "abstract, Fig. 17" if theirs == 1.45 else "section V-G, Fig. 17",
            lambda case=case, of=of: of(large_scale(case)),
            unmet=_REVERSED if case == "a fixed domain" else "",
        )
        for case, (least_one, most_one) in FIG_17.items()
        for which, theirs, of in (("least", least_one, min), ("most", most_one, max))
    ),
    *(
        chosen(
            f"the greater speed-up at 1,000 data centres, {case}",
            "at the lower bandwidth",
            "section V-G",
            lambda case=case: f"at the {('lower', 'higher')[large_scale(case)[1] > large_scale(case)[0]]} bandwidth",
            unmet=_REVERSED,
        )
        for case in FIG_17
    ),
    follows("speed-up at most, over the slowest of three", 5.68, "introduction, Table V", lambda: 29.53 / 5.20, 0.01),
    follows(
        "speed-up at most, mean of three", 5.60, "abstract, Table V", lambda: (28.46 + 29.43 + 29.53) / 3 / 5.20, 0.01
    ),
    follows("+ Migration, least", 1.25, "section V-D, Table VI", lambda: 0.76 / 0.61, 0.01),
    follows("+ Migration, most", 2.82, "section V-D, Table VI", lambda: 10.89 / 3.86, 0.01),
)


def figures() -> Iterator[str]:
    """Yields tables of Fig. 12, of the cases of Table IV with B in GB/s; Fig. 13; Fig. 16, for sizes of ours."""
    sizes = (1, 2, 4, 8)
    yield from head("Fig. 12: us of a pass, domains of", *map(str, sizes), "least, as printed")
    for name, (pre_expert, data, expert, printed) in TABLE_IV.items():
        stream = Stream(8, data * MB, expert * MB, 128 * GB, pre_expert * 1e-3)
        times = (f"{stream.seconds((8 - size) / 7) * 1e6:.1f}" for size in sizes)
        yield row(name, *times, round(8 * (1 - printed)))
    yield ""
    yield from head("Fig. 13: over Tutel, 16 MB of rows, experts of", *(f"{size} MB" for size in EXPERT_SIZES))
    for cluster in TABLE_V:
        cells = (f"{by_expert_size(cluster, size):.2f} ({domains(cluster, 16, size)})" for size in EXPERT_SIZES)
        yield row(cluster, *cells)
    yield ""
    numbers = (1024, 4096, 16384, 65536)
    yield from head(
        "Fig. 16: MB that a GPU sends in a forward pass, H 1024, M 4096, top-2", *(f"{n} tokens" for n in numbers)
    )
    for ranks in (8, 32):
        rows = [2 * (ranks - 1) / ranks * tokens * 2 * 1024 * 2 / MB for tokens in numbers]
        experts = [(ranks - 1) * 2 * 1024 * 4096 * 2 / MB / ratio for ratio in (1, 25)]
        yield row(f"EP {ranks}, tokens", *(f"{one:.0f}" for one in rows))
        yield row(f"EP {ranks}, experts", *[f"{experts[0]:.0f}"] * len(numbers))
        yield row(f"EP {ranks}, experts, one entry in 50", *[f"{experts[1]:.0f}"] * len(numbers))


def scale() -> Iterator[str]:
    """Yields a table of `simulated`, with domains of 10, p near 0.9, and the fastest domains."""
    yield from head(
        "data centres", "GB/s between, a GPU", "domains of 10", "p near 0.9", "least time (domain)", texts=0
    )  # fmt: skip
    for of_link in range(len(BANDWIDTHS)):
        for number in (10, 100, 1000):
            one = simulated(number)[of_link]
            least_domain = one.least.domains.sizes[0]
            cells = (
                number, f"{BANDWIDTHS[of_link]:g}", f"{one.speedup(one.fixed_domain):.2f}",
                f"{one.speedup(one.fixed_p):.2f}", f"{one.speedup(one.least):.2f} ({least_domain})",
            )  # fmt: skip
            yield row(*cells)
