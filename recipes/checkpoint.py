"""Checkpoints by megatron.core.dist_checkpointing that are either complete or not there.

A checkpoint is written under a temporary name. Once all ranks have written their parts it is flushed to the disk and
renamed to iter_NNNNNNN, and only then does latest_checkpointed_iteration.txt (Megatron's tracker) name it. A run that
dies at any moment leaves the tracker at the last complete checkpoint. The folder must be one that all ranks share.
"""

from __future__ import annotations

import argparse
import functools
import random
import shutil
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from agreement import RankError, TrainingError, fails_on_first_rank, first_of_all_ranks
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import flush, write_text_whole
from megatron_moe_opt.planning.costs.differences import differences
from megatron_moe_opt.runtime.engine.collectives import CollectiveError
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.topology.layouts import Layout

TRACKER = "latest_checkpointed_iteration.txt"
# A checkpoint fits a model that has the same of these.
MODEL_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "bf16",
    "use_distributed_optimizer",
)
# Which sample comes when follows from these, and from the number of samples.
DATA_ARGUMENTS = ("seed", "data_path", "split", "seq_length")
# How Megatron lays out a checkpoint; to it comes the format of the distributed optimizer's state.
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
_OF_COMMAND_LINE = ("max_lr", "min_lr", "betas")
"""What Megatron's groups of parameters keep of the command line, alike in all of them, and would take from a
checkpoint. From megatron-core 0.19 on it knows by them which group is which.
"""
_ROOM = 1 << 20  # bytes that must be free, at least, for a checkpoint to be begun
AS_IN_MEMORY = "dp_reshardable"  # no gathering on one rank
BY_PARAMETER = "fully_reshardable"


class Checkpointer:
    """Saves and loads the whole state of a training run.

    Args:
        args: the command line; `MODEL_ARGUMENTS` and `DATA_ARGUMENTS` of it are stored and compared.
        layout: the parallel sizes; stored and compared, because optimizer and RNG state are kept by rank.
        model, optimizer, scheduler: what is saved and loaded in place.
        by_parameter: save optimizer states by parameter, for ranks that hold other experts than stock's.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        layout: Layout,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        by_parameter: bool = False,
    ) -> None:
        self._format = AS_IN_MEMORY if args.use_distributed_optimizer and not by_parameter else BY_PARAMETER
        self._arguments = {name: getattr(args, name) for name in MODEL_ARGUMENTS}
        self._data = _order_of_data(args)
        self._sizes = parallel_sizes(layout)
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler

    def save(self, folder: str, iteration: int, consumed_samples: int) -> Path:
        """Save and publish the state after `iteration`; called by all ranks. Returns the checkpoint's folder.

        Raises:
            TrainingError: on all ranks; it could not be written, and the one before is the last.
            RankError: the same, where the other ranks cannot be told.
        """
        final = Path(folder) / f"iter_{iteration:07d}"
        partial = final.with_name(f".{final.name}.partial")

        def failure(kind: type[Exception], reason: str) -> Exception:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            return kind(
                f"--save {folder}: the checkpoint of iteration {iteration} could not be written ({reason});"
                f" {say_last_complete(folder)}"
            )

        if reason := fails_on_first_rank(functools.partial(_begin, partial)):
            raise failure(TrainingError, reason)
        state = self._sharded_state(self._format, is_loading=False)
        state |= {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "arguments": self._arguments,
            "data": self._data,
            "layout": self._sizes,
        }
        try:
            # Returns when the parts of all ranks are written.
            dist_checkpointing.save(state, str(partial), content_metadata=_content(self._format))
        except CheckpointException as error:  # all ranks raise it, one knows why
            raise failure(TrainingError, first_of_all_ranks(_first_cause(error)) or "unknown reason") from error
        except CollectiveError:
            raise
        except (OSError, RuntimeError) as error:
            if failure_board.is_of_communication(error):  # over NCCL, whose errors are PyTorch's own
                raise
            raise failure(RankError, str(error)) from error
        if reason := fails_on_first_rank(functools.partial(publish, partial, final, iteration)):
            raise failure(TrainingError, reason)
        return final

    @torch.no_grad()  # fp32 parameters are written in place
    def load(self, path: Path) -> tuple[int, int, str | None, str | None]:
        """Load the checkpoint in `path`, called by all ranks. The learning-rate schedule, weight decay and Adam's betas
        stay this run's.

        Returns:
            The checkpoint's iteration, the samples consumed by it, and in words what this run has otherwise of the
            schedule, and of what orders the data; None: nothing.

        Raises ConfigurationError where it was saved by a model of another shape or under another layout.
        """
        common = dist_checkpointing.load_common_state_dict(str(path))
        self._check_fits(path, common)
        content = dist_checkpointing.load_content_metadata(str(path)) or {}
        by_place = self._arguments["use_distributed_optimizer"]  # other optimizers have no formats
        saved_format = content.get("distrib_optim_sharding_type", AS_IN_MEMORY) if by_place else BY_PARAMETER
        state = dist_checkpointing.load(self._sharded_state(saved_format, is_loading=True), str(path))
        self._model.module.load_state_dict(state["model"])
        ours = next(({name: one[name] for name in _OF_COMMAND_LINE} for one in self._optimizer.param_groups), {})
        for group in _groups_of_parameters(state["optimizer"]):
            group.update(ours)
        self._optimizer.load_state_dict(state["optimizer"])
        _separate_steps(self._optimizer)
        here, there = (_schedule(one) for one in (self._scheduler.state_dict(), state["opt_param_scheduler"]))
        self._scheduler.load_state_dict(state["opt_param_scheduler"])
        _set_rng_state(state["rng_state"])
        of_data = differences(self._data, common.get("data", self._data))  # earlier forms of the recipe do not say
        return state["iteration"], state["consumed_samples"], differences(here, there), of_data

    def _sharded_state(self, optimizer_format: str, is_loading: bool) -> dict[str, Any]:
        metadata = _content(optimizer_format) | {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
        }
        state: dict[str, Any] = {"model": self._model.module.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self._optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        state["opt_param_scheduler"] = self._scheduler.state_dict()
        state["rng_state"] = _sharded_rng_state()
        return state

    def _check_fits(self, path: Path, common: dict[str, Any]) -> None:
        if "arguments" not in common or "layout" not in common:
            raise ConfigurationError(f"--load: {path} was not saved by this recipe; load one that was")
        for name, value in self._arguments.items():
            saved = common["arguments"].get(name, value)  # earlier forms of the recipe say less
            if saved != value:
                raise ConfigurationError(
                    f"--load: {path} was saved with --{name.replace('_', '-')} {saved}, but this run has {value};"
                    f" use {saved} or another checkpoint"
                )
        saved_sizes = {name: common["layout"].get(name) for name in self._sizes}
        if saved_sizes != self._sizes:
            raise ConfigurationError(
                f"--load: {path} was saved with {say_sizes(saved_sizes)}, but this run has {say_sizes(self._sizes)};"
                " use the same parallel sizes and number of ranks"
            )


def _groups_of_parameters(state: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yields the groups in the state of an optimizer, or of several in one."""
    yield from state.get("param_groups", ())
    for part in state.values():
        if isinstance(part, Mapping):
            yield from _groups_of_parameters(part)


def _schedule(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a scheduler's state says of the schedule; weight decay is constant, however long it takes."""
    return {name: value for name, value in state.items() if name not in ("num_steps", "wd_incr_steps")}


def _order_of_data(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what decides which sample comes when: also how many there are, as Megatron shuffles epochs together."""
    samples = args.train_iters * args.global_batch_size
    return {name: getattr(args, name) for name in DATA_ARGUMENTS} | {"samples": samples}


def parallel_sizes(layout: Layout) -> dict[str, int]:
    """Returns the sizes of the parallel groups, by the names that they have in checkpoints."""
    return {
        "tensor": layout.tp,
        "pipeline": layout.pp,
        "context": layout.cp,
        "data": layout.dp,
        "expert": layout.ep,
        "expert_tensor": layout.expert_tp,
    }


def say_sizes(sizes: Mapping[str, int]) -> str:
    """Returns what `parallel_sizes` returned, in words for messages."""
    words = "TP {tensor}, PP {pipeline}, CP {context}, DP {data}, EP {expert}, expert-TP {expert_tensor}"
    return words.format(**sizes)


def _content(optimizer_format: str) -> dict[str, Any]:
    return _CONTENT | {"distrib_optim_sharding_type": optimizer_format}


def find_checkpoint(folder: str, iteration: int | None) -> Path | None:
    """The complete checkpoint to load: of `iteration`, or where None the one that the tracker names.

    Returns None where there is no tracker.

    Raises ConfigurationError where the checkpoint asked for is missing or was not written to its end.
    """
    tracker = Path(folder) / TRACKER
    if iteration is None:
        if not tracker.is_file():
            return None
        text = tracker.read_text().strip()
        if not text.isdecimal():
            raise ConfigurationError(
                f"--load {folder}: {tracker} says {text!r}, which is not an iteration; choose one with --ckpt-step"
            )
        iteration = int(text)
    path = Path(folder) / f"iter_{iteration:07d}"
    if not check_is_distributed_checkpoint(str(path)):
        complete = ", ".join(map(str, _complete_iterations(folder))) or "none"
        raise ConfigurationError(
            f"--load {folder}: {path} is missing or not complete; complete checkpoints, for --ckpt-step: {complete}"
        )
    return path


def check_may_replace(folder: str, iterations: Container[int]) -> None:
    """Refuse a folder in which a run that saves after `iterations` would replace checkpoints of another program.

    Raises ConfigurationError.
    """
    for iteration in _complete_iterations(folder):
        path = Path(folder) / f"iter_{iteration:07d}"
        if iteration in iterations and not _is_ours(path):
            raise ConfigurationError(
                f"--save {folder}: {path} is in the way, and was not saved by this recipe; choose another folder"
            )


def _is_ours(path: Path) -> bool:
    try:
        return "layout" in dist_checkpointing.load_common_state_dict(str(path))
    except Exception:  # others' state may hold what this process cannot load
        return False


def say_last_complete(folder: str) -> str:
    """What there is to go on from, in words."""
    try:
        path = find_checkpoint(folder, None)
    except ConfigurationError:
        path = None
    return f"the last complete one is {path}" if path else "there is no complete one before it"


def _complete_iterations(folder: str) -> list[int]:
    paths = sorted(path for path in Path(folder).glob("iter_*") if path.name.removeprefix("iter_").isdecimal())
    return [int(path.name.removeprefix("iter_")) for path in paths if check_is_distributed_checkpoint(str(path))]


def _begin(partial: Path) -> None:
    """Make the folder that a checkpoint is written into, on a disk that still takes something.

    Rank 0 alone writes the first of a checkpoint, and the others would wait for it in vain.
    """
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that died here
    partial.mkdir(parents=True)
    room = partial / "room"
    room.write_bytes(bytes(_ROOM))
    flush(room)
    room.unlink()


def _first_cause(error: CheckpointException) -> str | None:
    """What went wrong on the first rank, that of the operating system before others'; None where it is not known."""
    causes = [str(cause).strip().partition("\n")[0] for cause, _ in error.failures.values()]
    return min(causes, key=lambda cause: "[Errno" not in cause, default=None)


def publish(partial: Path, final: Path, iteration: int) -> None:
    """Make the completely written folder `partial` the checkpoint `final`, and let the tracker name it.

    Everything is on the disk before the name that promises it.
    """
    for path in partial.rglob("*"):
        flush(path)
    flush(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        # A run that went back and came here again replaces what it wrote before.
        final.rename(replaced)
    partial.rename(final)
    flush(final.parent)
    write_text_whole(final.parent / TRACKER, str(iteration))
    shutil.rmtree(replaced, ignore_errors=True)


def _separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give each parameter its own step count again.

    Megatron loads one tensor for all of them, and torch's Adam would count it up once a parameter. Transformer
    Engine's and Apex's Adam count steps by group.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()


def _sharded_rng_state() -> ShardedObject:
    """The state of every generator of this rank, as one object a rank."""
    state = {
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
    ranks = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return ShardedObject("rng_state", state, sizes, ranks, replica_id=0)


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["random"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
