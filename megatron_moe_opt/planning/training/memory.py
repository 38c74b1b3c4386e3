"""Memory of training on one rank: weights, gradients, optimizer states (MoNTA, Table 3), activations.

What is computed is in docs/cost-model.md, how the printed tables differ in docs/papers/monta.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.pipeline import under_way
from megatron_moe_opt.topology.layouts import Layout

BF16, FP32, INT64 = 2, 4, 8


@dataclass(frozen=True)
class BytesPerParameter:
    """The bytes that training keeps of a parameter. The defaults are Megatron's bf16 training: fp32 gradients; Adam
    keeps an fp32 master and two moments.
    """

    weight: int = BF16
    gradient: int = FP32
    optimizer: int = 3 * FP32

    @classmethod
    def of(cls, element_bytes: int) -> BytesPerParameter:
        """Returns those of Megatron's training in a type of so many bytes: in fp32 the weights are their own master."""
        return cls() if element_bytes == BF16 else cls(element_bytes, FP32, 2 * FP32)


@dataclass(frozen=True)
class StageMemory:
    """The bytes of memory that training takes on one rank of a pipeline stage, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0

    @property
    def total(self) -> float:
        """Returns the bytes of everything that the rank holds (MoNTA, eq. 1)."""
        return self.weights + self.gradients + self.optimizer + self.activations


def state_memory(
    model: ModelShape,
    layout: Layout,
    stage: int = 0,
    zero: int = 1,
    each: BytesPerParameter | None = None,
) -> StageMemory:
    """Returns the bytes of weights, gradients and optimizer states (the intent of Table 3).

    ZeRO-1 shards optimizer states, 2 gradients too, 3 weights too: over the data- and context-parallel ranks for
    parameters outside the experts, over the ranks that hold the same experts for those of experts. Megatron's
    distributed optimizer is ZeRO-1.

    Args:
        zero: 0 to 3.
        each: None for the defaults of BytesPerParameter.

    Raises:
        ConfigurationError: see ModelShape.parameters.
        ValueError: an unknown ZeRO stage.
    """
    if zero not in range(4):
        raise ValueError(f"ZeRO stage {zero} is not one of 0, 1, 2, 3")
    each = each or BytesPerParameter()
    parameters = model.parameters(layout, stage)

    def stored(size: int, sharded_from: int) -> float:
        if zero < sharded_from:
            return float(size * parameters.total)
        return size * (parameters.dense / (layout.dp * layout.cp) + parameters.expert / layout.expert_dp)

    return StageMemory(stored(each.weight, 3), stored(each.gradient, 2), stored(each.optimizer, 1))


def layer_activations(
    model: ModelShape,
    layout: Layout,
    micro_batch: int,
    sequence: int,
    rows: int | None = None,
    moe: bool = True,
    fused: bool = True,
    element_bytes: int = BF16,
) -> dict[str, int]:
    """Returns the bytes that one layer keeps for its backward, by what they hold.

    With sequence parallelism, no dropout, no biases, dropless routing.

    Args:
        micro_batch: sequences.
        sequence: tokens of one sequence, over all context-parallel ranks.
        rows: rows that this rank's experts compute; None: what it is where routing is even,
            topk * expert-TP size * tokens of this rank (expert parallelism spreads rows, it does not make them fewer).
        moe: a layer with experts; False: one of the leading layers with a plain MLP.
        fused: kernels that keep nothing between: flash attention, and norms and gated activations that keep their
            input. False: Megatron-Core's own PyTorch layers.
        element_bytes: of a token's element.
    """
    tokens = micro_batch * sequence // layout.cp
    own = tokens // layout.tp  # with sequence parallelism
    if rows is None:
        rows = model.topk * layout.expert_tp * own
    query, key, heads = (size // layout.tp for size in (model.query_size, model.key_size, model.heads))
    terms = {
        "norms": 2 * own * (element_bytes * model.hidden + FP32),
        "qkv input": element_bytes * own * model.hidden,
        "attention input": element_bytes * tokens * (query + 2 * key),
        "attention": FP32 * tokens * heads,  # log-sum-exp of every row
        "projection input": element_bytes * tokens * query,
        "mlp input": element_bytes * own * model.hidden,
    }
    if not fused:
        terms |= {
            "norms": 2 * own * (2 * FP32 * model.hidden + FP32),  # computed in fp32; input and normalized input
            # Queries and keys after the rotation. Values are a part of one tensor with queries and keys, unless they
            # are repeated for every query head; so are the keys.
            "attention input": element_bytes * tokens * query * (5 if key == query else 3),
            # Softmax, and its copy in a narrower type.
            "attention": (FP32 + element_bytes % FP32) * tokens * heads * sequence,
        }
    plain = model.shared_ffn if moe else model.dense_ffn
    if plain:
        terms["mlp middle"] = element_bytes * tokens * (plain // layout.tp) * _middle_width(model.gated, fused)
    if moe:
        # Choices with their sorted indices and probabilities; the routing map, and probabilities in its shape.
        terms["router"] = own * (model.topk * (2 * INT64 + FP32) + model.experts * (1 + element_bytes))
        terms["expert input"] = element_bytes * rows * model.hidden
        width = expert_middle_width(model.gated, fused)
        terms["expert middle"] = element_bytes * rows * (model.ffn // layout.expert_tp * width + 1)
    return terms


def expert_middle_width(gated: bool, fused: bool) -> int:
    """Returns how many tensors [rows, middle size] an expert of Megatron's own PyTorch layers keeps for its backward
    (MPMoE's T_M).

    Args:
        fused: a gated activation that keeps its input, and applies the probabilities.
    """
    return _middle_width(gated, fused) + (not fused)  # the product with the probabilities has an input of its own


def first_product_width(gated: bool) -> int:
    """Returns the part of `expert_middle_width` that an expert's first matrix makes; the activation makes the rest of
    that from it.
    """
    return 2 if gated else 1


def _middle_width(gated: bool, fused: bool) -> int:
    """Returns the width of the first matrix's output and the second's input; not fused and gated also of the
    activation and the other half.
    """
    return (3 if fused else 5) if gated else 2


RECOMPUTE = ("none", "selective", "full")
RECOMPUTED: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "core_attn": (frozenset({"attention"}), frozenset({"attention"})),
    "moe": (frozenset({"router", "mlp middle", "expert input", "expert middle"}), frozenset()),
    "shared_experts": (frozenset({"mlp middle"}), frozenset()),
    "mlp": (frozenset(), frozenset({"mlp middle"})),
}
"""What is not kept of a layer with experts, and of one without, where one of these modules is recomputed: those of
Megatron's --recompute-modules whose part of a layer `layer_activations` counts.
"""


def logits_memory(
    model: ModelShape, layout: Layout, stage: int, micro_batch: int, sequence: int, element_bytes: int = BF16
) -> int:
    """Returns the bytes of logits that a rank holds at most, between a micro-batch's forward and backward pass: their
    softmax in fp32, and, where tokens are narrower, logits or gradients in the tokens' type. None but on the last
    pipeline stage.
    """
    if stage != layout.pp - 1:
        return 0
    tokens = micro_batch * sequence // layout.cp
    return (FP32 + element_bytes % FP32) * tokens * (model.vocabulary // layout.tp)


def training_memory(
    model: ModelShape,
    layout: Layout,
    micro_batch: int,
    sequence: int,
    micro_batches: int,
    stage: int = 0,
    recompute: str = "none",
    each: BytesPerParameter | None = None,
    rows: int | None = None,
    overlaps: bool = False,
    modules: Collection[str] = ("core_attn",),
) -> StageMemory:
    """Returns all of a rank's memory for its layers and words (eq. 1), without embedding output, logits and workspace.

    Optimizer states are shared out as Megatron's distributed optimizer does.

    Args:
        micro_batches: of one step.
        recompute: "none"; "selective", of `modules`; "full", of every layer from its input.
        each: see state_memory; an element of a token has as many bytes as one of a weight.
        rows: of a micro-batch at the experts of a rank; None: all choices of its tokens, spread evenly.
        overlaps: the forward pass of a micro-batch runs beside the backward pass of another.
        modules: names in RECOMPUTED.

    Raises:
        ConfigurationError: see ModelShape.parameters.
        ValueError: an unknown recompute.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute {recompute} is not one of {', '.join(RECOMPUTE)}")
    each = each or BytesPerParameter()
    states, element_bytes = state_memory(model, layout, stage, each=each), each.weight
    moe_layers = model.moe_layers(layout, stage)
    activations = 0
    for moe, layers in ((True, moe_layers), (False, model.layers_of_stage(layout, stage) - moe_layers)):
        terms = layer_activations(model, layout, micro_batch, sequence, rows=rows, moe=moe, element_bytes=element_bytes)
        if recompute == "selective":
            again = frozenset().union(*(RECOMPUTED[module][not moe] for module in modules))
            terms = {name: size for name, size in terms.items() if name not in again}
        if recompute == "full":
            terms = {"layer input": element_bytes * micro_batch * sequence // layout.cp // layout.tp * model.hidden}
        activations += layers * sum(terms.values())
    passes = under_way(layout, stage, micro_batches, model.layers_of_stage(layout, stage), overlaps)
    return replace(states, activations=float(activations * passes))


@dataclass(frozen=True)
class TellingStage:
    """What a rank holds in training, on one of the pipeline stages to look at for the one that holds most."""

    memory: StageMemory
    logits: int
    """Bytes of logits, which are there while no layer is at work: see `logits_memory`."""
    moe_layers: int
    passes: float
    """Micro-batches whose activations it holds at once."""

    @property
    def total(self) -> float:
        """Returns the bytes that the rank holds between a micro-batch's forward and backward pass, with the logits."""
        return self.memory.total + self.logits


def telling_stages(
    model: ModelShape,
    layout: Layout,
    micro_batch: int,
    sequence: int,
    micro_batches: int,
    recompute: str,
    each: BytesPerParameter,
    rows: int | None = None,
    overlaps: bool = False,
    modules: Collection[str] = ("core_attn",),
) -> list[TellingStage]:
    """Returns what a rank of each stage in `ModelShape.telling_stages` holds: what decides whether a model fits.

    For arguments and errors see `training_memory`.
    """

    def of_stage(stage: int) -> TellingStage:
        return TellingStage(
            training_memory(
                model, layout, micro_batch, sequence, micro_batches, stage, recompute, each, rows, overlaps, modules
            ),
            logits_memory(model, layout, stage, micro_batch, sequence, each.weight),
            model.moe_layers(layout, stage),
            under_way(layout, stage, micro_batches, model.layers_of_stage(layout, stage), overlaps),
        )

    return [of_stage(stage) for stage in model.telling_stages(layout)]
