"""What the CUDA compiler makes of every kernel, against csrc/kernels/facts.txt: registers and 128-bit accesses.

Called by tools/check_cuda_compiles.sh with the folder of its reports (ptxas -v) and PTX:

    python3 tools/gpu/kernel_facts.py FOLDER            fails where the table and the compiler differ
    python3 tools/gpu/kernel_facts.py FOLDER --write    renews the table

The numbers are of one release of nvcc; another one's are not compared. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).parents[2] / "csrc/kernels/facts.txt"
PTX_OF = "compute_90"


def short_names(mangled: list[str]) -> list[str]:
    """Returns kernels as the sources call them, with their template arguments."""
    found = subprocess.run(["c++filt"], input="\n".join(mangled), check=True, capture_output=True, text=True).stdout
    names = []
    for name in found.splitlines():
        name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
        name = name.replace("moe_opt::", "").replace("cuda::", "")
        names.append(name[: name.index("(", name.rindex(">") if ">" in name else 0)].replace(" ", ""))
    return names


def registers(folder: Path) -> dict[str, dict[str, int]]:
    """Returns the registers of each kernel, by its mangled name, on each architecture."""
    found: dict[str, dict[str, int]] = {}
    for report in sorted(folder.glob("*.txt")):
        for kernel, arch, rest in re.findall(
            r"Compiling entry function '(\S+)' for '(\w+)'(.*?)(?=Compiling entry|\Z)", report.read_text(), re.S
        ):
            found.setdefault(kernel, {})[arch] = int(re.search(r"Used (\d+) registers", rest)[1])
    return found


def wide_accesses(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns how many instructions of each kernel load, and how many store, 128 bits of global memory."""
    found = {}
    for ptx in folder.glob(f"*.{PTX_OF}.ptx"):
        for kernel, body in re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", ptx.read_text(), re.S):
            wide = re.findall(r"\b(ld|st)\.global\S*\.(?:v4\.\w32|v2\.\w64)", body)
            found[kernel] = wide.count("ld"), wide.count("st")
    return found


def table(folder: Path) -> str:
    """The table of what was compiled."""
    of_kernels, wide = registers(folder), wide_accesses(folder)
    archs = sorted({arch for of_kernel in of_kernels.values() for arch in of_kernel}, key=lambda arch: int(arch[3:]))
    version = re.search(r"release [\d.]+", subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout)
    lines = [
        f"# nvcc {version[0]}; written by tools/check_cuda_compiles.sh --write. Registers of a thread on each",
        "# architecture, and instructions that load and store 128 bits of global memory.",
        f"{'kernel':<64}{''.join(f'{arch:>8}' for arch in archs)}{'loads':>8}{'stores':>8}",
    ]
    rows = []
    for name, kernel in zip(short_names(list(of_kernels)), of_kernels, strict=True):
        numbers = [*(of_kernels[kernel][arch] for arch in archs), *wide[kernel]]
        rows.append(f"{name:<64}{''.join(f'{number:>8}' for number in numbers)}")
    return "\n".join([*lines, *sorted(rows)]) + "\n"


def main() -> None:
    """Compares, or writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="reports of ptxas -v, and PTX")
    parser.add_argument("--write", action="store_true", help="renew the table")
    options = parser.parse_args()
    made = table(options.folder)
    if options.write:
        TABLE.write_text(made)
        return
    kept = TABLE.read_text()
    if made.splitlines()[0] != kept.splitlines()[0]:
        print(f"{TABLE.name} is of another nvcc: registers and 128-bit accesses are not compared")
        return
    changed = sorted(set(made.splitlines()) ^ set(kept.splitlines()))
    if changed:
        sides = (f"{'now' if line in made.splitlines() else 'was'}  {line}" for line in changed)
        sys.exit(
            "\n".join(["kernels compile to something else; if it is meant, renew the table with --write:", *sides])
        )
    print(f"{len(made.splitlines()) - 3} kernels have the registers and 128-bit accesses of {TABLE.name}")


if __name__ == "__main__":
    main()
