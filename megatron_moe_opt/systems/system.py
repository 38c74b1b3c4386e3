"""The record of a system: all that the rest of the package has to know of it.

Options, refusals, the words of variants, the planner's candidates, the registry in Megatron and the benchmarks are
loops over these records. A further system is one record, its dispatcher and its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO, FILE, SECONDS, SWITCH, WIRE, Values
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.systems.megatron_config import given_flag

if TYPE_CHECKING:
    from megatron_moe_opt.options import Options
    from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
    from megatron_moe_opt.planning.predicting.prediction import Prediction, Refusal
    from megatron_moe_opt.topology.domains import ExpertDomains
    from megatron_moe_opt.topology.expert_groups import ExpertGroups

PREFIX = "--moe-opt-"
FLAG = "--moe-token-dispatcher-type"
READS, CHOOSES = "reads", "chooses"
PROFILE_SECONDS = 60


def option(
    flag: str, values: Values, help: str, default: Any = None, metavar: str | None = None, auto: str | None = None
) -> Any:
    """Returns a field of options that is also an option on the command line. None is a value where it is the default.

    Args:
        flag: of the command line, without PREFIX.
        values: that the option takes.
        help: what it does, as --help and docs/reference.md say it.
        auto: whether `auto` READS it, or CHOOSES its value itself; None: it does neither.
    """
    about = {"flag": PREFIX + flag, "values": values, "help": help, "metavar": metavar, "auto": auto}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class SharedOptions:
    """The options that are no single system's. A system's own are a subclass, of which Options is made."""

    profile: Path | None = option("profile", FILE, "cluster.json written by `moe-opt profile`", auto=READS)
    profile_seconds: int | None = option(
        "profile-seconds",
        SECONDS,
        f"how long auto measures the cluster, where it is given neither profile nor plan (default: {PROFILE_SECONDS})",
        auto=READS,
    )
    plan: Path | None = option("plan", FILE, "plan.json written by `moe-opt plan`, for auto", auto=READS)
    expert_order: Path | None = option(
        "expert-order",
        FILE,
        "which rank holds which experts, written by `moe-opt trace place` (default: stock's order)",
    )
    wire: Wire = option(
        "wire",
        WIRE,
        "format of rows between ranks: same; bf16; fp8 (e4m3, a float32 scale for 128 elements) or mxfp8 (e4m3, an "
        "e8m0 scale for 32), which mean tokens in 8 bits to the experts and sums back in bf16, forward and backward; "
        "or by direction, such as dispatch=fp8,combine=same; all but same are lossy (default: %(default)s)",
        SAME,
    )
    allow_lossy: bool = option(
        "allow-lossy",
        SWITCH,
        f"auto may choose formats of rows on the wire that are lossy, see {PREFIX}wire",
        False,
        auto=READS,
    )
    telemetry: bool = option(
        "telemetry",
        SWITCH,
        "report times, bytes and load balance of every MoE layer, under any dispatcher, at the logging interval: in "
        "the log, to TensorBoard and to W&B",
        False,
    )

    def check(self) -> None:
        """Refuses options of one system that contradict each other or the shared ones. Raises ConfigurationError."""

    def is_given(self, name: str) -> bool:
        """Whether an option, by the name of its field, has another value than its default."""
        return getattr(self, name) != self.__dataclass_fields__[name].default

    def as_given(self, name: str) -> str:
        """Returns an option, by the name of its field, with its value, as on a command line."""
        return f"{flag_of(type(self), name)} {shown(getattr(self, name))}"

    def auto_needs_profile(self, *names: str) -> None:
        """Refuses options, by the names of their fields, that are to be chosen where nothing was measured."""
        for name in names:
            if getattr(self, name) == AUTO:
                self.needs_profile(name)

    def needs_profile(self, name: str) -> None:
        """Refuses an option, by the name of its field, that leaves a choice where nothing was measured."""
        if self.profile is None:
            raise ConfigurationError(
                f"{self.as_given(name)} chooses from measurements: run `moe-opt profile` and give its file with "
                f"{PREFIX}profile; {FLAG} {AUTO}, with that file, also tries what it chooses"
            )


def flag_of(options: type[SharedOptions], name: str) -> str:
    """Returns the option on the command line that a field of options is."""
    return options.__dataclass_fields__[name].metadata["flag"]


def shown(value: Any) -> str:
    """Returns the value of an option as a command line gives it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class RunTraits:
    """What a run is like, as far as it decides which systems its layers may change to between optimizer steps."""

    workers: frozenset[tuple[int, ...]]
    """The workers of each network level of the run's expert-parallel groups."""
    routes_together: bool
    """Whether the rows of a token depend on the other tokens that its router sees, which drops or balances them."""
    samples_may_move: bool
    """Whether samples, which all are at home, may begin to move, and end to."""
    outside: tuple[int, ...] | None = None
    """The shape of something trained that takes part in experts and is none of their parameters; None: nothing does."""
    experts_draw: bool = False
    """Whether experts draw random numbers."""
    some_frozen: bool = False
    """Whether the experts of some layer are frozen on some of the ranks that share them, and not on others."""
    dtypes: tuple[str, ...] = ()
    """The dtypes of the parameters of some layer's experts, where these are several."""
    called_by: str | None = None
    """The method of a layer's own class that calls its experts; None: Megatron's does."""
    stays_behind: str | None = None
    """What the experts of some layer have that does not travel with their parameters; None: nothing."""
    routed_by: str | None = None
    """What others have put in the place of some layer's router, or of a part of it; None: all is Megatron's."""

    @property
    def no_hops(self) -> str | None:
        """Returns why no token hops; None: tokens may."""
        if self.routed_by is None:
            return None
        return f"a token that hops takes top-k experts along, and {self.routed_by}, not Megatron's, may give it more"


@dataclass(frozen=True)
class Grammar:
    """How a system's settings are written in one word, behind its name and a colon, as in `monta:O2x8`."""

    parse: Callable[[str, str, Path | None], Mapping[str, Any]]
    """Reads (variant, setting, profile) to fields of Options. Raises ConfigurationError, which says how to write it."""
    write: Callable[[Any, int], str]
    """Writes (options, number of network levels) as a setting, with defaults filled in; empty where there is none."""
    kind: Callable[[str], str] = lambda setting: ""
    """Returns what travels under a setting. Variants of a kind differ in how they cut the same traffic."""
    numbered: Callable[[str], str] = lambda setting: setting
    """Returns a setting with the numbers that it leaves out where they are 1."""


@dataclass(frozen=True)
class System:
    """One of our dispatcher types. What it needs of PyTorch and Megatron is imported when it is called."""

    name: str
    """The name that --moe-token-dispatcher-type takes."""
    build: Callable[[ExpertGroups, Any, Any], Any]
    """Returns a layer's dispatcher, given (groups, options, TransformerConfig). A collective call over the groups."""
    attach: Callable[[Any, Any], None] | None = None
    """Does to a MoELayer that has its dispatcher, given (MoELayer, options), what more of it is the system's own."""
    options: type[SharedOptions] = SharedOptions
    """The class of its options."""
    reads: tuple[str, ...] = ()
    """The names of the options that it reads, besides its own and those that every dispatcher does."""
    unread_profile: Callable[[Any], str | None] = lambda options: None
    """Returns what would have it read a profile, where with these options it does not."""
    check: Callable[[Any, Any, Any], None] = lambda config, options, arguments: None
    """Refuses (TransformerConfig, options, Megatron-LM's arguments or None) that it cannot run under."""
    copies_flag: Callable[[Any], str | None] = lambda options: None
    """The flags by which its dispatcher itself takes tokens that all ranks of a TP group hold; None: it does not."""
    grammar: Grammar | None = None
    """How its settings are read and written in the name of a variant; None: it has none."""
    candidates: Callable[[LayerOnCluster, Any], Iterator[Prediction | Refusal]] | None = None
    """Yields what it would take for a layer, for each of its variants that the options leave to choose from: a
    variant's only prediction. None: it is for comparison, and never planned.
    """
    domains: Callable[[Any, tuple[int, ...]], ExpertDomains | None] = lambda options, workers: None
    """Returns the domains that it makes process groups for, given (options, workers of each network level), or None."""
    why_fixed: Callable[[Any, RunTraits], str | None] = lambda options, run: None
    """Why layers cannot change to it, or from it, between optimizer steps; None: they can."""
    calls_experts: bool = False
    """Whether it calls a layer's experts in its own order, with weights of its own choice."""
    is_pipeline_of_experts: bool = False
    """Whether it has no dispatch and combine without experts between them."""
    moves_samples: bool = False
    """Whether samples leave their ranks, through all MoE layers of a pipeline stage."""

    @property
    def overlaps_batches(self) -> bool:
        """Whether Megatron can call its dispatch, experts and combine beside those of another micro-batch."""
        return not (self.moves_samples or self.is_pipeline_of_experts)

    @property
    def own_options(self) -> frozenset[str]:
        """Returns the names of the options that are its own, and not shared."""
        shared = SharedOptions.__dataclass_fields__
        return frozenset(name for name in self.options.__dataclass_fields__ if name not in shared)

    @property
    def open_options(self) -> SharedOptions:
        """Returns its options, with all that may be chosen left to be."""
        chosen = [one.name for one in fields(self.options) if one.metadata["auto"] == CHOOSES]
        return self.options(**dict.fromkeys(chosen, AUTO))

    def reads_option(self, name: str) -> bool:
        """Whether an option, by the name of its field, changes anything under this system."""
        return name in self.own_options or name in self.reads

    def variant(self, options: Options, levels: int = 1) -> str:
        """Returns the system with these options in one word, defaults filled in."""
        setting = "" if self.grammar is None else self.grammar.write(options, levels)
        wire = "" if options.wire == SAME else options.wire.word
        return ":".join(part for part in (self.name, setting, wire) if part)


def check_first_pass(arguments: Any, profile: Path | None, way_out: str) -> None:
    """Refuses, with ConfigurationError, a choice by a profile for as many tokens as the first pass has, where that is
    no pass of training.

    Args:
        profile: None: nothing is chosen by one.
        way_out: what to give in the profile's place.
    """
    if profile is not None and given_flag(arguments, "--perform-rl-step") is not None:
        raise ConfigurationError(
            f"{PREFIX}profile {profile} serves a choice for as many tokens as the first pass has, and under "
            f"--perform-rl-step that is of a rollout: drop it, and give {way_out}"
        )


def chosen_by_profile(variant: str, profile: Path | None) -> dict[str, Any]:
    """Returns the options of `NAME:auto`, which chooses by measurements. Raises ConfigurationError without any."""
    if profile is None:
        raise ConfigurationError(f"--dispatchers {variant} chooses by measurements: give --profile")
    return {"profile": profile}
