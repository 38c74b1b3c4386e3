"""Pipelines with virtual stages and overlapped micro-batches, held against Megatron's own order of passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_moe_opt.cli.plan.report import pipeline_flags
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.predicting.layer_on_cluster import DISPATCH
from megatron_moe_opt.planning.predicting.overlapped_batches import overlapped
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.pipeline import StagePasses, step_seconds, takes, under_way, warm_up
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from megatron_moe_opt.topology.layouts import Layout

SHAPE = ModelShape(layers=8, hidden=64, heads=4, vocabulary=128, experts=8, topk=2, ffn=96)
PIPELINES = [(pp, vpp) for pp, vpp in product((1, 2, 3, 4, 8), (1, 2, 4)) if pp > 1 or vpp == 1]


def _layout(pp: int, vpp: int) -> Layout:
    return Layout(pp, pp=pp, vpp=vpp)


def _group(layout: Layout, stage: int) -> SimpleNamespace:
    """What Megatron asks for its place in the pipeline."""
    group = SimpleNamespace(size=lambda: layout.pp, rank=lambda: stage)
    virtual = layout.vpp if layout.vpp > 1 else None
    return SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)


@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
def test_forward_passes_before_the_first_backward_pass_are_megatrons(pp, vpp):
    layout, micro_batches = _layout(pp, vpp), 4 * pp
    for stage, overlaps in product(range(pp), (False, True)):
        if pp == 1 or not takes(layout, micro_batches, overlaps):
            continue
        of_megatron = get_pp_rank_microbatches(
            micro_batches, vpp, pp, overlap_moe_expert_parallel_comm=overlaps, p2p_communicator=_group(layout, stage)
        )[2]
        assert warm_up(layout, stage, overlaps) == of_megatron


def _passes(layout: Layout, stage: int, micro_batches: int, overlaps: bool) -> list[tuple[tuple | None, tuple | None]]:
    """Megatron's order of (forward, backward) passes of a stage, each (micro-batch, virtual stage) or None."""
    table = get_schedule_table(micro_batches, layout.vpp, layout.pp)
    backward = [(number, layout.vpp - 1 - chunk) for number, chunk in table]
    first = min(warm_up(layout, stage, overlaps), len(table))
    pairs = list(zip(table[first:], backward, strict=False))
    if not overlaps:  # a forward pass, then a backward pass
        pairs = [one for pair in pairs for one in ((pair[0], None), (None, pair[1]))]
    return [(one, None) for one in table[:first]] + pairs + [(None, one) for one in backward[len(table) - first :]]


def _played(layout: Layout, micro_batches: int, alone: float, beside: float) -> tuple[float, list[int]]:
    """The end of a step whose passes start as soon as their stage is free and their input is there, and the most
    forward passes that each stage holds.
    """
    overlaps = beside < alone
    last = layout.chunks - 1
    orders = [_passes(layout, stage, micro_batches, overlaps) for stage in range(layout.pp)]

    def needs(stage: int, one: tuple[int, int], forward: bool) -> tuple | None:
        number, chunk = one[0], one[1] * layout.pp + stage
        if forward:
            return None if chunk == 0 else (number, chunk - 1, True)
        return (number, last, True) if chunk == last else (number, chunk + 1, False)

    ends, free, at = {}, [0.0] * layout.pp, [0] * layout.pp
    while any(at[stage] < len(orders[stage]) for stage in range(layout.pp)):
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                parts = [
                    (one, is_forward) for one, is_forward in zip(order[at[stage]], (True, False), strict=True) if one
                ]
                inputs = [needs(stage, *part) for part in parts]
                if any(one is not None and one not in ends for one in inputs):
                    break
                start = max([free[stage], *(ends[one] for one in inputs if one is not None)])
                seconds = beside if len(parts) == 2 else alone * (1 / 3 if parts[0][1] else 2 / 3)
                free[stage] = start + seconds
                for one, is_forward in parts:
                    ends[one[0], one[1] * layout.pp + stage, is_forward] = free[stage]
                at[stage] += 1
                moved = True
        assert moved, "Megatron's order waits in a circle"
    most = []
    for order in orders:
        held = [0]
        for forward, backward in order:
            held += [held[-1] + (forward is not None), held[-1] + (forward is not None) - (backward is not None)]
        most.append(max(held))
    return max(free), most


@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
@pytest.mark.parametrize("beside", [1.0, 0.7])
def test_a_step_takes_what_megatrons_order_of_passes_takes(pp, vpp, beside):
    layout = _layout(pp, vpp)
    overlaps = beside < 1
    for micro_batches in (pp, 2 * pp, 5 * pp):
        if not takes(layout, micro_batches, overlaps):
            continue
        end, most = _played(layout, micro_batches, 1 / vpp, beside / vpp)
        found = step_seconds(StagePasses(1.0, beside, 0.0), layout, micro_batches)
        assert found == pytest.approx(end, rel=1e-9 if not overlaps else 0.03)
        held = [min(passes, micro_batches * vpp) / vpp for passes in most]
        layers = 2 * vpp if overlaps else 1000  # of two in a pass both are there besides
        assert held == [under_way(layout, one, micro_batches, layers, overlaps) for one in range(pp)]
        if overlaps:  # of many, two are
            whole = [under_way(layout, one, micro_batches, 20 * vpp, overlaps) for one in range(pp)]
            assert all(0 <= most - least <= 0.9 / vpp + 1e-9 for most, least in zip(held, whole, strict=True))


def test_refuses_stages_that_cannot_be():
    with pytest.raises(ConfigurationError, match="vpp 2 with pp 1: virtual stages are of a pipeline; raise pp"):
        _layout(1, 2)
    for pp, vpp in ((6, 1), (3, 2)):
        with pytest.raises(
            ConfigurationError, match=f"layers = 8 cannot be cut into pp = {pp} x vpp = {vpp} equal parts"
        ):
            SHAPE.parameters(_layout(pp, vpp))


def test_virtual_stages_need_as_many_micro_batches_and_overlap_needs_virtual_stages():
    assert takes(_layout(4, 2), 8) and not takes(_layout(4, 2), 6) and takes(_layout(4, 1), 6)
    assert takes(_layout(1, 1), 3, overlaps=True) and not takes(_layout(4, 1), 8, overlaps=True)


def _layers_of_megatron(model: ModelShape, layout: Layout, stage: int, virtual: int) -> tuple[int, int]:
    """(first layer, number of layers) where Megatron has the flags that a plan prints."""
    flags = pipeline_flags(model, layout)
    parts = flags.get("--pipeline-model-parallel-layout")
    virtual_stages = flags.get("--num-virtual-stages-per-pipeline-rank")
    if parts is not None:  # as Megatron's arguments have it
        parts = parts.strip('"')
        virtual_stages = PipelineParallelLayerLayout.get_num_stages_from_str(parts) // layout.pp
    assert (virtual_stages or 1) == layout.vpp
    config = TransformerConfig(
        num_layers=model.layers, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual_stages, pipeline_dtype="bf16",
        pipeline_model_parallel_layout=parts,
        num_layers_in_last_pipeline_stage=flags.get("--decoder-last-pipeline-num-layers"),
    )  # fmt: skip
    vp_stage = virtual if layout.vpp > 1 else None
    if parts is not None:
        of_megatron = config.pipeline_model_parallel_layout
        place = {"vp_stage": vp_stage, "pp_rank": stage}
        return of_megatron.get_layer_offset(**place), of_megatron.get_num_layers_to_build(**place)
    return get_transformer_layer_offset(config, vp_stage, stage), get_num_layers_to_build(config, vp_stage, stage)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp"),
    [(8, 2, 2), (12, 2, 3), (24, 4, 2), (61, 16, 1), (61, 16, 2), (61, 8, 4), (27, 2, 1), (7, 3, 1), (13, 2, 2)],
)
def test_layers_lie_where_the_flags_have_megatron_lay_them(layers, pp, vpp, monkeypatch):
    layout, model = _layout(pp, vpp), replace(SHAPE, layers=layers)
    monkeypatch.setattr(
        "megatron.core.parallel_state.get_virtual_pipeline_model_parallel_world_size",
        lambda: vpp if vpp > 1 else None,
    )
    found = []
    for stage in range(pp):
        chunks = model.chunks_of_stage(layout, stage)
        assert model.layers_of_stage(layout, stage) == sum(map(len, chunks))
        for virtual, there in enumerate(chunks):
            assert (there.start, len(there)) == _layers_of_megatron(model, layout, stage, virtual)
            found += there
    assert sorted(found) == list(range(layers))


ONE = Prediction("alltoall", 9.0, 4.0, 1.0, 1.0, 0)


@given(
    st.floats(0.01, 20), st.floats(0.01, 20), st.floats(0, 20),
    st.floats(0.3, 1), st.just(1.0) | st.floats(0.3, 1),
)  # fmt: skip
def test_overlapped_layers_take_what_their_pieces_take_side_by_side(exposed, experts, outside, rate, beside):
    """Each of the four pieces played by the simulator: one micro-batch's exchange beside another's computation."""
    slowdown = {(Lane.INTER, Lane.COMPUTE): rate, (Lane.COMPUTE, Lane.INTER): beside}
    one = replace(ONE, exposed=exposed, seconds=exposed + experts, terms={"sum": exposed + experts})
    found = overlapped(one, outside, slowdown)
    played = 0.0
    for piece in (outside / 3, experts * 2 / 3, experts / 3, outside * 2 / 3):
        seconds = {Lane.INTER: exposed / 4, Lane.COMPUTE: piece}
        ops = tuple(
            Op(kind, lane, group="ep" if lane is Lane.INTER else None)
            for kind, lane in ((Kind.ALL_TO_ALL, Lane.INTER), (Kind.COMPUTE, Lane.COMPUTE))
        )
        played += simulate(Schedule("piece", ops), lambda op, seconds=seconds: seconds[op.lane], slowdown).seconds
    assert found.seconds + outside == pytest.approx(played)
    assert found.exposed == pytest.approx(exposed - found.hidden, abs=1e-9)
    with_copies = replace(one, variant="monta:O1", seconds=one.seconds + 1, terms={DISPATCH: exposed + 1})
    assert overlapped(with_copies, outside, slowdown).seconds == pytest.approx(found.seconds + 1)  # they neither hide
    assert found.seconds + found.hidden == pytest.approx(one.seconds)
    assert found.exposed + found.hidden == pytest.approx(one.exposed)
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    assert found.exposed >= 0


def test_a_plan_with_exchanges_that_hide_whole_is_read_again(tmp_path):
    """The four pieces of some exchanges, rounded each, are more than the exchange."""
    hidden = [
        overlapped(replace(ONE, exposed=tenths / 10), 100.0, {(Lane.INTER, Lane.COMPUTE): rate / 1000})
        for tenths in range(1, 40)
        for rate in range(600, 1001, 50)
    ]
    Plan({1: "alltoall"}, tuple(hidden), "a cluster", ep=8, etp=1, experts=8).save(tmp_path / "plan.json")
    assert list(Plan.load(tmp_path / "plan.json").candidates) == hidden
