"""A diagnosis in numbers: on the report's page and on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedgs.app.tables import Table, cell
from fedgs.diagnosis.rule import CONFIDENCE

MOST_SHOWN = 6  # of some twenty suspects


def diagnosis_tables(diagnosis: Mapping[str, Any]) -> list[Table]:
    """Returns the suspected bugs, and where the cohorts differ, as tables.

    Privacy: post-processing of DP output.

    Args:
        diagnosis: content of diagnosis.json.
    """
    return [_suspects(diagnosis), _differences(diagnosis["differences"])]


def _suspects(diagnosis: Mapping[str, Any]) -> Table:
    ranking = diagnosis["ranking"]
    shown = [*ranking[:MOST_SHOWN], *ranking[MOST_SHOWN:][-1:]]  # any difference
    rows = [
        [
            row["title"],
            row["decision"],
            cell(row["fit"]),
            _with_interval(row["effect"], row["interval"]),
            cell(row["adjusted_p"]),
        ]
        for row in shown
    ]
    hidden = ranking[len(shown) - 1 : -1] if len(ranking) > len(shown) else []
    excluded = sum(row["decision"] == "excluded" for row in hidden)
    note = f"{len(hidden)} more explain less, {excluded} of them are excluded."
    share = f"share [{CONFIDENCE:.0%}]"
    if diagnosis["draws_averages"]:
        share = "strength as drawn"
    head = ["suspected", "decision", "explains", share, "adjusted p"]
    return Table("Suspected bugs, strongest first", head, rows, note if hidden else "")


def _differences(found: Sequence[Mapping[str, Any]]) -> Table:
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
    return Table("Where do they differ most?", head, rows, note)


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    if interval is None:
        return cell(value)
    low, high = map(cell, interval)
    return f"{cell(value)} [{low}, {high}]"
