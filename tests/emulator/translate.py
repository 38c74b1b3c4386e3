"""CUDA C++ as the host's compiler takes it: launches become calls of the emulator, shared variables places it gives."""

from __future__ import annotations

import re


def _matching(text: str, end: int, opening: str, closing: str) -> int:
    """Where the bracket opens that closes at `end`."""
    depth = 0
    for place in range(end, -1, -1):
        depth += (text[place] == closing) - (text[place] == opening)
        if depth == 0:
            return place
    raise ValueError(f"unbalanced {opening}{closing}")


def _launch_bounds(text: str) -> dict[str, str]:
    """The most threads of a block, for each kernel: the first argument of __launch_bounds__."""
    found = {}
    for match in re.finditer(r"__launch_bounds__\(([^),]*)[^)]*\)\s*(\w+)\(", text):
        found[match[2]] = match[1]
    return found


def _replace_launches(text: str) -> str:
    bounds = _launch_bounds(text)
    while (chevrons := text.find("<<<")) >= 0:
        end = len(text[:chevrons].rstrip())
        begin = _matching(text, end - 1, "<", ">") if text[end - 1] == ">" else end
        begin = re.search(r"\w+$", text[:begin]).start()
        kernel = text[begin:end]
        name = re.match(r"\w+", kernel)[0]
        close = text.index(">>>", chevrons)
        configuration = text[chevrons + 3 : close]
        call = f'::emulator::launch("{name}", {bounds.get(name, "1024")}, {kernel}, {configuration})'
        text = text[:begin] + call + text[close + 3 :]
    return text


def _replace_shared(text: str) -> str:
    text = re.sub(
        r"extern __shared__ ([\w ]+?) (\w+)\[\];",
        r"\1* const \2 = static_cast<\1*>(::emulator::dynamic_shared());",
        text,
    )

    def places(match: re.Match) -> str:
        alignment, kind, names = match.groups()
        declared = []
        for name in re.split(r",\s*(?![^\[]*\])", names):
            variable, extent = re.fullmatch(r"(\w+)((?:\[[^\]]+\])*)", name).groups()
            kinds = f"{variable}_shared_type"
            declared.append(
                f"using {kinds} = {kind}{extent}; auto& {variable} = ::emulator::shared_variable<{kinds}>([] {{}});"
            )
        return " ".join(declared)

    return re.sub(r"__shared__ (alignas\(\w+\) )?((?:decltype\([^)]*\))|[\w ]+?) (\w[^;]*);", places, text)


def translate(text: str, name: str) -> str:
    """The translation of a .cu or .cuh file, whose name compiler messages shall give; lines keep their numbers."""
    return f'#line 1 "{name}"\n{_replace_shared(_replace_launches(text))}\n'
