"""netbox against the real kernel: shape, exit codes, and that nothing is left behind. Needs root and iproute2.

A busy machine sends later, never sooner: that a shape holds is shown by what the kernel's buckets are and have counted,
and by bytes that took no less than the time of their rate. How near a rate is met, and what is done where it is not,
is shown with made-up measurements in tests/unit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tools import ROOT
from tools.imitated_nodes import buckets, network, ranks
from tools.imitated_nodes.errors import NetboxError
from tools.imitated_nodes.shape import Shape

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="netbox needs root on Linux"),
    pytest.mark.skipif(
        not all(map(shutil.which, ("ip", "tc", "taskset"))), reason="netbox needs iproute2 and util-linux"
    ),
]

INTER, INTRA = 40_000_000, 320_000_000  # bits/s
SHAPE = Shape(nodes=2, ranks_per_node=2, inter_bits=INTER, intra_bits=INTRA)
COMMAND = [sys.executable, str(ROOT / "tools" / "netbox.py"), "run", "--ranks-per-node", "2", "--unmet", "warn"]
COMMAND += ["--inter", f"{INTER}bit", "--intra", f"{INTRA}bit"]
MIB = 2**20
ADVERTISING = 20_000  # bytes; what a kernel says on its links by itself, and handshakes
ENDED_S = 300  # only ends a test that hangs

A2A = """
import json, os, subprocess, time
import torch
import torch.distributed as dist

def passed():
    shown = json.loads(subprocess.run(["tc", "-s", "-j", "qdisc", "show"], capture_output=True, check=True).stdout)
    return {qdisc["dev"]: qdisc["bytes"] for qdisc in shown}

dist.init_process_group("gloo")
# 2 nodes x 2 ranks, 1 MiB a rank: half of each buffer leaves the node, a quarter goes to the other rank in it.
sent = torch.full((1 << 18,), float(dist.get_rank()))
received = torch.empty_like(sent)
dist.all_to_all_single(received, sent)  # connects
dist.barrier()
before, times = passed(), []
for _ in range(3):
    dist.barrier()
    start = time.monotonic()
    dist.all_to_all_single(received, sent)
    spans = [None] * dist.get_world_size()
    dist.all_gather_object(spans, (start, time.monotonic()))  # one kernel: one clock for all nodes
    times.append(max(end for _, end in spans) - min(start for start, _ in spans))
after, counted, shares = passed(), [None] * dist.get_world_size(), [None] * dist.get_world_size()
dist.all_gather_object(counted, {device: after[device] - before[device] for device in after})
dist.all_gather_object(shares, sorted(os.sched_getaffinity(0)))
if dist.get_rank() == 0:
    assert received.view(4, -1).float().mean(1).tolist() == [0, 1, 2, 3]
    rates = [os.environ["NETBOX_INTER_BITS"], os.environ["NETBOX_INTRA_BITS"]]
    print(json.dumps({"seconds": times, "rates": rates, "bytes": counted[::2], "shares": shares}), flush=True)
dist.barrier()  # or both could be in one line
if dist.get_rank() == 3:
    print("rank 3 was here", flush=True)
dist.barrier()
time.sleep(0.1)  # or PyTorch 2.6 may never end: see all_let_go
dist.destroy_process_group()
"""

# Prints when the last byte of all senders was there.
RECEIVE = """
import socket, sys, threading, time
address, senders = sys.argv[1], int(sys.argv[2])
def drain(stream):
    while stream.recv(1 << 20):
        pass
with socket.create_server((address, 6000)) as server:
    print("ready", flush=True)
    threads = [threading.Thread(target=drain, args=(server.accept()[0],)) for _ in range(senders)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(time.monotonic())
"""

# Prints when it began.
SEND = """
import socket, sys, time
print(time.monotonic())
with socket.create_connection((sys.argv[1], 6000)) as stream:
    stream.sendall(bytes(int(sys.argv[2])))
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def left_by(run: str | None) -> list[str]:
    assert run is not None
    return [line for line in namespaces().splitlines() if f"netbox-{run}-" in line]


def wait_for_namespaces(process: subprocess.Popen) -> str | None:
    """Identity of the run, once it has made its nodes."""
    run = network.run_id(process.pid)
    deadline = time.monotonic() + ENDED_S
    while len(left_by(run)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return run


def switch_of(nodes: list[str]) -> str:
    return nodes[0].replace("node0", "switch")


def qdiscs(namespace: str) -> dict[str, dict]:
    """The root qdisc of each device in a namespace, with what it has counted."""
    shown = subprocess.run(["tc", "-n", namespace, "-s", "-j", "qdisc", "show"], capture_output=True, check=True)
    return {qdisc["dev"]: qdisc for qdisc in json.loads(shown.stdout)}


def passed(nodes: list[str]) -> dict[str, int]:
    """Bytes that have passed every bucket: `eth0` and `lo` of node 0 as `0 eth0` and `0 lo`, ports as `port0`."""
    counted = {device: qdisc["bytes"] for device, qdisc in qdiscs(switch_of(nodes)).items()}
    for number, node in enumerate(nodes):
        counted |= {f"{number} {device}": qdisc["bytes"] for device, qdisc in qdiscs(node).items()}
    return counted


def burst_bytes(rate_bits: int) -> int:
    """Depth of the bucket that SHAPE's links, or its insides, have for their rate."""
    return buckets.burst_bytes(rate_bits, {INTER: buckets.LINK_PACKET, INTRA: buckets.INSIDE_PACKET}[rate_bits])


def least_seconds(size: int, rate_bits: int) -> float:
    """What bytes take at the least through a bucket that is full at first (1 % for the clock of the kernel)."""
    return 0.99 * (size - burst_bytes(rate_bits)) * 8 / rate_bits


def transfer(nodes: list[str], senders: list[int], receiver: int, size: int) -> tuple[float, dict[str, int]]:
    """Send `size` bytes from each sender. Returns seconds from the first start to the last byte, and `passed` by it."""
    address, before = SHAPE.address(receiver), passed(nodes)

    def start(node: int, code: str, *arguments: object) -> subprocess.Popen:
        words = ["ip", "netns", "exec", nodes[node], sys.executable, "-c", code, address, *map(str, arguments)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    processes = [start(receiver, RECEIVE, len(senders))]
    try:
        assert processes[0].stdout.readline() == "ready\n"
        processes += [start(sender, SEND, size) for sender in senders]
        begins = [float(sending.communicate(timeout=ENDED_S)[0]) for sending in processes[1:]]
        end = float(processes[0].communicate(timeout=ENDED_S)[0])
    finally:
        for process in processes:
            with process:
                process.kill()
    after = passed(nodes)
    return end - min(begins), {device: after[device] - before[device] for device in after}


@pytest.fixture
def python_nodes(monkeypatch):
    """A cluster whose nodes start plain Python where torchrun would be, to test the running without its start."""
    monkeypatch.setattr(ranks, "torchrun_command", lambda shape, node, command: [sys.executable, *command, str(node)])
    with network.cluster(SHAPE) as nodes:
        yield nodes
    assert not left_by(network.run_id(os.getpid()))


@pytest.fixture
def endless(tmp_path) -> str:
    """A script that only ends if it is ended."""
    script = tmp_path / "endless.py"
    script.write_text("import time\nwhile True: time.sleep(1)\n")
    return str(script)


def test_all_to_all_takes_no_less_than_the_time_of_its_bytes_between_nodes(tmp_path):
    script = tmp_path / "a2a.py"
    script.write_text(A2A)
    done = subprocess.run([*COMMAND, "--", str(script)], capture_output=True, text=True, timeout=2 * ENDED_S)
    assert done.returncode == 0, done.stderr
    assert "2 nodes x 2 ranks, inter 40 Mbit/s (measured " in done.stderr
    found = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert found["rates"] == [str(INTER), str(INTRA)]
    assert min(found["seconds"]) >= least_seconds(MIB, INTER)
    for node in found["bytes"]:  # 3 times 1 MiB out of the node, and half of that inside it
        assert node["eth0"] > 3 * MIB
        assert 1.5 * MIB < node["lo"] < 3 * MIB
    available = sorted(os.sched_getaffinity(0))
    assert found["shares"] == [ranks.processors(rank // 2, 2, available) for rank in range(4)]
    assert "[node 1] rank 3 was here" in done.stdout


def test_every_device_has_a_bucket_of_its_rate():
    expected = {"kind": "tbf", "root": True}
    with network.cluster(SHAPE) as nodes:
        links = {(node, "eth0"): INTER for node in nodes} | {(switch_of(nodes), f"port{i}"): INTER for i in (0, 1)}
        for (namespace, device), bits in (links | {(node, "lo"): INTRA for node in nodes}).items():
            qdisc = qdiscs(namespace)[device]
            assert expected.items() <= qdisc.items(), (namespace, device)
            assert qdisc["options"]["rate"] == bits // 8
            assert qdisc["options"]["burst"] == pytest.approx(burst_bytes(bits), rel=0.01)


def test_nodes_send_alike_on_every_machine():
    files = [f"/proc/sys/net/ipv4/{name}" for name in network.CONGESTION]
    with network.cluster(SHAPE) as nodes:
        for node in nodes:
            words = ["ip", "netns", "exec", node, "cat", *files]
            shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            assert shown.split() == list(network.CONGESTION.values())


def test_traffic_between_nodes_passes_their_links_and_traffic_inside_one_only_its_lo():
    with network.cluster(SHAPE) as nodes:
        seconds, between = transfer(nodes, [0], 1, MIB)
        assert seconds >= least_seconds(MIB, INTER)
        assert all(between[device] > MIB for device in ("0 eth0", "port1"))
        assert all(between[device] < MIB / 2 for device in ("1 eth0", "port0"))  # acknowledgements
        assert between["0 lo"] == between["1 lo"] == 0
        seconds, inside = transfer(nodes, [0], 0, 4 * MIB)
        assert seconds >= least_seconds(4 * MIB, INTRA)
        assert inside["0 lo"] > 4 * MIB
        assert all(count < ADVERTISING for device, count in inside.items() if device != "0 lo")


def test_two_senders_to_one_node_share_its_link():
    shape = Shape(nodes=3, ranks_per_node=1, inter_bits=INTER, intra_bits=INTRA)
    with network.cluster(shape) as nodes:
        seconds, counted = transfer(nodes, [1, 2], 0, MIB)
    assert seconds >= least_seconds(2 * MIB, INTER)  # at the sum of their rates: half of it
    assert counted["port0"] > 2 * MIB


def test_first_failing_node_gives_the_exit_code_and_ends_the_others(python_nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    script = tmp_path / "fail.py"
    script.write_text("import sys, time\nif sys.argv[1] == '1': sys.exit(7)\nwhile True: time.sleep(1)\n")
    assert ranks.run_job(SHAPE, python_nodes, [str(script)], timeout=None) == 7


def test_a_signal_that_ends_a_node_fails_the_job(python_nodes, tmp_path):
    script = tmp_path / "die.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert ranks.run_job(SHAPE, python_nodes, [str(script)], timeout=None) == 128 + 9


def test_timeout_ends_the_job_with_124(python_nodes, endless, capfd):
    assert ranks.run_job(SHAPE, python_nodes, [endless], timeout=1) == 124
    assert "netbox: ended after 1 s (--timeout)" in capfd.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(signum, endless):
    process = subprocess.Popen([*COMMAND, "--", endless], stderr=subprocess.PIPE, text=True)
    run = wait_for_namespaces(process)
    process.send_signal(signum)
    _, message = process.communicate(timeout=ENDED_S)
    assert process.returncode == 128 + signum
    assert f"netbox: stopped by {signum.name}" in message
    assert not left_by(run)


def test_what_a_killed_run_left_is_cleaned_and_a_live_one_is_not(endless):
    process = subprocess.Popen([*COMMAND, "--", endless], stderr=subprocess.DEVNULL)
    run = wait_for_namespaces(process)
    with network.cluster(SHAPE):
        assert left_by(run)  # building cleans first, and the other run was alive
        process.kill()
        process.wait()
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "netbox.py"), "clean"], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert "netbox: removed 3 leftover namespaces" in done.stdout
        assert not left_by(run)
        assert len(left_by(network.run_id(os.getpid()))) == 3


def test_a_failing_tool_is_named_with_its_message():
    with pytest.raises(NetboxError, match="`ip -n absent link` failed: .*absent"):
        network._command("ip", "-n", "absent", "link")
