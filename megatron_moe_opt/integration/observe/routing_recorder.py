"""Records which experts the tokens of a training run go to, as a routing trace (planning/traces/routing_trace.py)."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.layer_passes import number_of, repeats_numbers
from megatron_moe_opt.integration.micro_batches import follow_micro_batches, trains
from megatron_moe_opt.integration.optimizer_step import after_optimizer_step, before_optimizer_step, forget
from megatron_moe_opt.integration.training_arguments import training_arguments
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.traces.routing_trace import UNKNOWN, RoutingTrace, write_routing_trace
from megatron_moe_opt.systems import moves_samples
from megatron_moe_opt.topology.process_groups import host_group


@dataclass
class _OfRank:
    """What one rank has recorded, and where the rank stands."""

    data_rank: int
    stage: int
    tensor_rank: int
    layers: tuple[int, ...] = ()
    num_experts: int = 0
    is_split: bool = True
    """Whether each tensor-parallel rank's router sees its part of a sequence, and not all of it."""
    experts: list[np.ndarray] = field(default_factory=list)
    """The experts of each pass, uint16 [layers of this stage, B, S, K]: B samples, of each S tokens routed here."""
    steps: list[int] = field(default_factory=list)
    kinds: list[np.ndarray] = field(default_factory=list)
    """The kind of each sample of each pass, int16 [B]; empty where nobody says."""


class RoutingRecorder:
    """Listens to the routers of a training run inside its block, and writes the trace after the last step.

    All ranks of the run enter it before the model is configured, with the same arguments. Experts are recorded by their
    own numbers, whatever rank holds them.

    Args:
        output: the file, which rank 0 writes.
        steps: of the optimizer in this run, counted from 1.

    Raises:
        ConfigurationError: when the model is configured: routing that cannot be recorded; when the block ends: a
            run of fewer steps.
    """

    def __init__(self, output: Path, steps: range) -> None:
        self._output, self._steps = output, steps
        self._step = 1
        """The optimizer step that is under way, counted from 1."""
        self._part: _OfRank | None = None
        self._writing: threading.Thread | None = None
        """Writes the trace, on rank 0; None: it has not begun."""
        self._heard: dict[int, list[np.ndarray]] = {}
        self._kinds: list[np.ndarray] = []
        self._kind_names: tuple[str, ...] = ()

    def __enter__(self) -> RoutingRecorder:
        """Begins to listen to the routers."""
        global _running
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.moe.router import Router
        from megatron.core.transformer.transformer_config import TransformerConfig

        self._router, self._layer, self._config = Router, MoELayer, TransformerConfig
        self._post_init = TransformerConfig.__post_init__
        TransformerConfig.__post_init__ = self._checked(self._post_init)
        follow_micro_batches()  # before the training loop asks for its schedule, once
        self._hook = torch.nn.modules.module.register_module_forward_hook(self._hear)
        before_optimizer_step(self._clear)
        for updated in (True, False):
            after_optimizer_step(self._end_step, updated)
        _running = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends listening, and says where there was nothing to write; not where the run has failed anyhow."""
        self._stop()
        self._config.__post_init__ = self._post_init
        if self._writing is not None:
            self._writing.join()
        ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
        if ended_well and self._step <= self._steps[-1]:
            raise ConfigurationError(
                f"--steps {self._steps[0]}-{self._steps[-1]}: the run ended after step {self._step - 1}, and nothing "
                "is written: choose steps within it"
            )

    def note_kinds(self, kinds: torch.Tensor, names: Sequence[str]) -> None:
        """Notes what the samples of the next pass are: integers [B], indexes of `names`."""
        self._kinds.append(kinds.cpu().numpy().astype(np.int16))
        self._kind_names = tuple(names)

    def _stop(self) -> None:
        global _running
        self._hook.remove()
        for callback in (self._clear, self._end_step):
            forget(callback)
        _running = None

    def _checked(self, post_init: Any) -> Any:
        @functools.wraps(post_init)
        def checked(config: Any) -> None:
            post_init(config)
            if config.num_moe_experts is not None:
                check_recordable(config)

        return checked

    def _hear(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._step not in self._steps or not trains(module):
            return
        if isinstance(module, self._router):
            tokens, samples = inputs[0].shape[:2]
            # host synchronisation: twice a pass and layer, only where routing is recorded
            experts = output[1].nonzero()[:, 1].view(tokens, samples, module.config.moe_router_topk)
            heard = self._heard.setdefault(number_of(module), [])
            heard.append(experts.transpose(0, 1).cpu().numpy().astype(np.uint16))
            self._of_rank().num_experts = module.config.num_moe_experts
        elif isinstance(module, self._layer) and inputs:
            passes = self._heard.get(number_of(module))
            if passes:
                all_of_layer = passes[-1].shape[1] == inputs[0].shape[0]
                self._of_rank().is_split = module.config.sequence_parallel or not all_of_layer

    def _of_rank(self) -> _OfRank:
        from megatron.core import parallel_state

        if self._part is None:
            self._part = _OfRank(
                parallel_state.get_data_parallel_rank(),
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
        return self._part

    def _clear(self) -> None:
        """Forgets what was heard: a step begins, which may be the same one again."""
        self._heard, self._kinds = {}, []

    def _end_step(self) -> None:
        part, heard, kinds = self._of_rank(), self._heard, self._kinds
        if self._step in self._steps:
            part.layers = tuple(sorted(heard))
            passes = [np.stack(layers) for layers in zip(*(heard[layer] for layer in part.layers), strict=True)]
            part.experts += passes
            part.steps += [self._step] * len(passes)
            part.kinds += kinds
        self._clear()
        self._step += 1
        if self._step > self._steps[-1]:
            self._stop()
            self._write()

    def _write(self) -> None:
        """Writes the trace on rank 0. A collective call over the world."""
        parts: list[_OfRank] | None = [self._of_rank()] * dist.get_world_size() if dist.get_rank() == 0 else None
        with _disable_current_modes(), host_group() as group:  # a step whose traffic is counted did not send this
            dist.gather_object(self._of_rank(), parts, group=group)
        if parts is not None:
            # Others would wait for this rank meanwhile: compressing gigabytes takes minutes.
            self._writing = threading.Thread(target=_write_trace, args=(self._output, parts, self._kind_names))
            self._writing.start()


def _write_trace(output: Path, parts: list[_OfRank], kind_names: tuple[str, ...]) -> None:
    try:
        trace = _trace_of(parts, kind_names)
        write_routing_trace(output, trace)
    except (OSError, ValueError) as error:  # which is no reason to end a training run
        print(f"moe-opt: error: no routing is written to {output}: {error}", file=sys.stderr, flush=True)
        return
    print(f"moe-opt: the routing of {trace.num_passes} passes is written to {output}", flush=True)


_running: RoutingRecorder | None = None


def note_kinds(kinds: torch.Tensor, names: Sequence[str]) -> None:
    """Tells the recorder, if one runs, what the samples of the next pass are: integers [B], indexes of names."""
    if _running is not None:
        _running.note_kinds(kinds, names)


def check_recordable(config: Any) -> None:
    """Refuses, with ConfigurationError, a TransformerConfig whose routing cannot be recorded."""
    for flag, given in (
        ("--cuda-graph-impl", config.cuda_graph_impl != "none"),  # a router that is captured is not heard
        ("--optimizer-cuda-graph", getattr(training_arguments(), "optimizer_cuda_graph", False)),
        ("--context-parallel-size", config.context_parallel_size > 1),
        ("--moe-expert-capacity-factor", config.moe_expert_capacity_factor is not None),
        ("--recompute-granularity", config.recompute_granularity is not None),
        ("--mtp-use-repeated-layer", getattr(config, "mtp_use_repeated_layer", False)),
        ("--mtp-num-layers in a hybrid model", repeats_numbers(config)),
    ):
        if given:
            raise ConfigurationError(f"moe-opt trace record does not work with {flag}: leave it out while recording")
    name = config.moe_token_dispatcher_type
    if name == AUTO or moves_samples(name):
        why = "which measures with layers of its own" if name == AUTO else "which moves samples"
        raise ConfigurationError(
            f"moe-opt trace record does not work with --moe-token-dispatcher-type {name}, {why}: record under another "
            "dispatcher, whose routing is the same"
        )


def _trace_of(parts: list[_OfRank], kind_names: tuple[str, ...]) -> RoutingTrace:
    """Puts together what the ranks have recorded."""
    parts = sorted((part for part in parts if part.layers), key=lambda one: (one.data_rank, one.stage, one.tensor_rank))
    if not parts:
        raise ConfigurationError("moe-opt trace record: the model has no MoE layer: give it --num-experts")
    ranks = sorted({part.data_rank for part in parts})
    by_rank = [[part for part in parts if part.data_rank == rank] for rank in ranks]
    experts = np.concatenate([_layers(of_rank) for of_rank in by_rank], axis=2)
    layers = {part.stage: part.layers for part in parts}
    numbers = np.array([number for stage in sorted(layers) for number in layers[stage]], dtype=np.int64)
    in_order = np.argsort(numbers)  # virtual stages lie on a pipeline stage with others between them
    if kind_names:
        kinds = np.concatenate([np.stack(of_rank[0].kinds) for of_rank in by_rank], axis=1)
    else:
        kinds = np.full((experts.shape[0], experts.shape[2]), UNKNOWN, dtype=np.int16)
    return RoutingTrace(
        experts=experts[:, in_order],
        num_experts=parts[0].num_experts,
        layers=numbers[in_order],
        iterations=np.array(parts[0].steps, dtype=np.int64),
        kinds=kinds,
        kind_names=kind_names,
    )


def _layers(parts: Sequence[_OfRank]) -> np.ndarray:
    """Returns the experts [P, L, B, T, K] of one data-parallel rank, from all its pipeline and tensor ranks."""
    stages = []
    for stage in sorted({part.stage for part in parts}):
        of_stage = [part for part in parts if part.stage == stage]
        experts = [np.stack(part.experts) for part in of_stage]
        stages.append(np.concatenate(experts, axis=3) if of_stage[0].is_split else experts[0])
    return np.concatenate(stages, axis=1)
