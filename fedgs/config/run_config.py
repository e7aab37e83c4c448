"""The configuration of a run, as it is given and as it is resolved.

This module imports no tensor library.
"""

import dataclasses
import difflib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from fedgs.config.checks import CHECKS
from fedgs.config.feature_settings import (
    FeatureSettings,
    GroupMeansSettings,
    LowFrequencySettings,
    MomentSettings,
    PretrainedSettings,
)
from fedgs.config.fields import Scalar, again, entry, refuse, shortened
from fedgs.config.method_settings import GsWganSettings, NetworkSettings, settings_of
from fedgs.config.phases import Phase, read_phases, written
from fedgs.config.plugins import GROUP_MEANS, GS_WGAN, settings_of_method
from fedgs.config.rounds import check_rounds, with_open_settings
from fedgs.config.settings import (
    REFERENCE_NUM_ROUNDS,
    WITH_ROUNDS,
    Settings,
    num_rounds_of,
)
from fedgs.errors import UserError

BESIDE = ("counted", "selection_key", "phase_index")  # fields that are no settings
ConfigT = TypeVar("ConfigT", bound="RunConfig")
# Sources whose names are public, and what an owner is in those that have owners.
BUILT_IN = (
    *("digits", "fonts", "mnist", "fashion-mnist", "mnist-by-writer", "femnist"),
    "chest-xray",
)
OWNERS = {
    "mnist-by-writer": "a writer",
    "femnist": "a writer",
    "fonts": "a pseudo-writer",
    "chest-xray": "a patient",
}


@dataclass(frozen=True)
class RunConfig(Settings):
    """The settings of a training run that all methods share; see each field's help.

    `from_flat` adds those of its phases' methods. Nothing may be computed from private
    data.
    """

    def validate(self) -> Self:
        """Checks the combinations of settings and returns the same configuration.

        Raises:
            UserError: two settings contradict each other.
        """
        # Before the checks, some of which ask for the terms of all rounds.
        for index in range(len(self.phases)):
            own = self.at_phase(index)
            refuse(own, own.problems())
        for problems in CHECKS:
            refuse(self, problems(self))
        return self

    def at_phase(self, index: int) -> Self:
        """Returns the configuration of one phase, as its method sees it.

        It has the settings of all runs and the method's own, those of the phase's
        table over them. Its noise follows from the phase's share.

        Args:
            index: the phase's place in the run, from 0.

        Raises:
            UserError: a setting that the method does not have, or outside its range.
        """
        return _at_phase(self, index)

    def to_flat(self) -> dict[str, Scalar]:
        """Returns the settings as flat scalars, unset ones as the empty string."""
        values: dict[str, Scalar] = {}
        for spec in dataclasses.fields(self):
            if spec.name in BESIDE:
                continue
            value = getattr(self, spec.name)
            if value is None:
                value = ""  # a message of Flower has no other word for it
            values[spec.name] = value
        values["phases"] = written(self.phases)
        return values

    @property
    def compares_groups(self) -> bool:
        """Whether averages of groups are compared, as `fedgs debug` does it."""
        return isinstance(self, GroupMeansSettings)

    @property
    def unit_condition(self) -> str:
        """What one unit of privacy is: its name, a few words, and after ";" the rest.

        Privacy: public. The settings tell it, so no number of the data is in it.
        """
        if self.privacy_unit == "record":
            return "record: one record (an image with its label)"
        if self.partition in ("iid", "dirichlet") or self.is_dealt:
            return (
                "client: one shard of the data, not a person; images of one owner may "
                "lie in several shards, and k of them cost k times mu"
            )
        if self.partition == "by-client":
            owner = OWNERS.get(self.data.partition(":")[0], "an owner")
            return f"client: one client ({owner} with all images)"
        # `partition = auto`: only the data tell which of both it is, and a node's data
        # only the node.
        if self.nodes:
            whose = "a node's"
        else:
            whose = "the"
        return (
            "client: one client (an owner with all images, or a shard, which is no "
            f"person, if {whose} data name no owners or are cut)"
        )

    @property
    def public_conditions(self) -> tuple[str, ...]:
        """What every epsilon of such a run supposes to be public, in words."""
        names = set[str]()
        for phase in self.phases:
            names.update(settings_of_method(phase.method).public_images)
        if isinstance(self, PretrainedSettings) and self.features is not None:
            names.discard("ImageNet")  # whose network the chosen one replaces
            names.add(f"{self.features}'s training")
        if self.public_data is not None:
            # A file's name may tell of its owner, and this is published.
            if self.public_data in BUILT_IN:
                names.add(self.public_data)
            else:
                names.add("a file of the run's owner")
        conditions = [
            f"public data: the images of {name} belong to nobody who is protected, and "
            "were not chosen by a look at the private ones"
            for name in sorted(names)
        ]
        if self.cohort_value is not None:
            conditions.append(
                f"public: how many clients with cohort_value = {self.cohort_value} "
                "every node has, so this is about data sets that agree in that"
            )
        if isinstance(self, GroupMeansSettings) and self.compares_nodes:
            conditions.append(
                "public: each node's own release, for nodes are compared, so that "
                "whoever sees what is published sees it under one node's noise"
            )
        return tuple(conditions)

    @classmethod
    def from_flat(
        cls,
        values: Mapping[str, Any],
        base: "RunConfig | None" = None,
    ) -> Self:
        """Builds a configuration from flat scalars, on top of `base`.

        Its class is `class_of` the settings of the methods that their phases name.

        Args:
            values: setting name to value; the empty string means unset.
            base: the configuration that `values` override; defaults when None.

        Raises:
            UserError: an unknown name, or a value outside its range.
        """
        inherited: dict[str, Any] = {}
        if base is not None:
            inherited = base.to_flat()
        # Phases first: they decide which settings there are.
        phases = read_phases(values.get("phases", inherited.get("phases", GS_WGAN)))
        phases, own = _without_tables(phases)
        values = {**values, **own, "phases": phases}
        # Other phases may have another number of rounds than the base's, so it follows
        # from them where nobody gave it.
        if "num_rounds" not in values:
            before = int(inherited.get("num_rounds", REFERENCE_NUM_ROUNDS))
            values["num_rounds"] = num_rounds_of(phases, before)
        made = class_of(cls, methods_of(phases))
        known = {spec.name for spec in dataclasses.fields(made)}
        known.discard("phase_index")  # nobody sets it
        check_names(values, known, phases)
        # A base may be of a class with more settings.
        inherited = {name: inherited[name] for name in inherited if name in known}
        return made(**inherited | dict(values))


def _without_tables(
    phases: tuple[Phase, ...],
) -> tuple[tuple[Phase, ...], dict[str, Scalar]]:
    """Takes settings out of phases' tables that only one phase of the run has.

    They are the run's then, and a flag can change them. In a table stays what another
    phase has too, and what is refused later.
    """
    shared = {spec.name for spec in dataclasses.fields(RunConfig)}
    names: list[set[str]] = []  # of the settings of each phase's method
    for phase in phases:
        specs = dataclasses.fields(settings_of_method(phase.method))
        names.append({spec.name for spec in specs})
    found: dict[str, Scalar] = {}
    kept: list[Phase] = []
    for index, phase in enumerate(phases):
        others = [*names[:index], *names[index + 1 :]]
        elsewhere = shared.union(*others)
        of_this_phase = names[index] - elsewhere
        left: list[tuple[str, Scalar]] = []
        for name, value in phase.settings:
            if name in of_this_phase:
                found[name] = value
            else:
                left.append((name, value))
        kept.append(dataclasses.replace(phase, settings=tuple(left)))
    return tuple(kept), found


def methods_of(phases: Iterable[Phase]) -> tuple[str, ...]:
    """Returns the methods of phases, each once."""
    return tuple(dict.fromkeys(phase.method for phase in phases))


def class_of(kind: type[ConfigT], methods: Iterable[str]) -> type[ConfigT]:
    """Returns a class of configurations with methods' settings beside the shared.

    Args:
        kind: `RunConfig`, `ResolvedConfig` or what this has returned.
        methods: the methods of the phases.

    Raises:
        UserError: there is no such method, or its place is not trusted.
    """
    # Not cached by names: a method of others may be loaded again with other settings.
    return _class_with(kind, frozenset(map(settings_of_method, methods)))


@functools.cache
def _class_with(
    kind: type[ConfigT],
    all_own: frozenset[type[Settings]],
) -> type[ConfigT]:
    # A class that another one derives from comes with it. Sorted, because a frozenset
    # has no order, and the order of the bases is that of the fields.
    owns = [
        own
        for own in sorted(all_own, key=lambda own: own.__name__)
        if not any(issubclass(other, own) for other in all_own - {own})
    ]
    root: type[RunConfig] = RunConfig
    if issubclass(kind, ResolvedConfig):
        # What a method of fedgs is typed to get. `_TYPED` lists derived classes first,
        # so the first that fits is the closest one.
        root = next(
            found
            for found, declared in _TYPED.items()
            if any(issubclass(own, declared) for own in owns)
        )
        if owns == [_TYPED[root]]:
            return cast(type[ConfigT], root)
    name = "".join(own.__name__ for own in owns)
    made = type(f"{name}{root.__name__}", (root, *owns), {})
    return cast(type[ConfigT], dataclass(frozen=True)(made))


@functools.lru_cache(maxsize=256)
def _at_phase(config: ConfigT, index: int) -> ConfigT:
    phase = config.phases[index]
    # The class of the phase's method alone: it must not see settings of other methods.
    made = class_of(type(config), (phase.method,))
    names = {spec.name for spec in dataclasses.fields(made)}
    shared = {spec.name for spec in dataclasses.fields(ResolvedConfig)}
    for name, _ in phase.settings:
        if name in shared:
            raise UserError(
                f"{name}: it is in a table of phases, but belongs to all phases; give "
                "it outside of these tables"
            )
    check_names(dict(phase.settings), names - {*BESIDE}, (phase,))
    values: dict[str, Any] = {
        name: getattr(config, name) for name in names if hasattr(config, name)
    }
    values |= dict(phase.settings)
    values["phase_index"] = index
    own = made(**values)
    if phase.share is None or not config.noise_multiplier:
        return own
    # A release with r times the noise costs 1 / r^2 of its mu^2.
    weight = phase.share / _cost_at_run_noise(own)
    noise_multiplier = config.noise_multiplier / weight**0.5
    return dataclasses.replace(own, noise_multiplier=noise_multiplier)


def _cost_at_run_noise(config: RunConfig) -> float:
    """Returns what a phase's releases cost, in units of one sample's at noise 1."""
    index = config.phase_index or 0
    first, after = config.first_rounds[index : index + 2]
    # A share may be asked for before the data have told shapes and classes, which
    # change no cost.
    known = with_open_settings(config)
    plain = dataclasses.replace(known, noise_multiplier=1.0)
    check_rounds(plain)
    total = 0.0
    for round in range(1, after - first + 1):
        terms = plain.phase_terms(round)
        if not terms.noise_multiplier:
            raise UserError(
                f"phases: {config.method} adds no noise in its round {round}, so it "
                "spends no share of the privacy; leave its share out"
            )
        total += terms.batch_size / terms.noise_multiplier**2
    return total


def of_gs_wgan(config: RunConfig) -> "GsWganConfig":
    """Returns the same configuration, of GS-WGAN alone.

    Raises:
        UserError: it is of another method.
    """
    if not isinstance(config, GsWganConfig):
        raise UserError(
            f"phases = {config.methods}: this needs the one phase {GS_WGAN}; give "
            f"--phases {GS_WGAN}"
        )
    return config


def check_names(
    names: Iterable[str],
    known: Collection[str] = (),
    phases: Sequence[Phase] = (),
) -> None:
    """Refuses names that are none of a run's settings.

    Args:
        names: the names to check.
        known: the run's settings; those that people set when empty.
        phases: the run's phases.

    Raises:
        UserError: the first unknown one, and what is nearest.
    """
    if not known:
        # Fields without a group are the code's own: nobody may set them from outside.
        made = class_of(RunConfig, methods_of(phases))
        specs = dataclasses.fields(made)
        known = [spec.name for spec in specs if "group" in spec.metadata]
    groups = {spec.name: spec.metadata["group"] for spec in settings_of()}
    for name in names:
        if name in known:
            continue
        # A setting of another method is no mistake of a key, so it gets another remedy.
        if name in groups:
            methods = ", ".join(methods_of(phases))
            having = WITH_ROUNDS
            if groups[name] == "Debugging":
                having = GROUP_MEANS
            raise UserError(
                f"{name}: no phase of the run ({methods}) has this setting; leave it "
                f"out, or give a recipe whose phases have it, such as {having}"
            )
        nearest = difflib.get_close_matches(shortened(name), known, 1, 0.0)
        raise UserError(
            f"{name}: unknown setting; the nearest is {nearest[0]}, and `fedgs "
            "settings` lists them all"
        )


@dataclass(frozen=True)
class ResolvedConfig(RunConfig):
    """What a run uses: the settings that `RunConfig` may leave open are set.

    `fedgs.round.preparation.resolve` fixes them; a run folder holds no other. What
    stays optional here is switched off while it is unset, such as `target_epsilon`.

    Raises:
        UserError: a setting is unset.
    """

    image_size: int = again(RunConfig, "image_size")
    image_channels: int = again(RunConfig, "image_channels")
    num_classes: int = again(RunConfig, "num_classes")
    num_clients: int = again(RunConfig, "num_clients")
    clients_per_round: int = again(RunConfig, "clients_per_round")
    noise_multiplier: float = again(RunConfig, "noise_multiplier")
    test_owners: float = again(RunConfig, "test_owners")
    seed: int = again(RunConfig, "seed")
    # No setting, so not in `to_flat`: config.json has it beside them.
    counted: str = entry("")  # settings that private data decided
    # Nor is this: a run folder has it in private/ alone, and no text of a run shows it.
    selection_key: str = field(default="", repr=False)  # who is drawn follows from it

    @property
    def public_conditions(self) -> tuple[str, ...]:
        """What every epsilon of the run supposes to be public, in words."""
        if not self.counted:
            return super().public_conditions
        names = self.counted.split(",")
        values = ", ".join(f"{name} = {getattr(self, name)}" for name in names)
        return (
            *super().public_conditions,
            f"public: {values}, taken from the private data and not given, "
            "so this is about data sets that agree in this",
        )

    @property
    def schedule_seed(self) -> int | str:
        """What decides who participates: a secret of the run, or `seed`.

        Privacy: private.

        Raises:
            UserError: the secret is unset.
        """
        if not self.is_drawn_in_secret:
            return self.seed
        if not self.selection_key:
            raise UserError(
                "selection_key is unset: who takes part in a round follows from it; "
                "`RunFolder.create` draws it, and a run folder keeps it in private/"
            )
        return self.selection_key


@dataclass(frozen=True)
class NetworkConfig(ResolvedConfig, NetworkSettings):
    """What a phase with discriminators uses."""


@dataclass(frozen=True)
class GsWganConfig(NetworkConfig, GsWganSettings):
    """What a phase of GS-WGAN uses."""


@dataclass(frozen=True)
class FeatureConfig(ResolvedConfig, FeatureSettings):
    """What a phase that releases mean features uses."""


@dataclass(frozen=True)
class LowFrequencyConfig(FeatureConfig, LowFrequencySettings):
    """What a phase that releases low frequencies uses."""


@dataclass(frozen=True)
class MomentConfig(LowFrequencyConfig, MomentSettings):
    """What a phase of moments uses."""


@dataclass(frozen=True)
class GroupMeansConfig(LowFrequencyConfig, GroupMeansSettings):
    """What a phase of group means uses."""


_TYPED: dict[type[ResolvedConfig], type[Settings]] = {
    GsWganConfig: GsWganSettings,
    NetworkConfig: NetworkSettings,
    MomentConfig: MomentSettings,
    GroupMeansConfig: GroupMeansSettings,
    LowFrequencyConfig: LowFrequencySettings,
    FeatureConfig: FeatureSettings,
    ResolvedConfig: Settings,
}
