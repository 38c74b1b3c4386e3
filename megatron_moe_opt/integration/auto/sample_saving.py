"""The traffic that `netmoe` would keep inside nodes on the routing of one step, replayed sample by sample, and whether
`auto` tries it for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.integration.layer.netmoe_layer import balances_ranks
from megatron_moe_opt.integration.layer.replicated_tokens import drawn_by_routers, holds_replicated_tokens
from megatron_moe_opt.integration.micro_batches import trains
from megatron_moe_opt.kernels import place_samples
from megatron_moe_opt.planning.choosing.trials import NEAR
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, Prediction, Refusal
from megatron_moe_opt.planning.traces.routing_replay import decided_share, replay
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing
from megatron_moe_opt.systems import moves_samples
from megatron_moe_opt.systems.megatron_config import quantization, repeats_moe_layers
from megatron_moe_opt.systems.netmoe import NETMOE
from megatron_moe_opt.systems.system import FLAG
from megatron_moe_opt.topology.agreement import known_to_all
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.sample_holders import SampleHolders

MOST_PASSES, MOST_LAYERS = 8, 8
"""The most passes of a step, and layers of those that run in one go, that are replayed, which takes about a second."""


class SampleRouting:
    """How many tokens of each sample a MoE layer's router sends to each expert, in the first passes."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.samples = 0
        """The largest number of samples that a pass had."""
        self.is_repeated = False
        """Whether passes were run again for their backward pass."""
        self._passes: list[torch.Tensor] = []
        self._handle = layer.router.register_forward_hook(self._hear, prepend=True)

    def take(self) -> np.ndarray:
        """Returns this rank's tokens of each sample for each expert, integers [P, B, E], and listens no more; empty
        where passes are unlike.
        """
        self._handle.remove()
        passes, self._passes = self._passes, []
        if len({one.shape for one in passes}) != 1:
            return np.zeros((0, 0, 0), np.int64)
        return torch.stack(passes).cpu().numpy()  # host synchronisation: after a step that is planned by

    def _hear(self, router: Any, inputs: tuple[Any, ...], outputs: tuple[Any, torch.Tensor]) -> None:
        if not trains(router):
            return
        tokens, samples = inputs[0].shape[:2]
        self.samples = max(self.samples, samples)
        if is_recomputing():
            self.is_repeated = True
        elif len(self._passes) < MOST_PASSES:
            self._passes.append(outputs[1].view(tokens, samples, -1).sum(0))


def keeps_home(config: Any, routing: Sequence[SampleRouting]) -> str | None:
    """Returns why samples would not train elsewhere as they do at home, though `netmoe` runs here; None: they would.

    Args:
        routing: of each layer of this rank, in a step under another dispatcher.
    """
    if holds_replicated_tokens(config):
        return "TP without --sequence-parallel has not been tried with dispatchers that take turns"
    if config.attention_dropout > 0:
        return f"--attention-dropout {config.attention_dropout:g} draws masks on the rank that has a sample"
    if (drawn := drawn_by_routers(config)) is not None:
        return f"{drawn} draws numbers on the rank that has a sample"
    if (scaled := _scaled_together(config)) is not None:
        return f"{scaled} scales a tensor by the samples that share a rank"
    if any(one.samples > 1 and balances_ranks(one.layer) for one in routing):
        return "--moe-router-load-balancing-type aux_loss balances the samples that share a rank"
    recomputes = repeats_moe_layers(config)
    if not recomputes and any(one.is_repeated for one in routing):
        return "MoE layers are recomputed by torch.utils.checkpoint, which would not find their samples"
    return None


def _scaled_together(config: Any) -> str | None:
    """Returns the flag by which all rows of a tensor share a scale; None: each block of a row has its own, if any."""
    return None if config.fp8 and config.fp8_recipe in ("mxfp8", "blockwise") else quantization(config)


Blocks = Sequence[Sequence[np.ndarray]]
"""The routing, [P, B, E], of each MoE layer of a rank, in their order, for each transformer block: between blocks, the
virtual stages of a pipeline, samples are at home.
"""


def saving_of(routing: Blocks, tp: ProcessGroup, groups: ExpertGroups) -> float | None:
    """Returns the part of the bytes between nodes that placing samples would have saved.

    A collective call over the joint group.

    Args:
        routing: of this rank.
        tp: the ranks that a sample is cut over.

    Returns:
        On the group's first rank; None on the others, and where it cannot be told.
    """
    holders = SampleHolders.of(tp, groups)
    of_ranks = known_to_all(routing, groups.joint)
    return replayed(of_ranks, holders) if groups.joint.rank() == 0 else None


def replayed(of_ranks: Sequence[Blocks], holders: SampleHolders) -> float | None:
    """Returns what `saving_of` says, from what all ranks of the joint group have seen; None where they are unlike."""
    of_layers = [[*chain.from_iterable(of_rank)] for of_rank in of_ranks]
    shapes = {of_layer.shape for of_rank in of_layers for of_layer in of_rank}
    lengths, *others = {tuple(map(len, of_rank)) for of_rank in of_ranks}
    if len(shapes) != 1 or 0 in min(shapes) or others:
        return None
    counts = np.array(of_layers)  # [joint, L, P, B, E]
    counts = counts[holders.ranks].sum(axis=1).transpose(2, 1, 0, 3, 4)  # [P, L, holders, B, E]
    passes, layers, _, samples, experts = counts.shape
    position_device = np.repeat(holders.holder_device, samples)
    if len(set(np.bincount(position_device))) != 1:
        return None  # a replay has as many samples on each device
    counts = counts.reshape(passes, layers, -1, experts)[:, :, np.argsort(position_device, kind="stable")]
    device_node = holders.device_node
    if len(set(device_node)) == 1:
        return 0.0
    expert_device = np.repeat(holders.ep_device, experts // len(holders.ep_device))
    saved = 0.0
    for of_block in np.split(counts, np.cumsum(lengths)[:-1], axis=1):
        number = of_block.shape[1]
        if number > 1:  # alone, a layer would have to bring home what it moves
            devices = np.tile(expert_device, (number, 1))
            done = replay(of_block[:, :MOST_LAYERS], devices[:MOST_LAYERS], device_node, place_samples)
            saved += number * done.reduction("predicted") * decided_share(of_block, devices, device_node)
    return max(0.0, float(saved / layers))


def worth_moving(
    found: Sequence[Prediction], saving: float | None, at_home: str | None, unlike: bool
) -> tuple[tuple[Prediction, ...], tuple[Refusal, ...]]:
    """Returns the predictions without those whose samples move, where moving does not pay or cannot be tried; and why
    not.

    Args:
        found: the fastest first.
        saving: see saving_of.
        at_home: see keeps_home.
        unlike: layers are of several shapes.
    """
    moving = [one for one in found if moves_samples(one.variant)]
    others = tuple(one for one in found if one not in moving)
    if not moving:
        return others, ()
    best_one = moving[0]
    stock = next((one for one in others if one.variant == ALLTOALL), others[0])
    ratios = [one.seconds / stock.seconds for one in (best_one, others[0])]
    would = (
        f"by the samples of one step, {best_one.variant} would send {saving:.1%} less between nodes and take "
        f"{ratios[0]:.2f} of {stock.variant}'s time ({others[0].variant} {ratios[1]:.2f})"
    )
    why = at_home
    if why is None and unlike:
        why = "samples move through all layers of a stage, and layers of each size are tried by themselves"
    if why is not None:
        reason = f"{why}; {would}: where that is less, {FLAG} {NETMOE.name} may pay"
    elif saving <= 0 or best_one.seconds > NEAR * others[0].seconds:
        reason = f"{would}: too little to be tried"
    else:
        return tuple(found), ()
    return others, (Refusal(NETMOE.name, reason),)
