"""The script's ranks: torchrun on every node, with its own share of the processors, until all have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO

from .network import signal_processes
from .shape import Shape

GRACE_S = 5.0  # what other nodes get to report a failure by themselves, and to write their last lines
PORT = 29500


def torchrun_command(shape: Shape, node: int, command: list[str]) -> list[str]:
    """Returns the command that starts a node's ranks, to be run inside that node's namespace."""
    where = ["--nnodes", str(shape.nodes), "--node_rank", str(node), "--nproc_per_node", str(shape.ranks_per_node)]
    master = ["--master_addr", shape.address(0), "--master_port", str(PORT)]
    return [sys.executable, "-m", "torch.distributed.run", *where, *master, *command]


def processors(node: int, nodes: int, available: Sequence[int]) -> list[int]:
    """Returns a node's own share of the processors, or the one that it shares with as many nodes as the others do.

    A node would otherwise compute on the processors of those that wait for the network. Where there are no equal
    shares, all nodes have all processors: a node with fewer would hold up the others.
    """
    if len(available) % nodes == 0:
        share = len(available) // nodes
        return list(available[node * share : (node + 1) * share])
    return [available[node * len(available) // nodes]] if nodes % len(available) == 0 else list(available)


def rank_environment(shape: Shape) -> dict[str, str]:
    """Returns this process's environment and what ranks need: Gloo's interface, one thread a rank, the links' rates."""
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "GLOO_SOCKET_IFNAME": "eth0",
        "NETBOX_INTER_BITS": str(shape.inter_bits),
        "NETBOX_INTRA_BITS": str(shape.intra_bits),
    }


def run_job(shape: Shape, nodes: list[str], command: list[str], timeout: float | None) -> int:
    """Runs the command on every node and returns its exit code: that of the first node that fails, 124 on timeout.

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
        signal_processes(nodes, signal.SIGTERM)
        for copier in copiers:
            copier.join(GRACE_S)


def _copy_lines(source: BinaryIO, target: BinaryIO, prefix: bytes) -> None:
    for line in source:
        target.write(prefix + line)
        target.flush()


def _wait(agents: list[subprocess.Popen[bytes]], timeout: float | None) -> int:
    """Returns the exit code of the job when all have ended, or a while after the first failure, or at the timeout."""
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
