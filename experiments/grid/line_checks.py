"""The form of a stored line: the fields that tables are made of, and their types."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from experiments.baselines import METHOD_UNITS
from experiments.store import Line
from fedgs.config.fields import coerce_fields, coerced, entry
from fedgs.errors import UserError, check_utf8
from fedgs.privacy.accountant import CHANGES


@dataclass(frozen=True, kw_only=True)
class _CellLine:
    """Fields of the line of every cell; see `Cell.identity`."""

    cell: str = entry()
    data: str = entry()
    method: str = entry()
    asked_epsilon: float | None = entry(above=0)
    seed: int = entry()


@dataclass(frozen=True, kw_only=True)
class _FailedLine(_CellLine):
    """Fields of the line of a cell that failed."""

    failed: str = entry()


@dataclass(frozen=True, kw_only=True)
class _FinishedLine(_CellLine):
    """Fields of the line of a finished run, as far as tables show them.

    Lines of older versions lack those that have a default.
    """

    unit: str = entry(choices=METHOD_UNITS)
    own: bool = entry()
    trust: str = entry()
    num_clients: int = entry()
    cap: int | None = entry()
    releases: int = entry()
    rounds: int = entry()
    bytes_per_client: int | None = entry()
    accuracy_cnn: float | None = entry()
    accuracy_mean_of_13: float | None = entry()
    fid: float | None = entry()
    coverage: float | None = entry(None)
    num_synthetic: int | None = entry()
    cpu_seconds: float | None = entry()
    wall_seconds: float | None = entry()
    peak_memory_bytes: int | None = entry()
    guarantees: list[Any] = entry()
    audit: dict[str, Any] | None = entry()
    reduced: dict[str, Any] = entry()
    accuracy_by_classifier: dict[str, Any] | None = entry(None)
    settings: dict[str, Any] | None = entry(None)


@dataclass(frozen=True, kw_only=True)
class _Guarantee:
    """Fields of an element of `guarantees`."""

    label: str = entry()
    unit: str = entry(choices=METHOD_UNITS)
    relation: str = entry(choices=tuple(CHANGES))
    epsilon: float | None = entry(at_least=0)


@dataclass(frozen=True, kw_only=True)
class _Audit:
    """Fields of `audit`."""

    lower_bound: float = entry(at_least=0)
    claimed: float | None = entry(at_least=0)
    refuted: bool = entry()


def check_line(line: Line) -> None:
    """Refuses a line that no table can be made of.

    Raises:
        UserError: a field is missing, or is of another type or out of its range.
    """
    if "failed" in line:
        _check_fields(_FailedLine, line)
        return
    _check_fields(_FinishedLine, line)
    if not isinstance(line["guarantees"], list):
        raise UserError(f"guarantees = {line['guarantees']!r}: it must be a list")
    for guarantee in line["guarantees"]:
        _check_fields(_Guarantee, _table("guarantees", guarantee))
    if line["audit"] is not None:
        _check_fields(_Audit, _table("audit", line["audit"]))
    for name in _table("reduced", line["reduced"]):  # the page shows the names
        check_utf8("reduced", name)
    if line.get("settings") is not None:
        _table("settings", line["settings"])
    if line.get("accuracy_by_classifier") is not None:
        accuracies = _table("accuracy_by_classifier", line["accuracy_by_classifier"])
        for name, accuracy in accuracies.items():
            coerced(f"accuracy_by_classifier.{name}", float, accuracy)


def _check_fields(kind: type[Any], line: Line) -> None:
    values: Line = {}
    for spec in dataclasses.fields(kind):
        if spec.name in line:
            values[spec.name] = line[spec.name]
        elif spec.default is dataclasses.MISSING:
            raise UserError(f"{spec.name} is missing")
    coerce_fields(kind(**values))


def _table(name: str, value: Any) -> Line:
    if not isinstance(value, dict):
        raise UserError(f"{name} = {value!r}: it must be a table")
    return value
