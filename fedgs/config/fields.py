"""What one setting is: a dataclass field with a help text and a range.

The settings of a run are in `fedgs.config.settings`; what one command is asked for
beside them is declared the same way. This module imports no tensor library.
"""

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Iterable
from dataclasses import Field, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from fedgs.errors import UserError, check_utf8

Scalar = str | int | float | bool
# A field's name; what is wrong with its value, and what to do.
Problem = tuple[str, str]
SHOWN_CHARACTERS = 60
MOST_CHARACTERS = 200  # of a value that may be the name of a file
# Limits of a noise: its square is a number.
SMALLEST_NOISE = 1e-100
LARGEST_NOISE = 1e100
NOISE: Any = {"zero_or_at_least": SMALLEST_NOISE, "at_most": LARGEST_NOISE}
# Of a clip bound. What is clipped to less keeps no digits in 32 bits, so a run would
# spend its epsilon on noise alone.
SMALLEST_CLIP = 1e-30
_hints_of = lru_cache(typing.get_type_hints)

# Tags: what a setting influences.
Trait = Literal[
    "images",  # which images and labels there are, and how they look
    "owners",  # which images an owner has, and which of them are held out
    "clients",  # who the clients are, as far as settings tell
    "reading",  # where real data are and how to read them
    "mechanism",  # decides the epsilons in advance: part of a `Plan`
    "of_client",  # a deployed client's own, which no server sets
    "stays",  # never leaves a server: a place on it, or a secret
    "free",  # decides nothing of what a run learns
    "path",  # names a file or folder
    "machine",  # where a run lies and what computes it
]


def option(
    default: Any,
    group: str,
    text: str,
    *,
    traits: tuple[Trait, ...] = (),
    choices: tuple[str, ...] = (),
    **limits: float,
) -> Any:
    """Declares a setting: a field of `RunConfig` that people set.

    Args:
        default: the default of the setting.
        group: the group of the help.
        text: its help.
        traits: what hangs on it.
        choices: the values that a text may have.
        **limits: of a number: at_least, at_most, above, below, zero_or_at_least.
    """
    own = {"group": group, "traits": traits, "help": text, "choices": choices}
    return field(default=default, metadata=own | limits)


def flag(
    default: Any,
    text: str,
    *,
    names: tuple[str, ...] = (),
    metavar: str | None = None,
    **limits: Any,
) -> Any:
    """Declares a field of what one command is asked for, and the flag that sets it.

    Args:
        default: the default of the field; `dataclasses.MISSING` where it must be given.
        text: the flag's help.
        names: the names of the flag, where they are not the field's.
        metavar: the word for an argument, which has a place and no flag; "" for its own
            name.
        **limits: as of `option`.
    """
    own = {"help": text, "names": names, "metavar": metavar}
    return field(default=default, metadata=own | limits)


def entry(default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declares a field that a file or the code sets: its errors name no flag.

    Args:
        default: the default of the field; left out where it must be given.
        **limits: as of `option`, traits and choices too.
    """
    return field(default=default, metadata={"is_entry": True} | limits)


def again(of: Any, name: str, *default: Any) -> Any:
    """Declares an inherited field again, with another default or type.

    Args:
        of: the class that has it.
        name: the name of the field.
        *default: in place of the field's own.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(of)}
    spec = specs[name]
    # A default that is given may be None, so it cannot be told by that.
    chosen, *_ = (*default, spec.default)
    return field(default=chosen, metadata=spec.metadata)


def scalar_type(annotation: Any) -> tuple[type, bool]:
    """Returns the scalar type of a field's annotation and whether it may be unset."""
    if isinstance(annotation, types.UnionType):
        return typing.get_args(annotation)[0], True
    return annotation, False


# Of a whole number. No more fits into a message of Flower or an array of numpy.
MOST_BITS = 63
MOST_BITS_SHOWN = 1000


def coerced(name: str, annotation: Any, value: Any) -> Any:
    """Returns a setting's value in its own type, None for unset.

    Raises:
        UserError: a value of another type.
    """
    kind, optional = scalar_type(annotation)
    if optional and (value is None or value == ""):
        return None
    if value is None or (value == "" and kind is not str):
        raise UserError(f"{name} is unset: give --{name.replace('_', '-')}")
    # TOML and JSON have 1 where 1.0 is meant. But a bool is an int in Python, and no
    # number that somebody means.
    is_bool = isinstance(value, bool)
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        # Python prints no number of many thousand digits.
        shown = f"about 2^{value.bit_length() - 1}"
        if value.bit_length() < MOST_BITS_SHOWN:
            shown = shortened(str(value))
        raise UserError(f"{name} = {shown}: give at most 2^63 - 1")
    if kind is float and isinstance(value, int) and not is_bool:
        return float(value)
    if not isinstance(value, kind) or (is_bool and kind is not bool):
        raise UserError(f"{name} = {value!r}: it must be of type {kind.__name__}")
    if isinstance(value, str):
        check_utf8(name, value)
    if isinstance(value, str) and "\0" in value:  # no name of a file has one
        raise UserError(
            f"{name} = {shortened(repr(value))}: it contains the character 0; leave "
            "that out"
        )
    return value


def coerce_fields(values: Any) -> None:
    """Gives every scalar field of a dataclass its own type, and checks its range.

    Raises:
        UserError: a value of another type, or outside its range.
    """
    hints = _hints_of(values.__class__)
    for spec in dataclasses.fields(values):
        hint = hints[spec.name]
        kind, optional = scalar_type(hint)
        if kind in (str, int, float, bool, Path):
            value = getattr(values, spec.name)
            # In a file an empty text is no way to leave a limit out, as for a flag.
            is_empty = value == "" and kind is not str
            if is_empty or (value is None and not optional):
                problem = f"must be of type {kind.__name__}"
                raise UserError(f"{spec.name} = {value!r}: {problem}")
            # The dataclasses are frozen, and this is part of their construction.
            object.__setattr__(values, spec.name, coerced(spec.name, hint, value))
    check_ranges(values)


def check_ranges(values: Any) -> None:
    """Checks every field of a dataclass that is set against its declared range.

    Raises:
        UserError: one is outside its range.
    """
    for spec in dataclasses.fields(values):
        if (value := getattr(values, spec.name)) is not None:
            check_range(spec, value)


def refuse(values: Any, problems: Iterable[Problem]) -> None:
    """Refuses fields that contradict each other: with the first problem, if any.

    Args:
        values: has the fields.
        problems: a check's; `fedgs.config.checks` has examples.

    Raises:
        UserError: names the field, its value and the remedy.
    """
    for name, text in problems:
        value = getattr(values, name)
        if isinstance(value, str):
            quoted = repr(value)
        elif isinstance(value, tuple):  # of phases, as people write them
            quoted = ",".join(map(str, cast(tuple[Any, ...], value)))
        else:
            quoted = str(value)
        if value is None:
            shown = "is unset"
        else:
            shown = f"= {shortened(quoted, MOST_CHARACTERS)}"
        raise UserError(f"{name} {shown}: {text}")


def shortened(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """Returns a text for an error message, cut where it is long."""
    if len(text) <= most:
        return text
    return f"{text[:most]}..."


def _is_zero_or_at_least(value: float, limit: float) -> bool:
    return value == 0 or value >= limit


def check_range(spec: "Field[Any]", value: Any) -> None:
    """Checks a value against the range that `option` or `flag` declared.

    Raises:
        UserError: outside the range.
    """
    limits = spec.metadata
    # The last name of a flag is its long one: --output of "-o", "--output".
    flag = f"--{spec.name.replace('_', '-')}"
    if limits.get("names"):
        flag = limits["names"][-1]
    name = flag.strip("-").replace("-", "_")
    if limits.get("is_entry") or limits.get("metavar") is not None:
        give = "give"  # an entry of a file and an argument have no flag
    else:
        give = f"give {flag}"
    choices = limits.get("choices")
    if choices and value not in choices:
        names = ", ".join(choices)
        raise UserError(f"{name} = {value!r}: {give} one of {names}")
    # Comparisons with NaN are all false, so no limit below would refuse it.
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} = {value}: {give} a finite number")
    for key, holds, words in (
        ("at_least", operator.ge, "at least"),
        ("at_most", operator.le, "at most"),
        ("above", operator.gt, "a number above"),
        ("below", operator.lt, "a number below"),
        ("zero_or_at_least", _is_zero_or_at_least, "0, or at least"),
    ):
        limit = limits.get(key)
        if limit is not None and not holds(value, limit):
            raise UserError(f"{name} = {value}: {give} {words} {limit:.10g}")


def flag_words(name: str, value: Any) -> list[str]:
    """Returns the words of a command line that set a setting.

    >>> flag_words("num_rounds", 3), flag_words("download", False)
    (['--num-rounds', '3'], ['--no-download'])
    """
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        if value:
            return [f"--{flag}"]
        return [f"--no-{flag}"]
    return [f"--{flag}", str(value)]
