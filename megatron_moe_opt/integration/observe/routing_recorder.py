"""Records which experts the tokens of a training run go to, as a routing trace (planning/traces/routing_trace.py)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto.auto_layer import current_controller
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.traces.routing_trace import RoutingTrace
from megatron_moe_opt.systems import moves_samples


@dataclass
class _OfRank:
    """What one rank has recorded, and where the rank stands."""

    data_rank: int
    stage: int
    tensor_rank: int
    layers: tuple[int, ...]
    experts: list[np.ndarray] = field(default_factory=list)
    """Of each pass, uint16 [layers of this stage, B, S, K]: B samples, S tokens of each that this rank routes."""
    iterations: list[int] = field(default_factory=list)
    kinds: list[np.ndarray] = field(default_factory=list)
    """Of each pass, int16 [B]."""


class RoutingRecorder:
    """Listens to the routers of this rank's part of a model.

    All ranks of the training run have one, record the same iterations, and gather together at the end. Experts are
    recorded by their own numbers, whatever rank holds them.

    Args:
        model: as the training loop runs it.
        config: its TransformerConfig.
        sequence_length: tokens of a sample.

    Raises:
        ConfigurationError: routing that cannot be recorded.
    """

    def __init__(self, model: torch.nn.Module, config: Any, sequence_length: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.router import Router

        for flag, given in (
            ("--context-parallel-size", config.context_parallel_size > 1),
            ("--moe-expert-capacity-factor", config.moe_expert_capacity_factor is not None),
            ("--recompute-granularity", config.recompute_granularity is not None),
        ):
            if given:
                raise ConfigurationError(f"--record-routing does not work with {flag}: drop one of the two")
        name = config.moe_token_dispatcher_type
        if moves_samples(name):
            raise ConfigurationError(
                f"--record-routing needs all samples at home, which --moe-token-dispatcher-type {name} moves: "
                "record under another dispatcher, whose routing is the same"
            )
        if name == AUTO and (controller := current_controller()) is not None:
            controller.at_home = "--record-routing needs all samples at home"
        routers = [module for module in model.modules() if isinstance(module, Router)]
        self._config = config
        self._sequence_length = sequence_length
        self._part = _OfRank(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            tuple(sorted(router.layer_number for router in routers)),
        )
        self._heard: dict[int, list[np.ndarray]] | None = None
        self._kinds: list[np.ndarray] = []
        for router in routers:
            # First of all hooks: one of ours puts experts in the order of their places.
            router.register_forward_hook(functools.partial(self._hear, router.layer_number), prepend=True)

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Records the passes of a training iteration that runs inside the block."""
        part, self._kinds = self._part, []
        self._heard = {layer: [] for layer in part.layers}
        yield
        heard, self._heard = self._heard, None
        passes = [np.stack(layers) for layers in zip(*(heard[layer] for layer in part.layers), strict=True)]
        part.experts += passes
        part.iterations += [number] * len(self._kinds)
        part.kinds += self._kinds

    def note_kinds(self, kinds: torch.Tensor) -> None:
        """The kinds of the samples of the next pass, integers [B]; must be called for every pass."""
        self._kinds.append(kinds.cpu().numpy().astype(np.int16))

    def gather(self, kind_names: Sequence[str]) -> RoutingTrace | None:
        """The trace on rank 0, None on the others. A collective call over the world.

        Raises:
            ConfigurationError: nothing was recorded.
        """
        if not self._part.iterations:
            raise ConfigurationError("--record-steps names no iteration of this run: choose some of them")
        parts: list[_OfRank] | None = [self._part] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self._part, parts)
        if parts is None:
            return None
        parts.sort(key=lambda part: (part.data_rank, part.stage, part.tensor_rank))
        ranks = range(1 + max(part.data_rank for part in parts))
        by_rank = [[part for part in parts if part.data_rank == rank] for rank in ranks]
        samples = [self._layers(of_rank) for of_rank in by_rank]
        layers = {part.stage: part.layers for part in parts}
        return RoutingTrace(
            experts=np.concatenate(samples, axis=2),
            num_experts=self._config.num_moe_experts,
            layers=np.array([number for stage in sorted(layers) for number in layers[stage]], dtype=np.int64),
            iterations=np.array(self._part.iterations, dtype=np.int64),
            kinds=np.concatenate([np.stack(of_rank[0].kinds) for of_rank in by_rank], axis=1),
            kind_names=tuple(kind_names),
        )

    def _layers(self, parts: list[_OfRank]) -> np.ndarray:
        """[P, L, B, T, K] of one data-parallel rank, from all pipeline stages and tensor-parallel ranks."""
        stages = []
        for stage in sorted({part.stage for part in parts}):
            experts = [np.stack(part.experts) for part in parts if part.stage == stage and part.layers]
            if not experts:
                continue
            # Under sequence parallelism each tensor-parallel rank's router sees its part of a sequence, else all of it.
            whole = experts[0].shape[3] == self._sequence_length
            stages.append(experts[0] if whole else np.concatenate(experts, axis=3))
        return np.concatenate(stages, axis=1)

    def _hear(self, layer: int, router: Any, inputs: tuple[Any, ...], outputs: tuple[Any, torch.Tensor]) -> None:
        if self._heard is None:
            return
        tokens, samples = inputs[0].shape[:2]
        # host synchronisation: twice a pass and layer, only where routing is recorded
        experts = outputs[1].nonzero()[:, 1].view(tokens, samples, self._config.moe_router_topk)
        self._heard[layer].append(experts.transpose(0, 1).cpu().numpy().astype(np.uint16))
