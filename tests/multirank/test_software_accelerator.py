"""Every dispatcher on an accelerator in software: no race, no memory given back too early, no collectives that would
wait for each other, no more waits of the host than stock's, and stock's results.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from tests.accelerator.collectives import disagreements
from tests.accelerator.executor_library import build
from tests.multirank.test_dispatchers import DROP, PAD, SHARED

MICRO_BATCHES = 2
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("executor"))


def on_accelerator(
    library: Path,
    dispatcher: str,
    layout: dict[str, int],
    settings: dict[str, Any],
    options: Options | None = None,
    without: str | None = None,
) -> dict[str, Any]:
    """Two steps of two micro-batches in flight, on an accelerator; stock's results, off it, are in `errors`."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.moe_layer import build_layer
    from tests.accelerator.device import accelerator
    from tests.ranks.megatron import moe_config, parallel

    with parallel(**layout):
        torch.manual_seed(11 + dist.get_rank())
        stock_config = moe_config(moe_router_pre_softmax=True, **settings)
        stock = build_layer(stock_config)
        hidden = [torch.randn(16 // layout.get("tp", 1), 3, stock_config.hidden_size) for _ in range(MICRO_BATCHES)]
        megatron_moe_opt.register(options)
        try:
            with accelerator(library, without) as found:
                ours = build_layer(dataclasses.replace(stock_config, moe_token_dispatcher_type=dispatcher))
                ours.load_state_dict(stock.state_dict())
                first = train(ours, hidden)  # chooses what is not fixed, and makes its tables
                before = len(found.syncs)
                syncs: list[list[str]] = []
                second = train(ours, hidden, lambda: syncs.append(found.syncs[before + sum(map(len, syncs)) :]))
                del ours
        finally:
            megatron_moe_opt.register()
        expected = train(stock, hidden)
        errors = {
            name: ((results[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)).item()
            for results in (first, second)
            for name in expected
        }
        groups = {name for name, _ in found.issued}
        return {
            "errors": errors, "mistakes": found.mistakes, "syncs": syncs, "issued": found.issued, "used": found.used,
            "members": {name: ranks_of(name) for name in groups},
        }  # fmt: skip


def ranks_of(name: str) -> list[int]:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return dist.get_process_group_ranks(_resolve_process_group(name))


def train(layer: Any, hidden: list[torch.Tensor], passed: Any = lambda: None) -> dict[str, torch.Tensor]:
    """Forward passes of all micro-batches, then their backward passes; outputs and gradients."""
    layer.zero_grad()
    inputs = [one.clone().requires_grad_() for one in hidden]
    outputs = []
    for one in inputs:
        outputs.append(layer(one)[0])
        passed()
    found = {f"output {number}": output.detach().clone() for number, output in enumerate(outputs)}
    while outputs:
        output = outputs.pop()
        (output * output.detach().cos()).sum().backward()
        del output
        passed()
    found |= {f"input {number}": one.grad for number, one in enumerate(inputs)}
    return found | {name: one.grad.clone() for name, one in layer.named_parameters() if one.grad is not None}


TP = {"tp": 2, "ep": 2, "etp": 2}
MIGRATION = {"network_levels": (2, 2)}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], Options | None]] = {
    "monta": ("monta", TP, {}, None),
    "monta O2": ("monta", {"ep": 4}, {}, Options(monta_level="O2", chunks=3)),
    "monta O3": ("monta", TP, SHARED, Options(monta_level="O3", chunks=2)),
    "monta O3, dropping": ("monta", TP, DROP, Options(monta_level="O3", chunks=2)),
    "monta, padded": ("monta", {"ep": 4}, PAD, None),
    "monta, recomputed": ("monta", TP, RECOMPUTE, Options(monta_level="O3", chunks=2)),
    "mpmoe": ("mpmoe", TP, {}, Options(partitions=3)),
    "mpmoe, dropping": ("mpmoe", {"ep": 4}, DROP, Options(partitions=2)),
    **{f"mpmoe {one}": ("mpmoe", TP, {}, Options(partitions=3, memory_reuse=one)) for one in ("S1", "S2", "S3", "S4")},
    "mpmoe S2, recomputed": ("mpmoe", {"ep": 4}, RECOMPUTE, Options(partitions=2, memory_reuse="S2")),
    "expert-migration, hops": ("expert-migration", {"ep": 4}, {}, Options(**MIGRATION, domain_sizes=(1, 1))),
    "expert-migration": ("expert-migration", {"ep": 4}, {}, Options(**MIGRATION, domain_sizes=(2, 1))),
    "expert-migration, all": ("expert-migration", {"ep": 4}, RECOMPUTE, Options(**MIGRATION, domain_sizes=(2, 2))),
    "expert-migration, compressed": (
        "expert-migration", {"ep": 4}, {},
        Options(**MIGRATION, domain_sizes=(2, 1), gradient_compression_ratio=4.0, compression_ratio=4.0),
    ),
    "expert-migration, dropping": ("expert-migration", {"ep": 4}, DROP, Options(**MIGRATION, domain_sizes=(1, 2))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_layer(ranks, library, case):
    dispatcher, layout, settings, options = CASES[case]
    of_ranks = ranks.run(
        on_accelerator, library=library, dispatcher=dispatcher, layout=layout, settings=settings, options=options
    )
    for result in of_ranks:
        assert not result["mistakes"], result["mistakes"][:5]
        forward, backward = result["syncs"][:MICRO_BATCHES], result["syncs"][MICRO_BATCHES:]
        budget = 1 if settings is RECOMPUTE else 0  # of a backward pass that repeats the forward pass
        assert all(len(syncs) <= 1 for syncs in forward), forward
        assert all(len(syncs) <= budget for syncs in backward), backward
        if "compressed" not in case:
            assert max(result["errors"].values()) < 1e-6, result["errors"]
    assert not disagreements([result["issued"] for result in of_ranks], of_ranks[0]["members"])


WAITING = ("monta O3, dropping", "mpmoe S2", "mpmoe S4", "expert-migration", "expert-migration, compressed")
"""Cases that together wait wherever the package does."""


def without_each(library: Path, case: str) -> list[str]:
    """The places in the package whose waits and record_streams a case does not miss."""
    dispatcher, layout, settings, options = CASES[case]
    arguments = library, dispatcher, layout, settings, options
    found = on_accelerator(*arguments)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, found["used"])
    missed = []
    for place in sorted(set().union(*places)):
        mistakes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(mistakes, len(on_accelerator(*arguments, without=place)["mistakes"]))
        if not any(mistakes):
            missed.append(place)
    return missed


def test_every_wait_is_needed(ranks, library):
    unneeded: dict[str, int] = {}
    for case in WAITING:
        for place in ranks.run(without_each, library=library, case=case)[0]:
            unneeded[place] = unneeded.get(place, 0) + 1
    print(unneeded)
    assert not unneeded
