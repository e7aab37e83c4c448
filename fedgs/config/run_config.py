"""The configuration of a run: `Settings` that are validated, read and written.

This module imports no tensor library.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedgs.config.checks import CHECKS
from fedgs.config.fields import Scalar
from fedgs.config.settings import Settings
from fedgs.errors import UserError


@dataclass(frozen=True)
class RunConfig(Settings):
    """All settings of one training run; see each field's help text.

    Nothing here may be computed from private data.
    """

    def validate(self) -> "RunConfig":
        """Checks the combinations of settings and returns the same configuration.

        Raises:
            UserError: two settings contradict each other.
        """
        for check in CHECKS:
            check(self)
        return self

    def to_flat(self) -> dict[str, Scalar]:
        """Returns the settings as flat scalars, unset ones as the empty string."""
        return {
            name: "" if value is None else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_flat(
        cls, values: Mapping[str, Any], base: "RunConfig | None" = None
    ) -> "RunConfig":
        """Builds a configuration from flat scalars, on top of `base`.

        Args:
            values: setting name to value; the empty string means unset.
            base: the configuration that `values` override; defaults when None.

        Raises:
            UserError: an unknown name, or a value outside its range.
        """
        known = {spec.name for spec in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise UserError(
                    f"{name}: unknown setting; `fedgs train --help` lists them all"
                )
        return dataclasses.replace(base or cls(), **values)
