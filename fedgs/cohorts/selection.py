"""How cohorts are selected: settings, thresholds, answers and what all of it costs.

Every client knows its own accuracy and no other. The server asks questions that have
one of two or three answers; see `Selection` for what is sent.

Source: Augenstein et al., "Generative models for effective ML on private,
decentralized datasets", ICLR 2020, section 5; GS-WGAN, appendix C.2.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedgs.cohorts.selection_settings import (
    ABOVE,
    DELTA,
    REST,
    SEARCH_STEPS,
    SELECTED,
    Selection,
)
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import wrap_error
from fedgs.files import read_json, write_json
from fedgs.privacy.accountant import VALID, Statement
from fedgs.privacy.selection_cost import SelectionCost

PLAN, OUTCOME = "plan.json", "outcome.json"
ARRAYS, CONFIG, WEIGHT = "arrays", "config", "weight"  # keys of messages
NOBODY_BELOW, NOBODY_ABOVE = -1.0, 2.0  # thresholds of cohorts that are not wanted
THEOREM = "exact Gaussian composition, shifted by randomised response"


# ------------------------------------------------------------------ answers


def membership(accuracy: float, low: float, high: float) -> str:
    """Returns the cohort of a client.

    Privacy: reads private data; output private.

    Args:
        accuracy: in [0, 1], or NaN of a client that holds out nothing.
        low: selected is who does not exceed it; `NOBODY_BELOW` for no such cohort.
        high: above is who exceeds it, at least low; `NOBODY_ABOVE` for no such cohort.

    >>> [membership(a, 0.5, 0.9) for a in (0.5, 0.9, 0.91, math.nan)]
    ['selected', 'rest', 'above', 'rest']
    """
    if accuracy <= low:
        return SELECTED
    return ABOVE if accuracy > high else REST


def randomise(
    cohort: str, cohorts: Sequence[str], epsilon: float, rng: random.Random
) -> str:
    """Returns the cohort, or with some probability another one at random.

    Each of the k - 1 others has probability 1 / (e^epsilon + k - 1), the true one
    e^epsilon times that, so that any two clients' answers differ by at most e^epsilon.

    Privacy: releases (epsilon, 0)-DP output; event: one randomised response.

    Args:
        cohort: the true one.
        cohorts: the k possible ones.
        epsilon: above 0.
        rng: `random.SystemRandom()`; another one is for tests.

    Source: Warner, "Randomized response", 1965; Kairouz, Bonawitz and Ramage,
        "Discrete distribution estimation under local privacy", ICML 2016 (k > 2).
    """
    others = [other for other in cohorts if other != cohort]
    keep = 1 / (1 + len(others) * math.exp(-epsilon))
    return cohort if rng.random() < keep else rng.choice(others)


def find_thresholds(
    percentiles: Sequence[float],
    num_clients: int,
    count: Callable[[Sequence[float]], Sequence[float]],
) -> list[float]:
    """Returns the accuracies that about these shares of clients do not exceed.

    Bisections on [0, 1], side by side; of the accuracies asked for a percentile, that
    with the nearest count. With few images per client many have the same accuracy, and
    no threshold may be near.

    Privacy: post-processing of the counts.

    Args:
        percentiles: each above 0 and below 100.
        num_clients: K.
        count: how many clients do not exceed each accuracy, exact or with noise; asked
            `SEARCH_STEPS` times.

    >>> accuracies = [i / 200 for i in range(200)]
    >>> def count(limits):
    ...     return [sum(a <= limit for a in accuracies) for limit in limits]
    >>> find_thresholds([25, 50], 200, count)
    [0.24609375, 0.49609375]
    """
    targets = [percentile / 100 * num_clients for percentile in percentiles]
    ranges = [(0.0, 1.0)] * len(targets)
    asked = [list[tuple[float, float]]() for _ in targets]
    for _ in range(SEARCH_STEPS if targets else 0):
        middles = [(low + high) / 2 for low, high in ranges]
        for i, found in enumerate(count(middles)):
            asked[i].append((abs(found - targets[i]), middles[i]))
            low, high = ranges[i]
            is_above = found > targets[i]
            ranges[i] = (low, middles[i]) if is_above else (middles[i], high)
    return [min(distances)[1] for distances in asked]


# ------------------------------------------------------------------ statements


def statements(selection: Selection, num_clients: int) -> tuple[Statement, ...]:
    """Returns the guarantee of a private selection by itself; nothing if not private.

    Args:
        selection: the settings.
        num_clients: K.
    """
    cost = selection.cost(num_clients)
    if cost is None:
        return ()
    rows: list[Statement] = []
    learns = {"release": (), "server": (_SERVER_LEARNS[bool(selection.percentiles)],)}
    for adversary, relation in itertools.product(_ADVERSARIES, _RELATIONS):
        epsilon = cost.composed(adversary, relation).epsilon(DELTA)
        conditions = (*learns[adversary], _RELATIONS[relation], *_conditions(cost))
        row = Statement(
            *(VALID, "client", relation, epsilon, DELTA, THEOREM),
            (_ADVERSARIES[adversary], *conditions),
            adversary=adversary,
            client_selection="balanced",
            num_rounds=selection.num_rounds,
        )
        rows.append(row)
    return tuple(rows)


_ADVERSARIES = {
    "release": "adversary: sees the classifier after every round, every threshold "
    "asked with its noisy count, and the cohorts; not the clients' messages",
    "server": "adversary: honest but curious server; it adds the noise itself and sees "
    "updates and answers before",
}
_SERVER_LEARNS = {  # whether percentiles are asked for
    False: "only the membership is protected from it (randomised response)",
    True: "not even the membership is protected from it: the comparisons of a "
    "percentile tell it every cohort that a percentile bounds, exactly",
}
_RELATIONS = {
    "replace-one": "relation: a client's whole data set is replaced",
    "zero-out": "relation: a client contributes zero updates and the answers of a "
    "client without images; its slot stays",
}


def _conditions(cost: SelectionCost) -> tuple[str, ...]:
    return (
        f"a client takes part in at most {cost.num_releases} rounds of a public "
        "schedule; no amplification by sampling is claimed",
        f"updates are clipped to C; noise {cost.noise_per_clip:g} C on their sum, "
        "fixed in advance and drawn by Flower from numpy's generator in float "
        "arithmetic: not hardened against floating-point attacks",
        f"{cost.num_counts} counts with noise {cost.count_noise_std:g}; one randomised "
        f"response of epsilon {cost.membership_epsilon:g}",
        "drop-out is independent of data; covers the selection, not the runs on the "
        "cohorts",
    )


# ------------------------------------------------------------------ plan


def write_plan(folder: Path, config: ResolvedConfig, selection: Selection) -> None:
    """Writes what clients and server read: the settings of data and selection."""
    values = {"config": config.to_flat(), "selection": dataclasses.asdict(selection)}
    write_json(folder / PLAN, values)


def read_plan(folder: Path) -> tuple[ResolvedConfig, Selection]:
    """Reads what `write_plan` wrote.

    Raises:
        UserError: missing or malformed.
    """
    values: dict[str, Any] = read_json(folder / PLAN)
    problem = f"{folder / PLAN}: cannot be read"
    with wrap_error((KeyError, TypeError), problem, "select the cohorts again"):
        config = ResolvedConfig.from_flat(values["config"])
        return config, Selection(**values["selection"])
