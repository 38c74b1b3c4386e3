"""Makes our dispatcher types valid in Megatron without changing a file of it.

Three seams, each checked before it is used:

1. the annotation of TransformerConfig.moe_token_dispatcher_type, from which Megatron-LM builds its argparse choices;
2. TransformerConfig.__post_init__, whose guards know stock names only: while it runs, ours reads as `alltoall`;
3. MoELayer.__init__, which builds the dispatcher: it builds stock `alltoall`, and ours takes its place.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.extension import build_info
from megatron_moe_opt.integration.announce import announce
from megatron_moe_opt.integration.auto.auto_layer import controller_aside, controller_of, new_controller, plan_layer
from megatron_moe_opt.integration.bridge import plug_into_bridge
from megatron_moe_opt.integration.checks import (
    check_arguments,
    check_config,
    check_division,
    check_flags,
    check_is_called,
    check_name,
    check_never_unread,
    check_options_are_read,
    check_telemetry,
    is_upcycled,
)
from megatron_moe_opt.integration.dataset_helpers import compile_helpers_with_this_python
from megatron_moe_opt.integration.layer.layer_passes import name_passes
from megatron_moe_opt.integration.layer.layer_seam import LayerSlot
from megatron_moe_opt.integration.layer.linked_blocks import wrap_transformer_block
from megatron_moe_opt.integration.layer.ordered_experts import forget_orders, keep_expert_order
from megatron_moe_opt.integration.layer.overlapped_batches import keep_expert_inputs, name_batches, overlaps_batches
from megatron_moe_opt.integration.layer.replicated_tokens import (
    holds_replicated_tokens,
    reading_as_sequence_parallel,
    take_replicated_tokens,
)
from megatron_moe_opt.integration.layer.routed_by import routed_by
from megatron_moe_opt.integration.observe.reports import report_with_training_log
from megatron_moe_opt.integration.observe.telemetry import watch
from megatron_moe_opt.integration.patching import is_wrapped, seam_moved, wrap_once
from megatron_moe_opt.integration.priorities import prioritize_expert_groups
from megatron_moe_opt.integration.sharded_weights import note_wrappers
from megatron_moe_opt.integration.start_facts import facts_of_layer, named_dispatcher
from megatron_moe_opt.integration.timeouts import follow_megatrons_timeouts
from megatron_moe_opt.integration.training_arguments import before_validation, name_in_checkpoints
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.job.same_start import Facts, check_alike
from megatron_moe_opt.systems import dispatcher_names, system_names, system_of
from megatron_moe_opt.systems.system import FLAG
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.versions import check_megatron

FIELD = "moe_token_dispatcher_type"

_options = Options()
_refuses_unread = False
_is_aside = False
"""Whether the layers that are being built are none of the run's."""
_is_alone = False
"""Whether layers are being built without a model around them, so that nobody sums their gradients over ranks."""
_compared: dict[tuple[int, ...], tuple[weakref.ref[Any], Facts]] = {}
"""The configuration for which the ranks of a group compared what they were told last, and the facts in which they were
found to agree.
"""


def register(options: Options | None = None, refuse_unread: bool = False) -> None:
    """Makes layers that are built from now on take these options: what megatron_moe_opt.register does."""
    global _options, _refuses_unread
    _options, _refuses_unread = options or Options(), refuse_unread
    new_controller()
    _compared.clear()
    forget_orders()
    check_megatron()
    try:
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.transformer_config import TransformerConfig

        from megatron_moe_opt.integration.layer.token_dispatcher import PluggedTokenDispatcher
    except ImportError as error:
        raise seam_moved(str(error)) from error

    if is_wrapped(TransformerConfig.__post_init__):
        return  # registered already: only the options were new
    stock = _stock_names(TransformerConfig)
    for owner, method in (
        (TransformerConfig, "__post_init__"),
        (MoELayer, "__init__"),
        (MoELayer, LayerSlot.EXPERTS.value),
    ):
        if not isinstance(owner.__dict__.get(method), types.FunctionType):
            raise seam_moved(f"{owner.__name__}.{method} is not a plain method")
    _widen_annotation(TransformerConfig, stock)
    _wrap_post_init(TransformerConfig, stock)
    _wrap_moe_layer(MoELayer, PluggedTokenDispatcher)
    _start_board_with_models()
    wrap_transformer_block()
    note_wrappers(_check_wrapped)
    prioritize_expert_groups()
    follow_megatrons_timeouts()
    report_with_training_log()
    compile_helpers_with_this_python()
    name_in_checkpoints("alltoall", lambda name: name in dispatcher_names())
    plug_into_bridge(reading_as_alltoall)
    before_validation(lambda arguments: check_arguments(arguments, _options, _refuses_unread))


def check_named(arguments: Sequence[str]) -> None:
    """Refuses a command line whose dispatcher nobody has, before the script's own parser does it at more length, or
    cannot run in the processes that Megatron-LM then has.

    Raises:
        ConfigurationError: names those that there are, or the flag and the way out.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    name = named_dispatcher(arguments)
    if name is not None:
        ours = dispatcher_names()
        stock = [one for one in _stock_names(TransformerConfig) if one not in ours]
        check_name(name, stock, ours)
        if name in ours and torch.cuda.is_available() and build_info()["backend"] != "cuda":
            raise ConfigurationError(
                f"{FLAG} {name} has GPUs, and the compiled extension of megatron-moe-opt is for CPUs: run "
                "MOE_OPT_CUDA=ON pip install --no-build-isolation -e . where nvcc is"
            )
        check_flags(name, {argument.partition("=")[0] for argument in arguments})


def launcher_options() -> Options | None:
    """Returns the options that the launcher has taken out of the command line; None: the launcher was not used."""
    return _options if _refuses_unread else None


@contextmanager
def aside() -> Iterator[None]:
    """Keeps layers that are built inside the block, with options of their own, apart from the run's: nothing is said of
    them, and Megatron-LM's arguments are not about them.
    """
    global _options, _refuses_unread, _is_aside
    outside, compared = (_options, _refuses_unread, _is_aside), dict(_compared)
    _is_aside = True
    try:
        with controller_aside():
            yield
    finally:
        _options, _refuses_unread, _is_aside = outside
        _compared.clear()
        _compared.update(compared)


@contextmanager
def without_model() -> Iterator[None]:
    """Takes configurations that are built inside the block for those of layers without a model around them."""
    global _is_alone
    outside, _is_alone = _is_alone, True
    try:
        yield
    finally:
        _is_alone = outside


@contextmanager
def reading_as_alltoall(config: Any) -> Iterator[str]:
    """Lets `config` say `alltoall` inside the block where it names a dispatcher of ours; yields the real name."""
    name = getattr(config, FIELD, None)  # Megatron-Bridge has models without one
    if name in dispatcher_names():
        setattr(config, FIELD, "alltoall")
    try:
        yield name
    finally:
        if name in dispatcher_names():
            setattr(config, FIELD, name)


def _stock_names(config_class: type) -> tuple[str, ...]:
    """The dispatcher names of the installed Megatron."""
    field = config_class.__dataclass_fields__.get(FIELD)
    if field is None or get_origin(field.type) is not Literal:
        raise seam_moved(f"TransformerConfig.{FIELD} is not a field with a Literal type")
    return get_args(field.type)


def _widen_annotation(config_class: type, stock: tuple[str, ...]) -> None:
    widened = Literal[(*stock, *dispatcher_names())]  # type: ignore[valid-type]
    config_class.__dataclass_fields__[FIELD].type = widened  # subclasses share the Field
    config_class.__annotations__[FIELD] = widened


def _wrap_post_init(config_class: type, stock: tuple[str, ...]) -> None:
    def post_init(stock_post_init: Callable[[Any], None], self: Any) -> None:
        check_name(getattr(self, FIELD), stock, dispatcher_names())
        self._moe_opt_made = _made_now(getattr(self, FIELD))
        check_division(self.num_moe_experts, self.expert_model_parallel_size)
        with reading_as_alltoall(self) as name:
            stock_post_init(self)
        if is_upcycled(self):
            return
        if name in dispatcher_names():
            failure_board.start()  # on ranks without a MoE layer too
            check_config(self, name, _options, *self._moe_opt_made.whose)
            if name == AUTO:
                controller_of(self, _options)  # on ranks without a MoE layer too
        elif self.num_moe_experts is not None:
            _check_stock(self, name)
        if _refuses_unread and self.num_moe_experts is not None:
            check_options_are_read(name, _options)

    wrap_once(config_class, "__post_init__", post_init)


class _Made(NamedTuple):
    """What a configuration was made as; its fields may be written afterwards, before a layer is built from it."""

    name: str
    """Its dispatcher."""
    whose: tuple[bool, bool]
    """Whether it is of the run, and of a model: `check_config`."""


def _made_now(name: str) -> _Made:
    return _Made(name, (not _is_aside, not (_is_aside or _is_alone)))


def _check_again(config: Any, name: str) -> None:
    """Refuses what has been written into a configuration since it was made and checked, as frameworks do that fill in
    fields one by one.
    """
    made = getattr(config, "_moe_opt_made", None) or _made_now(name)
    if name == AUTO != made.name:
        raise ConfigurationError(
            f"--moe-token-dispatcher-type {AUTO} was written into a TransformerConfig that was made with {made.name}, "
            "of which ranks without a MoE layer know nothing: give it when the configuration is made"
        )
    check_config(config, name, _options, *made.whose)


def _check_wrapped(config: Any) -> None:
    """Refuses a wrapper of a model that the dispatcher of its MoE layers does not go with."""
    if config.moe_token_dispatcher_type in dispatcher_names():
        _check_again(config, config.moe_token_dispatcher_type)


def _check_stock(config: Any, name: str) -> None:
    """Refuses options of ours that a dispatcher of Megatron's own cannot have."""
    check_never_unread(name, _options)
    if _options.telemetry:
        check_telemetry(config)


def _wrap_moe_layer(layer_class: type, plugged_class: type) -> None:
    signature = inspect.signature(layer_class.__init__)

    def init(stock_init: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if (name := getattr(config, FIELD)) in dispatcher_names():
            _check_again(config, name)
            check_is_called(type(self), name)
        with reading_as_alltoall(config):
            replicated = name in dispatcher_names() and holds_replicated_tokens(config)
            with reading_as_sequence_parallel(config) if replicated else nullcontext():
                stock_init(self, config, *args, **kwargs)
        if name in dispatcher_names():
            failure_board.start()
            given = signature.bind(self, config, *args, **kwargs).arguments.get("pg_collection")
            groups = _groups_of(self.token_dispatcher, getattr(given, "expt_dp", None))
            plug = functools.partial(_plug, plugged_class=plugged_class, groups=groups)
            _compare(groups, name, config)
            if overlaps_batches(config):
                keep_expert_inputs(dispatcher_names())
                name_batches(self, name)
        if name == AUTO:
            plan_layer(self, groups, _options, functools.partial(plug, says=False))
        elif name in system_names():
            plug(self, name, _options, says=not _is_aside)
        if replicated:
            take_replicated_tokens(self)
        if _options.telemetry:
            watch(self)

    wrap_once(layer_class, "__init__", init)
    name_passes(layer_class, dispatcher_names())


def _start_board_with_models() -> None:
    """Has ranks whose part of a model has no MoE layer tell of failures too, and go along with what `auto` does after
    each step, where their configuration came before the process groups, or before `register`.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    def init(stock_init: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, config, *args, **kwargs)
        if (name := getattr(config, FIELD, None)) in dispatcher_names() and not is_upcycled(config):
            failure_board.start()
            if name == AUTO:
                controller_of(config, _options)

    wrap_once(LanguageModule, "__init__", init)


def _compare(groups: ExpertGroups, name: str, config: Any) -> None:
    """Has the ranks of a layer's groups compare what they were told, and those that hold the same experts, whose
    gradients are summed. Once a model, whose layers have one configuration: whether the next layer's is that one, all
    ranks know alike, but not whether its facts are those of the model before.

    Raises:
        DisagreementError: on all of them.
    """
    facts = facts_of_layer(_options, name, config)
    for group in (groups.joint, groups.replicas):
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        known = _compared.get(ranks)
        if len(ranks) > 1 and (known is None or known[0]() is not config or known[1] != facts):
            check_alike(ranks, facts)
            _compared[ranks] = weakref.ref(config), facts


def _groups_of(stock: Any, replicas: ProcessGroup | None = None) -> ExpertGroups:
    """Returns the groups of a layer.

    Args:
        stock: its dispatcher, as Megatron has built it.
        replicas: the ranks that hold the same experts, where the model was given groups; None: Megatron's own.
    """
    from megatron.core import parallel_state

    replicas = replicas or parallel_state.get_expert_data_parallel_group(check_initialized=False)
    found = ExpertGroups(stock.ep_group, stock.tp_group, stock.tp_ep_group, replicas)
    for group in (found.ep, found.etp, found.joint):
        if isinstance(group, ProcessGroup) and type(group) is not ProcessGroup:
            raise ConfigurationError(
                f"the process groups of MoE layers are {type(group).__name__}s, which frameworks take apart and make "
                f"anew, and ours communicate by PyTorch's own: have these kept, or use {FLAG} alltoall"
            )
    return found


def _plug(
    layer: Any, name: str, options: Options, plugged_class: type, groups: ExpertGroups, says: bool = True
) -> None:
    """Puts our dispatcher in the place of the stock one that MoELayer.__init__ has built."""
    pg_collection = types.SimpleNamespace(ep=groups.ep, expt_tp=groups.etp, tp_ep=groups.joint)
    system = system_of(name)
    dispatcher = system.build(groups, options, layer.config)
    layer.token_dispatcher = plugged_class(dispatcher, layer.config, pg_collection, functools.partial(routed_by, layer))
    if layer.shared_experts is not None and layer.shared_expert_overlap:
        layer.token_dispatcher.set_shared_experts(layer.shared_experts)
    if options.expert_order is not None:
        keep_expert_order(layer, options.expert_order)
    if system.attach is not None:
        system.attach(layer, options)
    if says:
        announce(layer, name, dispatcher, options)
