"""What netmoe's moves saved, layer by layer: one of the reports of a training loop (reports.py)."""

from __future__ import annotations

import weakref

from megatron_moe_opt.dispatchers.netmoe import NetmoeDispatcher

PREFIX = "netmoe"

_layers: weakref.WeakKeyDictionary[NetmoeDispatcher, int] = weakref.WeakKeyDictionary()
"""The numbers of the MoE layers that move samples."""


def watch(dispatcher: NetmoeDispatcher, layer_number: int) -> None:
    """Reports this layer from now on."""
    _layers[dispatcher] = layer_number


def take() -> dict[int, dict[str, float]]:
    """By layer number, what the training passes since the last time sent in this rank's EP groups."""
    return {number: means for dispatcher, number in _layers.items() if (means := dispatcher.take_traffic())}


def lines(values: dict[int, dict[str, float]]) -> list[str]:
    """One for each layer."""
    return [_line(number, of_layer) for number, of_layer in values.items()]


def _line(number: int, values: dict[str, float]) -> str:
    def change(link: str) -> str:
        before, after = values[f"stock {link} MB"], values[f"{link} MB"]
        percent = f" ({100 * (after / before - 1):+.1f} %)" if before else ""
        return f"{link} {before:.3f} -> {after:.3f} MB{percent}"

    return (
        f"netmoe: layer {number}: {change('inter-node')}, {change('intra-node')} a forward pass; moved "
        f"{values['moved across nodes %']:.1f} % of the samples across nodes, {values['moved across devices %']:.1f} % "
        f"across devices; solved in {values['solve ms']:.3f} ms, waited for {values['exposed ms']:.3f} ms of it"
    )
