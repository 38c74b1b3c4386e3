"""Which rank holds which experts, and the file that says so.

Stock Megatron gives rank r of an expert-parallel group of J the experts [r n, (r + 1) n), n = E / J. Another order puts
those together that the same samples use, so that NetMoE has a good place for every sample. A slot is a place for an
expert: rank r has the slots [r n, (r + 1) n). Experts keep their names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import write_text_whole
from megatron_moe_opt.planning.json_places import JsonPlace

FORMAT = "moe-opt expert order"
VERSION = 1


@dataclass(frozen=True)
class ExpertOrder:
    """An order of the experts of every MoE layer."""

    num_experts: int
    nodes: int
    """The number of nodes, of equally many ranks, that the order was made for; what it means does not depend on it."""
    ranks: int
    layers: dict[int, tuple[int, ...]]
    """The expert in each slot of a layer, by Megatron's number of the layer."""

    @classmethod
    def of_devices(cls, expert_device: np.ndarray, layers: np.ndarray, nodes: int, ranks: int) -> ExpertOrder:
        """Returns the order that puts experts on these devices, integers [L, E]; on a rank, experts are in the order of
        their numbers.

        Args:
            layers: integers [L], Megatron's numbers.
        """
        slots = np.argsort(expert_device, axis=1, kind="stable")
        orders = {int(layer): tuple(row) for layer, row in zip(layers, slots.tolist(), strict=True)}
        return cls(expert_device.shape[1], nodes, ranks, orders)

    def expert_device(self, layers: np.ndarray) -> np.ndarray:
        """Returns the rank of each expert in these layers, int64 [L, E]; the order must have all of them."""
        slots = np.argsort(np.array([self.layers[int(layer)] for layer in layers]), axis=1)
        return slots // (self.num_experts // self.ranks)


def stock_devices(num_layers: int, num_experts: int, ranks: int) -> np.ndarray:
    """Returns the rank of each expert in stock Megatron, int64 [L, E]."""
    return np.tile(np.arange(num_experts) * ranks // num_experts, (num_layers, 1))


def write_expert_order(path: Path, order: ExpertOrder) -> None:
    """Writes the order to a file for --moe-opt-expert-order.

    Raises:
        ConfigurationError: it cannot be written.
    """
    local = order.num_experts // order.ranks
    head = {"format": FORMAT, "version": VERSION}
    head |= {"num_experts": order.num_experts, "nodes": order.nodes, "ranks": order.ranks}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    layers = [
        f'    "{layer}": {json.dumps([slots[first : first + local] for first in range(0, len(slots), local)])}'
        for layer, slots in order.layers.items()
    ]
    lines.append('  "layers": {\n' + ",\n".join(layers) + "\n  }")
    write_text_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_expert_order(path: Path) -> ExpertOrder:
    """Reads the file, and checks all of it.

    Raises:
        ConfigurationError: file, line and what is wrong.
    """
    root = JsonPlace.root(path)
    root.check_format(FORMAT, VERSION, "moe-opt trace place", "order the experts")
    fields = root.fields("format", "version", "num_experts", "nodes", "ranks", "layers")
    experts, nodes, ranks = (fields[name].count(least=1) for name in ("num_experts", "nodes", "ranks"))
    if experts % ranks or ranks % nodes:
        fields["ranks"].refuse(f"{experts} experts, {ranks} ranks and {nodes} nodes do not divide one another")
    layers: dict[int, tuple[int, ...]] = {}
    for number, place in fields["layers"].by_number().items():
        slots = [slot.count() for rank in place.items(ranks) for slot in rank.items(experts // ranks)]
        if sorted(slots) != list(range(experts)):
            place.refuse(f"not each of the experts 0 to {experts - 1} once")
        layers[number] = tuple(slots)
    if not layers:
        fields["layers"].refuse("no layer")
    return ExpertOrder(experts, nodes, ranks, layers)


def order_of_layer(order: ExpertOrder, path: Path, layer: int) -> tuple[int, ...]:
    """Returns the expert in each slot of a layer.

    Args:
        path: where the order is from.

    Raises:
        ConfigurationError: it has no such layer.
    """
    if layer not in order.layers:
        raise ConfigurationError(
            f"{path} has no order for MoE layer {layer}, only for {', '.join(map(str, order.layers))}: plan it from a "
            "trace of this model"
        )
    return order.layers[layer]
