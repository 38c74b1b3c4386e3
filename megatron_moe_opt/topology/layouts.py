"""Process groups of a parallel layout, as lists of ranks, and the Megatron-LM flags that make them.

MoNTA (Cluster Expansion, Fig. 12) lays context parallelism (CP) and expert parallelism (EP) over nodes, tensor
parallelism (TP) inside them, in one of two ways:

    vertical    EP and CP run along the same ranks: a group of one kind holds whole groups of the other
    horizontal  EP and CP are orthogonal: an EP group and a CP group share one rank at most

Megatron numbers ranks twice, for attention by (TP, CP, DP, PP) and for experts by (expert-TP, EP, expert-DP, PP), both
in one order. Its default, tp-cp-ep-dp-pp, puts CP next to TP in the first numbering and EP next to expert-TP in the
second: with expert-TP = TP that is the vertical layout, and all that Megatron-LM's scripts can make
(--use-tp-pp-dp-mapping only exchanges DP and PP). The horizontal layout is the order tp-ep-dp-cp-pp, in which the ranks
next to TP are data parallel for attention; `parallel_state.initialize_model_parallel` takes it as its `order`, but no
script passes it on. With more data parallelism than EP, Megatron then numbers an EP x CP block of nodes with gaps (the
rest of DP lies between EP and CP, where Fig. 12 has it outside); `Layout.blocks` says which ranks must be connected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm, prod
from typing import Literal, get_args

from megatron_moe_opt.errors import ConfigurationError

Groups = tuple[tuple[int, ...], ...]
Role = Literal["tp", "cp", "dp", "pp", "expert-tp", "ep", "expert-dp"]
ROLES: tuple[Role, ...] = get_args(Role)
JOINT_ROLES: tuple[Role, ...] = ("expert-tp", "ep")
"""EP and expert-TP together: joint rank = EP rank * expert-TP + expert-TP rank."""
REPLICA_ROLES: tuple[Role, ...] = ("cp", "dp")
"""DP and CP together, whose ranks hold the same dense parameters."""

VERTICAL = "tp-cp-ep-dp-pp"
HORIZONTAL = "tp-ep-dp-cp-pp"
# The orders that Megatron-LM's training scripts can ask for, and the flag that each needs.
SCRIPT_ORDERS = {VERTICAL: (), "tp-cp-ep-pp-dp": ("--use-tp-pp-dp-mapping",)}

_ATTENTION: dict[str, Role] = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
_EXPERTS: dict[str, Role] = {"tp": "expert-tp", "ep": "ep", "dp": "expert-dp", "pp": "pp"}


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions and the order in which Megatron numbers ranks.

    Raises:
        ConfigurationError: sizes and order that `initialize_model_parallel` would refuse.
    """

    world: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    pp: int = 1
    order: str = VERTICAL
    """The dimensions, the one whose ranks are neighbours first."""
    vpp: int = 1
    """Virtual pipeline stages of a rank: parts of the model that its pipeline stage has. No group depends on them."""

    def __post_init__(self) -> None:
        if sorted(self.order.split("-")) != sorted(VERTICAL.split("-")):
            raise ConfigurationError(f"order {self.order} is not one of ranks: name each of {VERTICAL} once")
        for side in ({"tp": self.tp, "cp": self.cp}, {"expert-tp": self.expert_tp, "ep": self.ep}):
            sizes = {**side, "pp": self.pp}
            if min(sizes.values()) < 1 or self.world % prod(sizes.values()):
                product = " x ".join(f"{role} {size}" for role, size in sizes.items())
                raise ConfigurationError(
                    f"{product} does not divide the {self.world} ranks: choose sizes whose product does"
                )
        if self.vpp < 1 or (self.vpp > 1 and self.pp == 1):
            raise ConfigurationError(f"vpp {self.vpp} with pp {self.pp}: virtual stages are of a pipeline; raise pp")
        if self.pp > 1 and (
            self._strides(_ATTENTION)["pp"] != self._strides(_EXPERTS)["pp"]
            or (not self.order.endswith("pp") and self.dp != self.expert_dp)
        ):
            raise ConfigurationError(
                f"order {self.order} with pp {self.pp} needs the same pipeline stages and as much data parallelism for "
                f"attention (dp {self.dp}) as for experts (expert-dp {self.expert_dp}): use an order that ends in pp"
            )

    @property
    def dp(self) -> int:
        """Returns the size of data parallelism for attention: what TP, CP and PP leave of the ranks."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Returns the size of data parallelism for experts: what expert-TP, EP and PP leave of the ranks."""
        return self.world // (self.expert_tp * self.ep * self.pp)

    @property
    def chunks(self) -> int:
        """Returns how many parts the model's layers are cut into: virtual stages of all ranks of a pipeline."""
        return self.pp * self.vpp

    @property
    def least_sequence(self) -> int:
        """Returns the tokens of the shortest sequence that TP and CP cut into equal parts, which cuts multiples of it
        too: CP takes two of its chunks each.
        """
        return self.tp if self.cp == 1 else lcm(self.tp * self.cp, 2 * self.cp)

    def cuts(self, sequence: int) -> bool:
        """Whether TP and CP cut a sequence of so many tokens into equal parts."""
        return sequence % self.least_sequence == 0

    def size(self, role: Role) -> int:
        """Returns how many ranks a group of `role` has."""
        return getattr(self, role.replace("-", "_"))

    def groups(self, *roles: Role, unit: int | None = None) -> Groups:
        """Returns the groups of ranks that differ in these roles alone: each has its ranks in group order, that of the
        first role fastest, and the groups' first ranks ascend.

        Args:
            unit: leaves out every group that is an earlier one, moved by a multiple of so many ranks; None: no group.
        """
        unit = self.world if unit is None else unit
        firsts = [0]
        for role, stride in self._strides_beside(roles[0]).items():
            if role not in roles:
                different = min(self.size(role), unit // gcd(stride, unit))
                firsts = [first + stride * place for place in range(different) for first in firsts]
        kept: dict[int, int] = {}
        for first in firsts:
            kept.setdefault(first % unit, first)
        offsets = self.first_group(*roles)
        return tuple(tuple(first + offset for offset in offsets) for first in kept.values())

    def first_group(self, *roles: Role) -> tuple[int, ...]:
        """Returns the first of `groups`, which rank 0 is in: the others of a large world take long to list."""
        strides = self._strides_beside(roles[0])
        group = (0,)
        for role in roles:
            group = tuple(rank + strides[role] * place for place in range(self.size(role)) for rank in group)
        return group

    @cached_property
    def blocks(self) -> Groups:
        """Returns the blocks of ranks that EP and CP groups together connect. Each needs a switch network of its own at
        least.

        With expert-TP = TP a block is at one TP position of its nodes, and holds cp * ep ranks where CP and EP are
        orthogonal, the larger of both where one lies along the other.
        """
        block_of = list(range(self.world))
        for first, *others in (*self.groups("cp"), *self.groups("ep")):
            merged = {block_of[rank] for rank in others}
            block_of = [block_of[first] if block in merged else block for block in block_of]
        blocks: dict[int, list[int]] = {}
        for rank, block in enumerate(block_of):
            blocks.setdefault(block, []).append(rank)
        return tuple(tuple(ranks) for ranks in blocks.values())

    def flags(self) -> tuple[str, ...]:
        """Returns the arguments of Megatron-LM's training scripts that ask for this layout.

        Raises:
            ConfigurationError: no script can make these groups.
        """
        for order, flags in SCRIPT_ORDERS.items():
            if self._numbers_like(order):
                return (*self._size_flags(), *flags)
        raise ConfigurationError(
            f"order {self.order} cannot be asked for in Megatron-LM's scripts (they align EP with CP): call "
            f"parallel_state.initialize_model_parallel(..., order={self.order!r}), or choose the vertical layout"
        )

    def _size_flags(self) -> tuple[str, ...]:
        sizes = {
            "--tensor-model-parallel-size": self.tp,
            "--context-parallel-size": self.cp,
            "--expert-model-parallel-size": self.ep,
            "--expert-tensor-parallel-size": self.expert_tp,
            "--pipeline-model-parallel-size": self.pp,
        }
        flags = [part for flag, size in sizes.items() for part in (flag, str(size))]
        # Megatron trains MoE layers under TP with sequence parallelism only.
        return (*flags, *(["--sequence-parallel"] if self.tp > 1 else []))

    def _numbers_like(self, order: str) -> bool:
        try:
            other = replace(self, order=order)
        except ConfigurationError:
            return False
        return all(self.groups(role) == other.groups(role) for role in ROLES)

    def _strides_beside(self, role: Role) -> dict[Role, int]:
        """Returns the strides of the numbering that a role is in."""
        return self._strides(_ATTENTION if role in _ATTENTION.values() else _EXPERTS)

    def _strides(self, side: Mapping[str, Role]) -> dict[Role, int]:
        """Returns the distance between neighbours in each dimension of one numbering, ascending."""
        strides: dict[Role, int] = {}
        distance = 1
        for dimension in self.order.split("-"):
            if dimension in side:
                strides[side[dimension]] = distance
                distance *= self.size(side[dimension])
        return strides


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def mixes_expert_gradients(tp: int, ep: int, expert_tp: int) -> bool:
    """Whether Megatron before 0.19 sums experts' gradients over other ranks than those that hold the same experts: with
    EP 1 it takes them for dense weights, which lie as TP cuts them.
    """
    return ep == 1 and expert_tp != tp


def layout_of_run(world: int, ep: int | None, expert_tp: int, **attention: int) -> Layout:
    """Returns the layout that the options of a command ask for on the `world` ranks that run it.

    Args:
        ep: None: as many ranks as expert_tp leaves.
        attention: of tp and cp those that are options of the command.

    Raises:
        ConfigurationError: see layout_of_options.
    """
    sizes = {"--world": world, "--ep": ep or max(1, world // expert_tp), "--expert-tp": expert_tp}
    sizes |= {f"--{name}": size for name, size in attention.items()}
    return layout_of_options(sizes, f"the {world} ranks of this run")


def layout_of_options(sizes: Mapping[str, int], ranks: str) -> Layout:
    """Returns the layout that a command's options ask for: `--world`, and of --tp, --cp, --pp, --ep and --expert-tp
    those that it has; the others are 1.

    Args:
        ranks: what the world is called in a refusal.

    Raises:
        ConfigurationError: the options whose product does not divide the world, and their values.
    """
    world = sizes["--world"]
    for side in (("--tp", "--cp", "--pp"), ("--ep", "--expert-tp", "--pp")):
        of_side = [(flag, sizes[flag]) for flag in side if flag in sizes]
        product = prod(size for _, size in of_side)
        if world % product:
            factors, equals, way_out = " x ".join(f"{flag} {size}" for flag, size in of_side), "", "choose a divisor"
            if len(of_side) > 1:
                equals, way_out = f" = {product}", "choose sizes whose product does"
            raise ConfigurationError(f"{factors}{equals} does not divide {ranks}: {way_out}")
    return Layout(**{flag[2:].replace("-", "_"): size for flag, size in sizes.items()})
