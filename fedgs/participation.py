"""How often a client takes part: which theorem applies, on which condition.

- Participation count: the count of the busiest client decides. Always valid.
- Binomial mixture: under uniform selection a client's count is random, Eqs. 3 and 4 of
  `fedgs.gaussian`. Valid while all events are alike; see `Exposure.why_count`.

Neither claims amplification by sampling.

Source: docs/privacy.md, "Which theorem may be used when", 1 and 3.
"""

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgs.config import UserError
from fedgs.gaussian import Law, binomial_law, fixed_law
from fedgs.ledger import Event

COUNT_THEOREM = "no amplification: participation count"
MIXTURE_THEOREM = "no amplification: Binomial mixture of participation counts"
_MIXTURE = (
    "mixture: uniform selection of {} of {} clients by a seed that was drawn at "
    "random, independent of data (for a chosen --seed, that is the user's promise); "
    "{}, m, B and the noise are fixed in advance; selection by availability, or a stop "
    "because of a client's count, voids it"
)


def planned_law(
    selection: str, num_rounds: int, num_clients: int, clients_per_round: int
) -> tuple[Law, str, str]:
    """Returns the law of a client's number of rounds in a run that is planned.

    all, or m = K: n = T. balanced: n = ceil(m T / K). uniform: n ~ Binomial(T, m / K).

    Privacy: public.

    Args:
        selection: client_selection, as in `RunConfig`.
        num_rounds: T, at least 1.
        num_clients: K, at least 1.
        clients_per_round: m, from 1 to K.

    Returns:
        The law, the name of the theorem, and the condition under which it applies.

    Source: docs/privacy.md, "Which theorem may be used when", 1 and 3.
    """
    if selection == "all" or clients_per_round == num_clients:
        why = f"count: every client takes part in all {num_rounds} rounds"
        return fixed_law(num_rounds), COUNT_THEOREM, why
    if selection == "balanced":
        most = math.ceil(clients_per_round * num_rounds / num_clients)
        why = f"count: a client takes part at most {most} times; repeats count again"
        return fixed_law(most), COUNT_THEOREM, why
    why = _MIXTURE.format(clients_per_round, num_clients, f"{num_rounds} rounds")
    law = binomial_law({1: num_rounds}, clients_per_round / num_clients)
    return law, MIXTURE_THEOREM, why


class Exposure:
    """What the events so far have cost each client, and how often it was asked.

    Privacy: public.

    Attributes:
        mu_squared: the sum of 1 / z^2 over a client's releases, float64 of shape
            (costs, clients); one row for each cost that `add` is given.
        first: the first event, None before it.
        first_costs: 1 / z^2 of its release, float64 of shape (costs,).
        selections: every client_selection seen.
        is_seeded: whether any noise was seeded, hence not private.
        nodes: the fewest nodes of an event whose noise counts.
        no_mixture: why the Binomial mixture does not hold, "" while it does.
        attempts: how often each round was tried.
    """

    def __init__(self) -> None:
        self.mu_squared: npt.NDArray[np.float64] = np.zeros((0, 0))
        self.first: Event | None = None
        self.first_costs: npt.NDArray[np.float64] = np.zeros(0)
        self.selections: set[str] = set()
        self.is_seeded, self.nodes, self.no_mixture = False, 0, ""
        self.attempts: Counter[int] = Counter()
        self._participants: dict[int, Any] = {}

    def why_count(self, event: Event) -> str:
        """Returns why the mixture does not hold with this event; "" if it does.

        It needs uniform selection, the same noise, C, B, cohort and nodes throughout,
        and the same clients in all attempts of a round.

        Privacy: public.
        """
        if self.no_mixture:
            return self.no_mixture
        if event.client_selection != "uniform":
            return f"the selection is {event.client_selection}"
        if constants_of(self.first or event) != constants_of(event):
            return "noise, C, B, the cohort or the nodes changed"
        known = self._participants.get(event.round, event.participants)
        return "" if known == event.participants else "a repeated round asked others"

    def add(self, event: Event, costs: npt.NDArray[np.float64]) -> None:
        """Counts one event.

        Privacy: public.

        Args:
            event: the releases of one attempt of a round.
            costs: 1 / z^2 of it, float64 of shape (costs,), at least 0; inf is no
                noise.

        Raises:
            UserError: the number of clients differs from that of earlier events.
        """
        self.no_mixture = self.why_count(event)
        if self.first is None:
            self.first, self.first_costs = event, costs
            self.nodes = event.counted_nodes
            self.mu_squared = np.zeros((len(costs), event.num_clients))
        if event.num_clients != self.first.num_clients:
            problem = f"earlier events have {self.first.num_clients}; account apart"
            raise UserError(f"num_clients = {event.num_clients}: {problem}")
        self.mu_squared[:, columns_of(event)] += costs[:, None]
        self.nodes = min(self.nodes, event.counted_nodes)
        self.selections.add(event.client_selection)
        self.is_seeded |= event.noise_source == "seeded"
        self._participants.setdefault(event.round, event.participants)
        self.attempts[event.round] += 1

    def law(self, row: int) -> tuple[Law, float, str, str]:
        """Returns what the events cost a client, for one row of `mu_squared`.

        Privacy: public.

        Returns:
            The law of the number of releases, z of one release, the name of the
            theorem, and the condition under which it applies. Where counts decide, the
            law is the largest mu^2 of a client, with z = 1.

        Source: docs/privacy.md, "Which theorem may be used when", 1.
        """
        first = self.first
        if first is None or self.no_mixture:
            worst = self.mu_squared[row].max(initial=0.0) if first else 0.0
            because = f" because {self.no_mixture}" if first else ""
            why = f"count: the client with the largest realised mu^2 decides{because}"
            why += "; schedule and noise were not chosen after seeing answers"
            return fixed_law(worst), 1.0, COUNT_THEOREM, why
        rate = first.num_participants / first.num_clients
        law = binomial_law(Counter(self.attempts.values()), rate)
        ratio = float(self.first_costs[row] ** -0.5)
        events = f"{self.attempts.total()} events in {len(self.attempts)} rounds"
        why = _MIXTURE.format(first.num_participants, first.num_clients, events)
        return law, ratio, MIXTURE_THEOREM, why


def columns_of(event: Event) -> Any:
    """Returns the index of the columns of `Exposure.mu_squared` that an event adds to.

    Privacy: public.
    """
    return slice(None) if event.participants == "all" else list(event.participants)


def constants_of(event: Event) -> tuple[float, ...]:
    """Returns the numbers that must not change while the Binomial mixture holds.

    Privacy: public.
    """
    cohort = (event.num_participants, event.num_clients, event.counted_nodes)
    return (event.noise_std, event.clip_bound, event.batch_size, *cohort)
