"""recipes/loss_budget.py: which ratio is chosen, which runs that takes, and what is refused. Nothing trains here."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
sys.path.insert(0, str(RECIPES))  # a folder of scripts, not a package

import loss_budget  # noqa: E402
from arguments import check_arguments, parse_arguments  # noqa: E402
from loss_budget import largest_within, next_ratio  # noqa: E402

PROXY = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --num-experts 4 --micro-batch-size 2"
    " --lr 1e-3 --expert-model-parallel-size 4 --train-iters 6 --data-path D --moe-opt-domain-sizes 4"
)
EXCESS = st.dictionaries(st.integers(2, 100), st.floats(-2, 4), min_size=1, max_size=30)


def found_by_search(excess):
    """What is chosen where each ratio's excess becomes known when it is tried, and what was tried."""
    tried = {}
    while (ratio := next_ratio(list(excess), tried, 1.0)) is not None:
        assert ratio not in tried
        tried[ratio] = excess[ratio]
    return largest_within(tried, 1.0), tried


@given(EXCESS)
def test_the_choice_is_within_and_the_next_ratio_is_not(excess):
    """Whatever the losses, in as many tries as a bisection takes."""
    found, tried = found_by_search(excess)
    assert found is None or tried[found] <= 1.0
    above = min((ratio for ratio in excess if ratio > (found or 0)), default=None)
    assert above is None or tried[above] > 1.0
    assert len(tried) <= len(excess).bit_length()


@given(EXCESS)
def test_where_losses_grow_it_is_the_largest_of_all(excess):
    growing = dict(zip(sorted(excess), sorted(excess.values()), strict=True))
    assert found_by_search(growing)[0] == max((ratio for ratio, over in growing.items() if over <= 1.0), default=None)


def test_a_ratio_above_one_that_is_not_within_is_not_chosen():
    """Kept results of an earlier search may be so: which of the two is chance is not known."""
    assert largest_within({4: 0.5, 8: 1.2, 16: 0.9}, 1.0) == 4
    assert next_ratio([4, 6, 8, 16, 32], {4: 0.5, 8: 1.2, 16: 0.9}, 1.0) == 6
    assert largest_within({4: 1.1, 8: 0.2}, 1.0) is None


TRAINER = """#!{python}
import json, sys
words = sys.argv
value = lambda flag: float(words[words.index(flag) + 1]) if flag in words else 0.0
ratio, seed = value("--moe-opt-compression-ratio"), value("--seed")
with open({commands!r}, "a") as file:
    file.write(json.dumps(words[words.index("--num-layers"):]) + "\\n")
if ratio == 99:
    print("[default0]: pretrain_moe_gpt: error: the loss is nan in iteration 3")
    sys.exit(1)
with open(words[words.index("--log-json") + 1], "w") as file:
    for step in range(1, 7):
        loss = (8 - step + seed) * (1 + ratio / 1000 * (1.5 if seed == 2 else 0.5))
        print(json.dumps(dict(iteration=step, loss=loss)), file=file)
"""


@pytest.fixture
def search(monkeypatch, tmp_path, capsys):
    """A search whose runs log losses that are R / 10 % over uncompressed: half of it with seed 1, 1.5 with seed 2."""
    commands = tmp_path / "commands"
    commands.touch()
    (tmp_path / "python").write_text(TRAINER.format(python=sys.executable, commands=str(commands)))
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def search(*arguments, proxy=PROXY):
        """Exit status, output, errors, and the recipe's command lines so far."""
        words = [*arguments, "--output", str(tmp_path / "out"), "--last", "2", "--", *proxy]
        status = loss_budget.main([word for argument in words for word in shlex.split(argument)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err, [json.loads(line) for line in commands.read_text().splitlines()]

    return search


def test_runs_are_trained_once_and_kept(search, tmp_path):
    status, output, _, commands = search("--budget 1 --ratios 4,8,16,32 --seeds 1,2")
    assert status == 0 and (tmp_path / "out/loss_budget.png").stat().st_size > 10_000
    assert output.splitlines()[-1] == (
        "R = 8 is the largest within 1 % of uncompressed after 6 steps (mean of the last 2): +0.80 % (+0.40 to +1.20 "
        "by seed); R = 16 is at +1.60 % (+0.80 to +2.40 by seed)"
    )
    assert re.search(r"│ uncompressed │ +3.5000 │ +4.5000 │ +│ +│", output)
    assert re.search(r"│ 16 +│ 3.5280 \+0.80 % │ 4.6080 \+2.40 % │ \+1.60 % │ +no │", output)
    assert len(commands) == 2 * 3  # uncompressed, 16, 8
    for number, words in enumerate(commands):
        args, options = parse_arguments(words)
        check_arguments(args, 4)
        assert args.moe_token_dispatcher_type == ("alltoall" if number < 2 else "expert-migration")
        assert (args.seed, options.compression_ratio) == ((1, 2)[number % 2], (None, 16, 8)[number // 2])
        assert options.domain_sizes == (None if number < 2 else (4,))
    (tmp_path / "out/R8-seed2.jsonl").unlink()  # as where the search was stopped
    assert search("--budget 1 --ratios 4,8,16,32 --seeds 1,2")[1] == output
    *_, commands = search("--budget 3 --ratios 4,8,16,32 --seeds 1,2")
    assert len(commands) == 6 + 1 + 2  # R = 32
    *_, commands = search("--budget 1 --ratios 4,8,16,32")
    assert len(commands) == 9


def test_no_ratio_within(search):
    status, output, _, _ = search("--budget 0.1 --ratios 4,8")
    assert status == 1
    assert output.splitlines()[-1] == (
        "No ratio of --ratios is within 0.1 % of uncompressed after 6 steps (mean of the last 2): R = 4 is at +0.20 % "
        "(one seed)"
    )


def test_a_run_that_fails_ends_the_search(search, tmp_path):
    status, _, error, _ = search("--budget 1 --ratios 99")
    assert status == 2 and (tmp_path / "out/stock-seed1.jsonl").exists()
    assert error.splitlines()[-1] == (
        "loss_budget: error: the run 'R = 99, seed 1' failed: the loss is nan in iteration 3 "
        f"({tmp_path}/out/R99-seed1.txt has all that it printed). Mend the arguments behind --, or leave the ratio "
        "out; complete runs are kept"
    )


@pytest.mark.parametrize(
    ("arguments", "added", "sentence"),
    [
        ("--budget 0 --ratios 4", "", "--budget 0 is no budget: give per cent above 0, such as 1"),
        ("--budget nan --ratios 4", "", "--budget nan is no budget"),
        ("--budget 1 --ratios ''", "", "--ratios : write ratios above 1, separated by commas, such as 4,8,16,32"),
        ("--budget 1 --ratios 4,1", "", "--ratios 4,1: write ratios above 1"),
        ("--budget 1 --ratios 4 --seeds a", "", "--seeds a: write numbers from 1 to"),
        ("--budget 1 --ratios 4 --ranks 3", "", "needs at least 4 ranks, but 3 started"),
        ("--budget 1 --ratios 4 --ranks 0", "", "--ranks 0 is no number of processes: give at least 1"),
        ("--budget 1 --ratios 4", "--train-iters 1", "--last 2 is not from 1 to the 1 steps of --train-iters"),
        ("--budget 1 --ratios 4", "--seed=3", "--seed=3 behind --: runs of a search go from the first step to the"),
        ("--budget 1 --ratios 4", "--moe-opt-domain-sizes 1", "no expert would travel, compressed or not: give"),
        ("--budget 1 --ratios 4", "--moe-opt-nonsense 1", "--moe-opt-nonsense is not an option"),
    ],
)
def test_refuses(search, arguments, added, sentence):
    status, _, error, commands = search(arguments, proxy=[*PROXY, *added.split()])
    assert (status, commands) == (2, [])
    assert error.startswith("loss_budget: error: ") and sentence in error and error.count("\n") == 1


def test_runs_of_another_proxy_are_not_taken_for_ones_own(search, tmp_path):
    search("--budget 1 --ratios 4")
    status, _, error, commands = search("--budget 1 --ratios 4", proxy=[*PROXY, "--clip-grad", "0.5"])
    assert status == 2 and len(commands) == 2
    assert f"--output {tmp_path}/out has runs of other arguments or --ranks ({tmp_path}/out/proxy.json)" in error
