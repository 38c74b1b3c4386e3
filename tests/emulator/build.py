"""Builds the extension for the emulator: csrc as for CUDA, its kernels translated for the host's compiler.

Needs g++ (CXX chooses another) and PyTorch. Objects are kept under build/emulator by what they are made of.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.emulator.translate import translate

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
OUT = ROOT / "build" / "emulator"
KERNELS = sorted((ROOT / "csrc" / "kernels").glob("*.cu"))
WITHOUT_TORCH = ("kernels", "assignment", "planning")  # folders of csrc

CXX = [os.environ.get("CXX", "g++")]
COMMON = ["-std=c++20", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", f"-I{HERE / 'include'}", f"-I{HERE}"]
COMMON += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'kernels'}"]
# The accesses of kernels call what emulator.cpp gives; GCC's own library of the sanitizer is not linked.
SEEN = ["-O1", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-threadsafe-statics"]
SEEN += ["-fno-omit-frame-pointer"]


def _package(name: str, pattern: str) -> str:
    return re.search(pattern, (ROOT / "megatron_moe_opt" / name).read_text(), re.M)[1]


def _torch_flags() -> list[str]:
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = [f"-isystem{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]]
    defines = {
        "TORCH_EXTENSION_NAME": "_C",
        "_GLIBCXX_USE_CXX11_ABI": abi,
        "MOE_OPT_CUDA": 1,
        "MOE_OPT_VERSION": f'"{_package("__init__.py", r"__version__ = .([^ ]+).$")}"',
        "MOE_OPT_ABI": _package("extension.py", r"^ABI = (\d+)"),
        "MOE_OPT_TORCH_VERSION": f'"{torch.__version__}"',
        "MOE_OPT_COMPILER": '"emulator"',
        "MOE_OPT_CUDA_ARCHS": '""',
    }
    return flags + [f"-D{name}={value}" for name, value in defines.items()] + ["-O0", "-fopenmp"]


def _contents(paths: Iterable[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(paths))


def _headers() -> str:
    found = [*ROOT.glob("csrc/**/*.h"), *HERE.glob("**/*.h")]
    return hashlib.sha256(_contents(found)).hexdigest()


def _compile(source: Path, flags: list[str], headers: str) -> Path:
    command = [*CXX, *COMMON, *flags]
    name = hashlib.sha256(f"{command} {headers}".encode() + source.read_bytes()).hexdigest()[:24]
    made = OUT / "objects" / f"{source.name}-{name}.o"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        partial = made.with_suffix(f".{os.getpid()}.o")
        ccache = shutil.which("ccache")
        run = [*([ccache] if ccache else []), *command, "-c", str(source), "-o", str(partial)]
        done = subprocess.run(run, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{source} does not compile for the emulator:\n{done.stderr[:8000]}")
        partial.rename(made)
    return made


def _joined(sources: list[Path], folder: Path, jobs: int) -> list[Path]:
    """Returns sources, one or two, that include all of these: PyTorch's headers are then read once a job and not for
    each.
    """
    made, parts = [], min(jobs, 2)
    for part in range(parts):
        includes = [f'#include "{source}"  // {_digest(source)}\n' for source in sources[part::parts]]
        made.append(folder / f"with_torch_{part}_of_{parts}.cpp")
        made[-1].write_text("".join(includes))
    return made


def _libraries() -> list[Path]:
    """Returns the libraries of WITHOUT_TORCH that the build of the package has made; none where a source is newer."""
    folder = ROOT / "build" / f"cmake-{sysconfig.get_config_var('SOABI')}"
    libraries = [folder / f"libmoe_opt_{name}.a" for name in WITHOUT_TORCH]
    sources = [file for name in WITHOUT_TORCH for file in (ROOT / "csrc" / name).glob("*.[ch]*")]
    newest = max(file.stat().st_mtime for file in sources if file.suffix in (".cpp", ".h"))
    return libraries if all(one.exists() and one.stat().st_mtime > newest for one in libraries) else []


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def build(replaced: Mapping[str, str] | None = None, target: Path = OUT / "plain") -> Path:
    """The extension's module.

    Args:
        replaced: text that stands for files of csrc/kernels, by their names: a mutant.
        target: the folder to put it into.
    """
    replaced, num_jobs = replaced or {}, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    translated = target / "kernels"
    translated.mkdir(parents=True, exist_ok=True)
    folder = ROOT / "csrc" / "kernels"
    for name, text in replaced.items():
        (translated / f"given-{name}").write_text(text)
    jobs: list[tuple[Path, list[str]]] = []
    for source in [*KERNELS, HERE / "faults.cu"]:
        given = translated / f"given-{source.name}" if source.name in replaced else source
        made = translated / f"{source.stem}.cu.cpp"
        text = translate(given.read_text(), str(source.relative_to(ROOT)))
        if not made.exists() or made.read_text() != text:
            made.write_text(text)
        jobs.append((made, SEEN))
    shared = ""
    for header in sorted(folder.glob("*.cuh")):
        text = translate(replaced.get(header.name, header.read_text()), f"csrc/kernels/{header.name}")
        (translated / header.name).write_text(text)
        shared += text
    torch_flags = _torch_flags()
    plain = [source for folder in WITHOUT_TORCH for source in (ROOT / "csrc" / folder).glob("*.cpp")]
    with_torch = sorted({HERE / "device.cpp", HERE / "process_group.cpp", *(ROOT / "csrc").glob("**/*.cpp")} - {*plain})
    jobs += [(source, torch_flags) for source in _joined(with_torch, target, num_jobs)]
    jobs += [(HERE / name, ["-O3", "-march=native"]) for name in ("emulator.cpp", "counting.cpp")]
    made_before = _libraries()
    jobs += [(source, ["-O1", "-DMOE_OPT_ISA=generic"]) for source in plain if not made_before]
    headers, given = _headers(), hashlib.sha256(shared.encode()).hexdigest()
    heavy_first = sorted(jobs, key=lambda job: job[1] is not torch_flags)
    with ThreadPoolExecutor(num_jobs) as pool:
        objects = list(pool.map(lambda job: _compile(*job, headers + given * (job[1] is SEEN)), heavy_first))
    module = target / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    stamp = target / "objects.txt"
    wanted = "\n".join([*map(str, objects), *map(_digest, made_before)])
    if not module.exists() or not stamp.exists() or stamp.read_text() != wanted:
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        partial = module.with_suffix(f".{os.getpid()}")
        libraries += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lpthread"]
        command = [*CXX, "-shared", "-o", str(partial), *map(str, [*objects, *made_before]), *libraries]
        subprocess.run(command, check=True)
        partial.rename(module)  # it may be in use
        stamp.write_text(wanted)
    return module


if __name__ == "__main__":
    print(build())
