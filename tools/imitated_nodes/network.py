"""Nodes as network namespaces, joined by links of chosen bandwidth; what a run leaves of them is removed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from .buckets import INSIDE_PACKET, bucket, link_packet
from .errors import NetboxError
from .shape import Shape

GRACE_S = 5.0  # what processes get to end on SIGTERM

# A machine's own choice would decide over times: BBR slows down for 0.2 s every 10 s to look for a shorter way, and
# after a pause TCP starts slowly. Reno is in every kernel and allowed in every namespace.
CONGESTION = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}

FILES = Path("/etc/netns")  # `ip netns exec NAME` shows FILES/NAME/hosts as /etc/hosts
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_id(pid: int) -> str | None:
    """Returns what tells a live process from a later one with its pid, `pid-starttime`; None if there is no such
    process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def signal_processes(names: list[str], signum: int) -> bool:
    """Sends a signal to all processes in namespaces. Returns whether there were any."""
    pids = [int(pid) for name in names for pid in _command("ip", "netns", "pids", name).split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    return bool(pids)


def clean() -> int:
    """Removes what killed runs left behind and returns how many namespaces that were. Runs that live are left alone."""
    leftovers = [name for name, run in _namespaces().items() if run_id(int(run.split("-")[0])) != run]
    _remove(leftovers)
    return len(leftovers)


@contextlib.contextmanager
def cluster(shape: Shape) -> Iterator[list[str]]:
    """Builds the nodes and yields the names of their namespaces; removes everything on the way out."""
    clean()
    run = run_id(os.getpid())
    switch, nodes = f"netbox-{run}-switch", [f"netbox-{run}-node{i}" for i in range(shape.nodes)]
    # Names for c10d's messages, without waiting for a name server; its sockets are IPv6 ones, hence the mapped form.
    names = [f"{form}{shape.address(i)} node{i}\n" for i in range(shape.nodes) for form in ("", "::ffff:")]
    hosts = "127.0.0.1 localhost\n" + "".join(names)
    packet = link_packet(shape.peak)
    link = bucket(shape.inter_bits, packet, shape.peak)
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
            _command(*f"ip -n {node} link set eth0 gso_max_size {packet} up".split())
            for name, value in CONGESTION.items():
                _command("ip", "netns", "exec", node, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")
            _limit(node, "eth0", link)
            _limit(switch, port, link)
            _limit(node, "lo", bucket(shape.intra_bits, INSIDE_PACKET))
        yield nodes
    finally:
        before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in STOPPING_SIGNALS}
        _remove([name for name, owner in _namespaces().items() if owner == run])
        for signum, handler in before.items():  # ignored until here: a second Ctrl-C must not leave half a cluster
            signal.signal(signum, handler)


def _command(*words: str) -> str:
    """Runs ip or tc and returns what it printed; in a session of its own, so that a Ctrl-C does not cut it short."""
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NetboxError(f"`{' '.join(words)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _namespaces() -> dict[str, str]:
    """Returns the names of all namespaces that runs made, each with the `run_id` of its run."""
    names = [line.split()[0] for line in _command("ip", "netns", "list").splitlines() if line.strip()]
    return {name: match[1] for name in names if (match := re.fullmatch(r"netbox-(\d+-\d+)-\w+", name))}


def _remove(names: list[str]) -> None:
    """Ends the processes inside the namespaces, then deletes these (and with them their links and shaping)."""
    deadline = time.monotonic() + GRACE_S
    while signal_processes(names, signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM):
        time.sleep(0.05)
    for name in names:
        _command("ip", "netns", "del", name)
        shutil.rmtree(FILES / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # another run's, or the machine's own
        FILES.rmdir()


def _limit(namespace: str, device: str, words: list[str]) -> None:
    _command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *words)
