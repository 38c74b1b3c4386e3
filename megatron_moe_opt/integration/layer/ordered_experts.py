"""`--moe-opt-expert-order FILE`: experts live on other ranks than stock Megatron's, and keep their numbers.

Rank r of an expert-parallel group holds the experts of its slots (planning/offline/expert_order.py) instead of a block
of consecutive ones. Four things follow, each at one seam:

1. routing     the router works with the experts' own numbers; where its results enter the dispatcher, columns of
               probabilities and routing map are put in slot order, so that dispatchers of ours see a stock layer
2. weights     when the layer is built, every expert's initial weights go from the rank that stock builds them on to the
               one that holds the expert: the model is the one that stock would have trained, bit for bit
3. checkpoint  sharded_state_dict gives every expert its own number: a distributed checkpoint loads under stock, and
               under any other order
4. the rest    what would save or load experts by place (plain state_dict, bucketed optimizer states) is refused
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.training_arguments import training_arguments
from megatron_moe_opt.planning.offline.expert_order import ExpertOrder, order_of_layer, read_expert_order
from megatron_moe_opt.runtime.engine.collectives import all_to_all_rows
from megatron_moe_opt.systems.megatron_config import given_flag, quantization
from megatron_moe_opt.systems.system import PREFIX

FLAG = f"{PREFIX}expert-order"
_SAVED_BY_PLACE = (
    "--save-params-interval",
    "--save-wgrads-interval",
    "--save-dgrads-interval",
    "--save-activations-interval",  # from megatron-core 0.18 on
    "--moe-routing-trace-path",  # from 0.19 on
    "--perform-rl-step",  # weights of a reference model
)
# Optimizer states by parameter: their experts have numbers. All others are of buckets, whose experts have places.
_FORMATS_BY_PARAMETER = (None, "fully_reshardable", "fully_sharded_model_space")


@functools.cache
def _order_of(path: Path) -> ExpertOrder:
    """Returns the order in a file, read once: Megatron-LM makes its configuration anew in every micro-batch."""
    return read_expert_order(path)


def forget_orders() -> None:
    """Has files read anew by models that are built from now on."""
    _order_of.cache_clear()


def check_expert_order(config: Any, path: Path) -> None:
    """Refuses a TransformerConfig, or a Megatron-LM command line, under which experts cannot be in another order.

    Raises:
        ConfigurationError: names the flag, its value and the way out.
    """
    order = _order_of(path)
    ep = config.expert_model_parallel_size
    if order.num_experts != config.num_moe_experts:
        raise ConfigurationError(
            f"{FLAG} {path} is of {order.num_experts} experts, but --num-experts is {config.num_moe_experts}: plan it "
            "from a trace of this model"
        )
    if order.ranks != ep:
        raise ConfigurationError(
            f"{FLAG} {path} is for {order.ranks} ranks, but --expert-model-parallel-size is {ep}: plan it for {ep}"
        )
    for flag, given in (
        ("--moe-grouped-gemm", config.moe_grouped_gemm),
        ("--mtp-num-layers", config.mtp_num_layers),
        (quantization(config), quantization(config) is not None),
        ("--use-cpu-initialization", config.use_cpu_initialization),
        ("--init-model-with-meta-device", getattr(config, "init_model_with_meta_device", False)),
    ):
        if given:
            raise ConfigurationError(f"{FLAG} {path} does not work with {flag}: drop one of the two")
    if "megatron.bridge" in sys.modules:
        raise ConfigurationError(
            f"{FLAG} {path} has experts in other places than their numbers, by which Megatron-Bridge copies weights "
            "from and to Hugging Face: drop it"
        )
    arguments = training_arguments()
    if arguments is not None:
        _check_checkpoints(arguments, path)


def _check_checkpoints(arguments: Any, path: Path) -> None:
    """Refuses, with ConfigurationError, ways to save and load in which Megatron-LM's own scripts would lose the order.
    Their command line is known before anything is built.
    """
    if (flag := given_flag(arguments, *_SAVED_BY_PLACE)) is not None:
        raise ConfigurationError(
            f"{FLAG} {path} has experts in other places than their numbers, by which {flag} names what it keeps: drop "
            "one of the two"
        )
    if not arguments.save:
        return  # what is loaded is looked at then
    if arguments.ckpt_format != "torch_dist" or arguments.non_persistent_ckpt_type == "local":
        raise ConfigurationError(
            f"{FLAG} {path} can be saved by --ckpt-format torch_dist only, without --non-persistent-ckpt-type local: "
            "choose that, or drop the order"
        )
    # Muon's optimizer has a flag of its own in the place of --use-distributed-optimizer (from megatron-core 0.18 on).
    distributed = arguments.use_distributed_optimizer or getattr(
        arguments, "use_layer_wise_distributed_optimizer", False
    )
    if distributed and not arguments.dist_ckpt_optim_fully_reshardable:
        raise ConfigurationError(
            f"{FLAG} {path} with a distributed optimizer needs optimizer states that are saved by parameter: add "
            "--dist-ckpt-optim-fully-reshardable"
        )


def keep_expert_order(layer: Any, path: Path) -> None:
    """Lets a MoELayer that was just built hold its experts in the order of the file, as soon as it has its number."""
    stock = layer.set_layer_number
    arranged = False

    @functools.wraps(stock)
    def set_layer_number(layer_number: int) -> None:
        nonlocal arranged
        stock(layer_number)
        if not arranged:
            _arrange(layer, path, order_of_layer(_order_of(path), path, layer_number))
            arranged = True

    layer.set_layer_number = set_layer_number


def _arrange(layer: Any, path: Path, slots: tuple[int, ...]) -> None:
    experts, group = layer.experts, layer.ep_group
    if type(experts).__name__ != "SequentialMLP":
        raise ConfigurationError(
            f"{FLAG} {path} is not supported for experts of type {type(experts).__name__}, only for SequentialMLP: "
            "change the layer specification, or drop the order"
        )
    _exchange_weights(experts, slots, group)
    layer.token_dispatcher.place_experts(slots)
    _number_experts(experts, path, slots, group.rank())


@torch.no_grad()
def _exchange_weights(experts: Any, slots: tuple[int, ...], group: ProcessGroup) -> None:
    """Moves every expert's weights from the rank where stock builds it to that of its slot; one parameter at a time."""
    num_local, first = experts.num_local_experts, group.rank() * experts.num_local_experts
    slot_of = {expert: slot for slot, expert in enumerate(slots)}
    built = sorted(range(first, first + num_local), key=slot_of.__getitem__)  # by the rank that they go to
    held = sorted(range(first, first + num_local), key=lambda slot: (slots[slot] // num_local, slot))
    send_counts, receive_counts = [0] * group.size(), [0] * group.size()
    for expert, slot in zip(built, held, strict=True):
        send_counts[slot_of[expert] // num_local] += 1
        receive_counts[slots[slot] // num_local] += 1
    for of_experts in zip(*(expert.parameters() for expert in experts.local_experts), strict=True):
        rows = torch.stack([of_experts[expert - first].flatten() for expert in built])
        arrived = all_to_all_rows(rows, receive_counts, send_counts, group)
        for slot, row in zip(held, arrived, strict=True):
            of_experts[slot - first].copy_(row.view_as(of_experts[slot - first]))


def _number_experts(experts: Any, path: Path, slots: tuple[int, ...], ep_rank: int) -> None:
    """Gives the experts their own numbers in distributed checkpoints, and refuses what knows only their places."""
    stock, num_local = type(experts).sharded_state_dict, experts.num_local_experts
    numbers = slots[ep_rank * num_local : (ep_rank + 1) * num_local]
    loads_by_number = False

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        nonlocal loads_by_number
        format_ = (metadata or {}).get("distrib_optim_sharding_type")
        arguments = training_arguments()
        is_alone = getattr(arguments, "finetune", False) or getattr(arguments, "no_load_optim", False)
        if format_ not in _FORMATS_BY_PARAMETER and not is_alone:  # else no optimizer state comes with the weights
            raise ConfigurationError(
                f"{FLAG} {path} cannot be saved or loaded with optimizer states of format {format_}: save them by "
                "parameter (in Megatron-LM: --dist-ckpt-optim-fully-reshardable), or train without the order"
            )
        loads_by_number = True
        state: dict[str, Any] = {}
        for place, number in enumerate(numbers):
            of_one = stock(_alone(experts, place, number, len(slots)), prefix, sharded_offsets, metadata)
            old, new = f"{prefix}local_experts.0.", f"{prefix}local_experts.{place}."
            state |= {new + key.removeprefix(old): value for key, value in of_one.items()}
        return state

    def refuse(*_: Any) -> None:
        if not loads_by_number:
            raise ConfigurationError(
                f"{FLAG} {path} loads distributed checkpoints only: convert this one, or drop the order"
            )

    def refuse_plain(*_: Any) -> None:
        raise ConfigurationError(
            f"{FLAG} {path}: a plain state_dict names experts by their place on a rank: save a distributed checkpoint"
        )

    def forget(*_: Any) -> None:
        nonlocal loads_by_number
        loads_by_number = False  # it was asked for to save them

    experts.sharded_state_dict = sharded_state_dict
    experts.register_forward_pre_hook(forget)
    experts.register_load_state_dict_pre_hook(refuse)
    experts.register_state_dict_pre_hook(refuse_plain)


def _alone(experts: Any, place: int, number: int, num_experts: int) -> Any:
    """Returns the experts as if there were one on each of as many ranks, this one on the rank of its number."""
    alone = copy.copy(experts)
    alone._modules = {"local_experts": torch.nn.ModuleList([experts.local_experts[place]])}
    alone.num_local_experts = 1
    alone.ep_group = types.SimpleNamespace(rank=lambda: number, size=lambda: num_experts)
    return alone
