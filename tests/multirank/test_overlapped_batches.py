"""1F1B overlap of two micro-batches (--overlap-moe-expert-parallel-comm): Megatron's schedule plan calls our stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_moe_opt.options import Options

FOUR = {"ep": 4}
STAGES = {"pp": 2, "ep": 2, "vpp": 2}  # Megatron wants virtual stages where there are stages
TP = {"tp": 2, "ep": 2, "etp": 2}


def train(
    dispatcher: str, sizes: dict[str, int], options: Options | None = None, overlaps: bool = True, **config: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps of three micro-batches, or four of virtual stages, and this rank's gradients of the second.

    What Megatron frees is spoilt here: whoever still needs it has other losses.
    """
    import megatron_moe_opt
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    resize = torch.UntypedStorage.resize_

    def spoil(storage: torch.UntypedStorage, size: int) -> Any:
        held = storage.nbytes()
        resize(storage, size)
        if size == 0 and held:
            if not storage.nbytes():
                resize(storage, held)
            with torch._C._DisableTorchDispatch():  # no work of a stream
                storage.fill_(255)
        return storage

    with parallel(**sizes), pytest.MonkeyPatch.context() as patch:
        if dispatcher != "alltoall":
            patch.setattr(torch.UntypedStorage, "resize_", spoil)
        megatron_moe_opt.register(options)
        try:
            trained = gpt(
                moe_token_dispatcher_type=dispatcher, overlap_moe_expert_parallel_comm=overlaps, bf16=True,
                microbatches=4 if "vpp" in sizes else 3, num_layers=4 if "vpp" in sizes else 2, **config,
            )  # fmt: skip
            losses = trained.train(2)
        finally:
            megatron_moe_opt.register()
        gradients = {
            f"{number}.{name}": parameter.main_grad.clone()
            for number, chunk in enumerate(trained.chunks)
            for name, parameter in chunk.module.named_parameters()
        }
        return losses, gradients


@pytest.mark.parametrize(
    ("dispatcher", "options", "sizes", "config"),
    [
        ("monta", Options(monta_level="O2", chunks=2), FOUR, {"delay_wgrad_compute": True}),
        ("monta", Options(monta_level="O3", chunks=2), TP, {"moe_shared_expert_intermediate_size": 32}),
        ("parm", None, TP, {"moe_shared_expert_intermediate_size": 32}),
        ("monta", None, STAGES, {"overlap_p2p_comm": True, "batch_p2p_comm": False}),
    ],
    ids=["chunks", "expert-TP", "parm", "stages"],
)
def test_training_is_that_of_stocks_own_plan_to_the_bit(ranks, dispatcher, options, sizes, config):
    if (key := str((sizes, config))) not in _stocks:
        _stocks[key] = ranks.run(train, dispatcher="alltoall", sizes=sizes, **config)
    stock = _stocks[key]
    assert_same(ranks.run(train, dispatcher=dispatcher, sizes=sizes, options=options, **config), stock)


_stocks: dict[str, list[Any]] = {}
"""What stock's own plan gives, trained once for all tests of one model."""


def test_experts_travel_as_they_do_without_overlap(ranks):
    """Against stock, gradients are summed in another order, in half precision."""
    migrating = {
        "dispatcher": "expert-migration",
        "options": Options(network_levels=(2, 2), domain_sizes=(2, 1), chunks=2),
    }
    ours = ranks.run(train, sizes=FOUR, **migrating)
    assert_same(ours, ranks.run(train, sizes=FOUR, overlaps=False, **migrating))
    for (losses, _), (stocks, _) in zip(ours, ranks.run(train, dispatcher="alltoall", sizes=FOUR), strict=True):
        assert losses == pytest.approx(stocks, rel=2e-3)


def assert_same(ours: list[Any], others: list[Any]) -> None:
    for (losses, gradients), (expected, of_others) in zip(ours, others, strict=True):
        assert losses == expected
        for name, gradient in gradients.items():
            assert torch.equal(gradient, of_others[name]), name
