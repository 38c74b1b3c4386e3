"""The edge of a MoE layer whose experts travel: Megatron's experts module is called with the weights of all owners.

Megatron's MoELayer calls its experts module with the rows of this rank's experts. Rows here are also for experts of
other ranks of the domain: `routed_experts_compute` of the layer has all of them computed in the same call (see
experts_of_owners.py). The module, its parameters and state_dict stay.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megatron_moe_opt.dispatchers.expert_domains import MeasuredDomains
from megatron_moe_opt.dispatchers.expert_migration import ExpertMigrationDispatcher, Migrate
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.configured_workload import layer_workload
from megatron_moe_opt.integration.layer.experts_of_owners import call_experts, stays_behind
from megatron_moe_opt.integration.layer.layer_seam import LayerSeam, LayerSlot
from megatron_moe_opt.integration.micro_batches import follow_micro_batches
from megatron_moe_opt.integration.optimizer_step import (
    after_optimizer_step,
    before_optimizer_step,
    forget,
    model_of_step,
    refuse_lone_skips,
)
from megatron_moe_opt.options import Options
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing
from megatron_moe_opt.runtime.travelling_experts.expert_codec import LargestWeights, TrackedExperts, WholeExperts
from megatron_moe_opt.runtime.travelling_experts.expert_communicator import expert_communicator, forget_passes
from megatron_moe_opt.runtime.travelling_experts.expert_gradients import CompressedGradients, WholeGradients
from megatron_moe_opt.runtime.travelling_experts.expert_weights import ExpertWeights
from megatron_moe_opt.runtime.travelling_experts.mean_expert import MeanExpert
from megatron_moe_opt.runtime.travelling_experts.migrated_experts import MigratedExperts
from megatron_moe_opt.runtime.travelling_experts.step_passes import TrainedModel
from megatron_moe_opt.systems.expert_migration import domains_of
from megatron_moe_opt.systems.system import PREFIX, shown
from megatron_moe_opt.topology.domain_groups import (
    DomainGroups,
    experts_cross_nodes,
    forget_destroyed_groups,
    levels_of,
)
from megatron_moe_opt.topology.expert_groups import ExpertGroups


def make_dispatcher(groups: ExpertGroups, options: Options, config: Any) -> ExpertMigrationDispatcher:
    """Returns the dispatcher of a layer. A collective call over its expert-parallel group.

    Raises:
        ConfigurationError: levels or domain sizes that do not fit the group, or a profile that has not measured them.
    """
    workers = levels_of(groups.ep, options.network_levels)
    if options.chooses_domains:
        workload = dataclasses.replace(
            layer_workload(config, groups, workers, options.resident_limit, wire=options.wire),
            tp=1,  # the dispatcher gets tokens that are split
            compression=options.compression_ratio or 1.0,
            gradient_compression=options.gradient_compression_ratio or 1.0,
        )
        chosen = MeasuredDomains(options.profile, groups, workload, options.hop_chunks)
        return ExpertMigrationDispatcher(groups, chosen, config.num_moe_experts, config.moe_router_topk, options.wire)
    domains, (chunks,) = domains_of(options, workers), options.hop_chunks
    if chunks > 1 and not domains.hops:
        smaller = ", or take smaller domains" if max(domains.sizes) > 1 else ""
        raise ConfigurationError(
            f"{PREFIX}chunks {chunks} cuts tokens that hop, and none does in {PREFIX}domain-sizes "
            f"{shown(domains.sizes)}: drop it{smaller}"
        )
    return ExpertMigrationDispatcher(
        groups, domains, config.num_moe_experts, config.moe_router_topk, options.wire, chunks
    )


def migrate_experts(layer: Any, options: Options) -> None:
    """Lets the experts of a layer travel, unless every domain is a single rank. A collective call over its groups."""
    seam = LayerSeam(layer)
    stock = seam.stock(LayerSlot.EXPERTS) if options.experts_may_travel else None  # refused before any rank waits
    migrate, hooks = experts_to_migrate(layer, options)
    layer.token_dispatcher.dispatcher.take_experts(migrate)
    if stock is not None:
        watched = WatchedExperts(layer, hooks)
        seam.put(LayerSlot.EXPERTS, functools.partial(_compute, weakref.proxy(layer), stock, watched))


def experts_to_migrate(layer: Any, options: Options) -> tuple[Migrate, list[RemovableHandle]]:
    """Returns what has the experts of a layer travel, and where to note the hooks on them: they go with the layer's
    dispatcher.
    """
    forget_passes()
    follow_micro_batches()  # before a training loop asks for its schedule, once
    dispatcher = layer.token_dispatcher.dispatcher
    ready = functools.partial(_finish_parameter_sync, layer.experts)
    weights = ExpertWeights(layer.experts, _expert_of, ready, functools.partial(_is_synchronized_late, layer.experts))
    ratio, num_local = options.compression_ratio, layer.num_local_experts
    gradient_ratio, on_host = options.gradient_compression_ratio, options.resident_limit is not None
    for flag, value in options.compression.items():
        if not weights.is_by_expert:
            raise ConfigurationError(
                f"{flag} {value:g} needs experts with weights of their own, which {type(layer.experts).__name__} has "
                "not: leave out --moe-use-legacy-grouped-gemm, or the ratio"
            )

    hooks: list[RemovableHandle] = []
    """The hooks on the experts, which go with the dispatcher that they serve, of which `auto` keeps one."""
    weakref.finalize(dispatcher, _remove, hooks).atexit = False

    def at_loading(one: TrackedExperts | LargestWeights | CompressedGradients) -> None:
        hooks.append(layer.experts.register_load_state_dict_post_hook(lambda *_: one.restart()))

    def migrate(groups: DomainGroups, owners: tuple[int, ...]) -> MigratedExperts:
        communicator = expert_communicator(groups, options.prefetch_layers, options.resident_limit)
        codec: WholeExperts | TrackedExperts | LargestWeights = WholeExperts()
        if ratio is not None:
            if options.residuals == "last":
                codec = TrackedExperts(num_local, ratio, on_host=on_host)
            elif interval := options.shared_expert_interval:
                shared = MeanExpert(num_local, groups.all_experts, interval)
                codec = TrackedExperts(num_local, ratio, shared, on_host)
            else:
                codec = LargestWeights(num_local, ratio)
            at_loading(codec)
        gradients: WholeGradients | CompressedGradients
        if gradient_ratio is not None:
            gradients = CompressedGradients(num_local, gradient_ratio, on_host)
            at_loading(gradients)
        else:  # inside a node it takes less to return them in each pass than to copy their sums to the host and back
            gradients = WholeGradients(on_host and experts_cross_nodes(groups))
        refuse_skips = functools.partial(_refuse_lone_skips)  # one's own: it is forgotten with these groups alone
        before_optimizer_step(forget_destroyed_groups)  # before what was asked for over them is called
        for step, add in (
            (communicator.before_step, before_optimizer_step),
            (communicator.after_step, after_optimizer_step),
            (communicator.after_skipped_step, functools.partial(after_optimizer_step, updated=False)),
        ):
            add(_OfModel(step))
            groups.when_gone.callback(forget, _OfModel(step))
        after_optimizer_step(refuse_skips)
        after_optimizer_step(refuse_skips, updated=False)
        groups.when_gone.callback(forget, refuse_skips)
        return MigratedExperts(weights, owners, communicator, codec, gradients)

    return migrate, hooks


@dataclasses.dataclass(frozen=True)
class _OfModel:
    """A callback of optimizer steps: tells a communicator of which model's one begins or has ended."""

    tell: Callable[[TrainedModel | None], None]

    def __call__(self) -> None:
        """Tells it."""
        self.tell(model_of_step())


def _refuse_lone_skips() -> None:
    """Raises ConfigurationError where ranks may skip optimizer steps alone."""
    what = "experts that travel are sent again after a step of the optimizer, on all ranks"
    refuse_lone_skips(what, f"take {PREFIX}domain-sizes 1")


def _expert_of(name: str) -> int | None:
    """Returns the local expert of a parameter of SequentialMLP or TEGroupedMLP; None: GroupedMLP's hold all."""
    found = re.search(r"local_experts\.(\d+)\.|\.(?:weight|bias)(\d+)$", name)
    return None if found is None else int(found[1] or found[2])


def _finish_parameter_sync(experts: Any) -> None:
    """Waits for weights that a distributed optimizer is still gathering (--overlap-param-gather).

    Megatron's DDP does that in forward pre-hooks of the modules that hold the weights; here weights are read earlier.
    The hooks are called as Megatron's own fused experts call them (TEGroupedMLP, from 0.18 on).
    """
    for module, hook in _waiting_hooks(experts):
        hook(module, None)


def _is_synchronized_late(experts: Any) -> bool:
    """Whether `_finish_parameter_sync` may have something to wait for."""
    return any(True for _ in _waiting_hooks(experts))


def _waiting_hooks(experts: Any) -> Iterator[tuple[Any, Callable[..., None]]]:
    """Yields the hooks of Megatron's DDP, with their modules. Those of others may read inputs, and there are none."""
    for module in experts.modules():
        for hook in module._forward_pre_hooks.values():
            if str(getattr(hook, "__module__", None)).startswith("megatron.core.distributed."):
                yield module, hook


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class WatchedExperts:
    """Refuses what would run with this rank's own, whoever's experts a call is made with: buffers and hooks that do not
    travel, and a call that is recomputed alone, with the module's own weights.
    """

    def __init__(self, layer: Any, hooks: list[RemovableHandle]) -> None:
        """Puts hooks on the experts, and adds them to `hooks`."""
        self._layer, self._called, self._looked = weakref.proxy(layer), False, False
        self._dispatcher = weakref.ref(layer.token_dispatcher)
        for module in layer.experts.modules():
            if module._parameters:
                hooks.append(module.register_forward_pre_hook(self._check))

    def __enter__(self) -> None:
        """Calls in this context are with the weights that they should be with."""
        if not self._looked and (what := stays_behind(self._layer.experts)) is not None:
            raise ConfigurationError(
                f"--moe-opt-domain-sizes has experts travel, and {what} stays on its rank, for experts of all ranks "
                "alike: take it away, or take domain size 1"
            )
        self._called = self._looked = True

    def __exit__(self, *_: object) -> None:
        self._called = False

    def _check(self, *_: Any) -> None:
        if self._called or not is_recomputing():
            return
        plugged = self._layer.token_dispatcher
        if plugged is self._dispatcher() and plugged.dispatcher.migrated is not None:  # `auto` plugs others, too
            raise ConfigurationError(
                "activations of experts that travel cannot be recomputed without those of their layer, whose dispatch "
                "brings their weights: put torch.utils.checkpoint around the MoE layer, not around its experts"
            )


def _compute(
    layer: Any,
    stock: Callable[..., Any],
    watched: WatchedExperts,
    hidden_states: torch.Tensor,
    probs: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """Runs the experts in the place of MoELayer.routed_experts_compute."""
    migrated: MigratedExperts | None = layer.token_dispatcher.dispatcher.migrated
    if migrated is None:  # the domains that were chosen are single ranks
        return stock(layer, hidden_states, probs)
    lent = layer.token_dispatcher.dispatched.lent
    arguments = layer.token_dispatcher.dispatch_postprocess(hidden_states, probs)
    own = dict(layer.experts.named_parameters())
    with watched, migrated.kept_as_they_came():
        of_owners = [own if parameters is None else parameters for parameters in migrated.of_owners(lent)]
        output, bias = call_experts(layer.experts, of_owners, *arguments)
    assert bias is None, f"mlp_bias is not supported for {type(layer.token_dispatcher)}"  # as stock says
    return layer.token_dispatcher.combine_preprocess(migrated.back_in_backward(output)), None
