"""DeepSpeed-MoE's schedule, the baseline of the papers: for benchmarks and tests, never planned."""

from __future__ import annotations

from typing import Any

from megatron_moe_opt.systems.system import FLAG, System


def _build(groups: Any, options: Any, config: Any) -> Any:
    from megatron_moe_opt.dispatchers.deepspeed import DeepSpeedDispatcher

    return DeepSpeedDispatcher(groups)


DEEPSPEED = System(name="deepspeed", build=_build, copies_flag=lambda options: f"{FLAG} deepspeed")
