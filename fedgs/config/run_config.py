"""The configuration of a run, as it is given and as it is resolved.

This module imports no tensor library.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedgs.config.checks import CHECKS
from fedgs.config.fields import Scalar, again, entry, refuse, shortened
from fedgs.config.settings import Settings, settings_of
from fedgs.errors import UserError


@dataclass(frozen=True)
class RunConfig(Settings):
    """All settings of one training run; see each field's help text.

    Nothing here may be computed from private data.
    """

    def validate(self) -> Self:
        """Checks the combinations of settings and returns the same configuration.

        Raises:
            UserError: two settings contradict each other.
        """
        for problems in CHECKS:
            refuse(self, problems(self))
        return self

    def to_flat(self) -> dict[str, Scalar]:
        """Returns the settings as flat scalars, unset ones as the empty string."""
        names = [spec.name for spec in dataclasses.fields(RunConfig)]
        values = {name: getattr(self, name) for name in names}
        return {n: "" if value is None else value for n, value in values.items()}

    @property
    def public_conditions(self) -> tuple[str, ...]:
        """What every epsilon of such a run supposes to be public, in words."""
        names = {"fonts"} if self.knows_fonts else set[str]()
        if self.public_data is not None:
            names.add(Path(self.public_data).name)
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

        Args:
            values: setting name to value; the empty string means unset.
            base: the configuration that `values` override; defaults when None.

        Raises:
            UserError: an unknown name, or a value outside its range.
        """
        known = {spec.name for spec in dataclasses.fields(cls)}
        check_names(values, known)
        inherited: dict[str, Any] = {} if base is None else base.to_flat()
        # A base may be of a class with more settings.
        inherited = {name: inherited[name] for name in inherited if name in known}
        return cls(**inherited | dict(values))


def check_names(names: Iterable[str], known: Collection[str] = ()) -> None:
    """Refuses names that are none of a setting.

    Args:
        names: to check.
        known: all settings that people set when empty.

    Raises:
        UserError: the first unknown one, and what is nearest.
    """
    known = known or [spec.name for spec in settings_of()]
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(shortened(name), known, 1, 0.0)
            raise UserError(
                f"{name}: unknown setting; the nearest is {nearest[0]}, and `fedgs "
                "train --help-all` lists them all"
            )


@dataclass(frozen=True)
class ResolvedConfig(RunConfig):
    """What a run uses: the settings that `RunConfig` may leave open are set.

    `fedgs.round.preparation.resolve` fixes them; a run folder holds no other. What
    stays optional here is switched off while it is unset, such as `target_epsilon`.

    Raises:
        UserError: a setting is unset.
    """

    num_classes: int = again(RunConfig, "num_classes")
    num_clients: int = again(RunConfig, "num_clients")
    clients_per_round: int = again(RunConfig, "clients_per_round")
    noise_multiplier: float = again(RunConfig, "noise_multiplier")
    seed: int = again(RunConfig, "seed")
    # No setting, so not in `to_flat`: config.json has it beside them.
    counted: str = entry("")  # settings that private data decided

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
    def schedule_seed(self) -> int:
        """Seed that decides who participates: the selection's own, or the run's."""
        return self.seed if self.selection_seed is None else self.selection_seed
