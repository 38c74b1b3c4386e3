"""Runs shell scripts that start ranks by `python -m torch.distributed.run` on one node, with forked ranks in its place.

Runs that continue from a checkpoint are torchrun's own, so that the two ways are compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.ranks.job import Job

# A `python` for PATH: it asks whoever runs the script to start the ranks, and prints what they have printed.
STAND_IN = f"""#!/bin/bash
if [[ "$*" == "-m torch.distributed.run --standalone --nproc-per-node "* && "$*" != *" --load "* ]]; then
    folder=$(dirname "$0")
    printf '%s\\n' "$PWD" "${{@:5}}" >"$folder/asking" && mv "$folder/asking" "$folder/asked"
    until [[ -e "$folder/status" ]]; do sleep 0.1; done
    cat "$folder/ranks.txt"
    exit "$(cat "$folder/status" && rm "$folder/status")"
fi
exec {sys.executable} "$@"
"""


def run_script(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float = 600
) -> tuple[int, str]:
    """Returns the exit status of a script and what it printed; fails with what it printed where it takes too long.

    Args:
        folder: for what passes between it and us; new.
        environment: variables of the script and of its ranks.
    """
    folder.mkdir()
    python, asked, ended, status = (folder / name for name in ("python", "asked", "ended", "status"))
    python.write_text(STAND_IN)
    python.chmod(0o755)
    output, deadline = folder / "output.txt", time.monotonic() + timeout_s
    path = os.pathsep.join((str(folder), environment["PATH"]))
    with open(output, "w") as file:
        script = subprocess.Popen(command, env={**environment, "PATH": path}, stdout=file, stderr=subprocess.STDOUT)
    try:
        while script.poll() is None:
            assert time.monotonic() < deadline, output.read_text()
            if asked.exists():
                its_folder, ranks, *words = asked.read_text().splitlines()
                asked.unlink()
                job = Job(words, folder / "ranks.txt", int(ranks), environment, partial(os.chdir, its_folder))
                ended.write_text(str(job.wait()))
                ended.rename(status)
            time.sleep(0.1)
    finally:
        script.kill()
    return script.returncode, output.read_text()
