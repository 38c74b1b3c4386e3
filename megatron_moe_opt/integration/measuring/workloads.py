"""Expert choices for benchmarks: seeded workloads, or a trace recorded elsewhere."""

from __future__ import annotations

import zipfile
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch

from megatron_moe_opt.errors import ConfigurationError, reason
from megatron_moe_opt.output_file import format_of
from megatron_moe_opt.planning.traces.routing_trace import is_routing_trace, read_routing_trace

WORKLOADS = ("uniform", "zipf", "one-hot-expert")
TRACE_PREFIX = "trace:"
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def check_routing(routing: str, *, experts: int, topk: int) -> None:
    """Refuses a routing before anything runs: raises the ConfigurationError that `choose_experts` would."""
    choose_experts(routing, tokens=1, experts=experts, topk=topk, seed=0, rank=0)


def choose_experts(routing: str, *, tokens: int, experts: int, topk: int, seed: int, rank: int) -> torch.Tensor:
    """Returns the experts of this rank's tokens: int64 [tokens, topk], `topk` different experts in each row.

    Args:
        routing: `uniform`: every choice is equally likely; `zipf`: the i-th most popular expert has weight 1 / i, and
            the seed decides which expert that is, the same for all ranks; `one-hot-expert`: the first choice of every
            token is expert 0, the others are uniform; `trace:FILE`: rows of the file, rank after rank, from the
            beginning again when it ends; of a routing trace (planning/traces/routing_trace.py) the first MoE layer's,
            sample after sample.
        tokens: tokens of this rank.
        experts: experts of the layer.
        topk: experts of a token.
        seed: with `rank`, decides the random choices.
        rank: this rank; ranks choose differently.

    Raises:
        ConfigurationError: an unknown name, or a trace that cannot be used.
    """
    if routing.startswith(TRACE_PREFIX):
        trace = load_trace(Path(routing.removeprefix(TRACE_PREFIX)), experts=experts, topk=topk)
        return trace[(torch.arange(tokens) + rank * tokens) % len(trace)]
    weights = torch.ones(experts)
    if routing == "zipf":
        popularity = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
        weights = 1.0 / (1.0 + popularity)
    elif routing == "one-hot-expert":
        weights[0] = torch.inf
    elif routing != "uniform":
        raise ConfigurationError(
            f"--routing {routing} is unknown: choose one of {', '.join(WORKLOADS)} or {TRACE_PREFIX}FILE"
        )
    # Gumbel top-k: draws without replacement, in proportion to the weights.
    uniform = torch.rand(tokens, experts, generator=torch.Generator().manual_seed((seed << 20) + rank))
    keys = weights.log() - (-uniform.clamp_min(1e-30).log()).log()
    return keys.topk(topk, dim=1).indices


def load_trace(path: Path, *, experts: int, topk: int) -> torch.Tensor:
    """Returns the recorded expert choices of a file: int64 [tokens, topk].

    Args:
        path: a routing trace; or an .npz that holds one array, or a .pt that holds one tensor, of integers
            [tokens, topk].
        experts: experts of the layer; every entry must name one of them.
        topk: columns expected.

    Raises:
        ConfigurationError: the file, what is wrong with it, and what is wanted.
    """

    def refuse(problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"--routing {TRACE_PREFIX}{path} {problem}: give a routing trace, which moe-opt trace record or generate "
            "makes, or an .npz or .pt with one array of integers [tokens, topk]"
        )

    try:
        trace = _read_array(path)
        if trace is None:
            raise refuse("does not hold exactly one array")
        whole = trace.layout is torch.strided and trace.device.type == "cpu" and not trace.is_quantized
        if trace.dtype not in _INTEGERS or trace.dim() != 2 or len(trace) == 0 or not whole:
            raise refuse(f"holds {'' if whole else 'other than plain '}{str(trace.dtype)[6:]} {[*trace.shape]}")
        if trace.nbytes > trace.untyped_storage().nbytes():
            raise refuse(f"holds {[*trace.shape]} in {trace.untyped_storage().nbytes()} bytes")
        if trace.size(1) != topk:
            raise refuse(f"has {trace.size(1)} choices a token where --topk is {topk}")
        trace = trace.long()
    except FileNotFoundError:
        raise refuse("does not exist") from None
    except ConfigurationError:
        raise
    except UnpicklingError:  # which says to trust the file
        raise refuse("is not a trace") from None
    except Exception as error:  # the unpicklers of torch and numpy raise nearly anything
        raise refuse(f"cannot be read ({reason(error)})") from error
    if trace.min() < 0 or trace.max() >= experts:
        raise refuse(f"names experts {trace.min()} to {trace.max()} where --experts is {experts}")
    chosen = trace.sort(dim=1).values
    if (chosen[:, 1:] == chosen[:, :-1]).any():
        raise refuse("chooses an expert twice for one token")
    return trace


def _read_array(path: Path) -> torch.Tensor | None:
    """Returns the one array in the file; None where there is not exactly one."""
    if format_of(path) == ".npz":
        if is_routing_trace(path):
            return torch.from_numpy(read_routing_trace(path).experts[:, 0].astype(np.int64)).flatten(0, 2)
        if path.is_file() and not zipfile.is_zipfile(path):
            raise ValueError("not an .npz file")
        with np.load(path, allow_pickle=False) as arrays:
            return torch.from_numpy(arrays[arrays.files[0]]) if len(arrays.files) == 1 else None
    content = torch.load(path, map_location="cpu", weights_only=True)
    return content if isinstance(content, torch.Tensor) else None
