"""The shape of a GPT with MoE layers, and the parameters that a rank of a layout holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

    def fills(self, stages: int) -> bool:
        """Whether so many pipeline stages can all have layers: see `of_stage`."""
        return (stages - 1) * -(-self.layers // stages) < self.layers

    def of_stage(self, layout: Layout, stage: int) -> range:
        """Returns the numbers of a stage's layers, from 0: as many on each but the last, which has the rest."""
        each = -(-self.layers // layout.pp)
        return range(stage * each, min((stage + 1) * each, self.layers))

    def moe_layers(self, layout: Layout, stage: int) -> int:
        """Returns how many of a pipeline stage's layers have experts."""
        layers = self.of_stage(layout, stage)
        return layers.stop - min(max(layers.start, self.dense_layers), layers.stop)

    def telling_stages(self, layout: Layout) -> set[int]:
        """Returns the pipeline stages to look at for the one that holds most and the one that takes longest.

        These are the first stages, up to the first without dense layers, and the last one, which has the logits. The
        stages between are like the first without dense layers, with fewer micro-batches under way.
        """
        of_experts = -(-self.dense_layers // len(self.of_stage(layout, 0)))
        return {*range(min(of_experts, layout.pp - 1) + 1), layout.pp - 1}

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
        of_stage, moe_layers = len(self.of_stage(layout, stage)), self.moe_layers(layout, stage)
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
        mlp = self.hidden * (3 if self.gated else 2)
        if not moe:
            return attention + mlp * self.dense_ffn
        return attention + self.experts * self.hidden + self.expert_matrices + mlp * self.shared_ffn

    @property
    def expert_matrices(self) -> int:
        """Returns the elements of the matrices of the experts that a token goes to in a layer."""
        return self.hidden * (3 if self.gated else 2) * self.topk * self.ffn

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
        if not self.fills(layout.pp):
            raise ConfigurationError(
                f"layers = {self.layers} cannot be divided among pp = {layout.pp} stages, of equal ones and a last; "
                "change one of them"
            )
        for name, size, by, divisor in self.cut_by(layout):
            if size % divisor:
                raise ConfigurationError(f"{name} = {size} is not a multiple of {by} = {divisor}; change one of them")
