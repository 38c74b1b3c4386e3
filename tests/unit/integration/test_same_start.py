"""What ranks are told to differ in."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_moe_opt.errors import ExtensionError
from megatron_moe_opt.integration.start_facts import facts_of
from megatron_moe_opt.options import Options
from megatron_moe_opt.runtime.job import same_start
from megatron_moe_opt.runtime.job.same_start import difference, start_alike


def told(*facts: dict[str, str | None], refused: dict[int, str] | None = None) -> dict[int, dict[str, object]]:
    return {rank: {"facts": one, "refused": (refused or {}).get(rank)} for rank, one in enumerate(facts)}


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (told({"a": "1"}, {"a": "1"}), None),
        (told({"a": "1"}, {"a": None}, {"a": "1"}), None),  # a rank that does not know
        (told({}, {}, refused={0: "no", 1: "no"}), None),  # each says so itself
        (
            told({"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "1", "b": "x"}, {"a": "1", "b": "x"}, {"b": "z"}),
            "the ranks are not started alike: a is 1 on ranks 0 to 3 and not given on rank 4; "
            "b is x on ranks 0, 2, 3 and y on rank 1 and z on rank 4: give all ranks the same",
        ),
        (told({}, {}, {}, refused={1: "--b 7 is wrong"}), "on rank 1: --b 7 is wrong"),
        (
            told({}, {}, {}, {}, refused={0: "no", 1: "no", 3: "none"}),
            "on ranks 0, 1: no; on rank 3: none",
        ),
    ],
)
def test_a_difference_is_one_sentence(ranks, sentence):
    assert difference(ranks) == sentence


def test_a_node_without_a_gpu_beside_others_is_named_first(monkeypatch):
    """It would wait over Gloo for ranks on NCCL. The host backend has set the other variable."""
    facts = []
    for has_gpu, connections in ((False, "1"), (True, "32")):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
        facts.append(facts_of(Options()))
    assert difference(told(facts[1], facts[1], facts[0])) == (
        "the ranks are not started alike: the device is CUDA on ranks 0, 1 and the CPU on rank 2; "
        "CUDA_DEVICE_MAX_CONNECTIONS is not 1 on ranks 0, 1 and 1 on rank 2: give all ranks the same"
    )


def test_the_others_are_told_of_a_missing_extension(monkeypatch):
    def start() -> None:
        raise ExtensionError("The extension is missing: build it.")

    compared = []
    monkeypatch.setattr(same_start, "check_alike", lambda *told: compared.append(told))
    with pytest.raises(ExtensionError):
        start_alike(start, lambda _: {})
    assert compared == [(range(1), {}, "The extension is missing: build it.")]


def test_files_are_compared_by_what_is_in_them(tmp_path: Path):
    flag = "--moe-opt-plan"
    for folder, content in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plan.json").write_text(content)
    a, b, c, d = (facts_of(Options(plan=tmp_path / folder / "plan.json"))[flag] for folder in "abcd")
    assert a == b != c and d is None and facts_of(Options())[flag] == "not given"


def test_the_dispatcher_is_taken_from_the_scripts_arguments():
    flag = "--moe-token-dispatcher-type"
    for arguments in (["--lr", "1", flag, "monta", "--x"], [f"{flag}=monta"]):
        assert facts_of(Options(), arguments)[flag] == "monta"
    assert flag not in facts_of(Options(), ["--lr", "1"])


def test_all_options_are_compared():
    facts = facts_of(Options(chunks=3, partitions=4, memory_reuse="S3", telemetry=True))
    assert facts["--moe-opt-partitions"] == "4" and facts["--moe-opt-telemetry"] == "True"
    assert {name for name in facts if name.startswith("--moe-opt-")} == {
        one.metadata["flag"] for one in Options.__dataclass_fields__.values()
    }
