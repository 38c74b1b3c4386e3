"""`cluster.json`: what is written is read, and what is wrong is refused with its place."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.cluster import MEGATRON_FLAGS, OLDER, OUR_FLAGS, Cluster, ExpertGemm, World
from megatron_moe_opt.planning.json_places import JsonPlace
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op

CLUSTER = Cluster(
    world=World(nodes=(0, 0, 1, 1), tp=2, cp=1, ep=2, expert_tp=2),
    curves={
        (Kind.ALL_TO_ALL, "ep"): ((65536, 0.003), (1048576, 0.04)),
        (Kind.ALL_GATHER, "expert-tp"): ((65536, 0.001),),
        (Kind.COPY, None): ((65536, 1.5e-05), (131072, 2.5e-05), (262144, 5e-05)),
    },
    slowdown={
        (Lane.INTER, Lane.INTRA): 0.75,
        (Lane.INTRA, Lane.INTER): 1.0,
        (Lane.INTRA, Lane.COMPUTE, Lane.D2H): 0.5,
    },
    overhead=1e-4,
    compute_sharing=1.9,
    saa=((65536, 0.004), (1048576, 0.05)),
    expert_gemm=ExpertGemm(4, 8, "fp32", points=((16, 1e-3), (32, 1.5e-3)), training=((16, 3e-3),)),
    gpu_settings={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    host={"cpus": 2, "device": "an [odd]  name"},
    software={"torch": "2.13.0"},
    warnings=("SAA: one point alone",),
)


def test_round_trip(tmp_path):
    file = tmp_path / "cluster.json"
    CLUSTER.save(file)
    assert Cluster.load(file) == CLUSTER
    assert "    [65536, 0.003]," in file.read_text()  # a point a line
    bus = {"ranks": 2, "link": "inter-node", "best": 1048576 / 0.04 / 2, "link_peak": None}  # for the reader
    assert json.loads(file.read_text())["curves"][0]["bus"] == bus
    CLUSTER.save(file)
    assert os.listdir(tmp_path) == ["cluster.json"]


@settings(max_examples=50)
@given(
    points=st.dictionaries(st.integers(1, 2**40), st.floats(1e-9, 1e3), min_size=1, max_size=6),
    fact=st.text(max_size=20),
    rate=st.floats(1e-3, 1),
)
def test_any_measured_numbers_come_back(tmp_path_factory, points, fact, rate):
    file = tmp_path_factory.getbasetemp() / "any.json"
    cluster = Cluster(
        World((0,)),
        {(Kind.COPY, None): tuple(sorted(points.items()))},
        {(Lane.COPY, Lane.INTRA): rate},
        overhead=rate,
        host={fact: fact},
    )
    cluster.save(file)
    assert Cluster.load(file) == cluster


def test_costs_are_the_curves():
    costs = CLUSTER.costs
    assert costs(Op(Kind.ALL_TO_ALL, Lane.INTER, size=65536, group="ep")) == pytest.approx(0.003 + 1e-4)
    assert costs(Op(Kind.COPY, Lane.COPY, size=196608)) == pytest.approx(3.75e-5 + 1e-4)
    with pytest.raises(ConfigurationError, match="no cost curve for reduce_scatter in group expert-tp"):
        costs(Op(Kind.REDUCE_SCATTER, Lane.INTRA, size=1, group="expert-tp"))


def test_flops():
    assert CLUSTER.expert_gemm.flops(16) == 2 * (2 * 16 * 4 * 8)


def test_groups_of_other_sizes():
    for flags in (MEGATRON_FLAGS, OUR_FLAGS):
        ep_flag, expert_tp_flag, tp_flag = flags
        CLUSTER.check_groups("c.json", flags, ep=2, expert_tp=2)
        with pytest.raises(ConfigurationError) as refusal:
            CLUSTER.check_groups("c.json", flags, ep=4, expert_tp=2)
        assert str(refusal.value) == (
            f"{ep_flag} 4 is not what c.json was measured with (2): measure this layout with moe-opt profile --ep 4 "
            "--expert-tp 2"
        )
        with pytest.raises(ConfigurationError, match=f"^{expert_tp_flag} 1 is not what"):
            CLUSTER.check_groups("c.json", flags, ep=2, expert_tp=1)
        CLUSTER.check_groups("c.json", flags, ep=2, expert_tp=2, tp=2)
        with pytest.raises(ConfigurationError) as refusal:
            CLUSTER.check_groups("c.json", flags, ep=2, expert_tp=2, tp=4)
        assert str(refusal.value) == (
            f"{tp_flag} 4 is not what c.json was measured with (2): measure this layout with moe-opt profile --tp 4 "
            "--ep 2 --expert-tp 2"
        )


def test_a_file_from_before_what_was_added_later(tmp_path):
    """Everything else of it is as good as ever."""
    file = tmp_path / "cluster.json"
    CLUSTER.save(file)
    content = json.loads(file.read_text())
    del content["saa"], content["expert_gemm"]["training"]
    del content["compute_sharing"], content["warnings"], content["curves"][0]["bus"]
    content["slowdown"][0]["beside"] = "intra"  # as it was written when there was always one
    content["stock_curves"] = content["curves"][1:]  # which nothing reads any more
    content["expert_overhead"] = [0.1, 0.2]  # nor this, but that the experts' curve is without it is said
    file.write_text(json.dumps(content))
    gemm = replace(CLUSTER.expert_gemm, training=None)
    older = replace(CLUSTER, saa=None, expert_gemm=gemm, compute_sharing=1.0, warnings=(OLDER,))
    assert Cluster.load(file) == older


def _change(content, path, value):
    *parents, last = path
    for key in parents:
        content = content[key]
    if value is KeyError:
        del content[last]
    else:
        content[last] = value


WRONG = [
    (("curves", 0, "points", 1, 1), -1, "curves[0].points[1][1]: -1 is not above 0 and finite", "-1"),
    (("curves", 0, "points", 1, 1), float("nan"), "curves[0].points[1][1]: NaN is not above 0 and finite", "NaN"),
    (("curves", 0, "points", 1, 1), "fast", 'curves[0].points[1][1]: "fast" is not a number', '"fast"'),
    (("curves", 0, "points", 1, 1), True, "curves[0].points[1][1]: true is not a number", "true"),
    (("curves", 0, "points", 1, 0), 65536, "curves[0].points[1][0]: 65536 does not come after 65536: sizes", None),
    (("curves", 0, "points", 0, 0), 1.5, "curves[0].points[0][0]: 1.5 is not an integer of at least 1", "1.5"),
    (("curves", 0, "points", 0), [1, 2, 3], "curves[0].points[0]: [1, 2, 3] is not a list of 2", "[1,2,3]"),
    (("curves", 1, "points"), [], "curves[1].points: no points: a curve needs at least one", "[]"),
    (("curves", 1, "kind"), "broadcast", 'curves[1].kind: "broadcast" is not one of permute, all', '"broadcast"'),
    (("curves", 1, "group"), None, "curves[1].group: all_gather needs a group", "null"),
    (("curves", 2, "group"), "ep", "curves[2].group: copy has no group", None),
    (("curves",), {}, "curves: {} is not a list", "{}"),
    (("slowdown", 0, "rate"), 1.2, "slowdown[0].rate: 1.2 is not above 0 and at most 1", "1.2"),
    (("slowdown", 1, "lane"), "outer", 'slowdown[1].lane: "outer" is not one of inter, intra', '"outer"'),
    (("slowdown", 1, "beside"), ["intra"], "slowdown[1]: lane intra beside intra is not a new set of different", None),
    (("slowdown", 1, "beside"), "intra", "slowdown[1]: lane intra beside intra is not a new set of different", None),
    (("slowdown", 1, "beside"), [], "slowdown[1]: lane intra beside none is not a new set of different lanes", None),
    (("slowdown", 1, "beside"), ["inter", "nearby"], 'slowdown[1].beside[1]: "nearby" is not one of inter', None),
    (
        ("slowdown", 2, "beside"),
        ["inter"],
        "slowdown[2]: lane intra beside inter is not a new set of different lanes",
        None,
    ),
    (("expert_gemm", "hidden"), 0, "expert_gemm.hidden: 0 is not an integer of at least 1", None),
    (("expert_gemm", "dtype"), KeyError, "expert_gemm: dtype is missing", None),
    (("world", "tp"), 3, "world: tp 3 x cp 1 does not divide the 4 ranks in nodes", None),
    (("world", "nodes", 2), "one", 'world.nodes[2]: "one" is not an integer of at least 0', None),
    (("host", "cpus"), 2.5, "host.cpus: 2.5 is not a string", "2.5"),
    (("hosts",), {}, "hosts: unknown field", None),
    (("software",), KeyError, "software is missing", None),
    (("saa", 1, 0), 65536, "saa[1][0]: 65536 does not come after 65536: sizes must ascend", None),
    (("saa",), [], "saa: no points: a curve needs at least one", "[]"),
    (("compute_sharing",), 0, "compute_sharing: 0 is not above 0 and finite", "0"),
    (("saa",), 3, "saa: 3 is not a list", "3"),
    (("warnings",), [3], "warnings[0]: 3 is not a string", None),
    (("version",), 2, 'version 2 cannot be read (this megatron-moe-opt reads 1): measure the cluster again', None),
    (("format",), "results", "not a file of moe-opt profile: measure the cluster with moe-opt profile", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "sentence", "shown"), WRONG, ids=[str(case[:2]) for case in WRONG])
def test_wrong_values_are_refused_with_their_place(tmp_path, path, value, sentence, shown):
    file = tmp_path / "cluster.json"
    CLUSTER.save(file)
    content = json.loads(file.read_text())
    _change(content, path, value)
    file.write_text(json.dumps(content, indent=0))
    with pytest.raises(ConfigurationError) as refusal:
        Cluster.load(file)
    message = str(refusal.value)
    assert message.startswith(f"{file}, line ") and sentence in message
    line = int(message.removeprefix(f"{file}, line ").split(",")[0].split(":")[0])
    if shown:  # the value is on that line, or, if it has several, it begins there
        text = "".join(file.read_text().splitlines()[line - 1 :])
        assert text.replace(" ", "").removeprefix(f'"{path[-1]}":').startswith(shown)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{\n"format": "megatron-moe-opt cluster",\n"version": }', ", line 3: not JSON: Expecting value"),
        (b"", ", line 1: not JSON: Expecting value"),
        (b"[1, 2]", ", line 1: not a file of moe-opt profile"),
        (b"\xff\xfe", " is not text (byte 0)"),
        (b"[" * 100_000, ": not JSON: "),
        (b"9" * 10_000, ": not JSON: "),
    ],
    ids=lambda content: str(content[:12]),
)
def test_files_of_another_kind(tmp_path, content, sentence):
    file = tmp_path / "other.json"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError) as refusal:
        Cluster.load(file)
    assert str(refusal.value).startswith(f"{file}{sentence}")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none.json cannot be read: No such file or directory; give the path"):
        Cluster.load(tmp_path / "none.json")
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        Cluster.load(tmp_path)


def test_a_cut_file_is_refused(tmp_path):
    """However much of a file is there: it is refused in one sentence until it is whole."""
    file = tmp_path / "cluster.json"
    CLUSTER.save(file)
    whole = file.read_text().rstrip()
    for length in range(0, len(whole), 7):
        file.write_text(whole[:length])
        with pytest.raises(ConfigurationError, match=r"^\S+cluster.json, line \d+: not JSON: [^\n]*$"):
            Cluster.load(file)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(value=VALUES, indent=st.sampled_from([None, 0, 2]))
def test_the_line_of_any_value(tmp_path_factory, value, indent):
    """The line that is named is the one on which the value begins, whatever strings and brackets are around it."""
    file = tmp_path_factory.getbasetemp() / "value.json"
    marked = {"a": ['{"[,:\\', value], "b": [[value], {"c": "MARK"}, 1]}
    file.write_text(json.dumps(marked, indent=indent))
    place = JsonPlace.root(file).object()["b"].items()[1].object()["c"]
    line = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if '"MARK"' in text)
    with pytest.raises(ConfigurationError) as refusal:
        place.refuse("here")
    assert str(refusal.value) == f"{file}, line {line}, b[1].c: here"
