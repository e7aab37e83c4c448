"""The configuration of a run, as it is given and as it is resolved.

This module imports no tensor library.
"""

import dataclasses
import difflib
import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from fedgs.config.checks import CHECKS
from fedgs.config.fields import Scalar, again, entry, refuse, shortened
from fedgs.config.method_settings import GsWganSettings, NetworkSettings, settings_of
from fedgs.config.plugins import CENTRAL, GS_WGAN, load
from fedgs.config.settings import Settings
from fedgs.config.stages import PRETRAINED
from fedgs.errors import UserError

BESIDE = ("counted", "selection_key")  # fields that are no settings
ConfigT = TypeVar("ConfigT", bound="RunConfig")
# Sources whose names are public, and what an owner is in those that have owners.
BUILT_IN = ("digits", "fonts", "mnist", "fashion-mnist", "mnist-by-writer", "femnist")
OWNERS = {"mnist-by-writer": "a writer", "femnist": "a writer", "fonts": "a font"}


@dataclass(frozen=True)
class RunConfig(Settings):
    """The settings of a training run that all methods share; see each field's help.

    `from_flat` adds those of its method. Nothing may be computed from private data.
    """

    def validate(self) -> Self:
        """Checks the combinations of settings and returns the same configuration.

        Raises:
            UserError: two settings contradict each other.
        """
        for problems in CHECKS:
            refuse(self, problems(self))
        refuse(self, self.problems())
        return self

    def to_flat(self) -> dict[str, Scalar]:
        """Returns the settings as flat scalars, unset ones as the empty string."""
        names = [spec.name for spec in dataclasses.fields(self)]
        values = {name: getattr(self, name) for name in names if name not in BESIDE}
        return {n: "" if value is None else value for n, value in values.items()}

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
        whose = "a node's" if self.nodes else "the"
        return (
            "client: one client (an owner with all images, or a shard, no person, "
            f"where {whose} data name no owners or are cut)"
        )

    @property
    def public_conditions(self) -> tuple[str, ...]:
        """What every epsilon of such a run supposes to be public, in words."""
        kinds = {stage.kind for stage in self.stage_list}
        names = {"fonts", "ImageNet"} if PRETRAINED in kinds else set[str]()
        if self.public_data is not None:
            # A file's name may tell of its owner, and this is published.
            is_named = self.public_data in BUILT_IN
            names.add(self.public_data if is_named else "a file of the run's owner")
        return tuple(
            f"public data: the images of {name} belong to nobody who is protected, and "
            "were not chosen by a look at the private ones"
            for name in sorted(names)
        )

    @classmethod
    def from_flat(
        cls, values: Mapping[str, Any], base: "RunConfig | None" = None
    ) -> Self:
        """Builds a configuration from flat scalars, on top of `base`.

        Its class is `class_of` the settings of the method that they name.

        Args:
            values: setting name to value; the empty string means unset.
            base: the configuration that `values` override; defaults when None.

        Raises:
            UserError: an unknown name, or a value outside its range.
        """
        inherited: dict[str, Any] = {} if base is None else base.to_flat()
        method = str(values.get("method", inherited.get("method", GS_WGAN)))
        made = class_of(cls, own_settings(method))
        known = {spec.name for spec in dataclasses.fields(made)}
        check_names(values, known, method)
        # A base may be of a class with more settings.
        inherited = {name: inherited[name] for name in inherited if name in known}
        return made(**inherited | dict(values))


def own_settings(method: str) -> type[Settings]:
    """Returns the class that declares a method's settings; torch may be loaded.

    Raises:
        UserError: there is no such method, or its place is not trusted.
    """
    known = {GS_WGAN: GsWganSettings, CENTRAL: NetworkSettings}
    return known.get(method) or load("method", method).Settings


@functools.cache
def class_of(kind: type[ConfigT], own: type[Settings]) -> type[ConfigT]:
    """Returns a class of configurations with a method's settings beside the shared.

    Args:
        kind: `RunConfig`, `ResolvedConfig` or what this has returned.
        own: declares the settings; a `NetworkSettings`.
    """
    root = ResolvedConfig if issubclass(kind, ResolvedConfig) else RunConfig
    if (root, own) == (ResolvedConfig, GsWganSettings):
        return cast(type[ConfigT], GsWganConfig)
    made = type(f"{own.__name__}{root.__name__}", (root, own), {})
    return cast(type[ConfigT], dataclass(frozen=True)(made))


def of_gs_wgan(config: RunConfig) -> "GsWganConfig":
    """Returns the same configuration, of a run of GS-WGAN.

    Raises:
        UserError: it is of another method.
    """
    if not isinstance(config, GsWganConfig):
        raise UserError(f"method = {config.method}: is not {GS_WGAN}")
    return config


def check_names(
    names: Iterable[str], known: Collection[str] = (), method: str = GS_WGAN
) -> None:
    """Refuses names that are none of a run's settings.

    Args:
        names: to check.
        known: the run's settings; those that people set when empty.
        method: of the run.

    Raises:
        UserError: the first unknown one, and what is nearest.
    """
    if not known:
        made = class_of(RunConfig, own_settings(method))
        specs = dataclasses.fields(made)
        known = [spec.name for spec in specs if "group" in spec.metadata]
    flags = [spec.name for spec in settings_of()]
    for name in names:
        if name in known:
            continue
        if name in flags:
            raise UserError(f"{name}: method = {method} has no such setting")
        nearest = difflib.get_close_matches(shortened(name), known, 1, 0.0)
        raise UserError(
            f"{name}: unknown setting; the nearest is {nearest[0]}, and `fedgs "
            "train --help-all` lists them all"
        )


@dataclass(frozen=True)
class ResolvedConfig(RunConfig, NetworkSettings):
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
    seed: int = again(RunConfig, "seed")
    # No setting, so not in `to_flat`: config.json has it beside them.
    counted: str = entry("")  # settings that private data decided
    # Nor is this: a run folder has it in private/ alone, and no text of a run shows it.
    selection_key: str = field(default="", repr=False)  # who is drawn follows from it

    @property
    def public_conditions(self) -> tuple[str, ...]:
        """What every epsilon of the run supposes to be public, in words."""
        names = self.counted.split(",") if self.counted else ()
        if not names:
            return super().public_conditions
        values = ", ".join(f"{name} = {getattr(self, name)}" for name in names)
        return (
            *super().public_conditions,
            f"public: {values}, counted in the private data and not given, so this is "
            "about data sets that agree in that",
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
class GsWganConfig(ResolvedConfig, GsWganSettings):
    """What a run of GS-WGAN uses."""
