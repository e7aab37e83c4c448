"""Runs on the same clients: one number for each client, and what their rows suppose.

Source: docs/privacy.md, "Which theorem may be used when".
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.privacy.ledger import Event
from fedgs.privacy.selection_cost import SelectionCost

DISCRETE = (
    "noise: it is an exact discrete Gaussian on integers, and is accounted as a "
    "Gaussian whose standard deviation is smaller by a part in 8 million"
)


class Run(NamedTuple):
    """One run as its folder records it.

    Attributes:
        config: the run's resolved configuration.
        events: its ledger's, in order.
        selections: private ones of its cohort, which its target includes.
        planned_rounds: as if so many had been planned; None: those of `config`.
    """

    config: RunConfig
    events: Sequence[Event]
    selections: Sequence[SelectionCost] = ()
    planned_rounds: int | None = None


def numbered_alike(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs with a deployment's clients numbered as in the first one.

    A run numbers the clients of its nodes in the order in which the nodes were named.

    Raises:
        UserError: other nodes, or nodes of other sizes.
    """
    first, *others = runs
    number_of = {
        client: number for number, client in enumerate(_deployed(first.config))
    }
    result = [first]
    for run in others:
        clients = _deployed(run.config)
        if set(clients) != number_of.keys():
            # Who is who cannot be told, and a wrong match would add up too little.
            found = f"{_nodes(first.config)} and {_nodes(run.config)}"
            raise UserError(
                f"nodes = {found}: clients of a deployment are matched by the name of "
                "their node and its number of clients; state the runs one by one"
            )
        numbers = [number_of[client] for client in clients]
        events = run.events
        if numbers != sorted(numbers):
            events = [_renumbered(event, numbers) for event in events]
        result.append(run._replace(events=events))
    return result


def _deployed(config: RunConfig) -> list[tuple[str, int]]:
    """Returns node and place of every client of a deployment, in the run's order."""
    return [
        (name, place)
        for node, name in enumerate(config.node_names)
        for place in range(len(config.hosting.hosted(node)))
    ]


def _nodes(config: RunConfig) -> str:
    """Returns the nodes of a deployment with their numbers of clients, in words."""
    sizes = Counter(name for name, _ in _deployed(config))
    if not sizes:
        return "unset"
    return ", ".join(f"{name} ({size})" for name, size in sizes.items())


def _renumbered(event: Event, numbers: Sequence[int]) -> Event:
    if event.participants == "all":
        return event
    clients = sorted(numbers[client] for client in event.participants)
    # Sorted, because an event names its participants in increasing order.
    return replace(event, participants=tuple(clients))


def conditions_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """Returns the conditions that what runs released adds to every row.

    Privacy: public; of settings and ledgers.

    Args:
        runs: at least one.
    """
    masked = [event.is_discrete for run in runs for event in run.events]
    return (*_about(runs), *_embeddings(runs), *_aggregated(masked))


def _about(runs: Sequence[Run]) -> list[str]:
    """Returns the conditions that runs, and several runs, add to every row."""
    # Dictionaries keep the order and say each condition once.
    units = dict.fromkeys(run.config.unit_condition for run in runs)
    public: dict[str, None] = {}
    for run in runs:
        public |= dict.fromkeys(run.config.public_conditions)
    conditions = [*units, *public]
    if len(runs) == 1:
        return conditions
    # Releases of one run may depend on those of another: composition is adaptive.
    conditions.append(f"{len(runs)} runs are on the same clients, so mu^2 adds up")
    if any(run.config.node_names for run in runs):
        conditions.append(
            "a client of a deployment is known by the name of its node and its place "
            "there, so the nodes must keep their data"
        )
    engines = {run.config.engine for run in runs}
    if engines == {"local", "flower"}:
        conditions.append(
            "in a local run one curator sees everything, so there is no row server or "
            "secagg"
        )
    return conditions


def _embeddings(runs: Sequence[Run]) -> list[str]:
    """Returns the condition that embeddings and counts add to every row."""
    releases = [event.release for run in runs for event in run.events]
    count = releases.count("embedding") + releases.count("count")
    if count == 0:
        return []
    # Of these rounds C, B and the noise are other ones than those of the settings.
    return [
        f"{count} of {len(releases)} events release embeddings or counts (B = 1), "
        "each with its own C and noise; the kinds, weights and clip bounds were fixed "
        "in advance"
    ]


def _aggregated(masked: Sequence[bool]) -> list[str]:
    """Returns the conditions that secure aggregations add to every row."""
    count = sum(masked)
    if count == 0:
        return []
    if count == len(masked):
        return [DISCRETE]
    return [
        f"{count} of {len(masked)} events are of secure aggregations; in them the row "
        "server counts the same noise as secagg, against bounded computing power",
        DISCRETE,
    ]
