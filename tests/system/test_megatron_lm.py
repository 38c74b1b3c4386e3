"""Unmodified pretrain_gpt.py: reports in its log and its TensorBoard, of all pipeline stages, and its routing recorded.

Needs a Megatron-LM checkout of the installed megatron-core's version: MEGATRON_LM=PATH.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe_opt.planning.traces.routing_trace import read_routing_trace
from tests.system.training import environment, scalar_names
from tools.megatron_checks.feature_matrix import WITHOUT_LIBRARIES

CHECKOUT = os.environ.get("MEGATRON_LM")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM is not set")

# 256 bytes and the end of a document, which NullTokenizer no longer adds since 0.19.
# 4 micro-batches of a step: the fourth pass of a layer, in iteration 1, is observed, and the eleventh, in iteration 3.
ARGUMENTS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0"
    " --attention-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    " --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8"
    " --train-iters 4 --lr 1e-3 --lr-decay-iters 4 --split 9,1,0 --eval-iters 1 --eval-interval 2 --log-interval 2"
    f" --tokenizer-type NullTokenizer --vocab-size 257 --distributed-timeout-minutes 2 {WITHOUT_LIBRARIES}"
)


def train(folder: Path, module: list[str], *options: str) -> str:
    """Runs the script under a module of ours on four ranks, and returns what they wrote."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m"]
    result = subprocess.run(
        [*launcher, *module, f"{CHECKOUT}/pretrain_gpt.py", *ARGUMENTS, *options],
        env=environment(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.parametrize("dispatcher", ["monta", "alltoall"])
def test_pretrain_gpt_reports(data: Path, tmp_path: Path, dispatcher: str):
    ours = ["--moe-token-dispatcher-type", dispatcher, "--moe-opt-telemetry"]
    output = ["--tensorboard-dir", str(tmp_path / "board"), "--data-path", str(data)]
    written = train(tmp_path, ["megatron_moe_opt.launch"], *ours, *output)
    lines = [line for line in written.splitlines() if "moe-opt: telemetry" in line]
    assert len(lines) == 2 * 5 and sum("2 MoE layers, means of 1 observed pass" in line for line in lines) == 2
    names = scalar_names(tmp_path / "board")
    for layer in (1, 2):
        assert names[f"moe-opt/backward exposed ms/layer {layer}"] == [2, 4]
        assert names[f"moe-opt/intra-node MB/layer {layer}"] == [2, 4]


def test_routing_is_recorded_and_the_same_under_stock(data: Path, tmp_path: Path):
    """The routing of both pipeline stages and data-parallel ranks is recorded, and not that of
    evaluation, which runs in between.
    """
    traces = []
    for dispatcher in ("monta", "alltoall"):
        file = tmp_path / f"{dispatcher}.npz"
        module = ["megatron_moe_opt.cli.main", "trace", "record", "-o", str(file), "--steps", "2-3"]
        train(tmp_path, module, "--moe-token-dispatcher-type", dispatcher, "--data-path", str(data))
        traces.append(read_routing_trace(file))
    ours, stock = traces
    assert ours.experts.shape == (8, 2, 2, 32, 2)  # passes, layers, samples, tokens, top-k
    assert ours.iterations.tolist() == [2] * 4 + [3] * 4 and ours.layers.tolist() == [1, 2]
    assert (ours.experts == stock.experts).all()
