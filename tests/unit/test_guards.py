"""Every comparison of the dispatcher's name in the installed Megatron-Core is listed and answered."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron.core
import pytest

from megatron_moe_opt.integration.guards import GUARDS, Answer

ROOT = Path(megatron.core.__file__).parent.parent
NAME = "moe_token_dispatcher_type"
SEEN_THROUGH = ("", "self.", "config.", "self.config.", "layer.config.", "args.")


def comparisons() -> set[tuple[str, str]]:
    """(file, comparison) of every comparison with the dispatcher's name outside inference code."""
    found = set()
    for path in ROOT.rglob("*.py"):
        source = path.read_text(errors="ignore")
        if NAME not in source or "inference" in path.parts:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == NAME:
                holder = ast.unparse(node.left)[: -len(NAME)]
                assert holder in SEEN_THROUGH, f"{path}: {ast.unparse(node)}"
                found.add((str(path.relative_to(ROOT)), ast.unparse(node)[len(holder) :]))
    return found


def test_every_comparison_in_the_installed_megatron_is_listed():
    found = comparisons()
    assert len(found) > 8  # the scan sees Megatron at all
    assert found <= {(guard.file, guard.comparison) for guard in GUARDS}


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.file}:{guard.comparison}")
def test_the_answer_holds_for_a_name_of_ours(guard):
    """Evaluates the comparison itself, with the name that Megatron reads at that place."""
    read = "alltoall" if guard.answer is Answer.READS_ALLTOALL else "monta"
    outcome = eval(guard.comparison, {NAME: read})
    if guard.answer is Answer.REFUSED:
        # Comes out wrong for ours, so the only way there must be closed: tests/unit/test_registry.py refuses both.
        assert "CUDA graph" in guard.reason
    elif guard.answer is not Answer.KEPT:  # tests/unit/test_overlapped_batches.py
        assert outcome == eval(guard.comparison, {NAME: "alltoall"})
