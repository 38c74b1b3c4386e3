"""What a step of a layer cannot be faster than: links, experts, and the cores that do all of it."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from typing import Any

from megatron_moe_opt.cli.bench.link_rates import LinkRates, wire_limit
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.planning.costs.bus_bandwidth import EVERY_RANK, INSIDE, best_rate
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.schedules.schedule import Kind, Lane

STEPS_ALONE, WARM_STEPS = 8, 2


def alone_and_processors(settings: LayerSettings, variant: str, device: Any) -> tuple[float, float]:
    """Returns the seconds of a step of a variant, timed without others in turns, and those that the cores of its ranks
    are busy with it: medians of steps, of the slowest rank and the busiest cores. A collective call over the world.
    """
    import torch.distributed as dist

    from megatron_moe_opt.integration.measuring.timing import timed
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test
    from megatron_moe_opt.topology.agreement import known_to_all

    layer = layer_under_test(settings, variant, device)
    cores, seconds, busy = tuple(sorted(os.sched_getaffinity(0))), [], []
    for step in range(WARM_STEPS + STEPS_ALONE):
        layer.clear_grads()
        dist.barrier()
        before = time.process_time()
        took = timed(layer.step, device)
        of_ranks = known_to_all((took, cores, time.process_time() - before))
        of_cores: Counter[tuple[int, ...]] = Counter()
        for _, theirs, spent in of_ranks:
            of_cores[theirs] += spent / len(theirs)
        if step >= WARM_STEPS:
            seconds.append(max(took for took, *_ in of_ranks))
            busy.append(max(of_cores.values()))
    return statistics.median(seconds), statistics.median(busy)


def seconds_of_experts(settings: LayerSettings, variant: str, device: Any) -> float:
    """Returns the seconds of the experts' ops, forward and backward, in a step under a variant: the median of steps, of
    the slowest rank. In one partition nothing else runs meanwhile. A collective call over the world.
    """
    from megatron_moe_opt.integration.measuring.timing import slowest
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test

    layer = layer_under_test(settings, variant, device)
    steps = (layer.observed_step()[0] for _ in range(WARM_STEPS + STEPS_ALONE))
    busy = [sum(timeline.busy(Lane.COMPUTE) for timeline in timelines) for timelines in steps]
    return statistics.median(slowest(busy[WARM_STEPS:], device))


def seconds_of_links(settings: LayerSettings, variant: str, cluster: Cluster, device: Any) -> tuple[float, float]:
    """Returns the seconds that the busiest node's bytes of a step under a variant take between nodes, and the same of
    bytes inside nodes: as they are counted, at the rates that all ranks reach at once. A collective call over the
    world.
    """
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test
    from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
    from megatron_moe_opt.topology.agreement import known_to_all
    from megatron_moe_opt.topology.nodes import discover_nodes

    nodes = discover_nodes()
    layer = layer_under_test(settings, variant, device)
    layer.clear_grads()
    with TrafficCounter(nodes) as counter:
        layer.step()
    sent = known_to_all(counter.bytes_to())

    def rate(link: str) -> float | None:
        points = cluster.curves.get((Kind.SEND_RECEIVE, link))
        return None if points is None else best_rate(points) * len(nodes.ranks_of(0))  # of a rank, and of its node

    of_links = LinkRates(rate(EVERY_RANK), None), LinkRates(None, rate(INSIDE))
    limits = (wire_limit(sent, nodes, rates) for rates in of_links)
    between, inside = (0.0 if limit is None else limit.seconds for limit in limits)
    return between, inside
