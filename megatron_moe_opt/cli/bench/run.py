"""`moe-opt bench`: one MoE layer, forward and backward, under several dispatchers."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import megatron_moe_opt
from megatron_moe_opt.cli.bench.balance import routing_balance
from megatron_moe_opt.cli.bench.link_rates import LinkRates, WireLimit, wire_limit
from megatron_moe_opt.cli.bench.links import measure_links
from megatron_moe_opt.cli.bench.measured_layer import DispatcherResult, LayerReport, print_report
from megatron_moe_opt.cli.bench.peak_memory import peak_memory_growth
from megatron_moe_opt.cli.bench.predicted import Predicted, predict_layer
from megatron_moe_opt.cli.bench.recorded_step import record_step
from megatron_moe_opt.cli.bench.saved_report import write_report
from megatron_moe_opt.cli.console import progress, report_console, say_written
from megatron_moe_opt.cli.ranks import begin, megatron_process_group, world_size
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.layer_settings import STOCK, LayerSettings, torch_dtype
from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
from megatron_moe_opt.integration.measuring.provenance import machine
from megatron_moe_opt.integration.measuring.timing import slowest, timed
from megatron_moe_opt.integration.measuring.workloads import check_routing
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.output_file import check_output_file
from megatron_moe_opt.planning.costs.cluster import OUR_FLAGS, Cluster
from megatron_moe_opt.row_format import WireFormat
from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
from megatron_moe_opt.runtime.observed.traffic_rows import TrafficRow
from megatron_moe_opt.systems import dispatcher_names
from megatron_moe_opt.topology.agreement import known_to_all
from megatron_moe_opt.topology.nodes import NodeMap, discover_nodes
from megatron_moe_opt.variants import FLEX, split_wire
from megatron_moe_opt.versions import software

if TYPE_CHECKING:
    from megatron_moe_opt.integration.measuring.under_test import LayerUnderTest

# Where sums are taken in another order than stock's: norm of the difference over the norm. The router's gradient is a
# sum over all tokens of a rank, here many: in fp32 its rounding alone passes the 1e-6 that the tests hold.
TOLERANCE = {"fp32": 5e-6, "bf16": 1e-2}
LOSSY = {WireFormat.SAME: 0.0, WireFormat.BF16: 2e-2, WireFormat.FP8: 0.1, WireFormat.MXFP8: 0.1}
"""The same tolerance where rows are rounded on the wire, which happens several times on the way to a gradient."""
RECORDED_STEPS = 3  # of which one is kept: that with the median time


def bench_layer(settings: LayerSettings, json_file: Path | None) -> LayerReport:
    """Runs the benchmark on the current ranks; rank 0 prints the table and writes `json_file`.

    Args:
        json_file: for `moe-opt report`; with it, steps are recorded too.

    Raises:
        ConfigurationError: settings that cannot work, before anything runs.
        RuntimeError: a dispatcher's results differ from the baseline's by more than the numerics contract allows.
    """
    begin()
    check_output_file("--output", json_file, others=[("--profile", settings.profile)])
    chosen_by_it = any(split_wire(name)[0].rpartition(":")[2] == AUTO for name in settings.dispatchers)
    if settings.profile is not None and not chosen_by_it and json_file is None:
        raise ConfigurationError(
            f"--profile {settings.profile}: nothing reads it; add {AUTO}, or monta:{AUTO} or the like, to "
            "--dispatchers, or -o for a file with predictions, or drop it"
        )
    cluster = check(settings)
    if settings.dtype == "fp32":
        # With Transformer Engine Megatron's router is a product in TF32, which rounds more than dispatchers may differ.
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    with megatron_process_group() as device:
        report = run(settings, device, cluster, record=json_file is not None)
        if dist.get_rank() == 0:
            console = report_console(200)
            print_report(report, console)
            if json_file is not None:
                write_report(json_file, report)
                say_written(json_file, console)
    return report


def check(settings: LayerSettings) -> Cluster | None:
    """Refuses, with ConfigurationError, all that can be refused before process groups are made. Returns the profile."""
    megatron_moe_opt.register()
    from megatron_moe_opt.integration.flex_backends import DEFAULT, check_flex

    world = world_size()
    settings.check((*STOCK, *dispatcher_names()), world)
    for variant in settings.dispatchers:
        name, _, backend = variant.partition(":")
        if name == FLEX:
            check_flex(variant, backend or DEFAULT, torch_dtype(settings.dtype))
    check_routing(settings.routing, experts=settings.experts, topk=settings.topk)
    if settings.profile is None:
        return None
    cluster = Cluster.load(settings.profile)
    cluster.check_groups(
        settings.profile,
        OUR_FLAGS,
        ep=settings.layout(world).ep,
        expert_tp=settings.expert_tp,
        tp=settings.tp if settings.replicated else None,
    )
    return cluster


def run(
    settings: LayerSettings, device: torch.device, cluster: Cluster | None = None, record: bool = False
) -> LayerReport:
    """Builds the layers, compares their results, counts and times them. A collective call over the world.

    Args:
        cluster: to predict the dispatchers' times by.
        record: then run RECORDED_STEPS more of each, whose ops are timed, and keep the median one.
    """
    from megatron_moe_opt.integration.measuring.under_test import fused, layers_under_test

    asked, settings = settings, settings.on(dist.get_world_size())
    with parallel_layer(settings.tp, settings.ep, settings.expert_tp, settings.seed):
        layers = layers_under_test(settings, device)
        nodes = discover_nodes()
        rates = measure_links(nodes, device)
        differences = _differences(layers, settings.baseline, TOLERANCE[settings.dtype])
        costs = {name: _count_step(layer, nodes, rates, device) for name, layer in layers.items()}
        seconds = time_rounds(layers, settings, device)
        recorded = (
            {name: record_step(layer, RECORDED_STEPS, device, whole=True) for name, layer in layers.items()}
            if record
            else {}
        )
        balance = routing_balance(settings, device)
    results = tuple(
        DispatcherResult(
            name,
            tuple(seconds[name]),
            tuple(ours / stock for ours, stock in zip(seconds[name], seconds[settings.baseline], strict=True)),
            *differences[name],
            *costs[name],
        )  # fmt: skip
        for name in layers
    )
    environment = _environment(settings.ep, device, fused(torch_dtype(settings.dtype)))
    predicted = Predicted() if cluster is None else predict_layer(settings, balance, nodes.node_of, cluster)
    return LayerReport(asked, environment, nodes, rates, results, balance, predicted, recorded)


def _differences(layers: dict[str, LayerUnderTest], baseline: str, tolerance: float) -> dict[str, tuple[float, float]]:
    """Returns the (output, worst gradient) difference of each dispatcher from the baseline; refuses more than
    `tolerance`, or than formats of the wire explain.
    """
    stock_output, stock_grads = layers[baseline].results()
    differences = {}
    for name, layer in layers.items():
        output, grads = layer.results()
        of_output = _relative_difference(output, stock_output)
        of_each = [_relative_difference(*pair) for pair in zip(grads, stock_grads, strict=True)]
        of_grads = float(np.max(of_each))  # NaN where one of them is, unlike max's
        _, wire = split_wire(name)
        most = tolerance if wire is None else max(tolerance, LOSSY[wire.dispatch], LOSSY[wire.combine])
        if not (of_output <= most and of_grads <= most):  # NaN is not
            raise RuntimeError(
                f"{name} does not compute what {baseline} computes: output differs by {of_output:.1e}, gradients by "
                f"{of_grads:.1e} (norm of the difference over the norm; at most {most:.0e} is rounding)"
            )
        differences[name] = (of_output, of_grads)
    return differences


def _relative_difference(ours: torch.Tensor, stock: torch.Tensor) -> float:
    """Returns the norm of the difference over the norm, of the tensor whose pieces the ranks hold."""
    squares = torch.stack([(ours.double() - stock.double()).square().sum(), stock.double().square().sum()])
    dist.all_reduce(squares)
    difference, norm = squares.sqrt().tolist()
    return difference / norm if norm else difference


def _count_step(
    layer: LayerUnderTest, nodes: NodeMap, rates: LinkRates, device: torch.device
) -> tuple[tuple[TrafficRow, ...], WireLimit | None, int | None]:
    """Returns traffic, wire limit and peak memory of one untimed step."""
    layer.clear_grads()
    with TrafficCounter(nodes) as counter:
        memory = peak_memory_growth(layer.step, device)
    gathered = known_to_all((counter.bytes_to(), memory))
    sent = [bytes_to for bytes_to, _ in gathered]
    memories = [memory for _, memory in gathered]
    peak = None if None in memories else max(memories)
    return counter.reduce(), wire_limit(sent, nodes, rates), peak


def time_rounds(
    layers: dict[str, LayerUnderTest], settings: LayerSettings, device: torch.device
) -> dict[str, list[float]]:
    """Returns the seconds of every timed round on the slowest rank. Rounds interleave the dispatchers: A A B B C C A A
    B B C C.

    The second step of each pair is timed: in training a dispatcher finds memory and links as it left them itself.
    """
    rounds = settings.warmup + settings.steps
    seconds = torch.zeros(len(layers), rounds, dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        with progress("rounds", dist.get_rank() == 0) as tell:
            for index in range(rounds):
                tell(index, rounds, "")
                for row, layer in enumerate(layers.values()):
                    for _ in range(2):
                        layer.clear_grads()
                        dist.barrier()
                        seconds[row, index] = timed(layer.step, device)
    finally:
        gc.enable()
    return dict(zip(layers, slowest(seconds[:, settings.warmup :], device), strict=True))


def _environment(ep: int, device: torch.device, with_fused: Mapping[str, bool]) -> dict[str, Any]:
    of_run = {"world size": dist.get_world_size(), "ep": ep, **with_fused}
    of_machine = machine(device)
    started = {"date": datetime.now(timezone.utc).isoformat(" ", "seconds"), "host": of_machine.pop("name")}
    return started | software() | of_machine | of_run
