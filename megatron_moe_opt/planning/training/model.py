"""The shape of a GPT with MoE layers, how it is spread over ranks, and the parameters that a rank then holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_moe_opt.errors import ConfigurationError


@dataclass(frozen=True)
class Parallel:
    """Sizes of Megatron's parallel dimensions; data parallelism takes the rest of the world.

    Raises:
        ConfigurationError: sizes that do not divide the world.
    """

    world: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name, size in (
            ("tp * cp * pp", self.tp * self.cp * self.pp),
            ("etp * ep * pp", self.etp * self.ep * self.pp),
        ):
            if size < 1 or self.world % size:
                raise ConfigurationError(f"{name} = {size} does not divide {self.world} ranks; choose sizes that do")

    @property
    def dense_copies(self) -> int:
        """Ranks that hold the same parameters outside the experts: data times context parallelism."""
        return self.world // (self.tp * self.pp)

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.etp * self.ep * self.pp)


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: those shared by data-parallel ranks, and those of experts."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.expert


@dataclass(frozen=True)
class ModelShape:
    """A decoder as Megatron-Core builds it, with rotary or without position embeddings."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    """Padded, as Megatron pads it."""
    experts: int
    topk: int
    ffn: int
    """Middle size of an expert."""
    kv_heads: int | None = None
    """Key and value heads (grouped-query attention); None: as many as heads."""
    head_size: int | None = None
    """None: hidden / heads."""
    shared_ffn: int = 0
    """Middle size of the shared experts together."""
    dense_layers: int = 0
    """Leading layers with a plain MLP of `dense_ffn` in the place of experts."""
    dense_ffn: int = 0
    gated: bool = True
    """SwiGLU and the like: the first matrix of an MLP is twice as wide."""
    bias: bool = False
    """Of every linear layer."""
    norm_parameters: int = 1
    """Vectors of a norm: 1 for RMSNorm, 2 for LayerNorm."""
    qk_norm: bool = False
    tied: bool = False
    """One matrix for word embeddings and output layer."""

    @property
    def query_size(self) -> int:
        """Elements of a token's queries."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def key_size(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.query_size // self.heads * (self.kv_heads or self.heads)

    def parameters(self, parallel: Parallel, stage: int = 0) -> Parameters:
        """What one rank of a pipeline stage holds.

        Raises:
            ConfigurationError: a size that its parallelism does not divide.
        """
        self._refuse(parallel)
        per_stage = self.layers // parallel.pp
        first = stage * per_stage
        dense_layers = min(max(self.dense_layers - first, 0), per_stage)
        moe_layers = per_stage - dense_layers
        norm = self.norm_parameters * self.hidden
        dense = per_stage * (self._attention(parallel.tp) + 2 * norm)
        dense += dense_layers * self._mlp(self.dense_ffn, parallel.tp)
        dense += moe_layers * self.experts * (self.hidden + self.bias)  # router
        if self.shared_ffn:
            dense += moe_layers * self._mlp(self.shared_ffn, parallel.tp)
        words = self.vocabulary // parallel.tp * self.hidden
        last = stage == parallel.pp - 1
        if stage == 0:
            dense += words
        if last:
            dense += norm
            if not (self.tied and stage == 0):  # a tied model holds a second copy on its last stage
                dense += words
        expert = moe_layers * (self.experts // parallel.ep) * self._mlp(self.ffn, parallel.etp)
        return Parameters(dense, expert)

    @property
    def active_matrices(self) -> int:
        """Elements of all matrices that a token is multiplied with: N of the 6 N rule, without word embeddings."""
        moe_layers = self.layers - self.dense_layers
        return (
            moe_layers * self.layer_matrices()
            + self.dense_layers * self.layer_matrices(moe=False)
            + self.hidden * self.vocabulary
        )

    def layer_matrices(self, moe: bool = True) -> int:
        """Elements of the matrices of one layer that a token is multiplied with."""
        attention = self.hidden * (2 * self.query_size + 2 * self.key_size)
        mlp = self.hidden * (3 if self.gated else 2)
        if not moe:
            return attention + mlp * self.dense_ffn
        return attention + self.experts * self.hidden + self.expert_matrices + mlp * self.shared_ffn

    @property
    def expert_matrices(self) -> int:
        """Elements of the matrices of the experts that a token goes to in a layer."""
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

    def _refuse(self, parallel: Parallel) -> None:
        for name, size, by, divisor in (
            ("layers", self.layers, "pp", parallel.pp),
            ("heads", self.heads, "tp", parallel.tp),
            ("kv_heads", self.kv_heads or self.heads, "tp", parallel.tp),
            ("vocabulary", self.vocabulary, "tp", parallel.tp),
            ("shared_ffn", self.shared_ffn, "tp", parallel.tp),
            ("dense_ffn", self.dense_ffn, "tp", parallel.tp),
            ("experts", self.experts, "ep", parallel.ep),
            ("ffn", self.ffn, "etp", parallel.etp),
        ):
            if size % divisor:
                raise ConfigurationError(f"{name} = {size} is not a multiple of {by} = {divisor}; change one of them")
