"""What the report knows of a `fedgs debug` folder: verdict, cohorts and their runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.debug.plan import read_debug
from experiments.debug.tables import diagnosis_tables
from experiments.report.run import RunFacts, read_png, read_run
from experiments.tables import Table
from fedgs.errors import UserError
from fedgs.privacy.accounting import Statement

VERDICTS = {
    "none": ("No bug of the kinds tested", "good"),
    "other": ("Different, but not by a known bug", "unsure"),
    "undecided": ("Undecided", "unsure"),
    "more than one": ("More than one bug", "bad"),
}


@dataclass(frozen=True)
class DebugFacts:
    """A debug folder, as far as it got.

    Attributes:
        name: of the folder, without the path.
        cohorts: cohort to the runs of its groups that have samples.
        missing: groups that have none yet.
        debug: content of debug.json.
        diagnosis: content of diagnosis.json; None before the verdict.
        picture: diagnosis.png; None before the verdict.
    """

    name: str
    cohorts: Mapping[str, Sequence[RunFacts]]
    missing: Sequence[str]
    debug: Mapping[str, Any]
    diagnosis: Mapping[str, Any] | None
    picture: bytes | None

    @property
    def runs(self) -> list[RunFacts]:
        """The runs of all groups."""
        return [facts for runs in self.cohorts.values() for facts in runs]

    @property
    def statements(self) -> list[Statement]:
        """What all groups released; a client is in one group, so the largest counts."""
        rows = self.diagnosis["privacy"] if self.diagnosis else []
        return [
            Statement(**{**row, "conditions": tuple(row["conditions"])}) for row in rows
        ]

    @property
    def headline(self) -> Statement:
        """The largest epsilon of the runs' own adversary and relation."""
        config = self.runs[0].config
        own = (config.adversary, config.relation)
        rows = self.statements or [facts.headline for facts in self.runs]
        rows = [row for row in rows if (row.adversary, row.relation) == own] or rows
        return max(rows, key=lambda row: (row.epsilon is None, row.epsilon or 0.0))

    @property
    def command(self) -> str:
        """The command that made the folder; paths without their folders."""
        command = without_folders(str(self.debug["command"]))
        if any(facts.config.amplification for facts in self.runs):
            return re.sub(r" --(noise-)?seed[ =]\S+", "", command)
        return command

    @property
    def trained_before(self) -> list[RunFacts]:
        """Runs that were not trained by that command, but given to it."""
        return self.runs if self.debug["request"]["runs"] is not None else []

    @property
    def outcome(self) -> str:
        """How the verdict compares with a planted bug; "" without one."""
        planted = (self.diagnosis or {}).get("planted")
        if not planted:
            return ""
        what = "no bug was planted"
        if planted["bug"] != "none":
            what = f"{planted['bug']} was planted in {planted['fraction']:g} of the "
            what += "clients" if self.is_by_client else "images"
        outcome = self.diagnosis["outcome"] if self.diagnosis else None
        return f"{what}; the verdict is {outcome}." if outcome else f"{what}."

    @property
    def is_by_client(self) -> bool:
        """Whether a planted bug concerns whole clients."""
        return self.runs[0].config.corruption_unit == "client"

    @property
    def tables(self) -> list[Table]:
        """The diagnosis in numbers; none before the verdict."""
        return diagnosis_tables(self.diagnosis) if self.diagnosis else []

    @property
    def verdict(self) -> tuple[str, str]:
        """The answer in a few words, and what kind it is: good, bad or unsure."""
        if self.diagnosis is None:
            return "Not diagnosed yet", "unsure"
        if found := VERDICTS.get(self.diagnosis["verdict"]):
            return found
        titles = {row["bug"]: row["title"] for row in self.diagnosis["ranking"]}
        if self.diagnosis["verdict"].startswith("one of "):
            possible = self.diagnosis["verdict"].removeprefix("one of ").split(", ")
            names = [str(titles.get(bug, bug)) for bug in possible]
            return f"Bug: {' or '.join(names)}", "bad"
        named = [str(titles.get(bug, bug)) for bug in self.diagnosis["bugs"]]
        return f"Bug: {' and '.join(named)}", "bad"


def is_debug(path: Path) -> bool:
    """Tells whether a folder is one of `fedgs debug`."""
    return (path / "debug.json").is_file()


def read_debug_folder(path: Path) -> DebugFacts:
    """Reads a debug folder and the runs of its groups.

    Privacy: post-processing of DP output, or public; reads nothing private.

    Raises:
        UserError: a broken folder, or no group has samples yet.
    """
    debug, diagnosis = read_debug(path)
    if not isinstance(debug.get("runs"), dict):
        raise UserError(
            f"{path}: a broken debug.json (no runs); restore it from a backup"
        )
    cohorts: dict[str, list[RunFacts]] = {}
    missing: list[str] = []
    for cohort, groups in debug["runs"].items():
        for group in groups:
            if any((path / group / "samples").glob("round-*.png")):
                cohorts.setdefault(cohort, []).append(read_run(path / group))
            else:
                missing.append(Path(group).name)
    if not cohorts:
        raise UserError(
            f"{path}: no samples yet; continue it with the same `fedgs debug`, then "
            "ask for the report again"
        )
    picture = path / "diagnosis.png"
    facts = DebugFacts(
        name=path.absolute().name,
        cohorts=cohorts,
        missing=missing,
        debug=debug,
        diagnosis=diagnosis,
        picture=read_png(picture)[0] if picture.is_file() else None,
    )
    _check(path, facts)
    return facts


def _check(path: Path, facts: DebugFacts) -> None:
    """Refuses files of which the page cannot be made."""
    try:
        _ = (facts.tables, facts.headline, facts.outcome, facts.trained_before)
        _ = (facts.verdict, facts.debug["source"], facts.debug["groups"])
        if facts.diagnosis is not None:
            _ = (facts.diagnosis["sentence"], facts.diagnosis["conditions"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: a broken debug.json or diagnosis.json ({error!r}); restore it "
            "from a backup"
        ) from error


def without_folders(command: str) -> str:
    """Returns a command whose absolute paths have lost their folders.

    >>> without_folders("fedgs debug --data-dir /home/ada/data --output=/tmp/x/out")
    'fedgs debug --data-dir data --output=out'
    """
    return re.sub(r"(?<![^\s=:'\"])/(?:[^\s'\"/]+/)*", "", command)
