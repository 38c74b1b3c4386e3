"""Loading the extension, what it says about itself, and the memory pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types

import pytest
import torch

import megatron_moe_opt
from megatron_moe_opt import extension, kernels
from megatron_moe_opt.kernels import host_pool


def with_module(monkeypatch, module):
    """Lets the extension's import find `module`, or raise it where it is an exception."""

    def import_module(name):
        assert name == "megatron_moe_opt._C"
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(extension.importlib, "import_module", import_module)


def built_with(**changes):
    info = extension.build_info() | changes
    return types.SimpleNamespace(build_info=lambda: info)


def sentence(excinfo):
    text = str(excinfo.value)
    assert "build it with `pip install --no-build-isolation -e .` in the megatron-moe-opt checkout" in text
    assert text.endswith(", for GPUs with MOE_OPT_CUDA=ON before it.")
    assert "\n" not in text
    return text


def test_build_info():
    info = extension.build_info()
    assert info["version"] == megatron_moe_opt.__version__
    assert info["abi"] == extension.ABI
    assert info["torch"] == torch.__version__
    assert info["backend"] in ("cpu", "cuda")
    assert bool(info["cuda_archs"]) == (info["backend"] == "cuda")
    assert info["cpu_kernels"] in ("generic", "avx2", "avx512")
    assert info["compiler"]


def test_missing(monkeypatch):
    with_module(monkeypatch, ModuleNotFoundError("No module named 'megatron_moe_opt._C'"))
    with pytest.raises(ImportError) as excinfo:
        extension.load_extension()
    assert "is missing: build it" in sentence(excinfo)


def test_a_checkout_that_hides_the_installed_package_is_named(monkeypatch, tmp_path):
    # As `pip install .` leaves both: the checkout has metadata too, and `python -m` looks there first.
    for folder, metadata in (("site", "dist-info/METADATA"), ("checkout", "egg-info/PKG-INFO")):
        name = "megatron_moe_opt-0.1.0." if folder == "site" else "megatron_moe_opt."
        file = tmp_path / folder / f"{name}{metadata}"
        file.parent.mkdir(parents=True)
        file.write_text("Metadata-Version: 2.1\nName: megatron-moe-opt\nVersion: 0.1.0\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "site/megatron_moe_opt").mkdir()
    (tmp_path / "site/megatron_moe_opt/_C.abi3.so").touch()
    monkeypatch.setattr(extension, "__file__", str(tmp_path / "checkout/megatron_moe_opt/extension.py"))
    with_module(monkeypatch, ModuleNotFoundError("No module named 'megatron_moe_opt._C'"))
    with pytest.raises(ImportError) as excinfo:
        extension.load_extension()
    said = sentence(excinfo)
    assert f"from {tmp_path}/checkout/megatron_moe_opt, which hides the package" in said
    assert f"installed in {tmp_path}/site/megatron_moe_opt: leave {tmp_path}/checkout, or" in said


def test_unloadable(monkeypatch):
    with_module(monkeypatch, ImportError("libc10.so: undefined symbol: _ZN3c10\nsecond line"))
    with pytest.raises(ImportError) as excinfo:
        extension.load_extension()
    assert "(libc10.so: undefined symbol: _ZN3c10): rebuild it" in sentence(excinfo)


def test_built_for_another_torch(monkeypatch):
    with_module(monkeypatch, built_with(torch="2.6.0"))
    with pytest.raises(ImportError) as excinfo:
        extension.load_extension()
    assert f"built for PyTorch 2.6.0, but PyTorch {torch.__version__} is running" in sentence(excinfo)


@pytest.mark.parametrize("changes", [{"version": "0.0.1"}, {"abi": extension.ABI - 1}])
def test_stale(monkeypatch, changes):
    with_module(monkeypatch, built_with(**changes))
    with pytest.raises(ImportError) as excinfo:
        extension.load_extension()
    assert "is stale (built from version" in sentence(excinfo)


# ---- the pool ----


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 100, 5000, 2**20 + 1, 2**21, 3 * 2**20 + 5])
def test_blocks_are_aligned_and_reused(num_bytes):
    first = kernels.empty([num_bytes], torch.uint8)
    assert first.data_ptr() % (2**21 if num_bytes >= 2**21 else 64) == 0
    first.fill_(7)
    address = first.data_ptr()
    before = host_pool.stats()
    del first
    second = kernels.empty([num_bytes], torch.uint8)
    after = host_pool.stats()
    assert second.data_ptr() == address
    assert (after["hits"], after["misses"]) == (before["hits"] + 1, before["misses"])


def test_live_tensors_never_share_memory():
    tensors = [kernels.empty([1000], torch.float32).fill_(i) for i in range(20)]
    del tensors[::3]
    more = [kernels.empty([1000], torch.float32).fill_(-1) for _ in range(20)]
    assert all(bool((t == t[0]).all()) for t in tensors + more)
    assert len({t.data_ptr() for t in tensors + more}) == len(tensors) + len(more)


def test_a_view_keeps_the_block():
    used = host_pool.stats()["used_bytes"]
    view = kernels.empty([10, 1000])[3:5]
    assert host_pool.stats()["used_bytes"] > used
    del view
    assert host_pool.stats()["used_bytes"] == used


def test_tensors_die_on_other_threads():
    used = host_pool.stats()["used_bytes"]

    def work(seed):
        for i in range(200):
            tensor = kernels.empty([64 + (seed * 37 + i) % 500]).fill_(seed)
            assert bool((tensor == seed).all())
            mailbox.append(tensor)
            if len(mailbox) > 8:
                mailbox.pop(0)

    mailbox = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mailbox.clear()
    assert host_pool.stats()["used_bytes"] == used


CODE = """
import builtins, sys
sys.modules["megatron_moe_opt._C"] = None
import megatron_moe_opt
try:
    import megatron_moe_opt.kernels
except ImportError as error:
    print(error)
del sys.modules["megatron_moe_opt._C"]
from megatron_moe_opt import kernels
builtins.keep = [kernels.empty([n]) for n in (1, 1000, 10**6)]
builtins.cycle = [kernels.empty([5])]
builtins.cycle.append(builtins.cycle)
"""


def test_package_imports_without_the_extension_and_tensors_outlive_the_interpreter():
    """Tensors in a module's globals die after everything else; the process must still end cleanly."""
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "") and result.stdout.count("\n") == 1
    assert "build it with" in result.stdout


def test_zero_elements_and_refusals():
    assert kernels.empty([0, 5], torch.bfloat16).shape == (0, 5)
    for shape, message in (
        ([3, -1], "a size is negative: -1"),
        ([1 << 62], r"a size is above 2\^56"),
        ([1 << 70], r"a size is above 2\^56"),
        ([1 << 30, 1 << 30], r"no machine holds the shape \[1073741824, 1073741824\]"),
        ([0, 1 << 30, 1 << 30], "no machine holds the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.empty(shape)


def in_a_process(code: str, **environment: str) -> str:
    """Returns what a process of its own prints, whose pool of host memory is new."""
    begin = "from megatron_moe_opt.kernels.host_pool import empty, stats\n"
    command = [sys.executable, "-c", begin + code]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(("ranks", "cached"), [("1", 2**22), ("1000000", 0)])
def test_the_pool_keeps_less_where_a_machine_has_many_ranks(ranks, cached):
    """As Slurm says it, where torchrun does not."""
    kept = in_a_process("one = empty([2**20]); del one; print(stats()['cached_bytes'])", SLURM_NTASKS_PER_NODE=ranks)
    assert int(kept) == cached


def test_where_memory_is_out_the_pool_gives_back_what_it_keeps():
    code = """
import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 700 * 2**20, resource.RLIM_INFINITY))
for _ in range(2):
    first = empty([80 * 2**20])
    del first  # kept: 320 MiB
second = empty([120 * 2**20])  # of another size, and more than is left
print(stats()["cached_bytes"])
"""
    assert int(in_a_process(code)) == 0
