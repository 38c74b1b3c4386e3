"""Files that commands and training read, damaged at random: each is read, or refused in one printable sentence with its
name. The long form, `python -m tests.unit.cli.test_damaged_files N SEED`, tries N damages of each file.
"""

from __future__ import annotations

import functools
import io
import json
import random
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_moe_opt.cli.bench.saved_report import read_report, write_report
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.workloads import load_trace
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.offline.expert_order import ExpertOrder, read_expert_order, write_expert_order
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.traces.routing_trace import read_routing_trace, write_routing_trace
from tests.unit.planning.test_cluster_file import CLUSTER
from tests.unit.planning.test_plan_file import PLAN
from tests.unit.report_cases import made_report
from tests.unit.trace_cases import random_trace

CHOICES = torch.tensor([[0, 1], [2, 3], [4, 5]])

WORDS = [
    "null", "true", "-1", "0", "1e400", "-0.0", "NaN", "-Infinity", "9" * 400, "9" * 5000, "18446744073709551616",
    '""', '"\\ud800"', '"\\u0000\\u001b[2J"', '"a\\nb"', '"ep"', "[]", "{}", "[" * 900 + "]" * 900, "[" * 100_000,
    '{"\\ud800": 1}', '{"9": ' * 30 + "1" + "}" * 30, '"' + "x" * 100_000 + '"', '{"' + "9" * 5000 + '": ["a"]}',
]  # fmt: skip
"""Values that take the place of others, of which some are no JSON."""

DTYPES = ["<u2", ">u2", "<i8", "<f8", "|b1", "<U5", "|O", "|V0", "<M8[ns]", "<c16", "<U0", "[('a', '<i8')]", "x" * 99]
SHAPES = ["()", "(0,)", "(-1,)", "(4611686018427387904,)", "(4294967296, 4294967296)", "(1,) * 9", "3", "(True,)",
          "(1,)" * 3000, "(2, 2)", "[" * 5000, "(99999999999999999999,)"]  # fmt: skip

TENSORS: list[Callable[[], Any]] = [
    lambda: CHOICES.to("meta"),
    lambda: CHOICES.to_sparse(),
    lambda: CHOICES.to_sparse_csr(),
    lambda: torch.quantize_per_tensor(CHOICES.float(), 1.0, 0, torch.qint8),
    lambda: torch.nested.nested_tensor([CHOICES, CHOICES]),
    lambda: CHOICES.to(torch.complex64),
    lambda: CHOICES.to(torch.float8_e4m3fn),
    lambda: torch.nn.Parameter(CHOICES.float()),
    lambda: torch.zeros(1, 1, dtype=torch.int64).expand(2**45, 2),
    lambda: CHOICES[0],
    lambda: CHOICES.to(torch.uint64),
    lambda: CHOICES.numpy(),
    lambda: [CHOICES],
    lambda: {"routing": CHOICES},
    lambda: functools.partial(print),
]


def damaged_json(content: bytes, chooser: random.Random) -> bytes:
    """One value, or one name, is another."""
    if chooser.random() < 0.3:
        return damaged_bytes(content, chooser)
    tree = json.loads(content)
    places = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                walk(value[key])

    walk(tree)
    place, key = chooser.choice(places)
    word = chooser.choice(WORDS)
    if isinstance(place, dict) and chooser.random() < 0.2:
        place["@"] = place.pop(key)
        return json.dumps(tree).encode().replace(b'"@"', json.dumps(word).encode())
    place[key] = "@"
    return json.dumps(tree, indent=chooser.choice([None, 2])).encode().replace(b'"@"', word.encode())


def damaged_bytes(content: bytes, chooser: random.Random) -> bytes:
    """Cut, with other bytes, or with bytes of another place."""
    first = chooser.randrange(len(content))
    length = chooser.choice([1, 2, 40])
    match chooser.randrange(3):
        case 0:
            return content[:first]
        case 1:
            return content[:first] + chooser.randbytes(length) + content[first + length :]
    other = chooser.randrange(len(content))
    return content[:first] + content[other : other + length] + content[first:]


def damaged_arrays(content: bytes, chooser: random.Random) -> bytes:
    """A whole archive, in which a member says that it is something else."""
    if chooser.random() < 0.3:
        return damaged_bytes(content, chooser)
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(written, "w") as damaged:
        target = chooser.choice(archive.namelist())
        for name in archive.namelist():
            member = archive.read(name)
            if name == target and chooser.random() < 0.1:
                member = damaged_bytes(member, chooser)
            elif name == target:
                dtype, shape = chooser.choice(DTYPES), chooser.choice(SHAPES)
                described = dtype if dtype.startswith("[") else f"'{dtype}'"
                header = f"{{'descr': {described}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
                size = len(header).to_bytes(4, "little")
                member = b"\x93NUMPY\x02\x00" + size + header + member[128:]
            damaged.writestr(name, member)
    return written.getvalue()


def damaged_tensor(content: bytes, chooser: random.Random) -> bytes:
    """Another tensor, or other bytes in the archive's files."""
    if chooser.random() < 0.5:
        written = io.BytesIO()
        torch.save(chooser.choice(TENSORS)(), written)
        return written.getvalue()
    if chooser.random() < 0.5:
        return damaged_bytes(content, chooser)
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(written, "w") as damaged:
        target = chooser.choice(archive.namelist())
        for name in archive.namelist():
            member = archive.read(name)
            damaged.writestr(name, damaged_bytes(member, chooser) if name == target and member else member)
    return written.getvalue()


def write_choices(path: Path) -> None:
    np.savez(path, routing=CHOICES.numpy())


def read_choices(path: Path) -> torch.Tensor:
    return load_trace(path, experts=8, topk=2)


FILES: dict[str, tuple[Callable, Callable, Callable]] = {
    "cluster.json": (CLUSTER.save, Cluster.load, damaged_json),
    "plan.json": (PLAN.save, Plan.load, damaged_json),
    "layer.json": (lambda path: write_report(path, made_report()), read_report, damaged_json),
    "order.json": (
        lambda path: write_expert_order(path, ExpertOrder(4, 1, 2, {1: (0, 2, 1, 3), 3: (0, 1, 2, 3)})),
        read_expert_order,
        damaged_json,
    ),
    "trace.npz": (lambda path: write_routing_trace(path, random_trace()), read_routing_trace, damaged_arrays),
    "choices.npz": (write_choices, read_choices, damaged_arrays),
    "choices.pt": (lambda path: torch.save(CHOICES, path), read_choices, damaged_tensor),
}
"""How each is written, read and damaged."""


def check(name: str, number: int, seed: int, folder: Path) -> int:
    """Damages a file so many times. Returns how often it was refused."""
    write, read, damage = FILES[name]
    path, chooser, refused = folder / name, random.Random(f"{name} {seed}"), 0
    write(path)
    content = path.read_bytes()
    for turn in range(number):
        path.write_bytes(damage(content, chooser))
        try:
            read(path)
        except ConfigurationError as error:
            message = str(error)
            assert name in message and message.isprintable() and len(message) < 1000, (turn, message[:2000])
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{name}, seed {seed}, turn {turn}: {error!r}"[:2000]) from error
    return refused


@pytest.mark.filterwarnings("ignore")  # of PyTorch and NumPy, about what they were given
@pytest.mark.parametrize("name", FILES)
def test_is_read_or_refused(tmp_path, name):
    assert check(name, 150, 1, tmp_path) > 75


if __name__ == "__main__":
    for file in sys.argv[3:] or FILES:
        with tempfile.TemporaryDirectory() as place:
            print(file, check(file, int(sys.argv[1]), int(sys.argv[2]), Path(place)), "refused")
