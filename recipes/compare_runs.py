"""Compare two runs of pretrain_moe_gpt.py by their step logs: losses, and what was sent.

    python recipes/compare_runs.py --run monta runs/monta.jsonl --baseline alltoall runs/alltoall.jsonl --output runs

Prints the closing table, writes it as Markdown beside a plot of the losses, and exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: a machine without a display is enough

import matplotlib.pyplot as plt  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from step_log import read_steps  # noqa: E402

from megatron_moe_opt.errors import ConfigurationError  # noqa: E402
from megatron_moe_opt.output_file import check_output_folder, write_text_whole, written_whole  # noqa: E402

MAX_LOSS_DIFFERENCE = 1e-6
MIN_LOSS_FALL = 0.25

Row = tuple[str, ...]


@dataclass(frozen=True)
class Bar:
    """A promise and whether this comparison keeps it."""

    text: str
    met: bool


class Run:
    """The step log of one run.

    Raises ConfigurationError where the file is not a step log or holds too few steps to say anything.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.steps = read_steps(path)
        if not self.steps:
            raise ConfigurationError(f"{path} holds no training step; give the --log-json of a run")

    @property
    def losses(self) -> dict[int, float]:
        """Loss by iteration."""
        return {iteration: record["loss"] for iteration, record in self.steps.items()}

    @property
    def traffic(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What the counted step sent, by collective and link."""
        rows = next((record["traffic"] for record in self.steps.values() if "traffic" in record), [])
        return {(row["collective"], row["link"]): row for row in rows}


def max_relative_difference(a: dict[int, float], b: dict[int, float]) -> float:
    """Largest |a - b| / |b| over the iterations of both.

    Raises ConfigurationError where they have no iteration in common.
    """
    common = a.keys() & b.keys()
    if not common:
        raise ConfigurationError("the two step logs have no iteration in common; run the same steps with both")
    return max(abs(a[i] - b[i]) / abs(b[i]) for i in common)


def loss_rows(run: Run, baseline: Run) -> list[Row]:
    """First and last loss of both, side by side."""
    a, b = run.losses, baseline.losses
    first, last = min(a), max(a)
    return [
        (
            f"loss, iteration {iteration}",
            *(f"{losses[iteration]:.7f}" if iteration in losses else "-" for losses in (a, b)),
        )
        for iteration in (first, last)
    ]


def traffic_rows(run: Run, baseline: Run) -> list[Row]:
    """Messages and bytes of the counted step by collective and link, over all ranks."""
    rows: list[Row] = []
    for key in sorted(run.traffic.keys() | baseline.traffic.keys()):
        cells = []
        for traffic in (run.traffic, baseline.traffic):
            row = traffic.get(key)
            cells.append(f"{row['messages']:,} messages, {row['bytes'] / 1e6:.2f} MB" if row else "-")
        rows.append((f"{key[0]}, {key[1]}", *cells))
    return rows


def bars(run: Run, baseline: Run, resumed: Run | None) -> list[Bar]:
    """The promises: equal losses, falling loss, and a resumed run equal to an uninterrupted one."""
    difference = max_relative_difference(run.losses, baseline.losses)
    first, last = run.losses[min(run.losses)], run.losses[max(run.losses)]
    fall = 1 - last / first
    result = [
        Bar(
            f"losses of {run.name} and {baseline.name} differ by at most {MAX_LOSS_DIFFERENCE:g} relative at every"
            f" logged step: {difference:.1e}",
            difference <= MAX_LOSS_DIFFERENCE and run.losses.keys() == baseline.losses.keys(),
        ),
        Bar(f"the loss falls by at least {MIN_LOSS_FALL:.0%}: {fall:.1%}", fall >= MIN_LOSS_FALL),
    ]
    if resumed is not None:
        steps = len(resumed.losses)
        difference = max_relative_difference(resumed.losses, run.losses)
        result.append(
            Bar(
                f"{steps} steps resumed from a checkpoint have the same losses, bit for bit: {difference:.1e}",
                difference == 0,
            )
        )
    return result


def print_table(console: Console, header: Row, rows: list[Row], verdicts: list[Bar]) -> None:
    """The closing table on a terminal or in a file."""
    table = Table(title="Closing table", title_justify="left")
    for column, justify in zip(header, ("left", "right", "right"), strict=True):
        table.add_column(column, justify=justify)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for bar in verdicts:
        console.print(f"[green]met[/]     {bar.text}" if bar.met else f"[red]MISSED[/]  {bar.text}", highlight=False)


def markdown(header: Row, rows: list[Row], verdicts: list[Bar]) -> str:
    """The same table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, ("---", "---:", "---:"), *rows)]
    lines += [""] + [f"- {'met' if bar.met else '**missed**'}: {bar.text}" for bar in verdicts]
    return "\n".join(lines) + "\n"


def plot_losses(run: Run, baseline: Run, path: Path) -> None:
    """Draw both losses over the iterations; the baseline as a wide band under the other, so that both show."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for each, style in ((baseline, {"linewidth": 5, "alpha": 0.4}), (run, {"linewidth": 1.2})):
        iterations = sorted(each.losses)
        axes.plot(iterations, [each.losses[i] for i in iterations], label=each.name, **style)
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Compare; the exit status is 0 where every bar is met, 1 where one is missed, 2 where a log cannot
    be read or a file not be written.
    """
    parser = argparse.ArgumentParser(prog="compare_runs", description=__doc__.splitlines()[0])
    for flag, text in (("--run", "our run"), ("--baseline", "the run to compare it with")):
        parser.add_argument(flag, nargs=2, required=True, metavar=("NAME", "LOG"), help=text)
    parser.add_argument("--resumed", metavar="LOG", help="steps of our run again, from a checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="folder for closing_table.md and loss.png")
    args = parser.parse_args(argv)
    try:
        run, baseline = Run(args.run[0], Path(args.run[1])), Run(args.baseline[0], Path(args.baseline[1]))
        resumed = Run("resumed", Path(args.resumed)) if args.resumed else None
        verdicts = bars(run, baseline, resumed)
        header = ("", run.name, baseline.name)
        rows = loss_rows(run, baseline) + traffic_rows(run, baseline)
        print_table(Console(width=None if sys.stdout.isatty() else 110), header, rows, verdicts)
        check_output_folder("--output", args.output)
        write_text_whole(args.output / "closing_table.md", markdown(header, rows, verdicts))
        with written_whole(args.output / "loss.png") as picture:
            plot_losses(run, baseline, picture)
    except ConfigurationError as error:
        print(f"compare_runs: error: {error}", file=sys.stderr)
        return 2
    print(f"written: {args.output / 'closing_table.md'}, {args.output / 'loss.png'}")
    return 0 if all(bar.met for bar in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
