"""Expert choices of the benchmark's workloads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.workloads import choose_experts


def _choose(routing, **changes):
    arguments = {"tokens": 2000, "experts": 8, "topk": 2, "seed": 3, "rank": 0} | changes
    return choose_experts(routing, **arguments)


def _share(indices, experts=8):
    """Part of the tokens that chose each expert."""
    return torch.bincount(indices.flatten(), minlength=experts) / len(indices)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one-hot-expert"])
@pytest.mark.parametrize("topk", [1, 2, 8])
def test_workloads_choose_different_experts_for_a_token(routing, topk):
    indices = _choose(routing, topk=topk)
    assert indices.shape == (2000, topk) and indices.dtype == torch.int64
    assert indices.min() >= 0 and indices.max() < 8
    ordered = indices.sort(dim=1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()


def test_seed_and_rank_decide():
    assert torch.equal(_choose("zipf"), _choose("zipf"))
    assert not torch.equal(_choose("zipf"), _choose("zipf", seed=4))
    assert not torch.equal(_choose("zipf"), _choose("zipf", rank=1))


def test_uniform_is_level():
    assert (_share(_choose("uniform", tokens=20000)) - 0.25).abs().max() < 0.02


def test_zipf_has_one_order_of_popularity_for_all_ranks():
    # Weights 1, 1/2, ... 1/8 add up to 2.718: with one choice a token, the most popular expert gets 0.368 of them.
    shares = [_share(_choose("zipf", tokens=20000, topk=1, rank=rank)) for rank in (0, 1)]
    expected = 1 / (torch.arange(1, 9) * 2.718)
    for share in shares:
        assert (share.sort(descending=True).values - expected).abs().max() < 0.02
    assert torch.equal(*(share.argsort(descending=True)[:4] for share in shares))


def test_one_hot_expert():
    share = _share(_choose("one-hot-expert", tokens=20000))
    assert share[0] == 1
    assert (share[1:] - 1 / 7).abs().max() < 0.02


def test_trace_is_dealt_out_rank_after_rank(tmp_path):
    trace = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [1, 0]])
    torch.save(trace, tmp_path / "trace.pt")
    np.savez(tmp_path / "trace.npz", indices=trace.numpy().astype(np.int32))
    (tmp_path / "trace.NPZ").write_bytes((tmp_path / "trace.npz").read_bytes())
    for name in ("trace.pt", "trace.npz", "trace.NPZ"):
        chosen = _choose(f"trace:{tmp_path / name}", tokens=3, rank=1)
        assert torch.equal(chosen, trace[[3, 4, 0]])


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text('{"a": 1}'), "is not a trace"),
        (lambda path: path.write_bytes(b"no archive"), "is not a trace"),
        (lambda path: torch.save({"a": torch.zeros(2, 2)}, path), "does not hold exactly one array"),
        (lambda path: torch.save(torch.zeros(2, 2), path), r"holds float32 \[2, 2\]"),
        (lambda path: torch.save(torch.zeros(4).long(), path), r"holds int64 \[4\]"),
        (lambda path: torch.save(torch.zeros(0, 2).long(), path), r"holds int64 \[0, 2\]"),
        (lambda path: torch.save(torch.ones(4, 3).long(), path), "has 3 choices a token where --topk is 2"),
        (lambda path: torch.save(torch.tensor([[0, 8]]), path), "names experts 0 to 8 where --experts is 8"),
        (lambda path: torch.save(torch.tensor([[-1, 7]]), path), "names experts -1 to 7 where --experts is 8"),
        (lambda path: torch.save(torch.tensor([[3, 3]]), path), "chooses an expert twice"),
    ],
)
def test_unusable_traces(tmp_path, write, problem):
    path = tmp_path / "trace.pt"
    write(path)
    with pytest.raises(ConfigurationError, match=rf"--routing trace:{path} {problem}.*: give a routing trace, which"):
        _choose(f"trace:{path}")


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: path.write_bytes(b"no archive"), "cannot be read"),
        (lambda path: np.savez(path, a=np.zeros(1), b=np.zeros(1)), "does not hold exactly one array"),
        (lambda path: np.savez(path, a=np.array([[object()]])), "cannot be read"),
    ],
)
def test_unusable_npz(tmp_path, write, problem):
    path = tmp_path / "trace.npz"
    write(path)
    with pytest.raises(ConfigurationError, match=rf"--routing trace:{path} {problem}"):
        _choose(f"trace:{path}")


def test_unknown_workload():
    with pytest.raises(
        ConfigurationError, match="--routing zip is unknown: choose one of uniform, zipf, one-hot-expert"
    ):
        _choose("zip")
