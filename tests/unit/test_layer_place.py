"""Where a message about a failure says that it was."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt.errors import LayerError
from megatron_moe_opt.runtime.engine.communication_lane import communication_lane
from megatron_moe_opt.runtime.observed.layer_place import Place, belonging_to, describe_place, enter, leave, passing


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


def test_what_a_lane_does_belongs_to_the_pass_that_it_is_for():
    def fail() -> torch.Tensor:
        raise ValueError("boom")

    lane = communication_lane("test", torch.device("cpu"))
    with passing(Place(1, "expert-migration", "forward")):
        with belonging_to(Place(2, "expert-migration", "forward")):
            result = lane.submit(fail)
        assert describe_place() == "in MoE layer 1 (expert-migration, forward)"
    with pytest.raises(
        LayerError, match=r"^in MoE layer 2 \(expert-migration, background\): ValueError: boom$"
    ) as error:
        result()
    assert isinstance(error.value.__cause__, ValueError)
