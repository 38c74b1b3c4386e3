"""What a person sees of a run: a bar on a terminal, plain lines in a file."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_STEPS_IN_RATE = 50


class TrainingProgress:
    """Shows iteration, loss, tokens per second and time left.

    Args:
        console: where to show it; a quiet console shows nothing.
        total: iterations of the whole run.
        completed: iterations that are done already.
        tokens_per_iteration: tokens of one global batch.
    """

    def __init__(self, console: Console, total: int, completed: int, tokens_per_iteration: int) -> None:
        self._console = console
        self._total = total
        self._tokens = tokens_per_iteration
        self._seconds: deque[float] = deque(maxlen=_STEPS_IN_RATE)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=total, completed=completed, figures="")

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def count(self, seconds: float) -> None:
        """Take one iteration's time into the rate."""
        self._seconds.append(seconds)

    def show(self, iteration: int, loss: float, grad_norm: float, other_loss: float | None = None) -> None:
        """Show the figures of an iteration; at least one must have been counted.

        Args:
            other_loss: of another run in the same iteration, to be seen beside this one's.
        """
        mean = sum(self._seconds) / len(self._seconds)
        beside = "" if other_loss is None else f" (there {other_loss:.4f})"
        left = _clock(mean * (self._total - iteration))
        figures = f"loss {loss:.4f}{beside}  {self._tokens / mean:,.0f} tokens/s  left {left}"
        self._bar.update(self._task, completed=iteration, figures=figures)
        if not self._console.is_terminal:
            width = len(str(self._total))
            self._console.print(
                f"iteration {iteration:{width}}/{self._total}  {figures}  grad norm {grad_norm:.3f}",
                highlight=False,
                soft_wrap=True,
            )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
