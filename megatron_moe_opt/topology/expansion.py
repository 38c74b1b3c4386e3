"""Which layout a cluster gets for a model and a context length (MoNTA, Cluster Expansion)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.layouts import HORIZONTAL, VERTICAL, Layout


@dataclass(frozen=True)
class Machines:
    """A cluster of equal nodes."""

    nodes: int
    gpus_per_node: int
    switch_ranks: int | None = None
    """Ranks of one TP position (with TP over a whole node: nodes) that one switch network connects; None: all."""

    @property
    def world(self) -> int:
        """How many ranks the whole cluster has, one a GPU."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class MoeModel:
    """The sizes of a model that parallel sizes must divide."""

    experts: int
    attention_heads: int
    expert_ffn_hidden: int
    layers: int


@dataclass(frozen=True)
class Expansion:
    """The layouts that fit, and the paper's choice among them."""

    horizontal: Layout | None
    vertical: Layout | None
    chosen: Layout
    reason: str

    @property
    def direction(self) -> str:
        """Returns how CP lies to EP in the chosen layout, in the paper's word: horizontal or vertical."""
        return "horizontal" if self.chosen.order == HORIZONTAL else "vertical"

    @property
    def network(self) -> int:
        """Returns how many ranks of one TP position a switch network has to connect for the chosen layout."""
        return (
            self.chosen.cp * self.chosen.ep if self.direction == "horizontal" else max(self.chosen.cp, self.chosen.ep)
        )


def expand(
    machines: Machines,
    model: MoeModel,
    context: int,
    held_context: int,
    *,
    tp: int | None = None,
    ep: int | None = None,
    pp: int = 1,
) -> Expansion:
    """Returns the layouts that fit a cluster for a model and a context length, and which of them the paper's rule
    chooses. TP, and expert-TP as much, lie inside the node, CP and EP over nodes.

    CP is the least size with which a TP group can hold its part of the context, and into which Megatron can cut the
    context. The rule then chooses: cp < ep is horizontal if there are cp * ep TP groups for it and the switch network
    connects them; everything else is vertical.

    Args:
        machines: the cluster.
        model: the model.
        context: tokens of a sequence.
        held_context: tokens of a sequence that one TP group can hold.
        tp: None is all GPUs of a node.
        ep: None is as many as divide both the experts and the ranks that TP and PP leave.
        pp: pipeline stages.

    Raises:
        ConfigurationError: sizes that do not divide what they must, a context below 1, or no context parallelism that
            fits.
    """
    for name, number in (("context", context), ("held_context", held_context)):
        if number < 1:
            raise ConfigurationError(f"{name} {number} is not a number of tokens: give at least 1")
    tp = machines.gpus_per_node if tp is None else tp
    _check_divides("--tensor-model-parallel-size", tp, "GPUs a node", machines.gpus_per_node)
    _check_divides("--tensor-model-parallel-size", tp, "attention heads", model.attention_heads)
    _check_divides("--expert-tensor-parallel-size", tp, "hidden units of an expert", model.expert_ffn_hidden)
    _check_divides("--pipeline-model-parallel-size", pp, "layers", model.layers)
    _check_divides("--pipeline-model-parallel-size", pp, "TP groups", machines.world // tp)
    positions = machines.world // (tp * pp)  # of one stage: TP groups
    ep = gcd(model.experts, positions) if ep is None else ep
    _check_divides("--expert-model-parallel-size", ep, "experts", model.experts)
    _check_divides("--expert-model-parallel-size", ep, "TP groups of a pipeline stage", positions)
    needed = -(-context // held_context)
    for cp in range(needed, positions + 1):
        if positions % cp == 0 and (cp == 1 or context % (2 * cp) == 0):
            expansion = choose(Layout(machines.world, tp, cp, ep, tp, pp), machines.switch_ranks)
            if expansion is not None:
                return expansion
    raise ConfigurationError(
        f"a context of {context} tokens, {held_context} of them on a TP group, needs --context-parallel-size {needed} "
        f"or more, and none fits {positions} TP groups of a pipeline stage with --expert-model-parallel-size {ep} "
        "(twice the size must divide the context, the size the TP groups, and it or EP the other): add nodes or "
        "shorten the context"
    )


def choose(sizes: Layout, switch_ranks: int | None = None) -> Expansion | None:
    """Returns the paper's choice for a layout of these sizes, with expert-TP as large as TP; None: neither fits.

    Args:
        sizes: whose order does not matter.
        switch_ranks: as Machines has it.
    """
    cp, ep = sizes.cp, sizes.ep
    horizontal = _with_order(sizes, HORIZONTAL) if sizes.dp % ep == 0 else None
    vertical = _with_order(sizes, VERTICAL) if cp % ep == 0 or ep % cp == 0 else None
    connected = switch_ranks is None or cp * ep <= switch_ranks
    if cp < ep and horizontal and connected:
        return Expansion(horizontal, vertical, horizontal, f"cp {cp} < ep {ep}, and the switch network allows cp x ep")
    if vertical is None:
        return None
    if cp >= ep:
        reason = f"cp {cp} >= ep {ep}"
    elif horizontal is None:
        reason = f"cp {cp} < ep {ep}, but there are no cp x ep = {cp * ep} TP groups for a horizontal layout"
    else:
        reason = f"cp {cp} < ep {ep}, but the switch network connects {switch_ranks} ranks, not cp x ep"
    return Expansion(horizontal, vertical, vertical, reason)


def _with_order(sizes: Layout, order: str) -> Layout:
    return Layout(sizes.world, sizes.tp, sizes.cp, sizes.ep, sizes.expert_tp, sizes.pp, order)


def _check_divides(flag: str, size: int, what: str, total: int) -> None:
    if size < 1 or total % size:
        raise ConfigurationError(f"{flag} {size} does not divide the {total} {what}: choose a divisor of {total}")
