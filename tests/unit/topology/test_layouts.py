"""Layouts against Megatron's own parallel_state, and the layouts of MoNTA's Fig. 12."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.topology.expansion import Machines, MoeModel, expand
from megatron_moe_opt.topology.layouts import HORIZONTAL, JOINT_ROLES, ROLES, VERTICAL, Layout, divisors

DESCRIPTIONS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expert-tp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_DATA_PARALLEL_GROUP": "expert-dp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": JOINT_GROUP,
}


def megatron_groups(world, tp, cp, ep, expert_tp, pp, order):
    """The groups that Megatron's unmodified initialize_model_parallel makes, by role; None where it refuses.

    Only torch.distributed is played: nothing is communicated, so that the world can be of any size.
    """
    groups = {role: [] for role in DESCRIPTIONS.values()}

    def create_group(ranks=None, group_desc=None, backend=None, **_):
        if group_desc in DESCRIPTIONS:
            groups[DESCRIPTIONS[group_desc]].append(tuple(ranks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: world)
        patch.setattr(dist, "get_rank", lambda: 0)
        patch.setattr(parallel_state, "create_group", create_group)
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=expert_tp,
                pipeline_model_parallel_size=pp,
                order=order,
                create_gloo_process_groups=False,
            )
        except (RuntimeError, AssertionError):
            return None
        finally:
            parallel_state.destroy_model_parallel()
    return {role: tuple(found) for role, found in groups.items()}


def _agrees_with_megatron(*sizes):
    """Whether a layout of these sizes exists, here and in Megatron alike."""
    expected = megatron_groups(*sizes)
    try:
        layout = Layout(*sizes)
    except ConfigurationError:
        assert expected is None, f"Megatron makes {sizes}"
        return False
    joint = {tuple(sorted(ranks)) for ranks in expected.pop(JOINT_GROUP)}
    assert {role: layout.groups(role) for role in ROLES} == expected
    assert {tuple(sorted(ranks)) for ranks in layout.groups(*JOINT_ROLES)} == joint
    assert {role: layout.first_group(role) for role in ROLES} == {role: groups[0] for role, groups in expected.items()}
    assert layout.first_group(*JOINT_ROLES) == layout.groups(*JOINT_ROLES)[0]
    for roles, unit in itertools.product(((role,) for role in ROLES), (1, 4, 6)):
        moved = {ranks[0] % unit: ranks for ranks in reversed(layout.groups(*roles))}
        assert layout.groups(*roles, unit=unit) == tuple(sorted(moved.values()))
    for ranks in layout.groups(*JOINT_ROLES):  # the expert-TP rank is the fastest
        shards = [ranks[first : first + layout.expert_tp] for first in range(0, len(ranks), layout.expert_tp)]
        assert set(shards) <= set(layout.groups("expert-tp")) and next(zip(*shards, strict=True)) in layout.groups("ep")
    return True


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])
def test_groups_are_megatrons(world):
    """A sample of the sizes that fit the world, in the two orders that its scripts use and the horizontal one."""
    sizes = list(itertools.product(divisors(world), repeat=5))
    random.Random(world).shuffle(sizes)
    made = 0
    for sizes_of_one in sizes:
        for order in (VERTICAL, "tp-cp-ep-pp-dp", HORIZONTAL):
            tp, cp, ep, expert_tp, pp = sizes_of_one
            if world % (tp * cp * pp) == 0 and world % (ep * expert_tp * pp) == 0:
                made += _agrees_with_megatron(world, *sizes_of_one, order)
        if made >= 40:
            break
    assert made >= (40 if world > 2 else 3)


@settings(max_examples=200)
@given(
    world=st.sampled_from([8, 12, 16, 24]),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 5),
    order=st.permutations(VERTICAL.split("-")).map("-".join),
)
def test_any_order_is_refused_or_numbered_as_by_megatron(world, sizes, order):
    tp, cp, ep, expert_tp, pp = sizes
    assume(world % (tp * cp * pp) == 0)
    _agrees_with_megatron(world, *sizes, order)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"tp": 3}, "tp 3 x cp 1 x pp 1 does not divide the 8 ranks"),
        ({"ep": 4, "expert_tp": 4}, "expert-tp 4 x ep 4 x pp 1 does not divide the 8 ranks"),
        ({"cp": 0}, "tp 1 x cp 0 x pp 1 does not divide the 8 ranks"),
        ({"order": "tp-dp-pp"}, "order tp-dp-pp is not one of ranks: name each of tp-cp-ep-dp-pp once"),
        (
            {"order": "tp-cp-ep-pp-dp", "pp": 2, "ep": 4},
            "order tp-cp-ep-pp-dp with pp 2 needs the same pipeline stages",
        ),
    ],
    ids=str,
)
def test_layouts_that_cannot_be(sizes, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        Layout(8, **sizes)


MODEL = MoeModel(experts=8, attention_heads=64, expert_ffn_hidden=28672, layers=32)


def _meetings(layout):
    """Returns, for each EP and CP group, (ranks that they share, the smaller one's size)."""
    cps = [set(ranks) for ranks in layout.groups("cp")]
    return [(len(cp.intersection(ep)), min(len(cp), len(ep))) for ep in layout.groups("ep") for cp in cps]


def orthogonal(layout):
    """Whether an EP group and a CP group never share more than one rank: Fig. 12(a), horizontal."""
    return all(shared <= 1 for shared, _ in _meetings(layout))


def aligned(layout):
    """Whether an EP group and a CP group that meet lie one within the other: Fig. 12(b), vertical."""
    return all(shared in (0, smaller) for shared, smaller in _meetings(layout))


def _figure_12(nodes, context, **options):
    """Nodes of 8 GPUs; a node holds 32K tokens of context."""
    return expand(Machines(nodes, 8, options.pop("switch_ranks", None)), MODEL, context * 1024, 32 * 1024, **options)


def test_horizontal_as_in_figure_12a():
    """16 nodes, EP over nodes 0-7 and 8-15, CP between node n and node n + 8."""
    layout = _figure_12(16, 64).chosen
    assert (layout.tp, layout.expert_tp, layout.ep, layout.cp, layout.dp) == (8, 8, 8, 2, 8)
    assert orthogonal(layout) and not aligned(layout)
    assert layout.groups("tp")[1] == layout.groups("expert-tp")[1] == tuple(range(8, 16))
    assert layout.groups("ep")[0] == tuple(range(0, 64, 8))
    assert layout.groups("cp")[0] == (0, 64) and layout.groups("cp")[9] == (9, 73)
    assert layout.groups("expert-dp")[0] == (0, 64)
    assert layout.blocks[3] == tuple(range(3, 128, 8))  # one TP position of all nodes


def test_vertical_as_in_figure_12b():
    """16 nodes hold one sequence of 512K; experts lie over nodes 0-7, and again over nodes 8-15."""
    layout = _figure_12(16, 512).chosen
    assert (layout.ep, layout.cp, layout.dp, layout.expert_dp) == (8, 16, 1, 2)
    assert aligned(layout) and not orthogonal(layout)
    assert layout.groups("cp")[0] == tuple(range(0, 128, 8))
    assert layout.groups("ep")[0] == tuple(range(0, 64, 8))
    assert layout.groups("ep")[8] == tuple(range(64, 128, 8))


@pytest.mark.parametrize(
    ("nodes", "context", "options", "cp", "order", "reason"),
    [
        (8, 32, {}, 1, HORIZONTAL, "cp 1 < ep 8, and the switch network allows"),
        (16, 33, {}, 2, HORIZONTAL, "cp 2 < ep 8, and the switch network allows"),
        (32, 128, {}, 4, HORIZONTAL, "cp 4 < ep 8, and the switch network allows"),
        (32, 128, {"switch_ranks": 32}, 4, HORIZONTAL, "cp 4 < ep 8, and the switch network allows"),
        (32, 128, {"switch_ranks": 31}, 4, VERTICAL, "the switch network connects 31 ranks, not cp x ep"),
        (16, 128, {}, 4, VERTICAL, "there are no cp x ep = 32 TP groups"),
        (8, 256, {}, 8, VERTICAL, "cp 8 >= ep 8"),
        (64, 1024, {}, 32, VERTICAL, "cp 32 >= ep 8"),
        (24, 96, {}, 3, HORIZONTAL, "cp 3 < ep 8, and the switch network allows"),
        # 2 * 3 does not divide 80K
        (24, 80, {}, 4, VERTICAL, "there are no cp x ep = 32 TP groups"),
        (32, 64, {"pp": 2}, 2, HORIZONTAL, "cp 2 < ep 8"),
        (8, 64, {"ep": 4, "tp": 8}, 2, HORIZONTAL, "cp 2 < ep 4"),
    ],
)
def test_the_papers_rule(nodes, context, options, cp, order, reason):
    expansion = _figure_12(nodes, context, **options)
    assert (expansion.chosen.cp, expansion.chosen.order) == (cp, order)
    assert reason in expansion.reason
    assert expansion.chosen in (expansion.horizontal, expansion.vertical)
    assert expansion.chosen.tp == 8 and expansion.chosen.world == nodes * 8


@pytest.mark.parametrize(
    ("nodes", "cp", "ep"), [(16, 2, 8), (32, 4, 8), (32, 2, 8), (8, 8, 8), (64, 16, 8), (32, 4, 4)]
)
def test_network_scale(nodes, cp, ep):
    """cp * ep ranks of one TP position for the horizontal layout, max(cp, ep) for the vertical one; in whole blocks."""
    world = nodes * 8
    for order, scale in ((HORIZONTAL, cp * ep), (VERTICAL, max(cp, ep))):
        layout = Layout(world, tp=8, cp=cp, ep=ep, expert_tp=8, order=order)
        if order == HORIZONTAL and layout.dp % ep:
            continue
        assert {len(block) for block in layout.blocks} == {scale}
        assert sorted(rank for block in layout.blocks for rank in block) == list(range(world))
        assert all(len({rank % 8 for rank in block}) == 1 for block in layout.blocks)


def test_neither_orthogonal_nor_aligned():
    """EP 3 over CP 2 takes one whole CP group and half of the next."""
    layout = Layout(6, cp=2, ep=3)
    assert layout.groups("ep") == ((0, 1, 2), (3, 4, 5)) and layout.groups("cp")[1] == (2, 3)
    assert not orthogonal(layout) and not aligned(layout)


def test_flags():
    flags = _figure_12(16, 256, pp=2, ep=4).chosen.flags()
    assert " ".join(flags) == (
        "--tensor-model-parallel-size 8 --context-parallel-size 8 --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel"
    )
    fields = TransformerConfig.__dataclass_fields__  # Megatron-LM makes its arguments of these
    assert all(flag[2:].replace("-", "_") in fields for flag in flags if flag.startswith("--"))
    mapped = Layout(16, tp=2, cp=2, ep=2, expert_tp=2, pp=2, order="tp-cp-ep-pp-dp")
    assert mapped.flags()[-2:] == ("--sequence-parallel", "--use-tp-pp-dp-mapping")
    assert "--sequence-parallel" not in Layout(4, ep=2).flags()


def test_flags_of_horizontal_layouts():
    """The order does not matter to the groups without CP; with it no script makes them."""
    assert _figure_12(8, 32).chosen.flags() == replace(_figure_12(8, 32).chosen, order=VERTICAL).flags()
    with pytest.raises(
        ConfigurationError,
        match=r"^order tp-ep-dp-cp-pp cannot be asked for in Megatron-LM's scripts \(they align EP with CP\): call "
        r"parallel_state.initialize_model_parallel\(..., order='tp-ep-dp-cp-pp'\), or choose the vertical layout$",
    ):
        _figure_12(16, 64).chosen.flags()


@pytest.mark.parametrize(
    ("nodes", "context", "options", "sentence"),
    [
        (2, 32, {"tp": 3}, "--tensor-model-parallel-size 3 does not divide the 8 GPUs a node: choose a divisor of 8"),
        (2, 32, {"ep": 3}, "--expert-model-parallel-size 3 does not divide the 8 experts: choose a divisor of 8"),
        (
            2,
            32,
            {"ep": 4},
            "--expert-model-parallel-size 4 does not divide the 2 TP groups of a pipeline stage: choose",
        ),
        (6, 32, {"pp": 3, "tp": 4}, "--pipeline-model-parallel-size 3 does not divide the 32 layers: choose a divisor"),
        (3, 32, {"pp": 2}, "--pipeline-model-parallel-size 2 does not divide the 3 TP groups: choose a divisor of 3"),
        (
            4,
            256,
            {},
            "a context of 262144 tokens, 32768 of them on a TP group, needs --context-parallel-size 8 or more",
        ),
    ],
    ids=str,
)
def test_refusals(nodes, context, options, sentence):
    with pytest.raises(ConfigurationError) as refusal:
        _figure_12(nodes, context, **options)
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize(("context", "held_context", "name"), [(0, 1, "context 0"), (1, -2, "held_context -2")])
def test_contexts_without_tokens(context, held_context, name):
    with pytest.raises(ConfigurationError, match=f"^{name} is not a number of tokens: give at least 1$"):
        expand(Machines(2, 8), MODEL, context, held_context)


def test_a_model_that_tp_does_not_divide():
    with pytest.raises(
        ConfigurationError, match="--tensor-model-parallel-size 8 does not divide the 12 attention heads"
    ):
        expand(Machines(2, 8), replace(MODEL, attention_heads=12), 4096, 4096)
