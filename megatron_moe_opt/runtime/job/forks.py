"""What a forked process has instead of the threads of its parent: it makes its own, and waits for none of the other's.

DataLoader workers and writers of checkpoints may be forked off a process that trains. The executor's threads, which are
not Python's, do the same in csrc/pipeline/executor.cpp.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Function = TypeVar("Function", bound=Callable)
Result = TypeVar("Result")


def cached_until_fork(make: Function) -> Function:
    """Caches like functools.cache, but empty in a forked process: for functions that make what has a thread."""
    cached = functools.cache(make)
    os.register_at_fork(after_in_child=cached.cache_clear)
    return cached


class Pending(Generic[Result]):
    """The result of what a thread of this process has begun."""

    def __init__(self, future: Future[Result]) -> None:
        finished = threading.Event()
        self._future, self._process, self._is_finished = future, os.getpid(), finished.is_set
        future.add_done_callback(lambda _: finished.set())  # does not hold on to self, which holds the result

    def result(self) -> Result:
        """Waits for it; raises what it raised. Raises RuntimeError in a process that was forked off meanwhile."""
        if not self._is_finished() and os.getpid() != self._process:  # asked first: the future may hold a lock
            raise RuntimeError(
                "a forked process waits for what a thread of its parent had begun, which does not run here: fork when "
                "no pass of a MoE layer is under way, or start the process with spawn"
            )
        return self._future.result()
