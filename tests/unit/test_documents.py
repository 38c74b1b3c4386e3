"""README and docs: links that lead somewhere, and options of training that there are (test_pages.py: commands)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def test_options_of_training_are_there():
    known = set(re.findall(r"--moe-opt-[a-z-]+", options_help())) | OLD
    for page in PAGES:
        if page.parent.name != "benchmarks":
            named = set(re.findall(r"--moe-opt-[a-z-]*[a-z]", page.read_text()))
            assert named <= known, f"{page.name}: {named - known}"
