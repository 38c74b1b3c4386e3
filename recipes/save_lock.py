"""The right of one job to save into a folder: two would delete and overwrite each other's checkpoints.

A file in the folder says who holds it. It is made with O_EXCL, which is atomic on local and on shared file systems, so
that of two jobs on different nodes one finds it. SIGTERM, as at a time limit, takes it away. A job that is killed
leaves it behind: it is taken over where the holder is seen to have ended (same machine, its process is gone) or is
known to have (an earlier start of the same job).
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from megatron_moe_opt.errors import ConfigurationError

NAME = ".saving"


@dataclass(frozen=True)
class Holder:
    """The process that saves into a folder."""

    user: str
    host: str
    machine: str
    """The running kernel and the process namespace: where `pid` means something."""
    pid: int
    process_start: str
    """When the process started, in clock ticks after the machine did; tells it from a later one with its number."""
    since: str
    job: str
    """Slurm's number of the job, or empty. It stays when the job is queued again."""
    run: str
    """torchrun's name of the run, or empty. It stays when ranks are restarted; `torchrun --standalone` makes one."""
    starts: tuple[int, int]
    """How often the job was queued again, and its ranks restarted."""

    @classmethod
    def this_process(cls) -> Holder:
        """Returns the holder that the calling process is."""
        environment = os.environ
        run = environment.get("TORCHELASTIC_RUN_ID", "none")
        starts = (int(environment.get(name) or 0) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
        return cls(
            user=_user(),
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            process_start=_process_start(os.getpid()),
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            job=environment.get("SLURM_JOB_ID", ""),
            run="" if run == "none" else run,
            starts=tuple(starts),
        )

    def has_ended(self, now: Holder) -> bool:
        """Whether the process `now` can tell that this one has ended."""
        if (self.host, self.machine) == (now.host, now.machine) and self.machine != "":
            return _process_start(self.pid) != self.process_start  # whatever it is called: numbers of jobs may be alike
        if self.job != "" and self.job == now.job and self.starts[0] < now.starts[0]:
            return True  # queued again
        return self.run != "" and (self.job, self.run) == (now.job, now.run) and self.starts < now.starts

    def __str__(self) -> str:
        names = " ".join(filter(None, (self.job, self.run)))
        job = f", job {names}" if names else ""
        return f"{self.user} on {self.host} (process {self.pid}{job}) since {self.since}"


@contextmanager
def save_lock(folder: Path) -> Iterator[None]:
    """Keeps the folder for this process inside the block, and lets go of it where SIGTERM ends the process.

    Called by another thread than the main one, it knows nothing of signals.

    Raises:
        ConfigurationError: another process has it; names that, and how to take it away from one that has ended.
    """
    file, me = folder / NAME, Holder.this_process()
    while not _make(file, me):
        text = _read(file)
        holder = _holder(text)
        if holder is None or not holder.has_ended(me):
            who = holder or "someone who has not said who"
            raise ConfigurationError(
                f"--save {folder} is being saved to by {who}: wait for that to end, choose another folder, or, where it"
                f" has ended, remove {file}"
            )
        _remove(file, text)

    def let_go() -> None:
        if _read(file) == _text(me):
            file.unlink(missing_ok=True)

    is_main = threading.current_thread() is threading.main_thread()
    try:
        with _before_sigterm_ends(let_go) if is_main else nullcontext():
            yield
    finally:
        let_go()


@contextmanager
def _before_sigterm_ends(let_go: Callable[[], None]) -> Iterator[None]:
    """Inside the block SIGTERM has `let_go` called, and then ends the process, with status 143.

    A thread does it: a handler in Python would wait until the main thread returns from a collective, which it does not
    where the signal has ended other ranks.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def wait() -> None:
        with open(reading, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] == signal.SIGTERM:
                    let_go()
                    os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    handler, wakeup = signal.signal(signal.SIGTERM, _seen_by_thread), signal.set_wakeup_fd(writing)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
        os.close(writing)


def _seen_by_thread(*_: object) -> None:
    """The handler with which Python writes a signal's number to the file of `set_wakeup_fd`."""


def _end_in_child() -> None:
    """Has SIGTERM end what a holder has forked, and not the holder."""
    if signal.getsignal(signal.SIGTERM) is _seen_by_thread:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_in_child)


def _make(file: Path, holder: Holder) -> bool:
    """Make the file, unless there is one."""
    try:
        with open(file, "x", encoding="utf-8") as new:
            new.write(_text(holder))
    except FileExistsError:
        return False
    except OSError as error:
        with suppress(OSError):
            file.unlink()
        raise ConfigurationError(f"{file} cannot be written ({error.strerror}): choose another --save") from error
    return True


def _remove(file: Path, text: str) -> None:
    """Remove the file of a holder that has ended, of which `text` was read, and never one that was made since.

    Whoever removes it has a second file meanwhile, so that it is done by one process at a time.
    """
    turn = file.with_name(f"{NAME}.removing")
    try:
        turn.touch(exist_ok=False)
        try:
            if _read(file) == text:
                file.unlink()
        finally:
            turn.unlink()
    except FileExistsError:
        raise ConfigurationError(
            f"{file}, of a job that has ended, is being removed by another: start this one again later, or, where there"
            f" is no other, remove {turn}"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{file}, of a job that has ended, cannot be removed ({error.strerror}): choose another --save"
        ) from error


def _text(holder: Holder) -> str:
    return json.dumps(asdict(holder)) + "\n"


def _read(file: Path) -> str:
    """Returns the text of the file; empty where nothing can be read, as of a file that is being
    made or removed just now.
    """
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _holder(text: str) -> Holder | None:
    """Returns the holder that a text names; None where it is not of ours, or not whole yet."""
    try:
        content = json.loads(text)
        first, second = map(int, content["starts"])
        return Holder(**content | {"starts": (first, second)})
    except (ValueError, KeyError, TypeError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return f"user {os.geteuid()}"


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """Returns when a process started; empty where there is no such process, or none that runs any more."""
    try:
        # The name of the process, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
