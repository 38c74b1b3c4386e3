"""README and docs: links that lead somewhere, and commands and options that there are."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer

from megatron_moe_opt.cli.main import app
from megatron_moe_opt.options import options_help

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*.md")])
OLD = {"--moe-opt-tuner"}
"""Options that pages mention as gone."""


def _anchors(page):
    """What headings are called in addresses."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(linked), f"{page.name}: {target}"


def _commands(page):
    """The words of each command in the blocks of a page, lines that a backslash goes on with as one."""
    for block in re.findall(r"```[a-z]*\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                yield shlex.split(line, comments=True)
            except ValueError:  # an apostrophe in what a command prints
                continue


def _options_of(words):
    """The options of a command of ours, and the words that follow its name; None for any other."""
    for start in ("moe-opt", "megatron_moe_opt.cli.main"):
        if start in words and words[:1] != ["moe-opt:"]:
            command, rest = typer.main.get_command(app), words[words.index(start) + 1 :]
            while rest and rest[0] in getattr(command, "commands", {}):
                command, rest = command.commands[rest[0]], rest[1:]
            return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}, rest
    for module in (word for word in words if re.fullmatch(r"tools\.bench_(samples|choice)", word)):
        command = typer.main.get_command(import_module(module).app)
        return {name for one in command.params for name in one.opts}, words[words.index(module) + 1 :]
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_that_pages_give_them(page):
    if page.parent.name == "benchmarks":
        return  # what was run on its day
    for words in _commands(page):
        found = _options_of(words)
        if found is not None:
            known, rest = found
            given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
            assert given <= known | {"--help"}, f"{page.name}: {' '.join(words)}"


def test_commands_are_found():
    """Or the test above could not fail."""
    (readme,) = (page for page in PAGES if page == ROOT / "README.md")
    found = [_options_of(words) for words in _commands(readme)]
    assert len([one for one in found if one is not None]) > 5
    known, rest = _options_of(["moe-opt", "trace", "replay", "routing.npz", "--nodes", "2"])
    assert "--nodes" in known and "--no-nodes" not in known and rest == ["routing.npz", "--nodes", "2"]


def test_options_of_training_are_there():
    known = set(re.findall(r"--moe-opt-[a-z-]+", options_help())) | OLD
    for page in PAGES:
        if page.parent.name != "benchmarks":
            named = set(re.findall(r"--moe-opt-[a-z-]*[a-z]", page.read_text()))
            assert named <= known, f"{page.name}: {named - known}"
