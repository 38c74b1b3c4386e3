"""The command line of pretrain_moe_gpt.py: Megatron's argument names, and the checks made before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from step_log import read_steps

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import Options, options_help, split_options
from megatron_moe_opt.output_file import check_output_file, check_output_folder
from megatron_moe_opt.systems import dispatcher_names
from megatron_moe_opt.topology.layouts import Layout

PROGRAM = "pretrain_moe_gpt"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see --help for the arguments")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Pretrain a Mixture-of-Experts GPT with Megatron-Core on CPU or GPU, started by torchrun.",
        epilog=options_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    model = parser.add_argument_group("model (rotary positions, RMSNorm, SwiGLU, no biases, no dropout)")
    model.add_argument("--num-layers", type=int, required=True)
    model.add_argument("--hidden-size", type=int, required=True)
    model.add_argument("--ffn-hidden-size", type=int, help="default: 4 x hidden size")
    model.add_argument("--num-attention-heads", type=int, required=True)
    model.add_argument("--seq-length", type=int, required=True)
    model.add_argument(
        "--vocab-size", type=int, default=256, help="tokens without end-of-document, whose id is this number"
    )
    model.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    model.add_argument("--init-method-std", type=float, default=0.02)

    moe = parser.add_argument_group("mixture of experts")
    moe.add_argument("--num-experts", type=int, required=True)
    moe.add_argument("--moe-layer-freq", type=int, default=1, help="experts in one layer of so many, from the first on")
    moe.add_argument("--moe-router-topk", type=int, default=2)
    moe.add_argument("--moe-ffn-hidden-size", type=int, help="default: --ffn-hidden-size")
    moe.add_argument("--moe-shared-expert-intermediate-size", type=int)
    moe.add_argument("--moe-aux-loss-coeff", type=float, default=0.0)
    moe.add_argument("--moe-grouped-gemm", action="store_true", help="one grouped GEMM for all local experts (GPU)")
    moe.add_argument("--moe-token-dispatcher-type", default="allgather")

    parallel = parser.add_argument_group("parallelism")
    parallel.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parallel.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parallel.add_argument("--context-parallel-size", type=int, default=1)
    parallel.add_argument("--expert-model-parallel-size", type=int, default=1)
    parallel.add_argument("--expert-tensor-parallel-size", type=int, help="default: the tensor-parallel size")
    parallel.add_argument("--sequence-parallel", action="store_true")
    parallel.add_argument("--use-distributed-optimizer", action="store_true")
    parallel.add_argument("--distributed-timeout-minutes", type=float, default=10.0)

    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch-size", type=int, required=True)
    training.add_argument("--global-batch-size", type=int, help="default: micro batch x data-parallel size")
    training.add_argument("--train-iters", type=int, required=True)
    training.add_argument("--exit-interval", type=int, help="stop after the iteration divisible by this number")
    training.add_argument("--lr", type=float, required=True)
    training.add_argument("--min-lr", type=float, default=0.0)
    training.add_argument("--lr-decay-style", choices=("constant", "linear", "cosine"), default="linear")
    training.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    training.add_argument("--lr-warmup-iters", type=int, default=0)
    training.add_argument("--weight-decay", type=float, default=0.01)
    training.add_argument("--clip-grad", type=float, default=1.0)
    training.add_argument("--adam-beta1", type=float, default=0.9)
    training.add_argument("--adam-beta2", type=float, default=0.999)
    training.add_argument("--bf16", action="store_true")
    training.add_argument("--seed", type=int, default=1234)

    data = parser.add_argument_group("data")
    data.add_argument(
        "--data-path",
        required=True,
        nargs="+",
        help="prefix of a Megatron dataset: PREFIX.bin and PREFIX.idx; or several to mix, WEIGHT PREFIX WEIGHT PREFIX:"
        " every sequence is of one of them",
    )
    data.add_argument("--split", default="99,1,0", help="training, validation and test parts")
    data.add_argument(
        "--data-cache-path",
        help="folder for the sample indices, which are read with pickle: one that you trust and all nodes share;"
        " default: below $XDG_CACHE_HOME or ~/.cache",
    )
    data.add_argument("--eval-iters", type=int, default=0, help="validation batches after training; 0 for none")

    output = parser.add_argument_group("checkpoints and logs")
    output.add_argument("--save", help="folder for checkpoints, one also after the last iteration")
    output.add_argument("--save-interval", type=int)
    output.add_argument("--load", help="folder to resume from; starts from scratch while it holds no checkpoint")
    output.add_argument("--ckpt-step", type=int, help="iteration to load; default: the latest complete one")
    output.add_argument("--exit-on-missing-checkpoint", action="store_true")
    output.add_argument("--log-interval", type=int, default=1)
    output.add_argument("--log-json", help="file that gets one JSON line for every logged iteration")
    output.add_argument("--compare-with", help="--log-json of another run, whose losses are shown beside this one's")
    output.add_argument("--tensorboard-dir")
    return parser


def parse_arguments(command_line: Sequence[str]) -> tuple[argparse.Namespace, Options]:
    """Read the command line: Megatron's arguments and our own `--moe-opt-*` ones.

    Raises ConfigurationError where an argument is unknown, missing or of the wrong kind.
    """
    options, remaining = split_options(command_line)
    args = _build_parser().parse_args(remaining)
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    args.blend = _blend(args.data_path)
    args.others = read_steps(args.compare_with) if args.compare_with else {}
    return args, options


def _blend(data_path: list[str]) -> list[tuple[float, str]]:
    """Weight and prefix of each dataset, as Megatron reads --data-path."""
    if len(data_path) == 1:
        return [(1.0, data_path[0])]
    try:
        blend = [(float(weight), prefix) for weight, prefix in zip(data_path[::2], data_path[1::2], strict=True)]
    except ValueError:
        blend = []
    if not all(0 < weight < float("inf") for weight, _ in blend) or not blend:
        raise ConfigurationError(
            f"--data-path {' '.join(data_path)} must be one prefix, or a weight above 0 before each of several, such as"
            " 1 data/prose 1 data/code"
        )
    return blend


def check_arguments(args: argparse.Namespace, world_size: int) -> Layout:
    """Check what can be checked without data or a model, and settle the default of the global batch size.

    Args:
        args: the parsed command line.
        world_size: number of ranks started.

    Raises:
        ConfigurationError: one sentence on the first thing that cannot work.
    """
    _check_positive(args)
    _check_model(args)
    layout = _check_layout(args, world_size)
    _check_batch(args, layout)
    _check_output(args)
    return layout


def _check_positive(args: argparse.Namespace) -> None:
    names = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads seq_length vocab_size num_experts"
        " moe_layer_freq moe_router_topk moe_ffn_hidden_size tensor_model_parallel_size pipeline_model_parallel_size"
        " context_parallel_size expert_model_parallel_size expert_tensor_parallel_size"
        " distributed_timeout_minutes micro_batch_size train_iters lr log_interval make_vocab_size_divisible_by"
    )
    optional = "global_batch_size save_interval exit_interval moe_shared_expert_intermediate_size"
    for name in f"{names} {optional}".split():
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"{_flag(name)} {value} must be more than 0")
    for name in ("eval_iters", "min_lr", "weight_decay", "lr_warmup_iters"):
        if (value := getattr(args, name)) < 0:
            raise ConfigurationError(f"{_flag(name)} {value} must be 0 or more")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_model(args: argparse.Namespace) -> None:
    tp = args.tensor_model_parallel_size
    _check_divisible("--hidden-size", args.hidden_size, "--num-attention-heads", args.num_attention_heads)
    _check_divisible("--num-attention-heads", args.num_attention_heads, "--tensor-model-parallel-size", tp)
    _check_divisible(
        "--moe-ffn-hidden-size",
        args.moe_ffn_hidden_size,
        "--expert-tensor-parallel-size",
        args.expert_tensor_parallel_size,
    )
    _check_divisible(
        "--num-layers", args.num_layers, "--pipeline-model-parallel-size", args.pipeline_model_parallel_size
    )
    of_stage = args.num_layers // args.pipeline_model_parallel_size
    if of_stage < min(args.num_layers, args.moe_layer_freq):  # Megatron could not save PyTorch's Adam of one
        raise ConfigurationError(
            f"--moe-layer-freq {args.moe_layer_freq} leaves a pipeline stage of {of_stage} layer(s)"
            " without experts: lower it or --pipeline-model-parallel-size"
        )
    _check_divisible("--num-experts", args.num_experts, "--expert-model-parallel-size", args.expert_model_parallel_size)
    if args.moe_router_topk > args.num_experts:
        raise ConfigurationError(
            f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_experts};"
            " a token can go to each expert once"
        )
    if tp > 1 and not args.sequence_parallel and args.moe_token_dispatcher_type not in dispatcher_names():
        raise ConfigurationError(
            f"--tensor-model-parallel-size {tp} with experts needs sequence parallelism under"
            f" --moe-token-dispatcher-type {args.moe_token_dispatcher_type}; add --sequence-parallel"
        )
    if args.sequence_parallel and tp == 1:
        raise ConfigurationError(
            "--sequence-parallel splits tokens over the tensor-parallel ranks, but --tensor-model-parallel-size"
            " is 1; leave the flag out or raise the size"
        )


def _check_divisible(flag: str, value: int, divisor_flag: str, divisor: int) -> None:
    if value % divisor:
        raise ConfigurationError(f"{flag} {value} is not divisible by {divisor_flag} {divisor}; change one of the two")


def _check_layout(args: argparse.Namespace, world_size: int) -> Layout:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep, etp = args.context_parallel_size, args.expert_model_parallel_size, args.expert_tensor_parallel_size
    for ranks_needed, product in ((tp * pp * cp, "TP x PP x CP"), (etp * ep * pp, "expert-TP x EP x PP")):
        if world_size < ranks_needed:
            raise ConfigurationError(
                f"{product} needs at least {ranks_needed} ranks, but {world_size} started; start"
                f" torchrun --nproc-per-node {ranks_needed} or lower the parallel sizes"
            )
        if world_size % ranks_needed:
            raise ConfigurationError(
                f"{world_size} ranks cannot be shared out in groups of {ranks_needed} ({product}); start a"
                f" multiple of {ranks_needed} ranks or change the parallel sizes"
            )
    return Layout(world_size, tp, cp, ep, etp, pp)


def _check_batch(args: argparse.Namespace, layout: Layout) -> None:
    if not layout.cuts(args.seq_length):
        raise ConfigurationError(
            f"--seq-length {args.seq_length} must be divisible by {layout.least_sequence}: the sequence is cut for"
            f" --context-parallel-size {layout.cp} and --tensor-model-parallel-size {layout.tp}"
        )
    samples = args.micro_batch_size * layout.dp
    args.global_batch_size = args.global_batch_size or samples
    if args.global_batch_size % samples:
        raise ConfigurationError(
            f"--global-batch-size {args.global_batch_size} is not divisible by {samples}:"
            f" --micro-batch-size {args.micro_batch_size} x {layout.dp} data-parallel ranks"
        )


def _check_output(args: argparse.Namespace) -> None:
    if args.save_interval and not args.save:
        raise ConfigurationError(f"--save-interval {args.save_interval} needs a folder to save in; add --save DIR")
    for flag, given in (
        (f"--ckpt-step {args.ckpt_step}", args.ckpt_step is not None),
        ("--exit-on-missing-checkpoint", args.exit_on_missing_checkpoint),
    ):
        if given and not args.load:
            raise ConfigurationError(f"{flag} needs a folder to load from; add --load DIR")
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise ConfigurationError(
            f"--lr-warmup-iters {args.lr_warmup_iters} must be less than the {args.lr_decay_iters} iterations"
            " of the learning-rate schedule"
        )
    if args.min_lr > args.lr:
        raise ConfigurationError(f"--min-lr {args.min_lr} is more than --lr {args.lr}; lower it")


def check_folders(args: argparse.Namespace) -> None:
    """Make the folders that a run writes to, and see that it can: not after hours, at the first checkpoint.

    Raises ConfigurationError, which names the flag, where it cannot.
    """
    check_output_folder("--save", args.save)
    check_output_file("--log-json", args.log_json, make_folder=True)
    check_output_folder("--tensorboard-dir", args.tensorboard_dir)
