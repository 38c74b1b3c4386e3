"""`plan.json`: which dispatcher runs in which MoE layer, and what the others would have taken."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import write_text_whole
from megatron_moe_opt.planning.costs.cluster import facts
from megatron_moe_opt.planning.json_places import JsonPlace
from megatron_moe_opt.planning.predicting.prediction import Prediction

FORMAT = "megatron-moe-opt plan"
VERSION = 1


@dataclass(frozen=True)
class Plan:
    """What to run, and why."""

    layers: Mapping[int, str]
    """The variant of each MoE layer, by Megatron's number of the layer (from 1 on)."""
    candidates: tuple[Prediction, ...]
    """Of one layer, the fastest first."""
    cluster: str
    """What the predictions are for: the name of a cluster, or the file that was measured."""
    ep: int
    etp: int
    experts: int
    """Of a layer. The plan is for such layers only."""
    gpu_settings: Mapping[str, str | int] | None = None
    """With which the cluster was measured, see Cluster."""

    @classmethod
    def uniform(
        cls, layers: Sequence[int], variant: str, candidates: tuple[Prediction, ...], cluster: str,
        *, ep: int, etp: int, experts: int, gpu_settings: Mapping[str, str | int] | None = None,
    ) -> Plan:  # fmt: skip
        """The same variant in all layers."""
        return cls(dict.fromkeys(layers, variant), candidates, cluster, ep, etp, experts, gpu_settings)

    @classmethod
    def load(cls, file: str | Path) -> Plan:
        """Reads a file that `save` wrote.

        Raises:
            ConfigurationError: the file, the line, the value there and what is wrong with it.
        """
        root = JsonPlace.root(Path(file))
        root.check_format(FORMAT, VERSION, "moe-opt plan", "make the plan")
        top = root.fields("format", "version", "cluster", "ep", "etp", "experts", "layers", "candidates",
                          optional=["gpu_settings"])  # fmt: skip
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
            None if top["gpu_settings"].value is None else facts(top["gpu_settings"]),
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
            "layers": {str(number): variant for number, variant in sorted(self.layers.items())},
            "candidates": [_numbers(one) for one in self.candidates],
        }
        write_text_whole(file, json.dumps(content, indent=2) + "\n")

    def variant_of(self, layer: int, file: str | Path) -> str:
        """What to run in a layer.

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

    def check(self, file: str | Path, *, ep: int, etp: int, experts: int) -> None:
        """Refuses layers of other sizes than the plan was made for.

        Raises:
            ConfigurationError: the flag, its value and the planned one.
        """
        for flag, planned, asked in (
            ("--expert-model-parallel-size", self.ep, ep),
            ("--expert-tensor-parallel-size", self.etp, etp),
            ("--num-experts", self.experts, experts),
        ):
            if planned != asked:
                raise ConfigurationError(
                    f"{flag} {asked} is not what --moe-opt-plan {file} was made for ({planned}): make a plan for this "
                    "run with moe-opt plan"
                )


def _numbers(one: Prediction) -> dict[str, Any]:
    """Returns what a plan keeps of a prediction: all but its parts and timelines."""
    kept = asdict(replace(one, timelines=()))
    return {name: value for name, value in kept.items() if name not in ("parts", "timelines")}


def _candidate(place: JsonPlace) -> Prediction:
    fields = place.fields("variant", "seconds", "exposed", "inter_bytes", "intra_bytes", "activation_bytes", "terms")
    return Prediction(
        fields["variant"].word(),
        fields["seconds"].positive(),
        fields["exposed"].not_negative(),
        fields["inter_bytes"].not_negative(),
        fields["intra_bytes"].not_negative(),
        fields["activation_bytes"].count(),
        {name: seconds.not_negative() for name, seconds in fields["terms"].object().items()},
    )
