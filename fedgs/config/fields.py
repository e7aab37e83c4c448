"""What one setting is: a dataclass field with a group, a help text and a range.

The settings themselves are in `fedgs.config.run_config`. This module imports no tensor
library.
"""

import math
import operator
import types
import typing
from dataclasses import Field, field
from typing import Any

from fedgs.errors import UserError

Scalar = str | int | float | bool


def option(
    default: Any,
    group: str,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declares a field of `RunConfig` with its help text and its valid range."""
    limits = {
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "above": above,
        "below": below,
    }
    return field(default=default, metadata={"group": group, "help": text, **limits})


def scalar_type(annotation: Any) -> tuple[type, bool]:
    """Returns the scalar type of a field's annotation and whether it may be unset."""
    if isinstance(annotation, types.UnionType):
        return typing.get_args(annotation)[0], True
    return annotation, False


def coerced(name: str, annotation: Any, value: Any) -> Any:
    """Returns a setting's value in its own type, None for unset.

    Raises:
        UserError: a value of another type.
    """
    kind, optional = scalar_type(annotation)
    if optional and (value is None or value == ""):
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_bool = isinstance(value, bool)
    if not isinstance(value, kind) or (is_bool and kind is not bool):
        raise UserError(f"{name} = {value!r}: must be of type {kind.__name__}")
    return value


def check_range(spec: "Field[Any]", value: Any) -> None:
    """Checks a value against the range that `option` declared.

    Raises:
        UserError: outside the range.
    """
    limits = spec.metadata
    flag = f"--{spec.name.replace('_', '-')}"
    if limits["choices"] and value not in limits["choices"]:
        names = ", ".join(limits["choices"])
        raise UserError(f"{spec.name} = {value!r}: give {flag} one of {names}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{spec.name} = {value}: give {flag} a finite number")
    for key, holds, words in (
        ("at_least", operator.ge, "at least"),
        ("at_most", operator.le, "at most"),
        ("above", operator.gt, "a number above"),
        ("below", operator.lt, "a number below"),
    ):
        limit = limits[key]
        if limit is not None and not holds(value, limit):
            raise UserError(f"{spec.name} = {value}: give {flag} {words} {limit:g}")
