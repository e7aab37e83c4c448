"""What the report knows of a `fedgs debug` folder: verdict, cohorts and their runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fedgs.app.debug.debug_folder import read_debug
from fedgs.app.debug.verdict import diagnosis_tables
from fedgs.app.report import words
from fedgs.app.report.cards import Card, Picture, picture_of
from fedgs.app.report.run import RunFacts, read_run
from fedgs.diagnosis.diagnosis import ONE_OF
from fedgs.errors import UserError, wrap_error
from fedgs.privacy.accountant import Statement
from fedgs.privacy.rounding import upper

VERDICTS = {
    "none": ("No bug of the kinds tested", "good"),
    "other": ("Different, but not by a known bug", "unsure"),
    "undecided": ("Undecided", "unsure"),
    "more than one": ("More than one bug", "bad"),
}
# What cards raise if the files have other content than `fedgs debug` writes.
BROKEN = (LookupError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class DebugFacts:
    """A debug folder, as far as it got.

    Attributes:
        name: of the folder, without the path.
        cohorts: cohort to the runs of its groups that have samples.
        missing: groups that have none yet.
        debug: content of debug.json.
        diagnosis: content of diagnosis.json; None before the verdict.
    """

    name: str
    cohorts: Mapping[str, Sequence[RunFacts]]
    missing: Sequence[str]
    debug: Mapping[str, Any]
    diagnosis: Mapping[str, Any] | None

    @property
    def runs(self) -> list[RunFacts]:
        """The runs of all groups."""
        return [facts for runs in self.cohorts.values() for facts in runs]

    @property
    def statements(self) -> list[Statement]:
        """What all groups released; a client is in one group, so the largest counts."""
        if not self.diagnosis:
            return []
        return [Statement.from_json(row) for row in self.diagnosis["privacy"]]

    @property
    def headline(self) -> Statement:
        """The largest epsilon of the runs' own adversary and relation."""
        config = self.runs[0].config
        own = (config.adversary, config.relation)
        # Before the diagnosis, nothing states all groups together. Each client is in
        # one group, so the largest of the groups' own epsilons holds for all of them.
        rows = self.statements or [facts.headline for facts in self.runs]
        matching = [row for row in rows if (row.adversary, row.relation) == own]
        # None is the largest: one group without a guarantee leaves none for all.
        return max(
            matching or rows,
            key=lambda row: (row.epsilon is None, row.epsilon or 0.0),
        )

    @property
    def command(self) -> str:
        """The command that made the folder; paths without their folders."""
        return without_folders(str(self.debug["command"]))

    @property
    def outcome(self) -> str:
        """How the verdict compares with a planted bug; "" without one."""
        if self.diagnosis is None:
            return ""
        planted = self.diagnosis.get("planted")
        if not planted:
            return ""
        what = "no bug was planted"
        if planted["bug"] != "none":
            unit = "images"
            if self.runs[0].config.corruption_unit == "client":
                unit = "clients"
            what = (
                f"{planted['bug']} was planted in {planted['fraction']:g} of the {unit}"
            )
        outcome = self.diagnosis["outcome"]
        if outcome:
            return f"{what}; the verdict is {outcome}."
        return f"{what}."

    @property
    def verdict(self) -> tuple[str, str]:
        """The answer in a few words, and what kind it is: good, bad or unsure."""
        if self.diagnosis is None:
            return "Not diagnosed yet", "unsure"
        verdict = str(self.diagnosis["verdict"])
        # The titles stand in the file, because a suspect of the user's own is code that
        # the report does not load.
        titles = {row["bug"]: str(row["title"]) for row in self.diagnosis["ranking"]}
        bugs = verdict.removeprefix(ONE_OF).split(", ")
        named = " or ".join(titles.get(bug, bug) for bug in bugs)
        return VERDICTS.get(verdict, (f"Bug: {named}", "bad"))


def glance_cards(debug: DebugFacts) -> list[Card]:
    """Returns the verdict, and both cohorts beside each other."""
    answer, kind = debug.verdict
    texts = _sentences(debug)
    # A verdict that is known to be right or wrong comes from an experiment. Without
    # this sentence a reader would believe that somebody's data have the bug.
    if debug.outcome:
        texts.append(f"This was a test: {debug.outcome}")
    # The cohorts have one picture each beside the other. A cohort may have fewer groups
    # with samples than the other while the folder is being trained.
    groups = zip_longest(*debug.cohorts.values())
    pictures = [_pictures(debug, group) for group in groups]
    more = [picture for group in pictures[1:] for picture in group]
    cards = [
        Card(answer=answer, texts=texts, kind=kind),
        Card(debug.name, pictures=pictures[0], facts=_facts(debug)),
    ]
    if more:
        cards.append(Card("The other groups", pictures=more, is_folded=True))
    return cards


def _sentences(debug: DebugFacts) -> list[str]:
    """Returns the verdict in words, or what is missing for one."""
    if debug.diagnosis is not None:
        texts = [debug.diagnosis["sentence"]]
        step = debug.diagnosis.get("next_step")
        if step:
            texts.append(without_folders(step))
        return texts
    there = len(debug.runs)
    text = f"{there} of {there + len(debug.missing)} generators have samples"
    if debug.missing:
        text = f"{text}; missing: {', '.join(debug.missing)}"
    return [f"{text}. Continue with the same fedgs debug."]


def _facts(debug: DebugFacts) -> dict[str, str]:
    """Returns the epsilon that holds for all groups, the cohorts and their sizes."""
    row = debug.headline
    # A number without a guarantee is shown, but it is worth nothing.
    bound = None
    if row.guarantee:
        bound = row.epsilon
    worth, _ = words.reading(bound, row.conditions)
    epsilon = f"{words.stated(row.epsilon)} at δ = {upper(row.delta, 6)}"
    holds_for = f"{row.adversary}, {row.relation}, unit: {row.unit_in_words}"
    # Both sizes are missing until the cohorts are split into groups.
    sizes = debug.debug.get("clients") or {}
    cohorts = [f"{cohort}: {count} clients" for cohort, count in sizes.items()]
    generators = f"{debug.debug['groups']} for each cohort"
    clients = debug.debug.get("clients_per_group")
    if clients:
        generators = f"{generators}, {clients} clients each"
    return {
        "privacy": f"{epsilon}, {worth} ({holds_for})",
        "cohorts": "; ".join([*cohorts, str(debug.debug["source"])]),
        "generators": generators,
    }


def _pictures(debug: DebugFacts, group: Sequence[RunFacts | None]) -> list[Picture]:
    """Returns the last grids of one group of each cohort that has it."""
    return [
        picture_of(run, run.grids[-1], f"{cohort}, {run.name}, after")
        for cohort, run in zip(debug.cohorts, group, strict=True)
        if run is not None
    ]


def diagnosis_cards(debug: DebugFacts) -> list[Card]:
    """Returns the diagnosis in numbers, and what it rests on."""
    if debug.diagnosis is None:
        return [Card(debug.name, texts=["Not diagnosed yet."])]
    conditions = debug.diagnosis["conditions"]
    return [
        Card(debug.name, tables=diagnosis_tables(debug.diagnosis)),
        Card("What the verdict rests on", items=conditions),
    ]


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
    cohorts: dict[str, list[RunFacts]] = {}
    missing: list[str] = []
    broken = f"{path}: a broken debug.json or diagnosis.json"
    with wrap_error(BROKEN, broken, "restore it from a backup"):
        for cohort, groups in debug["runs"].items():
            for group in groups:
                # A run that has just begun has nothing that could be shown.
                if any((path / group / "samples").glob("round-*.png")):
                    cohorts.setdefault(cohort, []).append(read_run(path / group))
                else:
                    missing.append(Path(group).name)
        if not cohorts:
            raise UserError(
                f"{path}: no samples yet; continue it with the same `fedgs debug`, "
                "then ask for the report again"
            )
        facts = DebugFacts(path.absolute().name, cohorts, missing, debug, diagnosis)
        # Both files are JSON that somebody may have changed. Making the cards here
        # shows what is wrong with them while the error can still name the folder.
        _ = (glance_cards(facts), diagnosis_cards(facts), facts.command)
    return facts


def without_folders(command: str) -> str:
    """Returns a command whose absolute paths have lost their folders, data their file.

    >>> without_folders("fedgs debug --data npz:~/ada.npz --output=/tmp/x/out")
    'fedgs debug --data npz:FILE --output=out'
    """
    # The page is made to be passed on, and folders tell names of users and projects.
    command = re.sub(r"\b(npz|folder|femnist):[^\s'\"]+", r"\1:FILE", command)
    # A path begins a word or follows = or :, so a / inside a word is none.
    return re.sub(r"(?<![^\s=:'\"])/(?:[^\s'\"/]+/)*", "", command)
