from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys

import pytest

from tools.imitated_nodes import buckets, command_line, measured, network, ranks
from tools.imitated_nodes.errors import NetboxError
from tools.imitated_nodes.shape import Shape

RUN = ["run", "--nodes", "2", "--ranks-per-node", "4", "--inter", "200mbit", "--intra", "1600mbit"]
SHAPE = Shape(2, 4, 200_000_000, 1_600_000_000)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("200mbit", 200_000_000),
        ("1.6gbit", 1_600_000_000),
        ("20000kbit", 20_000_000),
        ("10000000bit", 10_000_000),
        (" 1Gbit ", 10**9),
    ],
)
def test_rates_are_read_as_tc_reads_them(text, bits):
    assert command_line.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "200", "200mbps", "-200mbit", "1e3mbit", "200 mbit/s", "mbit"])
def test_other_rates_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a rate; write it like 200mbit or 1.6gbit"):
        command_line.parse_rate(text)


def test_a_rate_too_slow_to_shape_is_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="'9999kbit' is too slow .* use 10mbit or more"):
        command_line.parse_rate("9999kbit")


@pytest.mark.parametrize("packet", [buckets.LINK_PACKET, buckets.INSIDE_PACKET])
def test_bucket_holds_the_largest_packet_at_every_rate(packet):
    assert buckets.burst_bytes(10_000_000, packet) > packet + 100  # and its headers
    assert buckets.burst_bytes(10_000_000_000, packet) == 1_250_000  # a millisecond at 10 Gbit/s


def test_measured_rates_are_compared_both_ways():
    assert not measured.off_by_too_much(200e6, 191e6)
    assert measured.off_by_too_much(200e6, 169e6)
    assert measured.off_by_too_much(200e6, 231e6)


def test_the_line_of_a_run():
    expected = "2 nodes x 4 ranks, inter 200 Mbit/s (measured 191), intra 1600 Mbit/s (measured 1520)"
    assert SHAPE.describe(191.3e6, 1519.6e6) == expected


def test_command_behind_the_dashes_is_passed_on_untouched():
    arguments, command = command_line.parse_arguments([*RUN, "--", "-m", "package.module", "--nodes", "7", "--", "x"])
    assert command == ["-m", "package.module", "--nodes", "7", "--", "x"]
    assert (arguments.nodes, arguments.ranks_per_node, arguments.timeout) == (2, 4, None)
    words = ranks.torchrun_command(SHAPE, 1, command)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[-6:] == command
    assert words[words.index("--node_rank") + 1] == "1"
    assert words[words.index("--master_addr") + 1] == "10.77.0.1"


@pytest.mark.parametrize(
    ("nodes", "available", "shares"),
    [
        (1, [0, 1], [[0, 1]]),
        (2, [0, 1], [[0], [1]]),
        (2, [2, 3, 6, 7], [[2, 3], [6, 7]]),
        (4, [0, 1], [[0], [0], [1], [1]]),
        (3, [0, 1], [[0, 1]] * 3),  # no equal shares
        (2, [0, 1, 2], [[0, 1, 2]] * 2),
    ],
)
def test_nodes_share_the_processors_equally_or_not_at_all(nodes, available, shares):
    assert [ranks.processors(node, nodes, available) for node in range(nodes)] == shares


def test_ranks_are_told_the_rates(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = ranks.rank_environment(SHAPE)
    assert environment["NETBOX_INTER_BITS"] == "200000000"
    assert environment["NETBOX_INTRA_BITS"] == "1600000000"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environment["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ranks.rank_environment(SHAPE)["OMP_NUM_THREADS"] == "3"


def test_a_process_is_told_from_a_later_one_with_its_pid():
    mine = network.run_id(os.getpid())
    assert mine == network.run_id(os.getpid())
    assert mine.startswith(f"{os.getpid()}-")
    assert network.run_id(2**22 + 1) is None  # above the largest pid there is


def refusal(capsys, argv: list[str]) -> str:
    assert command_line.main(argv) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (RUN, "netbox: no script to run; name it behind --"),
        ([*RUN, "--"], "netbox: no script to run; name it behind --"),
        ([*RUN, "--", "absent.py"], "netbox: the script 'absent.py' does not exist"),
        ([*RUN, "--inter", "fast", "--", __file__], "argument --inter: 'fast' is not a rate"),
        ([*RUN, "--nodes", "0", "--", __file__], "argument --nodes: '0' is not a whole number from 1 to 64"),
        ([*RUN, "--timeout", "0", "--", __file__], "argument --timeout: '0' is not a whole number from 1"),
        ([*RUN, "--peak", "1", "--", __file__], "argument --peak: '1' is not a number above 1 and to 100"),
        (["run", "--", __file__], "the following arguments are required: --ranks-per-node, --inter, --intra"),
        (["start"], "invalid choice: 'start'"),
    ],
)
def test_bad_command_lines_are_refused_in_one_sentence(capsys, argv, message):
    assert message in refusal(capsys, argv)


@pytest.mark.parametrize(("missing", "package"), [("tc", "iproute2"), ("taskset", "util-linux")])
def test_refused_without_the_tools_and_told_their_package(capsys, monkeypatch, missing, package):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else f"/sbin/{tool}")
    message = refusal(capsys, [*RUN, "--", __file__])
    assert message == f"netbox: the command `{missing}` is missing; install the Debian package {package}\n"


def test_refused_without_root(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "must run as root to make network namespaces; start it with sudo" in refusal(capsys, ["clean"])


def test_refused_on_other_systems(capsys, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux (network namespaces); this is darwin" in refusal(capsys, ["clean"])


@pytest.fixture
def measured_flows(monkeypatch):
    """What each measurement of flows answers, in turn, in place of sockets on a real cluster."""
    answers = []
    monkeypatch.setattr(measured, "_measure_flows", lambda shape, nodes, flows, seconds: answers.pop(0))
    return answers


def test_a_busy_moment_is_measured_again(measured_flows):
    measured_flows += [120e6, 191e6, 1590e6]
    assert measured.measure(SHAPE, ["a", "b"]) == (191e6, 1590e6)


def test_the_nearest_of_three_measurements_counts(measured_flows):
    measured_flows += [191e6, 900e6, 2000e6, 1000e6]  # inter is met at once, intra in none of three tries
    assert measured.measure(SHAPE, ["a", "b"]) == (191e6, 2000e6)
    assert not measured_flows


def test_flows_fill_every_link_and_then_every_lo(monkeypatch):
    seen = []
    monkeypatch.setattr(measured, "_measure_flows", lambda shape, nodes, flows, seconds: seen.append(flows) or 200e6)
    measured.measure(Shape(3, 4, 200_000_000, 200_000_000), ["a", "b", "c"])
    assert seen == [[(0, 1), (1, 2), (2, 0)], [(0, 0), (1, 1), (2, 2)]]


def test_a_single_node_has_no_link_to_measure(measured_flows):
    measured_flows += [1590e6]
    shape = Shape(1, 8, 200_000_000, 1_600_000_000)
    assert measured.measure(shape, ["a"]) == (None, 1590e6)
    line = "1 node x 8 ranks, intra 1600 Mbit/s (measured 1590)"
    assert measured.verdict(shape, None, 1590e6, "refuse") == line


@pytest.mark.parametrize("unmet", ["refuse", "warn"])
@pytest.mark.parametrize(("inter", "intra"), [(191e6, 1590e6), (171e6, 1361e6), (229e6, 1839e6)])
def test_a_shape_within_the_tolerance_is_met(inter, intra, unmet):
    assert measured.verdict(SHAPE, inter, intra, unmet) == SHAPE.describe(inter, intra)


@pytest.mark.parametrize(("inter", "intra"), [(191e6, 1359e6), (169e6, 1590e6), (231e6, 1590e6), (191e6, 1841e6)])
def test_a_shape_that_is_not_met_is_refused_or_warned_of_with_the_numbers(inter, intra):
    numbers = f"this machine does not carry the shape: {SHAPE.describe(inter, intra)}, off by more than 15%; "
    with pytest.raises(NetboxError) as refused:
        measured.verdict(SHAPE, inter, intra, "refuse")
    assert str(refused.value).startswith(numbers + "ask for lower rates or fewer nodes, free the CPU, or ")
    warning = measured.verdict(SHAPE, inter, intra, "warn")
    assert warning == f"warning: {numbers}the times of this run are not those of the shape"


@pytest.mark.parametrize(("options", "status"), [([], 2), (["--unmet", "warn"], 7)])
def test_a_run_whose_shape_is_not_met_ends_or_goes_on_with_a_warning(monkeypatch, capsys, options, status):
    started = []
    monkeypatch.setattr(command_line, "_check_machine", lambda: None)
    monkeypatch.setattr(command_line, "cluster", lambda shape: contextlib.nullcontext(["a", "b"]))
    monkeypatch.setattr(command_line, "measure", lambda shape, nodes: (100e6, 1590e6))
    monkeypatch.setattr(command_line, "run_job", lambda shape, nodes, command, timeout: started.append(command) or 7)
    monkeypatch.setattr(signal, "signal", lambda signum, handler: None)
    assert command_line.main([*RUN, *options, "--", __file__]) == status
    assert started == ([[__file__]] if options else [])
    line = "warning: this machine does not carry" if options else "this machine does not carry"
    assert capsys.readouterr().err.startswith(f"netbox: {line} the shape: 2 nodes x 4 ranks, ")
