"""NetMoE: the combine brings whole samples to the ranks where they cost least, not back to where they came from.

    dispatch   permute -> A2A(EP) -> AllGather(expert-TP) -> reorder by local expert -> norm
    combine    + residual -> reorder by receiving rank -> ReduceScatter(expert-TP) -> A2A(EP) -> sum by token

(NetMoE, Fig. 3 and Algorithm 1.) Where samples go is decided in a background thread during dispatch and experts.

Residual. The layer's residual must move with its sample. Megatron normalises what the experts get, and adds what they
return to what was there before. Here rows are dispatched before normalisation, the experts' ranks normalise them, and
one of a token's rows, that of its first expert, returns with the residual added. So it moves without a byte of its own
(the paper's inlining, appendix A). What shared experts make of a token cannot move that way: it is a row of its own in
the same all-to-all, for the samples that move.

Residual apart. On a wire that rounds rows, and where all TP ranks hold all tokens, whose norms must not see parts of
them, rows are normalised tokens, as under other dispatchers, and the residual moves in an all-to-all of its own, in its
dtype, with what shared experts made: a row for each token of a sample that moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_moe_opt.dispatchers.dispatcher import Dispatched, Dispatcher, check_routed
from megatron_moe_opt.dispatchers.monta import MontaDispatcher
from megatron_moe_opt.dispatchers.pipelining import Pipelining
from megatron_moe_opt.dispatchers.sample_placement import Decided, LayerPlacement, background
from megatron_moe_opt.dispatchers.sample_traffic import SampleRowBytes, SampleTraffic
from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.kernels.streams import require, to_device
from megatron_moe_opt.planning.predicting.sample_costs import HopCosts, RowCosts, SampleCosts
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.runtime.engine.collectives import global_rank
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing
from megatron_moe_opt.runtime.hops.row_facts import check_overfull
from megatron_moe_opt.runtime.hops.token_hops import TokenHops
from megatron_moe_opt.runtime.job.forks import Pending
from megatron_moe_opt.runtime.moving_samples.sample_counts import SampleCounts, SampleCountsGather
from megatron_moe_opt.runtime.moving_samples.sample_exchange import move_samples
from megatron_moe_opt.runtime.moving_samples.sample_hops import HoppingSamples
from megatron_moe_opt.runtime.moving_samples.sample_rows import MovingRows, RowsByExpert
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.sample_holders import SampleHolders

AT_HOME = (
    "ranks of an EP group have different numbers of samples, or samples of different lengths: in such passes all "
    "samples stay at home, and nothing is saved. Where most batches are like that, monta does the same for less"
)


@dataclass
class MovingSamples:
    """What permute learnt and the later steps need; one object a forward pass."""

    rows: MovingRows
    decided: Decided
    row_bytes: SampleRowBytes | None
    """The bytes of its rows, to count traffic by. None: the pass does not count: it trains
    nothing, or repeats another.
    """
    beside: torch.Tensor | None
    """What moves with samples besides, [S, B, H]: what shared experts made of this rank's tokens and, where
    it is apart, the residual.
    """


class NetmoeDispatcher(Dispatcher):
    """Moves samples with the combine, to the ranks where they cost least.

    Until `join` is called, and in passes that no residual was handed over for, rows come back to where they came from.
    """

    def __init__(self, groups: ExpertGroups, pipelining: Pipelining, wire: Wire = SAME, apart: bool = False) -> None:
        """
        Args:
            wire: how rows travel; of rows in their dtype, see Wire.of_rows.
            apart: the residual moves by itself, though rows are not rounded.
        """
        self.groups, self.pipelining, self.wire, self.apart = groups, pipelining, wire, apart or wire != SAME
        self.hops: TokenHops | None = None
        """Where tokens that move with their samples hop; None: a token has a row for every expert."""
        self.placement: LayerPlacement | None = None
        """Decides where samples go; None: samples do not move."""
        self._at_home = MontaDispatcher(groups, pipelining, wire)
        self._norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._residual: torch.Tensor | None = None
        self._beside: torch.Tensor | None = None
        self._learn = False
        self._traffic = SampleTraffic()
        self._counted: Pending[None] | None = None

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        how = f"{self.pipelining.describe()}; "
        if self.hops is not None:
            how = f"a token once over every link, in {self.pipelining.current[1]} chunk(s); "
        if self.placement is None:
            return f"{how}moves no samples: it is the only MoE layer of its transformer block, or outside of one"
        apart = "" if not self.apart else "; the residual moves by itself, in its own dtype"
        return f"{how}moves samples with the combine, and home after the last layer of a pipeline stage{apart}"

    def join(self, placement: LayerPlacement, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Lets samples move from now on.

        Args:
            placement: where to.
            norm: of the layer, row by row: [N, H] -> [N, H].
        """
        self.placement, self._norm = placement, norm

    def costs(self, holders: SampleHolders, num_experts: int) -> SampleCosts:
        """Returns what placements of samples are decided by."""
        if self.hops is None:
            return RowCosts(holders, num_experts)
        return HopCosts(holders, self.hops.groups.domains, num_experts, self.pipelining.current[1], self.apart)

    def hand_over(self, residual: torch.Tensor, learn: bool) -> None:
        """Takes what the layer's norm gets in the pass that begins.

        Args:
            residual: [S, B, H].
            learn: whether predictions learn from the pass.
        """
        self._residual, self._learn = residual, learn

    def hand_over_beside(self, output: torch.Tensor) -> None:
        """Takes what is to be added to the layer's output and moves with its sample: [S, B, H]."""
        self._beside = output

    def take_traffic(self) -> dict[str, float]:
        """Returns the means of what training passes have sent since the last call, by name, as SampleTraffic.take has
        them.
        """
        return background(self._traffic.take).result()

    def permute(
        self,
        tokens_TH: torch.Tensor,
        probs_TE: torch.Tensor,
        routing_map_TE: torch.Tensor,
        *,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, Dispatched | MovingSamples]:
        """Does what Dispatcher says, but packs the residual that was handed over, where there is one, and groups
        rows by expert and sample.
        """
        residual, self._residual = self._residual, None
        if residual is None:
            _check_is_first(self.placement)
            return self._at_home.permute(tokens_TH, probs_TE, routing_map_TE, capacity=capacity, num_rows=num_rows)
        sequence, batch, hidden = residual.shape
        order, beside, self._beside = self.placement.order, self._beside, None
        shape, pipeline = (sequence, batch), self.pipelining.current
        rows: MovingRows
        if self.hops is not None:
            rows = HoppingSamples(self.hops, routing_map_TE.bool(), shape, pipeline[1], self.apart)
        else:
            routing_map = routing_map_TE.bool()
            rows = RowsByExpert(routing_map, shape, num_rows, self.groups, pipeline, self.wire, self.apart)
        if self.apart:
            beside = residual if beside is None else residual + beside
        else:
            tokens_TH = residual.reshape(-1, hidden).contiguous()
        stock_bytes = hidden * residual.element_size()
        decided = order.decided(self.placement)
        if decided is not None:
            _check_routes_as_before(rows.counts, decided.counts, self.groups)
            return rows.pack(tokens_TH, probs_TE), MovingSamples(rows, decided, None, beside)
        _check_is_first(self.placement)
        unlike = order.running.unlike
        gather = SampleCountsGather(rows.counts, sequence, unlike, rows.overfull, self.groups, order.room)
        packed_RP = rows.pack(tokens_TH, probs_TE)
        counts = gather.wait()  # host synchronisation: for the counts, the only one of a pass; packing is queued
        if not order.stays_home:
            _check_masked_alike(counts, self.groups)
        if isinstance(rows, RowsByExpert):
            of_ranks = counts.rows.sum(2)
            check_routed(rows.row_map, of_ranks[self.groups.ep_rank, self.groups.etp_rank])
            self.pipelining.observe(of_ranks)
        else:
            check_overfull(counts.overfull, self.hops.topk)
        if self._learn and counts.differ:
            say_once("netmoe", "at home", lambda: AT_HOME)
        learn = self._learn and counts.equal
        sizes, alone = rows.row_bytes(), 0
        rows_beside = 0 if beside is None else sequence
        if self.apart:  # in rows as long as those of dispatch and combine are in the mean
            alone = sequence * stock_bytes
            rows_beside = round(2 * alone / sum(sizes))
        decided = self.placement.decide(counts, rows_beside, learn)
        row_bytes = SampleRowBytes(stock_bytes + probs_TE.element_size(), stock_bytes, *sizes, alone)
        return packed_RP, MovingSamples(rows, decided, row_bytes if learn else None, beside)

    def dispatch(
        self, packed_RP: torch.Tensor, dispatched: Dispatched | MovingSamples, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Does what Dispatcher says, and normalises here what has the residual in it. Rows of an expert are in the
        order of source, sample and token.
        """
        if isinstance(dispatched, Dispatched):
            return self._at_home.dispatch(packed_RP, dispatched, prob_dtype)
        rows_NH, per_expert, probs_N = dispatched.rows.to_experts(packed_RP, dispatched.decided.counts, prob_dtype)
        return rows_NH if self.apart else self._norm(rows_NH), per_expert, probs_N

    def combine(self, rows_NH: torch.Tensor, dispatched: Dispatched | MovingSamples) -> torch.Tensor:
        """Returns the sums of the outputs of each token's experts and its residual, on the rank where its sample goes.

        Args:
            rows_NH: [N, H], partial where experts are cut over expert-TP.

        Returns:
            [S * B, H]; without a residual handed over, each row back where it came from.
        """
        if isinstance(dispatched, Dispatched):
            return super().combine(rows_NH, dispatched)
        moving, holders, beside = dispatched, self.placement.holders, dispatched.beside
        start = time.perf_counter()
        decision = moving.decided.decision.result()
        exposed = time.perf_counter() - start
        if moving.row_bytes is not None:
            rows_beside = 0 if beside is None or self.apart else beside.size(0)
            if self._counted is not None:
                self._counted.result()  # raises what the last count raised
            self._counted = background(
                self._traffic.add, decision, holders, self.placement.costs, rows_beside, moving.row_bytes, exposed
            )
        items, moving.beside = torch.from_numpy(holders.items(decision.move)), None
        if not self.apart:
            return moving.rows.to_new_homes(rows_NH, moving.decided.counts, items, beside)
        beside = move_samples(beside, items, self.groups).flatten(0, 1)
        return moving.rows.to_new_homes(rows_NH, moving.decided.counts, items, None) + beside

    def unpermute(self, returned: torch.Tensor, dispatched: Dispatched | MovingSamples) -> torch.Tensor:
        """Returns the outputs [S * B, H]; those of samples that were moved are summed already."""
        return super().unpermute(returned, dispatched) if isinstance(dispatched, Dispatched) else returned


def _check_is_first(placement: LayerPlacement | None) -> None:
    """Refuses a pass that repeats one whose decisions nobody has kept for it."""
    if placement is not None and is_recomputing():
        raise ConfigurationError(
            "--moe-token-dispatcher-type netmoe moves samples between ranks, and a MoE layer that is recomputed "
            "would not find them where they were: take torch.utils.checkpoint off it, or use monta"
        )


def _check_routes_as_before(own: torch.Tensor, counts: SampleCounts, groups: ExpertGroups) -> None:
    """Refuses a repeated pass that routes its samples otherwise. Raises ValueError; on CUDA an assertion."""
    before = counts.rows[groups.ep_rank, groups.etp_rank, : own.size(0)]
    is_same = (own == to_device(before, own.device)).all()
    require(is_same, "a recomputed MoE layer routes its tokens otherwise than the first time: use monta")


def _check_masked_alike(counts: SampleCounts, groups: ExpertGroups) -> None:
    """Raises ConfigurationError, on all ranks, where the attention mask of one of them must not change its samples."""
    if counts.unlike.any():
        rank = global_rank(groups.joint, int(counts.unlike.flatten().nonzero()[0]))
        raise ConfigurationError(
            "--moe-token-dispatcher-type netmoe moves samples between ranks, so that all must have the same causal "
            f"attention mask, but rank {rank} has another: drop --reset-attention-mask, or use monta"
        )
