"""Layouts on 4 ranks with real process groups: Megatron's are those that we list, and a horizontal one trains."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.topology.layouts import HORIZONTAL, ROLES, VERTICAL, Layout


@contextmanager
def _megatron(layout):
    """Megatron's parallel state for `layout`, in its order, inside the block."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.ranks.megatron import forget_losses

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        order=layout.order,
    )
    try:
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234)
        yield
    finally:
        forget_losses()
        parallel_state.destroy_model_parallel()


def _groups(layout):
    """The ranks of this rank's group of each role."""
    from megatron.core import parallel_state

    with _megatron(layout):
        groups = {
            "tp": parallel_state.get_tensor_model_parallel_group(),
            "cp": parallel_state.get_context_parallel_group(),
            "dp": parallel_state.get_data_parallel_group(),
            "pp": parallel_state.get_pipeline_model_parallel_group(),
            "expert-tp": parallel_state.get_expert_tensor_parallel_group(),
            "ep": parallel_state.get_expert_model_parallel_group(),
            "expert-dp": parallel_state.get_expert_data_parallel_group(),
        }
        return {role: tuple(dist.get_process_group_ranks(group)) for role, group in groups.items()}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, cp=2, ep=2, order=HORIZONTAL),
        Layout(4, cp=2, ep=4),
        Layout(4, tp=2, ep=2, expert_tp=2),
        Layout(4, tp=2, cp=2, ep=2, expert_tp=1),
        Layout(4, cp=2, ep=2, pp=2, order="tp-cp-ep-pp-dp"),
    ],
    ids=str,
)
def test_groups_are_megatrons(ranks, layout):
    of_rank = ranks.run(_groups, layout=layout)
    for role in ROLES:
        assert all(sorted(groups[role]) == list(groups[role]) for groups in of_rank)
        assert tuple(dict.fromkeys(groups[role] for groups in of_rank)) == layout.groups(role)


def _losses(order):
    from tests.ranks.gpt import gpt

    layout = Layout(4, cp=2, ep=2, order=order)
    with _megatron(layout):
        return gpt(moe_token_dispatcher_type="monta", microbatches=1).train(3)


def test_horizontal_and_vertical_layouts_train_alike(ranks):
    """CP 2 and EP 2: the experts of a token are in its own CP group (vertical) or in another sample's (horizontal)."""
    vertical, horizontal = (ranks.run(_losses, order=order) for order in (VERTICAL, HORIZONTAL))
    assert len(set(vertical[0])) == 3
    assert horizontal[0] == pytest.approx(vertical[0], rel=1e-5)
