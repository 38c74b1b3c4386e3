"""The launcher and our command-line options."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.launch import main as launch_main
from megatron_moe_opt.options import Options, split_options
from tests.ranks.job import Job

SCRIPT = """
import multiprocessing, pathlib, sys

import beside  # a module in the script's own folder

print("running as", __name__)

if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    print("name", __name__, "file", pathlib.Path(__file__).name)
    from megatron.core.transformer.transformer_config import TransformerConfig
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=int(sys.argv[1]),
                               moe_token_dispatcher_type=sys.argv[2])
    print("dispatcher", config.moe_token_dispatcher_type)
    process = multiprocessing.get_context("spawn").Process(target=beside.work, args=(sys.argv[3],))
    process.start(); process.join()
    print("spawned", process.exitcode)
    def annotated(number: int): pass
    print("annotated", annotated.__annotations__)
"""


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_moe_opt.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


LAUNCH = """
import sys
from megatron_moe_opt.launch import main
main(sys.argv[1:])
"""


def refused(folder: Path, *arguments: str | Path) -> str:
    """Returns what the launcher prints that refuses to start, in a process that has imported Megatron already."""
    (folder / "launch.py").write_text(LAUNCH)
    job = Job([folder / "launch.py", *arguments], folder / "output.txt")
    assert job.wait() == 2
    return job.output.read_text()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("import pathlib\ndef work(path): pathlib.Path(path).write_text('worked')\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_runs_a_script_as_main_with_our_dispatchers(script, tmp_path):
    result = launch(str(script), "4", "monta", str(tmp_path / "out"), "--moe-opt-monta-level", "O1", "--theirs", "x")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"arguments {['4', 'monta', str(tmp_path / 'out'), '--theirs', 'x']}" in lines
    assert "name __main__ file script.py" in lines
    assert "dispatcher monta" in lines
    assert f"annotated {{'number': {int}}}" in lines  # with none of the launcher's __future__ imports
    # A spawned process imports the parent's main module again: it must not run the script a second time.
    assert "spawned 0" in lines
    assert [line for line in lines if line.startswith("running as")] == ["running as __main__"]
    assert (tmp_path / "out").read_text() == "worked"


def test_a_bad_setting_ends_in_one_sentence(script, tmp_path):
    printed = refused(tmp_path, script, "4", "mota", tmp_path / "out")
    (line,) = (line for line in printed.splitlines() if line.startswith("moe-opt: error: "))
    assert "--moe-token-dispatcher-type mota is not a dispatcher: choose one of " in line
    assert "Traceback" not in printed


def test_a_misspelt_dispatcher_is_refused_before_the_script_parses_it(script, tmp_path):
    printed = refused(tmp_path, script, "--moe-token-dispatcher-type=mota")
    assert "Traceback" not in printed and "running as" not in printed
    assert "moe-opt: error: --moe-token-dispatcher-type mota is not a dispatcher: choose one of" in printed


def test_the_recipe_behind_the_launcher_has_our_options(tmp_path):
    """The launcher takes them out of the command line, which the recipe reads too: it must not begin without them."""
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "pretrain_moe_gpt.py"
    sizes = {"num-layers": 1, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 16, "num-experts": 2}
    given = sizes | {"micro-batch-size": 1, "train-iters": 1, "lr": 1e-3, "data-path": "nowhere"}
    given |= {"moe-token-dispatcher-type": "mpmoe", "moe-opt-activation-budget": "1MiB"}
    printed = refused(tmp_path, recipe, *(word for flag, value in given.items() for word in (f"--{flag}", str(value))))
    assert "pretrain_moe_gpt: error: --moe-opt-activation-budget 1048576 has nothing to choose" in printed


@pytest.mark.parametrize(
    ("name", "stands_for_it", "said"),
    [
        ("megatron_moe_opt._C", "None", "The compiled extension of megatron-moe-opt is missing"),
        (
            "megatron_moe_opt._C",
            "types.SimpleNamespace(build_info=lambda: {'torch': torch.__version__, 'version': '0', 'abi': 0})",
            "The compiled extension of megatron-moe-opt is stale (built from version 0, interface 0; ",
        ),
        ("megatron", "None", "megatron-core is not installed: install megatron-core 0.16 to 0.20, or put a checkout"),
    ],
    ids=["no extension", "a stale extension", "no Megatron"],
)
def test_what_is_missing_ends_in_one_sentence(script, name, stands_for_it, said):
    prepare = f"import runpy, sys, torch, types; sys.modules[{name!r}] = {stands_for_it}"
    run = "runpy.run_module('megatron_moe_opt.launch', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", f"{prepare}; {run}", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 2 and "running as" not in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"moe-opt: error: {said}")


def test_a_gpu_that_pytorch_cannot_use_is_not_passed_over(script, monkeypatch, capsys):
    """Or its ranks would train on the CPU, for as long as the job may take."""
    monkeypatch.setattr("megatron_moe_opt.gpu_settings.A_GPU", script)
    monkeypatch.setattr("megatron_moe_opt.launch.run_script", lambda *_: None)
    monkeypatch.setattr("megatron_moe_opt.launch.register", lambda *_, refuse_unread: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SystemExit) as caught:
        launch_main([str(script)])
    assert caught.value.code == 2 and "error: this node has a GPU, and PyTorch" in capsys.readouterr().err
    for off in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", off)
        launch_main([str(script)])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nowhere.py"], 2, "moe-opt: error: nowhere.py is not a file"),
        ([], 2, ""),
        (["--help"], 0, "--moe-opt-monta-level"),
    ],
)
def test_a_missing_script_and_no_script(capsys, arguments, status, said):
    with pytest.raises(SystemExit) as caught:
        launch_main(arguments)
    assert caught.value.code == status and said in "".join(capsys.readouterr())


def test_nobody_waits_for_ranks_that_do_not_exist(script, monkeypatch, capsys):
    """Megatron's fake process group has one rank of as many as the environment names."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ran = []
    monkeypatch.setattr("megatron_moe_opt.launch.run_script", lambda path, arguments: ran.append(arguments))
    monkeypatch.setattr("megatron_moe_opt.runtime.job.same_start.job_store", lambda: pytest.fail("waits for a store"))
    stock = ["--fake-process-group", "--moe-token-dispatcher-type", "alltoall"]
    launch_main([str(script), *stock])
    assert ran == [stock]
    with pytest.raises(SystemExit):
        launch_main([str(script), *stock[:2], "monta"])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("moe-opt: error:"))
    assert line.startswith("moe-opt: error: --fake-process-group has no other ranks, from which --moe-token-disp")
    assert ran == [stock]


def test_options_are_taken_out_of_the_command_line():
    options, remaining = split_options(["--lr", "1", "--moe-opt-monta-level", "O1", "--moe-router-topk=2"])
    assert options == Options(monta_level="O1") and remaining == ["--lr", "1", "--moe-router-topk=2"]
    assert split_options(["--moe-opt-telemetry"]) == (Options(telemetry=True), [])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--moe-opt-monta-levle", "O1"], "--moe-opt-monta-levle is not an option of megatron-moe-opt"),
        (["--moe-opt-monta-level", "O9"], "argument --moe-opt-monta-level: invalid choice: 'O9'"),
        (["--moe-opt-monta-level"], "argument --moe-opt-monta-level: expected one argument"),
        (["--moe-opt-chunks", "0"], "argument --moe-opt-chunks: '0' is neither a number of chunks from 1 on nor auto"),
        (["--moe-opt-chunks", "many"], "'many' is neither"),
        (["--moe-opt-monta-level", "O1", "--moe-opt-chunks", "2"], "--moe-opt-chunks 2 has no meaning"),
        (
            ["--moe-opt-monta-level", "auto"],
            "--moe-opt-monta-level auto chooses from measurements: run `moe-opt profile`",
        ),
        (["--moe-opt-chunks", "auto"], "--moe-opt-chunks auto chooses from measurements"),
        (["--moe-opt-profile", "f", "--moe-opt-monta-level", "O1"], "--moe-opt-profile f has nothing to choose"),
        (
            ["--moe-opt-profile", "f", "--moe-opt-monta-level", "O3", "--moe-opt-chunks", "4"],
            "--moe-opt-profile f has nothing to choose",
        ),
    ],
)
def test_wrong_options_are_refused(arguments, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        split_options(arguments)


@pytest.mark.parametrize(
    ("options", "levels", "chunks"),
    [
        (Options(), ("O1",), (1,)),
        (Options(monta_level="O3"), ("O3",), (4,)),
        (Options(monta_level="O2", chunks=6), ("O2",), (6,)),
        (Options(profile=Path("p")), ("O1", "O2", "O3"), None),
        (Options(profile=Path("p"), monta_level="auto", chunks=2), ("O1", "O2", "O3"), (2,)),
        (Options(profile=Path("p"), monta_level="O3"), ("O3",), None),
    ],
)
def test_what_there_is_to_choose_from(options, levels, chunks):
    assert (options.levels, options.chunk_counts) == (levels, chunks)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"compression_ratio": -3}, "--moe-opt-compression-ratio -3 is not a ratio above 1"),
        (
            {"gradient_compression_ratio": float("nan")},
            "--moe-opt-gradient-compression-ratio nan is not a ratio above 1",
        ),
        ({"compression_ratio": True}, "--moe-opt-compression-ratio True is not a ratio"),
        ({"domain_sizes": (0,)}, r"--moe-opt-domain-sizes \(0,\) is not a list of numbers from 1 on"),
        ({"domain_sizes": ()}, "--moe-opt-domain-sizes .* is not a list of numbers"),
        ({"domain_sizes": "2"}, "--moe-opt-domain-sizes '2' is not a list of numbers"),
        ({"network_levels": (2, "4")}, "--moe-opt-levels .* is not a list of numbers"),
        ({"network_levels": "auto"}, "--moe-opt-levels 'auto' is not a list of numbers"),
        ({"prefetch_layers": -1}, "--moe-opt-prefetch-layers -1 is not a number from 0 on"),
        ({"prefetch_layers": None}, "--moe-opt-prefetch-layers None is not a number from 0 on"),
        ({"shared_expert_interval": 2.5}, "--moe-opt-shared-expert-interval 2.5 is not a number from 0 on"),
        ({"residuals": "x"}, "--moe-opt-residuals 'x' is not one of last, shared"),
        ({"monta_level": "O9"}, "--moe-opt-monta-level 'O9' is not one of O1, O2, O3, auto"),
        ({"memory_reuse": 1}, "--moe-opt-memory-reuse 1 is not one of none, S1"),
        ({"chunks": 0}, "--moe-opt-chunks 0 is neither a number of chunks"),
        ({"chunks": "4"}, "--moe-opt-chunks '4' is neither a number of chunks"),
        ({"partitions": (2, 0)}, r"--moe-opt-partitions \(2, 0\) is neither a number of partitions"),
        ({"activation_budget": "512MiB"}, "--moe-opt-activation-budget '512MiB' is not a number of bytes"),
        ({"profile": 3}, "--moe-opt-profile 3 is not the name of a file"),
        ({"telemetry": 1}, "--moe-opt-telemetry 1 is neither True nor False"),
    ],
    ids=str,
)
def test_options_made_in_python_take_what_the_command_line_takes(wrong, sentence):
    with pytest.raises(ConfigurationError, match=f"^{sentence}"):
        Options(**wrong)


def test_options_made_in_python_are_those_of_the_command_line():
    words = {"partitions": "4,2,2", "domain-sizes": "2,1", "compression-ratio": "25", "plan": "a.json"}
    words |= {"profile": "c.json"}
    words |= {"memory-reuse": "auto", "activation-budget": "1.5KiB", "chunks": "1", "prefetch-layers": "0"}
    arguments = [word for flag, text in words.items() for word in (f"--moe-opt-{flag}", text)]
    read, _ = split_options([*arguments, "--moe-opt-telemetry"])
    made = Options(
        partitions=[4, 2, 2], domain_sizes=[2, 1], compression_ratio=25, plan="a.json", memory_reuse="auto",
        activation_budget=1536, chunks=1, prefetch_layers=0, telemetry=True, profile="c.json",
    )  # fmt: skip
    assert made == read == dataclasses.replace(made) and hash(made) == hash(read)
    assert made.partitions == (2, 4) and made.plan == Path("a.json")
