"""The main job: training, resuming, comparing with stock, and refusing what cannot work."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy
import pytest
import torch

from megatron_moe_opt.errors import ConfigurationError
from tests.ranks.job import Job
from tests.ranks.torchrun import run_script
from tests.system.training import (
    LAYOUT,
    MODEL,
    ROOT,
    VARIABLES,
    environment,
    refused,
    scalar_names,
    start,
    train,
    words,
)


def losses(log: Path) -> dict[int, float]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {record["iteration"]: record["loss"] for record in records}


def test_train_and_compare(text: Path, tmp_path: Path):
    """The script behind the quickstart, with fewer steps of a smaller model: all bars met, table and plot written."""
    script = ["bash", str(ROOT / "recipes/train_and_compare.sh")]
    sizes = "--num-layers 2 --moe-layer-freq 2 --hidden-size 64 --moe-ffn-hidden-size 64 --seq-length 64"
    status, printed = run_script(
        [*script, "--text", str(text), "--steps", "16", "--output", str(tmp_path / "out"), "--", *shlex.split(sizes)],
        tmp_path / "ranks",
        environment(),
    )
    assert status == 0, printed
    table = (tmp_path / "out/closing_table.md").read_text()
    assert table.count("- met:") == 3 and "missed" not in table
    for row in ("loss, iteration 16", "all_to_all, intra-node"):
        assert f"| {row}" in table
    assert (tmp_path / "out/loss.png").stat().st_size > 10_000
    assert "MoE layer 1: dispatcher monta" in printed and "tokens/s" in printed
    beside = re.findall(r"loss ([0-9.]+) \(there ([0-9.]+)\)", printed)
    assert len(beside) == 16 and all(abs(float(ours) - float(there)) < 2e-4 for ours, there in beside)


STOCK, MONTA = (("--moe-token-dispatcher-type", name) for name in ("alltoall", "monta"))
SIX = ("--train-iters", 6)


@pytest.fixture(scope="module")
def stock(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of six iterations of stock: what was printed, its log, telemetry, and a checkpoint every two."""
    folder = tmp_path_factory.mktemp("stock")
    train(
        data, folder, *SIX, *STOCK, "--save", folder / "saved", "--save-interval", 2,
        "--log-json", folder / "log.jsonl", "--eval-iters", 1, "--moe-opt-telemetry",
        "--tensorboard-dir", folder / "board",
    )  # fmt: skip
    return folder


def measure_little() -> None:
    """Has a rank measure the least of the shortest: what it measures is not looked at."""
    from megatron_moe_opt.integration.measuring import measure, meter

    meter.LEAST_OPS = meter.MOST_OPS = 2
    meter.CALLS = 1
    measure.SIZES = measure.LOCAL_SIZES = (4096, 16384)
    measure.GEMM_ROWS = (16, 32)


def test_one_flag_measures_once_and_trains_like_stock(data: Path, tmp_path: Path, stock: Path):
    """`auto` alone: the second start reads what the first has measured."""
    auto = ("--moe-token-dispatcher-type", "auto", "--moe-opt-profile-seconds", 1, "--save", tmp_path / "saved")
    file, log = tmp_path / "saved" / "moe-opt-cluster.json", ("--log-json", tmp_path / "auto.jsonl")
    first = train(data, tmp_path, *SIX, *auto, *log, "--exit-interval", 2, before=measure_little)
    assert "moe-opt: auto: measuring what moves cost here, for 1 s at most: part 1 of " in first
    assert f"moe-opt: auto: what was measured is kept in {file}" in first
    second = train(data, tmp_path, *SIX, *auto, *log, "--exit-interval", 4, "--load", tmp_path / "saved")
    assert f"moe-opt: auto: costs of moves here are those that were measured before, in {file}" in second
    assert "measuring what moves cost" not in second
    ours, stocks = losses(tmp_path / "auto.jsonl"), losses(stock / "log.jsonl")
    assert list(ours) == [1, 2, 3, 4]
    assert list(ours.values()) == pytest.approx([stocks[iteration] for iteration in ours], rel=1e-4)


def test_stock_validates_and_reports(stock: Path):
    output = (stock / "output.txt").read_text()
    assert "validation loss" in output
    check_telemetry(output, stock / "log.jsonl", stock / "board")


def test_checkpoints_cross_dispatchers_and_resume_bit_for_bit(data: Path, tmp_path: Path, stock: Path):
    logs = [stock / "log.jsonl", tmp_path / "there.jsonl", tmp_path / "back.jsonl"]
    train(
        data, tmp_path, *SIX, *MONTA, "--load", stock / "saved", "--ckpt-step", 2, "--exit-interval", 4,
        "--save", tmp_path / "b", "--log-json", logs[1],
    )  # fmt: skip
    train(data, tmp_path, *SIX, *STOCK, "--load", tmp_path / "b", "--log-json", logs[2])
    whole, there, back = map(losses, logs)
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert there == {3: whole[3], 4: whole[4]}
    assert back == {5: whole[5], 6: whole[6]}


def check_telemetry(output: str, log: Path, board: Path) -> None:
    """6 iterations of 2 micro-batches: the fourth pass of a layer is in iteration 2, the eleventh in iteration 6."""
    assert output.count("telemetry: 2 MoE layers, means of 1 observed pass, forward + backward") == 2
    reports = {record["iteration"]: record.get("telemetry") for record in map(json.loads, log.read_text().splitlines())}
    assert [iteration for iteration, report in reports.items() if report] == [2, 6]
    assert reports[2].keys() == {"1", "2"} and reports[2]["1"]["intra-node MB"] > 0
    assert scalar_names(board)["moe-opt/exposed ms/layer 2"] == [2, 6]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "TP x PP x CP needs at least 2 ranks, but 1 started"),
        ("--moe-token-dispatcher-type teleport", "--moe-token-dispatcher-type teleport is not a dispatcher"),
        ("--data-path nowhere/text", "nowhere/text.bin does not exist; make the dataset with recipes/prepare_text.py"),
    ],
)
def test_the_script_refuses_with_one_sentence(data: Path, tmp_path: Path, arguments: str, sentence: str):
    assert sentence in refused(data, tmp_path, "--train-iters", 1, *arguments.split())


def test_a_folder_that_another_job_saves_to_is_refused(data: Path, tmp_path: Path):
    from save_lock import save_lock

    with save_lock(tmp_path):
        sentence = refused(data, tmp_path, "--train-iters", 1, "--save", tmp_path)
    assert sentence.startswith(f"--save {tmp_path} is being saved to by ")


def second_loss_is_nan() -> None:
    import training_loop

    run_batch, passed = training_loop.run_batch, []

    def failing(*args: object, **kwargs: object) -> float:
        passed.append(run_batch(*args, **kwargs))
        return passed[-1] if len(passed) == 1 else float("nan")

    training_loop.run_batch = failing


def say_rates() -> None:
    """Has a rank say the learning rate that each iteration leaves."""
    import training_loop

    train_step = training_loop.train_step

    def saying(args: object, model: object, optimizer: object, *more: object) -> object:
        found = train_step(args, model, optimizer, *more)
        print(f"rate {optimizer.param_groups[0]['lr']}", flush=True)
        return found

    training_loop.train_step = saying


def test_a_loss_that_is_not_finite_ends_training_with_the_state_before_it(data: Path, tmp_path: Path):
    """And no line of the log can be written, which ends nothing."""
    arguments = ("--train-iters", 3, "--save", tmp_path / "a", "--log-json", "/dev/full")
    job = start(data, tmp_path / "output.txt", *arguments, ranks=1, layout=(), before=second_loss_is_nan)
    assert job.wait() == 1
    printed = job.output.read_text()
    state = f"the state before it is saved in {tmp_path}/a/iter_0000001"
    error = f"pretrain_moe_gpt: error: the loss is nan in iteration 2: {state}; lower --lr or check the data\n"
    assert printed.endswith(error) and "Traceback" not in printed
    assert printed.count("warning: /dev/full loses lines (No space left on device); training goes on") == 1
    names = ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names

    # As it advises: from there on with another learning rate, and more iterations, whose schedule then counts. The seed
    # has the data in another order.
    lower = ("--train-iters", 4, "--lr", 5e-4, "--load", tmp_path / "a", "--seed", 7)
    resumed = start(data, tmp_path / "resumed.txt", *lower, ranks=1, layout=(), before=say_rates)
    assert resumed.wait() == 0
    said = resumed.output.read_text()
    assert "max_lr 0.0005 (there 0.001), lr_decay_steps 32 (there 24)\n" in said
    assert "may be in another order than before: seed 7 (there 1234), samples 32 (there 24)\n" in said
    assert re.findall(r"^rate (\S+)$", said, re.M) == ["0.00025", "0.000125", "0.0"]


def check(arguments: str, ranks: int = 4) -> None:
    from arguments import check_arguments, parse_arguments

    args, _ = parse_arguments([*shlex.split("--train-iters 5 --data-path text"), *MODEL, *LAYOUT, *arguments.split()])
    check_arguments(args, ranks)


def test_the_layout_of_these_tests_is_accepted():
    check("")


@pytest.mark.parametrize(
    ("arguments", "ranks", "sentence"),
    [
        ("", 2, "expert-TP x EP x PP needs at least 4 ranks, but 2 started; start torchrun --nproc-per-node 4"),
        ("", 6, "6 ranks cannot be shared out in groups of 4 \\(expert-TP x EP x PP\\)"),
        ("--expert-model-parallel-size 3", 6, "--num-experts 4 is not divisible by --expert-model-parallel-size 3"),
        ("--num-layers 3 --pipeline-model-parallel-size 2", 8, "--num-layers 3 is not divisible by --pipeline-"),
        ("--num-attention-heads 5", 4, "--hidden-size 32 is not divisible by --num-attention-heads 5"),
        ("--moe-router-topk 5", 4, "--moe-router-topk 5 is more than --num-experts 4"),
        ("--seq-length 33", 4, "--seq-length 33 must be divisible by 2"),
        ("--global-batch-size 6", 4, "--global-batch-size 6 is not divisible by 4: --micro-batch-size 2 x 2 data-par"),
        ("--micro-batch-size 0", 4, "--micro-batch-size 0 must be more than 0"),
        ("--moe-layer-freq 0", 4, "--moe-layer-freq 0 must be more than 0"),
        (
            "--moe-layer-freq 2 --pipeline-model-parallel-size 2",
            8,
            "--moe-layer-freq 2 leaves a pipeline stage of 1 lay",
        ),
        ("--save-interval 5", 4, "--save-interval 5 needs a folder to save in; add --save DIR"),
        ("--ckpt-step 5", 4, "--ckpt-step 5 needs a folder to load from; add --load DIR"),
        ("--lr-warmup-iters 5", 4, "--lr-warmup-iters 5 must be less than the 5 iterations"),
        ("--eval-iters -1", 4, "--eval-iters -1 must be 0 or more"),
        ("--make-vocab-size-divisible-by 0", 4, "--make-vocab-size-divisible-by 0 must be more than 0"),
        ("--min-lr 1", 4, "--min-lr 1.0 is more than --lr 0.001"),
        ("--data-path 1 a 2", 4, "--data-path 1 a 2 must be one prefix, or a weight above 0 before each of several"),
        ("--data-path 0 a 2 b", 4, "--data-path 0 a 2 b must be one prefix, or a weight above 0"),
        ("--hidden-sise 32", 4, "unrecognized arguments: --hidden-sise 32; see --help"),
        ("--moe-opt-nonsense 1", 4, "--moe-opt-nonsense is not an option of megatron-moe-opt"),
    ],
)
def test_arguments_are_refused_before_training(arguments: str, ranks: int, sentence: str):
    with pytest.raises(ConfigurationError, match=sentence):
        check(arguments, ranks)


@pytest.mark.parametrize("flag", ["--save", "--log-json", "--tensorboard-dir"])
def test_a_run_makes_its_folders_or_refuses_before_training(tmp_path: Path, flag: str):
    from arguments import check_folders, parse_arguments

    command_line = [*shlex.split("--train-iters 5 --data-path text"), *MODEL]
    check_folders(parse_arguments(command_line)[0])
    check_folders(parse_arguments([*command_line, flag, str(tmp_path / "new" / "log")])[0])
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    args, _ = parse_arguments([*command_line, flag, f"{tmp_path}/file/log"])
    with pytest.raises(ConfigurationError, match=f"^{flag} {tmp_path}/file/log cannot be written .Not a directory.: "):
        check_folders(args)


def test_tensor_parallelism_needs_sequence_parallelism():
    from arguments import check_arguments, parse_arguments

    command_line = [*shlex.split("--train-iters 5 --data-path text --tensor-model-parallel-size 2"), *MODEL]
    args, _ = parse_arguments(command_line)
    with pytest.raises(ConfigurationError, match="--tensor-model-parallel-size 2 .* add --sequence-parallel"):
        check_arguments(args, 4)


def check_data(prefix: Path, arguments: str = "") -> None:
    from arguments import parse_arguments
    from token_data import check_datasets

    args, _ = parse_arguments([*shlex.split(f"--train-iters 5 --data-path {prefix}"), *MODEL, *arguments.split()])
    check_datasets(args)


def test_a_resumed_run_whose_smaller_batches_leave_too_few_samples_is_refused():
    from token_data import check_samples

    args = argparse.Namespace(global_batch_size=8, train_iters=100)
    check_samples(args, samples=800, iteration=50, consumed_samples=400, last=100)
    check_samples(args, samples=1200, iteration=50, consumed_samples=800, last=100)  # an epoch has more than asked for
    check_samples(args, samples=800, iteration=0, consumed_samples=0, last=100)
    for consumed in (401, 800, 900):
        batch = -(-consumed // 50)
        sentence = f"^--global-batch-size 8: {consumed} samples are consumed in 50 .*makes 800; give {batch} or more$"
        with pytest.raises(ConfigurationError, match=sentence):
            check_samples(args, samples=800, iteration=50, consumed_samples=consumed, last=100)


def test_routing_of_several_kinds_of_text_is_recorded(data: Path, text: Path, tmp_path: Path):
    """Two datasets, mixed sequence by sequence: every sample's kind is that of its tokens' dataset."""
    from megatron_moe_opt.planning.traces.routing_trace import read_routing_trace

    for suffix in (".bin", ".idx"):
        shutil.copy(f"{data}{suffix}", tmp_path / f"other{suffix}")
    trace, output = tmp_path / "routing.npz", tmp_path / "output.txt"
    script = words(data, "--data-path", 1, data, 3, tmp_path / "other", "--train-iters", 3, layout=())
    command = (ROOT / "megatron_moe_opt/cli/main.py", "trace", "record", "-o", trace, "--steps", "2-3", *script)
    job = Job(command, output, 1, VARIABLES | {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]})
    assert job.wait() == 0, output.read_text()
    assert f"the routing of 8 passes is written to {trace}" in output.read_text()
    read = read_routing_trace(trace)
    assert read.experts.shape == (8, 2, 2, 32, 2) and read.num_experts == 4
    assert read.iterations.tolist() == [2] * 4 + [3] * 4
    assert read.kind_names == ("text", "other")
    assert [(read.kinds == kind).sum() for kind in (0, 1)] == [4, 12]


def test_a_good_dataset_is_accepted(data: Path):
    check_data(data)


def test_a_dataset_made_anew_is_not_read_with_its_old_indices(tmp_path: Path):
    from arguments import parse_arguments
    from index_cache import index_cache
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from token_data import build_datasets

    arguments = [*MODEL, "--split", "1,0,0", "--data-path", str(tmp_path / "text"), "--train-iters", "4"]
    for first_token in (0, 100):
        builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=numpy.uint16)
        for length in (3000 + 7 * first_token, 500, 4000):
            builder.add_document(torch.arange(first_token, first_token + length) % 100 + first_token, [length])
        builder.finalize(str(tmp_path / "text.idx"))
        args, _ = parse_arguments(arguments)
        dataset, _ = build_datasets(args, index_cache(args))
        for index in range(len(dataset)):
            assert (dataset[index]["tokens"] // 100 == first_token // 100).all()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--seq-length 10000000", "the training part of --split 9,1,0 has .* fewer than one sample of --seq-length"),
        ("--split 1,1e-9,0", "the validation part of --split 1,1e-9,0 has 0 tokens, .* \\(33\\)"),
        ("--split 1,0,0 --eval-iters 2", "--eval-iters 2: --split 1,0,0 has no validation part; give it one"),
        ("--split 0,1", "--split 0,1 must be up to three numbers, training first"),
        ("--split a,b", "--split a,b must be up to three numbers"),
        ("--vocab-size 100", "holds token .*, but --vocab-size 100 allows 0 to 100; raise --vocab-size"),
    ],
)
def test_settings_that_do_not_fit_the_dataset_are_refused(data: Path, arguments: str, sentence: str):
    with pytest.raises(ConfigurationError, match=sentence):
        check_data(data, arguments)


@pytest.mark.parametrize(
    ("suffix", "content", "sentence"),
    [
        (".bin", b"", "text.bin is empty; make the dataset again"),
        (".idx", b"not an index of anything at all", "text.idx is not the index of a Megatron dataset"),
        (".bin", b"short", "text.bin is shorter than its index says"),
    ],
)
def test_broken_datasets_are_refused(data: Path, tmp_path: Path, suffix: str, content: bytes, sentence: str):
    for each in (".bin", ".idx"):
        shutil.copy(f"{data}{each}", tmp_path / f"text{each}")
    (tmp_path / f"text{suffix}").write_bytes(content)
    with pytest.raises(ConfigurationError, match=sentence):
        check_data(tmp_path / "text")


def write_log(path: Path, values: list[float]) -> str:
    lines = [json.dumps({"iteration": i, "loss": loss, "seconds": 0.1}) for i, loss in enumerate(values, start=1)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("baseline", "resumed", "status"),
    [
        ([4.0, 3.0, 2.0], [4.0, 3.0, 2.0], 0),
        ([4.0, 3.0, 2.00001], [4.0, 3.0, 2.0], 1),  # stock differs by 5e-6
        ([4.0, 3.0], [4.0, 3.0, 2.0], 1),  # a step is missing
        ([4.0, 3.0, 2.0], [4.0, 3.0, 2.0000000001], 1),  # resumed must be equal bit for bit
    ],
)
def test_a_missed_bar_is_an_exit_status(tmp_path: Path, baseline: list[float], resumed: list[float], status: int):
    from compare_runs import main

    ours = write_log(tmp_path / "ours.jsonl", [4.0, 3.0, 2.0])
    stock, again = write_log(tmp_path / "stock.jsonl", baseline), write_log(tmp_path / "again.jsonl", resumed)
    arguments = ["--run", "monta", ours, "--baseline", "alltoall", stock, "--resumed", again]
    assert main([*arguments, "--output", str(tmp_path)]) == status


def test_a_loss_that_does_not_fall_is_a_missed_bar(tmp_path: Path):
    from compare_runs import main

    log = write_log(tmp_path / "flat.jsonl", [4.0, 3.9, 3.8])
    assert main(["--run", "a", log, "--baseline", "b", log, "--output", str(tmp_path)]) == 1
    assert "**missed**: the loss falls by at least 25%: 5.0%" in (tmp_path / "closing_table.md").read_text()
