"""The report's tables: privacy, communication, evaluation, settings, versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.report import words as words
from experiments.report.communication import Communication, communication
from experiments.report.run import RunFacts, shown_data, shown_settings
from fedgs.config.run_config import RunConfig
from fedgs.privacy.accounting import Statement

# Last in the table.
BOOKKEEPING = ("seed", "seconds", "round", "num_", "downstream_cnn_num")


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names the row.

    Attributes:
        caption: what it shows.
        head: names of the columns.
        rows: as many cells each as there are columns.
        note: below the table; "" for none.
        numeric: the columns after the first hold numbers.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    numeric: bool = True


# ------------------------------------------------------------------ privacy


@dataclass(frozen=True)
class Cell:
    """One statement's number, and how to read it; `kind` is good, unsure or bad."""

    epsilon: str
    reading: str
    kind: str
    is_headline: bool


@dataclass(frozen=True)
class TheoremTable:
    """Statements of one theorem: adversaries downwards, relations across.

    Attributes:
        theorem, theorem_words: its name, and what it is.
        selection: of clients.
        delta: of all cells.
        relations: names with their meaning; the columns.
        rows: an adversary, its meaning, and a cell (or None) for each relation.
    """

    theorem: str
    theorem_words: str
    selection: str
    delta: str
    relations: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, str, Sequence[Cell | None]]]


@dataclass(frozen=True)
class PrivacyTable:
    """The statements of a run, or of several together, in words.

    Attributes:
        caption: of which runs.
        theorems: one table each.
        unit: what one unit of privacy is.
        conditions: condition to the rows that it belongs to.
    """

    caption: str
    theorems: Sequence[TheoremTable]
    unit: str
    conditions: Mapping[str, str]


def privacy_table(
    caption: str,
    statements: Sequence[Statement],
    config: RunConfig,
    headline: Statement | None = None,
) -> PrivacyTable:
    """Returns statements in words, and every condition with its rows.

    Privacy: public.

    Args:
        caption: of which runs.
        statements: at least one.
        config: of the first of these runs.
        headline: the statement that the page begins with, to be marked.
    """
    where: dict[str, list[str]] = {}
    everyone = {f"{row.adversary}, {row.relation}" for row in statements}
    groups: dict[tuple[str, str], list[Statement]] = {}
    for row in statements:
        groups.setdefault((row.theorem, row.client_selection), []).append(row)
        for condition in row.conditions:
            where.setdefault(condition, []).append(f"{row.adversary}, {row.relation}")
    return PrivacyTable(
        caption,
        [_theorem_table(rows, headline) for rows in groups.values()],
        words.unit(config, statements[0].unit),
        {
            condition: "all" if {*rows} == everyone else "; ".join(dict.fromkeys(rows))
            for condition, rows in where.items()
        },
    )


def _theorem_table(
    statements: Sequence[Statement], headline: Statement | None
) -> TheoremTable:
    cells = {
        (row.adversary, row.relation): Cell(
            words.epsilon(row.epsilon), *words.reading(row), row is headline
        )
        for row in statements
    }
    relations = list(dict.fromkeys(row.relation for row in statements))
    adversaries = dict.fromkeys(row.adversary for row in statements)
    first = statements[0]
    return TheoremTable(
        first.theorem,
        words.theorem(first.theorem),
        first.client_selection,
        f"{first.delta:g}",
        [(relation, words.RELATIONS[relation]) for relation in relations],
        [
            (name, words.ADVERSARIES[name], [cells.get((name, r)) for r in relations])
            for name in adversaries
        ],
    )


# ------------------------------------------------------------------ communication


def communication_table(runs: Sequence[RunFacts]) -> Table:
    """Returns the bytes of one round and of the run.

    Privacy: public.
    """
    columns: dict[Communication, list[str]] = {}
    for facts in runs:
        columns.setdefault(communication(facts), []).append(facts.name)
    rows = {
        "request to a node": [words.num_bytes(run.request) for run in columns],
        "reply of a node": [words.num_bytes(run.reply) for run in columns],
        "requests + replies in a round": [
            f"{run.requests} + {run.replies}" for run in columns
        ],
        "one round, all nodes": [words.num_bytes(run.per_round) for run in columns],
        "whole run": [
            words.num_bytes(run.total)
            if run.is_remote
            else f"0: one process (else {words.num_bytes(run.total)})"
            for run in columns
        ],
        "how it was found": [run.how for run in columns],
    }
    note = (
        "A request holds the fakes, a reply the node's release. Measured: Flower's "
        "serialised messages; a compact release counts as one of noise, for its own "
        "size would tell of this one release. Computed: the tensors in the run's own "
        "encoding, without the frames of Flower and gRPC. Estimated: the same for a "
        "transport that compresses. The whole run counts repeated rounds, not the warm "
        "start."
    )
    head = ["", *(", ".join(names) for names in columns.values())]
    return Table("Bytes", head, [[name, *cells] for name, cells in rows.items()], note)


# ------------------------------------------------------------------ evaluation


def evaluation_tables(runs: Sequence[RunFacts]) -> list[Table]:
    """Returns the results of `fedgs evaluate`, none where it was not run.

    Privacy: the numbers were computed from real images; no epsilon covers them.
    """
    found = [facts for facts in runs if facts.evaluation]
    if not found:
        return []
    names: dict[str, None] = {}
    for facts in found:
        names |= dict.fromkeys(n for n, v in facts.evaluation.items() if _is_number(v))
    against = sorted({shown_data(str(f.evaluation.get("data", "?"))) for f in found})
    rows = [
        [
            name,
            *(_cell(facts.evaluation.get(name)) for facts in found),
            _meaning(name),
        ]
        for name in sorted(names, key=_rank)
    ]
    head = ["metric", *(facts.name for facts in found), "what it says"]
    tables = [Table(f"Against {', '.join(against)}", head, rows)]
    for facts in found:
        tables += _classifier_tables(facts)
    return tables


def _classifier_tables(facts: RunFacts) -> list[Table]:
    tables = []
    if found := facts.evaluation.get("classifiers"):
        columns = {
            "synthetic": found.get("accuracy", {}),
            "real": found.get("real_accuracy", {}),
            "calibrated": found.get("calibrated", {}),
        }
        columns = {title: column for title, column in columns.items() if column}
        rows = [
            [name, *(_cell(column.get(name)) for column in columns.values())]
            for name in found.get("accuracy", {})
        ]
        note = f"Protocol {found.get('protocol', '?')}. Calibrated: synthetic / real."
        if failed := found.get("failed"):
            note += (
                f" Could not be trained, so there is no average: {', '.join(failed)}."
            )
        else:
            rows.append(["average", *(_mean(c, len(rows)) for c in columns.values())])
        tables.append(
            Table(
                f"{facts.name}: classifiers tested on real images",
                ["trained on", *columns],
                rows,
                note,
            )
        )
    if curves := facts.evaluation.get("label_efficiency"):
        sizes = list(next(iter(curves.values())))
        rows = [
            [f"labels: {teacher}", *(_cell(curve.get(size)) for size in sizes)]
            for teacher, curve in curves.items()
        ]
        caption = f"{facts.name}: accuracy by number of labelled synthetic images"
        tables.append(Table(caption, ["labelled images", *sizes], rows))
    return tables


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if not _is_number(value):
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _mean(column: Mapping[str, float], count: int) -> str:
    """Returns the average of a complete column."""
    if len(column) != count:
        return "–"
    return _cell(sum(column.values()) / count)


def _rank(name: str) -> tuple[int, str]:
    if name.startswith(BOOKKEEPING):
        return len(words.METRICS) + 1, name
    for place, beginning in enumerate(words.METRICS):
        if name.startswith(beginning):
            return place, name
    return len(words.METRICS), name


def _meaning(name: str) -> str:
    if name.endswith("_std") or name.startswith(BOOKKEEPING):
        return ""
    found = (text for start, text in words.METRICS.items() if name.startswith(start))
    return next(found, "")


# ------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Settings:
    """All settings of runs.

    Attributes:
        differing: those that are not equal in all runs; None for a single run.
        groups: group to the settings that are equal in all of them.
    """

    differing: Table | None
    groups: Sequence[Table] = field(default_factory=list)


def settings_tables(runs: Sequence[RunFacts]) -> Settings:
    """Returns what differs between runs, and what they share.

    Privacy: public.
    """
    shown = [shown_settings(facts.config) for facts in runs]
    differing, groups = [], []
    for group in shown[0]:
        shared = []
        for name in shown[0][group]:
            values = [run[group][name] for run in shown]
            if len(set(values)) == 1:
                shared.append([name, values[0]])
            else:
                differing.append([name, *values])
        if shared:
            groups.append(Table(group, ["setting", "value"], shared, numeric=False))
    head = ["setting", *(facts.name for facts in runs)]
    table = Table("What differs", head, differing, numeric=False)
    return Settings(table if len(runs) > 1 else None, groups)


def versions_table(runs: Sequence[RunFacts]) -> Table:
    """Returns the versions of every run's software, and its machine.

    Privacy: public.
    """
    names: dict[str, None] = {}
    for facts in runs:
        names |= dict.fromkeys(facts.versions)
    rows = [[n, *(str(f.versions.get(n, "–")) for f in runs)] for n in names]
    head = ["package", *(facts.name for facts in runs)]
    return Table("Versions", head, rows, numeric=False)
