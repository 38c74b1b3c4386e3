"""Builds the extension with CMake; everything else is in pyproject.toml and CMakeLists.txt.

The extension belongs to one PyTorch. It is built where the building Python has one, which is with pip's
--no-build-isolation; without, what is built is a package for planning, replays and reports.

Environment: MAX_JOBS (compile jobs), MOE_OPT_CUDA (AUTO, ON or OFF), MOE_OPT_CUDA_ARCHS (for example "80;90").
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_tool(name: str) -> str:
    """Path of a build tool: from the running Python's environment first, then from PATH."""
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if path is None:
        sys.exit(f"{name} is needed to build megatron-moe-opt: pip install {name}")
    return path


class CMakeBuild(build_ext):
    """Runs CMake and puts its module where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        """Configures, builds and installs the one extension."""
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir = ROOT / "build" / f"cmake-{sysconfig.get_config_var('SOABI')}"
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
            "CMAKE_INSTALL_PREFIX": target,
            "Python_EXECUTABLE": sys.executable,
            "MOE_OPT_CUDA": os.environ.get("MOE_OPT_CUDA", "AUTO"),
            "MOE_OPT_CUDA_ARCHS": os.environ.get("MOE_OPT_CUDA_ARCHS", ""),
        }
        defines = [f"-D{name}={value}" for name, value in options.items()]
        cmake = find_tool("cmake")
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run([cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja", *defines], check=True)
        subprocess.run([cmake, "--build", str(build_dir), "--parallel", jobs], check=True)
        subprocess.run([cmake, "--install", str(build_dir)], check=True)


has_torch = find_spec("torch") is not None
if os.environ.get("MOE_OPT_CUDA") == "ON" and not has_torch:
    sys.exit("MOE_OPT_CUDA=ON builds for PyTorch, which is not here: install it, and give --no-build-isolation to pip")
extension = Extension("megatron_moe_opt._C", sources=[])
setup(ext_modules=[extension] if has_torch else [], cmdclass={"build_ext": CMakeBuild})
