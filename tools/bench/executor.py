"""What the executor itself costs, in ops that do nothing.

python -m tools.bench.executor [--device cuda] [--repeats 30]
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer

from megatron_moe_opt.cli.console import report_console, table_of
from megatron_moe_opt.cli.main import main
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from tools.bench.devices import Device, check_device

OPS = 120
LANES = (Lane.INTER, Lane.INTRA, Lane.COPY)


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def bench_executor(
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.cpu,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each chain.")] = 30,
) -> None:
    """Microseconds an op of chains that go round 1, 2 and 3 lanes, every op waiting for the one before it."""
    check_device(device)
    title = f"Empty ops on {device.value}, each waiting for the one before"
    table = table_of(title, ("lanes", "median us an op", "least-largest"), names=0)
    for num_lanes in range(1, len(LANES) + 1):
        ops = tuple(
            Op(Kind.COPY, LANES[index % num_lanes], index, waits_for=(index - 1,) if index else ())
            for index in range(OPS)
        )
        chain, nothing = Schedule("chain", ops), [Steps()] * OPS
        seconds = []
        for _ in range(repeats + 1):  # the first starts the lanes' threads
            begin = time.perf_counter()
            executor(device.value).run(chain, nothing)
            if device is Device.cuda:
                torch.cuda.synchronize()
            seconds.append((time.perf_counter() - begin) / OPS * 1e6)
        times = seconds[1:]
        table.add_row(str(num_lanes), f"{statistics.median(times):.1f}", f"{min(times):.1f}-{max(times):.1f}")
    report_console().print(table)


if __name__ == "__main__":
    main(app, "tools.bench.executor")
