"""Replaces `python -m torch.distributed.run` on one node: runs a script on forked ranks, and prints what they print.

python -m tests.ranks.torchrun RANKS SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.ranks.job import Job

# A `python` for PATH, for scripts that start ranks. Those that continue from a checkpoint are torchrun's own, so that
# the two ways are compared.
STAND_IN = f"""#!/bin/bash
if [[ "$*" == "-m torch.distributed.run --standalone --nproc-per-node "* && "$*" != *" --load "* ]]; then
    exec {sys.executable} -m tests.ranks.torchrun "${{@:5}}"
fi
exec {sys.executable} "$@"
"""


def main() -> int:
    """Returns the exit status."""
    ranks, *words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(words, Path(folder, "output.txt"), int(ranks))
        status = job.wait()
        print(job.output.read_text(), end="", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
