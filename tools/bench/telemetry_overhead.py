"""What --moe-opt-telemetry costs: steps of two equal models in the same ranks, one watched, turn by turn.

    torchrun --nproc-per-node 4 -m tools.bench.telemetry_overhead [--steps 200] [--dispatcher monta]

The model is the quickstart's (4 layers, hidden 128, 8 experts, top-2, sequences of 128), under EP over all ranks.
Prints the median over pairs of the ratio of a watched step to the one beside it, with its quartiles. With --own-time
it measures around every call that telemetry adds instead: the processor time of these calls over that of the watched
steps, of the rank where it is largest. Waiting for other ranks is not in it, so that it bounds the share of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

import megatron_moe_opt
from megatron_moe_opt.options import Options

TOKENS, VOCAB, HIDDEN, LAYERS = 128, 256, 128, 4
CALLS = ("preprocess", "dispatch", "combine", "postprocess")
HOOKS = ("_mark", "_begin_backward", "_end_backward", "_enter", "_leave", "_call")


def build(dispatcher: str) -> Any:
    """Builds a GPT and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=2 * HIDDEN,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
    )
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False, normalization="RMSNorm")
    return GPTModel(config, spec, VOCAB, TOKENS, position_embedding_type="rope")


def step(model: Any, number: int) -> tuple[float, float]:
    """Runs forward and backward of one micro-batch of 4 sequences.

    Returns:
        Seconds from a common start to the end of all ranks, and processor seconds of this one.
    """
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    tokens = torch.randint(0, VOCAB, (4, TOKENS + 1), generator=generator)
    positions = torch.arange(TOKENS).repeat(4, 1)
    model.zero_grad()
    dist.barrier()
    start, busy = time.perf_counter(), time.thread_time()
    model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
    busy = time.thread_time() - busy
    dist.barrier()
    return time.perf_counter() - start, busy


class OwnTime:
    """Processor seconds in the calls that telemetry adds, less those of what they wrap."""

    def __init__(self) -> None:
        from megatron_moe_opt.integration.observe import telemetry

        self.seconds, self._inside = 0.0, [0.0]
        for name in CALLS + HOOKS:
            setattr(telemetry._Stages, name, self._timed(getattr(telemetry._Stages, name)))
        watch = telemetry._Stages.__init__

        def init(stages: Any, *args: Any) -> None:
            watch(stages, *args)
            stages._stock = {name: self._wrapped(stock) for name, stock in stages._stock.items()}

        telemetry._Stages.__init__ = init

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any) -> Any:
            start, before = time.thread_time(), self._inside[0]
            result = method(*args)
            self.seconds += time.thread_time() - start - (self._inside[0] - before)
            return result

        return timed

    def _wrapped(self, stock: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            start = time.thread_time()
            result = stock(*args)
            self._inside[0] += time.thread_time() - start
            return result

        return wrapped


def main() -> None:
    """Runs it and prints on rank 0."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--interval", type=int, default=50, help="steps from one report to the next")
    parser.add_argument("--dispatcher", default="monta")
    parser.add_argument("--own-time", action="store_true", help="measure what observing takes, not its effect on steps")
    args = parser.parse_args()
    megatron_moe_opt.use_host_backend()
    from megatron.core import parallel_state

    megatron_moe_opt.register()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    from megatron_moe_opt.integration.observe import reports

    own = OwnTime() if args.own_time else None
    plain = build(args.dispatcher)
    megatron_moe_opt.register(Options(telemetry=True))
    watched = build(args.dispatcher)
    for number in range(10):
        step(plain, number), step(watched, number)
    reports.collect()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    reporting, busy, lines = 0.0, 0.0, []
    if own is not None:
        own.seconds = 0.0
    for number in range(args.steps):
        for is_watched in (False, True) if number % 2 else (True, False):
            took, computed = step(watched if is_watched else plain, number)
            seconds[is_watched].append(took)
            busy += computed if is_watched else 0.0
        if number % args.interval == args.interval - 1:
            start = time.perf_counter()
            lines = reports.lines(reports.collect())
            reporting += time.perf_counter() - start
    ratios = sorted(with_ / without for without, with_ in zip(seconds[False], seconds[True], strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    own_share = torch.tensor([own.seconds / busy if own else 0.0, reporting / sum(seconds[True])])
    dist.all_reduce(own_share, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(*lines, sep="\n")
        print(
            f"{args.dispatcher}: {args.steps} pairs of steps, median {1e3 * statistics.median(seconds[False]):.1f} ms; "
            f"watched over not watched: median {quartiles[1]:.4f}, quartiles {quartiles[0]:.4f} to {quartiles[2]:.4f}; "
            f"reports {own_share[1]:.3%} of the time, one in {args.interval} steps"
            + (f"; observing {own_share[0]:.3%} of a rank's processor time" if own else "")
        )
    dist.barrier()


if __name__ == "__main__":
    main()
