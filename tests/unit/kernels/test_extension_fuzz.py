"""No call of the extension ends the process: a sample of what tools/sanitize.sh makes many more of."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.kernels import extension_fuzz


def test_random_calls_end_in_a_result_or_an_exception():
    command = [sys.executable, "-m", "tests.unit.kernels.extension_fuzz", "--calls", "2000", "--seed", "7"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, errors="replace")
    assert run.returncode == 0, f"status {run.returncode} at {run.stderr[-3000:]}"
    assert "seed 7: 2000 calls" in run.stdout


def test_what_has_no_entry_is_missed():
    class Extension:
        def known(self) -> None: ...

        class Kind:
            def method(self) -> None: ...

            def _private(self) -> None: ...

    calls = extension_fuzz.public_calls(Extension)
    assert calls == {"known", "Kind", "Kind.method"}
    assert extension_fuzz.missing(Extension) == calls
