"""The variants in whose first steps an earlier start of the job has ended, which are not tried again.

What kills or hangs a rank ends the job, and a scheduler that starts it again would have it meet the same. So a
variant's name is beside the checkpoint from before its first step to behind its second. It stays there where the
process ends otherwise than by itself.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from contextlib import suppress

from megatron_moe_opt.dispatchers.say import say
from megatron_moe_opt.errors import ConfigurationError, reason
from megatron_moe_opt.integration.training_arguments import checkpoint_folder
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.output_file import write_text_whole

FILE_NAME = "moe-opt-first-turns.txt"


class FirstTurns:
    """The file of them, on the one rank that reads and writes it."""

    def __init__(self) -> None:
        """Reads what earlier starts have left, if there is a folder of checkpoints."""
        folder = checkpoint_folder()
        self._file = None if folder is None else folder / FILE_NAME
        self._left: tuple[str, ...] = ()
        self._running: str | None = None
        if self._file is None:
            return
        with suppress(OSError, UnicodeError):  # there is none, in most starts
            self._left = tuple(self._file.read_text(encoding="utf-8").split())
        atexit.register(self._end)

    @property
    def ended(self) -> Mapping[str, str]:
        """Returns why the variants are left out that are, by their names."""
        why = f"an earlier start of this job ended in its first steps: to have it tried again, delete {self._file}"
        return dict.fromkeys(self._left, why)

    def run(self, variant: str | None) -> None:
        """Writes down, before a step, the variant of which it is one of the first; None: it is of none."""
        if self._file is None or variant == self._running:
            return
        self._running = variant
        names = self._left if variant is None else (*self._left, variant)
        try:
            if names:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_text_whole(self._file, "".join(f"{name}\n" for name in names))
            else:
                self._file.unlink(missing_ok=True)
        except (OSError, ConfigurationError) as error:
            say(AUTO, f"a variant that ends the job would be tried again in its next start: {reason(error)}")
            self._file = None

    def _end(self) -> None:
        """Takes the name back where the process ends by itself, and not by an error."""
        if getattr(sys, "last_value", None) is None:
            self.run(None)
