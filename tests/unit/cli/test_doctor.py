"""`moe-opt doctor`: what it finds, what it recommends, and its exit code."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatron_moe_opt.cli import doctor as doctor_module
from megatron_moe_opt.cli.doctor import examine
from megatron_moe_opt.cli.main import app


@dataclass
class ImportRaises:
    """Has the import of one module raise an error, in sys.meta_path."""

    module: str
    error: Exception

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            raise self.error


def _finding(subject):
    return next(finding for finding in examine() if finding.subject == subject)


def _doctor():
    """Exit code and text of the command."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"])
    return result.exit_code, result.output


@pytest.fixture
def megatron_version(monkeypatch):
    """Makes another version of megatron-core the one that is here; None makes it absent."""
    return lambda version: monkeypatch.setattr(doctor_module, "megatron_version", lambda: version)


def test_this_environment_can_train():
    code, text = _doctor()
    assert code == 0, text
    assert text.rstrip().endswith("Training can run.")
    assert torch.__version__ in text
    assert importlib.metadata.version("megatron-core") in text


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.15.3", False), ("0.16.0rc1", True), ("0.20.0", True), ("0.21.0", False), ("1.0", False)],
)
def test_megatron_version(megatron_version, monkeypatch, version, supported):
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "12", "0"))
    megatron_version(version)
    finding = _finding("megatron-core")
    if supported:
        assert (finding.found, finding.mend) == (f"{version} (supported)", "")
    else:
        assert finding.found == f"{version} (not supported: 0.16 to 0.20 are)"
        assert finding.mend == "pip install 'megatron-core>=0.16,<0.21'"
        assert _doctor()[0] == 1


def test_megatron_that_needs_a_newer_python(megatron_version, monkeypatch):
    """As a checkout may, which pip was not asked for."""
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "11", "9"))
    megatron_version("0.17.1")
    assert _finding("megatron-core").mend == ""
    megatron_version("0.18.2")
    finding = _finding("megatron-core")
    assert finding.found == "0.18.2 (not on this Python)" and finding.required
    assert finding.mend == "use Python 3.12 or newer, or a megatron-core before 0.18"


def test_megatron_absent(megatron_version):
    megatron_version(None)
    wanted = "pip install 'megatron-core>=0.16,<0.21', or put a checkout of Megatron-LM on PYTHONPATH"
    assert _finding("megatron-core").mend == wanted
    code, text = _doctor()
    assert code == 1 and "Training cannot run yet: mend megatron-core." in text


@pytest.mark.parametrize(
    ("version", "cuda", "environment", "told", "mend", "required"),
    [
        ("2.5.1", "12.4", {}, "2.5.1 (CUDA 12.4)", "pip install --upgrade 'torch>=2.6,<2.15'", True),
        ("2.6.0", "12.4", {}, "2.6.0 (CUDA 12.4)", "", False),
        ("2.14.1+cpu", None, {}, "2.14.1+cpu (CPU only)", "", False),
        ("2.15.0", "13.2", {}, "2.15.0 (CUDA 13.2), newer than 2.14", "export TORCH_DIST_USE_NCCL2=0", False),
        ("2.15.0", "13.2", {"TORCH_DIST_USE_NCCL2": "0"}, "2.15.0 (CUDA 13.2), newer than 2.14", "", False),
        ("2.15.0+cpu", None, {}, "2.15.0+cpu (CPU only), newer than 2.14", "", False),
        ("3.0.0", "13.2", {}, "3.0.0 (CUDA 13.2), newer than 2.14", "export TORCH_DIST_USE_NCCL2=0", False),
    ],
)
def test_pytorch_version(monkeypatch, version, cuda, environment, told, mend, required):
    """A newer one trains, but on GPUs by a class behind NCCL that has not run with this package."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    finding = _finding("PyTorch")
    assert (finding.found, finding.mend.startswith(mend), bool(finding.mend)) == (told, True, bool(mend))
    assert finding.required == required


def test_readme_and_the_extra_ask_for_the_same_pytorch():
    root = Path(__file__).parents[3]
    for file in ("README.md", "pyproject.toml"):
        asked = re.findall(r"""["'](torch[<>=][^"']*)["']""", (root / file).read_text())
        assert asked == [doctor_module.WANTED_TORCH], file


def test_pytorch_that_does_not_load(monkeypatch):
    """As where one of CUDA's libraries is missing: its import raises OSError."""
    raises = ImportRaises("torch", OSError("libcudart.so.13: cannot open shared object file"))
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [raises, *sys.meta_path])
    findings = {one.subject: one for one in (*doctor_module._torch(), *doctor_module._extension())}
    assert findings["PyTorch"].found == "libcudart.so.13: cannot open shared object file"
    assert findings["PyTorch"].mend.startswith("pip install") and list(findings) == ["PyTorch"]


def test_extension_missing(monkeypatch):
    def missing():
        raise ImportError("The compiled extension is missing: build it with `pip install -e .`.")

    monkeypatch.setattr("megatron_moe_opt.extension.build_info", missing)
    finding = _finding("extension")
    assert finding.found == "The compiled extension is missing"
    assert finding.mend == "build it with `pip install -e .`."
    assert _doctor()[0] == 1


def test_extension_without_cuda_on_a_gpu(monkeypatch):
    built = {"version": "0.1.0", "backend": "cpu", "cuda_archs": ""}
    monkeypatch.setattr("megatron_moe_opt.extension.build_info", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU X")
    assert _finding("devices").found == "2 x GPU X"
    finding = _finding("extension")
    assert finding.found == "version 0.1.0, backend cpu (no CUDA kernels)"
    assert "nvcc on PATH" in finding.mend and finding.required


@pytest.mark.parametrize(
    ("archs", "capabilities", "without"),
    [
        ("80,90,100", [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0)], None),
        ("80,90,100", [(9, 0), (7, 5), (7, 0)], "70;75"),
        ("90a", [(8, 0)], "80"),
        ("89,90", [(8, 6), (8, 9)], "86"),
    ],
)
def test_an_extension_for_other_gpus(monkeypatch, archs, capabilities, without):
    built = {"backend": "cuda", "cuda_archs": archs}
    monkeypatch.setattr("megatron_moe_opt.extension.build_info", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    (finding,) = doctor_module._extension()
    assert bool(finding.mend) == (without is not None)
    if without is not None:
        assert f"(no kernels for GPUs that are here: sm_{without})" in finding.found and finding.required
        assert finding.mend.startswith(f"MOE_OPT_CUDA_ARCHS='{without}' MOE_OPT_CUDA=ON pip install")


def test_extension_without_cuda_beside_a_pytorch_for_cuda(monkeypatch):
    """As on a login node: the kernels are missing where jobs run, and nothing here tells."""
    built = {"version": "0.1.0", "backend": "cpu", "cuda_archs": ""}
    monkeypatch.setattr("megatron_moe_opt.extension.build_info", lambda: built)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    finding = _finding("extension")
    assert finding.found == "version 0.1.0, backend cpu (no CUDA kernels)"
    assert finding.mend.startswith("for GPUs: MOE_OPT_CUDA=ON pip install") and not finding.required


def test_gpu_that_pytorch_cannot_use(monkeypatch, tmp_path):
    """With which the launcher refuses to train, unless it is switched off."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("megatron_moe_opt.gpu_settings.A_GPU", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = _finding("devices")
    assert finding.found == "a GPU is here, and PyTorch cannot use it" and "CUDA build of PyTorch" in finding.mend
    code, text = _doctor()
    assert code == 1 and "Training cannot run yet: mend devices." in text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "runs on the CPU" in _finding("devices").found and _finding("devices").mend == ""


def test_a_library_that_cannot_be_imported(monkeypatch, tmp_path):
    """As Transformer Engine where its CUDA is not: Megatron, which tries, does not begin then."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    finding = _finding("Transformer Engine")
    assert finding.found.endswith("cannot be imported: OSError: libcudart.so.13: cannot open shared object file")
    assert finding.mend and finding.required and _doctor()[0] == 1
    # It keeps to itself that its part for PyTorch, which Megatron imports then, is of another PyTorch.
    (package / "__init__.py").write_text("try:\n    from . import pytorch\nexcept ImportError:\n    pass\n")
    (package / "pytorch.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    finding = _finding("Transformer Engine")
    assert finding.found.endswith("cannot be imported: ImportError: undefined symbol: _ZN3c10") and finding.required
    (package / "pytorch.py").write_text("")
    assert _finding("Transformer Engine").mend == ""


def test_a_library_that_needs_the_driver_of_a_gpu(monkeypatch, tmp_path):
    """As Transformer Engine with NCCL EP, which a login node has no driver for."""
    (tmp_path / "transformer_engine").mkdir()
    error = "raise OSError('libcuda.so.1: cannot open shared object file')"
    (tmp_path / "transformer_engine/__init__.py").write_text(error)
    monkeypatch.syspath_prepend(tmp_path)
    for gpu, required in ((tmp_path / "none", False), (tmp_path, True)):
        monkeypatch.setattr(doctor_module, "A_GPU", gpu)
        finding = _finding("Transformer Engine")
        assert finding.found.endswith("cannot be imported: OSError: libcuda.so.1: cannot open shared object file")
        assert finding.mend and finding.required == required
