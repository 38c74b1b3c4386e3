"""Logs that may lose lines, but never end training: on a full disk the first one that is lost is warned of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Losses:
    """What of one log could not be written.

    Args:
        name: of the log, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._have_begun = False

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A block that writes to the log: where the operating system refuses, the rest of the block is lost."""
        try:
            yield
        except OSError as error:
            if not self._have_begun:
                self._have_begun = True
                with suppress(OSError):
                    reason = error.strerror or error
                    sys.stderr.write(f"warning: {self._name} loses lines ({reason}); training goes on\n")
                    sys.stderr.flush()


class LossyStream:
    """Standard output or error whose writes do not fail; all else is the stream's own."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._losses = Losses(name)

    def write(self, text: str) -> int:
        """Write what can be written, and say that all was."""
        with self._losses.allowed():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be."""
        with self._losses.allowed():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
