"""The folder of the sample indices that Megatron makes of a dataset, and reads again in the next run.

Megatron reads them with pickle, so that who can put a file there can have any code run. By default it keeps them beside
the dataset, which may have come from anywhere; here they are the user's own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import stat
from functools import partial
from pathlib import Path

import torch.distributed as dist
from agreement import check_is_shared, check_on_all_ranks

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import check_output_folder

FLAG = "--data-cache-path"


def user_cache() -> Path:
    """The user's folder for the sample indices of all datasets: below $XDG_CACHE_HOME, or ~/.cache.

    Raises ConfigurationError where the user has no home.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise ConfigurationError(f"there is no home for the sample indices: name a folder with {FLAG}") from None
    return root.absolute() / "megatron-moe-opt" / "sample-indices"


def index_cache(args: argparse.Namespace) -> Path:
    """Folder of the sample indices of the datasets of `args.blend` as they are now.

    Megatron's names in it tell paths and settings apart: of a dataset made anew under its old name it would read the
    indices of the old one.
    """
    digest = hashlib.sha256()
    for _, prefix in args.blend:
        data = Path(f"{prefix}.bin").resolve()
        status = data.stat()
        digest.update(f"{data}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return Path(args.data_cache_path or user_cache()) / digest.hexdigest()[:32]


def make_index_cache(args: argparse.Namespace) -> Path:
    """Make the folder on rank 0 and see that it is safe and that every rank finds it; called by all ranks.

    Raises ConfigurationError, on all ranks, where it cannot be made, belongs to others, or is not the same everywhere.
    """
    check_on_all_ranks(partial(_make, args) if dist.get_rank() == 0 else lambda: None)
    folder = index_cache(args)
    check_is_shared(
        folder,
        f"the folder of the sample indices, {folder}, is not the same on all nodes: name one that they share with"
        f" {FLAG}",
    )
    return folder


def _make(args: argparse.Namespace) -> None:
    folder = index_cache(args)
    if args.data_cache_path is None:
        _make_own(folder.parent)
    check_output_folder(FLAG, folder)


def _make_own(folder: Path) -> None:
    """Make a folder that nobody but the user can write to, or refuse one that others can."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(
            f"the folder of the sample indices, {folder}, cannot be made ({error.strerror}): name another with {FLAG}"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"the folder of the sample indices, {folder}, can be written by others, who could have any code run: make"
            f" it yours alone (chmod 700), or name another with {FLAG}"
        )
