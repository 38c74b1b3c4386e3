"""What a layer on these ranks is to be like, and what of that cannot run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.row_format import ELEMENT_BYTES, LANE_BYTES
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.topology.layouts import Layout, layout_of_run
from megatron_moe_opt.variants import FLEX, split_variant

if TYPE_CHECKING:
    import torch

STOCK = (ALLTOALL, "allgather", FLEX)
REPLICATED_BASELINE = "deepspeed"
ROUTER_DTYPE = "fp32"


def torch_dtype(name: str) -> torch.dtype:
    """Returns PyTorch's type for a name that commands take: fp32 or bf16."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def check_ffn_hidden(ffn_hidden: int, expert_tp: int) -> None:
    """Refuses, with ConfigurationError, experts that expert tensor parallelism does not cut into equal parts."""
    if ffn_hidden % expert_tp:
        raise ConfigurationError(f"--expert-tp {expert_tp} does not divide --ffn-hidden {ffn_hidden}: choose a divisor")


@dataclass(frozen=True)
class LayerSettings:
    """The options of `moe-opt bench`; sizes of one rank where it matters."""

    dispatchers: tuple[str, ...]
    """The variants to time; the baseline is first, whatever the order, and added if missing. See `split_variant`."""
    tokens: int
    hidden: int
    ffn_hidden: int
    experts: int
    topk: int
    tp: int = 1
    ep: int | None = None
    """Expert parallelism; None: as many ranks as expert_tp leaves, until `on` says how many these are."""
    expert_tp: int = 1
    dtype: str = "fp32"
    """Type of tokens and weights: fp32 or bf16."""
    routing: str = "uniform"
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    steps: int = 1
    warmup: int = 0
    seed: int = 1
    profile: Path | None = None
    """The profile, for variants that choose by measurements."""
    dispatch_only: bool = False
    """Whether to leave router and experts out."""
    replicated: bool = False
    """Whether all TP ranks hold the same tokens: no sequence parallelism."""
    shared_ffn_hidden: int | None = None
    """Hidden size inside the shared experts, which overlap; None: the layer has none."""

    def __post_init__(self) -> None:
        ordered = dict.fromkeys((self.baseline, *self.dispatchers))  # without repetitions
        object.__setattr__(self, "dispatchers", tuple(ordered))

    @property
    def baseline(self) -> str:
        """Returns what times are compared with: stock; where stock refuses to train, the papers' reference schedule."""
        return REPLICATED_BASELINE if self.replicated else ALLTOALL

    def layout(self, world: int) -> Layout:
        """Returns the groups that these sizes make on `world` ranks. Raises ConfigurationError."""
        return layout_of_run(world, self.ep, self.expert_tp, tp=self.tp)

    def on(self, world: int) -> LayerSettings:
        """Returns these settings with the `ep` that they have on `world` ranks: layers are built and predicted by it.

        Raises:
            ConfigurationError: see `layout`.
        """
        return replace(self, ep=self.layout(world).ep)

    def workload(self) -> LayerWorkload:
        """Returns the layer as the planner takes it, routed evenly."""
        return LayerWorkload(
            tokens=self.tokens,
            hidden=self.hidden,
            ffn=self.ffn_hidden // self.expert_tp,
            gated=False,
            experts=self.experts,
            topk=self.topk,
            element_bytes=torch_dtype(self.dtype).itemsize,
            lane_bytes=LANE_BYTES,
            ep=self.ep,
            etp=self.expert_tp,
            tp=self.tp if self.replicated else 1,
            capacity_factor=self.capacity_factor if self.pad_to_capacity else None,
            prob_bytes=ELEMENT_BYTES[ROUTER_DTYPE],
        )

    def data_rank(self, rank: int) -> int:
        """Returns what decides the tokens of a rank: with `replicated` it is the same for all ranks of a TP group."""
        return rank // self.tp if self.replicated else rank

    def check(self, known_dispatchers: tuple[str, ...], world: int) -> None:
        """Refuses what cannot run on `world` ranks: ConfigurationError with the option, its value and the way out."""
        for variant in self.dispatchers:
            name = variant.partition(":")[0]
            if not variant:
                raise ConfigurationError("--dispatchers has an empty name: separate names by one comma each")
            if name not in known_dispatchers:
                raise ConfigurationError(f"--dispatchers {name} is unknown: choose from {', '.join(known_dispatchers)}")
            split_variant(variant, self.profile)
        ep = self.layout(world).ep
        if ep * self.expert_tp == 1 and any(name.partition(":")[0] == FLEX for name in self.dispatchers):
            raise ConfigurationError(f"--dispatchers {FLEX} sends between ranks: start 2 or more, or leave it out")
        if self.experts % ep:
            raise ConfigurationError(
                f"--ep {ep} does not divide --experts {self.experts}: choose a divisor of {self.experts}"
            )
        if self.topk > self.experts:
            raise ConfigurationError(f"--topk {self.topk} is more than --experts {self.experts}: choose at most that")
        check_ffn_hidden(self.ffn_hidden, self.expert_tp)
        if self.replicated and self.tp == 1:
            raise ConfigurationError("--replicated is about the ranks of a TP group: give --tp 2 or more, or drop it")
        stock = [name for name in self.dispatchers if name.partition(":")[0] in STOCK]
        if self.replicated and stock:
            raise ConfigurationError(
                f"--dispatchers {stock[0]} does not train on --replicated tokens: leave it out, or drop --replicated"
            )
        systems = [system for variant in self.dispatchers if (system := system_of(variant)) is not None]
        through_experts = [system.name for system in systems if system.is_pipeline_of_experts]
        if self.dispatch_only and through_experts:
            raise ConfigurationError(
                f"--dispatch-only leaves out the experts that {through_experts[0]} pipelines through: drop it"
            )
        if self.dispatch_only and AUTO in self.dispatchers:
            raise ConfigurationError("--dispatch-only has no layer whose steps auto could try: drop one of the two")
        if AUTO in self.dispatchers and self.profile is None:
            raise ConfigurationError(f"--dispatchers {AUTO} chooses by measurements: give --profile")
        if self.dispatch_only and self.replicated:
            raise ConfigurationError("--dispatch-only leaves out what --replicated is about: drop one of them")
        if self.dispatch_only and self.shared_ffn_hidden is not None:
            raise ConfigurationError("--dispatch-only leaves out all experts: leave --shared-ffn-hidden out, too")
        if self.dispatch_only and self.capacity_factor is not None:
            raise ConfigurationError("--dispatch-only has no router that drops tokens: leave --capacity-factor out")
        if self.pad_to_capacity and self.capacity_factor is None:
            raise ConfigurationError("--pad-to-capacity needs a capacity to pad to: give --capacity-factor")
