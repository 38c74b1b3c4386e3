"""Find how far experts may be compressed: the largest ratio whose final loss stays within a budget.

    python recipes/loss_budget.py --budget 1 --ratios 4,8,16,32 --seeds 1,2 --output runs/ratio -- ARGUMENTS

Trains by pretrain_moe_gpt.py with the ARGUMENTS, uncompressed (stock alltoall) and then by expert-migration at ratios
of --ratios, bisecting. The losses of each run are kept in --output: a search that was stopped goes on, and another
budget, further ratios or further seeds run only what is not there.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")  # files only: a machine without a display is enough

import matplotlib.pyplot as plt  # noqa: E402
from arguments import check_arguments, parse_arguments  # noqa: E402
from rich.table import Table  # noqa: E402
from step_log import read_steps  # noqa: E402

from megatron_moe_opt.cli.console import progress, report_console, say, say_written, table_of  # noqa: E402
from megatron_moe_opt.cli.option_types import whole_numbers  # noqa: E402
from megatron_moe_opt.errors import ConfigurationError  # noqa: E402
from megatron_moe_opt.options import Options, split_options  # noqa: E402
from megatron_moe_opt.output_file import check_output_folder, write_text_whole, written_whole  # noqa: E402

PROGRAM = "loss_budget"
RECIPE = Path(__file__).with_name("pretrain_moe_gpt.py")
DISPATCHER, RATIO, SEED, LOG, INTERVAL = OF_A_RUN = (
    "--moe-token-dispatcher-type", "--moe-opt-compression-ratio", "--seed", "--log-json", "--log-interval",
)  # fmt: skip
"""The flags that the search itself gives to each run."""
NOT_OF_A_SEARCH = (*OF_A_RUN, "--save", "--load", "--exit-interval")


def largest_within(excess: Mapping[float, float], budget: float) -> float | None:
    """Returns the largest ratio up to which all that were tried are within the budget; None: the smallest is not.

    Args:
        excess: of each ratio that was tried, by how many per cent its loss is above the uncompressed one.
    """
    found = None
    for ratio in sorted(excess):
        if excess[ratio] > budget:
            break
        found = ratio
    return found


def next_ratio(ladder: Sequence[float], excess: Mapping[float, float], budget: float) -> float | None:
    """Returns the ratio to try next, in the middle of those that may be the largest within; None: it is found."""
    within = largest_within(excess, budget) or 0.0
    beyond = min((ratio for ratio, over in excess.items() if over > budget), default=math.inf)
    may_be = [ratio for ratio in sorted(ladder) if within < ratio < beyond]
    return may_be[len(may_be) // 2] if may_be else None


@dataclass(frozen=True)
class Runs:
    """The runs of one proxy, uncompressed (ratio None) and at ratios; a folder has the logs of complete ones."""

    folder: Path
    stock: tuple[str, ...]
    """The arguments of pretrain_moe_gpt.py without ours."""
    options: Options
    steps: int
    ranks: int
    seeds: tuple[int, ...]
    last: int
    """Steps at the end whose mean loss is the final one."""

    def claim(self) -> None:
        """Takes the folder. Raises ConfigurationError where it has runs of another proxy."""
        check_output_folder("--output", self.folder)
        file, ours = self.folder / "proxy.json", json.dumps([self.ranks, *self.stock, *self.options.words()])
        if file.exists() and file.read_text(encoding="utf-8") != ours:
            raise ConfigurationError(
                f"--output {self.folder} has runs of other arguments or --ranks ({file}): choose another folder"
            )
        write_text_whole(file, ours)

    def losses(self, ratio: float | None, seed: int) -> list[float]:
        """Returns the loss of each step of a run."""
        return [record["loss"] for _, record in sorted(read_steps(self._log(ratio, seed)).items())]

    def final(self, ratio: float | None, seed: int) -> float:
        """Returns the mean loss of a run's last steps."""
        return _means(self.losses(ratio, seed), self.last)[-1]

    def over(self, ratio: float) -> list[float]:
        """Returns by how many per cent the final loss is above the uncompressed one, for each seed."""
        return [100 * (self.final(ratio, seed) / self.final(None, seed) - 1) for seed in self.seeds]

    def curve(self, ratio: float, seed: int) -> list[float]:
        """Returns what `over` would say of a seed after each step, from `last` on."""
        ours, stock = (_means(self.losses(one, seed), self.last) for one in (ratio, None))
        return [100 * (one / other - 1) for one, other in zip(ours, stock, strict=True)]

    def excess(self, ladder: Sequence[float]) -> dict[float, float]:
        """Returns the mean of `over` of each ratio that has run with all seeds."""
        return {
            one: fmean(self.over(one)) for one in ladder if all(self._log(one, seed).exists() for seed in self.seeds)
        }

    def train(self, ratio: float | None) -> None:
        """Runs what is not there yet, a seed after the other. Raises ConfigurationError where a run fails."""
        for seed in self.seeds:
            log = self._log(ratio, seed)
            if not log.exists():
                growing = log.with_suffix(".growing")
                growing.unlink(missing_ok=True)  # of a run that was stopped
                self._run(ratio, seed, growing)
                growing.rename(log)

    def _log(self, ratio: float | None, seed: int) -> Path:
        return self.folder / f"{'stock' if ratio is None else f'R{ratio:g}'}-seed{seed}.jsonl"

    def _run(self, ratio: float | None, seed: int, log: Path) -> None:
        dispatcher = ["alltoall"]
        if ratio is not None:
            dispatcher = ["expert-migration", *replace(self.options, compression_ratio=ratio).words()]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", RECIPE,
            *self.stock, DISPATCHER, *dispatcher, SEED, str(seed), LOG, log, INTERVAL, "1",
        ]  # fmt: skip
        printed = log.with_suffix(".txt")
        with progress(f"{_named(ratio)}, seed {seed}, steps") as tell, printed.open("wb") as output:
            job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                while job.poll() is None:
                    tell(log.read_bytes().count(b"\n") if log.exists() else 0, self.steps, "")
                    with suppress(subprocess.TimeoutExpired):
                        job.wait(0.5)
            finally:
                job.terminate()  # where the search is stopped
                job.wait()
        if job.returncode:
            lines = printed.read_text(encoding="utf-8", errors="replace").splitlines()
            said = next((line.partition("error: ")[2] for line in lines if "error: " in line), "without a reason")
            raise ConfigurationError(
                f"the run '{_named(ratio)}, seed {seed}' failed: {said} ({printed} has all that it printed). Mend the "
                "arguments behind --, or leave the ratio out; complete runs are kept"
            )


def search(runs: Runs, ladder: Sequence[float], budget: float) -> dict[float, float]:
    """Trains until the largest ratio within the budget is known. Returns the excess of all ratios that were tried."""
    runs.train(None)
    while (ratio := next_ratio(ladder, runs.excess(ladder), budget)) is not None:
        runs.train(ratio)
    return runs.excess(ladder)


def result(runs: Runs, excess: Mapping[float, float], budget: float) -> str:
    """Returns what was found, in a sentence."""
    found = largest_within(excess, budget)
    after = f"{budget:g} % of uncompressed after {runs.steps} steps (mean of the last {runs.last})"
    beyond = [f"R = {one:g} is at {_spread(runs.over(one))}" for one in sorted(excess) if one > (found or 0)][:1]
    if found is None:
        return f"No ratio of --ratios is within {after}: {beyond[0]}"
    return f"R = {found:g} is the largest within {after}: {'; '.join([_spread(runs.over(found)), *beyond])}"


def results_table(runs: Runs, excess: Mapping[float, float], budget: float) -> Table:
    """Returns a row for uncompressed and for each ratio that was tried."""
    table = table_of(
        f"Mean loss of steps {runs.steps - runs.last + 1} to {runs.steps}, and over uncompressed",
        ("R", *(f"seed {seed}" for seed in runs.seeds), "mean", f"within {budget:g} %"),
    )
    table.add_row("uncompressed", *(f"{runs.final(None, seed):.4f}" for seed in runs.seeds), "", "")
    for ratio, mean in sorted(excess.items()):
        cells = (
            f"{runs.final(ratio, seed):.4f} {over:+.2f} %"
            for seed, over in zip(runs.seeds, runs.over(ratio), strict=True)
        )
        table.add_row(f"{ratio:g}", *cells, f"{mean:+.2f} %", "yes" if mean <= budget else "no")
    return table


def draw(runs: Runs, excess: Mapping[float, float], budget: float, file: Path) -> None:
    """Draws by how much the loss of each ratio is above the uncompressed one, over the steps: means of `last` steps and
    of all seeds.
    """
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for ratio in sorted(excess):
        curves = [runs.curve(ratio, seed) for seed in runs.seeds]
        mean = [fmean(at) for at in zip(*curves, strict=True)]
        axes.plot(range(runs.last, runs.steps + 1), mean, label=_named(ratio))
    axes.axhline(budget, color="black", linestyle="--", label="budget")
    axes.set(xlabel="step", ylabel="loss over uncompressed (%)")
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _means(losses: Sequence[float], length: int) -> list[float]:
    """Returns the mean of each window of so many steps."""
    return [fmean(losses[end - length : end]) for end in range(length, len(losses) + 1)]


def _named(ratio: float | None) -> str:
    return "uncompressed" if ratio is None else f"R = {ratio:g}"


def _spread(over: Sequence[float]) -> str:
    if len(over) == 1:
        return f"{over[0]:+.2f} % (one seed)"
    return f"{fmean(over):+.2f} % ({min(over):+.2f} to {max(over):+.2f} by seed)"


def _ratios(text: str) -> list[float]:
    try:
        ladder = [float(part) for part in text.split(",")]
    except ValueError:
        ladder = []
    if not ladder or not all(1 < ratio < math.inf for ratio in ladder):
        raise ConfigurationError(f"--ratios {text}: write ratios above 1, separated by commas, such as 4,8,16,32")
    return ladder


def _runs(args: argparse.Namespace) -> Runs:
    """Raises ConfigurationError for what cannot work, before anything runs."""
    if not 0 < args.budget < math.inf:
        raise ConfigurationError(f"--budget {args.budget:g} is no budget: give per cent above 0, such as 1")
    if args.ranks < 1:
        raise ConfigurationError(f"--ranks {args.ranks} is no number of processes: give at least 1")
    given = [argument for argument in args.recipe if argument.partition("=")[0] in NOT_OF_A_SEARCH]
    if given:
        raise ConfigurationError(
            f"{given[0]} behind --: runs of a search go from the first step to the last, with seeds, ratios and logs "
            "of its own; leave it out"
        )
    parsed, options = parse_arguments(args.recipe)
    check_arguments(parsed, args.ranks)
    if not options.experts_may_travel:
        raise ConfigurationError(
            "no expert would travel, compressed or not: give --moe-opt-domain-sizes above 1 behind --"
        )
    if not 1 <= args.last <= parsed.train_iters:
        raise ConfigurationError(
            f"--last {args.last} is not from 1 to the {parsed.train_iters} steps of --train-iters: choose fewer"
        )
    _, stock = split_options(args.recipe)
    seeds = tuple(whole_numbers("--seeds", args.seeds))
    return Runs(args.output, tuple(stock), options, parsed.train_iters, args.ranks, seeds, args.last)


def main(argv: list[str] | None = None) -> int:
    """Search; the exit status is 0 where a ratio is within the budget, 1 where none is, 2 where the search could not be
    made.
    """
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, required=True, help="per cent of the uncompressed final loss")
    parser.add_argument("--ratios", required=True, help="to choose from, separated by commas")
    parser.add_argument("--seeds", default="1", help="of the runs of each ratio, separated by commas (default: 1)")
    parser.add_argument("--last", type=int, default=20, help="steps whose mean is the final loss (default: 20)")
    parser.add_argument("--ranks", type=int, default=4, help="processes of a run, on this machine (default: 4)")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the losses of all runs and loss_budget.png"
    )
    parser.add_argument("recipe", nargs="+", metavar="ARGUMENTS", help="of pretrain_moe_gpt.py, behind --")
    args = parser.parse_args(argv)
    try:
        ladder, runs = _ratios(args.ratios), _runs(args)
        runs.claim()
        excess = search(runs, ladder, args.budget)
        with written_whole(args.output / "loss_budget.png") as picture:
            draw(runs, excess, args.budget, picture)
    except ConfigurationError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    console = report_console(110)
    console.print(results_table(runs, excess, args.budget))
    say_written(args.output / "loss_budget.png", console)
    say(console, result(runs, excess, args.budget))
    return 0 if largest_within(excess, args.budget) is not None else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a run ends with its search
    sys.exit(main())
