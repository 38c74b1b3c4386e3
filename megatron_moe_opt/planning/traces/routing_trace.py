"""Routing of a training run: the experts that each token went to, pass by pass, and its file.

A pass is one micro-batch through the model, over all ranks. Its samples are numbered as stock Megatron places them:
those of the first data-parallel rank, those of the second, and so on.

The file is a NumPy .npz with the fields below, `format` and `version`; it holds no pickled objects.

Shapes: P passes, L MoE layers, I samples of T tokens, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_moe_opt.errors import ConfigurationError, reason
from megatron_moe_opt.output_file import written_whole

FORMAT = "moe-opt routing trace"
VERSION = 1
MAX_EXPERTS = 2**16
MAX_KINDS = 2**15  # of int16
UNKNOWN = -1  # the kind of a sample of which nothing is known


@dataclass(frozen=True)
class RoutingTrace:
    """The experts that every token went to, recorded in training or generated.

    Raises:
        ValueError: arrays that are no routing, or do not fit each other; the text says which.
    """

    experts: np.ndarray
    """The K different experts of each token, in no order, uint16 [P, L, I, T, K]."""
    num_experts: int
    layers: np.ndarray
    """Megatron's numbers (from 1 on) of the MoE layers, ascending, int64 [L]."""
    iterations: np.ndarray
    """The training iteration of each pass, int64 [P]."""
    kinds: np.ndarray
    """What kind of text a sample is, as an index into `kind_names`, int16 [P, I]; -1 where it is not known."""
    kind_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        experts = self.experts
        if experts.dtype != np.uint16 or experts.ndim != 5 or 0 in experts.shape:
            raise ValueError(f"experts is {experts.dtype} {list(experts.shape)}, not uint16 [P, L, I, T, K]")
        passes, layers, samples, _, topk = experts.shape
        if not topk <= self.num_experts <= MAX_EXPERTS:
            raise ValueError(f"num_experts is {self.num_experts}, not between {topk} (of a token) and {MAX_EXPERTS}")
        _check("layers", self.layers, np.int64, (layers,))
        _check("iterations", self.iterations, np.int64, (passes,))
        _check("kinds", self.kinds, np.int16, (passes, samples))
        if self.layers[0] < 1 or (np.diff(self.layers) <= 0).any():
            raise ValueError(f"layers is {reprlib.repr(self.layers.tolist())}, not ascending from 1 on")
        if self.kinds.min() < UNKNOWN or self.kinds.max() >= len(self.kind_names):
            raise ValueError(f"kinds is {self.kinds.min()} to {self.kinds.max()} of {len(self.kind_names)} names")
        if experts.max() >= self.num_experts:
            raise ValueError(f"experts names expert {experts.max()} of {self.num_experts}")
        ordered = np.sort(experts, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ValueError("experts has a token that goes to one expert twice")

    @property
    def num_passes(self) -> int:
        """How many forward passes were recorded: P of the shapes."""
        return self.experts.shape[0]

    @property
    def num_samples(self) -> int:
        """How many samples a pass has, on all ranks together: I of the shapes."""
        return self.experts.shape[2]

    def counts(self) -> np.ndarray:
        """Returns the tokens of each sample for each expert, int64 [P, L, I, E] (NetMoE, eq. 2)."""
        passes, layers, samples, _, _ = self.experts.shape
        rows = self.experts.reshape(passes * layers * samples, -1)
        counted = [np.bincount(row, minlength=self.num_experts) for row in rows]
        return np.stack(counted).reshape(passes, layers, samples, self.num_experts)

    def of_passes(self, begin: int, end: int) -> RoutingTrace:
        """Returns a trace of the passes from `begin` on, before `end`."""
        part = slice(begin, end)
        return replace(self, experts=self.experts[part], iterations=self.iterations[part], kinds=self.kinds[part])


def _check(name: str, array: np.ndarray, dtype: type, shape: Sequence[int]) -> None:
    if array.dtype != dtype or array.shape != tuple(shape):
        wanted = f"{np.dtype(dtype)} {list(shape)}"
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, not {wanted}")


def write_routing_trace(path: Path, trace: RoutingTrace) -> None:
    """Writes the file; it appears under its name only when complete.

    Raises:
        ConfigurationError: it cannot be written.
    """
    content: dict[str, Any] = {field.name: getattr(trace, field.name) for field in fields(trace)}
    content["kind_names"] = np.array(trace.kind_names, dtype=np.str_)
    with written_whole(path) as partial, open(partial, "wb") as file:
        np.savez_compressed(file, format=np.str_(FORMAT), version=VERSION, **content)


def read_routing_trace(path: Path) -> RoutingTrace:
    """Reads the file, and checks all of it.

    Raises:
        ConfigurationError: the file, what is wrong with it, and the way out.
    """

    def refuse(problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"{path} {problem}: give a file of moe-opt trace record, or of moe-opt trace generate"
        )

    try:
        if not is_routing_trace(path):
            raise refuse("is not a routing trace")
        with np.load(path, allow_pickle=False) as file:
            if "version" not in file.files or file["version"].shape or file["version"] != VERSION:
                raise refuse(f"is not a routing trace of version {VERSION}")
            names = {field.name for field in fields(RoutingTrace)}
            missing = sorted(names - set(file.files))
            if missing:
                raise refuse(f"has no {missing[0]}")
            content = {name: file[name] for name in names}
            damaged = sorted(name for name, array in content.items() if not isinstance(array, np.ndarray))
            if damaged:
                raise refuse(f"cannot be read ({damaged[0]} is not an array)")
    except FileNotFoundError:
        raise refuse("does not exist") from None
    except ConfigurationError:
        raise
    except Exception as error:  # of a damaged or lying header NumPy raises nearly anything
        raise refuse(f"cannot be read ({reason(error)})") from error
    for name, kind, dims in (("num_experts", "iu", 0), ("kind_names", "U", 1)):
        if content[name].ndim != dims or content[name].dtype.kind not in kind or content[name].size > MAX_KINDS:
            raise refuse(f"cannot be used: {name} is {content[name].dtype} {list(content[name].shape)}")
    content |= {"num_experts": int(content["num_experts"]), "kind_names": tuple(content["kind_names"].tolist())}
    try:
        return RoutingTrace(**content)
    except ValueError as error:
        raise refuse(f"cannot be used: {error}") from error


def is_routing_trace(path: Path) -> bool:
    """Whether the file says that it is one, of whatever version.

    Raises:
        Exception: it cannot be read.
    """
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return False
    with np.load(path, allow_pickle=False) as content:
        return "format" in content.files and content["format"].dtype.kind == "U" and str(content["format"]) == FORMAT
