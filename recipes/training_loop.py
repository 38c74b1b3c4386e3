"""The training loop of pretrain_moe_gpt.py: start the ranks, set up, resume, train, save, log."""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from agreement import RankError, TrainingError, check_is_shared, check_on_all_ranks
from arguments import PROGRAM, check_arguments, check_folders, parse_arguments
from checkpoint import Checkpointer, check_may_replace, find_checkpoint, parallel_sizes, say_last_complete, say_sizes
from index_cache import make_index_cache
from lossy_logs import Losses, LossyStream
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from model_setup import build_config, build_model, build_optimizer
from progress import TrainingProgress
from rich.console import Console
from save_lock import save_lock
from step_log import StepLog
from token_data import batches, build_datasets, check_datasets, check_samples, kind_names
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_moe_opt import register, use_host_backend
from megatron_moe_opt.errors import ConfigurationError, LayerError
from megatron_moe_opt.integration.observe import reports
from megatron_moe_opt.integration.observe.routing_recorder import note_kinds
from megatron_moe_opt.integration.registry import launcher_options
from megatron_moe_opt.integration.start_facts import facts_of
from megatron_moe_opt.options import Options
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.job.gpu_of_rank import take_gpu
from megatron_moe_opt.runtime.job.same_start import say_together, start_alike
from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
from megatron_moe_opt.topology.agreement import found_by_first
from megatron_moe_opt.topology.layouts import Layout
from megatron_moe_opt.topology.nodes import discover_nodes
from megatron_moe_opt.topology.process_groups import all_let_go

Batches = Iterator[dict[str, torch.Tensor]]
NOT_FINITE = "lower --lr or check the data"


class LossNotFiniteError(Exception):
    """The loss of an iteration is infinite or not a number; its gradients have not been used."""


def start_distributed(timeout: timedelta) -> torch.device:
    """Join the default process group and return this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = take_gpu()
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    return device


def start_model_parallel(args: argparse.Namespace) -> None:
    """Make Megatron's process groups and seed every generator, as Megatron-LM does."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def forward_step(
    batch_iterator: Batches, model: DistributedDataParallel
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]]:
    """One micro-batch through this pipeline stage; Megatron's schedules call it."""
    batch = next(batch_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_sum, batch["loss_mask"])


def loss_sum(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss summed over the tokens of a micro-batch, their number, and both for the report.

    Both inputs are [micro batch, sequence]; Megatron divides the one by the other and averages over the ranks.
    """
    mask = loss_mask.view(-1).float()
    total = (token_losses.view(-1).float() * mask).sum()
    tokens = mask.sum()
    return total, tokens.int(), {"lm loss": torch.stack((total.detach(), tokens))}


def run_batch(args: argparse.Namespace, model: DistributedDataParallel, batch_iterator: Batches, train: bool) -> float:
    """One global batch forward, and backward where `train`. Returns its mean loss per token, on every rank."""
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batch_iterator,
        model=[model],
        num_microbatches=args.global_batch_size
        // (args.micro_batch_size * parallel_state.get_data_parallel_world_size()),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=not train,
    )
    loss_and_tokens = torch.zeros(2, device=next(model.parameters()).device)
    if parallel_state.is_pipeline_last_stage():
        loss_and_tokens = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
        dist.all_reduce(loss_and_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            loss_and_tokens,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
    total, tokens = loss_and_tokens.tolist()
    return total / tokens


def train_step(
    args: argparse.Namespace,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    batch_iterator: Batches,
) -> tuple[float, float]:
    """One iteration: gradients, optimizer, schedule. Returns the mean loss and the gradient norm before clipping.

    Raises LossNotFiniteError, on all ranks and with the weights as they were.
    """
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = run_batch(args, model, batch_iterator, train=True)
    if not math.isfinite(loss):
        raise LossNotFiniteError(f"the loss is {loss}")
    _, grad_norm, _ = optimizer.step()
    scheduler.step(increment=args.global_batch_size)
    return loss, float(grad_norm)


@torch.no_grad()
def evaluate(args: argparse.Namespace, model: DistributedDataParallel, batch_iterator: Batches) -> float:
    """Mean validation loss over `--eval-iters` global batches."""
    model.eval()
    losses = [run_batch(args, model, batch_iterator, train=False) for _ in range(args.eval_iters)]
    model.train()
    return sum(losses) / len(losses)


def last_iteration(args: argparse.Namespace, done: int) -> int:
    """Where this run stops: at `--train-iters`, or at the next multiple of `--exit-interval`."""
    if not args.exit_interval:
        return args.train_iters
    return min(args.train_iters, (done // args.exit_interval + 1) * args.exit_interval)


def saved_iterations(args: argparse.Namespace, done: int, last: int) -> set[int]:
    """The iterations after which this run saves."""
    every = args.save_interval or last
    return {last, *range(done - done % every + every, last, every)}


def run(args: argparse.Namespace, options: Options, layout: Layout, device: torch.device, console: Console) -> None:
    """Check what a run reads and writes, and train."""
    config = build_config(args)
    check_on_all_ranks(partial(check_datasets, args))
    check_on_all_ranks(partial(check_folders, args))
    with ExitStack() as stack:
        if args.save:
            check_on_all_ranks(partial(take_save_folder, args.save, stack))
            check_is_shared(
                Path(args.save),
                f"--save {args.save} is not the same folder on all nodes, each of which would have a part of every"
                " checkpoint: name one that they share",
            )
        train(args, config, options, layout, device, console)


def take_save_folder(folder: str, stack: ExitStack) -> None:
    """Have rank 0 keep other jobs from saving there until the stack ends. Raises ConfigurationError where one does."""
    if dist.get_rank() == 0:
        stack.enter_context(save_lock(Path(folder)))


def train(
    args: argparse.Namespace,
    config: TransformerConfig,
    options: Options,
    layout: Layout,
    device: torch.device,
    console: Console,
) -> None:
    """Set up, resume where asked, train, save, and evaluate."""
    start_model_parallel(args)
    cache = make_index_cache(args, partial(build_datasets, args))
    console.print(f"sample indices of the data: {cache}", highlight=False, soft_wrap=True, markup=False)
    train_data, valid_data = build_datasets(args, cache)
    model = build_model(args, config, device)
    optimizer, scheduler = build_optimizer(args, model)
    checkpointer = Checkpointer(
        args, layout, model, optimizer, scheduler, by_parameter=options.expert_order is not None
    )

    iteration, consumed_samples = resume(args, checkpointer, console)
    last, saved = last_iteration(args, iteration), iteration
    check_samples(args, len(train_data), iteration, consumed_samples, last)
    if args.save:
        check_on_all_ranks(partial(check_may_replace, args.save, saved_iterations(args, iteration, last)))
    batch_iterator = noting_kinds(
        batches(train_data, args.micro_batch_size, consumed_samples, device), kind_names(args)
    )
    tokens = args.global_batch_size * args.seq_length
    nodes = discover_nodes()
    announce(args, layout, model, device, nodes.num_nodes, console)

    with ExitStack() as stack:
        progress = stack.enter_context(TrainingProgress(console, args.train_iters, iteration, tokens))
        write = open_logs(args, stack)

        def save() -> Path:
            return checkpointer.save(args.save, iteration, consumed_samples)

        while iteration < last:
            # The step that is counted is the last one, and is not to be timed.
            counter = TrafficCounter(nodes) if iteration + 1 == last else None
            start = time.perf_counter()
            try:
                with counter or nullcontext():
                    loss, grad_norm = train_step(args, model, optimizer, scheduler, batch_iterator)
            except LossNotFiniteError as error:
                state = say_last_complete(args.save) if args.save else "nothing is saved without --save"
                if args.save and iteration > saved:
                    with suppress(ConfigurationError):  # another program's checkpoint has that number
                        check_on_all_ranks(partial(check_may_replace, args.save, [iteration]))
                        state = f"the state before it is saved in {save()}"
                raise TrainingError(f"{error} in iteration {iteration + 1}: {state}; {NOT_FINITE}") from None
            seconds = time.perf_counter() - start
            iteration += 1
            consumed_samples += args.global_batch_size
            if not math.isfinite(grad_norm):
                state = say_last_complete(args.save) if args.save else "nothing is saved without --save"
                raise TrainingError(
                    f"the gradient norm is {grad_norm} in iteration {iteration}, whose weights are lost: {state};"
                    f" {NOT_FINITE}"
                )
            record: dict[str, Any] = {"iteration": iteration, "loss": loss, "grad_norm": grad_norm}
            if counter is None:
                record["seconds"] = seconds
            else:
                record["traffic"] = [asdict(row) for row in counter.reduce()]
            progress.count(seconds)
            if iteration % args.log_interval == 0 or iteration == last:
                ours = reports.collect()
                write(record, ours)
                progress.show(iteration, loss, grad_norm, args.others.get(iteration, {}).get("loss"))
                for line in reports.lines(ours):
                    progress.say(line)
            if args.save and (iteration == last or (args.save_interval and iteration % args.save_interval == 0)):
                progress.say(f"saved {save()}")
                saved = iteration
    if valid_data is not None:
        loss = evaluate(args, model, batches(valid_data, args.micro_batch_size, 0, device))
        console.print(f"validation loss {loss:.4f} over {args.eval_iters} batches", highlight=False)


def noting_kinds(batch_iterator: Batches, names: Sequence[str]) -> Batches:
    """Yields the same batches, and tells a recorder of routing, if there is one, what the samples of each are."""
    for batch in batch_iterator:
        note_kinds(batch["kinds"], names)
        yield batch


def resume(args: argparse.Namespace, checkpointer: Checkpointer, console: Console) -> tuple[int, int]:
    """Load what `--load` asks for. Returns the iterations done and samples consumed; 0, 0 from scratch."""
    if not args.load:
        return 0, 0
    path = found_by_first(partial(find_checkpoint, args.load, args.ckpt_step), dist.group.WORLD)
    if path is None:
        if args.exit_on_missing_checkpoint:
            raise ConfigurationError(f"--load {args.load} holds no complete checkpoint; save one there first")
        console.print(f"no checkpoint in {args.load} yet: starting from scratch", highlight=False, soft_wrap=True)
        return 0, 0
    check_on_all_ranks(partial(see_checkpoint, args.load, path))
    iteration, consumed_samples, of_schedule, of_data = checkpointer.load(path)
    if iteration >= args.train_iters:
        raise ConfigurationError(f"--train-iters {args.train_iters} is reached already in {path}; raise it")
    console.print(f"resumed from {path}", highlight=False, soft_wrap=True)
    for what, others in (
        ("the learning rate goes by this command line's schedule, in steps of samples", of_schedule),
        ("the data go by this command line, and may be in another order than before", of_data),
    ):
        if others is not None:
            console.print(f"{what}: {others}", highlight=False, soft_wrap=True)
    return iteration, consumed_samples


def see_checkpoint(folder: str, path: Path) -> None:
    """Refuses a folder that this rank's node does not share with that of rank 0, which has found the checkpoint."""
    if not path.is_dir():
        raise ConfigurationError(f"--load {folder}: {path} is not there on all nodes: name a folder that they share")


def open_logs(args: argparse.Namespace, stack: ExitStack) -> Callable[[dict[str, Any], reports.Reports], None]:
    """Open the logs asked for, on rank 0. Returns the function that writes a record and our reports to them."""
    if dist.get_rank() != 0:
        return lambda record, ours: None
    step_log = stack.enter_context(StepLog(args.log_json)) if args.log_json else None
    board, losses = None, Losses(f"--tensorboard-dir {args.tensorboard_dir}")
    if args.tensorboard_dir:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigurationError(
                f"--tensorboard-dir {args.tensorboard_dir} needs the tensorboard package: pip install tensorboard"
            ) from None
        board = SummaryWriter(args.tensorboard_dir)
        stack.callback(losses.allowed()(board.close))

    def write(record: dict[str, Any], ours: reports.Reports) -> None:
        if step_log is not None:
            step_log.write(record | ours)
        if board is not None:
            with losses.allowed():
                for key, name in (("loss", "lm loss"), ("grad_norm", "grad-norm"), ("seconds", "iteration-time")):
                    if key in record:
                        board.add_scalar(name, record[key], record["iteration"])
                reports.add_scalars(ours, board, record["iteration"])

    return write


def announce(
    args: argparse.Namespace,
    layout: Layout,
    model: DistributedDataParallel,
    device: torch.device,
    num_nodes: int,
    console: Console,
) -> None:
    """One line that says what trains on what."""
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    console.print(
        f"{dist.get_world_size()} ranks ({device.type}) on {num_nodes} node{'s' * (num_nodes > 1)}:"
        f" {say_sizes(parallel_sizes(layout))};"
        f" {args.num_layers} layers, {args.num_experts} experts, top-{args.moe_router_topk}, {parameters:.1f} M"
        f" parameters on this rank; {'bf16' if args.bf16 else 'fp32'}; dispatcher {args.moe_token_dispatcher_type}",
        highlight=False,
        soft_wrap=True,
    )


def begin() -> tuple[argparse.Namespace, Options, Layout]:
    """Take the command line. Returns arguments and options that can work together."""
    args, options = parse_arguments(sys.argv[1:])
    options = launcher_options() or options
    use_host_backend()
    register(options, refuse_unread=True)
    return args, options, check_arguments(args, int(os.environ["WORLD_SIZE"]))


@record
def run_recorded(console: Console) -> int | LayerError:
    """Parse the command line and run it. torchelastic records what is raised, and torchrun prints the first of it.

    Returns the exit status, or the error with which this rank ends because another one has failed.
    """
    try:
        args, options, layout = start_alike(begin, lambda begun: facts_of(begun[1]))
        device = start_distributed(timedelta(minutes=args.distributed_timeout_minutes))
        run(args, options, layout, device, console)
    except ConfigurationError as error:
        say_together(error, PROGRAM)
        return 2
    except TrainingError as error:
        say_together(error, PROGRAM)
        return 1
    except RankError as error:
        raise LayerError(failure_board.explain(str(error), is_own=True)) from error
    except LayerError as error:
        first = failure_board.first_failure()
        if first is None or first.rank == dist.get_rank():
            raise
        return error
    all_let_go()
    dist.destroy_process_group()
    return 0


def main() -> int:
    """Run the command line; the exit status is 2 where it was refused and 1 where training failed."""
    # Without torchrun: one rank.
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_PORT", "0")
    sys.stdout, sys.stderr = (LossyStream(getattr(sys, name), name) for name in ("stdout", "stderr"))
    console = Console(quiet=os.environ["RANK"] != "0", markup=False)  # names of files may look like markup
    try:
        ended = run_recorded(console)
    except LayerError as error:
        ended = error
    if ended:
        sys.last_value = ended  # as Python has it of an error that nobody catches: `auto` asks
    if isinstance(ended, LayerError):
        print(f"{PROGRAM}: error: {ended}", file=sys.stderr, flush=True)
        return 1
    return ended or 0  # `record` swallows the exit of --help
