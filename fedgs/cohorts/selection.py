"""How cohorts are selected: settings, questions, answers and what all of it costs.

First a run trains the classifier (`fedgs.methods.cohort_classifier`). Then every client
knows its own accuracy and no other, and the server asks questions that have one of two
or three answers; see `Selection` for what is sent.

A folder of a selection holds:

    selected.txt  above.txt  rest.txt    the cohorts, unless empty
    cohorts.json                         thresholds, counts, privacy
    plan.json                            settings of data and selection
    classifier/                          the run folder of the classifier
    asked                                is there once the questions have begun

Source: Augenstein et al., "Generative models for effective ML on private,
decentralized datasets", ICLR 2020, section 5; GS-WGAN, appendix C.2.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgs.cohorts.selection_settings import (
    ABOVE,
    CLIP_BOUND,
    REST,
    SEARCH_STEPS,
    SELECTED,
    STATED_DELTA,
    Selection,
    Thresholds,
)
from fedgs.config.plugins import COHORT_CLASSIFIER, COHORT_COUNTS
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, wrap_error
from fedgs.files import read_json, write_json
from fedgs.privacy.accountant import VALID, Statement
from fedgs.privacy.selection_cost import SelectionCost
from fedgs.randomness import secret, stream

# Files and folders of a selection; see the module.
PLAN = "plan.json"
ASKED_FILE = "asked"
CLASSIFIER = "classifier"
OUTCOME = "outcome.json"  # of a simulation
# A question and its details -> the answers of all clients, in the order of the data.
Ask = Callable[[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]
LOOSE_BOUND = 1e6  # longer than any update of a few steps: of what is not private
# Thresholds of cohorts that are not wanted: no accuracy is beyond them.
NOBODY_BELOW = -1.0
NOBODY_ABOVE = 2.0
_THEOREM = "exact Gaussian composition, shifted by randomised response"


def training_settings(selection: Selection, num_clients: int) -> dict[str, Any]:
    """Returns what a selection decides of the run that trains its classifier.

    m participants are on m nodes, which add the noise of the sum in equal shares:
    z C = sqrt(m) 2 C noise_multiplier. Without privacy there is none, and the bound
    restricts nothing.

    Args:
        selection: the settings.
        num_clients: K.
    """
    per_round = min(selection.clients_per_round, num_clients)
    if selection.noise_per_clip is None:
        clip_bound = LOOSE_BOUND
        noise_multiplier = 0.0
    else:
        clip_bound = CLIP_BOUND
        noise_multiplier = selection.noise_per_clip / (2 * math.sqrt(per_round))
    return {
        "phases": COHORT_CLASSIFIER,
        "num_rounds": selection.num_rounds,
        "client_selection": "balanced",
        "clients_per_round": per_round,
        "clients_per_node": 1,
        "node_sizes": None,
        "clip_bound": clip_bound,
        "noise_multiplier": noise_multiplier,
    }


def deployed_settings(
    selection: Thresholds, num_clients: int, num_nodes: int
) -> dict[str, Any]:
    """Returns what a private selection decides of the deployed run that makes it.

    All clients train in every round, and then all are counted. The N nodes add noise in
    equal shares: z C = sqrt(N) 2 C noise_multiplier. A count has sqrt(K) / 2, as in a
    simulation, or more.

    Args:
        selection: the settings.
        num_clients: K.
        num_nodes: N.

    Raises:
        UserError: the selection is not private.
    """
    if selection.noise_per_clip is None:
        raise UserError(
            "noise_per_clip is unset: clients on other machines are selected privately "
            "only; give --noise-per-clip, such as 2"
        )
    # In units of mu^2 of a round of the classifier; at most a tenth of all.
    of_a_count = selection.noise_per_clip**2 / num_clients
    share = of_a_count * selection.num_questions * len(selection.bounds)
    share = min(share, selection.num_rounds / 9)
    training = f"{COHORT_CLASSIFIER}*{selection.num_rounds}"
    counting = f"{COHORT_COUNTS}*{selection.num_questions}:{share}"
    return {
        "phases": f"{training},{counting}",
        "num_rounds": selection.num_rounds + selection.num_questions,
        "client_selection": "all",
        "clip_bound": CLIP_BOUND,
        "noise_multiplier": selection.noise_per_clip / (2 * math.sqrt(num_nodes)),
        "below": selection.below,
        "above": selection.above,
        "are_percentiles": selection.are_percentiles,
    }


# ------------------------------------------------------------------ questions


def ask_cohorts(folder: Path, weights: bytes, ask: Ask) -> dict[str, Any]:
    """Finds thresholds, and asks every client for its cohort.

    Privacy: in private mode releases (epsilon, delta)-DP output; event:
    `Selection.cost`. Else reads private data; the cohorts are published.

    Args:
        folder: of the selection.
        weights: of the trained classifier, in safetensors.
        ask: asks all clients.

    Returns:
        low and high, the thresholds (None where there is no such cohort), and
        cohorts, one for each client in the order of the data.
    """
    config, selection = read_plan(folder)
    # Before the first question: a second answer would cost again.
    (folder / ASKED_FILE).touch()
    ask("measure", {"weights": weights})
    low, high = _thresholds(selection, config.num_clients, ask)
    limits = {"low": NOBODY_BELOW, "high": NOBODY_ABOVE}
    if low is not None:
        limits["low"] = low
    if high is not None:
        limits["high"] = high
    cohorts = [str(answer["cohort"]) for answer in ask("join", limits)]
    return {"low": low, "high": high, "cohorts": cohorts}


def _thresholds(
    selection: Selection, num_clients: int, ask: Ask
) -> tuple[float | None, float | None]:
    """Returns the accuracies that divide the cohorts, found where needed."""
    low = selection.below
    high = selection.above
    if percentiles := selection.percentiles:

        def count(thresholds: Sequence[float]) -> list[float]:
            return noisy_counts(selection, num_clients, ask, thresholds)

        # One for each percentile that is set.
        limits = find_thresholds(percentiles, num_clients, count)
        if low is not None:
            low = limits[0]
        if high is not None:
            high = limits[-1]
    if low is not None and high is not None:
        high = max(low, high)  # ties or noise may swap them
    return low, high


def noisy_counts(
    selection: Selection, num_clients: int, ask: Ask, thresholds: Sequence[float]
) -> list[float]:
    """Returns how many clients' accuracies are at most each threshold."""
    answers = ask("compare", {"thresholds": list(thresholds)})
    bits = np.array([answer["is_at_most"] for answer in answers])  # (K, thresholds)
    counts = bits.sum(0).astype(float)
    if (cost := selection.cost(num_clients)) is not None:
        rng = stream(secret(), "cohorts/counts")  # of the operating system's entropy
        counts += rng.normal(0, cost.count_noise_std, len(counts))
    return counts.tolist()


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
    if accuracy > high:
        return ABOVE
    return REST  # NaN is neither


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
    if rng.random() < keep:
        return cohort
    return rng.choice(others)


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
    if not percentiles:
        return []
    counts: list[Sequence[float]] = []
    for _ in range(SEARCH_STEPS):
        counts.append(count(searched(percentiles, num_clients, counts)))
    return searched(percentiles, num_clients, counts)


def searched(
    percentiles: Sequence[float], num_clients: int, counts: Sequence[Sequence[float]]
) -> list[float]:
    """Returns what `find_thresholds` asks next, and after its last step what it found.

    Privacy: post-processing of the counts.

    Args:
        percentiles: as there.
        num_clients: K.
        counts: of the steps before, oldest first.
    """
    found: list[float] = []
    for i, percentile in enumerate(percentiles):
        target = percentile / 100 * num_clients
        low = 0.0
        high = 1.0
        # How far off each accuracy was.
        asked: list[tuple[float, float]] = []
        for row in counts:
            middle = (low + high) / 2
            asked.append((abs(row[i] - target), middle))
            if row[i] > target:
                high = middle
            else:
                low = middle
        if len(counts) < SEARCH_STEPS:
            found.append((low + high) / 2)
        else:
            found.append(min(asked)[1])
    return found


# ------------------------------------------------------------------ statements


def statements(
    selection: Selection, cost: SelectionCost | None, public: Sequence[str] = ()
) -> tuple[Statement, ...]:
    """Returns the guarantee of a private selection by itself; nothing if not private.

    Args:
        selection: the settings.
        cost: of the releases that there were.
        public: what it supposes to be public, as in `RunConfig`.
    """
    if cost is None:
        return ()
    rows: list[Statement] = []
    for adversary, relation in itertools.product(_ADVERSARIES, _RELATIONS):
        conditions = [_ADVERSARIES[adversary]]
        if adversary == "server":
            conditions.append(_SERVER_LEARNS[bool(selection.percentiles)])
        conditions.append(_RELATIONS[relation])
        conditions.extend(_conditions(cost))
        conditions.extend(public)
        row = Statement(
            label=VALID,
            unit="client",
            relation=relation,
            epsilon=cost.composed(adversary, relation).epsilon(STATED_DELTA),
            delta=STATED_DELTA,
            theorem=_THEOREM,
            conditions=tuple(conditions),
            adversary=adversary,
            client_selection="balanced",
            num_rounds=selection.num_rounds,
        )
        rows.append(row)
    return tuple(rows)


_ADVERSARIES = {
    "release": "adversary: sees the classifier after every round, every threshold "
    "asked with its noisy count, and the cohorts; not the clients' messages",
    "server": "adversary: honest but curious server; it sees each client's update with "
    "that client's share of the noise only, and comparisons without any",
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
        f"updates are clipped to C; noise {cost.noise_per_clip:g} C on their sum, in "
        "equal shares of its clients, fixed in advance",
        f"{cost.num_counts} counts with noise {cost.count_noise_std:g}, of numpy's "
        "generator, not hardened against floating-point attacks; one randomised "
        f"response of epsilon {cost.membership_epsilon:g}",
        "drop-out is independent of data; covers the selection, not the runs on the "
        "cohorts",
    )


# ------------------------------------------------------------------ plan


def write_plan(folder: Path, config: ResolvedConfig, selection: Selection) -> None:
    """Writes what clients and server read: the settings of data and selection."""
    flat = config.to_flat() | {"counted": config.counted}
    values = {"config": flat, "selection": dataclasses.asdict(selection)}
    write_json(folder / PLAN, values)


def read_plan(folder: Path) -> tuple[ResolvedConfig, Selection]:
    """Reads what `write_plan` wrote.

    Raises:
        UserError: missing or malformed.
    """
    values: dict[str, Any] = read_json(folder / PLAN)
    problem = f"{folder / PLAN}: cannot be read"
    with wrap_error(Exception, problem, "select the cohorts again"):
        config = ResolvedConfig.from_flat(values["config"])
        return config, Selection(**values["selection"])
