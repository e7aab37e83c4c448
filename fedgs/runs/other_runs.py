"""Run folders of methods that are not part of fedgs, such as central baselines.

Whoever trains such runs registers what opens their folders as an entry point of the
group `fedgs.runs`, named as `run_folder.BASELINE` without its ending. So the commands
`resume`, `privacy`, `audit` and `report` understand them, and fedgs imports none of it.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from fedgs.errors import UserError
from fedgs.privacy.accountant import Statement
from fedgs.runs.run_folder import BASELINE

_ENTRY_GROUP = "fedgs.runs"
_ENTRY_NAME = BASELINE.partition(".")[0]


class OtherRun(Protocol):
    """A run of such a method, as the commands of fedgs use it."""

    @property
    def name(self) -> str:
        """What the method was asked for by."""
        ...

    @property
    def title(self) -> str:
        """A line for tables."""
        ...

    @property
    def description(self) -> str:
        """What is trained on what, in a line."""
        ...

    @property
    def num_records(self) -> int:
        """Images that it trains on; public by the method's decision."""
        ...

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """What was released so far, from the ledger.

        Raises:
            UserError: the ledger is broken.
        """
        ...

    def guarantees(
        self,
        delta: float | None = None,
        with_private: bool = False,
    ) -> list[Statement]:
        """Returns what the run guarantees for all that it released so far.

        Privacy: public; with the private folder as private as what is kept there.

        Raises:
            UserError: delta is out of range, or the ledger is broken.
        """
        ...

    def shown_settings(self) -> Mapping[str, Any]:
        """Returns the method's own settings, by name."""
        ...

    def settings_read(self) -> Sequence[Any]:
        """Returns the fields of the run's settings that the method reads."""
        ...

    def command(self) -> Sequence[str]:
        """Returns the words of the command that trains such a run again."""
        ...

    def attack(self, trials: int) -> Sequence[Any]:
        """Returns the findings of an attack on one release of each kind; maybe none.

        Args:
            trials: for each of the two neighbours.
        """
        ...

    def load_data(self) -> Any:
        """Loads the data that the run trains on.

        Privacy: reads private data; output private.
        """
        ...

    def train(self, data: Any, report: Any, stop: Any) -> None:
        """Trains from the last checkpoint on.

        Privacy: releases what `guarantees` says; events: in the ledger.
        """
        ...


def open_other(path: str | Path, typed: str = "") -> OtherRun:
    """Opens the folder of such a run.

    Args:
        path: where the folder lies.
        typed: a method that the user named on the command line, and so trusts.

    Raises:
        UserError: no such folder, or nothing is installed that can open it.
    """
    for entry in entry_points(group=_ENTRY_GROUP, name=_ENTRY_NAME):
        open_run = cast(Callable[[str | Path, str], OtherRun], entry.load())
        return open_run(path, typed)
    raise UserError(
        f"{path}: it is a run of `fedgs {_ENTRY_NAME}`, and nothing that opens it is "
        "installed; install fedgs with its experiments"
    )
