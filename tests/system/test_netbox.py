"""netbox against the real kernel: shape, exit codes, and that nothing is left behind. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import netbox  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="netbox needs root on Linux"),
    pytest.mark.skipif(not (shutil.which("ip") and shutil.which("tc")), reason="netbox needs iproute2"),
]

INTER, INTRA = 40_000_000, 320_000_000  # slow enough for a busy machine
SHAPE = netbox.Shape(nodes=2, ranks_per_node=2, inter_bits=INTER, intra_bits=INTRA)
COMMAND = [sys.executable, str(TOOLS / "netbox.py"), "run", "--ranks-per-node", "2"]
COMMAND += ["--inter", f"{INTER}bit", "--intra", f"{INTRA}bit"]

A2A = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
# 2 nodes x 2 ranks, 1 MB a rank: half of each buffer leaves the node, 8 Mbit a node at 40 Mbit/s.
sent = torch.full((1 << 18,), float(dist.get_rank()))
received = torch.empty_like(sent)
dist.all_to_all_single(received, sent)  # connects
times = []
for _ in range(3):
    dist.barrier()
    start = time.monotonic()
    dist.all_to_all_single(received, sent)
    spans = [None] * dist.get_world_size()
    dist.all_gather_object(spans, (start, time.monotonic()))  # one kernel: one clock for all nodes
    times.append(max(end for _, end in spans) - min(start for start, _ in spans))
if dist.get_rank() == 0:
    assert received.view(4, -1).float().mean(1).tolist() == [0, 1, 2, 3]
    print("seconds", *times, "rates", os.environ["NETBOX_INTER_BITS"], os.environ["NETBOX_INTRA_BITS"], flush=True)
if dist.get_rank() == 3:
    print("rank 3 was here", flush=True)
dist.destroy_process_group()
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def left_by(run: str | None) -> list[str]:
    assert run is not None
    return [line for line in namespaces().splitlines() if f"netbox-{run}-" in line]


def wait_for_namespaces(process: subprocess.Popen) -> str | None:
    """Identity of the run, once it has made its nodes."""
    run = netbox.run_id(process.pid)
    deadline = time.monotonic() + 20
    while len(left_by(run)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return run


@pytest.fixture
def python_nodes(monkeypatch):
    """A cluster whose nodes start plain Python where torchrun would be, to test the running without its start."""
    monkeypatch.setattr(netbox, "torchrun_command", lambda shape, node, command: [sys.executable, *command, str(node)])
    with netbox.cluster(SHAPE) as nodes:
        yield nodes
    assert not left_by(netbox.run_id(os.getpid()))


def test_all_to_all_takes_the_time_of_its_bytes_between_nodes(tmp_path):
    script = tmp_path / "a2a.py"
    script.write_text(A2A)
    done = subprocess.run([*COMMAND, "--", str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "netbox: 2 nodes x 2 ranks, inter 40 Mbit/s (measured " in done.stderr
    words = done.stdout.split()
    assert words[words.index("rates") + 1 :][:2] == [str(INTER), str(INTRA)]
    seconds = sorted(float(word) for word in words[words.index("seconds") + 1 : words.index("rates")])
    bits_between_nodes = 2 * 2**20 / 2 * 8
    limit = bits_between_nodes / INTER
    burst = 2 * netbox.burst_bytes(INTER) * 8 / INTER  # what full buckets at both ends of a link let through at once
    assert seconds[0] >= limit - burst
    assert seconds[1] <= 1.5 * limit
    assert "[node 1] rank 3 was here" in done.stdout


def test_traffic_inside_a_node_is_shaped_by_lo_not_by_its_link():
    with netbox.cluster(SHAPE) as nodes:
        inter, intra = netbox.measure(SHAPE, nodes)
    assert 0.85 * INTER < inter < 1.05 * INTER
    assert 0.85 * INTRA < intra < 1.15 * INTRA


def test_two_senders_to_one_node_share_its_link():
    shape = netbox.Shape(nodes=3, ranks_per_node=1, inter_bits=INTER, intra_bits=INTRA)
    with netbox.cluster(shape) as nodes:
        node = nodes[0]
        # A second stream keeps the link of node 0 busy while the first is measured.
        sink = "import socket; s = socket.create_server(('10.77.0.1', 6000)); print('ready', flush=True)\n"
        sink += "c, _ = s.accept()\nwhile c.recv(1 << 20): pass"
        source = (
            "import socket; s = socket.create_connection(('10.77.0.1', 6000))\nwhile True: s.sendall(bytes(1 << 16))"
        )
        helpers = []
        for where, code in ((node, sink), (nodes[2], source)):
            words = ["ip", "netns", "exec", where, sys.executable, "-c", code]
            helpers.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
            if where == node:
                assert helpers[0].stdout.readline() == "ready\n"
        shared = netbox._measure_flows(shape, nodes, [(1, 0)], seconds=1)
        for helper in helpers:
            with helper:
                helper.kill()
    assert shared < 0.85 * INTER


def test_first_failing_node_gives_the_exit_code_and_ends_the_others(python_nodes, tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("import sys, time\nif sys.argv[1] == '1': sys.exit(7)\ntime.sleep(60)\n")
    start = time.monotonic()
    assert netbox.run_job(SHAPE, python_nodes, [str(script)], timeout=None) == 7
    assert time.monotonic() - start < 30


def test_a_signal_that_ends_a_node_fails_the_job(python_nodes, tmp_path):
    script = tmp_path / "die.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert netbox.run_job(SHAPE, python_nodes, [str(script)], timeout=None) == 128 + 9


def test_timeout_ends_the_job_with_124(python_nodes, tmp_path, capfd):
    script = tmp_path / "hang.py"
    script.write_text("import time\ntime.sleep(60)\n")
    assert netbox.run_job(SHAPE, python_nodes, [str(script)], timeout=1) == 124
    assert "netbox: ended after 1 s (--timeout)" in capfd.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(signum):
    process = subprocess.Popen([*COMMAND, "--", __file__], stderr=subprocess.PIPE, text=True)
    run = wait_for_namespaces(process)
    process.send_signal(signum)
    _, message = process.communicate(timeout=30)
    assert process.returncode == 128 + signum
    assert f"netbox: stopped by {signum.name}" in message
    assert not left_by(run)


def test_what_a_killed_run_left_is_cleaned_and_a_live_one_is_not():
    process = subprocess.Popen([*COMMAND, "--", __file__], stderr=subprocess.DEVNULL)
    run = wait_for_namespaces(process)
    with netbox.cluster(SHAPE):
        assert left_by(run)  # building cleans first, and the other run was alive
        process.kill()
        process.wait()
        done = subprocess.run([sys.executable, str(TOOLS / "netbox.py"), "clean"], capture_output=True, text=True)
        assert done.returncode == 0
        assert "netbox: removed 3 leftover namespaces" in done.stdout
        assert not left_by(run)
        assert len(left_by(netbox.run_id(os.getpid()))) == 3


def test_a_failing_tool_is_named_with_its_message():
    with pytest.raises(netbox.NetboxError, match="`ip -n absent link` failed: .*absent"):
        netbox._command("ip", "-n", "absent", "link")
