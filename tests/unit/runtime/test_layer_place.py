"""Where a message about a failure says that it was."""

from __future__ import annotations

import pytest

from megatron_moe_opt.errors import LayerError
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.observed.layer_place import Place, belonging_to, describe_place, enter, leave, passing
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule


def test_backward_runs_forward_again_inside_of_it():
    enter(Place(3, "mpmoe", "backward"))
    with passing(Place(3, "mpmoe", "recompute")):
        assert describe_place() == "in MoE layer 3 (mpmoe, recompute)"
    assert describe_place() == "in MoE layer 3 (mpmoe, backward)"
    leave()
    assert describe_place() == "after MoE layer 3 (mpmoe, backward)"
    with passing(Place(4, "mpmoe", "forward")):
        pass
    assert describe_place() == "after MoE layer 4 (mpmoe, forward)"


def test_what_was_started_belongs_to_the_pass_that_it_is_for():
    def fail() -> None:
        raise ValueError("boom")

    schedule = Schedule("test", (Op(Kind.DECODE, Lane.EXPERTS, 3),))
    with passing(Place(1, "expert-migration", "forward")):
        with belonging_to(Place(2, "expert-migration", "forward")):
            running = executor().start(schedule, [steps.call(fail)])
        assert describe_place() == "in MoE layer 1 (expert-migration, forward)"
    said = (
        r"^in MoE layer 2 \(expert-migration, background\): lane experts: decode of chunk 3 failed: ValueError: boom$"
    )
    with pytest.raises(LayerError, match=said) as error:
        running.wait()
    assert isinstance(error.value.__cause__, ValueError)
