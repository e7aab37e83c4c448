"""What `fedgs debug` is asked for: its flags beside the settings of the run.

Imports no tensor library: the command line reads the flags from here at every start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedgs.config.fields import flag
from fedgs.config.settings import CORRUPTIONS
from fedgs.errors import UserError, reject

# What --bug accepts, and the corruption that it plants. Augenstein et al. call the
# inversion of pixels flip; "invert" is left out so that it has one name here. "none"
# stands last in the error that lists them: it is the experiment without a bug.
_OWN_NAMES = [name for name in CORRUPTIONS if name not in ("none", "invert")]
BUGS = {"flip": "invert", **{name: name for name in _OWN_NAMES}, "none": "none"}
# Settings of the run that `fedgs debug` has flags for.
OF_DEBUG = (
    "cohorts",
    "node_sizes",
    "groups",
    "clients_per_group",
    "alpha",
    "min_effect",
)


@dataclass(frozen=True)
class PlantedBug:
    """The experiment: whose images are spoilt on purpose, and how."""

    bug: str | None = flag(
        None,
        "Bug to plant on purpose, as an experiment: flip, rotate, mirror, blur, "
        "... or none.",
    )
    fraction: float | None = flag(
        None, "Share of the clients that get the bug of --bug. Default: 0.5."
    )


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
        reject({"fraction": fraction}, "it needs --bug; give --bug, or leave out")
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
        None,
        "Bug of your own to look for as well: a function MODULE:FUNCTION that "
        "changes images as the bug would. Can be repeated.",
    )


@dataclass(frozen=True)
class Compared:
    """Which clients are compared with which; `fedgs deploy debug` has it too.

    Raises:
        UserError: nothing says what is compared, or two flags do.
    """

    healthy: str | None = flag(
        None,
        "Cohort to compare with: a value in the clients' files of --cohorts; in a "
        "simulation also a text file of client names.",
    )
    suspicious: str | None = flag(
        None,
        "Cohort that may have a bug, given as for --healthy. Without --healthy: name "
        "of a node to compare with all others.",
    )
    each: bool = flag(False, "Compare each node with all other nodes.")

    def __post_init__(self) -> None:
        """Checks that it is one question."""
        for name in ("healthy", "suspicious"):
            if getattr(self, name) == "":
                raise UserError(
                    f"{name} is empty: give --{name} the name of a cohort, or leave "
                    "it out"
                )
        if self.each:
            own = {"healthy": self.healthy, "suspicious": self.suspicious}
            reject(own, "--each compares every node with all others; leave out")
        elif self.suspicious is None:
            if self.healthy is not None:
                raise UserError(
                    f"healthy = {self.healthy}: a second cohort is needed to compare "
                    "it with; give --suspicious too"
                )
            raise UserError(
                "suspicious is unset: it is not known what to compare; give --healthy "
                "and --suspicious, two files of client names (`fedgs select-clients` "
                "makes them) or two values of the clients' files of cohorts; or give "
                "--each, to compare every node with all others"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """The run's settings that say the same, where cohorts are values or nodes."""
        if self.each:
            return {}
        found: dict[str, Any] = {"suspicious": self.suspicious}
        if self.healthy is not None:
            found["healthy"] = self.healthy
        return found
