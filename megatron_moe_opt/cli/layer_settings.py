"""What `moe-opt bench layer` was asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_moe_opt.errors import ConfigurationError

BASELINE = "alltoall"


@dataclass(frozen=True)
class LayerSettings:
    """The options of `moe-opt bench layer`; sizes of one rank where it matters."""

    dispatchers: tuple[str, ...]
    """BASELINE first, whatever the order asked for, and added where it was not."""
    tokens: int
    hidden: int
    ffn_hidden: int
    experts: int
    topk: int
    tp: int
    ep: int | None
    """None: as many ranks as expert_tp leaves."""
    expert_tp: int
    dtype: str
    """fp32 or bf16."""
    routing: str
    capacity_factor: float | None
    pad_to_capacity: bool
    steps: int
    warmup: int
    seed: int

    def __post_init__(self) -> None:
        ordered = dict.fromkeys((BASELINE, *self.dispatchers))  # without repetitions
        object.__setattr__(self, "dispatchers", tuple(ordered))

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch's."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    def ep_size(self, world: int) -> int:
        """Expert parallelism on `world` ranks."""
        return self.ep or max(1, world // self.expert_tp)

    def check(self, known_dispatchers: tuple[str, ...], world: int) -> None:
        """Refuses what cannot run on `world` ranks: ConfigurationError with the option, its value and the way out."""
        for name in self.dispatchers:
            if name not in known_dispatchers:
                raise ConfigurationError(f"--dispatchers {name} is unknown: choose from {', '.join(known_dispatchers)}")
        if world % self.tp:
            raise ConfigurationError(f"--tp {self.tp} does not divide the {world} ranks of this run: choose a divisor")
        ep = self.ep_size(world)
        if world % (ep * self.expert_tp):
            raise ConfigurationError(
                f"--ep {ep} x --expert-tp {self.expert_tp} = {ep * self.expert_tp} does not divide the {world} ranks "
                "of this run: choose sizes whose product does"
            )
        if self.experts % ep:
            raise ConfigurationError(
                f"--ep {ep} does not divide --experts {self.experts}: choose a divisor of {self.experts}"
            )
        if self.topk > self.experts:
            raise ConfigurationError(f"--topk {self.topk} is more than --experts {self.experts}: choose at most that")
        if self.ffn_hidden % self.expert_tp:
            raise ConfigurationError(
                f"--expert-tp {self.expert_tp} does not divide --ffn-hidden {self.ffn_hidden}: choose a divisor"
            )
        if self.pad_to_capacity and self.capacity_factor is None:
            raise ConfigurationError("--pad-to-capacity needs a capacity to pad to: give --capacity-factor")
