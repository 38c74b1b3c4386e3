"""Every command and every Python snippet of README and docs: it is run, or it is said why not and what tests it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from megatron_moe_opt.cli.bench.saved_report import write_report
from megatron_moe_opt.cli.main import app, main
from megatron_moe_opt.options import split_options
from megatron_moe_opt.planning.costs.described_cluster import describe
from megatron_moe_opt.planning.costs.known_clusters import KNOWN_CLUSTERS
from megatron_moe_opt.planning.traces.routing_generator import TABLE5, like_table5
from megatron_moe_opt.planning.traces.routing_trace import write_routing_trace
from megatron_moe_opt.topology.layouts import Layout
from tests.ranks.job import Job
from tests.unit.report_cases import made_report

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*.md")})
PAGES = [page for page in PAGES if page.parent.name != "benchmarks"]  # those show what was run on their day
LANGUAGES = {"bash", "python", "text", "json", "diff"}
MOE_OPT = "megatron_moe_opt.cli.main"
LAUNCH = "megatron_moe_opt.launch"
MEASURED = {
    "docs/planning.md": Layout(world=32, tp=4, ep=8, expert_tp=4),
    "recipes/README.md": Layout(world=32, tp=2, ep=8),
}
"""The groups of the cluster.json that a page has measured before it plans with it."""

SEARCH = "moe-opt plan --cluster h100-ib400 --model qwen3-30b-a3b-like --world 64 -o plan.json"


@dataclass(frozen=True)
class Elsewhere:
    """Commands that are not run here."""

    begins: str
    why: str
    tests: str
    """What runs them, or their like at a size that fits a test."""


ELSEWHERE = (
    Elsewhere("bash recipes/quickstart.sh", "installs and trains for minutes", "tests/system/test_quickstart.py"),
    Elsewhere("bash recipes/train_and_compare.sh", "trains for minutes", "tests/system/test_quickstart.py"),
    Elsewhere("python recipes/pretrain_moe_gpt.py", "trains on several ranks", "tests/system/test_recipe_jobs.py"),
    Elsewhere("python recipes/loss_budget.py", "trains several times", "tests/unit/recipes/test_loss_budget.py"),
    Elsewhere("bash tools/test.sh", "runs this test", "tools/test.sh"),
    Elsewhere("python -m pytest", "is a part of the test command", "tools/test.sh"),
    Elsewhere("bash tools/check_cuda_compiles.sh", "is a part of the test command", "tools/test.sh"),
    Elsewhere("bash tools/wheels.sh", "compiles", "tests/system/test_package.py"),
    Elsewhere("pip install", "installs into the environment that runs this", "tests/system/test_package.py"),
    Elsewhere("bash recipes/slurm/submit.sh", "queues a job", "tests/slurm/test_jobs.py"),
    Elsewhere("python recipes/slurm/check_recipe.py", "asks for a checkout", "tests/unit/recipes/test_recipes.py"),
    Elsewhere("$PYTHON recipes/slurm/check_recipe.py", "asks for a checkout", "tests/unit/recipes/test_recipes.py"),
    Elsewhere(SEARCH, "searches layouts for seconds", "tests/unit/cli/test_plan_command.py"),
    Elsewhere("bash tools/gpu_check.sh", "needs GPUs", "tests/unit/tools/gpu/test_node.py"),
    Elsewhere("python -m tools.gpu.training", "needs a checkout, and GPUs", "tests/unit/tools/gpu/test_training.py"),
    Elsewhere("python tools/netbox.py", "needs root and shaped links", "tests/system/test_netbox.py"),
    Elsewhere("sudo python tools/netbox.py", "needs root and shaped links", "tests/system/test_netbox.py"),
    Elsewhere(
        "python -m tools.megatron_checks.feature_matrix",
        "needs a checkout, and hours",
        "tests/unit/tools/megatron_checks/test_feature_matrix.py",
    ),
    Elsewhere(
        "python -m tools.megatron_checks.names", "needs a checkout", "tests/unit/tools/megatron_checks/test_guards.py"
    ),
    Elsewhere(
        "python -m tools.predictions.data_centres",
        "takes minutes at the page's sizes",
        "tests/unit/tools/predictions/test_data_centres.py",
    ),
    Elsewhere("python -m tools.papers", "is asserted line by line there", "tests/papers/test_published_numbers.py"),
    Elsewhere("python -m tools.bench.kernels", "times kernels", "tests/unit/cli/test_cli.py"),
    Elsewhere("torchrun -m tools.bench.choice", "times several ranks", "tests/multirank/test_choice.py"),
    Elsewhere("torchrun -m tools.bench.memory_reuse", "measures several ranks", "tests/multirank/test_mpmoe_memory.py"),
    Elsewhere("torchrun -m tools.bench.telemetry_overhead", "times several ranks", "tests/multirank/test_telemetry.py"),
    Elsewhere(f"torchrun -m {MOE_OPT} bench", "runs on several ranks", "tests/multirank/test_bench_layer.py"),
    Elsewhere(f"torchrun -m {MOE_OPT} profile", "measures several ranks", "tests/multirank/test_profile.py"),
    Elsewhere(f"torchrun -m {MOE_OPT} timeline", "runs on several ranks", "tests/multirank/test_timeline.py"),
    Elsewhere(f"torchrun -m {MOE_OPT} trace record", "trains", "tests/system/test_quickstart.py"),
    Elsewhere(f"torchrun -m {LAUNCH}", "trains a checkout of Megatron-LM", "tests/system/test_megatron_lm.py"),
    Elsewhere(f"python -m {LAUNCH}", "trains a checkout of Megatron-LM", "tests/system/test_megatron_lm.py"),
    Elsewhere("--moe-token-dispatcher-type", "ends the command of a training", "tests/system/test_megatron_lm.py"),
    Elsewhere("source", "is a site's own", "tests/unit/recipes/test_recipes.py"),
    Elsewhere("module", "is a site's own", "tests/unit/recipes/test_recipes.py"),
    Elsewhere("export", "is a site's own", "tests/unit/recipes/test_recipes.py"),
)
NEEDS_BRIDGE = "qwen3_30b_a3b_pretrain_config"
"""A recipe of Megatron-Bridge, which is not installed here; `register` is called alike in
tests/unit/integration/test_registry.py.
"""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the text of each block of a page."""
    yield from re.findall(r"^```(\S*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _commands() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The words of each command, without variables before it; lines that a backslash goes on with are one."""
    for page in PAGES:
        for language, block in _blocks(page):
            lines = block.replace("\\\n", " ").splitlines() if language == "bash" else ()
            for line in lines:
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words = words[1:]
                if words:
                    yield page, tuple(words)


def _snippets() -> list[tuple[Path, str]]:
    return [(page, block) for page in PAGES for language, block in _blocks(page) if language == "python"]


def _elsewhere(words: tuple[str, ...]) -> Elsewhere | None:
    """What says where a command is tested. What torchrun itself is told is left out, and what a page leaves out."""
    kept = [word for word in words if word != "..."]
    if kept[:1] == ["torchrun"]:
        while kept[1] != "-m" and not kept[1].endswith(".py"):
            del kept[1]
    text = " ".join(kept) + " "
    return next((one for one in ELSEWHERE if text.startswith(one.begins + " ")), None)


COMMANDS = {words: page for page, words in _commands()}
RUN = [(page, words) for words, page in COMMANDS.items() if words[0] == "moe-opt" and " ".join(words) != SEARCH]
NOT_RUN = [(page, words) for words, page in COMMANDS.items() if (page, words) not in RUN]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_blocks_say_what_they_are(page: Path) -> None:
    """Or their commands would be found by nobody."""
    assert {language for language, _ in _blocks(page)} <= LANGUAGES
    assert len(re.findall("^```", page.read_text(), re.MULTILINE)) == 2 * len(list(_blocks(page)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run: with a routing trace, as a training has recorded it, and a layer that was measured."""
    made = tmp_path_factory.mktemp("pages")
    (made / "docs/images").mkdir(parents=True)
    write_routing_trace(
        made / "routing.npz", like_table5(TABLE5["MoE-GPT-S"][2], passes=4, layers=3, seed=0, tokens=64)
    )
    write_report(made / "layer.json", made_report())
    return made


@pytest.mark.parametrize(("page", "words"), RUN, ids=lambda one: _name(one) if isinstance(one, Path) else " ".join(one))
def test_command(monkeypatch, capsys, folder: Path, page: Path, words: tuple[str, ...]) -> None:
    monkeypatch.chdir(folder)
    layout = MEASURED.get(_name(page))
    if layout is not None:
        describe(KNOWN_CLUSTERS["h100-ib400"], layout, 4096, 14336 // layout.expert_tp, "bf16").save("cluster.json")
    monkeypatch.setattr(sys, "argv", [word.replace("/shared/", "") for word in words])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert end.value.code == 0, printed.err + printed.out
    for option in ("-o", "--output", "--lanes"):
        for file in (words[at + 1] for at, word in enumerate(words) if word == option):
            assert (folder / file.replace("/shared/", "")).stat().st_size, file


@pytest.mark.parametrize(
    ("page", "words"), NOT_RUN, ids=lambda one: _name(one) if isinstance(one, Path) else " ".join(one)
)
def test_command_that_is_tested_elsewhere(page: Path, words: tuple[str, ...]) -> None:
    """It names files that there are, and options that our parsers take."""
    one = _elsewhere(words)
    assert one is not None, f"{_name(page)}: {' '.join(words)} is neither run here nor tested elsewhere"
    for word in words:
        if re.match(r"(recipes|tools|tests)/", word):
            assert (ROOT / word).exists(), word
    kept = [word for word in words if word != "..."]
    if MOE_OPT in kept:
        _parse(app, kept[kept.index(MOE_OPT) + 1 :])
    elif LAUNCH in kept or "--moe-token-dispatcher-type" in kept:
        _, others = split_options([word for word in kept if not word.startswith("$")])
        assert not [word for word in others if word.startswith("--moe-opt")]
    for module in (word for word in kept if re.fullmatch(r"tools(\.\w+)+", word)):
        assert find_spec(module) is not None, module
        if module.startswith("tools.bench.") and hasattr(tool := import_module(module), "app"):
            _parse(tool.app, kept[kept.index(module) + 1 :])


def _parse(commands: typer.Typer, words: list[str]) -> None:
    """Has a command line read, with the values of its options; fails as the command would."""
    command = typer.main.get_command(commands)
    context = command.make_context("moe-opt", words)
    while hasattr(command, "commands"):
        _, command, words = command.resolve_command(context, context._protected_args + context.args)
        context = command.make_context("moe-opt", words, parent=context)


def test_what_is_tested_elsewhere_is_there() -> None:
    used = {_elsewhere(words) for _, words in NOT_RUN}
    for one in ELSEWHERE:
        assert one in used, f"no page has {one.begins}: {one.why}"
        assert (ROOT / one.tests).exists(), one.tests


@pytest.mark.parametrize(
    ("page", "snippet"),
    [(page, text) for page, text in _snippets() if NEEDS_BRIDGE not in text],
    ids=lambda one: _name(one) if isinstance(one, Path) else "",
)
def test_snippet(monkeypatch, capsys, folder: Path, tmp_path: Path, page: Path, snippet: str) -> None:
    """It runs; and where the comment behind a line that prints begins with a number, that is what it prints."""
    monkeypatch.chdir(folder)
    if "register()" in snippet:  # for the whole process: in one of its own
        (file := tmp_path / "snippet.py").write_text(snippet)
        job = Job([file], tmp_path / "output.txt")
        assert job.wait() == 0, job.output.read_text()
        return
    exec(compile(snippet, str(page), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    said = re.findall(r"^print\(.*\)  # (.*)", snippet, re.MULTILINE)
    for line, text in zip(printed, said, strict=True):
        number = re.match(r"[\d.]+ ", text)
        assert number is None or line.startswith(number[0]), f"{page.name} says {text}; it prints {line}"
