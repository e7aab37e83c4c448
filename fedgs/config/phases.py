"""Phases: a run is a list of them, each of one method.

In a TOML file a phase is a table, with the method's own settings if they are not the
run's:

    [[phases]]
    method = "means"
    share = 0.2

    [[phases]]
    method = "gs-wgan"
    rounds = 40
    share = 0.8
    batch_size = 16

In one text, phases are METHOD, METHOD:SHARE or METHOD*ROUNDS:SHARE, with commas:

>>> read_phases("means:0.2,gs-wgan*40:0.8")[1]
Phase(method='gs-wgan', rounds=40, share=0.8, settings=())

This module imports no tensor library.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from fedgs.config.fields import Scalar, check_range, coerced, entry, shortened
from fedgs.config.plugins import METHODS
from fedgs.errors import UserError, wrap_error

MOST_PHASES = 100
SMALLEST_SHARE = 1e-6
MOST_TEXT = 10_000  # characters; a text may come from a hostile server
REMEDY = "give METHOD, METHOD:SHARE or METHOD*ROUNDS:SHARE, comma-separated"


@dataclass(frozen=True)
class Phase:
    """One phase as the settings describe it.

    Attributes:
        method: a name of `METHODS`, or the place of another one, module:object.
        rounds: the number of its rounds. None means all rounds that the other phases
            leave, or the one round of a method that releases once.
        share: its part of the privacy that the run spends (mu^2), relative to other
            phases. None means what its releases cost at the run's `noise_multiplier`.
        settings: the method's settings that hold in this phase only, as names and
            values.
    """

    method: str
    rounds: int | None = entry(None, at_least=1)
    share: float | None = entry(None, at_least=SMALLEST_SHARE, at_most=1e6)
    settings: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        """Refuses numbers of another type or outside their range.

        Raises:
            UserError: names the phase's method.
        """
        fields = type(self).__dataclass_fields__
        for name, kind in (("rounds", int), ("share", float)):
            try:
                value = coerced(name, kind | None, getattr(self, name))
                if value is not None:
                    check_range(fields[name], value)
            except UserError as error:
                text = f"phases: {shortened(self.method)}: {error}"
                raise UserError(text) from None
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        """Returns the phase as one text, without settings of its own."""
        if self.rounds is None:
            rounds = ""
        else:
            rounds = f"*{self.rounds}"
        if self.share is None:
            share = ""
        else:
            share = f":{self.share!r}"
        return f"{self.method}{rounds}{share}"


def read_phases(value: object) -> tuple[Phase, ...]:
    """Returns the phases that a setting describes.

    Args:
        value: one text, the text of a JSON list, or a list of phases, of texts or of
            mappings.

    Raises:
        UserError: a malformed value, or none or too many phases.
    """
    if isinstance(value, str):
        return _read_text(value)
    if not isinstance(value, list | tuple):
        raise UserError(f"phases = {value!r}: {REMEDY}")
    return _checked(tuple(map(_read_one, cast(Iterable[Any], value))))


# Cached, because every copy of a configuration reads its phases again.
@lru_cache(maxsize=64)
def _read_text(text: str) -> tuple[Phase, ...]:
    if len(text) > MOST_TEXT:
        raise UserError(
            f"phases = {shortened(text)!r}: it has too many characters; give fewer "
            "phases"
        )
    if text.startswith("["):
        # Brackets in brackets in brackets end in the second error.
        errors = (ValueError, RecursionError)
        with wrap_error(errors, f"phases = {shortened(text)!r}", REMEDY):
            value = json.loads(text)
        return read_phases(value)
    return _checked(tuple(map(_read_word, text.split(","))))


def _checked(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    if not 1 <= len(phases) <= MOST_PHASES:
        raise UserError(f"phases: {len(phases)} of them; give 1 to {MOST_PHASES}")
    return phases


def _read_one(value: Any) -> Phase:
    if isinstance(value, Phase):
        return value
    if isinstance(value, str):
        return _read_word(value)
    if not isinstance(value, Mapping):
        raise UserError(f"phases: {shortened(repr(value))}: {REMEDY}")
    table = cast(Mapping[str, Any], value)
    method = table.get("method")
    if not isinstance(method, str):
        raise UserError("phases: a phase has no method; give method = a name")
    own = dict(table)
    for name in ("method", "rounds", "share"):
        own.pop(name, None)
    # Nested tables have no place in `Phase`, which must be hashable to be cached by.
    for name, setting in own.items():
        if not isinstance(setting, str | int | float | bool):
            problem = "must be a text, a number or true or false"
            shown = f"{shortened(name)} = {shortened(repr(setting))}"
            raise UserError(f"phases: {shown}: {problem}")
    return Phase(
        method=method,
        rounds=table.get("rounds"),
        share=table.get("share"),
        settings=tuple(sorted(own.items())),  # in whatever order: the same phase
    )


def _read_word(word: str) -> Phase:
    """Reads METHOD, METHOD:SHARE or METHOD*ROUNDS:SHARE; a place has a colon too."""
    name, colon, share = word.strip().rpartition(":")
    # In "module:object" no number follows the colon, unless after another one.
    is_known = name.partition("*")[0] in METHODS
    has_share = bool(colon) and (_is_number(share) or is_known)
    if not has_share:
        name = word.strip()
    name, star, rounds = name.partition("*")
    num_rounds: int | None = None
    weight: float | None = None
    with wrap_error(ValueError, f"phases = {shortened(word)!r}", REMEDY):
        if star:
            num_rounds = int(rounds)
        if has_share:
            weight = float(share)
        return Phase(method=name, rounds=num_rounds, share=weight)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def written(phases: Sequence[Phase]) -> str:
    """Returns the text that `read_phases` reads as these phases."""
    # The short form has no place for settings of a phase.
    if not any(phase.settings for phase in phases):
        return ",".join(map(str, phases))
    tables: list[dict[str, Any]] = []
    for phase in phases:
        table: dict[str, Any] = {"method": phase.method}
        if phase.rounds is not None:
            table["rounds"] = phase.rounds
        if phase.share is not None:
            table["share"] = phase.share
        tables.append(table | dict(phase.settings))
    return json.dumps(tables, separators=(",", ":"))
