#!/usr/bin/env python3
"""A small cluster out of one Linux machine, with links of chosen bandwidth.

    python tools/netbox.py run --nodes 2 --ranks-per-node 4 --inter 200mbit --intra 1600mbit -- script.py args
    python tools/netbox.py clean

Every node is a network namespace with one full-duplex link (`eth0`) to a bridge. The bridge lives in a namespace of
its own, so the machine's network is never touched. Token buckets (tc's tbf) limit

- the link: `eth0` limits what the node sends, its port on the bridge limits what the node receives (several senders
  to one receiver would otherwise reach it at the sum of their rates);
- `lo`: ranks of one node address each other by the node's `eth0` address, which the kernel routes over `lo`. One
  bucket serves both directions, so `--intra` is what all ranks of a node together exchange inside it.

Every node computes on its own equal share of the machine's processors, where they can be shared equally, and sends by
TCP as CONGESTION says, whatever the machine's own way is.

The script runs under torchrun in each node, over Gloo. Before that the shape is measured with plain sockets, and a
shape that is off by more than 15 % is refused (`--unmet warn`: the script runs, behind a warning). Everything is
removed at the end, whatever ends the run; what a killed run left behind is removed by the next one, or by `clean`.

Needs root, iproute2 and util-linux; standard library only, but the ranks need torch. See docs/netbox.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

TOLERANCE = 0.15  # TCP over 1500-byte frames delivers 95.6 % of the rate; the rest is for the machine's noise
MEASURE_S = (0.5, 1, 2)  # one try each; a busy moment of the machine weighs less in a longer one
WARMUP = 0.5  # of that time again, before it: connecting, slow start, full buckets
SILENCE_S = 60.0  # without a byte, after which a measurement gives up
GRACE_S = 5.0  # what other nodes get to report a failure by themselves, and ranks to end on SIGTERM

MIN_RATE = 10_000_000  # bits/s; below it the bucket's burst is no longer small against a second of traffic
LINK_PACKET, INSIDE_PACKET = 16 * 1024, 64 * 1024  # bytes of the largest packets; the kernel's own are of 64 KiB
MIN_PACKETS = 2  # in a bucket, which drops a packet that is larger, and passes as much at once after a pause
PEAK_PACKET, PEAK_BUCKET = 6_250, 24_000  # bytes, of links whose bucket is emptied at a rate of its own
BURST_S = 1e-3  # at high rates the bucket must bridge a timer's delay
MAX_NODES = 64

# A machine's own choice would decide over times: BBR slows down for 0.2 s every 10 s to look for a shorter way, and
# after a pause TCP starts slowly. Reno is in every kernel and allowed in every namespace.
CONGESTION = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}

PORT_TORCHRUN, PORT_MEASURE = 29500, 5001
FILES = Path("/etc/netns")  # `ip netns exec NAME` shows FILES/NAME/hosts as /etc/hosts
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


class NetboxError(Exception):
    """One sentence for the user; the run ends with exit code 2."""


class Stopped(BaseException):
    """A signal asks the run to end (BaseException: no `except Exception` may swallow it)."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


# ------------------------------------------------------------------------------------------------ what to build


def parse_rate(text: str) -> int:
    """Bits/s of a rate in tc's notation (`200mbit`, `1.6gbit`); units are powers of 1000.

    Raises argparse.ArgumentTypeError for anything else and for rates below 10mbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is not a rate; write it like 200mbit or 1.6gbit")
    bits = round(float(match[1]) * _UNITS[match[2]])
    if bits < MIN_RATE:
        raise argparse.ArgumentTypeError(f"'{text}' is too slow to be shaped well; use 10mbit or more")
    return bits


def _count(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {least} to {most}")
        return int(text)

    return parse


def _factor(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not 1 < float(text) <= 100:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 1 and to 100")
    return float(text)


@dataclass(frozen=True)
class Shape:
    """The cluster that is asked for; rates in bits/s, each node's."""

    nodes: int
    ranks_per_node: int
    inter_bits: int
    intra_bits: int
    peak: float | None = None
    """How many times its rate a link between nodes reaches at most, after a pause; None: what a bucket holds passes at
    once.
    """

    @property
    def link_packet(self) -> int:
        """Returns the bytes of the largest packets between nodes."""
        return LINK_PACKET if self.peak is None else PEAK_PACKET

    def address(self, node: int) -> str:
        """The node's address on its link, a private one that only exists inside the namespaces."""
        return f"10.77.0.{node + 1}"

    def describe(self, inter: float | None, intra: float) -> str:
        """The line that a run starts with; `inter` and `intra` are measured bits/s, `inter` None for a single node."""
        links = [("inter", self.inter_bits, inter), ("intra", self.intra_bits, intra)]
        rates = [
            f"{link} {asked / 1e6:g} Mbit/s (measured {measured / 1e6:.0f})"
            for link, asked, measured in links
            if measured is not None
        ]
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.ranks_per_node} ranks, {', '.join(rates)}"


def burst_bytes(rate_bits: int, packet: int) -> int:
    """Depth of the token bucket for a rate: at least two of the largest packets, or a millisecond of traffic."""
    return max(MIN_PACKETS * packet, int(rate_bits / 8 * BURST_S))


def off_by_too_much(asked: float, measured: float) -> bool:
    """True if a measured rate differs from the asked one by more than the tolerance, either way."""
    return abs(measured - asked) > TOLERANCE * asked


# ------------------------------------------------------------------------------------------- namespaces and links


def _command(*words: str) -> str:
    """Run ip or tc and return what it printed; its own session, so that a Ctrl-C does not cut it short."""
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NetboxError(f"`{' '.join(words)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def run_id(pid: int) -> str | None:
    """Identity of a live process, safe against reused pids: `pid-starttime`; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def _namespaces() -> dict[str, str]:
    """Names of all network namespaces made by this tool -> identity of the run that made them."""
    names = [line.split()[0] for line in _command("ip", "netns", "list").splitlines() if line.strip()]
    return {name: match[1] for name in names if (match := re.fullmatch(r"netbox-(\d+-\d+)-\w+", name))}


def _processes(name: str) -> list[int]:
    return [int(pid) for pid in _command("ip", "netns", "pids", name).split()]


def _signal_all(pids: list[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _remove(names: list[str]) -> None:
    """End the processes inside the namespaces, then delete these (and with them their links and shaping)."""
    deadline = time.monotonic() + GRACE_S
    signum = signal.SIGTERM
    while pids := [pid for name in names for pid in _processes(name)]:
        if time.monotonic() > deadline:
            signum = signal.SIGKILL
        _signal_all(pids, signum)
        time.sleep(0.05)
    for name in names:
        _command("ip", "netns", "del", name)
        shutil.rmtree(FILES / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # another run's, or the machine's own
        FILES.rmdir()


def clean() -> int:
    """Remove what killed runs left behind and return how many namespaces that were. Runs that live are left alone."""
    leftovers = [name for name, run in _namespaces().items() if run_id(int(run.split("-")[0])) != run]
    _remove(leftovers)
    return len(leftovers)


def _shape(namespace: str, device: str, rate_bits: int, packet: int, peak: float | None = None) -> None:
    burst = max(burst_bytes(rate_bits, packet), 0 if peak is None else PEAK_BUCKET)
    bucket = ["rate", f"{rate_bits}bit", "burst", f"{burst}b", "latency", "400ms"]
    if peak is not None:
        bucket += ["peakrate", f"{int(peak * rate_bits)}bit", "mtu", f"{packet + 64}b"]  # with what a link adds to it
    _command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


@contextlib.contextmanager
def cluster(shape: Shape) -> Iterator[list[str]]:
    """Build the nodes and yield the names of their namespaces; remove everything on the way out."""
    clean()
    run = run_id(os.getpid())
    switch, nodes = f"netbox-{run}-switch", [f"netbox-{run}-node{i}" for i in range(shape.nodes)]
    # Names for c10d's messages, without waiting for a name server; its sockets are IPv6 ones, hence the mapped form.
    names = [f"{form}{shape.address(i)} node{i}\n" for i in range(shape.nodes) for form in ("", "::ffff:")]
    hosts = "127.0.0.1 localhost\n" + "".join(names)
    try:
        _command("ip", "netns", "add", switch)
        _command("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _command("ip", "-n", switch, "link", "set", "bridge", "up")
        for i, node in enumerate(nodes):
            port = f"port{i}"
            _command("ip", "netns", "add", node)
            (FILES / node).mkdir(parents=True)
            (FILES / node / "hosts").write_text(hosts)
            _command(*f"ip -n {switch} link add {port} type veth peer name eth0 netns {node}".split())
            _command("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _command("ip", "-n", node, "addr", "add", f"{shape.address(i)}/24", "dev", "eth0")
            _command("ip", "-n", node, "link", "set", "lo", "up")
            _command(*f"ip -n {node} link set eth0 gso_max_size {shape.link_packet} up".split())
            for name, value in CONGESTION.items():
                _command("ip", "netns", "exec", node, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")
            _shape(node, "eth0", shape.inter_bits, shape.link_packet, shape.peak)
            _shape(switch, port, shape.inter_bits, shape.link_packet, shape.peak)
            _shape(node, "lo", shape.intra_bits, INSIDE_PACKET)
        yield nodes
    finally:
        before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in STOPPING_SIGNALS}
        _remove([name for name, owner in _namespaces().items() if owner == run])
        for signum, handler in before.items():  # ignored until here: a second Ctrl-C must not leave half a cluster
            signal.signal(signum, handler)


# ------------------------------------------------------------------------------------------------- measured shape


def _receive(address: str, seconds: float) -> None:
    """Print "ready", take one stream and print the bits/s at which it arrives, without its start."""
    with socket.create_server((address, PORT_MEASURE)) as server:
        server.settimeout(SILENCE_S)
        print("ready", flush=True)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(SILENCE_S)
        buffer = bytearray(1 << 20)
        stream.recv_into(buffer)
        warm = time.monotonic() + WARMUP * seconds
        while (start := time.monotonic()) < warm:
            stream.recv_into(buffer)
        received, now = 0, start
        while now < start + seconds:
            received += stream.recv_into(buffer)
            now = time.monotonic()
    print(received * 8 / (now - start))


def _send(address: str) -> None:
    """Send to a receiver until it has enough and closes the stream."""
    block = bytes(1 << 18)
    with contextlib.suppress(ConnectionError), socket.create_connection((address, PORT_MEASURE)) as stream:
        while True:
            stream.sendall(block)


def _measure_flows(shape: Shape, nodes: list[str], flows: list[tuple[int, int]], seconds: float) -> float:
    """The least bits/s among flows (sender, receiver) that run at the same time."""
    helpers: list[subprocess.Popen[str]] = []

    def start(node: int, role: str, address: str) -> subprocess.Popen[str]:
        words = ["ip", "netns", "exec", nodes[node], sys.executable, __file__, role, address, str(seconds)]
        pipe = subprocess.PIPE
        helpers.append(subprocess.Popen(words, stdout=pipe, stderr=subprocess.DEVNULL, text=True))
        return helpers[-1]

    try:
        receivers = [start(receiver, "_receive", shape.address(receiver)) for _, receiver in flows]
        for receiver in receivers:
            assert receiver.stdout is not None
            receiver.stdout.readline()
        for sender, receiver in flows:
            start(sender, "_send", shape.address(receiver))
        answers = [receiver.communicate()[0] for receiver in receivers]
    finally:
        for helper in helpers:
            with helper:
                helper.kill()
    return min(float(answer or 0) for answer in answers)


def measure(shape: Shape, nodes: list[str]) -> tuple[float | None, float]:
    """Measured (inter, intra) bits/s of the slowest node: every link full in both directions, then every `lo`.

    A rate that is off by more than the tolerance is measured again, up to three times; the try nearest to the asked
    rate counts. A single node has no peer to measure its link with: None.
    """
    ring = [(i, (i + 1) % shape.nodes) for i in range(shape.nodes)]
    inside = [(i, i) for i in range(shape.nodes)]

    def best(flows: list[tuple[int, int]], asked: int) -> float:
        tries: list[float] = []
        for seconds in MEASURE_S:
            tries.append(_measure_flows(shape, nodes, flows, seconds))
            if not off_by_too_much(asked, tries[-1]):
                break
        return min(tries, key=lambda measured: abs(measured - asked))

    inter = best(ring, shape.inter_bits) if shape.nodes > 1 else None
    return inter, best(inside, shape.intra_bits)


def verdict(shape: Shape, inter: float | None, intra: float, unmet: str) -> str:
    """The line that a run starts with, given what `measure` returned: the shape, or a warning where it is not met.

    Raises NetboxError with the numbers if the shape is not met and `unmet` is "refuse", not "warn".
    """
    line = shape.describe(inter, intra)
    met = inter is None or not off_by_too_much(shape.inter_bits, inter)
    if met and not off_by_too_much(shape.intra_bits, intra):
        return line
    line = f"this machine does not carry the shape: {line}, off by more than {TOLERANCE:.0%}"
    if unmet == "refuse":
        raise NetboxError(f"{line}; ask for lower rates or fewer nodes, free the CPU, or run with --unmet warn")
    return f"warning: {line}; the times of this run are not those of the shape"


# ---------------------------------------------------------------------------------------------------- running it


def torchrun_command(shape: Shape, node: int, command: list[str]) -> list[str]:
    """The command that starts a node's ranks, to be run inside that node's namespace."""
    where = ["--nnodes", str(shape.nodes), "--node_rank", str(node), "--nproc_per_node", str(shape.ranks_per_node)]
    master = ["--master_addr", shape.address(0), "--master_port", str(PORT_TORCHRUN)]
    return [sys.executable, "-m", "torch.distributed.run", *where, *master, *command]


def processors(node: int, nodes: int, available: Sequence[int]) -> list[int]:
    """A node's own share of the processors, or the one that it shares with as many nodes as the others do.

    A node would otherwise compute on the processors of those that wait for the network. Where there are no equal
    shares, all nodes have all processors: a node with fewer would hold up the others.
    """
    if len(available) % nodes == 0:
        share = len(available) // nodes
        return list(available[node * share : (node + 1) * share])
    return [available[node * len(available) // nodes]] if nodes % len(available) == 0 else list(available)


def rank_environment(shape: Shape) -> dict[str, str]:
    """This process's environment and what ranks need: Gloo's interface, one thread a rank, the links' rates."""
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "GLOO_SOCKET_IFNAME": "eth0",
        "NETBOX_INTER_BITS": str(shape.inter_bits),
        "NETBOX_INTRA_BITS": str(shape.intra_bits),
    }


def _copy_lines(source: BinaryIO, target: BinaryIO, prefix: bytes) -> None:
    for line in source:
        target.write(prefix + line)
        target.flush()


def run_job(shape: Shape, nodes: list[str], command: list[str], timeout: float | None) -> int:
    """Run the command on every node and return its exit code: that of the first node that fails, 124 on timeout.

    Node 0 writes straight to this process's output (progress bars work); lines of the others carry their number.
    """
    environment, available = rank_environment(shape), sorted(os.sched_getaffinity(0))
    agents: list[subprocess.Popen[bytes]] = []
    copiers: list[threading.Thread] = []
    try:
        for i, node in enumerate(nodes):
            share = ",".join(map(str, processors(i, len(nodes), available)))
            words = ["ip", "netns", "exec", node, "taskset", "--cpu-list", share, *torchrun_command(shape, i, command)]
            pipe = subprocess.PIPE if i else None
            agents.append(subprocess.Popen(words, env=environment, start_new_session=True, stdout=pipe, stderr=pipe))
            for source, target in ((agents[i].stdout, sys.stdout.buffer), (agents[i].stderr, sys.stderr.buffer)):
                if source is not None:
                    arguments = (source, target, f"[node {i}] ".encode())
                    copiers.append(threading.Thread(target=_copy_lines, args=arguments, daemon=True))
                    copiers[-1].start()
        return _wait(agents, timeout)
    finally:
        for agent in agents:  # killed, not asked: an asked torchrun prints a traceback of our own signal
            agent.kill()
            agent.wait()
        for node in nodes:
            _signal_all(_processes(node), signal.SIGTERM)
        for copier in copiers:
            copier.join(GRACE_S)


def _wait(agents: list[subprocess.Popen[bytes]], timeout: float | None) -> int:
    """Exit code of the job; returns when all have ended, or a while after the first failure, or at the timeout."""
    deadline = time.monotonic() + timeout if timeout else float("inf")
    failure = 0
    while None in (codes := [agent.poll() for agent in agents]):
        if not failure and (failure := next((code for code in codes if code), 0)):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            if failure:
                break
            print(f"netbox: ended after {timeout:g} s (--timeout)", file=sys.stderr)
            return 124
        time.sleep(0.05)
    code = failure or next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code  # a shell's way to say "ended by signal"


# -------------------------------------------------------------------------------------------------- command line


def _check_machine() -> None:
    if not sys.platform.startswith("linux"):
        raise NetboxError(f"netbox needs Linux (network namespaces); this is {sys.platform}")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            raise NetboxError(f"the command `{tool}` is missing; install the Debian package {package}")
    if os.geteuid() != 0:
        raise NetboxError("netbox must run as root to make network namespaces; start it with sudo")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NetboxError(f"{message} (see `netbox.py run --help`)")


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options and the command behind `--`. Raises NetboxError with one sentence for bad input."""
    split = argv.index("--") if "--" in argv else len(argv)
    options, command = argv[:split], argv[split + 1 :]
    parser = _Parser(prog="netbox.py", description="A small cluster out of one Linux machine.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="run|clean")
    actions.add_parser("clean", help="remove what killed runs left behind")
    run = actions.add_parser("run", help="run a script on the cluster", usage="%(prog)s [options] -- script.py args")
    run.add_argument("--nodes", type=_count(1, MAX_NODES), default=2, help="network namespaces (default 2)")
    run.add_argument("--ranks-per-node", type=_count(1, 1024), required=True, help="processes a node")
    run.add_argument("--inter", type=parse_rate, required=True, help="each node's link, each direction: 200mbit")
    run.add_argument("--intra", type=parse_rate, required=True, help="all traffic inside one node: 1600mbit")
    peak = "how many times its rate a link reaches at most after a pause (default: what a bucket holds passes at once)"
    run.add_argument("--peak", type=_factor, help=peak)
    unmet = "what to do if the machine does not carry the shape: end with exit code 2 (default), or say so and run"
    run.add_argument("--unmet", choices=("refuse", "warn"), default="refuse", help=unmet)
    run.add_argument("--timeout", type=_count(1, 10**6), help="seconds after which the job is ended (exit code 124)")
    arguments = parser.parse_args(options)
    if arguments.action == "run":
        if not command:
            raise NetboxError("no script to run; name it behind --, like: netbox.py run ... -- script.py args")
        if not command[0].startswith("-") and not Path(command[0]).is_file():
            raise NetboxError(f"the script '{command[0]}' does not exist")
    return arguments, command


def _stop(signum: int, _frame: object) -> NoReturn:
    raise Stopped(signum)


def main(argv: list[str]) -> int:
    """Entry of the command line; returns the exit code."""
    if argv[:1] == ["_receive"] or argv[:1] == ["_send"]:  # helpers of `measure`, started inside namespaces
        role, address, seconds = argv
        _receive(address, float(seconds)) if role == "_receive" else _send(address)
        return 0
    try:
        arguments, command = parse_arguments(argv)
        _check_machine()
        if arguments.action == "clean":
            print(f"netbox: removed {clean()} leftover namespaces")
            return 0
        for signum in STOPPING_SIGNALS:
            signal.signal(signum, _stop)
        shape = Shape(arguments.nodes, arguments.ranks_per_node, arguments.inter, arguments.intra, arguments.peak)
        with cluster(shape) as nodes:
            print(f"netbox: {verdict(shape, *measure(shape, nodes), arguments.unmet)}", file=sys.stderr, flush=True)
            return run_job(shape, nodes, command, arguments.timeout)
    except NetboxError as error:
        print(f"netbox: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"netbox: stopped by {signal.Signals(stopped.signum).name}", file=sys.stderr)
        return 128 + stopped.signum


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
