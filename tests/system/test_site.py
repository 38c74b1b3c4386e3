"""The documentation site is built without a warning, and its notebook runs where there is no PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """Links and their anchors lead somewhere, all pages have a place, and the API reference finds what it names."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "reference/index.html").read_text()
    assert 'id="megatron_moe_opt.register"' in reference and "before the TransformerConfig is built" in reference
    readme = (tmp_path / "index.html").read_text()
    assert 'href="choosing/"' in readme and 'href="security/"' in readme


def test_the_notebook(monkeypatch) -> None:
    """Three pictures, and what it says is predicted. It is kept without outputs, so that changes can be read."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs/notebooks/routing.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import sys; sys.modules['torch'] = None"))
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    said = "".join(output.get("text", "") for output in outputs)
    assert "fewer rows between nodes" in said and "times as fast as stock, predicted" in said
