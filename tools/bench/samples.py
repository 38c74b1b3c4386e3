"""What moving samples saves on the routing of a trace, in bytes and in time.

torchrun --nproc-per-node 4 -m tools.bench.samples routing.npz --hidden 256
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console

from megatron_moe_opt import register
from megatron_moe_opt.cli.console import report_console, say, table_of
from megatron_moe_opt.cli.main import main
from megatron_moe_opt.cli.option_types import DType
from megatron_moe_opt.cli.ranks import begin, megatron_process_group
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings, torch_dtype
from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
from megatron_moe_opt.integration.measuring.timing import slowest, timed
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.output_file import check_output_file, write_text_whole
from megatron_moe_opt.planning.offline.expert_order import stock_devices
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.planning.traces.routing_replay import decided_share
from megatron_moe_opt.planning.traces.routing_trace import RoutingTrace, read_routing_trace
from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
from megatron_moe_opt.runtime.observed.traffic_rows import TrafficRow
from megatron_moe_opt.systems import system_names
from megatron_moe_opt.topology.nodes import NodeMap, discover_nodes
from megatron_moe_opt.variants import split_variant


@dataclass(frozen=True)
class SampleSettings:
    """What the benchmark was asked for."""

    trace: Path
    dispatchers: tuple[str, ...]
    hidden: int
    tokens: int | None
    dtype: str
    """Type of the tokens: fp32 or bf16."""
    steps: int
    warmup: int
    ffn_hidden: int | None = None
    """Middle size of experts, where layers are whole, with attention too; None: dispatch and combine alone."""
    profile: str | None = None
    """The cluster.json that `auto` plans by."""

    @property
    def all_dispatchers(self) -> tuple[str, ...]:
        """Returns all that run, the baseline first."""
        return tuple(dict.fromkeys((ALLTOALL, *self.dispatchers)))


@dataclass(frozen=True)
class SampleResult:
    """What one dispatcher took and sent, on all ranks together."""

    dispatcher: str
    seconds: tuple[float, ...]
    """Seconds of each round, on the slowest rank."""
    traffic: tuple[TrafficRow, ...]
    """What a round sends, mean of the rounds that were counted."""
    moves: dict[int, dict[str, float]]
    """netmoe's report by layer, of the rounds that were counted."""

    def megabytes(self, link: str) -> float:
        """Returns what all-to-alls send over a kind of link."""
        return sum(row.bytes for row in self.traffic if row.link == link and row.collective == "all_to_all") / 1e6


def bench_samples(settings: SampleSettings, output: Path | None) -> list[SampleResult]:
    """Runs on the current ranks; rank 0 prints the table and writes `output`.

    Raises:
        ConfigurationError: a trace that cannot be read or does not fit the ranks, an unknown dispatcher.
    """
    world = begin()
    check_output_file("--output", output)
    register()
    trace = read_routing_trace(settings.trace)
    check(settings, trace, world)
    with megatron_process_group() as device:
        results = run(settings, trace, device)
        decided = _decided_share(settings, trace, discover_nodes())
        if dist.get_rank() == 0:
            _print(settings, results, decided, report_console(160))
            if output is not None:
                write_text_whole(output, json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return results


def check(settings: SampleSettings, trace: RoutingTrace, world: int) -> None:
    """Refuses, with ConfigurationError, what cannot run on `world` ranks."""
    known = ALLTOALL, *system_names(), AUTO
    for variant in settings.dispatchers:
        if split_variant(variant, None)[0] not in known:
            raise ConfigurationError(f"--dispatchers {variant} is unknown: choose from {', '.join(known)}")
    if AUTO in settings.dispatchers and None in (settings.profile, settings.ffn_hidden):
        raise ConfigurationError(f"--dispatchers {AUTO} plans whole layers: give --profile and --ffn-hidden")
    for what, number in (("samples", trace.num_samples), ("experts", trace.num_experts)):
        if number % world:
            raise ConfigurationError(
                f"{settings.trace} has {number} {what}, which {world} ranks cannot share equally: start as many ranks "
                f"as divide {number}"
            )
    length = trace.experts.shape[3]
    if settings.tokens is not None and settings.tokens > length:
        raise ConfigurationError(f"--tokens {settings.tokens}: the samples of {settings.trace} have {length}")


def run(settings: SampleSettings, trace: RoutingTrace, device: torch.device) -> list[SampleResult]:
    """Builds the blocks, times them round by round, then counts. A collective call over the world."""
    from megatron_moe_opt.integration.measuring.under_test import settle
    from megatron_moe_opt.integration.observe import reports

    with parallel_layer(tp=1, ep=dist.get_world_size(), expert_tp=1, seed=1):
        blocks = {name: _Block(name, settings, trace, device) for name in settings.all_dispatchers}
        if AUTO in blocks:
            passes, auto = count(), blocks[AUTO].controller
            settle(auto, lambda: blocks[AUTO].round(next(passes)))
            blocks = {
                f"{AUTO}, {auto.layers.current}" if name == AUTO else name: block for name, block in blocks.items()
            }
        seconds: dict[str, list[float]] = {name: [] for name in blocks}
        for index in range(settings.warmup + settings.steps):
            for name, block in blocks.items():
                seconds[name].append(block.timed_round(index))
        reports.collect()  # what the timed rounds sent
        nodes, results = discover_nodes(), []
        for name, block in blocks.items():
            traffic = block.count_rounds(settings.warmup + settings.steps, settings.steps, nodes)
            of_slowest = slowest(seconds[name][settings.warmup :], device)
            moves = reports.collect().get("netmoe", {})
            results.append(SampleResult(name, tuple(of_slowest), traffic, moves))
        return results


class _Block:
    """The MoE layers of the trace under one dispatcher, ready to be run."""

    def __init__(self, dispatcher: str, settings: SampleSettings, trace: RoutingTrace, device: torch.device) -> None:
        from megatron_moe_opt.integration.auto.auto_layer import current_controller

        self.trace = trace
        self.batch = trace.num_samples // dist.get_world_size()
        self.tokens = settings.tokens or trace.experts.shape[3]
        self.device = device
        register(split_variant(dispatcher, settings.profile)[1])
        self.block = _transformer_block(_config(dispatcher, settings, trace), is_whole=settings.ffn_hidden is not None)
        self.controller = current_controller()
        """The controller that chooses the dispatchers under `auto`."""
        register()
        for index, layer in enumerate(self.block.layers):
            if settings.ffn_hidden is None:
                layer.mlp.experts = _Experts()
            layer.mlp.router.forward = _Router(self, index, layer)
        dtype = torch_dtype(settings.dtype)
        shape = (self.tokens, self.batch, settings.hidden)
        self.inputs, self.grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        self.index = 0
        """The number of the trace's pass that runs."""

    def round(self, index: int) -> None:
        """Runs a pass of the trace forward and backward. Experts that travel do so in every pass."""
        from megatron_moe_opt.integration.layer.moe_layer import forget_migrated_experts

        self.index = index % self.trace.num_passes
        self.block.zero_grad()
        for layer in self.block.layers:
            forget_migrated_experts(layer.mlp)
        self.block(self.inputs.clone().requires_grad_(), None).backward(self.grad)

    def timed_round(self, index: int) -> float:
        """Returns the seconds that a round takes this rank, from a common start."""
        dist.barrier()
        return timed(lambda: self.round(index), self.device)

    def count_rounds(self, first: int, rounds: int, nodes: NodeMap) -> tuple[TrafficRow, ...]:
        """Returns the mean of what all ranks send in a round."""
        with TrafficCounter(nodes) as counter:
            for index in range(first, first + rounds):
                self.round(index)
        return tuple(
            TrafficRow(row.collective, row.link, row.messages // rounds, row.bytes // rounds)
            for row in counter.reduce()
        )


def _transformer_block(config: Any, is_whole: bool) -> Any:
    """Returns as many transformer layers of norm, MoE layer and residual as the configuration has layers.

    Args:
        is_whole: with attention before it.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from megatron_moe_opt.integration.layer.moe_layer import moe_spec

    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm, mlp=moe_spec(config), mlp_bda=get_bias_dropout_add
    )
    if is_whole:
        of_gpt = get_gpt_layer_local_spec().submodules
        submodules = replace(
            submodules,
            input_layernorm=WrappedTorchNorm,
            self_attention=of_gpt.self_attention,
            self_attn_bda=get_bias_dropout_add,
        )
    layers = [ModuleSpec(module=TransformerLayer, submodules=submodules)] * config.num_layers
    return TransformerBlock(config, TransformerBlockSubmodules(layer_specs=layers), post_layer_norm=False).cuda()


def _samples_of(layer: Any) -> np.ndarray | None:
    """Returns the sample, named by its home position, at each position of a transformer layer that a pass has come to.

    None where all are at home: under other dispatchers too.
    """
    from megatron_moe_opt.integration.layer.netmoe_layer import placement_of

    placement = placement_of(layer)
    if placement is None:
        return None
    decided = placement.order.decided(placement)
    return placement.order.running.at if decided is None else decided.decision.result().before


class _Router:
    """Sends the tokens of the samples that are here to the experts of the trace."""

    def __init__(self, block: _Block, index: int, layer: Any) -> None:
        self.block, self.index, self.layer = block, index, layer

    def __call__(self, hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        block, trace = self.block, self.block.trace
        own = slice(dist.get_rank() * block.batch, (dist.get_rank() + 1) * block.batch)
        at = _samples_of(self.layer)
        experts = trace.experts[block.index, self.index][own if at is None else at[own], : block.tokens]
        chosen = torch.from_numpy(experts.astype("int64")).transpose(0, 1).flatten(0, 1).to(hidden.device)
        routing_map = torch.zeros(len(chosen), trace.num_experts, dtype=torch.bool, device=hidden.device)
        routing_map.scatter_(1, chosen, True)
        return (routing_map / chosen.size(1)).requires_grad_(), routing_map


class _Experts(torch.nn.Module):
    """Experts that return what they get."""

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the tokens; the probabilities get gradients of ones."""
        from megatron_moe_opt.integration.measuring.under_test import ReturnTokens

        return ReturnTokens.apply(tokens, probs), None


def _config(dispatcher: str, settings: SampleSettings, trace: RoutingTrace) -> Any:
    """Returns Megatron's configuration of all layers; those that are not whole have no experts of a size."""
    from megatron_moe_opt.integration.measuring.under_test import layer_config

    _, layers, _, length, topk = trace.experts.shape
    ffn, heads = settings.ffn_hidden or 1, max(1, settings.hidden // 64)
    layer = LayerSettings(
        (dispatcher,), length, settings.hidden, ffn, trace.num_experts, topk, ep=dist.get_world_size(),
        dtype=settings.dtype,
    )  # fmt: skip
    changes = {"num_layers": layers, "hidden_dropout": 0.0, "attention_dropout": 0.0, "num_attention_heads": heads}
    changes |= {"moe_enable_routing_replay": False}
    return layer_config(layer, dispatcher, **changes)


def _decided_share(settings: SampleSettings, trace: RoutingTrace, nodes: NodeMap) -> float:
    """Returns the part of stock's counted bytes between nodes that placements decide (routing_replay.decided_share)."""
    first = settings.warmup + settings.steps
    passes = np.arange(first, first + settings.steps) % trace.num_passes
    counts = replace(trace, experts=trace.experts[:, :, :, : settings.tokens]).counts()
    devices = stock_devices(trace.experts.shape[1], trace.num_experts, len(nodes.node_of))
    return decided_share(counts[passes], devices, np.array(nodes.node_of))


def _print(settings: SampleSettings, results: list[SampleResult], decided: float, console: Console) -> None:
    what = "Dispatch and combine of all MoE layers" if settings.ffn_hidden is None else "All layers"
    table = table_of(
        f"{what}, forward and backward",
        ("dispatcher", "ms", "quartiles", "times faster", "inter-node MB", "change", "decided", "intra-node MB"),
        caption="decided: change of what placements decide, "
        f"{decided:.1%} of stock's bytes between nodes: all but the first layer's dispatch and the last one's combine",
    )
    stock = results[0]
    for result in results:
        ms = sorted(second * 1e3 for second in result.seconds)
        faster = [a / b for a, b in zip(stock.seconds, result.seconds, strict=True)]
        inter, before = result.megabytes("inter-node"), stock.megabytes("inter-node")
        change = 100 * (inter / before - 1) if before else 0.0
        table.add_row(
            result.dispatcher, f"{statistics.median(ms):.1f}", f"{ms[len(ms) // 4]:.1f}-{ms[3 * len(ms) // 4]:.1f}",
            f"{statistics.median(faster):.2f}", f"{inter:.1f}", f"{change:+.1f} %" if before else "",
            f"{change / decided:+.1f} %" if decided else "", f"{result.megabytes('intra-node'):.1f}",
        )  # fmt: skip
    console.print(table)
    from megatron_moe_opt.integration.observe.netmoe_report import lines

    for result in results:
        for line in lines(result.moves):
            say(console, line)


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def samples(
    trace: Annotated[Path, typer.Argument(help="A routing trace, recorded or from moe-opt trace generate.")],
    dispatchers: Annotated[
        str, typer.Option(help="Dispatchers and variants, separated by commas; alltoall always runs.")
    ] = "netmoe",
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 768,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each sample; the first ones.", show_default="all")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Tokens.")] = DType.fp32,
    steps: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed rounds before them; netmoe learns in them.")] = 10,
    ffn_hidden: Annotated[
        int | None,
        typer.Option(min=1, help="Of experts: layers are whole, with attention too.", show_default="rows come back"),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="cluster.json that auto plans by.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything, every round's time too.")
    ] = None,
) -> None:
    """Dispatch and combine of all MoE layers of a routing trace, one after another, forward and backward.

    The trace's samples are dealt out to the ranks in their order. Without --ffn-hidden experts return what they get,
    and there is no attention.
    """
    names = tuple(name.strip() for name in dispatchers.split(","))
    given = None if profile is None else str(profile)
    bench_samples(SampleSettings(trace, names, hidden, tokens, dtype.value, steps, warmup, ffn_hidden, given), output)


if __name__ == "__main__":
    main(app, "tools.bench.samples")
