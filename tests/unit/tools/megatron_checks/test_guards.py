"""Every comparison of the dispatcher's name in the installed Megatron-Core is listed and answered."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron.core
import pytest

from tools.megatron_checks.guards import GUARDS, Answer
from tools.megatron_checks.names import DISPATCHER, comparisons, has, names_used

ROOT = Path(megatron.core.__file__).parent.parent
SEEN_THROUGH = ("", "self.", "config.", "self.config.", "layer.config.", "args.")


def test_every_comparison_in_the_installed_megatron_is_listed():
    found = set(comparisons(ROOT))
    assert len(found) > 8  # the scan sees Megatron at all
    assert {holder for *_, holder in found} <= set(SEEN_THROUGH)
    assert {(file, comparison) for file, comparison, _ in found} <= {(one.file, one.comparison) for one in GUARDS}


PLANTED = {
    "megatron/core/here.py": "from megatron.core.base import Base\nvalue = 1\n"
    "class Class(Base):\n    def own(self): ...\n",
    "megatron/core/base.py": "try:\n    import absent\nexcept ImportError:\n    absent = None\n"
    "class Base:\n    def inherited(self): ...\n",
}


def test_names_that_a_checkout_lacks_are_seen(tmp_path):
    for name, text in PLANTED.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    source = """
from megatron.core import base, here
from megatron.core.here import Class as Other, gone
Other.own, Other.inherited, Other.lost, Other.__init__, base.absent, here.value, here.moved, here.value.is_unknown
replace(importlib.import_module("megatron.core.base"), "renamed", adapt)
when_imported("megatron.core.removed", adapt)
"""
    names = names_used(ast.parse(source))
    here = "megatron.core.here"
    assert {".".join(name) for name in names if not has(tmp_path, name)} == {
        f"{here}.gone", f"{here}.Class.lost", f"{here}.moved", "megatron.core.base.renamed",
        "megatron.core.removed",
    }  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.file}:{guard.comparison}")
def test_the_answer_holds_for_a_name_of_ours(guard):
    """Evaluates the comparison itself, with the name that Megatron reads at that place."""
    read = "alltoall" if guard.answer is Answer.READS_ALLTOALL else "monta"
    outcome = eval(guard.comparison, {DISPATCHER: read})
    if guard.answer is Answer.REFUSED:
        # Comes out wrong for ours, so the only way there must be closed: tests/unit/integration/test_registry.py has
        # both refused.
        assert "CUDA graph" in guard.reason
    elif guard.answer is not Answer.KEPT:  # tests/unit/integration/test_overlapped_batches.py
        assert outcome == eval(guard.comparison, {DISPATCHER: "alltoall"})
