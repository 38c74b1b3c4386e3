"""The job script of the recipes, with stubs in the place of Slurm: what it starts, and when it queues again."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megatron_moe_opt.cli.main import app
from tests.system.training import ROOT

SLURM = ROOT / "recipes" / "slurm"
SCRIPTS = sorted(path for path in SLURM.rglob("*") if path.suffix in (".sh", ".sbatch"))
TRACKER = "latest_checkpointed_iteration.txt"

# Slurm runs the task of rank 11; the others are like it. A task id and its process must be one: signals go there. Under
# pyxis variables of the image replace the job's.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$STUBS/srun"
while [[ "$1" == --* ]]; do shift; done
[[ -z "${NOT_SHARED:-}" ]] || echo 4100 >"$CHECKPOINTS/slurm_job"
SLURM_PROCID=11 SLURM_LOCALID=3 SLURM_NTASKS=32 env ${IMAGE:-} "$@" &
echo $! >"$STUBS/task"
wait $!
"""
SCONTROL = """#!/bin/bash
case "$*" in
    "show hostnames"*) seq -f node%g 0 9999 ;;
    "show job 4207") echo "   PreemptEligibleTime=2026-11-23T08:00:00 PreemptTime=${PREEMPTED:-None}" ;;
    *) echo "$@" >>"$STUBS/scontrol" ;;
esac
"""
SQUEUE = """#!/bin/bash
[[ -z "${SQUEUE_FAILS:-}" ]] || { echo "slurm_load_jobs error: $SQUEUE_FAILS" >&2 && exit 1; }
[[ "${@: -1}" != "${RUNNING:-}" || "$*" != *"${STATE:-RUNNING}"* ]] || echo "$RUNNING"
"""
SBATCH = """#!/bin/bash
printf '%s\\n' "$@" >"$STUBS/sbatch"
"""
PYTHON = f"""#!/bin/bash
printf '%s\\n' "$@" >"$STUBS/arguments"
echo "$NCCL_IB_HCA $PYTHONPATH" >"$STUBS/variables"
echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $CUDA_DEVICE_MAX_CONNECTIONS" >"$STUBS/environment"
echo $$ >"$STUBS/process"
[[ "$1" != *check_recipe.py ]] || exit "${{FITS:-0}}"
[[ -z "${{SAVES:-}}" ]] || printf %s "$SAVES" >"$CHECKPOINTS/{TRACKER}"
exit "${{STATUS:-0}}"
"""


class Cluster:
    """Stubs of Slurm's commands and of Python, which note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.notes, self.checkpoints, commands = folder / "notes", folder / "checkpoints", folder / "bin"
        for made in (self.notes, self.checkpoints, commands):
            made.mkdir()
        stubs = {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "sbatch": SBATCH, "python": PYTHON}
        for name, script in stubs.items():
            (commands / name).write_text(script)
            (commands / name).chmod(0o755)
        for file in ("pretrain_gpt.py", "words.bin", "words.idx"):
            (folder / file).touch()
        self.environment = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "STUBS": str(self.notes),
            "SLURM_JOB_ID": "4207",
            "SLURM_JOB_NODELIST": "node[0-9999]",
            "SLURM_NTASKS": "32",
            "MEGATRON_LM": str(folder),
            "CHECKPOINTS": str(self.checkpoints),
            "DATA": str(folder / "words"),
            "TOKENIZER": "a/tokenizer",
            "PYTHON": str(commands / "python"),
        }

    def run(self, script: str, *arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        given = {name: value for name, value in (self.environment | environment).items() if value is not None}
        command = ["bash", str(SLURM / script), *arguments]
        return subprocess.run(command, env=given, capture_output=True, text=True, timeout=600)

    def job(self, *arguments: str, model: str = "mixtral_8x7b", **environment: str | None):
        return self.run("pretrain_gpt.sbatch", str(SLURM / "models" / f"{model}.sh"), *arguments, **environment)

    def note(self, name: str) -> list[str]:
        return (self.notes / name).read_text().splitlines() if (self.notes / name).exists() else []

    def save(self, iteration: str) -> None:
        (self.checkpoints / TRACKER).write_text(iteration)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def value(arguments: list[str], flag: str) -> str:
    """What counts: the last one that is given."""
    return arguments[len(arguments) - arguments[::-1].index(flag)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_it(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_an_exported_cdpath_leads_no_script_elsewhere(cluster):
    command = ["bash", "recipes/slurm/submit.sh", "mixtral_8x7b"]
    subprocess.run(command, cwd=ROOT, env=cluster.environment | {"CDPATH": str(ROOT)}, check=True)
    files = ("pretrain_gpt.sbatch", "models/mixtral_8x7b.sh")
    assert cluster.note("sbatch")[-2:] == [str(SLURM / name) for name in files]
    for script in (path for folder in ("recipes", "tools") for path in (ROOT / folder).rglob("*.sh")):
        for line in script.read_text().splitlines():
            assert 'cd "$(dirname' not in line.replace("CDPATH='' cd", ""), script


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    scripts = [str(path) for path in SCRIPTS]
    command = ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", *scripts]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("sizes", "more", "capability", "queues"),
    [
        ((1, 1), (), "9.0", "32"),
        ((2, 1), (), "9.0", "1"),
        ((1, 2), (), "8.0", "1"),
        ((2, 1), (), "10.0", "32"),
        ((2, 2), (), None, "1"),
        ((2, 1), ("--overlap-moe-expert-parallel-comm",), "9.0", "32"),
        ((1, 2), ("--use-megatron-fsdp",), "9.0", "32"),
    ],
)
def test_one_hardware_queue_only_where_megatron_demands_it(cluster, sizes, more, capability, queues):
    if capability is not None:
        command = cluster.notes.parent / "bin" / "nvidia-smi"
        command.write_text(f"#!/bin/bash\necho {capability}\n")
        command.chmod(0o755)
    tp, cp = map(str, sizes)
    flags = ("--tensor-model-parallel-size", tp, "--context-parallel-size", cp, *more)
    assert cluster.job(*flags, SAVES="500000").returncode == 0
    assert cluster.note("environment")[0].split()[-1] == queues
    cluster.save("0")
    result = cluster.job(*flags, SAVES="500000", CUDA_DEVICE_MAX_CONNECTIONS="4")  # the user's, where it can be
    is_demanded = queues == "1" and capability is not None
    assert cluster.note("environment")[0].split()[-1] == ("1" if is_demanded else "4")
    assert ("set to 1 in the place of 4" in result.stdout) == is_demanded


def test_a_recipe_of_ones_own_may_join_a_flag_and_its_value(cluster):
    own = cluster.notes / "own.sh"
    sizes = "--tensor-model-parallel-size=1 --train-iters=300"
    own.write_text(f'source "{SLURM}/models/mixtral_8x7b.sh"\narguments+=({sizes})\n')
    assert cluster.run("pretrain_gpt.sbatch", str(own), SAVES="300").returncode == 0  # trained to the end
    assert cluster.note("environment")[0].split()[-1] == "32"
    own.write_text(f'source "{SLURM}/models/mixtral_8x7b.sh"\narguments+=(--save=/shared/other)\n')
    ran = cluster.run("pretrain_gpt.sbatch", str(own))
    assert ran.returncode == 2 and "--save is the job's own" in ran.stderr


def test_starts_a_rank_a_task(cluster):
    result = cluster.job(SAVES="500000")
    assert result.returncode == 0, result.stderr
    arguments = cluster.note("arguments")
    assert arguments[:4] == [
        "-u",
        "-m",
        "megatron_moe_opt.launch",
        f"{cluster.environment['MEGATRON_LM']}/pretrain_gpt.py",
    ]
    assert cluster.note("environment") == ["11 3 32 node0 24207 1"]
    assert cluster.note("task") == cluster.note("process")  # a signal to the task reaches Python
    assert cluster.note("srun")[:2] == ["--label", "--kill-on-bad-exit=1"]
    assert not any("container" in argument for argument in cluster.note("srun"))
    for flag, expected in (
        ("--hidden-size", "4096"),
        ("--moe-token-dispatcher-type", "auto"),
        ("--data-path", cluster.environment["DATA"]),
        ("--tokenizer-model", "a/tokenizer"),
        ("--data-cache-path", f"{cluster.checkpoints}/sample-indices"),
        ("--save", str(cluster.checkpoints)),
        ("--load", str(cluster.checkpoints)),
    ):
        assert value(arguments, flag) == expected
    assert "--exit-signal-handler" in arguments
    assert "signal=TERM@" in (SLURM / "pretrain_gpt.sbatch").read_text()  # the signal that Megatron's handler takes


def test_a_job_passes_what_the_dry_run_checks(cluster):
    sys.path.insert(0, str(SLURM))
    from recipe import read_recipe

    for model in ("deepseek_v3", "hybridep_gpt_large"):  # a list in brackets; options of ours
        recipe = read_recipe(model)
        cluster.save("0")
        cluster.job("--train-iters", "7", model=model, SAVES="7")
        settings = [*recipe.command_line, "--train-iters", "7"]
        assert cluster.note("arguments")[-len(settings) :] == settings


def test_what_is_added_counts_but_for_where_the_job_saves(cluster):
    prologue = cluster.notes / "prologue.sh"
    prologue.write_text("set -- other words\n")
    given = ("--train-iters=7", "--tokenizer-type", "NullTokenizer", "--tensor-model-parallel-size=4")
    assert cluster.job(*given, SAVES="7", PROLOGUE=str(prologue)).returncode == 0  # trained to the end
    arguments = cluster.note("arguments")
    assert value(arguments, "--tokenizer-type") == "NullTokenizer" and value(arguments, "--train-iters") == "7"
    for script in ("job", "submit"):
        for one in ("--load=/shared/other", "--save"):
            ran = cluster.job(one) if script == "job" else cluster.run("submit.sh", "mixtral_8x7b", one)
            assert ran.returncode == 2 and "goes on from CHECKPOINTS" in ran.stderr


def test_the_launcher_takes_the_command(cluster, tmp_path):
    (tmp_path / "pretrain_gpt.py").write_text("import sys; print('trains with', *sys.argv[1:])\n")
    alone = tmp_path / "alone"  # the other 31 ranks never start, and would be waited for
    alone.write_text(f'#!/bin/bash\nRANK=0 LOCAL_RANK=0 WORLD_SIZE=1 exec "{sys.executable}" "$@"\n')
    alone.chmod(0o755)
    environment = {"PYTHON": str(alone), "MEGATRON_LM": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = cluster.job(model="hybridep_llama_tiny", CUDA_VISIBLE_DEVICES="", **environment)
    assert "trains with --data-path" in result.stdout and " --bf16 " in result.stdout, result.stderr
    assert "--no-gradient-accumulation-fusion" in result.stdout  # Apex is not here
    assert "--moe-token-dispatcher-type expert-migration" in result.stdout
    assert "--moe-opt" not in result.stdout
    assert result.returncode == 1  # it has saved nothing


def test_mock_data_needs_no_tokenizer(cluster):
    cluster.job(DATA="mock", TOKENIZER=None, SAVES="500000")
    arguments = cluster.note("arguments")
    assert "--mock-data" in arguments and "--data-path" not in arguments
    assert value(arguments, "--vocab-size") == "31999"  # and end of document


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"PROFILE": "c.json"}, "--moe-token-dispatcher-type auto --moe-opt-profile c.json"),
        ({"PLAN": "p.json"}, "--moe-token-dispatcher-type auto --moe-opt-plan p.json"),
    ],
)
def test_a_profile_or_a_plan_replaces_the_dispatcher_and_its_options(cluster, given, expected):
    cluster.job(model="hybridep_gpt_large", SAVES="1000", **given)
    arguments = cluster.note("arguments")
    assert expected in " ".join(arguments)
    assert "expert-migration" not in arguments and "--moe-opt-domain-sizes" not in arguments
    cluster.save("0")
    cluster.job("--moe-token-dispatcher-type", "monta", SAVES="500000", **given)
    assert value(cluster.note("arguments"), "--moe-token-dispatcher-type") == "monta"  # what the user says last


def test_a_stated_dispatcher_replaces_the_recipes_with_its_options(cluster):
    cluster.job("--moe-token-dispatcher-type", "alltoall", model="hybridep_gpt_large", SAVES="500000")
    arguments = cluster.note("arguments")
    assert value(arguments, "--moe-token-dispatcher-type") == "alltoall" and "--moe-opt-domain-sizes" not in arguments


@pytest.mark.parametrize("model", ["monta_2x70b", "deepseek_v3"])
def test_measures_the_cluster_with_the_sizes_of_training(cluster, model):
    result = cluster.job(model=model, MEASURE="/shared/cluster.json", CHECKPOINTS=None, DATA=None, MEGATRON_LM=None)
    assert result.returncode == 0, result.stderr
    module, command, *arguments = cluster.note("arguments")[2:]
    assert (module, command) == ("megatron_moe_opt.cli.main", "profile")
    context = typer.main.get_command(app).commands["profile"].make_context("profile", arguments)
    expected = {
        "monta_2x70b": {"tp": 8, "cp": 1, "ep": 2, "expert_tp": 8, "hidden": 8192, "ffn_hidden": 28672},
        "deepseek_v3": {"tp": 1, "cp": 1, "ep": 64, "expert_tp": 1, "hidden": 7168, "ffn_hidden": 2048},
    }
    assert context.params.items() >= expected[model].items()
    assert str(context.params["output"]) == "/shared/cluster.json"


def test_runs_in_a_container(cluster):
    cluster.job(CONTAINER="image.sqsh", CONTAINER_MOUNTS="/data:/data", SAVES="500000")
    assert {"--container-image=image.sqsh", "--container-mounts=/data:/data"} <= set(cluster.note("srun"))
    result = cluster.job(CONTAINER="image.sqsh", SAVES="500000")
    assert result.returncode and "CONTAINER_MOUNTS" in result.stderr
    relative = {"CONTAINER": "image.sqsh", "CONTAINER_MOUNTS": "/data:/data", "CHECKPOINTS": "runs/mine"}
    for refused in (cluster.job(**relative), cluster.run("submit.sh", "mixtral_8x7b", **relative)):
        assert refused.returncode == 2 and "CHECKPOINTS: runs/mine is not where a container starts" in refused.stderr


def test_a_container_that_is_a_file_gets_its_whole_path(cluster, tmp_path, monkeypatch):
    """To pyxis `image.sqsh` is an image in a registry."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.sqsh").touch()
    for given, used in (
        ("image.sqsh", tmp_path / "image.sqsh"),
        ("./image.sqsh", "./image.sqsh"),
        ("nvcr.io#nvidia/pytorch:25.10-py3", "nvcr.io#nvidia/pytorch:25.10-py3"),
    ):
        cluster.save("0")
        cluster.job(CONTAINER=given, CONTAINER_MOUNTS="/data:/data", SAVES="500000")
        assert f"--container-image={used}" in cluster.note("srun")


def test_no_rank_trains_that_does_not_see_the_jobs_folder(cluster):
    result = cluster.job(NOT_SHARED="yes", SAVES="500000")
    assert result.returncode == 2 and cluster.note("arguments") == []
    sentence = f"CHECKPOINTS: .* does not see the files of this job in {cluster.checkpoints}: .* CONTAINER_MOUNTS"
    assert re.search(sentence, result.stderr)
    assert cluster.job(NOT_SHARED="yes", MEASURE="/shared/cluster.json").returncode == 0  # which saves nothing


def test_what_the_job_sets_counts_in_an_image_that_sets_it_too(cluster):
    job = {"CONTAINER": "image.sqsh", "CONTAINER_MOUNTS": "/data:/data", "NCCL_IB_HCA": "mlx5", "PYTHONPATH": "/ours"}
    image = "CUDA_DEVICE_MAX_CONNECTIONS=8 MASTER_PORT=1 NCCL_IB_HCA=none PYTHONPATH=/image PATH=/usr/bin:/bin"
    assert cluster.job(SAVES="500000", IMAGE=image, **job).returncode == 0
    assert cluster.note("environment") == ["11 3 32 node0 24207 1"]
    assert cluster.note("variables") == [f"mlx5 {cluster.environment['MEGATRON_LM']}:/ours:/image"]


@pytest.mark.parametrize("status", ["0", "1", "143"])  # signal handled; crash; killed
def test_queues_again_where_it_got_further(cluster, status):
    cluster.save("1000")
    result = cluster.job(SAVES="1400", STATUS=status)
    assert cluster.note("scontrol") == ["requeue 4207"]
    assert result.returncode == 0
    assert "from iteration 1000 to 500000" in result.stdout
    assert f"status {status} and a checkpoint of iteration 1400" in result.stdout


@pytest.mark.parametrize(("status", "expected"), [("0", 1), ("1", 1), ("143", 143)])
@pytest.mark.parametrize("before", [None, "1000"])
def test_does_not_queue_again_without_progress(cluster, before, status, expected):
    if before:
        cluster.save(before)
    result = cluster.job(STATUS=status)
    assert result.returncode == expected
    assert cluster.note("scontrol") == []
    assert f"no checkpoint since iteration {before or 0}" in result.stderr


def test_a_preempted_job_queues_again_whatever_it_has_saved(cluster):
    result = cluster.job(STATUS="143", PREEMPTED="2026-11-23T08:02:14")
    assert (result.returncode, cluster.note("scontrol")) == (0, ["requeue 4207"])
    assert "status 143 and no checkpoint since iteration 0, but was preempted: the job queues again" in result.stdout


def test_ends_where_training_is_done(cluster):
    result = cluster.job("--train-iters", "2000", SAVES="2000")
    assert (result.returncode, cluster.note("scontrol")) == (0, [])
    (cluster.notes / "arguments").unlink()
    result = cluster.job("--train-iters", "2000")
    assert result.returncode == 0 and "nothing is left to do" in result.stdout
    assert cluster.note("arguments") == []


def test_two_jobs_do_not_train_into_one_folder(cluster):
    (cluster.checkpoints / "slurm_job").write_text("4100\n")
    for state in ("RUNNING", "SUSPENDED", "COMPLETING"):
        result = cluster.job(RUNNING="4100", STATE=state, SAVES="500000")
        assert result.returncode == 2 and "CHECKPOINTS: job 4100 trains into" in result.stderr
    result = cluster.job(SQUEUE_FAILS="Unable to contact slurm controller", SAVES="500000")
    assert result.returncode == 2 and "squeue does not tell" in result.stderr
    (cluster.checkpoints / "slurm_job.turn").mkdir()
    result = cluster.job(SAVES="500000")
    assert result.returncode == 2 and "another job is about to train into" in result.stderr
    (cluster.checkpoints / "slurm_job.turn").rmdir()
    assert cluster.note("srun") == []
    assert cluster.job(SQUEUE_FAILS="Invalid job id specified", SAVES="1400").returncode == 0  # the other has ended
    (cluster.checkpoints / "slurm_job").write_text("4100\n")
    assert cluster.job(SAVES="1500").returncode == 0
    assert cluster.job(RUNNING="4207", SAVES="500000").returncode == 0  # it queued again


def test_a_tracker_that_names_no_iteration_counts_as_none(cluster):
    cluster.save("release")
    assert "from iteration 0" in cluster.job(SAVES="500000").stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "match"),
    [
        ((), {"CHECKPOINTS": None}, "CHECKPOINTS: a folder of this run"),
        ((), {"DATA": None}, "DATA: prefix"),
        ((), {"TOKENIZER": None}, "TOKENIZER: a tokenizer"),
        ((), {"MEGATRON_LM": None}, "MEGATRON_LM: a checkout"),
        (("--train-iters", "soon"), {}, "--train-iters 'soon' must say"),
        ((), {"PROFILE": "c.json", "PLAN": "p.json"}, "PROFILE and PLAN are two ways to plan"),
    ],
)
def test_refuses_before_it_starts(cluster, arguments, environment, match):
    result = cluster.job(*arguments, **environment)
    assert result.returncode and match in result.stderr
    assert cluster.note("srun") == []


def test_submits_with_the_recipes_nodes(cluster, tmp_path):
    assert cluster.run("submit.sh", "monta_2x70b", "--train-iters", "50").returncode == 0
    job, recipe = SLURM / "pretrain_gpt.sbatch", SLURM / "models" / "monta_2x70b.sh"
    options = "--nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --job-name monta_2x70b"
    assert cluster.note("sbatch") == [*shlex.split(options), str(job), str(recipe), "--train-iters", "50"]
    mine = tmp_path / "mine.sh"
    mine.write_text(f"source {SLURM}/models/mixtral_8x7b.sh\ngpus_per_node=4\n")
    cluster.run("submit.sh", str(mine), NODES="16")
    assert cluster.note("sbatch")[:8] == shlex.split("--nodes 16 --ntasks-per-node 4 --gpus-per-node 4 --job-name mine")
    checked = [str(SLURM / "check_recipe.py"), str(mine), "--nodes", "16", "--"]
    assert cluster.note("arguments") == checked
    plan = tmp_path / "p.json"
    plan.touch()
    cluster.run("submit.sh", str(mine), "--lr", "1", NODES="16", PLAN=str(plan))
    planned = ["--moe-token-dispatcher-type", "auto", "--moe-opt-plan", str(plan), "--lr", "1"]
    assert cluster.note("arguments") == [*checked, *planned]


@pytest.mark.parametrize(
    ("model", "environment", "match"),
    [
        ("nonesuch", {}, "nonesuch is neither a file nor a recipe, which are: deepseek_v3 "),
        ("", {}, "name a recipe"),
        ("mixtral_8x7b", {"MEGATRON_LM": None}, "set MEGATRON_LM"),
        ("mixtral_8x7b", {"MEGATRON_LM": "/nowhere"}, "MEGATRON_LM: there is no /nowhere/pretrain_gpt.py"),
        ("mixtral_8x7b", {"CHECKPOINTS": None}, "set CHECKPOINTS"),
        ("mixtral_8x7b", {"TOKENIZER": None}, "set TOKENIZER"),
        ("mixtral_8x7b", {"TOKENIZER": "/nowhere/tokenizer"}, "TOKENIZER: there is no /nowhere/tokenizer"),
        ("mixtral_8x7b", {"DATA": "/nowhere/words"}, "DATA: there is no /nowhere/words.bin"),
        ("mixtral_8x7b", {"PLAN": "p.json"}, "PLAN: there is no p.json"),
        ("mixtral_8x7b", {"PLAN": "p.json", "PROFILE": "c.json"}, "PROFILE and PLAN are two ways"),
        ("mixtral_8x7b", {"PROLOGUE": "/nowhere/modules"}, "PROLOGUE: there is no /nowhere/modules"),
        ("mixtral_8x7b", {"PYTHON": "/nowhere/python"}, "PYTHON: there is no /nowhere/python"),
        ("mixtral_8x7b", {"MEASURE": "/nowhere/c.json"}, "MEASURE: there is no /nowhere"),
        ("mixtral_8x7b", {"FITS": "2"}, ""),
    ],
)
def test_what_a_job_would_find_out_after_the_queue_is_refused_before(cluster, model, environment, match):
    result = cluster.run("submit.sh", model, **environment)
    assert result.returncode == 2 and match in result.stderr
    assert cluster.note("sbatch") == []


@pytest.mark.parametrize(
    ("limit", "signal"),
    [
        ("10", "TERM@150"),
        ("20:00", "TERM@300"),
        ("00:30:00", "TERM@450"),
        ("1-0", None),
        ("2:00:00", None),
        (None, None),
    ],
)
def test_a_short_job_has_time_before_it_is_told_to_end(cluster, limit, signal):
    assert cluster.run("submit.sh", "mixtral_8x7b", SBATCH_TIMELIMIT=limit).returncode == 0
    given = cluster.note("sbatch")
    assert (value(given, "--signal") if "--signal" in given else None) == signal


def test_a_measurement_asks_for_minutes_and_no_data(cluster, tmp_path):
    needless = dict.fromkeys(("DATA", "TOKENIZER", "CHECKPOINTS", "MEGATRON_LM"))
    assert cluster.run("submit.sh", "mixtral_8x7b", MEASURE=str(tmp_path / "c.json"), **needless).returncode == 0
    assert value(cluster.note("sbatch"), "--signal") == "TERM@450"


def test_a_job_begins_with_its_prologue(cluster, tmp_path):
    # As files of sites are: not written for `set -eu`, and with a last command that fails.
    modules = 'export CUDA_DEVICE_MAX_CONNECTIONS=7\n[ -n "$NOT_SET" ] || export PYTHON="$FOUND"\nfalse\n'
    (tmp_path / "modules").write_text(modules)
    given = {"PROLOGUE": str(tmp_path / "modules"), "PYTHON": None, "FOUND": cluster.environment["PYTHON"]}
    assert cluster.job("--tensor-model-parallel-size", "1", SAVES="500000", **given).returncode == 0
    assert cluster.note("environment")[0].split()[-1] == "7"
    assert cluster.run("submit.sh", "mixtral_8x7b", **given).returncode == 0
    result = cluster.job(PROLOGUE="/nowhere/modules")
    assert result.returncode == 2 and "PROLOGUE: there is no /nowhere/modules here" in result.stderr


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_stock_megatron_lm_parses_all_recipes():
    models = sorted(str(path) for path in (SLURM / "models").glob("*.sh"))
    command = [sys.executable, str(SLURM / "check_recipe.py"), "--megatron-lm", os.environ["MEGATRON_LM"], *models]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" ranks, dispatcher ") == len(models)
