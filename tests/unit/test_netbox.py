from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import netbox  # noqa: E402

RUN = ["run", "--nodes", "2", "--ranks-per-node", "4", "--inter", "200mbit", "--intra", "1600mbit"]


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
    assert netbox.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "200", "200mbps", "-200mbit", "1e3mbit", "200 mbit/s", "mbit"])
def test_other_rates_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a rate; write it like 200mbit or 1.6gbit"):
        netbox.parse_rate(text)


def test_a_rate_too_slow_to_shape_is_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="'9999kbit' is too slow .* use 10mbit or more"):
        netbox.parse_rate("9999kbit")


def test_bucket_holds_the_largest_packet_of_lo_at_every_rate():
    largest = 65536 + 14
    assert netbox.burst_bytes(10_000_000) > largest
    assert netbox.burst_bytes(10_000_000_000) == 1_250_000  # a millisecond at 10 Gbit/s


def test_measured_rates_are_compared_both_ways():
    assert not netbox.off_by_too_much(200e6, 191e6)
    assert netbox.off_by_too_much(200e6, 169e6)
    assert netbox.off_by_too_much(200e6, 231e6)


def test_the_line_of_a_run():
    shape = netbox.Shape(2, 4, 200_000_000, 1_600_000_000)
    expected = "2 nodes x 4 ranks, inter 200 Mbit/s (measured 191), intra 1600 Mbit/s (measured 1520)"
    assert shape.describe(191.3e6, 1519.6e6) == expected


def test_command_behind_the_dashes_is_passed_on_untouched():
    arguments, command = netbox.parse_arguments([*RUN, "--", "-m", "package.module", "--nodes", "7", "--", "x"])
    assert command == ["-m", "package.module", "--nodes", "7", "--", "x"]
    assert (arguments.nodes, arguments.ranks_per_node, arguments.timeout) == (2, 4, None)
    words = netbox.torchrun_command(netbox.Shape(2, 4, 10**8, 10**9), 1, command)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[-6:] == command
    assert words[words.index("--node_rank") + 1] == "1"
    assert words[words.index("--master_addr") + 1] == "10.77.0.1"


def test_ranks_are_told_the_rates(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shape = netbox.Shape(2, 4, 200_000_000, 1_600_000_000)
    environment = netbox.rank_environment(shape)
    assert environment["NETBOX_INTER_BITS"] == "200000000"
    assert environment["NETBOX_INTRA_BITS"] == "1600000000"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environment["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert netbox.rank_environment(shape)["OMP_NUM_THREADS"] == "3"


def test_a_process_is_told_from_a_later_one_with_its_pid():
    mine = netbox.run_id(os.getpid())
    assert mine == netbox.run_id(os.getpid())
    assert mine.startswith(f"{os.getpid()}-")
    assert netbox.run_id(2**22 + 1) is None  # above the largest pid there is


def refusal(capsys, argv: list[str]) -> str:
    assert netbox.main(argv) == 2
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
        (["run", "--", __file__], "the following arguments are required: --ranks-per-node, --inter, --intra"),
        (["start"], "invalid choice: 'start'"),
    ],
)
def test_bad_command_lines_are_refused_in_one_sentence(capsys, argv, message):
    assert message in refusal(capsys, argv)


def test_refused_without_iproute2(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    message = refusal(capsys, [*RUN, "--", __file__])
    assert message == "netbox: the command `tc` is missing; install the Debian package iproute2\n"


def test_refused_without_root(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "must run as root to make network namespaces; start it with sudo" in refusal(capsys, ["clean"])


def test_refused_on_other_systems(capsys, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux (network namespaces); this is darwin" in refusal(capsys, ["clean"])


def test_a_shape_that_is_not_met_is_refused_with_the_numbers(monkeypatch):
    answers = iter([191e6, 900e6, 1000e6, 950e6])  # inter is met at once, intra in none of three tries
    monkeypatch.setattr(netbox, "_measure_flows", lambda shape, nodes, flows, seconds: next(answers))
    text = r"inter 200 Mbit/s \(measured 191\), intra 1600 Mbit/s \(measured 1000\), off by more than 15%"
    with pytest.raises(netbox.NetboxError, match=text):
        netbox.measure(netbox.Shape(2, 4, 200_000_000, 1_600_000_000), ["a", "b"])


def test_a_busy_moment_is_measured_again(monkeypatch):
    answers = iter([120e6, 191e6, 1590e6])
    monkeypatch.setattr(netbox, "_measure_flows", lambda shape, nodes, flows, seconds: next(answers))
    assert netbox.measure(netbox.Shape(2, 4, 200_000_000, 1_600_000_000), ["a", "b"]) == (191e6, 1590e6)


def test_a_single_node_has_no_link_to_measure(monkeypatch):
    monkeypatch.setattr(netbox, "_measure_flows", lambda shape, nodes, flows, seconds: 1590e6)
    shape = netbox.Shape(1, 8, 200_000_000, 1_600_000_000)
    assert netbox.measure(shape, ["a"]) == (None, 1590e6)
    assert shape.describe(None, 1590e6) == "1 node x 8 ranks, intra 1600 Mbit/s (measured 1590)"
