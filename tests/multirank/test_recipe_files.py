"""Files of the recipe that all ranks write or read: checkpoints on a full disk, the folder of sample indices."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.layouts import Layout

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@contextmanager
def recipes() -> Iterator[None]:
    """The folder of scripts, which is not a package, can be imported from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        yield


@contextmanager
def largest_file(size: int, on_rank: int) -> Iterator[None]:
    """Has one rank's files end at `size` bytes, as on a full disk, those of its writing processes too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def failures_of_saving(folder: str) -> list[str]:
    """Saves once, then fails to in each place; returns the errors and what is left."""
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    with recipes(), parallel(ep=2):
        import checkpoint
        from agreement import RankError, TrainingError

        of_data = (*checkpoint.DATA_ARGUMENTS, "train_iters", "global_batch_size")
        arguments = argparse.Namespace(**dict.fromkeys((*checkpoint.MODEL_ARGUMENTS, *of_data), 1))
        trained = gpt(num_layers=1)
        scheduler = SimpleNamespace(state_dict=dict)
        parts = (trained.model, trained.optimizer, scheduler)
        save = partial(checkpoint.Checkpointer(arguments, Layout(4, ep=2), *parts).save, folder, consumed_samples=0)
        path = save(iteration=1)
        found = [f"saved {path}"]
        saved = checkpoint.dist_checkpointing.load_common_state_dict(str(path))
        sizes = {"tensor": 1, "pipeline": 1, "context": 1, "data": 4, "expert": 2, "expert_tensor": 1}
        assert saved["layout"] == sizes  # under the names that they have in all checkpoints
        with pytest.raises(ConfigurationError, match="DP 4, EP 2, expert-TP 1, but this run has TP 1, .* EP 1,"):
            checkpoint.Checkpointer(arguments, Layout(4), *parts).load(path)
        other = argparse.Namespace(**vars(arguments) | {"moe_router_topk": 2})
        with pytest.raises(ConfigurationError, match="was saved with --moe-router-topk 1, but this run has 2"):
            checkpoint.Checkpointer(other, Layout(4, ep=2), *parts).load(path)

        def failure(kind: type[Exception]) -> None:
            with pytest.raises(kind) as failed:
                save(iteration=2)
            found.append(str(failed.value))

        with largest_file(1000, on_rank=0):  # nothing fits
            failure(TrainingError)
        # Its part does not. Behind the head of an archive PyTorch would say where it is, in the place of why.
        with largest_file(100, on_rank=3):
            failure(TrainingError)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint.dist_checkpointing, "save", lambda *_, **__: os.listdir("/nowhere"))
            failure(RankError)
        dist.barrier()
        if dist.get_rank() == 0:
            found.append(f"left {sorted(os.listdir(folder))}")
            others = shutil.copytree(Path(folder) / "iter_0000001", Path(folder) / "iter_0000002")
            torch.save({"args": None}, others / "common.pt")  # as Megatron-LM's
            checkpoint.check_may_replace(folder, {1, 3})
            with pytest.raises(ConfigurationError, match=f"{others} is in the way, and was not saved by this recipe"):
                checkpoint.check_may_replace(folder, {2})
            shutil.rmtree(others)
            os.remove(Path(folder) / checkpoint.TRACKER)
            os.mkdir(Path(folder) / checkpoint.TRACKER)
        dist.barrier()
        failure(TrainingError)
        return found


@pytest.mark.skipif(
    sys.version_info[:3] == (3, 12, 1),
    reason="Python 3.12.1 crashes in bytesiobuf_releasebuffer where it collects what a failed write of PyTorch's left",
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_and_is_told_on_all_ranks(ranks, tmp_path):
    first, *others = ranks.run(failures_of_saving, folder=str(tmp_path))
    lost = f"--save {tmp_path}: the checkpoint of iteration 2 could not be written "
    before = f"the last complete one is {tmp_path}/iter_0000001"
    saved, nothing_fits, one_part, one_rank, left, no_tracker = first
    assert saved == f"saved {tmp_path}/iter_0000001"
    assert nothing_fits == f"{lost}(File too large); {before}"
    # Since 0.17 Megatron says no more of an error of a worker than its class.
    of_class = Version(megatron.core.__version__) >= Version("0.17")
    why = "<class 'OSError'>" if of_class else "[Errno 27] File too large"
    assert one_part.startswith(f"{lost}(") and why in one_part and one_part.endswith(before)
    assert one_rank == f"{lost}([Errno 2] No such file or directory: '/nowhere'); {before}"
    assert left == f"left {['iter_0000001', 'latest_checkpointed_iteration.txt']}"
    tracker = f"{tmp_path}/latest_checkpointed_iteration.txt cannot be written (Is a directory): choose another file"
    assert no_tracker == f"{lost}({tracker}); there is no complete one before it"
    assert others == [[saved, nothing_fits, one_part, one_rank, no_tracker]] * 3


def seen_by_all(folders: list[str]) -> str | None:
    """Why a folder is refused that each rank has for itself; None: it is not."""
    with recipes():
        from agreement import check_is_shared

        try:
            check_is_shared(Path(folders[dist.get_rank() % len(folders)]), "not shared")
        except ConfigurationError as error:
            return str(error)


def test_a_folder_that_nodes_do_not_share_is_refused_on_all_ranks(ranks, tmp_path):
    here, there = (tmp_path / name for name in ("here", "there"))
    here.mkdir()
    there.mkdir()
    assert set(ranks.run(seen_by_all, folders=[str(here)])) == {None}
    assert set(ranks.run(seen_by_all, folders=[str(here), str(there)])) == {"not shared"}
    assert not list(here.iterdir())


SETTINGS = ("split", "seed", "seq_length", "vocab_size", "train_iters", "eval_iters", "global_batch_size")


def folder_of_indices(
    data: str, caches: list[str], given: str | None = None, seed: int = 1, meanwhile: str | None = None
) -> str:
    """The folder that is made, or why not; every rank has a home of its own in `caches`, in which it also is.

    Args:
        meanwhile: what happens while the indices are built: another run is `first`, or this one is `killed`.
    """
    with recipes(), pytest.MonkeyPatch.context() as patch:
        from index_cache import index_cache, make_index_cache

        cache = Path(caches[dist.get_rank() % len(caches)])
        cache.mkdir(exist_ok=True)
        patch.chdir(cache)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        args = argparse.Namespace(
            blend=[(1.0, data)], data_cache_path=given, **dict.fromkeys(SETTINGS, 1) | {"seed": seed}
        )

        def build(folder: Path) -> None:
            if dist.get_rank() == 0:
                for name in (folder, *([index_cache(args)] if meanwhile == "first" else [])):
                    name.mkdir()
                    (name / f"of {name.name}").touch()
            else:
                time.sleep(0.2)
                assert folder.is_dir()  # still: Megatron has the other ranks read what the first one has written
            if meanwhile == "killed":
                raise ConfigurationError("killed")

        try:
            return str(make_index_cache(args, build))
        except ConfigurationError as error:
            return str(error)


def test_sample_indices_are_kept_where_only_the_user_can_put_them(ranks, tmp_path):
    """Not beside the data, which may have been downloaded: Megatron reads them with pickle. None is half written."""
    data, cache = tmp_path / "downloaded" / "text", tmp_path / "cache"
    data.parent.mkdir()
    Path(f"{data}.bin").write_bytes(b"tokens")
    run = partial(ranks.run, folder_of_indices, data=str(data))
    own = cache / "megatron-moe-opt" / "sample-indices"
    assert set(run(caches=[str(cache)], meanwhile="killed")) == {"killed"}
    (half,) = own.iterdir()
    (folder,) = set(run(caches=[str(cache)]))
    assert Path(folder).parent == own and stat.S_IMODE(own.stat().st_mode) == 0o700
    assert sorted(own.iterdir()) == sorted([half, Path(folder)]) and half.name.startswith(f".{Path(folder).name}.")
    assert os.listdir(data.parent) == ["text.bin"] and len(os.listdir(folder)) == 1
    assert set(run(caches=[str(cache)], meanwhile="killed")) == {folder}  # nothing is built again
    (other,) = set(run(caches=[str(cache)], seed=2, meanwhile="first"))
    assert os.listdir(other) == [f"of {Path(other).name}"] and len(os.listdir(own)) == 3
    os.utime(f"{data}.bin", (0, 0))
    assert set(run(caches=[str(cache)])) != {folder}

    (not_shared,) = set(run(caches=[str(cache), str(tmp_path / "other")], given="given"))
    assert "is not the same on all nodes: name one that they share with --data-cache-path" in not_shared
    own.chmod(0o770)
    (open_to_others,) = set(run(caches=[str(cache)]))
    assert open_to_others.startswith(f"the folder of the sample indices, {own}, can be written by others")
    (given,) = set(run(caches=[str(cache)], given=str(tmp_path / "given")))
    assert Path(given).parent == tmp_path / "given"


def test_copies_of_a_dataset_that_nodes_have_for_themselves_have_one_folder_of_indices(ranks, tmp_path):
    copies = [tmp_path / "n1", tmp_path / "n2"]
    for number, folder in enumerate(copies):
        folder.mkdir()
        (folder / "text.bin").write_bytes(b"tokens")
        os.utime(folder / "text.bin", (number, number))
    found = ranks.run(folder_of_indices, data="text", caches=list(map(str, copies)), given=str(tmp_path / "shared"))
    (folder,) = set(found)
    assert os.listdir(tmp_path / "shared") == [Path(folder).name] and len(os.listdir(folder)) == 1
