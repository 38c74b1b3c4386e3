"""Says which names of Megatron that the package uses a checkout does not have: what moved in a version to come.

    python -m tools.megatron_checks.names MEGATRON_LM_CHECKOUT

Sources are read, nothing is imported. A name is a module, what is imported from it or asked of it, and an attribute of
a class of it; what is asked of instances is not seen. Comparisons with the dispatcher's name that guards.py does not
list are said too. The exit status is 1 where there is anything to say.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from tools import ROOT
from tools.megatron_checks.guards import GUARDS

PACKAGE = ROOT / "megatron_moe_opt"
DISPATCHER = "moe_token_dispatcher_type"
ASKING = ("getattr", "hasattr", "replace", "seam", "setattr")
"""Functions whose second argument is a name of the first."""
Name = tuple[str, ...]
"""A name that must exist: a module, and what is asked of it in turn."""


def names_used(tree: ast.Module) -> set[Name]:
    """Returns the names of Megatron that a source file of ours uses."""
    found: set[Name] = set()
    known: dict[str, Name] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
            known |= {one.asname or one.name: (str(node.module), one.name) for one in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (module := _module(node.value)):
            known[node.targets[0].id] = (module,)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split(".")
            is_module = words[0] == "megatron" and all(map(str.isidentifier, words[1:]))
            found |= {(node.value,)} if is_module and words[1:2] != ["bridge"] else set()  # another package's

    def owner(node: ast.expr) -> Name:
        if isinstance(node, ast.Attribute):
            before = owner(node.value)
            return (*before, node.attr) if before else ()
        return known.get(node.id, ()) if isinstance(node, ast.Name) else tuple(filter(None, [_module(node)]))

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(owner(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ASKING and len(node.args) > 1:
            asked = node.args[1]
            if isinstance(asked, ast.Constant) and owner(node.args[0]):
                found.add((*owner(node.args[0]), asked.value))
    # What Python gives every object is no name of Megatron's.
    return {tuple(takewhile(lambda part: not part.startswith("__"), name)) for name in found | set(known.values())} - {
        ()
    }


def _module(node: ast.expr) -> str | None:
    """Returns the module of Megatron that an expression imports; None: none."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("import_module"):
        return None
    module = node.args[0]
    is_megatron = isinstance(module, ast.Constant) and str(module.value).startswith("megatron.")
    return module.value if is_megatron else None


def has(checkout: Path, name: Name) -> bool:
    """Whether a checkout has a name. An attribute may be inherited; one of what is no class is taken to be there."""
    module, *asked = name
    place = checkout.joinpath(*module.split("."))
    file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
    if not asked:
        return file.is_file() or place.is_dir()
    first, *rest = asked
    if has(checkout, (f"{module}.{first}",)):
        return has(checkout, (f"{module}.{first}", *rest))
    definitions = _definitions(_parsed(file).body) if file.is_file() else {}
    if first not in definitions or not rest:
        return first in definitions
    where = definitions[first]
    if isinstance(where, ast.ImportFrom):
        package = module.split(".")[: None if file.name == "__init__.py" else -1]
        package = package[: len(package) + 1 - where.level] if where.level else []
        source = ".".join([*package, *filter(None, [where.module])])
        original = next(one.name for one in where.names if (one.asname or one.name) == first)
        return not source.startswith("megatron.") or has(checkout, (source, original, *rest))
    if not isinstance(where, ast.ClassDef) or rest[0] in _definitions(where.body):
        return True
    return any(has(checkout, (module, ast.unparse(base), *rest)) for base in where.bases)


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(errors="replace"))


def _definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Returns what a module or a class defines, by name, where it stands first; under conditions too."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [(one.asname or one.name).split(".")[0] for one in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        elif isinstance(node, ast.If | ast.Try | ast.With):
            handled = [line for handler in getattr(node, "handlers", []) for line in handler.body]
            inside = [*node.body, *handled, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            found = _definitions(inside) | found
        found = dict.fromkeys(names, node) | found
    return found


def comparisons(megatron: Path) -> Iterator[tuple[str, str, str]]:
    """Yields every comparison with the dispatcher's name outside inference code, of a folder `megatron`.

    Yields:
        the file below it, the source of the comparison without the object that has the name, and that object's.
    """
    for path in sorted(megatron.rglob("*.py")):
        if DISPATCHER not in path.read_text(errors="ignore") or "inference" in path.parts:
            continue
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == DISPATCHER:
                holder = ast.unparse(node.left)[: -len(DISPATCHER)]
                yield str(path.relative_to(megatron)), ast.unparse(node)[len(holder) :], holder


def main() -> int:
    """Returns 1 where the checkout lacks a name, or has a comparison that is not listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    if not (checkout / "megatron" / "core").is_dir():
        sys.exit(f"tools.megatron_checks.names: {checkout} has no megatron/core: give a checkout of Megatron-LM")
    used: dict[Name, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in names_used(ast.parse(file.read_text())):
            used.setdefault(name, []).append(str(file.relative_to(PACKAGE)))
    missing = {name: files for name, files in sorted(used.items()) if not has(checkout, name)}
    for name, files in missing.items():
        print(f"{'.'.join(name)}: used in {', '.join(files)}")
    listed = {(guard.file, guard.comparison) for guard in GUARDS}
    new = sorted({(file, what) for file, what, _ in comparisons(checkout / "megatron")} - listed)
    for file, what in new:
        print(f"{file}: {what}: not in tools/megatron_checks/guards.py")
    print(f"{len(used)} names, {len(missing)} not there; {len(new)} comparisons that are not listed")
    return 1 if missing or new else 0


if __name__ == "__main__":
    sys.exit(main())
