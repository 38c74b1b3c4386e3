"""Trains unmodified pretrain_gpt.py with every feature of FEATURES under every dispatcher, and says what came out.

    python -m tools.megatron_checks.feature_matrix MEGATRON_LM_CHECKOUT [--features "EP 2;bf16"] [--dispatchers monta]
        [--table FILE]

Each cell is a run of a few steps on the CPU over Gloo, held against stock `alltoall` with the same feature: equal,
refused with a sentence of ours, or refused by Megatron under stock too. A traceback of ours, other losses, or a run
that does not end is a failure, and the exit status 1. What has run is kept in --folder with the output of each cell,
and is not run again: the command goes on where it was stopped. Give a checkout of the installed megatron-core's
version, and install what it needs: `pip install --no-build-isolation -e ".[megatron-lm]"`.

The ranks are forked from this process, which has imported all that they need: each then runs what `torchrun ... -m
megatron_moe_opt.launch pretrain_gpt.py ...` runs.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools import ROOT
from tools.forked_ranks import DID_NOT_END, start_job
from tools.markdown_rows import head, row

STOCK = "alltoall"
OPTIONS = {
    "monta": "",
    "parm": "",
    "mpmoe": "",
    "mpmoe:2:S1:hops": "--moe-opt-partitions 2 --moe-opt-memory-reuse S1 --moe-opt-way hops",
    "mpmoe:2:hops:2": "--moe-opt-partitions 2 --moe-opt-way hops --moe-opt-domain-sizes 2",
    "netmoe": "",
    "netmoe:hops": "--moe-opt-way hops",
    "expert-migration": "",
    "expert-migration:2": "--moe-opt-domain-sizes 2",
    "auto": "--moe-opt-profile-seconds 1",  # a measurement that is as short as the runs are
    "deepspeed": "",
}
"""What is given beside `--moe-token-dispatcher-type`, by variant: in those that end with 2 experts travel."""
DISPATCHERS = tuple(OPTIONS)
FAILURES = ("different", "traceback", "did not end")
ROOM = max(4, os.cpu_count() or 1)
"""How many ranks run at a time."""

OTHER_DRAWS = ("netmoe",)
"""Dispatchers under which other numbers are drawn, of the same distribution (docs/netmoe.md)."""

FP32, HALF = 1e-5, 5e-3
"""The most that a loss may be off, relatively: another order of sums. More in half precision, and where tokens drop."""

WITHOUT_LIBRARIES = (
    "--transformer-impl local --no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion"
    " --no-masked-softmax-fusion --no-bias-swiglu-fusion"
)
"""What Megatron needs where neither Transformer Engine nor Apex is installed."""

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0"
    " --attention-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --micro-batch-size 1"
    " --global-batch-size 4 {length} --split 9,1,0 --eval-iters 0"
    " --eval-interval 1000 --log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --num-workers 0"
    f" --distributed-timeout-minutes 2 --seed 1 {WITHOUT_LIBRARIES}"
)


@dataclass(frozen=True)
class Feature:
    """What is added to BASE, of whose arguments those that are given again are replaced."""

    name: str
    arguments: str = ""
    ranks: int = 2
    tolerance: float = FP32
    environment: str = ""
    """`NAME=VALUE ...` of the runs."""
    is_drawn: bool = False
    """Routers draw numbers on the rank where a sample is, which OTHER_DRAWS moves."""
    length: str = "--train-iters 3 --lr 1e-3 --lr-decay-iters 3"
    """How long to train: BASE leaves it open."""
    without: str = ""
    """A flag of BASE that is left out."""


NO_BIASES = "--disable-bias-linear"
BALANCE = "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type"
CAPACITY = "--moe-expert-capacity-factor 1.0"
TOP1 = "--moe-router-topk 1 --moe-router-pre-softmax"
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
PP2 = f"{EP2} --pipeline-model-parallel-size 2"
ALL_LAYERS = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
MODULES = f"{EP2} --recompute-granularity selective --recompute-modules"
SHARED = f"{EP2} --moe-shared-expert-intermediate-size 32"
OVERLAP = f"{EP2} --bf16 --overlap-moe-expert-parallel-comm"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS=32"
GRAPHS = f"{EP2} --te-rng-tracker --cuda-graph-impl"

FEATURES = (
    Feature("EP 2", EP2),
    Feature("EP 4", EP4, 4),
    Feature("EP 2, two replicas", EP2, 4),
    Feature("EP 1", ""),
    Feature("experts that EP does not divide", f"{EP2} --num-experts 7"),
    Feature("expert-TP 2", f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel", 4),
    Feature("TP 2, sequence parallel", f"{EP4} {TP2} --sequence-parallel", 4),
    Feature("TP 2, replicated tokens", f"{EP4} {TP2}", 4),
    Feature("biases", EP2, without=NO_BIASES),
    Feature("biases, TP 2, sequence parallel", f"{EP4} {TP2} --sequence-parallel", 4, without=NO_BIASES),
    Feature("biases, TP 2, replicated tokens", f"{EP4} {TP2}", 4, without=NO_BIASES),
    Feature("CP 2", f"{EP4} --context-parallel-size 2", 4),
    Feature("PP 2", PP2, 4),
    Feature("PP 2, virtual stages", f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", 4),
    Feature("PP 2, a stage without experts", f"{PP2} --moe-layer-freq [0,1]", 4),
    Feature("distributed optimizer", f"{EP2} --use-distributed-optimizer", 4),
    Feature(
        "overlapped gradient reduction and parameter gather",
        f"{EP2} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 4,
    ),
    Feature("SGD", f"{EP2} --optimizer sgd"),
    Feature("per-token loss", f"{EP2} --calculate-per-token-loss"),
    Feature(
        "rampup of the batch", f"{EP2} --rampup-batch-size 2 2 4",
        length="--train-samples 12 --lr 1e-3 --lr-decay-samples 12",
    ),
    Feature("bf16", f"{EP2} --bf16", tolerance=HALF),
    Feature("fp16", f"{EP2} --fp16 --initial-loss-scale 1024", tolerance=HALF),
    Feature("fp32 residual", f"{EP2} --bf16 --fp32-residual-connection", tolerance=HALF),
    Feature("top-1", f"{EP2} {TOP1}"),
    Feature("top-4", f"{EP2} --moe-router-topk 4"),
    Feature("auxiliary loss", f"{EP2} {BALANCE} aux_loss"),
    Feature("auxiliary loss by sequence", f"{EP2} {BALANCE} seq_aux_loss"),
    Feature("global auxiliary loss", f"{EP2} {BALANCE} global_aux_loss"),
    Feature("sinkhorn", f"{EP2} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1"),
    Feature("no load balancing", f"{EP2} --moe-router-load-balancing-type none"),
    Feature("z-loss", f"{EP2} --moe-z-loss-coeff 1e-3"),
    Feature(
        "sigmoid scores, expert bias",
        f"{EP2} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
        " --moe-router-load-balancing-type none",
    ),
    Feature("groups of experts", f"{EP2} --num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 1"),
    Feature("softmax before top-k, scaled", f"{EP2} --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5"),
    Feature("router in fp32", f"{EP2} --bf16 --moe-router-dtype fp32", tolerance=HALF),
    Feature("router in fp64", f"{EP2} --moe-router-dtype fp64"),
    Feature("jitter of the router's input", f"{EP2} --moe-input-jitter-eps 0.01", is_drawn=True),
    Feature("forced balance", f"{EP2} --moe-router-force-load-balancing", is_drawn=True),
    Feature("capacity", f"{EP2} {CAPACITY}", tolerance=HALF),
    Feature("capacity, padded", f"{EP2} {CAPACITY} --moe-pad-expert-input-to-capacity", tolerance=HALF),
    Feature("capacity by position", f"{EP2} {CAPACITY} --moe-token-drop-policy position"),
    Feature("probabilities on the input", f"{EP2} {TOP1} --moe-apply-probs-on-input"),
    Feature("shared experts", SHARED),
    Feature("shared experts, overlapped", f"{SHARED} --moe-shared-expert-overlap"),
    Feature("latent experts", f"{EP2} --moe-latent-size 16"),
    Feature("dense layers between", f"{EP2} --moe-layer-freq 2"),
    Feature("grouped GEMM", f"{EP2} --moe-grouped-gemm"),
    Feature("fused permutation", f"{EP2} --moe-permute-fusion"),
    Feature("all layers recomputed", f"{EP2} {ALL_LAYERS} uniform"),
    Feature("one layer recomputed", f"{EP2} {ALL_LAYERS} block"),
    Feature("attention recomputed", f"{MODULES} core_attn"),
    Feature("MoE layers recomputed", f"{MODULES} moe"),
    Feature("activations of experts recomputed", f"{MODULES} moe_act"),
    Feature("norms recomputed", f"{MODULES} layernorm"),
    Feature("shared experts recomputed", f"{MODULES} shared_experts --moe-shared-expert-intermediate-size 32"),
    Feature("grouped queries", f"{EP2} --group-query-attention --num-query-groups 2"),
    Feature("norms of queries and keys", f"{EP2} --qk-layernorm"),
    Feature("multi-latent attention", f"{EP2} --multi-latent-attention"),
    Feature("learned positions, tied embeddings", f"{EP2} --position-embedding-type learned_absolute"),
    Feature("untied embeddings", f"{EP2} --untie-embeddings-and-output-weights"),
    Feature("hidden dropout", f"{EP2} --hidden-dropout 0.1"),
    Feature("documents that do not see each other", f"{EP2} --reset-attention-mask --reset-position-ids"),
    Feature("multi-token prediction", f"{EP2} --mtp-num-layers 1"),
    Feature("evaluation", f"{EP2} --eval-iters 1 --eval-interval 1"),
    Feature("checkpoints", f"{EP2} --save {{folder}}/saved --save-interval 2 --ckpt-format torch_dist"),
    Feature("1F1B overlap", OVERLAP, tolerance=HALF, environment=QUEUES),
    Feature(
        "1F1B overlap, delayed weight gradients", f"{OVERLAP} --delay-wgrad-compute", tolerance=HALF,
        environment=QUEUES,
    ),
    Feature(
        "1F1B overlap, virtual stages",
        f"{OVERLAP} --pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", 4,
        tolerance=HALF, environment=QUEUES,
    ),
    Feature("CUDA graphs, whole", f"{GRAPHS} local"),
    Feature("CUDA graphs of attention", f"{GRAPHS} transformer_engine --cuda-graph-scope attn"),
    Feature("CUDA graphs of the router", f"{GRAPHS} transformer_engine --cuda-graph-scope moe_router"),
    Feature(
        "Megatron-FSDP",
        f"{EP2} --use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params", 4,
        environment=QUEUES,
    ),
    Feature("torch FSDP2", f"{EP2} --use-torch-fsdp2 --ckpt-format torch_dist", 4, environment=QUEUES),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """What came out of a run."""

    feature: str
    dispatcher: str
    status: str
    """equal; other draws; refused (by ours); as stock (Megatron refuses both); runs (where stock does not); or one of
    FAILURES."""
    detail: str = ""
    """The refusal, the last line of a traceback, or the largest difference."""
    losses: tuple[str, ...] = ()
    seconds: float = 0.0
    key: str = ""
    """A hash of the command, the checkout and this package, by which a cell is known again."""


def command_of(feature: Feature, dispatcher: str, checkout: Path, folder: Path) -> list[str]:
    """Returns what the launcher is told."""
    base = BASE.replace(feature.without, "")
    arguments = f"{base} {feature.arguments}".replace("{length}", feature.length).replace("{folder}", str(folder))
    ours = f"--moe-token-dispatcher-type {_type_of(dispatcher)} {OPTIONS.get(dispatcher, '')}"
    return [str(checkout / "pretrain_gpt.py"), *shlex.split(arguments), *shlex.split(ours)]


def _type_of(variant: str) -> str:
    return variant.partition(":")[0]


def key_of(feature: Feature, dispatcher: str, checkout: Path) -> str:
    """Returns what a cell is known again by: what it runs, and the sources that run."""
    what = [feature.ranks, feature.environment, *command_of(feature, dispatcher, Path(checkout.name), Path())]
    return hashlib.sha256(repr(what).encode() + _sources()).hexdigest()[:16]


@functools.cache
def _sources() -> bytes:
    digest = hashlib.sha256()
    for source in sorted((ROOT / "megatron_moe_opt").rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()


def prepare(checkout: Path) -> None:
    """Imports what a run imports, in the order of a run, and into what each run starts with."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    sys.path[:0] = [str(checkout), str(ROOT)]
    import megatron_moe_opt

    megatron_moe_opt.use_host_backend()
    megatron_moe_opt.register(refuse_unread=True)  # what each run's own call finds done, but for its options
    importlib.import_module("pretrain_gpt")
    importlib.import_module("torch._dynamo")  # by the first optimizer, and so in each rank, for seconds
    inspect.getmodule(prepare.__code__)  # Python then looks through all modules once, not in each rank
    gc.freeze()  # nothing of it goes: ranks need not look through it, which would copy the pages that they share


def _launch(command: list[str]) -> None:
    """Does what `python -m megatron_moe_opt.launch` does."""
    sys.argv[1:] = command
    runpy.run_module("megatron_moe_opt.launch", run_name="__main__", alter_sys=True)


def run(
    todo: Sequence[tuple[Feature, str]], checkout: Path, folder: Path, timeout: float
) -> Iterator[tuple[Feature, str, int | None, str, float]]:
    """Trains, as many side by side as there is room for.

    Yields:
        as each ends: the feature, the dispatcher, the exit status, None where it did not end, what the ranks wrote, and
        the seconds that it took.
    """
    waiting = list(reversed(todo))
    running: dict[int, tuple[Feature, str, Path, float]] = {}
    while waiting or running:
        while waiting and sum(one.ranks for one, *_ in running.values()) + waiting[-1][0].ranks <= ROOM:
            feature, name = waiting.pop()
            own = Path(tempfile.mkdtemp())
            launch = functools.partial(_launch, command_of(feature, name, checkout, own))
            variables = dict(word.split("=", 1) for word in feature.environment.split())
            job = start_job(launch, feature.ranks, variables, own, timeout)
            running[job] = feature, name, own, time.monotonic()
        job, ended = os.wait()
        feature, name, own, began = running.pop(job)
        text = "\n".join((own / f"{rank}.txt").read_text(errors="replace") for rank in range(feature.ranks))
        shutil.rmtree(own)
        (folder / f"{re.sub('[^a-z0-9]+', '-', feature.name.lower())}.{name}.txt").write_text(text)
        status = os.waitstatus_to_exitcode(ended)
        yield feature, name, None if status == DID_NOT_END else status, text, round(time.monotonic() - began, 1)


def losses_of(text: str) -> tuple[str, ...]:
    """Returns the loss of each step as Megatron has printed it."""
    return tuple(re.findall(r"iteration +\d+/.*?lm loss: ([-+.\deEnainf]+) ", text))


def refusal_in(text: str) -> str | None:
    """Returns our sentence, where a run ended with one before it trained, and without a traceback."""
    said = re.findall(r"moe-opt: error: (.*)", text)
    failed = "Traceback (most recent call last)" in text or any(" failed first, " in one for one in said)
    return said[-1] if said and not failed else None


def last_error(text: str) -> str:
    """Returns what the first traceback says was raised. Empty where there is no traceback."""
    _, _, after = text.partition("Traceback (most recent call last)")
    raised = re.search(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)$", after, re.M)
    return re.sub("0x[0-9a-f]+", "0x...", raised[1].strip()) if raised else "unknown" if after else ""


def difference(losses: Sequence[str], stock: Sequence[str]) -> float:
    """Returns the largest relative difference of two runs' losses; infinite where one has more steps than the other."""
    pairs = [(float(one), float(other)) for one, other in zip(losses, stock, strict=False)]
    if not pairs or len(losses) != len(stock):
        return float("inf")
    return max(abs(one - other) / abs(other) for one, other in pairs)


def judged(feature: Feature, dispatcher: str, status: int | None, text: str, stock: Cell | None) -> tuple[str, str]:
    """Returns the status of a cell, and its detail.

    Args:
        stock: the cell of stock with the same feature; None: this is it.
    """
    if status is None:
        return "did not end", ""
    losses = losses_of(text)
    if status == 0 and losses:
        if stock is None:
            return "equal", ""
        if stock.status != "equal":
            return "runs", ""
        off = difference(losses, stock.losses)
        if off > feature.tolerance and feature.is_drawn and _type_of(dispatcher) in OTHER_DRAWS:
            return ("other draws" if off <= HALF else "different"), f"{off:.1e}"
        return ("equal" if off <= feature.tolerance else "different"), f"{off:.1e}"
    refused = refusal_in(text)
    if refused is not None:
        return "refused", refused
    raised = last_error(text)
    if stock is None or (stock.status == "as stock" and raised == stock.detail):
        return "as stock", raised
    return "traceback", raised


def table(cells: dict[tuple[str, str], Cell], features: Sequence[Feature], dispatchers: Sequence[str]) -> str:
    """Returns the cells as a page: a table, and the sentences that it refers to by number."""
    numbers: dict[str, int] = {}

    def shown(cell: Cell | None) -> str:
        if cell is None:
            return ""
        if cell.status == "equal":
            return "=" if not cell.detail or float(cell.detail) == 0 else f"= {cell.detail}"
        if not cell.detail or cell.status == "other draws":
            return f"{cell.status} {cell.detail}".strip()
        flag = "--moe-token-dispatcher-type"
        generic = cell.detail.replace(f"{flag} {_type_of(cell.dispatcher)}", f"{flag} ...")
        return f"{cell.status} ({numbers.setdefault(generic, len(numbers) + 1)})"

    columns = (STOCK, *dispatchers)
    rows = [[one.name, *(shown(cells.get((one.name, name))) for name in columns)] for one in features]
    ran = [cells for cells in rows if any(cells[1:])]
    lines = [*head("", *(f"`{name}`" for name in columns), texts=1 + len(columns)), *(row(*cells) for cells in ran)]
    return "\n".join([*lines, "", *(f"{number}. `{sentence}`" for sentence, number in numbers.items())])


def read(file: Path) -> dict[tuple[str, str], Cell]:
    """Returns the cells that have run, the last of each."""
    lines = file.read_text().splitlines() if file.exists() else []
    cells = [Cell(**content | {"losses": tuple(content["losses"])}) for content in map(json.loads, lines)]
    return {(cell.feature, cell.dispatcher): cell for cell in cells}


def chosen(names: str | None, separator: str, known: Sequence[str], flag: str) -> list[str]:
    """Returns what an option names of what there is; everything where it is not given."""
    wanted = list(known) if names is None else [name.strip() for name in names.split(separator)]
    for name in wanted:
        if name not in known:
            sys.exit(f"tools.megatron_checks.feature_matrix: {flag} {name} is unknown: choose from {'; '.join(known)}")
    return wanted


def main() -> int:
    """Returns 1 where a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--features", help="those to run, separated by semicolons (default: all)")
    parser.add_argument("--dispatchers", help="those to run, separated by commas (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("runs/feature-matrix"))
    parser.add_argument("--table", type=Path, help="where to write the table, besides the standard output")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a cell (default: 600)")
    asked = parser.parse_args()
    checkout, folder = asked.checkout.resolve(), asked.folder.resolve()
    if not (checkout / "pretrain_gpt.py").is_file():
        sys.exit(
            f"tools.megatron_checks.feature_matrix: {checkout} has no pretrain_gpt.py: give a checkout of Megatron-LM"
        )
    folder.mkdir(parents=True, exist_ok=True)
    named = {one.name: one for one in FEATURES}
    features = [named[name] for name in chosen(asked.features, ";", list(named), "--features")]
    dispatchers = chosen(asked.dispatchers, ",", DISPATCHERS, "--dispatchers")
    file = folder / "cells.jsonl"
    cells = read(file)
    wanted = [(feature, name) for feature in features for name in (STOCK, *dispatchers)]
    keys = {(feature.name, name): key_of(feature, name, checkout) for feature, name in wanted}
    known = {place for place, key in keys.items() if place in cells and cells[place].key == key}
    todo = [(feature, name) for feature, name in wanted if (feature.name, name) not in known]
    if todo:
        prepare(checkout)
    done = len(known)
    for with_stock in (True, False):  # which the others are held against
        now = [(feature, name) for feature, name in todo if (name == STOCK) == with_stock]
        for feature, name, status, text, seconds in run(now, checkout, folder, asked.timeout):
            stock = None if name == STOCK else cells[feature.name, STOCK]
            outcome = judged(feature, name, status, text, stock)
            cell = Cell(feature.name, name, *outcome, losses_of(text), seconds, keys[feature.name, name])
            cells[feature.name, name] = cell
            with open(file, "a") as log:
                log.write(json.dumps(asdict(cell)) + "\n")
            done += 1
            print(f"[{done}/{len(wanted)}] {feature.name}, {name}: {cell.status} {cell.detail}"[:160], flush=True)
    page = table(cells, FEATURES, DISPATCHERS)
    print(f"\n{page}")
    if asked.table is not None:
        asked.table.write_text(page + "\n")
    failed = [cell for cell in cells.values() if cell.status in FAILURES]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
