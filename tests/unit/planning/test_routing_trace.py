"""Routing traces: written and read back, refused where they are wrong, used by the benchmarks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.workloads import choose_experts
from megatron_moe_opt.planning.traces.routing_trace import read_routing_trace, write_routing_trace
from tests.unit.trace_cases import random_trace, trace_of

FIELDS = ("experts", "layers", "iterations", "kinds")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "routing.npz"
    write_routing_trace(file, random_trace())
    return file


def content(path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def test_written_traces_are_read_back(path):
    written, read = random_trace(), read_routing_trace(path)
    assert all(np.array_equal(getattr(read, name), getattr(written, name)) for name in FIELDS)
    assert all(getattr(read, name).dtype == getattr(written, name).dtype for name in FIELDS)
    assert (read.num_experts, read.kind_names) == (8, ("prose", "code"))
    assert [file.name for file in path.parent.iterdir()] == ["routing.npz"]


def test_counts_and_parts():
    experts = np.array([[[[[0, 1], [0, 2]], [[3, 2], [1, 2]]]], [[[[2, 1], [1, 2]], [[0, 3], [3, 0]]]]])
    trace = trace_of(experts, 4)
    expected = [[[[2, 1, 1, 0], [0, 1, 2, 1]]], [[[0, 2, 2, 0], [2, 0, 0, 2]]]]
    assert trace.counts().tolist() == expected and trace.counts().dtype == np.int64
    part = trace.of_passes(1, 2)
    assert part.counts().tolist() == expected[1:] and part.iterations.tolist() == [2] and part.kinds.shape == (1, 2)


def test_files_that_are_no_traces_are_refused(path, tmp_path):
    whole = path.read_bytes()
    (tmp_path / "text").write_text("experts")
    np.savez(tmp_path / "other.npz", experts=np.zeros(3))
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    middle = len(whole) // 3
    flipped = bytes(byte ^ 0xFF for byte in whole[middle : middle + 40])
    (tmp_path / "damaged.npz").write_bytes(whole[:middle] + flipped + whole[middle + 40 :])
    for name, problem in (
        ("missing.npz", "does not exist"),
        ("text", "is not a routing trace:"),
        ("other.npz", "is not a routing trace:"),
        ("cut.npz", "cannot be read"),
        ("damaged.npz", "cannot be read"),
    ):
        with pytest.raises(ConfigurationError, match=f"{name} {problem}") as refused:
            read_routing_trace(tmp_path / name)
        assert "\n" not in str(refused.value)


def with_token(experts, token):
    experts[1, 2, 3, 4] = token
    return experts


@pytest.mark.parametrize(
    ("field", "change", "problem"),
    [
        ("version", lambda _: np.array(2), "is not a routing trace of version 1"),
        ("version", lambda _: np.array([1, 1]), "is not a routing trace of version 1"),
        ("layers", None, "has no layers"),
        ("experts", lambda a: a.astype(np.int64), r"experts is int64 \[4, 3, 8, 16, 2\], not uint16"),
        ("experts", lambda a: a[0], r"experts is uint16 \[3, 8, 16, 2\]"),
        ("experts", lambda a: a[:0], r"experts is uint16 \[0, 3, 8, 16, 2\]"),
        ("experts", lambda a: with_token(a, (0, 8)), "experts names expert 8 of 8"),
        ("experts", lambda a: with_token(a, (5, 5)), "goes to one expert twice"),
        ("num_experts", lambda _: np.array(1), "num_experts is 1, not between 2"),
        ("num_experts", lambda _: np.array(8.0), "num_experts is float64"),
        ("layers", lambda a: a[::-1], r"layers is \[3, 2, 1\], not ascending from 1"),
        ("layers", lambda a: a - 1, "not ascending from 1"),
        ("iterations", lambda a: a[1:], r"iterations is int64 \[3\], not int64 \[4\]"),
        ("kinds", lambda a: a.T, r"kinds is int16 \[8, 4\], not int16 \[4, 8\]"),
        ("kinds", lambda a: a + np.int16(1), "kinds is 1 to 2 of 2 names"),
        ("kind_names", lambda _: np.array([1, 2]), "kind_names is int64"),
    ],
)
def test_what_is_wrong_is_named(path, field, change, problem):
    fields = content(path)
    fields |= {field: change(fields[field])} if change else {}
    if change is None:
        del fields[field]
    np.savez(path, **fields)
    with pytest.raises(ConfigurationError, match=problem):
        read_routing_trace(path)


def test_benchmarks_take_the_first_layer_sample_after_sample(path):
    rows = torch.from_numpy(random_trace().experts[:, 0].astype(np.int64)).reshape(-1, 2)
    settings = {"tokens": 100, "experts": 8, "topk": 2, "seed": 0}
    for rank in range(2):
        chosen = choose_experts(f"trace:{path}", rank=rank, **settings)
        assert torch.equal(chosen, rows[100 * rank : 100 * (rank + 1)])
    with pytest.raises(ConfigurationError, match="has 2 choices a token where --topk is 3"):
        choose_experts(f"trace:{path}", rank=0, **settings | {"topk": 3})
    fields = content(path)
    np.savez(path, **fields | {"experts": with_token(fields["experts"], (5, 5))})
    with pytest.raises(ConfigurationError, match="to one expert twice"):
        choose_experts(f"trace:{path}", rank=0, **settings)
