"""The recipes of recipes/slurm: a dry run of each at its world size, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

import megatron_moe_opt
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.traces.routing_generator import TABLE5
from megatron_moe_opt.planning.training.known_models import KNOWN_MODELS
from megatron_moe_opt.topology.layouts import ROLES, Layout

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "recipes" / "slurm"))  # a folder of scripts, not a package

from check_recipe import Report, check, main, model_shape  # noqa: E402
from recipe import MODELS, Flags, Recipe, read_recipe  # noqa: E402

NAMES = sorted(path.stem for path in MODELS.glob("*.sh"))
LAYOUT = re.compile(r"(\d+) ranks: TP (\d+), PP (\d+), CP (\d+), EP (\d+), expert-TP (\d+)")


@pytest.fixture(autouse=True)
def _registered():
    megatron_moe_opt.use_host_backend()
    yield
    megatron_moe_opt.register()  # a dry run leaves the options of its recipe


def altered(name: str, *added: str, **fields: int) -> Recipe:
    return dataclasses.replace(read_recipe(name), added=added, **fields)


def sizes(recipe: Recipe) -> tuple[int, ...]:
    one = recipe.layout
    return one.world, one.tp, one.pp, one.cp, one.ep, one.expert_tp


def test_all_models_of_the_papers_are_there():
    assert len(NAMES) == 18
    families = {name.split("_")[0] for name in NAMES}
    assert families == {"mixtral", "monta", "deepseek", "qwen3", "netmoe", "mpmoe", "hybridep", "parm"}


@pytest.mark.parametrize("name", NAMES)
def test_dry_run(name):
    recipe = read_recipe(name)
    report = check(recipe)
    one = report.layout
    for role in ROLES:
        groups = one.groups(role)
        assert sorted(rank for group in groups for rank in group) == list(range(one.world))
    batch = recipe.flags.number("--global-batch-size")
    assert report.micro_batches * recipe.flags.number("--micro-batch-size") * one.dp == batch
    assert name in report.lines()[0] and str(one.world) in report.lines()[0]
    source = (MODELS / f"{name}.sh").read_text()
    for shared in re.findall(r"shared/(\w+)\.sh\"", source):
        source += (MODELS.parent / "shared" / f"{shared}.sh").read_text()
    (said,) = LAYOUT.findall(source)
    assert tuple(map(int, said)) == sizes(recipe)
    assert "arXiv" in source or "Table" in source  # where the sizes are from


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral_8x7b", 46.7), ("qwen3_30b_a3b", 30.5), ("monta_2x70b", 125.4)]
)
def test_published_numbers_of_parameters(name, billions):
    # Mixtral of Experts, section 2.1: 47B; Qwen3, Table 2: 30.5B; 69.0B of Llama 2 and once more its 56.4B of MLPs.
    assert model_shape(read_recipe(name)).parameters(Layout()).total / 1e9 == pytest.approx(billions, abs=0.06)


def test_known_models_are_those_of_the_recipes():
    """What moe-opt plan knows by name is what the recipe of that name trains."""
    for name in NAMES:
        known, recipe = KNOWN_MODELS.get(name.replace("_", "-")), read_recipe(name)
        if known is None:
            assert name in ("deepseek_v3", "qwen3_30b_a3b")  # known as -like
            continue
        padding = 128 * recipe.layout.tp
        assert model_shape(recipe) == dataclasses.replace(
            known,
            vocabulary=-(-known.vocabulary // padding) * padding,
            kv_heads=known.kv_heads or known.heads,
            head_size=known.head_size or known.hidden // known.heads,
            dense_ffn=known.ffn,  # of no layer
        )
    assert {name: KNOWN_MODELS[f"netmoe-{name.lower()[4:]}"].hidden for name in TABLE5} == {
        name: row.hidden for name, rows in TABLE5.items() for row in rows.values()
    }


def test_deepseek_v3_has_671_billion_parameters():
    recipe = read_recipe("deepseek_v3")
    number = recipe.flags.number
    hidden, heads, ffn = number("--hidden-size"), number("--num-attention-heads"), number("--moe-ffn-hidden-size")
    head, rotary, value = number("--qk-head-dim"), number("--qk-pos-emb-head-dim"), number("--v-head-dim")
    query, latent = number("--q-lora-rank"), number("--kv-lora-rank")
    attention = (
        hidden * query
        + query * heads * (head + rotary)
        + hidden * (latent + rotary)
        + latent * heads * (head + value)
        + heads * value * hidden
    )
    experts = (number("--num-experts") * ffn + number("--moe-shared-expert-intermediate-size")) * 3 * hidden
    moe = sum(recipe.moe_layers)
    assert moe == 58
    dense = len(recipe.moe_layers) - moe
    total = len(recipe.moe_layers) * attention + moe * (experts + number("--num-experts") * hidden)
    total += dense * 3 * hidden * number("--ffn-hidden-size") + 2 * recipe.vocabulary * hidden
    assert total / 1e9 == pytest.approx(671.0, abs=0.1)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("hybridep_llama_tiny", 2.1),
        ("hybridep_mistral_small", 4.7),
        ("hybridep_gpt_medium", 8.4),
        ("hybridep_gpt_large", 8.4),
    ],
)
def test_experts_of_hybridep_have_the_size_of_table_ii(name, millions):
    flags = read_recipe(name).flags
    assert round(2 * flags.number("--hidden-size") * flags.number("--ffn-hidden-size") / 1e6, 1) == millions


def test_the_readme_states_the_layouts():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "recipes" / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == NAMES
    for name, row in rows:
        world, tp, pp, cp, ep, expert_tp, dispatcher, _ = (cell.strip() for cell in row.split("|"))
        recipe = read_recipe(name)
        assert tuple(map(int, (world, tp, pp, cp, ep, expert_tp))) == sizes(recipe)
        assert recipe.dispatcher[1] == dispatcher


def test_a_stated_dispatcher_replaces_the_recipes():
    recipe = altered("netmoe_gpt_s", "--moe-token-dispatcher-type", "alltoall", "--num-layers", "2")
    assert "dispatcher alltoall" in check(recipe).lines()[0]
    assert recipe.flags.number("--num-layers") == 2
    recipe = altered("mpmoe_gpt_s", "--moe-token-dispatcher-type", "monta")  # without mpmoe's options
    assert "dispatcher monta" in check(recipe).lines()[0]
    recipe = altered("hybridep_gpt_large", "--moe-token-dispatcher-type=alltoall")
    assert "dispatcher alltoall" in check(recipe).lines()[0]


def test_pipelines_are_laid_as_a_plan_lays_them():
    """With virtual stages, whose rank holds more, under 1F1B overlap one pass more, or a layout of its own."""
    pipeline = "--expert-model-parallel-size", "4", "--pipeline-model-parallel-size", "8"
    virtual, overlap = ("--num-virtual-stages-per-pipeline-rank", "2"), ("--overlap-moe-expert-parallel-comm",)
    alltoall = "--moe-token-dispatcher-type", "alltoall"
    plain, interleaved, by_layers, beside = (
        check(altered("mixtral_8x7b", *pipeline, *alltoall, *added))
        for added in ((), virtual, ("--num-layers-per-virtual-pipeline-stage", "2"), (*virtual, *overlap))
    )
    assert interleaved.layout.vpp == by_layers.layout.vpp == 2 and plain.layout.vpp == 1
    activations = [one.stage.memory.activations for one in (plain, interleaved, beside)]
    assert activations == sorted(set(activations)) and by_layers.stage == interleaved.stage
    laid = check(
        altered("mixtral_8x7b", *pipeline, "--num-layers", "31", "--pipeline-model-parallel-layout", "E(t*2|)*15tL")
    )
    assert laid.stage is None
    with pytest.raises(ConfigurationError, match="Megatron refuses"):
        check(altered("mixtral_8x7b", *pipeline, "--pipeline-model-parallel-layout", "E(t*2|)*15tL"))


def test_what_is_recomputed_is_not_counted():
    """Or, where the estimate knows nothing of a saving, the model is not refused."""
    stock = ("--moe-token-dispatcher-type", "alltoall")
    selective = (*stock, "--recompute-granularity", "selective", "--recompute-modules")
    kept = check(altered("mixtral_8x7b", *stock))
    gpu_memory = round(kept.stage.total / 2**30)  # all of it, where a part must be left

    def checked(*added: str) -> Report:
        return check(altered("mixtral_8x7b", *added, gpu_memory=gpu_memory))

    for added in (stock, (*stock, "--recompute-activations"), (*selective, "shared_experts", "mlp")):
        with pytest.raises(ConfigurationError, match=f"GiB, and a GPU has {gpu_memory} "):
            checked(*added)
    fits = checked(*selective, "core_attn", "moe")
    assert 0 < fits.stage.memory.activations < 0.6 * kept.stage.memory.activations and not fits.warning
    said = checked(*selective, "moe_act").lines()[-1]
    assert re.search(r"warning: a rank .* if --recompute-modules moe_act saved nothing: whether it fits is not", said)
    assert "if --grad-reduce-in-bf16 saved nothing" in checked(*stock, "--grad-reduce-in-bf16").warning


def test_flags_of_several_values():
    scopes = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", "attn", "moe_router")
    assert check(altered("mixtral_8x7b", *scopes)).layout == read_recipe("mixtral_8x7b").layout


@pytest.mark.parametrize(
    ("name", "fields", "added", "match"),
    [
        ("mixtral_8x7b", {"nodes": 3}, (), "does not divide the 24 ranks"),
        ("mixtral_8x7b", {}, ("--global-batch-size", "100"), "100 is no multiple of 8"),
        ("mixtral_8x7b", {}, ("--num-layers", "33"), "33 layers are left for 2 stages"),
        (
            "mixtral_8x7b",
            {},
            ("--seq-length", "4097"),
            "--seq-length 4097 is cut by TP 2 and CP 1: choose a multiple of 2",
        ),
        ("mixtral_8x7b", {}, ("--seq-length", "65536"), "--max-position-embeddings"),
        ("mixtral_8x7b", {}, ("--train-iters", "300"), "--lr-warmup-iters 500 is not below the 300 steps"),
        ("mixtral_8x7b", {}, ("--num-experts", "12"), "divide"),
        ("mixtral_8x7b", {}, ("--num-attention-heads", "33"), "Megatron refuses"),
        ("mixtral_8x7b", {"gpu_memory": 24}, (), "GiB, and a GPU has 24 (gpu_memory), of which 10% are left"),
        ("mixtral_8x7b", {}, ("--moe-token-dispatcher-type", "nonesuch"), "is not a dispatcher"),
        ("mixtral_8x7b", {}, ("--moe-opt-nonesuch", "1"), "--moe-opt-nonesuch"),
        ("mixtral_8x7b", {}, ("--moe-layer-freq", "[1]*31"), "--moe-layer-freq"),
        ("monta_2x70b", {}, ("--ffn-hidden-size", "28676"), "does not divide the 28676"),
        ("deepseek_v3", {}, ("--decoder-last-pipeline-num-layers", "2"), "55 layers are left for 14 stages"),
        ("netmoe_gpt_s", {}, ("--hidden-dropout", "0.1"), "--hidden-dropout 0.1 does not work with"),
        (
            "mpmoe_gpt_s",
            {},
            (
                *("--moe-opt-partitions", "4"),
                *("--recompute-granularity", "selective", "--recompute-modules", "moe_act"),
            ),
            "give --moe-opt-memory-reuse S3 in its place",
        ),
        (
            "hybridep_gpt_large",
            {},
            ("--expert-model-parallel-size", "16", "--expert-tensor-parallel-size", "2"),
            "--expert-tensor-parallel-size 2 cuts experts",
        ),
    ],
)
def test_refuses_what_does_not_fit(name, fields, added, match):
    with pytest.raises(ConfigurationError, match=re.escape(match)):
        check(altered(name, *added, **fields))


def test_refuses_a_megatron_that_does_not_run_here(monkeypatch, capsys):
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "11", "9"))
    monkeypatch.setattr("megatron_moe_opt.versions.megatron_version", lambda: "0.19.0")
    assert main(["mixtral_8x7b"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check_recipe: error: megatron-core 0.19.0 does not run on Python ")


def test_a_transformer_engine_that_needs_a_driver_is_left_out(monkeypatch, tmp_path, capsys):
    """As on a login node. What only that library can do, the job's nodes can."""
    (tmp_path / "transformer_engine").mkdir()
    error = "raise OSError('libcuda.so.1: cannot open shared object file')"
    (tmp_path / "transformer_engine/__init__.py").write_text(error)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # so that what the dry run puts there does not stay
    del sys.modules["transformer_engine"]
    assert main(["parm_gpt2", "--", "--moe-permute-fusion"]) == 0, capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        import transformer_engine  # noqa: F401


def test_refuses_what_is_no_recipe(tmp_path):
    with pytest.raises(ConfigurationError, match="choose one of deepseek_v3"):
        read_recipe("nonesuch")
    file = tmp_path / "mine.sh"
    file.write_text("nodes=1 gpus_per_node=8 gpu_memory=80\narguments=(--num-layers 2)\ndispatcher=()\n")
    with pytest.raises(ConfigurationError, match="vocabulary: unbound variable"):
        read_recipe(file)
    file.write_text(file.read_text() + "vocabulary=many\n")
    with pytest.raises(ConfigurationError, match="vocabulary=many must be whole numbers"):
        read_recipe(file)


def test_flags_and_values_may_be_one_word():
    flags = Flags(["--bf16", "--train-iters=7", "--lr-decay-style", "cosine", "--data-path=1 a 1 b"])
    assert list(flags) == ["--bf16", "--train-iters", "--lr-decay-style", "--data-path"]
    assert flags.number("--train-iters") == 7 and flags.values("--bf16") == []
    assert flags.values("--data-path") == ["1 a 1 b"] and flags.values("--lr-decay-style") == ["cosine"]
    with pytest.raises(ConfigurationError, match="^mixtral is behind no flag"):
        Flags(["mixtral", "--bf16"])
