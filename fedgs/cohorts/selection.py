"""How cohorts are selected: thresholds, answers and what all of it costs.

First a run trains the classifier (`fedgs.methods.cohort_classifier`). Then every client
knows its own accuracy and no other, and thresholds divide them; see `Selection` for
what is asked of a client. In a simulation this process divides all clients
(`divided`), across machines each node its own (`fedgs.methods.cohort_counts`).

A folder of a simulated selection holds:

    selected.txt  above.txt  rest.txt    the cohorts, unless empty
    cohorts.json                         thresholds, counts, privacy
    plan.json                            settings of data and selection
    classifier/                          the run folder of the classifier
    asked                                is there once the clients have been asked

Source: Augenstein et al., "Generative models for effective ML on private,
decentralized datasets", ICLR 2020, section 5; GS-WGAN, appendix C.2.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.cohorts.selection_settings import (
    ABOVE,
    CLIP_BOUND,
    MEMBERSHIP_EPSILON,
    REST,
    SEARCH_STEPS,
    SELECTED,
    STATED_DELTA,
    Selection,
    Thresholds,
)
from fedgs.config.phases import SMALLEST_SHARE
from fedgs.config.plugins import COHORT_CLASSIFIER, COHORT_COUNTS
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, reject, wrap_error
from fedgs.files import read_json, write_json
from fedgs.privacy.accountant import VALID, Statement
from fedgs.privacy.selection_cost import SelectionCost
from fedgs.randomness import secret, stream

# Files and folders of a selection; see the module.
PLAN = "plan.json"
ASKED_FILE = "asked"
CLASSIFIER = "classifier"
LOOSE_BOUND = 1e6  # longer than any update of a few steps: of what is not private
_THEOREM = "exact Gaussian composition, shifted by randomised response"


def refuse_decided(given: Mapping[str, Any], decided: Iterable[str]) -> None:
    """Refuses settings that a selection decides, which it would pass over.

    Args:
        given: the settings of the run that the user has given.
        decided: names of those that the selection decides.

    Raises:
        UserError: names them.
    """
    # A budget beside the noise would stop the classifier's rounds, and not bound what
    # the selection costs as a whole.
    target = {"target_epsilon": given.get("target_epsilon")}
    reject(target, "the selection states its cost by --noise-per-clip; leave out")
    twice = {name: given.get(name) for name in decided}
    reject(twice, "the selection decides this setting; leave out")


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
    selection: Thresholds,
    num_clients: int,
    num_nodes: int,
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
        UserError: the selection is not private, or has hardly any noise.
    """
    if selection.noise_per_clip is None:
        raise UserError(
            "noise_per_clip is unset: clients on other machines are selected privately "
            "only; give --noise-per-clip, such as 2"
        )
    # In units of mu^2 of a round of the classifier; at most a tenth of all.
    of_a_count = selection.noise_per_clip**2 / num_clients
    share = of_a_count * selection.num_questions * len(selection.bounds)
    if share < SMALLEST_SHARE:
        raise UserError(
            f"noise_per_clip = {selection.noise_per_clip:g}: so little noise protects "
            "nobody; give --noise-per-clip a larger number, such as 2"
        )
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


# ------------------------------------------------------------------ cohorts


def divided(
    selection: Selection,
    accuracies: NDArray[np.float64],
) -> tuple[dict[str, float], list[str]]:
    """Divides all clients of a simulation.

    Privacy: in private mode releases (epsilon, delta)-DP output; event: the counts and
    randomised responses of `Selection.cost`. Else reads private data; the cohorts are
    published.

    Args:
        selection: the settings.
        accuracies: one for each client, shape (K,), NaN of one that holds out nothing.

    Returns:
        The thresholds, by the names of `Thresholds.bounds`, and each client's cohort.
    """
    num_clients = len(accuracies)
    cost = selection.cost(num_clients)
    noise = stream(secret(), "cohorts/counts")  # of the operating system's entropy
    counts: list[Sequence[float]] = []
    for _ in range(selection.num_questions - 1):
        asked = thresholds_after(selection, num_clients, counts)
        found = [(accuracies <= limit).sum() for limit in asked.values()]
        row = np.array(found, np.float64)
        if cost is not None:
            row += noise.normal(0, cost.count_noise_std, len(row))
        counts.append(row.tolist())
    thresholds = thresholds_after(selection, num_clients, counts)
    cohorts = [membership(accuracy, thresholds) for accuracy in accuracies]
    if selection.is_private:
        # The server knows the seed of the run: with it, it could undo the responses.
        rng = random.SystemRandom()
        options = selection.cohorts
        cohorts = [randomise(own, options, MEMBERSHIP_EPSILON, rng) for own in cohorts]
    return thresholds, cohorts


def membership(accuracy: float, thresholds: Mapping[str, float]) -> str:
    """Returns the cohort of a client.

    Privacy: reads private data; output private.

    Args:
        accuracy: in [0, 1], or NaN of a client that holds out nothing.
        thresholds: by the names of `Thresholds.bounds`; selected is who does not exceed
            `below`, above is who exceeds `above`, at least as large.

    >>> limits = {"below": 0.5, "above": 0.9}
    >>> [membership(a, limits) for a in (0.5, 0.9, 0.91, math.nan)]
    ['selected', 'rest', 'above', 'rest']
    """
    if accuracy <= thresholds.get("below", -math.inf):
        return SELECTED
    if accuracy > thresholds.get("above", math.inf):
        return ABOVE
    return REST  # NaN is neither


def randomise(
    cohort: str,
    cohorts: Sequence[str],
    epsilon: float,
    rng: random.Random,
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


def thresholds_after(
    selection: Thresholds,
    num_clients: int,
    counts: Sequence[Sequence[float]],
) -> dict[str, float]:
    """Returns the thresholds that are asked next; after the search, those it found.

    Percentiles are searched for by bisections on [0, 1], side by side. With few images
    per client many have the same accuracy, and no threshold may be near.

    Privacy: post-processing of the counts.

    Args:
        selection: the settings.
        num_clients: K.
        counts: how many clients did not exceed the thresholds of each step of the
            search before, oldest first; at most `SEARCH_STEPS`.

    Returns:
        By the names of `Thresholds.bounds`, in their order.

    >>> accuracies = np.arange(200) / 200
    >>> selection = Thresholds(below=25, above=50, are_percentiles=True)
    >>> counts = []
    >>> for _ in range(SEARCH_STEPS):
    ...     asked = thresholds_after(selection, 200, counts)
    ...     counts.append([(accuracies <= limit).sum() for limit in asked.values()])
    >>> thresholds_after(selection, 200, counts)
    {'below': 0.24609375, 'above': 0.49609375}
    """
    bounds = selection.bounds
    if not selection.are_percentiles:
        return bounds
    found: dict[str, float] = {}
    for column, (name, percentile) in enumerate(bounds.items()):
        own = [row[column] for row in counts]
        found[name] = _searched(percentile / 100 * num_clients, own)
    # Ties or noise may swap them.
    if len(counts) == SEARCH_STEPS and len(found) == 2:
        found["above"] = max(found.values())
    return found


def _searched(target: float, counts: Sequence[float]) -> float:
    """Returns the next accuracy of a bisection, or at its end the nearest it asked.

    Args:
        target: how many clients should not exceed it.
        counts: how many did not exceed each accuracy so far.
    """
    low = 0.0
    high = 1.0
    # How far off each accuracy was.
    asked: list[tuple[float, float]] = []
    for count in counts:
        middle = (low + high) / 2
        asked.append((abs(count - target), middle))
        if count > target:
            high = middle
        else:
            low = middle
    if len(counts) < SEARCH_STEPS:
        return (low + high) / 2
    return min(asked)[1]


# ------------------------------------------------------------------ statements


def statements(
    selection: Selection,
    cost: SelectionCost | None,
    public: Sequence[str] = (),
) -> tuple[Statement, ...]:
    """Returns the guarantee of a private selection by itself; nothing if not private.

    Args:
        selection: the settings.
        cost: the cost of the releases that there were.
        public: what it supposes to be public, as in `RunConfig`.
    """
    if cost is None:
        return ()
    rows: list[Statement] = []
    for adversary, relation in itertools.product(_ADVERSARIES, _RELATIONS):
        conditions = [_ADVERSARIES[adversary]]
        if adversary == "server":
            conditions.append(_SERVER_LEARNS[selection.are_percentiles])
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
    "release": "adversary: it sees the classifier after every round, every "
    "threshold that was asked for with its noisy count, and the cohorts, and not the "
    "clients' messages",
    "server": "adversary: it is an honest but curious server, and sees each client's "
    "update with only that client's share of the noise, and comparisons without any",
}
_SERVER_LEARNS = {  # whether percentiles are asked for
    False: "only the membership is protected from it (randomised response)",
    True: "not even the membership is protected from it: the comparisons of a "
    "percentile tell it every cohort that a percentile bounds, exactly",
}
_RELATIONS = {
    "replace-one": "relation: one client's whole data set is replaced by any other",
    "zero-out": "relation: one client contributes zero updates and the answers of a "
    "client without images, and its place stays",
}


def _conditions(cost: SelectionCost) -> tuple[str, ...]:
    return (
        f"a client takes part in at most {cost.num_releases} rounds of a public "
        "schedule; no amplification by sampling is claimed",
        f"updates are clipped to C, and their sum has noise {cost.noise_per_clip:g} C, "
        "in equal shares of its clients and fixed in advance",
        f"{cost.num_counts} counts have noise {cost.count_noise_std:g} of numpy's "
        "generator, which is not hardened against floating-point attacks; one "
        f"randomised response has epsilon {cost.membership_epsilon:g}",
        "whether a client drops out does not depend on its data; this covers the "
        "selection, and not the runs on the cohorts",
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
    problem = f"{folder / PLAN}: it cannot be read"
    with wrap_error(Exception, problem, "select the cohorts again"):
        config = ResolvedConfig.from_flat(values["config"])
        return config, Selection(**values["selection"])
