"""`plan.json`: which dispatcher runs in which MoE layer, and what the others would have taken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import write_text_whole
from megatron_moe_opt.planning.costs.cluster import RANKS, TYPE, Facts, facts
from megatron_moe_opt.planning.costs.differences import differences
from megatron_moe_opt.planning.json_places import JsonPlace
from megatron_moe_opt.planning.predicting.prediction import HeldMore, Prediction
from megatron_moe_opt.planning.training.pipeline import OVERLAP

FORMAT = "megatron-moe-opt plan"
VERSION = 1

OF_MODEL = ("--hidden-size", "--moe-ffn-hidden-size", "--moe-router-topk")
"""The facts by which a plan is of another model where they differ; where others differ, predictions may not hold."""
TOKENS = "tokens of a rank"


@dataclass(frozen=True)
class Plan:
    """A plan: the variant that each layer runs, and why."""

    layers: Mapping[int, str]
    """The variant of each MoE layer, by Megatron's number of the layer (from 1 on)."""
    candidates: tuple[Prediction, ...]
    """Predictions for one layer, the fastest first."""
    cluster: str
    """What the predictions are for: the name of a cluster, or the file that was measured."""
    ep: int
    etp: int
    experts: int
    """The experts of a layer. The plan is for such layers only."""
    gpu_settings: Facts | None = None
    """The settings of the GPU with which the cluster was measured (Cluster)."""
    made_for: Facts = field(default_factory=dict)
    """What the model and the run were to be like besides, see facts_of_plan. Empty: not known."""
    expansion: Facts = field(default_factory=dict)
    """How CP is best laid to EP, for whoever starts the run; training does not read it. Empty: there is no choice."""

    @classmethod
    def load(cls, file: str | Path) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
            ConfigurationError: the file, the line, the value there and what is wrong with it.
        """
        root = JsonPlace.root(Path(file))
        root.check_format(FORMAT, VERSION, "moe-opt plan", "make the plan")
        top = root.fields("format", "version", "cluster", "ep", "etp", "experts", "layers", "candidates",
                          optional=["gpu_settings", "made_for", "expansion"])  # fmt: skip
        layers = {number: variant.word() for number, variant in top["layers"].by_number().items()}
        if not layers:
            top["layers"].refuse("no layers: a plan needs at least one")
        return cls(
            layers,
            tuple(_candidate(place) for place in top["candidates"].items()),
            top["cluster"].word(),
            top["ep"].count(least=1),
            top["etp"].count(least=1),
            top["experts"].count(least=1),
            top["gpu_settings"].given(facts),
            top["made_for"].given(facts, {}),
            top["expansion"].given(facts, {}),
        )

    def save(self, file: str | Path) -> None:
        """Writes the file in one piece: readers see the old content or the new one. Raises ConfigurationError."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "cluster": self.cluster,
            "ep": self.ep,
            "etp": self.etp,
            "experts": self.experts,
            "gpu_settings": None if self.gpu_settings is None else dict(self.gpu_settings),
            "made_for": dict(self.made_for),
            "expansion": dict(self.expansion),
            "layers": {str(number): variant for number, variant in sorted(self.layers.items())},
            "candidates": [_numbers(one) for one in self.candidates],
        }
        write_text_whole(file, json.dumps(content, indent=2) + "\n")

    def variant_of(self, layer: int, file: str | Path) -> str:
        """Returns the variant to run in a layer.

        Raises:
            ConfigurationError: the plan does not have it.
        """
        if layer not in self.layers:
            numbers = sorted(self.layers)
            raise ConfigurationError(
                f"--moe-opt-plan {file} has no MoE layer {layer} (it has {numbers[0]} to {numbers[-1]}): make a plan "
                "for this model with moe-opt plan"
            )
        return self.layers[layer]

    def check(
        self, file: str | Path, *, ep: int, etp: int, experts: int, layers: Sequence[int] | None, made_for: Facts
    ) -> str | None:
        """Refuses another model than the plan was made for, and another layout of its experts.

        Args:
            layers: the numbers of its MoE layers; None: not known.
            made_for: see facts_of_plan.

        Returns:
            In words what else the plan was not made for, so that its predictions may not hold; None: nothing.

        Raises:
            ConfigurationError: the flag, its value and the planned one.
        """
        sizes = [
            ("--expert-model-parallel-size", self.ep, ep),
            ("--expert-tensor-parallel-size", self.etp, etp),
            ("--num-experts", self.experts, experts),
        ]
        sizes += [(flag, self.made_for[flag], made_for[flag]) for flag in OF_MODEL if flag in self.made_for]
        for flag, planned, asked in sizes:
            if planned != asked:
                raise ConfigurationError(
                    f"{flag} {asked} is not what --moe-opt-plan {file} was made for ({planned}): make a plan for this "
                    "run with moe-opt plan"
                )
        if layers is not None and not self._is_for(layers):
            raise ConfigurationError(
                f"--moe-opt-plan {file} is of a model whose MoE layers are {_ranges(self.layers)}, and this one's are "
                f"{_ranges(layers)}: make a plan for this model with moe-opt plan"
            )
        known = [name for name in self.made_for if name in made_for]
        return differences({name: made_for[name] for name in known}, {name: self.made_for[name] for name in known})

    def _is_for(self, layers: Sequence[int]) -> bool:
        """Whether it can run in layers of these numbers. Where all run the same, it need only be as many."""
        same = len(set(self.layers.values())) == 1
        return len(self.layers) == len(layers) if same else set(self.layers) == set(layers)


def facts_of_plan(
    *, hidden: int, ffn: int, topk: int, dtype: str, ranks: int, tokens: int | None, version: str, overlaps: bool
) -> Facts:
    """Returns what Plan.made_for says of a model and a run, for the one who makes a plan and the one who runs it.

    Args:
        ffn: the hidden size of a whole expert.
        tokens: of a micro-batch that a rank enters a MoE layer with; None: not known.
        version: of this package, whose predictions a plan has.
        overlaps: whether micro-batches overlap.
    """
    of_rank = {} if tokens is None else {TOKENS: tokens}
    return dict(zip(OF_MODEL, (hidden, ffn, topk), strict=True)) | {TYPE: dtype, RANKS: ranks} | of_rank | {
        "megatron-moe-opt": version, OVERLAP: "given" if overlaps else "not given",
    }  # fmt: skip


def _ranges(numbers: Iterable[int]) -> str:
    """Returns numbers in words: `1 to 4` for 1, 2, 3, 4; `2, 4` for 2, 4."""
    ordered = sorted(numbers)
    dense = len(ordered) > 2 and ordered[-1] - ordered[0] + 1 == len(ordered)
    return f"{ordered[0]} to {ordered[-1]}" if dense else ", ".join(map(str, ordered)) or "none"


def _numbers(one: Prediction) -> dict[str, Any]:
    """Returns what a plan keeps of a prediction: all but parts, timelines, and what steps and memory are made of; of
    this how much is of others' experts, which `auto` counts once however many micro-batches are under way.
    """
    kept = asdict(replace(one, timelines=()))
    left_out = ("parts", "timelines", "held_more", "hidden")
    numbers = {name: value for name, value in kept.items() if name not in left_out}
    return numbers | {"of_others": one.held_more.of_others}


def _candidate(place: JsonPlace) -> Prediction:
    fields = place.fields("variant", "seconds", "exposed", "inter_bytes", "intra_bytes", "activation_bytes", "terms",
                          optional=["of_others"])  # fmt: skip
    return Prediction(
        fields["variant"].word(),
        fields["seconds"].positive(),
        fields["exposed"].not_negative(),
        fields["inter_bytes"].not_negative(),
        fields["intra_bytes"].not_negative(),
        fields["activation_bytes"].count(),
        {name: seconds.finite() for name, seconds in fields["terms"].object().items()},
        held_more=HeldMore(of_others=fields["of_others"].given(JsonPlace.count, 0)),
    )
