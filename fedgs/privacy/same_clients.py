"""Runs on the same clients: each client has one number in all of them.

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


class Run(NamedTuple):
    """One run as its folder records it.

    Attributes:
        config: the run's resolved configuration.
        events: its ledger's, in order.
        selections: private ones of its cohort, which its target includes.
    """

    config: RunConfig
    events: Sequence[Event]
    selections: Sequence[SelectionCost] = ()


def numbered_alike(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs with a deployment's clients numbered as in the first one.

    A run numbers the clients of its nodes in the order in which the nodes were named.

    Raises:
        UserError: other nodes, or nodes of other sizes.
    """
    first, *others = runs
    place = {client: number for number, client in enumerate(_deployed(first.config))}
    result = [first]
    for run in others:
        clients = _deployed(run.config)
        if set(clients) != place.keys():
            found = " and ".join(_nodes(own.config) for own in (first, run))
            raise UserError(
                f"nodes = {found}: clients of a deployment are matched by the name of "
                "their node and its number of clients; account the runs apart"
            )
        numbers = [place[client] for client in clients]
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
    return ", ".join(f"{name} ({size})" for name, size in sizes.items()) or "unset"


def _renumbered(event: Event, numbers: Sequence[int]) -> Event:
    if event.participants == "all":
        return event
    clients = sorted(numbers[client] for client in event.participants)
    return replace(event, participants=tuple(clients))
