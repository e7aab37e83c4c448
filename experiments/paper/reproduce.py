"""`fedgs privacy --reproduce`: recomputes the published and the analysed numbers.

Every row has a reference value, as printed by its source with all its digits, and our
own computation of the same quantity. Where the reference is a figure that is no bound
(the larger of the two directions of a subsampled round), the row also has what the
dominating pair gives. Nothing is copied from one column to the other; the rows are in
`experiments.paper.reproduced_numbers`.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import typer

from experiments.commands.progress import Progress
from experiments.paper.reproduced_numbers import Row, rows
from experiments.tables import Table

MOST_DEVIATION = 0.01  # relative, of a number whose difference is explained
ROUNDING = 1e-13


@dataclass(frozen=True)
class Result:
    """One reproduced number; the fields of `--json`.

    Attributes:
        ours: the same quantity, computed.
        dominating: the valid bound, where the reference is none; else None.
        agrees: whether `ours` is the reference to the digits that it has.
        note: why the two differ, where they may.
    """

    what: str
    reference: str
    ours: float
    dominating: float | None
    agrees: bool
    note: str


def agrees(reference: str, ours: float) -> bool:
    """Tells whether a number is the reference, to the digits that it is printed with.

    >>> agrees("346.66", 346.6557), agrees("346.66", 346.67), agrees(">= 327.6", 330)
    (True, False, True)
    """
    sign, _, text = reference.rpartition(" ")
    text = text.replace(",", "")
    if sign:
        return ours >= float(text) if sign == ">=" else ours <= float(text)
    mantissa, _, power = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(power or 0) - decimals)
    return abs(ours - float(text)) <= 0.5000001 * unit


def is_close(reference: str, ours: float) -> bool:
    """Tells whether a number is near enough to the reference to be explained.

    >>> is_close("2,059", 2057.7), is_close("2,059", 2101)
    (True, False)
    """
    value = float(reference.rpartition(" ")[2].replace(",", ""))
    return abs(ours - value) <= max(MOST_DEVIATION * value, ROUNDING)


def results(found: Iterable[Row]) -> Iterator[Result]:
    """Computes rows, one after the other."""
    for row in found:
        ours = _number(row.compute())
        dominating = None if row.dominating is None else _number(row.dominating())
        same = agrees(row.reference, ours)
        note = "" if same or not is_close(row.reference, ours) else row.differs
        yield Result(row.what, row.reference, ours, dominating, same, note)


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)


def main(as_json: bool) -> None:
    """Recomputes all numbers and prints them; progress goes to standard error.

    Raises:
        typer.Exit: a number that should agree does not (code 1).
    """
    all_rows, done = rows(), list[Result]()
    with Progress() as progress:
        stage = progress.stage("number")
        for result in results(all_rows):
            done.append(result)
            stage(len(done), len(all_rows), result.what)
    wrong = [result for result in done if not result.agrees and not result.note]
    if as_json:
        print(json.dumps([asdict(result) for result in done], indent=2))
    else:
        _show(done)
    if wrong:
        raise typer.Exit(1)


def _show(done: list[Result]) -> None:
    rows: list[list[str]] = []
    for result in done:
        valid = "" if result.dominating is None else f"{result.dominating:.6g}"
        verdict = "yes" if result.agrees else f"no: {result.note or 'NOT EXPLAINED'}"
        rows.append([result.what, result.reference, f"{result.ours:.6g}", valid])
        rows[-1].append(verdict)
    same = sum(result.agrees for result in done)
    note = (
        f"{same} of {len(done)} agree to the digits given; the others are explained, "
        "or the exit code is 1. A figure marked 'no bound' is no guarantee; the "
        "dominating pair's number beside it is the one to use."
    )
    head = ["quantity", "reference", "ours", "dominating pair", "agrees"]
    Table("Numbers of the paper and of the analysis", head, rows, note).show()
