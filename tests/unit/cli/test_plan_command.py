"""`moe-opt plan` as a user runs it: known clusters and measured ones, MoNTA's table, files, refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from megatron_moe_opt.cli.plan import case as plan_case
from megatron_moe_opt.cli.plan import layout_search
from megatron_moe_opt.cli.plan import report as plan_report
from megatron_moe_opt.options import split_options
from megatron_moe_opt.planning.costs.curves import CostCurve
from megatron_moe_opt.planning.costs.described_cluster import describe
from megatron_moe_opt.planning.costs.known_clusters import H100_IB400, KNOWN_CLUSTERS, PCIE
from megatron_moe_opt.planning.plan_file import TOKENS, Plan
from megatron_moe_opt.planning.planner import best, candidates, fastest_narrowed
from megatron_moe_opt.planning.predicting import parm
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.planning.training.known_models import KNOWN_MODELS, MONTA_CHOICES
from megatron_moe_opt.planning.training.memory import BytesPerParameter, logits_memory, training_memory
from megatron_moe_opt.planning.training.step_costs import PP_NEIGHBOURS, communication
from megatron_moe_opt.planning.training.throughput import throughput
from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.domains import ExpertDomains
from megatron_moe_opt.topology.layouts import Layout

MIXTRAL = "--model mixtral-8x7b,layers=4 --sequence 2048"
OF_16 = "--model mixtral-8x7b,layers=4,experts=16"
OF_32 = "--model mixtral-8x7b,layers=4,experts=32,ffn=512"
MONTA = "--cluster a800-ib200 --model monta-2x70b --world 16 --tp 8 --ep 2 --expert-tp 8"


@pytest.fixture
def run(monkeypatch, command):
    """Exit code, output and errors of `moe-opt plan ARGUMENTS`."""
    monkeypatch.setattr(plan_report, "WIDTH", 300)
    return lambda *arguments: command("plan", *" ".join(arguments).split())


def tables(output):
    """Returns the tables by title: the cells of each row, without the first, by the first."""
    found, title, previous = {}, "", ""
    for line in output.splitlines():
        if line.lstrip().startswith("┏"):
            title = previous.strip()
            found[title] = {}
        elif line.lstrip().startswith("│"):
            name, *cells = (cell.strip() for cell in line.strip().strip("│").split("│"))
            found[title][name] = cells
        previous = line
    return found


CANDIDATES = "A MoE layer with its experts, forward and backward of a micro-batch"


def test_what_is_printed_is_what_the_planner_says(run):
    code, output, _ = run(MIXTRAL, "--cluster h100-ib400 --world 16 --ep 8 --micro-batches 4 --all")
    assert code == 0
    layout, model = Layout(16, ep=8), KNOWN_MODELS["mixtral-8x7b"]
    workload = LayerWorkload(2048, 4096, 14336, True, 8, 2, 2, 16, 8, workers=(8,), fused=True, resident_part=2 / 4)
    found, _ = candidates(workload, describe(H100_IB400, layout, 4096, 14336))
    rows, stock = tables(output)[CANDIDATES], next(one for one in found if one.variant == ALLTOALL)
    assert list(rows) == [one.variant for one in found]
    for one in found:
        seconds, of_stock, exposed, inter, intra, activations = rows[one.variant][:6]
        assert (seconds, exposed) == (f"{one.seconds * 1e3:.3f}", f"{one.exposed * 1e3:.3f}")
        assert of_stock == f"{one.seconds / stock.seconds:.0%}"
        assert (inter, intra) == (f"{one.inter_bytes / 1e6:.1f}", f"{one.intra_bytes / 1e6:.1f}")
        assert activations == f"{one.activation_bytes / 2**20:.0f}"
        assert (rows[one.variant][-1] == "chosen") == (one == best(found))
    # What has no partitions holds what stock does; the step is of 4 layers, each with its experts.
    parallel, of_model = Layout(16, ep=8), replace(model, layers=4)
    logits = logits_memory(of_model, parallel, 0, 1, 2048)
    held = training_memory(of_model, parallel, 1, 2048, 4).total + logits
    assert rows[ALLTOALL][6] == f"{held / 2**30:.1f}"
    besides = communication(of_model, parallel, describe(H100_IB400, layout, 4096, 14336), 2048)
    sizes = of_model, parallel, H100_IB400.device, 1, 2048, 4
    step = throughput(*sizes, stock.seconds, with_experts=True, besides=besides)
    assert rows[ALLTOALL][7:9] == [f"{step.tokens_per_second:.0f}", f"{step.mfu:.1%}"]
    # S4 keeps rows as they are sent, with 16 bytes behind each, in the place of the experts' inputs, and no middle, of
    # three tensors; the layer that runs has a part of both, when there are no logits.
    more = next(one for one in found if one.variant == "mpmoe:8:S4").held_more
    assert more.of_pass == 4096 * (16 - 3 * 14336 * 2) and 0 < more.at_work < -more.of_pass / 4
    saved = -(4 * more.of_pass + max(more.at_work - logits, 0)) / 2**30
    assert float(rows[ALLTOALL][6]) - float(rows["mpmoe:8:S4"][6]) == pytest.approx(saved, abs=0.11)
    assert rows["mpmoe:8:hops"][6] == rows["monta:O1"][6] == rows[ALLTOALL][6]  # which save the same for backward
    others = next(one for one in found if one.variant == "expert-migration:2")
    held = 4 * (others.activation_bytes - stock.activation_bytes) / 2**30  # once, however many micro-batches there are
    assert float(rows["expert-migration:2"][6]) - float(rows[ALLTOALL][6]) == pytest.approx(held, abs=0.11)


def test_experts_that_travel_are_held_as_they_were_sent_besides():
    workload = LayerWorkload(2048, 4096, 14336, True, 8, 2, 2, 16, 8, workers=(8,), resident_part=0.5)
    layer = LayerOnCluster(workload, describe(H100_IB400, Layout(16, ep=8), 4096, 14336))
    held = [layer.held_bytes_of_others(ExpertDomains((8,), (size,))) for size in (1, 2, 4)]
    of_one = workload.held_bytes_of_others(crosses_nodes=False)
    as_sent_and_gathered = 1.5 * workload.expert_bytes  # the latter in half of the layers
    assert held == [0, as_sent_and_gathered + of_one, as_sent_and_gathered + 3 * of_one]


def test_a_rank_that_has_all_experts_has_no_busier_one_beside_it(run):
    rows = []
    for imbalance in ("1", "1.5"):
        _, output, _ = run(MIXTRAL, f"--cluster h100-ib400 --world 8 --ep 1 --imbalance {imbalance} --all")
        rows.append(tables(output)[CANDIDATES])
    assert rows[0] == rows[1]


def test_a_pipeline_is_filled_where_nobody_says_with_how_many_micro_batches(run):
    found = []
    for given in ("", "--micro-batches 8", "--micro-batches 1"):
        _, output, _ = run(MIXTRAL, f"--cluster h100-ib400 --world 16 --pp 2 --ep 8 {given}")
        found.append(tables(output)[CANDIDATES][ALLTOALL][6:9])
    assert found[0] == found[1] and float(found[0][0]) > float(found[2][0])


def test_the_flags_say_how_experts_and_queues_are_planned(run):
    for layout, queues in (("--ep 8", "32"), ("--tp 2 --ep 8", "1, which Megatron demands here")):
        _, output, _ = run(MIXTRAL, f"--cluster h100-ib400 --world 16 {layout}")
        assert " --moe-grouped-gemm " in output
        assert f"CUDA_DEVICE_MAX_CONNECTIONS={queues}:" in " ".join(output.split())


def test_queues_of_a_profile_are_those_of_its_layout(run, tmp_path):
    """Megatron demands one under TP, whatever the profile was measured with."""
    file = tmp_path / "cluster.json"
    described = describe(H100_IB400, Layout(16, tp=2, ep=8), 4096, 14336)
    for measured, layout, queues in (
        ("16", "", f"1 on GPUs before Blackwell, as Megatron demands at TP 2 and CP 1, though {file} does not say that "
         "it was measured so, else 16"),
        ("16", "--tp 1", "16"),
        ("1", "", "1"),
    ):  # fmt: skip
        replace(described, gpu_settings={"CUDA_DEVICE_MAX_CONNECTIONS": measured}).save(file)
        _, output, _ = run(MIXTRAL, f"--cluster {file} {layout}")
        assert f"CUDA_DEVICE_MAX_CONNECTIONS={queues}:" in output


def test_tp_ranks_that_hold_the_same_tokens_send_all_of_them_to_the_next_stage(run, monkeypatch):
    found = []
    monkeypatch.setattr(plan_case, "communication", lambda *sizes: found.append(communication(*sizes)) or found[-1])
    described = describe(H100_IB400, Layout(16, tp=8, ep=8, pp=2), 4096, 14336)
    curve = CostCurve(described.curves[Kind.ALL_GATHER, PP_NEIGHBOURS])
    for split, more in ((8, ""), (1, "--no-sequence-parallel")):
        run(MIXTRAL, f"--cluster h100-ib400 --world 16 --tp 8 --ep 8 --pp 2 {more}")
        seconds = curve.seconds(2 * 2048 * 4096 * 2 / split) + described.overhead
        assert found[-1].between_stages == pytest.approx(2 * seconds)


def test_a_layout_whose_expert_gradients_megatron_mixes_is_doubted(run):
    doubt = (
        "warning: --expert-tp 1 beside --tp 2 at --ep 1: Megatron before 0.19 sums experts' gradients over ranks that "
        "do not hold the same experts: set --expert-tp 2, raise --ep, or train with megatron-core 0.19\n"
    )
    for more, doubted in (("", True), ("--expert-tp 2", False), ("--ep 2", False)):
        code, output, _ = run(MIXTRAL, f"--cluster pcie --world 8 --tp 2 {more}")
        assert code == 0 and (doubt in output) == doubted and ("warning:" in output) == doubted


def test_ranks_of_a_tp_group_may_share_key_value_heads(run):
    """As Megatron has them do where TP is a multiple of the heads."""
    for heads, accepted in ((4, True), (6, False)):
        model = f"--model qwen3-30b-a3b-like,layers=4,heads=48,kv_heads={heads} --cluster h100-ib400 --world 16"
        code, _, error = run(model, "--tp 8 --ep 8")
        assert (code == 0) == accepted and ("kv_heads" in error) != accepted


def test_the_sequences_of_a_step_are_a_multiple_of_the_ranks_there_may_be():
    cases = {(4096, 64): 1024, (6144, 64): 704, (4096, 96): 1056, (4096, 48): 1008, (4096, 65536): 1024, (2**23, 8): 1}
    assert {case: layout_search.default_batch(*case) for case in cases} == cases


def test_logits_and_layers_that_run_again_are_not_held_at_once(run):
    """Of a layer that is run again there is one at a time, before it the logits of a large vocabulary."""
    base = "--cluster h100-ib400 --world 16 --ep 8 --micro-batches 4 --recompute full --model mixtral-8x7b,layers=4"
    gib = []
    for vocabulary in (32000, 320000, 640000):
        _, output, _ = run(f"{base},vocabulary={vocabulary} --sequence 2048 --micro-batch 4")
        gib.append(float(tables(output)[CANDIDATES][ALLTOALL][6]))
    words = 2 * 320000 * 4096 * (2 + 4 + 12 / 16) / 2**30  # embedding and output layer, and their states
    logits = 4 * 2048 * 320000 * 6 / 2**30
    assert gib[2] - gib[1] == pytest.approx(words + logits, abs=0.11)
    assert 0 < gib[1] - gib[0] - words * 288 / 320 < logits * 288 / 320  # a layer's had been more than the logits


def test_fp32_has_its_own_memory_and_no_peak_that_is_known(run):
    base = "--world 16 --ep 8 --micro-batches 4"
    code, _, error = run(MIXTRAL, base, "--cluster h100-ib400 --dtype fp32")
    assert code == 2 and "--dtype fp32: the peak of h100-ib400 is known in 16 bits alone: give that of fp32" in error
    _, output, _ = run(MIXTRAL, base, "--cluster h100-ib400,tflops=60 --dtype fp32")
    model, parallel = replace(KNOWN_MODELS["mixtral-8x7b"], layers=4), Layout(16, ep=8)
    held = training_memory(model, parallel, 1, 2048, 4, each=BytesPerParameter.of(4)).total + logits_memory(
        model, parallel, 0, 1, 2048, 4
    )
    assert tables(output)[CANDIDATES][ALLTOALL][6] == f"{held / 2**30:.1f}"


def test_memory_follows_the_rows_that_experts_get(run):
    """Half as many more for each expert: half of what all layers keep of them, three tensors of 14,336 and an input."""
    base = "--cluster h100-ib400 --world 16 --ep 8 --micro-batches 4"
    gib = [
        float(tables(run(MIXTRAL, base, more)[1])[CANDIDATES][ALLTOALL][6]) for more in ("", "--capacity-factor 1.5")
    ]
    assert gib[1] - gib[0] == pytest.approx(4 * 2048 * 2 * (4096 + 3 * 14336) / 2**30, abs=0.11)


def test_slower_candidates_are_left_out_but_for_the_best_of_each_system(run):
    _, output, _ = run(MIXTRAL, "--cluster h100-ib400 --world 32 --ep 8 --tp 2 --expert-tp 2")
    shown = list(tables(output)[CANDIDATES])
    assert {name.partition(":")[0] for name in shown} == {"alltoall", "monta", "parm", "mpmoe"}
    hidden = int(re.search(r"([0-9]+) slower ones: --all", output)[1])
    _, output, _ = run(MIXTRAL, "--cluster h100-ib400 --world 32 --ep 8 --tp 2 --expert-tp 2 --all")
    assert len(tables(output)[CANDIDATES]) == len(shown) + hidden


def test_explain(run):
    _, output, _ = run(MIXTRAL, "--cluster a800-ib200 --world 16 --ep 8 --tp 4 --expert-tp 2 --explain")
    shown = tables(output)
    for name, (*terms, total) in shown["What the times are made of (ms)"].items():
        assert sum(float(term) for term in terms if term) == pytest.approx(float(total), abs=2e-3)
        assert total == shown[CANDIDATES][name][0]
    costs = shown["What ops cost, in one piece"]
    assert {"all_to_all", "all_gather", "copy", "experts, forward", "experts, backward"} <= costs.keys()


def test_the_plan_and_the_flags_that_run_it(run, tmp_path):
    file = tmp_path / "plan.json"
    command = "--cluster h100-ib400 --model deepseek-v3-like,layers=10 --world 64 --ep 64"
    _, output, _ = run(command)
    variant = next(name for name, cells in tables(output)[CANDIDATES].items() if cells[-1] == "chosen")
    flags = output.splitlines()[-1].split()
    options, stock = split_options(flags)
    assert f"mpmoe:{options.partitions}:{options.way}" == variant
    assert " ".join(stock).endswith(
        '--micro-batch-size 1 --global-batch-size 64 --moe-layer-freq "([0]*3+[1]*7)" --ffn-hidden-size 18432 '
        "--moe-shared-expert-intermediate-size 2048 --moe-token-dispatcher-type mpmoe"
    )
    assert stock[:6:2] == [
        "--tensor-model-parallel-size",
        "--context-parallel-size",
        "--expert-model-parallel-size",
    ]
    _, output, _ = run(command, f"--output {file}")
    assert output.splitlines()[-1].endswith(f"--moe-token-dispatcher-type auto --moe-opt-plan {file}")
    plan = Plan.load(file)
    assert set(plan.layers) == set(range(4, 11))  # three dense layers, then 7 with experts
    assert set(plan.layers.values()) == {variant}
    assert (plan.cluster, plan.ep, plan.etp, plan.experts) == ("h100-ib400", 64, 1, 256)
    assert plan.made_for[TOKENS] == 4096


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (
            f"--cluster two-data-centres --world 32 --ep 32 {OF_32} --micro-batch 8",
            r"mpmoe --moe-opt-partitions [0-9]+ --moe-opt-way hops --moe-opt-domain-sizes [0-9]+,[0-9]+,[0-9]+ "
            r"--moe-opt-levels 2,2,8",
        ),
        (  # the levels are those that nodes make
            f"--cluster two-data-centres --world 16 --ep 16 {OF_32} --micro-batch 8",
            r"mpmoe --moe-opt-partitions [0-9]+ --moe-opt-way hops --moe-opt-domain-sizes [0-9]+,[0-9]+",
        ),
        (
            f"--cluster two-data-centres --world 32 --ep 32 {OF_32} --micro-batch 8 --output PLAN",
            r"auto --moe-opt-plan \S+ --moe-opt-levels 2,2,8",
        ),
        (
            "--cluster pcie --world 16 --tp 4 --ep 4 --expert-tp 4 --no-sequence-parallel",
            r"(monta --moe-opt-monta-level O[23] --moe-opt-chunks [0-9]+|mpmoe --moe-opt-partitions [0-9]+"
            r"( --moe-opt-way hops)?)",
        ),
        ("--cluster h100-ib400 --world 8 --ep 1", "alltoall"),
        ("--cluster h100-ib400 --world 16 --ep 8 --activation-budget 100000000", "alltoall"),
    ],
)
def test_flags_of_the_choice(run, tmp_path, arguments, flags):
    _, output, _ = run(MIXTRAL, arguments.replace("PLAN", str(tmp_path / "plan.json")))
    line = output.splitlines()[-1]
    assert re.search(f"--moe-token-dispatcher-type {flags}$", line)
    assert ("--sequence-parallel" in line) == ("--tp" in arguments and "no-sequence-parallel" not in arguments)


LAYOUTS = "Layouts that fit, a training step of each"


def test_the_fastest_layout_that_fits_is_searched(run):
    """None of those that were not predicted in full would have been faster, and its own flags plan the same step."""
    search = "--cluster h100-ib400 --model qwen3-30b-a3b-like,layers=2,experts=16 --world 16 --global-batch 32"
    code, output, _ = run(search)
    assert code == 0
    lines = [
        [cell.strip() for cell in line.strip().strip("│").split("│")]
        for line in output[: output.index("h100-ib400 (")].splitlines()
        if line.lstrip().startswith("│")
    ]
    rates = [float(cells[9]) for cells in lines]
    assert len(lines) == 8 and rates == sorted(rates, reverse=True)
    variant, overlaps, best_tp, best_pp, best_vpp, best_ep, best_etp, size, recompute, rate, gain, *_ = lines[0]
    of_stock = re.search(
        r"(-?[0-9]+)% more than stock in its own best \(TP (.*), PP (.*), EP (.*), expert-TP (.*)\), because",
        output.splitlines()[-3],
    )
    assert int(of_stock[1]) == round(100 * (float(gain) - 1))
    of_rank = 32 // (16 // (int(best_tp) * int(best_pp)) * int(size))
    fixed = f"--tp {best_tp} --pp {best_pp} --vpp {best_vpp} --ep {best_ep} --expert-tp {best_etp} --micro-batch {size}"
    fixed += f" --{'' if overlaps == 'yes' else 'no-'}overlap-moe-expert-parallel-comm"
    _, planned, _ = run(
        search.replace("--global-batch 32", fixed), f"--micro-batches {of_rank} --recompute {recompute}"
    )
    assert tables(planned)[CANDIDATES][variant][7] == rate
    assert planned.splitlines()[-1] == output.splitlines()[-1]
    assert "--global-batch-size 32" in output.splitlines()[-1]
    for other in ("--ep 8", "--ep 16", "--pp 2 --ep 8 --micro-batches 4"):
        _, others, _ = run(search.replace("--global-batch 32", other), "" if "micro" in other else "--micro-batches 2")
        rates = {variant: float(cells[7]) for variant, cells in tables(others)[CANDIDATES].items()}
        assert max(rates.values()) <= float(rate)
        assert rates["alltoall"] <= float(rate) / float(gain) * 1.005  # two digits of the ratio


def test_a_search_leaves_nothing_out_that_would_be_shown(run, monkeypatch):
    """The answer is the same with candidates left out that cannot reach the slowest layout
    shown, and with all of them.
    """
    search = "--cluster h100-ib400 --model qwen3-30b-a3b-like,layers=2,experts=8 --world 8 --global-batch 16"
    search += " --recompute none --micro-batch 1"
    monkeypatch.setattr(layout_search, "SHOWN", 2)
    _, output, _ = run(search)
    monkeypatch.setattr(layout_search, "candidates", lambda *layer, beside, **_: candidates(*layer, beside=beside))
    monkeypatch.setattr(layout_search, "_tokens_of_stock", lambda bounded: 0.0)
    assert run(search)[1] == output


def test_layers_that_stages_do_not_divide_are_planned(run):
    """61 layers on 16 stages, as they are trained: 4 on each, and 1 beside the logits."""
    _, output, _ = run("--cluster h100-ib400 --model deepseek-v3-like --world 1024", "--pp 16 --ep 64 --recompute full")
    line = output.splitlines()[-1]
    assert "--pipeline-model-parallel-size 16" in line and "--decoder-last-pipeline-num-layers 1 " in line


def test_what_does_not_fit_is_not_advised(run, tmp_path):
    """Neither flags nor a plan; the search finds what does, or says how much memory is lacking."""
    mixtral = "--cluster h100-ib400 --model mixtral-8x7b"
    _, output, _ = run(mixtral, "--world 64 --ep 1")
    assert re.fullmatch(
        r"It does not fit: \S+ needs [0-9.]+ GiB, and 90% of a GPU's 80.0 are 72.0: leave out --tp, --pp, --vpp, --ep, "
        r"--expert-tp and --micro-batches to have a layout searched that fits, take more GPUs, or --recompute full",
        output.splitlines()[-1],
    )
    _, output, _ = run(mixtral, "--world 64 --ep 1 --recompute full")
    assert output.splitlines()[-1].endswith("to have a layout searched that fits, take more GPUs")
    code, _, error = run(mixtral, f"--world 64 --ep 1 --output {tmp_path}/plan.json")
    assert code == 2 and "there is nothing to run by: It does not fit" in error
    assert not (tmp_path / "plan.json").exists()
    code, _, error = run("--cluster h100-ib400 --model deepseek-v3-like --world 8")
    assert code == 2 and re.search(r"no layout holds the model, a GPU of the smallest would need [0-9.]+ GiB", error)


def test_a_file_of_the_command_is_not_written_over(run, tmp_path):
    """Neither the lanes by the plan, nor a profile by either."""
    profile, model = tmp_path / "cluster.json", "--model mixtral-8x7b --world 64 --ep 8"
    profile.write_text("kept")
    for cluster, files, flags in (
        ("h100-ib400", f"--lanes {tmp_path}/plan.json --output {tmp_path}/plan.json", ("output", "lanes")),
        (profile, f"--output {profile}", ("output", "cluster")),
        (profile, f"--lanes {profile}", ("lanes", "cluster")),
    ):
        code, _, error = run(f"--cluster {cluster} {model}", files)
        assert code == 2 and re.search("--{} .* is the file of --{}, which it would replace".format(*flags), error)
    assert profile.read_text() == "kept"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--world 64 --ep 8 --model mixtral-8x7b,layers=8",
            r"Use \S+: MoE layers 1\.[0-9]+ times as fast as with stock alltoall, [0-9]+% more",
        ),
        (
            "--world 64 --ep 8 --cluster h100-ib400",
            r"Use mpmoe:\S+: the fastest of what fits; stock alltoall needs [0-9.]+ GiB. A MoE layer is",
        ),
        (
            "--world 8 --ep 1 --model mixtral-8x7b,layers=4",
            "Stay with stock alltoall: nothing is predicted to take less than 97% of its",
        ),
    ],
)
def test_it_ends_in_advice_that_says_why(run, arguments, sentence):
    _, output, _ = run("--cluster pcie --model mixtral-8x7b", arguments)
    assert re.match(sentence, output.splitlines()[-3])


@pytest.mark.parametrize(
    ("arguments", "sentence", "kept"),
    [
        (
            "--world 128 --tp 8 --expert-tp 8 --ep 8 --cp 2",
            r"Lay CP 2 across EP 8 \(horizontal\) if a switch network connects 16 ranks of a TP position: cp 2 < ep 8.*"
            r"order='tp-ep-dp-cp-pp'\) can; the flags, .* are of CP along EP \(vertical\), for which 8 suffice.",
            ("horizontal", "tp-ep-dp-cp-pp", 16),
        ),
        (
            "--world 128 --tp 8 --expert-tp 8 --ep 2 --cp 8",
            r"Lay CP 8 along EP 2 \(vertical\), as the flags do: cp 8 >= ep 2 \(MoNTA\). A switch network has to "
            "connect 8 ranks of a TP position.",
            ("vertical", "tp-cp-ep-dp-pp", 8),
        ),
        ("--world 16 --tp 8 --expert-tp 8 --cp 2", None, None),  # without EP
        ("--world 16 --tp 4 --expert-tp 4 --ep 2 --cp 2", None, None),  # vertical groups lie inside a node
        ("--world 16 --tp 8 --ep 8 --cp 2", None, None),  # as EP groups do with another expert-TP
    ],
)
def test_how_cp_lies_to_ep(run, tmp_path, arguments, sentence, kept):
    """MoNTA's rule where TP fills nodes: a line before the flags, and in the plan."""
    file = tmp_path / "plan.json"
    _, output, _ = run(f"--cluster a800-ib200 {MIXTRAL}", arguments, f"--output {file}")
    lines, expansion = output.splitlines(), json.loads(file.read_text())["expansion"]
    if sentence is None:
        assert not expansion and not [line for line in lines if line.startswith("Lay CP")]
    else:
        assert re.fullmatch(sentence, lines[-3])
        assert (expansion["direction"], expansion["order"], expansion["switch_ranks"]) == kept
        assert expansion["reason"] in lines[-3]
        assert Plan.load(file).expansion == expansion


def test_all_has_the_papers_baselines_beside_what_can_be_chosen(run):
    _, output, _ = run("--cluster mpmoe-adira --world 16 --ep 16 --model mixtral-8x7b,layers=4,experts=16", "--all")
    shown = tables(output)
    others, candidates = shown["For comparison, not to choose from"], shown[CANDIDATES]
    assert [name.partition(":")[0] for name in others] == [
        "deepspeed", "fastmoe", "fastermoe", "tutel", "deepep",
    ]  # fmt: skip
    # Without expert-TP all but the pipelines are stock's schedule, which sends probabilities besides.
    assert float(others["fastmoe"][0]) == pytest.approx(float(candidates[ALLTOALL][0]), rel=0.02)
    assert float(others["deepspeed"][0]) == pytest.approx(float(others["fastmoe"][0]), rel=0.01)


def test_montas_table(run):
    """The paper's column stands beside ours for its own cluster, model and layout alone."""
    sequences = ",".join(map(str, MONTA_CHOICES))
    code, output, _ = run(MONTA, f"--sequence {sequences}")
    ((_, rows),) = tables(output).items()
    assert code == 0
    assert {int(sequence): cells[-1] for sequence, cells in rows.items()} == MONTA_CHOICES
    for sequence, (count, chosen, stock, *_) in rows.items():
        assert int(count) == 2 * int(sequence) // 8  # both experts take every token
        assert chosen == ALLTOALL or float(stock) > 0
    times = [float(cells[2]) for cells in rows.values()]
    assert times == sorted(times)
    _, output, _ = run(MONTA, "--sequence 4096,8192 --model monta-2x70b,ffn=1024 --world 32")
    assert "paper" not in output


def test_what_does_not_fit_is_marked_in_the_table_of_choices(run, monkeypatch):
    ask = f"--cluster h100-ib400 --world 16 --ep 8 {MIXTRAL}"
    _, output, _ = run(ask, "--sequence 2048,1048576")
    ((_, rows),) = tables(output).items()
    assert [cells[1].endswith(" (does not fit)") for cells in rows.values()] == [False, True]
    assert "does not fit: nothing does in 90% of a GPU's memory" in output
    assert "does not fit" not in run(ask, "--sequence 2048,4096")[1]
    monkeypatch.setattr(plan_report, "WIDTH", 100)
    assert "\N{HORIZONTAL ELLIPSIS}" not in run(MONTA, "--sequence 4096,262144")[1]


def test_every_op_that_takes_long_makes_chunks_a_loss(run):
    _, output, _ = run(MONTA, "--sequence 4096 --cluster a800-ib200,op_us=2000 --all")
    rows = tables(output)[CANDIDATES]
    assert float(rows["monta:O1"][0]) < min(float(rows[name][0]) for name in rows if "x" in name)


def test_a_measured_cluster(run, tmp_path):
    file = tmp_path / "cluster.json"
    describe(PCIE, Layout(16, ep=4, expert_tp=2), 4096, 14336 // 2).save(file)
    code, output, _ = run(MIXTRAL, f"--cluster {file}")
    assert code == 0
    assert "16 GPUs, TP 1 (tokens split), CP 1, PP 1, EP 4" in output
    assert "MFU" not in output
    of_file = tables(output)[CANDIDATES]
    code, output, _ = run(MIXTRAL, f"--cluster {file},tflops=312,efficiency=0.6")
    assert code == 0
    assert "MFU" in output
    _, output, _ = run(MIXTRAL, "--cluster pcie --world 16 --ep 4 --expert-tp 2")
    assert {name: cells[:7] for name, cells in tables(output)[CANDIDATES].items()} == {
        name: cells[:7] for name, cells in of_file.items()
    }


def test_levels_of_ranks_that_lie_unevenly_on_nodes_are_not_named(run, tmp_path):
    described = describe(PCIE, Layout(8, ep=8), 4096, 14336)
    for nodes, of_ep in (((0,) * 8, "EP 8 (8, the slowest level first), "), ((0,) * 5 + (1,) * 3, "EP 8, expert-TP 1")):
        replace(described, world=replace(described.world, nodes=nodes)).save(tmp_path / "cluster.json")
        code, output, _ = run(MIXTRAL, f"--cluster {tmp_path / 'cluster.json'}")
        assert code == 0 and of_ep in output


def test_memory_that_a_profile_does_not_hold_may_be_given(run, tmp_path):
    file = tmp_path / "cluster.json"
    describe(PCIE, Layout(16, ep=8), 4096, 14336).save(file)
    unknown = (
        f"warning: {file}: a profile does not hold the memory of a GPU, and nothing is left out for want of it: give "
        f"its GiB, as in --cluster {file},memory=80\n"
    )
    assert unknown in run(MIXTRAL, f"--cluster {file}")[1]
    assert "warning" not in run(MIXTRAL, f"--cluster {file},memory=80")[1]
    lacks = r"It does not fit: \S+ needs [0-9.]+ GiB, and 90% of a GPU's 8.0 are 7.2: "
    ways = "take more GPUs, or --recompute full"
    assert re.fullmatch(lacks + ways, run(MIXTRAL, f"--cluster {file},memory=8")[1].splitlines()[-1])
    known = run(MIXTRAL, "--cluster pcie,memory=8 --world 16 --ep 8")[1].splitlines()[-1]
    assert re.match(lacks + "leave out --tp", known) and known.endswith(ways)
    error = run(MIXTRAL, "--cluster pcie,memory=1 --world 16")[2]
    assert "no layout holds the model" in error and "and has 1.0: take more GPUs" in error


# 1000 rows of 1024 bytes of each GPU; 1040 with their probability. EP 2 over two nodes, expert-TP 8 in a node.
SMALL = "--model topk=2,hidden=512,ffn=1024,experts=8,layers=4,heads=8,vocabulary=1000 --sequence 4000"
TWO_NODES = "--world 16 --tp 8 --ep 2 --expert-tp 8"
BANDWIDTHS = "--cluster a800-ib200,op_us=0,inter=1,intra=4,copy=8"


def without_chunks(output):
    """Milliseconds of monta:O1 and the part of them in which a collective runs."""
    shown = tables(output)
    ms, _, exposed, *_ = shown[CANDIDATES]["monta:O1"]
    return float(ms), float(exposed)


def test_times_worked_out_by_hand(run):
    """Two passes of 1040 bytes a row and two of 1024, of 8 ranks' rows inside a node, once to one peer in the other."""
    exchange, gather, copy = (
        2 * sum(1000 * row * peers * crossing / rate for row in (1040, 1024)) / 1e6
        for peers, crossing, rate in ((1, 1 / 2, 1), (8, 7 / 8, 4), (8, 1, 8))
    )
    code, output, _ = run(SMALL, TWO_NODES, BANDWIDTHS, "--all --explain")
    assert code == 0
    ms, exposed = without_chunks(output)
    assert exposed == pytest.approx(exchange + gather, abs=1e-3)
    best_monta = next(cells for name, cells in tables(output)[TERMS].items() if name.startswith("monta"))
    *terms, _ = (float(cell) for cell in best_monta if cell)  # dispatch and combine, experts, and rows on the rank
    assert ms == pytest.approx(exchange + gather + copy + sum(terms) - max(terms), abs=4e-3)


def test_bandwidths_in_the_place_of_a_clusters_own(run):
    """Half the pace takes twice as long; every op that takes a constant longer counts once."""
    given = without_chunks(run(SMALL, TWO_NODES, BANDWIDTHS, "--all")[1])
    halved = without_chunks(run(SMALL, TWO_NODES, "--cluster a800-ib200,op_us=0,inter=0.5,intra=2,copy=4 --all")[1])
    assert halved[1] == pytest.approx(2 * given[1], abs=2e-3)
    paid = without_chunks(run(SMALL, TWO_NODES, BANDWIDTHS.replace("op_us=0", "op_us=1000"), "--all")[1])
    assert paid[1] == pytest.approx(given[1] + 4 * 2, abs=2e-3)  # an exchange and a gather, four times
    assert paid[0] > given[0] + 4 * 3 - 1e-2  # and a copy


def test_a_link_that_a_node_shares_is_shared_at_other_bandwidths(run):
    """One NIC a node: half its pace takes twice as long, and its own pace no less than with the cluster's latencies."""
    where = "--world 16 --ep 16 " + OF_16 + " --all"
    own, given, halved = (
        without_chunks(run(MIXTRAL, f"--cluster {cluster},op_us=0", where)[1])[1]
        for cluster in ("pcie", "pcie,inter=12.5", "pcie,inter=6.25")
    )
    assert 0.5 * own < given <= own
    assert halved == pytest.approx(2 * given, rel=1e-3)


def test_a_profile_of_another_layer_and_its_doubts_are_told(run, tmp_path):
    file = tmp_path / "cluster.json"
    cluster = describe(H100_IB400, Layout(8, tp=2, ep=8), 4096, 14336, "fp32")
    replace(cluster, warnings=("EP's curve: one point alone",)).save(file)
    code, output, error = run(MIXTRAL, f"--cluster {file} --tp 2")
    assert code == 0, error
    assert f"warning: {file}: EP's curve: one point alone" in output
    assert "measured for another layer, and its times may not hold: type of the rows bf16 (there fp32)" in output
    # What groups of two cost says nothing of a step without TP.
    bare = tmp_path / "bare.json"
    replace(cluster, curves={key: points for key, points in cluster.curves.items() if key[1] != "tp"}).save(bare)
    shown = [run(MIXTRAL, f"--cluster {one},tflops=989,efficiency=0.5 --tp 1")[1] for one in (file, bare)]
    assert list(tables(shown[0]).values()) == list(tables(shown[1]).values())


TERMS = "What the times are made of (ms)"
DRAWN = {
    "alltoall": "--cluster h100-ib400 --world 16 --ep 8",
    "monta:O3x4": "--cluster pcie --world 16 --tp 4 --ep 4 --expert-tp 4",
    "parm:S2": "--cluster pcie --world 16 --tp 4 --ep 4 --expert-tp 4 --no-sequence-parallel",
    "mpmoe:4:S3": "--cluster h100-ib400 --world 16 --ep 8",
    "expert-migration:2x1": f"--cluster h100-ib400 --world 16 --ep 16 {OF_16}",
    "netmoe": f"--cluster h100-ib400 --world 16 --ep 16 {OF_16} --placement-saving 0.4",
}


@pytest.mark.parametrize("variant", DRAWN)
def test_the_lanes_of_every_system_are_drawn(run, tmp_path, variant):
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    code, output, error = run(MIXTRAL, DRAWN[variant], f"--all --draw {variant} --lanes {trace} --lanes {picture}")
    assert code == 0, error
    assert f"written to {trace}" in output and f"written to {picture}" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = tables(output)
    predicted = float(shown[CANDIDATES][variant][0])
    assert float(shown[variant]["all"][0]) == pytest.approx(predicted, rel=1e-3)
    events = json.loads(trace.read_text())["traceEvents"]
    parts = [event for event in events if event.get("cat") == "part"]
    assert sum(part["dur"] for part in parts) / 1e3 == pytest.approx(predicted, abs=1e-3)
    kinds = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"compute", "gradient", "all_to_all"} <= kinds
    assert ("reduce_scatter" in kinds) == (variant in ("monta:O3x4", "expert-migration:2x1"))


def test_several_are_drawn_one_under_the_other(run, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "lanes.svg"
    of_layer = f"--cluster h100-ib400 --world 16 --ep 16 {OF_16}"
    _, output, _ = run(MIXTRAL, of_layer, f"--draw alltoall,mpmoe:4 --lanes {trace} --lanes {picture} --all")
    shown, drawn = tables(output), picture.read_text()
    assert {"alltoall", "mpmoe:4"} < shown.keys()
    for variant in ("alltoall", "mpmoe:4"):
        assert f"<!-- {variant}, {float(shown[CANDIDATES][variant][0]):.4g} ms -->" in drawn
        assert f'"{variant}"' in trace.read_text()


def test_the_chosen_is_drawn_where_none_is_named(run, tmp_path):
    _, output, _ = run(MIXTRAL, "--cluster h100-ib400 --world 16 --ep 8", f"--lanes {tmp_path}/trace.json")
    shown = tables(output)
    assert next(name for name, cells in shown[CANDIDATES].items() if cells[-1] == "chosen") in shown


def test_parms_own_rule_is_explained(run, tmp_path):
    """Algorithm 1 of the paper, by lines that are fitted to what was measured."""
    layout = Layout(16, tp=2, ep=4, expert_tp=2)
    measured = replace(describe(PCIE, layout, 4096, 14336 // 2), saa=((1 << 16, 3e-3), (1 << 20, 1.5e-2), (1 << 28, 2)))
    file = tmp_path / "cluster.json"
    measured.save(file)
    _, output, _ = run(MIXTRAL, f"--cluster {file} --no-sequence-parallel --explain")
    fits = parm.ParmFits.of(measured)
    line = tables(output)["Lines of Parm's Algorithm 1: alpha + beta * bytes"]["SAA"]
    assert line == [
        f"{fits.saa.alpha * 1e3:.4f}",
        f"{fits.saa.beta * 1e9:.4f}",
        f"{fits.saa.r_squared:.4f}",
        f"{fits.saa.largest_error:.1%}",
    ]
    assert fits.saa.largest_error > 0.001  # three points that are on no line
    layer = LayerWorkload(0, 4096, 64, False, 8, 2, 2, 16, ep=4, etp=2, tp=2)
    t_d1, t_d2 = fits.seconds(layer, 2048)
    answer = parm.algorithm_1(layer, 2048, fits)
    assert f"t_D1 {t_d1 * 1e3:.3f} ms, t_D2 {t_d2 * 1e3:.3f} ms: {answer}\n" in output
    assert "Algorithm 1" not in run(MIXTRAL, f"--cluster {file} --explain")[1]  # nothing is replicated
    replace(measured, saa=None).save(file)
    assert (
        "Parm's Algorithm 1: S2's all-to-all beside"
        in run(MIXTRAL, f"--cluster {file} --no-sequence-parallel --explain")[1]
    )


def test_a_cluster_without_some_measurements_is_good_for_the_others(run, tmp_path):
    """A file from before parm, mpmoe's host copies or replicated tokens says so; monta's candidates stay."""
    layout, file = Layout(16, tp=2, ep=4, expert_tp=2), tmp_path / "cluster.json"
    measured = describe(PCIE, layout, 4096, 14336 // 2)
    for missing, system, reason in (
        ({(Kind.ALL_TO_ALL, JOINT_GROUP)}, "parm", "no cost curve for all_to_all in group ep x expert-tp"),
        ({(Kind.OFFLOAD, None), (Kind.PREFETCH, None)}, "mpmoe", "no cost curve for offload"),
    ):
        curves = {key: points for key, points in measured.curves.items() if key not in missing}
        replace(measured, curves=curves).save(file)
        code, output, _ = run(MIXTRAL, f"--cluster {file} --all")
        assert code == 0 and "monta:O1" in tables(output)[CANDIDATES]
        assert reason in " ".join(tables(output)["Not candidates"][system])
    code, _, error = run(MIXTRAL, f"--cluster {file} --tp 4 --no-sequence-parallel")
    assert code == 2 and "--tp 4 is not what" in error


def test_layers_that_are_alike_are_simulated_once(run, monkeypatch):
    calls = []

    def counted(function):
        def predict(*arguments, **by_name):
            calls.append(function)
            return function(*arguments, **by_name)

        return predict

    for function in (candidates, fastest_narrowed):
        monkeypatch.setattr(plan_case, function.__name__, counted(function))
    code, _, _ = run("--cluster h100-ib400 --model deepseek-v3-like,dense_layers=0 --world 2048 --ep 64")
    assert code == 0
    assert calls == [candidates, fastest_narrowed]


KNOWN = ", ".join(KNOWN_CLUSTERS)
MODELS = ", ".join(KNOWN_MODELS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            f"{MIXTRAL} --cluster h100",
            f"--cluster h100 is neither a file of moe-opt profile nor a known cluster: choose one of {KNOWN}",
        ),
        (f"{MIXTRAL} --cluster pcie", "--cluster pcie comes in any size: give its GPUs with --world"),
        (
            "--model llama --cluster pcie --world 8",
            f"--model llama is not known: choose one of {MODELS}, or give sizes, as in layers=24,hidden=2048",
        ),
        (
            "--cluster pcie --world 8 --model hidden=512,layers=2",
            f"--model lacks ffn, experts, topk, heads, vocabulary: give them, or begin with one of {MODELS}",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 12",
            "--world 12 does not fill nodes of 8 GPUs: choose a multiple of 8",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 16 --ep 3",
            "--ep 3 x --expert-tp 1 x --pp 1 = 3 does not divide --world 16: choose sizes whose product does",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 16 --ep 16",
            "--ep 16 does not divide the model's experts 8: choose a divisor",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --pp 8",
            "--pp 8: the model's layers 4 are too few for so many stages of as many each: choose fewer",
        ),
        (
            "--model mixtral-8x7b,layers=4,dense_layers=4 --cluster pcie --world 8",
            "--model: dense_layers 4 leaves no MoE layer of layers 4: choose fewer",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --tp 8 --sequence 100",
            "--sequence 100: TP 8 x CP 1 does not divide it, or twice CP does not, where that is above 1: choose a "
            "multiple of both",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --tp 1 --cp 2 --sequence 4098 --micro-batch 2",
            "--sequence 4098: TP 1 x CP 2 does not divide it, or twice CP does not, where that is above 1: choose a "
            "multiple of both",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --sequence 128,256 --explain",
            "--explain is of one length of sequences: give --sequence a single number",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --sequence 128,256",
            "--sequence 128,256: a layout is searched for one length of sequences: give one, or --ep and the like",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --ep 8 --global-batch 64",
            "--global-batch 64 is for layouts that are searched, beside --ep 8: give --micro-batches",
        ),
        (
            "--model mixtral-8x7b,topk=9 --cluster pcie --world 8",
            "--model: topk 9 is more than experts 8: choose at most that",
        ),
        ("--model mixtral-8x7b,layers=0 --cluster pcie --world 8", "--model: layers is 0: give 1 or more"),
        (
            f"{MIXTRAL} --cluster pcie,efficiency=2 --world 8",
            "--cluster pcie,efficiency=2: efficiency 2 is not a number from 0 to 1",
        ),
        (
            f"{MIXTRAL} --cluster pcie,inter=1e-320 --world 8",
            "--cluster: inter 9.99989e-321 is too small: give 1e-09 or more",
        ),
        (
            f"{MIXTRAL} --cluster pcie,inter=1e300 --world 8",
            "--cluster pcie,inter=1e300: inter 1e300 is not a number from 0 to 1,000,000,000",
        ),
        (f"{MIXTRAL} --cluster ,tp=8 --world 8", f"--cluster ',tp=8' begins with no name: choose one of {KNOWN}"),
        ("--model ,tp=8 --cluster pcie --world 8", f"--model ',tp=8' begins with no name: choose one of {MODELS}"),
        (
            f"--model mixtral-8x7b,ffn={'9' * 300} --cluster pcie --world 8",
            f"--model mixtral-8x7b,ffn={'9' * 300}: ffn {'9' * 300} is not a whole number from 0 to 2,147,483,647",
        ),
        (
            "--model mixtral-8x7b,layers=10001 --cluster pcie --world 8",
            "--model mixtral-8x7b,layers=10001: layers 10001 is not a whole number from 0 to 10,000",
        ),
        (
            "--model mixtral-8x7b,experts=10001 --cluster pcie --world 8",
            "--model mixtral-8x7b,experts=10001: experts 10001 is not a whole number from 0 to 10,000",
        ),
        (
            "--model mixtral-8x7b --cluster pcie --world 8 --sequence 2147483648",
            "--sequence 2147483648: write numbers from 1 to 2147483647, separated by commas, such as 256,1024",
        ),
        *(
            (
                f"--model mixtral-8x7b --cluster h100-ib400 --world 64 {given}",
                f"--world 64 {given}: no layout cuts the model and the {sequences} sequences of a step into equal "
                "parts: choose sizes that divide the GPUs and the sequences, or a --global-batch that is a multiple of "
                "the GPUs",
            )
            for given, sequences in (
                ("--cp 3", 1024),
                ("--micro-batch 1000", 1024),
                ("--cp 2 --micro-batch 2 --global-batch 77", 77),
            )
        ),
        (
            "--model mixtral-8x7b,vocabulary=3 --cluster pcie --world 16 --tp 2",
            "--tp 2 does not divide the model's vocabulary 3: choose a divisor",
        ),
        (
            f"{MIXTRAL} --cluster pcie,nics=8 --world 8",
            "--cluster pcie,nics=8: nics=8 has no meaning there: write tflops, efficiency, memory, op_us, inter, "
            "intra, copy, as in tflops=8",
        ),
        (
            "--model mixtral-8x7b,layers=4,layers=5 --cluster pcie --world 8",
            "--model mixtral-8x7b,layers=4,layers=5: layers is given twice: give it once",
        ),
        (
            "--model mixtral-8x7b,layers=4.5 --cluster pcie --world 8",
            "--model mixtral-8x7b,layers=4.5: layers 4.5 is not a whole number from 0 to 10,000",
        ),
        (
            "--model mixtral-8x7b,gated=1 --cluster pcie --world 8",
            "--model mixtral-8x7b,gated=1: gated is yes or no",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --ep 8 --imbalance 2 --capacity-factor 1",
            "--imbalance 2 with --capacity-factor 1: every expert has its capacity of rows, and no rank is busier than "
            "another: leave one out",
        ),
        (
            f"{MIXTRAL} --cluster h100-ib400 --world 16 --capacity-factor 8",
            "--capacity-factor 8 x top-k 2 has 8 experts padded to more rows than there are tokens: choose at most 4",
        ),
        (
            f"{MIXTRAL} --cluster h100-ib400 --world 64 --cp 2 --sequence 4097",
            "--sequence 4097 is cut by no layout with --cp 2: choose a multiple of 4",
        ),
        (
            f"{MIXTRAL} --cluster pcie,op_us=inf --world 8",
            "--cluster pcie,op_us=inf: op_us inf is not a number from 0 to 1,000,000,000",
        ),
        (
            "--model mixtral-8x7b,kv_heads=3 --cluster pcie --world 8",
            "kv_heads 3 does not divide the model's heads 32: choose a divisor",
        ),
        (
            "--model mixtral-8x7b,ffn=1023 --cluster pcie --world 8 --expert-tp 2",
            "--expert-tp 2 does not divide the model's ffn 1023: choose a divisor",
        ),
        (
            "--model mixtral-8x7b,heads=4,kv_heads=4 --cluster pcie --world 8 --tp 8",
            "--tp 8 does not divide the model's heads 4: choose a divisor",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --vpp 2",
            "--vpp 2 is of a pipeline, and there is none: give --pp 2 or more",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --pp 2 --vpp 2 --micro-batches 3",
            "--micro-batches 3 is no multiple of --pp 2, as --vpp 2 asks for: choose one",
        ),
        *(
            (
                f"{MIXTRAL} --cluster pcie --world 8 --overlap-moe-expert-parallel-comm {given}",
                f"--overlap-moe-expert-parallel-comm does not run, or does nothing, with {sentence}, or drop it",
            )
            for given, sentence in (
                ("--pp 4 --ep 2", "--pp 4 without virtual stages: give --vpp 2 or more"),
                ("--tp 8", "--ep 1, where tokens stay on their rank: raise --ep"),
                ("--recompute full", "--recompute full: give none or selective"),
                (
                    "--tp 2 --ep 4 --no-sequence-parallel",
                    "--tp 2 --no-sequence-parallel: leave out --no-sequence-parallel",
                ),
            )
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --lanes nowhere/trace.json",
            "--lanes nowhere/trace.json: its folder does not exist; create it or choose another",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --lanes picture.gif",
            "the picture picture.gif has no known format: end its name in .png, .svg, .pdf",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --draw monta:O3x4",
            "--draw monta:O3x4 has no file to draw in: give --lanes FILE",
        ),
        (
            f"{MIXTRAL} --cluster pcie --world 8 --sequence 128,256 --lanes trace.json",
            "--lanes trace.json is of one length of sequences: give --sequence a single number",
        ),
    ],
)
def test_refuses(run, arguments, sentence):
    code, output, error = run(arguments)
    assert (code, output) == (2, "")
    assert error.strip().removeprefix("moe-opt: ") == sentence


@pytest.mark.parametrize(
    ("option", "value"),
    [("world", 500_001), ("imbalance", 1e300), ("capacity-factor", 1e300), *(
        (name, 2**31) for name in ("micro-batch", "micro-batches", "global-batch")
    )],
)  # fmt: skip
def test_ranges_end_before_times_are_no_numbers(run, option, value):
    code, output, error = run(f"{MIXTRAL} --cluster pcie --{option} {value}")
    assert (code, output) == (2, "") and f"Invalid value for '--{option}'" in error


def test_the_largest_sizes_are_planned(run):
    """Whatever the numbers, none becomes infinite."""
    model = ",".join(f"{name}={size}" for name, size in {
        "layers": 10_000, "hidden": 2**31 - 8, "heads": 8, "head_size": 2**31 - 1, "vocabulary": 2**31 - 1,
        "experts": 10_000, "topk": 10_000, "ffn": 2**31 - 1, "shared_ffn": 2**31 - 1,
    }.items())  # fmt: skip
    sizes = "--sequence 2147483647 --micro-batch 2147483647 --micro-batches 2147483647 --capacity-factor 1"
    for cluster in ("inter=1e9,intra=1e9,copy=1e9,tflops=1e9,op_us=1e9", "inter=1e-9,intra=1e-9,copy=1e-9,tflops=1e-9"):
        code, output, error = run(f"--cluster pcie,{cluster} --model {model} --world 8 --ep 8", sizes)
        assert code == 0 and "It does not fit" in output, error
        assert not re.search(r"\b(inf|nan)\b", output)


def test_refuses_to_draw_what_is_no_candidate(run, tmp_path):
    code, output, error = run(MIXTRAL, f"--cluster pcie --world 8 --ep 8 --draw netmoe --lanes {tmp_path}/a.json")
    assert (code, output) == (2, "")
    assert "--draw netmoe is not a candidate here: what it saves depends on which samples use which experts" in error
    _, _, error = run(MIXTRAL, f"--cluster pcie --world 8 --ep 8 --draw monta:O9 --lanes {tmp_path}/a.json")
    assert "--draw monta:O9 is not a candidate here: choose one of monta:O" in error
    _, _, error = run(MIXTRAL, f"--cluster pcie --world 8 --ep 8 --draw mpmoe:4:fp8 --lanes {tmp_path}/a.json")
    assert "--draw mpmoe:4:fp8 is not a candidate here: formats of the wire are lossy, and no candidate has" in error
    _, _, error = run(MIXTRAL, f"--cluster pcie --world 8 --ep 8 --draw deepspeed --lanes {tmp_path}/a.json")
    assert re.search(
        r"--draw deepspeed .*: choose one of \S.*\balltoall\b.*, or of the others in the table of --all", error
    )


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--ep 16 --capacity-factor 1", "it does not train with a capacity, under which other samples share a rank"),
        ("--ep 16 --tp 8 --cp 2", "EP x expert-TP = 16 is no multiple of that, from 2 on"),
        ("--ep 1", "EP x expert-TP = 1 is no multiple of that, from 2 on"),
    ],
)
def test_netmoe_is_not_advised_where_training_refuses_it(run, more, reason):
    code, output, _ = run(MIXTRAL, f"{OF_16} --cluster pcie --world 16 --placement-saving 0.9 --all", more)
    assert code == 0 and reason in output and not any("netmoe" in name for name in tables(output)[CANDIDATES])


def test_stock_is_advised_for_lack_of_room_alone_where_that_is_why(run):
    _, output, _ = run(MIXTRAL, "--cluster h100-ib400 --world 64 --ep 8 --expert-tp 2 --activation-budget 1MiB")
    assert "Stay with stock alltoall: nothing that fits is predicted to take less" in output


def test_refuses_files(run, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    code, _, error = run(MIXTRAL, f"--cluster {other}")
    assert code == 2
    assert "not a file of moe-opt profile" in error
    measured = tmp_path / "cluster.json"
    describe(PCIE, Layout(8, ep=8), 4096, 14336).save(measured)
    for arguments, sentence in (
        ("--ep 4", f"--ep 4 is not what {measured} was measured with (8)"),
        (
            f"--cluster {measured},tflops=100",
            ",tflops=100: tflops says nothing about a step without efficiency: give both, or neither",
        ),
        (f"--output {tmp_path}/no/plan.json", "its folder does not exist"),
        (f"--cluster {measured},copy=3", ",copy=3: copy has no meaning beside a file, which holds costs: drop it"),
    ):
        code, _, error = run(MIXTRAL, f"--cluster {measured}", arguments)
        assert code == 2
        assert sentence in error
