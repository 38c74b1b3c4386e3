"""What was observed of the MoE layers since the last report, agreed on by the ranks that share a layer, and its lines.

Times are means over observed passes and over the ranks of the layer's EP x expert-TP group; bytes are what all of these
ranks send together in a pass; imbalance is the most loaded over the mean, pass by pass, and then the mean over passes.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_moe_opt.integration.observe.telemetry import LayerRecord, take_records
from megatron_moe_opt.runtime.engine.collectives import device_of
from megatron_moe_opt.runtime.observed.layer_pass import Direction, Times
from megatron_moe_opt.topology.group_cache import nodes_of

PREFIX = "moe-opt"
"""What names in TensorBoard and W&B begin with."""
STAGES = Times._fields
LINKS = ("inter-node", "intra-node")
ERRORS = ("dispatch error", "combine error")
WORST = 3
"""The layers that the log shows, besides the mean of all; where there is one layer more, it shows all."""

Values = dict[int, dict[str, float]]
"""Reported values by layer number, and then by name."""


def take() -> Values:
    """Returns, by layer number, what the passes since the last time were like. Collective over the layers' groups."""
    by_group: dict[ProcessGroup, list[LayerRecord]] = {}
    for record in take_records():
        by_group.setdefault(record.group, []).append(record)
    values: Values = {}
    for group, records in by_group.items():
        records[0].clock.settle()
        observed = [_Observed(record, group) for record in records]
        own = torch.cat([one.own() for one in observed])
        dist.all_reduce(own, group=group)
        # host synchronisation: at the logging interval
        parts = own.cpu().split([one.size for one in observed])
        values |= {one.record.number: one.values(part) for one, part in zip(observed, parts, strict=True)}
    return values


class _Observed:
    """The passes of one layer, as numbers of this rank that are to be added to those of the others.

    In this order: forward and backward, each the passes, those whose bytes are known, the sums of their times, and
    bytes by link; the squares of what rounding on the wire has lost, and of the rows, to the experts and back; the rows
    of every rank in every pass, zeros but for this rank's own; the tokens of every expert in every pass.
    """

    def __init__(self, record: LayerRecord, group: ProcessGroup) -> None:
        self.record, self.group = record, group
        self.first, self.again = record.first.take(), record.again.take()

    @property
    def size(self) -> int:
        """Returns how many numbers `own` returns: the same on every rank of the group."""
        return 2 * _DIRECTION + _ROUNDING + len(self.first) * (self.group.size() + self.record.num_experts)

    def own(self) -> torch.Tensor:
        """Returns this rank's numbers, float64 [size], on the device of the group's collectives."""
        forward = [(one.forward,) for one in self.first]
        backward = [(one.backward,) for one in self.first] + [(one.forward, one.backward) for one in self.again]
        rows = torch.zeros(len(self.first), self.group.size(), dtype=torch.float64)
        rows[:, self.group.rank()] = torch.tensor([one.rows for one in self.first], dtype=torch.float64)
        tokens = [one.tokens_of_experts.double() for one in self.first]
        noted = [torch.cat(one.rounding) for one in self.first if one.rounding]  # on the layer's device
        rounding = torch.stack(noted).sum(0) if noted else torch.zeros(_ROUNDING, dtype=torch.float64)
        parts = [self._sums(forward), self._sums(backward), rounding, rows.view(-1), *tokens]
        return torch.cat([part.to(device_of(self.group)) for part in parts])

    def _sums(self, passes: list[tuple[Direction, ...]]) -> torch.Tensor:
        """Returns the sums of the passes, [_DIRECTION]; a pass that recomputes is the sum of its directions."""
        sums = torch.zeros(_DIRECTION, dtype=torch.float64)
        nodes, own = nodes_of(self.group), self.group.rank()
        number = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(self.group))}
        for directions in passes:
            times = [direction.times(self.record.clock) for direction in directions]
            if None in times:
                continue  # did not come to its end
            sums[0] += 1
            sums[1] += all(direction.is_counted for direction in directions)
            for direction, of_stages in zip(directions, times, strict=True):
                sums[2 : 2 + len(STAGES)] += torch.tensor(of_stages, dtype=torch.float64)
                for rank, num_bytes in direction.sent.by_peer.items():
                    sums[-1 if nodes.same_node(own, number[rank]) else -2] += num_bytes
        return sums

    def values(self, sums: torch.Tensor) -> dict[str, float]:
        """Returns what the log and its writers get, by name.

        Args:
            sums: [size] of `own` over the ranks of the group.
        """
        ranks, passes = self.group.size(), len(self.first)
        forward, backward, rounding, rows, tokens = sums.split(
            [_DIRECTION, _DIRECTION, _ROUNDING, passes * ranks, passes * self.record.num_experts]
        )
        return (
            {"passes": float(passes)}
            | _means("", forward.tolist(), ranks)
            | _means("backward ", backward.tolist(), ranks)
            | _errors(rounding.tolist())
            | {"expert imbalance": _imbalance(tokens, passes), "rank imbalance": _imbalance(rows, passes)}
        )


_DIRECTION = 2 + len(STAGES) + len(LINKS)
_ROUNDING = 4


def _means(prefix: str, sums: list[float], ranks: int) -> dict[str, float]:
    """Returns means by name: no times where no pass came to its end, and no bytes where they are not known."""
    (count, counted), times, sent = sums[:2], sums[2 : 2 + len(STAGES)], sums[2 + len(STAGES) :]
    means = {}
    if count:
        means |= {f"{prefix}{name} ms": 1e3 * value / count for name, value in zip(STAGES, times, strict=True)}
    if counted:
        scale = ranks / counted / 1e6
        means |= {f"{prefix}{link} MB": value * scale for link, value in zip(LINKS, sent, strict=True)}
    return means


def _errors(squares: list[float]) -> dict[str, float]:
    """Returns the relative norms of what rounding rows on the wire loses; empty where no rows were narrowed."""
    lost_out, tokens, lost_back, outputs = squares
    pairs = zip(ERRORS, ((lost_out, tokens), (lost_back, outputs)), strict=True)
    return {name: (lost / whole) ** 0.5 for name, (lost, whole) in pairs if whole}


def _imbalance(loads: torch.Tensor, passes: int) -> float:
    """Returns the mean over passes of greatest over mean load; 1 without passes, or where nobody has any load."""
    if not passes:
        return 1.0
    loads = loads.view(passes, -1)
    return (loads.amax(1) / loads.mean(1)).nan_to_num(1.0).mean().item()


def lines(values: Values) -> list[str]:
    """Returns a table as lines: the mean of all layers, and those with the most exposed communication."""
    if not values:
        return []
    worst = sorted(values, key=lambda number: -_both(values[number], "exposed ms"))
    shown = worst[: WORST + (len(worst) == WORST + 1)]
    names = dict.fromkeys(name for of_layer in values.values() for name in of_layer)
    mean = {name: _mean_of(values.values(), name) for name in names}
    passes = f"{mean['passes']:.0f} observed pass{'es' * (round(mean['passes']) != 1)}"
    title = f"telemetry: {len(values)} MoE layer{'s' * (len(values) > 1)}, means of {passes}, forward + backward"
    if len(shown) < len(values):
        title += f"; the {WORST} with most exposed communication"
    rows = [_HEAD] + [_row(f"layer {number}", values[number]) for number in shown] + [_row("all", mean)]
    if any(name in mean for name in ERRORS):
        errors = [_errors_of(values[number]) for number in shown] + [_errors_of(mean)]
        rows = [[*row, cell] for row, cell in zip(rows, ["rounded off", *errors], strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [title] + ["telemetry: " + _align(row, widths) for row in rows]


_HEAD = ["", *(f"{name} ms" for name in STAGES), "exposed", *(f"{link} MB" for link in LINKS), "imbalance: experts"]
_HEAD += ["ranks"]


def _row(name: str, values: dict[str, float]) -> list[str]:
    both = functools.partial(_directions, values)
    share = _both(values, "exposed ms") / (_both(values, "layer ms") or 1.0)
    return [
        name,
        *(both(f"{stage} ms", ".2f") for stage in STAGES),
        f"{share:.0%}",
        *(both(f"{link} MB", ".3f") for link in LINKS),
        f"{values['expert imbalance']:.2f}",
        f"{values['rank imbalance']:.2f}",
    ]


def _errors_of(values: dict[str, float]) -> str:
    return " + ".join(f"{values[name]:.1e}" if name in values else "-" for name in ERRORS)


def _align(row: list[str], widths: list[int]) -> str:
    first, *rest = (cell.ljust(width) if not place else cell.rjust(width)
                    for place, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
    return "  ".join([first, *rest])


def _directions(values: dict[str, float], name: str, form: str) -> str:
    return " + ".join(f"{values[key]:{form}}" if key in values else "-" for key in (name, f"backward {name}"))


def _both(values: dict[str, float], name: str) -> float:
    return values.get(name, 0.0) + values.get(f"backward {name}", 0.0)


def _mean_of(layers: Any, name: str) -> float:
    return statistics.fmean(values[name] for values in layers if name in values)
