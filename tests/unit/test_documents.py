"""README and docs: links that lead somewhere, and options of training that there are (test_pages.py: commands)."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_moe_opt.integration.checks import readers
from megatron_moe_opt.options import Options, options_help
from megatron_moe_opt.systems.system import PREFIX, flag_of

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


def test_the_reference_has_every_option_of_training_who_reads_it_and_what_it_does():
    text = (ROOT / "docs/reference.md").read_text()
    rows = re.findall(r"^\| `(--moe-opt-[a-z-]+)` \| ([^|]*) \| ([^|]*) \|", text, re.MULTILINE)
    assert rows == [
        (
            flag_of(Options, one.name),
            ", ".join(readers(one.name)) or "all",
            one.metadata["help"] % {"default": one.default},  # as argparse writes it
        )
        for one in fields(Options)
    ]


def test_the_reference_names_the_fields_that_are_not_called_as_their_options():
    text = (ROOT / "docs/reference.md").read_text()
    unlike = {
        (flag_of(Options, one.name), one.name)
        for one in fields(Options)
        if flag_of(Options, one.name) != PREFIX + one.name.replace("_", "-")
    }
    _, _, of_those = text.partition("differs: ")
    assert set(re.findall(r"`(--moe-opt-[a-z-]+)` is `(\w+)`", of_those)) == unlike


def test_options_of_training_are_there():
    known = set(re.findall(r"--moe-opt-[a-z-]+", options_help())) | OLD
    for page in PAGES:
        if page.parent.name != "benchmarks":
            named = set(re.findall(r"--moe-opt-[a-z-]*[a-z]", page.read_text()))
            assert named <= known, f"{page.name}: {named - known}"
