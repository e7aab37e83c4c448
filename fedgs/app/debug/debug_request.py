"""What `fedgs debug` is asked for: its flags beside the settings of the runs.

Imports no tensor library: the command line reads the flags from here at every start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgs.config.fields import check_ranges, flag
from fedgs.config.settings import CORRUPTIONS
from fedgs.diagnosis.rule import FEWEST_GROUPS, MOST_GROUPS, Rule
from fedgs.errors import UserError, reject

COHORTS = ("healthy", "suspicious")
# What --bug accepts, and the corruption that it plants. Augenstein et al. call the
# inversion of pixels flip; "invert" is left out so that it has one name here. "none"
# stands last in the error that lists them: it is the experiment without a bug.
_OWN_NAMES = [name for name in CORRUPTIONS if name not in ("none", "invert")]
BUGS = {"flip": "invert", **{name: name for name in _OWN_NAMES}, "none": "none"}
_MOST_SAMPLES = 1000  # of a generator: the kernel of 12 groups then takes about 2 GB


@dataclass(frozen=True)
class PlantedBug:
    """The experiment: which clients' images are spoilt on purpose, and how."""

    bug: str | None = flag(
        None, "An experiment: plant flip, rotate, mirror, blur, ... or none."
    )
    fraction: float | None = flag(None, "Of the clients; 0.5 when unset.")


def planted(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `RunConfig` of a planted bug; none without one.

    Args:
        given: the flags of `PlantedBug`, as far as they are given.

    Raises:
        UserError: an unknown bug, or a fraction without one.
    """
    bug = given.get("bug")
    fraction = given.get("fraction")
    if bug is None:
        # A fraction alone would plant nothing, and the verdict would look like a test.
        reject({"fraction": fraction}, "needs --bug; give it or leave out")
        return {}
    if bug not in BUGS:
        raise UserError(f"bug = {bug!r}: give --bug one of {', '.join(BUGS)}")
    settings: dict[str, Any] = {"corruption": BUGS[bug]}
    if fraction is not None:
        settings["corruption_fraction"] = fraction
    return settings


@dataclass(frozen=True)
class OwnSuspects:
    """Beside the catalogue; no part of a folder, for it is code that will run."""

    suspect: list[str] | None = flag(
        None, "MODULE:FUNCTION that changes images, looked for too; can be repeated."
    )


@dataclass(frozen=True)
class DebugRequest(Rule):
    """What is compared and how; each flag's help says what it is.

    Attributes:
        groups: G of each cohort.
        is_experiment: whether the planted bug, or none, is known to be the truth.

    Raises:
        UserError: a value out of range, or one cohort without the other.
    """

    healthy: Path | None = flag(None, "Your cohort: a file of client names.")
    suspicious: Path | None = flag(None, "The cohort to compare with it.")
    groups: int = flag(
        4,
        "Generators of each cohort, 4 to 6.",
        at_least=FEWEST_GROUPS,
        at_most=MOST_GROUPS,
    )
    clients_per_group: int | None = flag(
        None, "As many as there are when unset.", at_least=2
    )
    samples_per_group: int = flag(
        500, "Images drawn from each generator.", at_least=50, at_most=_MOST_SAMPLES
    )
    is_experiment: bool = False

    def __post_init__(self) -> None:
        """Checks what needs no data."""
        check_ranges(self)
        problem = "compares two cohorts; give"
        if self.healthy is not None and self.suspicious is None:
            raise UserError(f"healthy = {self.healthy}: {problem} --suspicious too")
        if self.suspicious is not None and self.healthy is None:
            raise UserError(f"suspicious = {self.suspicious}: {problem} --healthy too")

    @property
    def rule(self) -> Rule:
        """Of the verdict."""
        return Rule(self.alpha, self.min_effect)
