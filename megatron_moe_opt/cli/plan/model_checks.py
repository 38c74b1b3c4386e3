"""What `moe-opt simulate` and `moe-opt plan` refuse of a model in a layout."""

from __future__ import annotations

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.model import ModelShape


def check_model(model: ModelShape, *, tp: int, pp: int, ep: int, expert_tp: int) -> None:
    """Refuses sizes that do not divide each other.

    Raises:
        ConfigurationError: the two flags and their values.
    """
    for name, size, by, divisor in (
        ("--hidden", model.hidden, "--heads", 1 if model.head_size else model.heads),
        ("--heads", model.heads, "--tp", tp),
        ("--heads", model.heads, "--kv-heads", model.kv_heads or model.heads),
        ("--experts", model.experts, "--ep", ep),
        ("--ffn-hidden", model.ffn, "--expert-tp", expert_tp),
        ("--layers", model.layers, "--pp", pp),
    ):
        if size % divisor:
            raise ConfigurationError(f"{by} {divisor} does not divide {name} {size}: choose a divisor")
    if model.topk > model.experts:
        raise ConfigurationError(f"--topk {model.topk} is more than --experts {model.experts}: choose at most that")
