"""Who takes part in a round: the schedule, and the nodes that it concerns.

Privacy: independent of the data. It follows from a secret of the run, which no
published file tells: amplification rests on that, nothing else does.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Algorithm 2, line 6.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from fedgs.config.run_config import ResolvedConfig
from fedgs.randomness import stream

Clients = Sequence[int] | Literal["all"]
EVERYONE: Literal["all"] = "all"


def select(config: ResolvedConfig, round: int) -> Clients:
    """Returns the participants of a round, sorted, or "all".

    Privacy: independent of the data; what it follows from is private.

    Source: Algorithm 2, line 6, for `uniform` with m = 1.
    """
    # 6: sample the participants; the same ones in every attempt of a round.
    num_clients = config.num_clients
    count = config.clients_per_round
    if config.client_selection == "all":
        return EVERYONE
    if config.client_selection == "uniform":
        rng = stream(config.schedule_seed, "selection", round)
        chosen = rng.choice(num_clients, size=count, replace=False)
        return tuple(int(client) for client in np.sort(chosen))
    # Else `balanced`: all clients in turn, shuffled anew in each lap.
    lap, start = divmod((round - 1) * count, num_clients)
    seed = config.schedule_seed
    order = _balanced_lap(seed, num_clients, count, lap)
    slots = order[start : start + count]
    num_missing = count - len(slots)
    if num_missing:  # the round runs over into the next lap
        following = _balanced_lap(seed, num_clients, count, lap + 1)
        slots = slots + following[:num_missing]
    return tuple(sorted(slots))


# Cached, because many rounds lie in one lap.
@lru_cache(maxsize=4)
def _balanced_lap(
    seed: int | str,
    num_clients: int,
    count: int,
    lap: int,
) -> tuple[int, ...]:
    """Returns a shuffled order of all clients, used up before the next one starts.

    A round that runs over two laps must not hold a client twice: whoever stands in
    its first part moves behind the others in the second lap. So a lap depends on the
    ones before it, back to the last lap that starts with a round.
    """
    first = lap
    while (first * num_clients) % count:
        first -= 1
    order: list[int] = []
    for number in range(first, lap + 1):
        num_shared = (number * num_clients) % count
        start = len(order) - num_shared
        before = set(order[start:])
        rng = stream(seed, "balanced", number)
        order = rng.permutation(num_clients).tolist()
        order.sort(key=lambda client: client in before)  # stable
    return tuple(order)


def trainees(config: ResolvedConfig, participants: Clients) -> Clients:
    """Returns the clients whose discriminators train in a round of the participants."""
    if config.discriminator_training == "every_round":
        return EVERYONE
    return participants


def clients_of(clients: Clients, hosted: Sequence[int]) -> list[int]:
    """Returns which of a node's hosted clients are meant by a request."""
    if clients == EVERYONE:
        return list(hosted)
    # In the node's own order, whatever a request's is: answers are summed in it.
    wanted = set(clients)
    return [client for client in hosted if client in wanted]


def nodes_of(config: ResolvedConfig, clients: Clients) -> list[int]:
    """Returns the nodes that host the given clients, increasing."""
    if clients == EVERYONE:
        return list(range(config.num_nodes))
    nodes: set[int] = set()
    for client in clients:
        nodes.add(config.hosting.node_of(int(client)))
    return sorted(nodes)
