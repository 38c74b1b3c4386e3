"""The options of `mpmoe`."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from megatron_moe_opt.dispatchers.partitioning import Partitions, partitioning_of
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import Options, split_options
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.variants import kind_of, split_variant

GROUPS = SimpleNamespace(joint_size=1)


def test_reads_them():
    arguments = "--moe-opt-partitions 6 --moe-opt-memory-reuse S2 --lr 1"
    options, rest = split_options(arguments.split())
    assert (options.partitions, options.memory_reuse, rest) == (6, "S2", ["--lr", "1"])
    arguments = "--moe-opt-partitions auto --moe-opt-activation-budget 1.5GiB --moe-opt-profile f"
    options, _ = split_options(arguments.split())
    assert (options.partitions, options.activation_budget) == ("auto", 3 * 2**29)


def test_fixed_ones_are_the_same_for_every_pass():
    def not_asked():
        raise AssertionError("waited for the routing without need")

    fixed = partitioning_of(Options(), GROUPS, None)
    assert fixed.choose(not_asked) == Partitions(4, "none")
    assert fixed.describe() == "4 partitions, memory reuse none"
    assert partitioning_of(Options(partitions=1, memory_reuse="S4"), GROUPS, None).choose(not_asked) == Partitions(
        1, "S4"
    )


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("mpmoe:4", "mpmoe"),
        ("mpmoe:4:S1", "mpmoe"),
        ("mpmoe:4:hops", "mpmoe:hops"),
        ("mpmoe:4:S1:hops", "mpmoe:hops"),
        ("mpmoe:4:joint", "mpmoe:joint"),
        ("mpmoe:4:S2:joint", "mpmoe:joint"),
        ("mpmoe:4:c2", "mpmoe"),
        ("mpmoe:4:shared-rows", "mpmoe:shared-rows"),
        ("mpmoe:4:S2:shared-rows", "mpmoe:shared-rows"),
        ("mpmoe:4:hops:2x1", "mpmoe:hops:Sx1"),
        ("mpmoe:4:S3:hops:2", "mpmoe:hops:S"),
    ],
)
def test_variants_are_read_as_they_are_written(variant, kind):
    name, options = split_variant(variant, None)
    assert system_of(name).variant(options) == variant
    assert kind_of(variant) == kind
    assert ("once over every link" in str(Partitions.of(options))) == ("hops" in variant)
    assert ("in one all-to-all" in str(Partitions.of(options))) == ("joint" in variant)
    assert ("in 2 chunks each" in str(Partitions.of(options))) == ("c2" in variant)
    assert ("shared out over TP" in str(Partitions.of(options))) == ("shared-rows" in variant)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--moe-opt-partitions 0",
            "'0' is neither a number of partitions from 1 on, nor several such as 2,4,8",
        ),
        ("--moe-opt-activation-budget 3GB", "'3GB' is not a number of bytes above 0, such as 512MiB or 1.5GiB"),
        ("--moe-opt-way auto", "--moe-opt-way auto chooses from measurements: run `moe-opt profile`"),
        ("--moe-opt-partitions auto", "--moe-opt-partitions auto chooses from measurements: run `moe-opt profile`"),
    ],
)
def test_refusals(arguments, sentence):
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        split_options(arguments.split())
