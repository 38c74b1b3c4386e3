"""The shape of a GPT with MoE layers, and the parameters that a rank of a layout holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.layouts import Layout


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: those shared by data-parallel ranks, and those of experts."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """How many parameters the model has, experts among them."""
        return self.dense + self.expert


@dataclass(frozen=True)
class ModelShape:
    """A decoder as Megatron-Core builds it, with rotary or without position embeddings."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    """Size of the vocabulary, padded as Megatron pads it."""
    experts: int
    topk: int
    ffn: int
    """Middle size of an expert."""
    kv_heads: int | None = None
    """Key and value heads (grouped-query attention); None: as many as heads."""
    head_size: int | None = None
    """Size of an attention head; None: hidden / heads."""
    shared_ffn: int = 0
    """Middle size of the shared experts together."""
    dense_layers: int = 0
    """Leading layers with a plain MLP of `dense_ffn` in the place of experts."""
    dense_ffn: int = 0
    gated: bool = True
    """SwiGLU and the like: the first matrix of an MLP is twice as wide."""
    bias: bool = False
    """Whether every linear layer has a bias."""
    norm_parameters: int = 1
    """Parameter vectors of a norm: 1 for RMSNorm, 2 for LayerNorm."""
    qk_norm: bool = False
    tied: bool = False
    """Whether word embeddings and output layer have one matrix."""

    @property
    def query_size(self) -> int:
        """Returns the elements of a token's queries."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def key_size(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.query_size // self.heads * (self.kv_heads or self.heads)

    def fills(self, chunks: int) -> bool:
        """Whether the layers can be cut into so many parts: see `chunks_of_stage`."""
        return chunks == 1 or (chunks - 2) * -(-self.layers // chunks) < self.layers

    def chunks_of_stage(self, layout: Layout, stage: int) -> tuple[range, ...]:
        """Returns the numbers of the layers, from 0, in each virtual stage of a pipeline stage: as many in each but the
        last of all, which has the rest, or only the logits; then the one before it has the rest.

        The virtual stages of a rank lie pp apart (Megatron's interleaved pipeline).
        """
        return _chunks(self.layers, layout.chunks, layout.pp, stage)

    def layers_of_stage(self, layout: Layout, stage: int) -> int:
        """Returns how many layers a pipeline stage has."""
        return sum(map(len, self.chunks_of_stage(layout, stage)))

    def moe_layers(self, layout: Layout, stage: int) -> int:
        """Returns how many of a pipeline stage's layers have experts."""
        chunks = self.chunks_of_stage(layout, stage)
        return sum(layers.stop - min(max(layers.start, self.dense_layers), layers.stop) for layers in chunks)

    def telling_stages(self, layout: Layout) -> set[int]:
        """Returns the pipeline stages to look at for the one that holds most and the one that takes longest.

        These are the first stages, up to the first without dense layers, and the last one, which has the logits. The
        stages between are like the first without dense layers, with fewer micro-batches under way.
        """
        of_experts = -(-self.dense_layers // len(self.chunks_of_stage(layout, 0)[0]))
        return {*range(min(of_experts, layout.pp - 1) + 1), layout.pp - 1}

    def blocks(self, layers: int, moe_layers: int) -> int:
        """Returns in how many places of so many layers TP communicates: attention, dense MLPs and shared experts."""
        return 2 * layers if self.shared_ffn else 2 * layers - moe_layers

    def most_moe_layers(self, layout: Layout) -> int:
        """Returns the MoE layers of the pipeline stage that has most of them."""
        return max(self.moe_layers(layout, stage) for stage in self.telling_stages(layout))

    def cut_by(self, layout: Layout) -> Iterator[tuple[str, int, str, int]]:
        """Yields the name of each size that a layout cuts, the size, and the name and size of the parallelism which has
        to divide it.
        """
        yield "heads", self.heads, "tp", layout.tp
        if layout.tp % (kv_heads := self.kv_heads or self.heads):  # else several ranks share one
            yield "kv_heads", kv_heads, "tp", layout.tp
        yield "vocabulary", self.vocabulary, "tp", layout.tp
        yield "shared_ffn", self.shared_ffn, "tp", layout.tp
        yield "dense_ffn", self.dense_ffn, "tp", layout.tp
        yield "experts", self.experts, "ep", layout.ep
        yield "ffn", self.ffn, "expert_tp", layout.expert_tp

    def parameters(self, layout: Layout, stage: int = 0) -> Parameters:
        """Returns the parameters that one rank of a pipeline stage holds.

        Raises:
            ConfigurationError: a size that its parallelism does not divide.
        """
        self._refuse(layout)
        of_stage, moe_layers = self.layers_of_stage(layout, stage), self.moe_layers(layout, stage)
        norm = self.norm_parameters * self.hidden
        dense = of_stage * (self._attention(layout.tp) + 2 * norm)
        dense += (of_stage - moe_layers) * self._mlp(self.dense_ffn, layout.tp)
        dense += moe_layers * self.experts * (self.hidden + self.bias)  # router
        if self.shared_ffn:
            dense += moe_layers * self._mlp(self.shared_ffn, layout.tp)
        words = self.vocabulary // layout.tp * self.hidden
        last = stage == layout.pp - 1
        if stage == 0:
            dense += words
        if last:
            dense += norm
            if not (self.tied and stage == 0):  # a tied model holds a second copy on its last stage
                dense += words
        expert = moe_layers * (self.experts // layout.ep) * self._mlp(self.ffn, layout.expert_tp)
        return Parameters(dense, expert)

    @property
    def active_matrices(self) -> int:
        """Returns the elements of all matrices that a token is multiplied with: N of the 6 N rule, without word
        embeddings.
        """
        moe_layers = self.layers - self.dense_layers
        return (
            moe_layers * self.layer_matrices()
            + self.dense_layers * self.layer_matrices(moe=False)
            + self.hidden * self.vocabulary
        )

    def layer_matrices(self, moe: bool = True) -> int:
        """Returns the elements of the matrices of one layer that a token is multiplied with.

        Args:
            moe: whether the layer has experts; else a plain MLP of `dense_ffn`.
        """
        attention = self.hidden * (2 * self.query_size + 2 * self.key_size)
        if not moe:
            return attention + self.mlp_matrices(self.dense_ffn)
        router = self.experts * self.hidden
        return attention + router + self.expert_matrices + self.mlp_matrices(self.shared_ffn)

    @property
    def expert_matrices(self) -> int:
        """Returns the elements of the matrices of the experts that a token goes to in a layer."""
        return self.topk * self.mlp_matrices(self.ffn)

    def mlp_matrices(self, ffn: int) -> int:
        """Returns the elements of the matrices of an MLP with a middle of this size."""
        return self.hidden * (3 if self.gated else 2) * ffn

    def _attention(self, tp: int) -> int:
        split = self.query_size + 2 * self.key_size
        qk_norm = 2 * self.norm_parameters * self.query_size // self.heads if self.qk_norm else 0
        bias = split // tp + self.hidden if self.bias else 0
        return (split + self.query_size) * self.hidden // tp + bias + qk_norm

    def _mlp(self, ffn: int, tp: int) -> int:
        first = ffn * (2 if self.gated else 1) // tp
        bias = first + self.hidden if self.bias else 0
        return self.hidden * (first + ffn // tp) + bias

    def _refuse(self, layout: Layout) -> None:
        if not self.fills(layout.chunks):
            raise ConfigurationError(
                f"layers = {self.layers} cannot be cut into pp = {layout.pp} x vpp = {layout.vpp} equal parts and a "
                "rest; change one of them"
            )
        for name, size, by, divisor in self.cut_by(layout):
            if size % divisor:
                raise ConfigurationError(f"{name} = {size} is not a multiple of {by} = {divisor}; change one of them")


@cache  # a search of layouts asks a hundred thousand times
def _chunks(layers: int, chunks: int, pp: int, stage: int) -> tuple[range, ...]:
    each = -(-layers // chunks)
    starts = (min(chunk * each, layers) for chunk in range(stage, chunks, pp))
    return tuple(range(start, min(start + each, layers)) for start in starts)
