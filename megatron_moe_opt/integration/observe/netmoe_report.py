"""What netmoe's moves saved, layer by layer: one of the reports of a training loop (reports.py)."""

from __future__ import annotations

import weakref

from megatron_moe_opt.dispatchers.netmoe import NetmoeDispatcher

PREFIX = "netmoe"

_layers: weakref.WeakKeyDictionary[NetmoeDispatcher, int] = weakref.WeakKeyDictionary()
"""The numbers of the MoE layers that move samples."""


def watch(dispatcher: NetmoeDispatcher, layer_number: int) -> None:
    """Begins to report this layer."""
    _layers[dispatcher] = layer_number


def take() -> dict[int, dict[str, float]]:
    """Returns, by layer number, what the training passes since the last time sent in this rank's EP groups."""
    return {number: means for dispatcher, number in _layers.items() if (means := dispatcher.take_traffic())}


def lines(values: dict[int, dict[str, float]]) -> list[str]:
    """Returns a line on all layers together, and one more where placement sends more between nodes than stock."""
    if not values:
        return []
    total = {name: sum(of_layer[name] for of_layer in values.values()) for name in next(iter(values.values()))}

    def change(link: str) -> str:
        before, after = total[f"stock {link} MB"], total[f"{link} MB"]
        percent = f" ({100 * (after / before - 1):+.1f} %)" if before else ""
        return f"{link} {before:.3f} -> {after:.3f} MB{percent}"

    said = [
        f"netmoe: {len(values)} layer(s): {change('inter-node')}, {change('intra-node')} a forward pass; moved "
        f"{total['moved across nodes %'] / len(values):.1f} % of the samples across nodes, "
        f"{total['moved across devices %'] / len(values):.1f} % across devices; solved in {total['solve ms']:.3f} ms, "
        f"waited for {total['exposed ms']:.3f} ms of it"
    ]
    if total["inter-node MB"] > total["stock inter-node MB"]:
        said.append(
            "netmoe: warning: placement adds traffic between nodes, as samples that use the same experts everywhere "
            "make it do: `moe-opt trace replay` tells from a routing trace what to expect; monta moves no samples"
        )
    return said
