"""What a run has otherwise than a file was made with, in words."""

from __future__ import annotations

from collections.abc import Mapping


def differences(here: Mapping[str, object], there: Mapping[str, object]) -> str | None:
    """Returns `NAME VALUE (there VALUE), ...` of all names with unlike values; None where there are none.

    Args:
        here: of the run.
        there: of the file.
    """
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    listed = (f"{name} {_shown(here, name)} (there {_shown(there, name)})" for name in names)
    return ", ".join(listed) or None


def _shown(values: Mapping[str, object], name: str) -> str:
    return str(values[name]) if name in values else "not set"
