"""The JSON-lines log of a run: one object for every logged iteration, losses at full precision."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lossy_logs import Losses

from megatron_moe_opt.errors import ConfigurationError


class StepLog:
    """Appends records to a file, each at once, so that a run that dies leaves what it has done.

    A record that does not fit on the disk is left out, with a warning the first time.
    """

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._losses = Losses(str(path))

    def write(self, record: dict[str, Any]) -> None:
        """Write one record, or none of it; floats keep all their digits."""
        line = (json.dumps(record) + "\n").encode()
        with self._losses.allowed():
            end = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):  # a device or a pipe
                    self._file.truncate(end)
                raise

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_steps(path: str | Path) -> dict[int, dict[str, Any]]:
    """Records by iteration; where a resumed run has logged an iteration again, the later one.

    Raises ConfigurationError where the file is missing or a line is not a record.
    """
    steps: dict[int, dict[str, Any]] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}; give the --log-json of a run") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            steps[int(record["iteration"])] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path}, line {number} is not a record of a training step; give the --log-json of a run"
            ) from error
    return steps
