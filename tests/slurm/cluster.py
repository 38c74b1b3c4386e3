"""A real Slurm on this machine: munged, slurmctld, and two nodes, each a slurmd in namespaces of its own.

A node has its own processes and host name, so it can be switched off as a whole, and ranks say its name. Its GPUs are
numbers in slurm.conf. Everything is in one folder, and ends with the cluster.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY"}

# Two partitions: what is in `urgent` preempts what is in `gpu`. Times are short: elsewhere a node is missed
# after 300 s.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdTimeout=45
KillWait=5
FirstJobId={first_job}
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 Gres=gpu:2
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000 Gres=gpu:2
PartitionName=gpu Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=300
PartitionName=urgent Nodes=n[1-2] PriorityTier=2 PreemptMode=OFF
"""

# The first process of a node adopts what its jobs leave behind, and reaps it: Slurm waits for them to be gone.
NODE = 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; slurmd -D -N "$1" -f "$2/slurm.conf" & wait'


def why_not() -> str | None:
    """Says why no Slurm can be started here; None where one can."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"no {missing[0]} here: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a node of the test's Slurm has namespaces of its own, which only root can make"
    return None


class SlurmCluster:
    """Two nodes, `n1` and `n2`, of two GPUs each, and what a user types on a login node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "hosts").write_text("127.0.0.1 localhost n1 n2\n::ffff:127.0.0.1 n1 n2\n")
        (folder / "slurm.conf").write_text(
            # The job's port follows from its number: another cluster on this machine has others.
            CONFIGURATION.format(folder=folder, ports=_free_ports(3), first_job=random.randrange(1, 20000))
        )
        (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")
        for number in range(2):
            (folder / f"gpu{number}").touch()

    def open(self) -> None:
        """Starts everything, and waits until jobs can be submitted."""
        folder = self.folder
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        until((folder / "munge.socket").exists, 10)
        self._start("slurmctld", "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        self.switch_on("n1")
        self.switch_on("n2")

    def switch_on(self, node: str) -> None:
        """Starts a node that is off, and waits until Slurm would give it to a job."""
        if node in self._started:
            return
        namespaces = ("--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
        self._start(node, "unshare", *namespaces, "bash", "-c", NODE, "node", node, str(self.folder))
        until(lambda: re.search(r"State=(IDLE|MIXED|ALLOCATED)[ +]", self.scontrol("show", "node", node)), 60)

    def switch_off(self, node: str) -> None:
        """Ends all processes of a node at once, as a power failure does."""
        self._started[node].kill()
        self._started.pop(node).wait()

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login node, in the cluster's folder."""
        given = os.environ | self._environment | dict(environment or {})
        return subprocess.run(command, env=given, cwd=self.folder, capture_output=True, text=True, timeout=300)

    def scontrol(self, *words: str) -> str:
        """Returns what scontrol prints, one line an object."""
        return self.run("scontrol", "--oneliner", *words).stdout

    def job(self, number: int) -> dict[str, str]:
        """Returns what Slurm knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.scontrol("show", "job", str(number))))

    def queue(self) -> list[str]:
        """Returns the numbers of all jobs that wait or run."""
        return self.run("squeue", "--noheader", "--format=%i").stdout.split()

    def log(self, number: int) -> str:
        """Returns what a job has printed."""
        return "".join(path.read_text(errors="replace") for path in self.folder.glob(f"*-{number}.log"))

    def wait_for(self, number: int, what: Callable[[], object], seconds: float = 900) -> None:
        """Waits for something of a job that is not over; fails with its log."""

        def come_or_over() -> bool:
            return bool(what()) or self.job(number)["JobState"] in ENDED

        try:
            until(come_or_over, seconds)
            assert what()
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{self.job(number)}\n{self.log(number)}") from error

    def end_of(self, number: int, seconds: float = 900) -> dict[str, str]:
        """Waits until a job is over, and all its processes are gone; returns what Slurm knows of it."""
        self.wait_for(number, lambda: self.job(number)["JobState"] in ENDED, seconds)
        return self.job(number)

    def close(self) -> None:
        """Ends all that was started."""
        for name in reversed(list(self._started)):  # those first that ask the others
            if name in ("munged", "slurmctld"):
                self._started[name].terminate()  # which have processes of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._started[name].wait(10)
            self.switch_off(name)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            environment = os.environ | self._environment
            self._started[name] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A Slurm in a folder, for the time of the block."""
    cluster = SlurmCluster(folder)
    try:
        cluster.open()
        yield cluster
    finally:
        cluster.close()


def until(what: Callable[[], object], seconds: float) -> None:
    """Waits for something to be true."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} seconds")
        time.sleep(0.3)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
