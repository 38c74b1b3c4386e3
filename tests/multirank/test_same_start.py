"""Ranks that were told different things end together, before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.offline.expert_order import ExpertOrder, write_expert_order
from tests.multirank.test_auto import plan
from tests.ranks.pool import RankFailure


def build(
    dispatcher: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    odd: tuple[int, ...] = (2,),
    ep: int = 4,
    is_second: bool = False,
) -> None:
    """A layer of each rank; `theirs` is what odd ranks are told: options, or fields of the configuration, or both.

    `is_second`: all ranks have built one before that was told `ours`.
    """
    import megatron_moe_opt
    from megatron_moe_opt.integration import start_facts
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    told = theirs if dist.get_rank() in odd else ours
    options = {name: value for name, value in told.items() if name in Options.__dataclass_fields__}
    config = {name: value for name, value in told.items() if name.startswith(("moe_", "recompute_"))}
    with parallel(ep=ep), pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_facts, "__version__", told.get("version", "1"))
        megatron_moe_opt.register(Options(**options))
        try:
            if is_second:
                build_layer(moe_config(moe_token_dispatcher_type=dispatcher, **ours))
            build_layer(moe_config(**{"moe_token_dispatcher_type": dispatcher} | config))
        finally:
            megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("dispatcher", "ours", "theirs", "sentence"),
    [
        (
            "monta", {"monta_level": "O3", "chunks": 4}, {"monta_level": "O2", "chunks": 8},
            "--moe-opt-monta-level is O3 on ranks 0, 1, 3 and O2 on rank 2; "
            "--moe-opt-chunks is 4 on ranks 0, 1, 3 and 8 on rank 2",
        ),
        ("mpmoe", {"partitions": 4}, {}, "--moe-opt-partitions is 4 on ranks 0, 1, 3 and not given on rank 2"),
        (
            "expert-migration", {"domain_sizes": (2,)}, {"domain_sizes": (4,), "prefetch_layers": 0},
            "--moe-opt-domain-sizes is 2 on ranks 0, 1, 3 and 4 on rank 2; "
            "--moe-opt-prefetch-layers is 1 on ranks 0, 1, 3 and 0 on rank 2",
        ),
        ("netmoe", {}, {"moe_router_topk": 4}, "--moe-router-topk is 2 on ranks 0, 1, 3 and 4 on rank 2"),
        (
            "parm", {}, {"moe_token_dispatcher_type": "monta"},
            "--moe-token-dispatcher-type is parm on ranks 0, 1, 3 and monta on rank 2",
        ),
        (
            "mpmoe", {}, {"recompute_granularity": "selective"},
            "--recompute-granularity is not given on ranks 0, 1, 3 and selective on rank 2",
        ),
        ("monta", {}, {"version": "2"}, "megatron-moe-opt is 1 (interface"),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_told_in_what(ranks, dispatcher, ours, theirs, sentence):
    with pytest.raises(RankFailure) as caught:
        ranks.run(build, dispatcher=dispatcher, ours=ours, theirs=theirs)
    assert [rank for rank, *_ in caught.value.errors] == [0, 1, 2, 3]
    for _, kind, message in caught.value.errors:
        assert kind == "DisagreementError" and "\n" not in message
        assert message.startswith("the ranks are not started alike: ") and sentence in message
        assert ": give all ranks the same" in message


def test_ranks_that_differ_in_a_second_model_are_told(ranks):
    """Though most of them are told what they were for the first one, in which they agreed."""
    with pytest.raises(RankFailure) as caught:
        ranks.run(build, dispatcher="monta", ours={}, theirs={"moe_router_topk": 3}, is_second=True)
    assert [kind for _, kind, _ in caught.value.errors] == ["DisagreementError"] * 4


def test_replicas_that_differ_are_told(ranks, tmp_path: Path):
    """Each has its experts in an order of its own: DDP would add up the gradients of different ones."""
    options = []
    for name, slots in (("ours", [1, 0, 3, 2, 5, 4, 7, 6]), ("theirs", [7, 6, 5, 4, 3, 2, 1, 0])):
        write_expert_order(tmp_path / name, ExpertOrder(8, 1, 2, {1: tuple(slots)}))
        options.append({"expert_order": tmp_path / name})
    with pytest.raises(RankFailure) as caught:
        ranks.run(build, dispatcher="monta", ours=options[0], theirs=options[1], odd=(2, 3), ep=2)
    assert len(caught.value.errors) == 4
    for rank, kind, message in caught.value.errors:
        assert kind == "DisagreementError" and "--moe-opt-expert-order is a file with SHA-256" in message
        assert f"on rank {rank % 2} and a file with" in message


def test_plans_that_differ_are_told(ranks, tmp_path: Path):
    """Though the first rank reads it for all: whoever gives ranks two plans believes that both are followed."""
    files = []
    for name, variant in (("ours", "mpmoe:2"), ("theirs", "monta:O1")):
        (tmp_path / name).mkdir()
        files.append(plan(tmp_path / name / "plan.json", {1: variant, 2: variant}))
    with pytest.raises(RankFailure) as caught:
        ranks.run(build, dispatcher="auto", ours={"plan": files[0]}, theirs={"plan": files[1]})
    assert len(caught.value.errors) == 4
    for _, kind, message in caught.value.errors:
        assert kind == "DisagreementError" and "--moe-opt-plan is a file with SHA-256 " in message
        assert "... on ranks 0, 1, 3 and a file with" in message


def build_on_two() -> None:
    """Builds a layer on the first two of four ranks, in groups of their own that no other rank has a part in."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.runtime.job import same_start
    from tests.ranks.megatron import moe_config, parallel

    with parallel(ep=2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_start, "LATE_S", 5)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.expt_dp = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
        megatron_moe_opt.register()
        if dist.get_rank() < 2:
            build_layer(moe_config(moe_token_dispatcher_type="monta"), groups)


def test_ranks_beside_a_model_in_groups_of_its_own_are_not_waited_for(ranks):
    """Those that hold the same experts by Megatron's own groups have another model, or none."""
    ranks.run(build_on_two)
