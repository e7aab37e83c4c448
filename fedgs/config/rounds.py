"""What all rounds of a run release: the terms of each, as its method states them.

A method answers `terms(round)` for every round, and may change noise, clip bound or B
from one round to the next. Plans, limits of clients, budgets and the check of a ledger
read all rounds here, once, so that they agree, and so that a method which answered
otherwise when asked again could not change what was counted.

This module imports no tensor library.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from fedgs.config.settings import IMAGE_SIZES, Settings
from fedgs.config.terms import Terms
from fedgs.errors import UserError

# A method is asked for the terms of one round after the other: more would take minutes.
MOST_ROUNDS = 1_000_000


class RoundsAlike(NamedTuple):
    """Consecutive rounds of the same terms.

    Attributes:
        first: the number of the first of them, from 1.
        num_rounds: the number of rounds.
        terms: the terms of each of these rounds.
    """

    first: int
    num_rounds: int
    terms: Terms


@lru_cache(maxsize=32)
def rounds_alike(config: Settings) -> tuple[RoundsAlike, ...]:
    """Returns all rounds of a run in their order, those of the same terms together.

    Privacy: public.

    Raises:
        UserError: too many rounds, or a setting that the terms need is unset.
    """
    check_rounds(config)
    found: list[RoundsAlike] = []
    first = 1
    for terms, alike in itertools.groupby(_terms_in_order(config)):
        num_rounds = sum(1 for _ in alike)
        found.append(RoundsAlike(first=first, num_rounds=num_rounds, terms=terms))
        first += num_rounds
    return tuple(found)


def _terms_in_order(config: Settings) -> Iterator[Terms]:
    """Asks each round of a run for its terms, one after the other."""
    starts = config.first_rounds
    for index in range(len(config.phases)):
        own = config.at_phase(index)
        rounds_of_phase = starts[index + 1] - starts[index]
        for round in range(1, rounds_of_phase + 1):
            yield own.phase_terms(round)


def check_rounds(config: Settings) -> None:
    """Refuses a run whose rounds are too many to be asked for their terms.

    Raises:
        UserError: names the number.
    """
    if config.num_rounds > MOST_ROUNDS:
        raise UserError(
            f"num_rounds = {config.num_rounds}: give --num-rounds at most {MOST_ROUNDS}"
        )


def terms_at(config: Settings, round: int) -> Terms:
    """Returns the terms of a round, the same however often they are asked for.

    Args:
        config: the run's configuration.
        round: the number of the round, from 1.
    """
    if not 1 <= round <= config.num_rounds:
        return config.terms(round)  # of the nearest phase, as `at_round` has it
    rounds = rounds_alike(config)
    place = bisect.bisect_right(rounds, round, key=lambda alike: alike.first) - 1
    return rounds[place].terms


def with_open_settings(config: Settings) -> Settings:
    """Returns settings whose terms can be read, where noise or the data's are unset.

    The noise multiplier is then 1, and terms are compared with that. The number of
    classes and the shape of images change the shape of a release, and not its cost.
    """
    found: dict[str, float | int] = {}
    if not config.noise_multiplier:
        found["noise_multiplier"] = 1.0
    if config.num_classes is None:
        found["num_classes"] = 1
    if config.image_size is None:
        found["image_size"] = IMAGE_SIZES[0]
    if config.image_channels is None:
        found["image_channels"] = 1
    return dataclasses.replace(config, **found)
