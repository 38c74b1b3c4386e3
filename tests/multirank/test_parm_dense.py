"""Tokens that all TP ranks hold, under S1, S2 and the reference schedule, against the same MoE on a single process.

The dense reference is stock's layer with all experts on every rank, whole, and no group larger than a rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from tests.multirank.test_dispatchers import DROP, PAD
from tests.multirank.test_parm import SINKHORN, phases_of_any_size
from tests.ranks.devices import difference

SEQUENCE, BATCH = 24, 3


def weights_of(layer: Any) -> Iterator[tuple[int, str, torch.nn.Parameter]]:
    """(global number of the expert, fc1 or fc2, weight) of the experts that a rank holds."""
    for name, parameter in layer.named_parameters():
        found = re.search(r"experts\.local_experts\.(\d+)\.linear_(fc[12])\.weight", name)
        if found:
            yield layer.local_expert_indices[int(found[1])], found[2], parameter


def whole(weight: str, shards: list[torch.Tensor]) -> torch.Tensor:
    """An expert's matrix from its shards: fc1 holds gate and up side by side, each split by rows; fc2 by columns."""
    if weight == "fc2":
        return torch.cat(shards, dim=1)
    gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return torch.cat([*gates, *ups])


def assemble(mine: dict[tuple[int, str], torch.Tensor], etp_rank: int, etp: int, add: bool) -> dict:
    """The whole matrices of all experts. Of ranks that hold the same shard, the sum or the first."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (etp_rank, {key: tensor.cpu() for key, tensor in mine.items()}))
    shards: dict[tuple[int, str], list[Any]] = {}
    for shard, tensors in gathered:
        for key, tensor in tensors.items():
            slots = shards.setdefault(key, [None] * etp)
            slots[shard] = tensor if slots[shard] is None else slots[shard] + tensor if add else slots[shard]
    return {key: whole(key[1], slots) for key, slots in shards.items()}


def compare_with_dense(
    dispatcher: str, schedule: str, layout: dict[str, int], settings: dict[str, Any]
) -> dict[str, float]:
    """Norm of the difference over the norm, of output, input gradient, router's and experts' gradients.

    `settings` with PADDED are those of a pass in which every third token is padding.
    """
    settings = dict(settings)
    mask = (torch.arange(SEQUENCE) % 3 == 0).expand(BATCH, -1) if settings.pop("padded", False) else None
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    tp, etp = layout["tp"], layout["etp"]
    replica = dist.get_rank() // tp
    megatron_moe_opt.register(Options(parm_schedule=schedule[:2]))
    with parallel(**layout), nullcontext() if schedule == "S2 in one phase" else phases_of_any_size():
        config = moe_config(moe_token_dispatcher_type=dispatcher, sequence_parallel=False, **settings)
        ours = build_layer(config)
        generator = torch.Generator().manual_seed(5 + replica)
        hidden, weights = (torch.randn(SEQUENCE, BATCH, config.hidden_size, generator=generator) for _ in "ab")
        leaf = hidden.clone().requires_grad_()
        output, _ = ours(leaf, padding_mask=mask)
        (output * weights).sum().backward()
        # The output gradient is the same on all TP ranks. A whole sum is taken of each weight's gradient.
        experts = {(expert, name): weight for expert, name, weight in weights_of(ours)}
        etp_rank = ours.token_dispatcher.dispatcher.groups.etp_rank
        values = assemble({key: weight.detach() for key, weight in experts.items()}, etp_rank, etp, add=False)
        grads = assemble({key: weight.grad for key, weight in experts.items()}, etp_rank, etp, add=True)
    megatron_moe_opt.register()

    # S1 drops and balances in each part of the tokens by itself.
    together = "moe_expert_capacity_factor" in settings or settings.items() >= SINKHORN.items()
    parts = tp if together and dispatcher == "parm" and schedule == "S1" else 1
    with parallel():
        dense = build_layer(moe_config(**settings))
        with torch.no_grad():
            dense.router.weight.copy_(ours.router.weight)
            for expert, name, weight in weights_of(dense):
                weight.copy_(values[expert, name])
        outputs, input_grads = [], []
        for part, part_weights in zip(hidden.chunk(parts), weights.chunk(parts), strict=True):
            dense_leaf = part.clone().requires_grad_()
            dense_output, _ = dense(dense_leaf, padding_mask=mask)
            (dense_output * part_weights).sum().backward()
            outputs.append(dense_output.detach())
            input_grads.append(dense_leaf.grad)
        dense_grads = {(expert, name): weight.grad for expert, name, weight in weights_of(dense)}
        for grad in dense_grads.values():  # of all tokens, each counted once
            dist.all_reduce(grad.div_(tp))
    found = {"output": output.detach(), "input grad": leaf.grad, "router grad": ours.router.weight.grad}
    expected = {"output": torch.cat(outputs), "input grad": torch.cat(input_grads)}
    expected["router grad"] = dense.router.weight.grad
    found |= {f"expert {key}": grad for key, grad in grads.items()}
    expected |= {f"expert {key}": grad for key, grad in dense_grads.items()}
    return {name: difference(found[name].to(expected[name].device), expected[name]) for name in expected}


NO_AUX = {"moe_aux_loss_coeff": 0.0}
PADDED = {"padded": True}
DROPLESS = {"moe_z_loss_coeff": 0.01, "moe_router_topk": 4}
SCHEDULES = (("parm", "S1"), ("parm", "S2"), ("deepspeed", "S1"))
IN_ONE_PHASE = ("parm", "S2 in one phase")


Case = tuple[dict[str, int], dict[str, Any], tuple[str, str]]


def compare_all(cases: list[Case]) -> list[str]:
    """What is beyond the numerics contract, as text."""
    far = []
    for layout, settings, (dispatcher, schedule) in cases:
        errors = compare_with_dense(dispatcher, schedule, layout, settings)
        far += [
            f"{dispatcher} {schedule}, {layout}, {settings}: {name} {error:.1e}"
            for name, error in errors.items()
            if not error < 1e-6
        ]
    return far


def in_turn(
    layouts: list[dict[str, int]],
    schedules: tuple[tuple[str, str], ...],
    settings: tuple[dict[str, Any], dict[str, Any]] = (DROPLESS, NO_AUX | PAD),
) -> list[Case]:
    """Every schedule in every layout, under one of two settings in turn."""
    return [
        (layout, settings[(row + column) % 2], schedule)
        for row, layout in enumerate(layouts)
        for column, schedule in enumerate(schedules)
    ]


def test_sizes_that_fit_4_ranks(ranks):
    sizes = itertools.product((2, 4), (1, 2), (1, 2, 4))
    layouts = [{"tp": tp, "ep": ep, "etp": etp} for tp, ep, etp in sizes if ep * etp <= 4 and (ep > 1 or etp == tp)]
    assert ranks.run(compare_all, cases=in_turn(layouts, SCHEDULES)) == [[]] * 4


def test_tokens_that_depend_on_each_other(ranks):
    layouts = [{"tp": 2, "ep": 2, "etp": 2}, {"tp": 4, "ep": 2, "etp": 1}]
    cases = in_turn(layouts, (*SCHEDULES, IN_ONE_PHASE), (NO_AUX | DROP, SINKHORN))
    assert ranks.run(compare_all, cases=cases) == [[]] * 4


def test_padding_is_no_part_of_losses(ranks):
    layouts = [{"tp": 2, "ep": 2, "etp": 2}, {"tp": 4, "ep": 2, "etp": 1}]
    cases = in_turn(layouts, SCHEDULES, (DROPLESS | PADDED, DROPLESS | PADDED))
    assert ranks.run(compare_all, cases=cases) == [[]] * 4


def test_sizes_that_need_8_ranks(eight_ranks):
    layouts = [{"tp": tp, "ep": 2, "etp": 4} for tp in (2, 4)]
    assert eight_ranks.run(compare_all, cases=in_turn(layouts, (*SCHEDULES, IN_ONE_PHASE))) == [[]] * 8
