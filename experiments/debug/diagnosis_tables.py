"""A diagnosis in numbers: on the report's page and on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedgs.app.tables import Table, cell

MOST_SHOWN = 6  # of some twenty suspects


def diagnosis_tables(diagnosis: Mapping[str, Any]) -> list[Table]:
    """Returns suspected bugs, effect sizes and two-sample tests as tables.

    Privacy: post-processing of DP output.

    Args:
        diagnosis: content of diagnosis.json.
    """
    level = f"{diagnosis['confidence']:.0%}"
    return [
        _suspects(diagnosis, level),
        _effects(diagnosis["effects"], level),
        _two_sample(diagnosis["two_sample"]),
        *_differences(diagnosis.get("differences", ())),  # older folders have none
    ]


def _suspects(diagnosis: Mapping[str, Any], level: str) -> Table:
    ranking = diagnosis["ranking"]
    shown = [*ranking[:MOST_SHOWN], *ranking[MOST_SHOWN:][-1:]]  # any difference
    rows = [
        [
            row["title"],
            row["decision"],
            cell(row.get("fit")),
            _with_interval(row["effect"], row["interval"]),
            cell(row["adjusted_p"]),
        ]
        for row in shown
    ]
    hidden = ranking[len(shown) - 1 : -1] if len(ranking) > len(shown) else []
    excluded = sum(row["decision"] == "excluded" for row in hidden)
    rest = f" {len(hidden)} more explain less, {excluded} of them are excluded."
    note = (
        f"Where the cohorts are alike, any bug of this table is named with "
        f"probability at most {cell(diagnosis['false_positive_rate'])}; for cohorts "
        "that differ otherwise see the conditions. The smallest p that "
        f"{diagnosis['groups']} groups on each side can reach is "
        f"{cell(diagnosis['attainable_p'])} ({diagnosis['num_splits']} splits)."
        f"{rest if hidden else ''}"
    )
    share = f"share [{level}]"
    if diagnosis.get("draws_averages"):
        share = "strength as drawn"
    head = ["suspected", "decision", "explains", share, "adjusted p"]
    return Table("Suspected bugs, strongest first", head, rows, note)


def _effects(effects: Sequence[Mapping[str, Any]], level: str) -> Table:
    rows = [
        [
            row["name"],
            cell(row.get("healthy")),
            cell(row.get("suspicious")),
            _with_interval(row.get("difference"), row.get("interval")),
            row.get("words") or row.get("unit") or "",
        ]
        for row in effects
    ]
    head = ["effect", "healthy", "suspicious", f"difference [{level}]", "what it is"]
    return Table("Effect sizes", head, rows)


def _two_sample(tests: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [row["name"], cell(row["value"]), cell(row["p"]), row.get("words") or ""]
        for row in tests
    ]
    head = ["test", "value", "p", "what it is"]
    return Table("Do the cohorts differ at all?", head, rows)


def _differences(found: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Returns the classes and features in which the cohorts differ most."""
    rows = [
        [of, row["name"], cell(row["distance"])]
        for of, most in (("feature", 3), ("class", 5))
        for row in [row for row in found if row["of"] == of][:most]
    ]
    note = (
        "Distance of the cohorts' means; 1 is that of an image from its group's mean."
    )
    head = ["of", "which", "distance"]
    return [Table("Where do they differ most?", head, rows, note)] if rows else []


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    if interval is None:
        return cell(value)
    low, high = map(cell, interval)
    return f"{cell(value)} [{low}, {high}]"
