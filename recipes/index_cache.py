"""The folder of the sample indices that Megatron makes of a dataset, and reads again in the next run.

Megatron reads them with pickle, so that who can put a file there can have any code run. By default it keeps them beside
the dataset, which may have come from anywhere; here they are the user's own. And it writes them where others may be
reading, and reads what a start that was killed has left; here they get their name when they are complete.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import megatron.core
import torch.distributed as dist
from agreement import check_is_shared, check_on_all_ranks, fails_on_first_rank

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import check_output_folder, flush
from megatron_moe_opt.topology.agreement import found_by_first

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
    """Folder of the sample indices that this run reads, of the datasets of `args.blend` as they are now and here.

    Megatron's names in it tell paths and settings apart: of a dataset made anew under its old name it would read the
    indices of the old one. And a folder that has its name gets no further files.
    """
    settings = (
        *(megatron.core.__version__, args.blend, args.split, args.seed, args.seq_length, args.vocab_size),
        *(args.train_iters, args.eval_iters, args.global_batch_size),
    )
    digest = hashlib.sha256(f"{settings}\n".encode())
    for _, prefix in args.blend:
        data = Path(f"{prefix}.bin").resolve()
        status = data.stat()
        digest.update(f"{data}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return Path(args.data_cache_path or user_cache()) / digest.hexdigest()[:32]


def make_index_cache(args: argparse.Namespace, build: Callable[[Path], object]) -> Path:
    """Make the folder, unless it is there, and see that it is safe and that every rank finds it; called by all ranks.

    It is built beside itself and renamed: what is being written is never read. Of two runs that build the same, one is
    first, and the other uses what that has built.

    Args:
        args: the command line.
        build: writes the indices into the folder that it is given; called by all ranks.

    Raises ConfigurationError, on all ranks, where it cannot be made, belongs to others, or is not the same everywhere.
    """
    # The first rank's: copies of a dataset that nodes have for themselves were not written at the same time.
    folder = found_by_first(partial(index_cache, args), dist.group.WORLD)
    check_on_all_ranks(partial(_check_parent, args, folder.parent) if dist.get_rank() == 0 else lambda: None)
    check_is_shared(
        folder.parent,
        f"the folder of the sample indices, {folder.parent}, is not the same on all nodes: name one that they share"
        f" with {FLAG}",
    )
    fresh = found_by_first(
        lambda: None if folder.is_dir() else folder.with_name(f".{folder.name}.{secrets.token_hex(4)}"),
        dist.group.WORLD,
    )
    if fresh is not None:
        check_on_all_ranks(partial(build, fresh))  # all of them: the others read in it what the first one has written
        if reason := fails_on_first_rank(partial(_give_name, fresh, folder)):
            raise ConfigurationError(f"{folder} cannot be written ({reason}): name another folder with {FLAG}")
    return folder


def _give_name(fresh: Path, folder: Path) -> None:
    """Renames a complete folder, or takes it away where another run was first."""
    for file in fresh.iterdir():
        flush(file)
    try:
        fresh.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(fresh)


def _check_parent(args: argparse.Namespace, parent: Path) -> None:
    if args.data_cache_path is None:
        _make_own(parent)
    check_output_folder(FLAG, parent)


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
