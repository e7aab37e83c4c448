"""What the events of one run have cost each client, and why a theorem fails for them.

`fedgs.privacy.participation` turns what runs have spent into laws of a client's
releases; `fedgs.privacy.budget` asks before an event whether it still fits.

Source: docs/privacy.md, "Which theorem may be used when".
"""

from collections import Counter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgs.config.amplification_rules import why_not_amplified
from fedgs.errors import UserError
from fedgs.privacy.ledger import Event


class Draw(NamedTuple):
    """One draw of participants and what it cost each of them.

    Attributes:
        participants: as in `Event`.
        cohort: K and m.
        costs: the sum of 1 / z^2 over all attempts of the round, one for each
            adversary.
    """

    participants: tuple[int, ...] | Literal["all"]
    cohort: tuple[int, int]
    costs: tuple[float, ...]

    def plus(self, costs: tuple[float, ...]) -> "Draw":
        """Returns the draw with more costs for the same participants."""
        sums: list[float] = []
        for own, more in zip(self.costs, costs, strict=True):
            sums.append(own + more)
        return self._replace(costs=tuple(sums))

    @property
    def kind(self) -> "DrawKind":
        """What draws are counted by."""
        return self.cohort, self.costs


DrawKind = tuple[tuple[int, int], tuple[float, ...]]


class Spending:
    """What the events of one run have cost each client, and how often it was asked.

    Args:
        selection_hash: of the run's settings; matters beside other runs only.
        largest_node: most clients on one node; matters for amplification only.
        cohort: m, the clients that a draw has; 0 if only the events say it.

    Attributes:
        mu_squared: the sum of 1 / z^2 over a client's releases, float64 of shape
            (costs, clients); one row for each cost that `add` is given.
        first: the first event, None before it.
        selections: every client_selection seen.
        is_seeded: whether any noise was seeded, hence not private.
        nodes: the fewest nodes of an event whose noise counts.
        no_mixture: why the Binomial mixture does not hold, "" while it does.
        no_amplification: why amplification does not hold, "" while it does.
        draws: the draw of each round.
        kinds: how many draws there are of each kind.
        num_events: all attempts of all rounds.
        last_round: the round of the last event, 0 before it.
    """

    def __init__(
        self,
        selection_hash: str = "",
        largest_node: int = 1,
        cohort: int = 0,
    ) -> None:
        """Starts without events."""
        self.selection_hash = selection_hash
        self.largest_node = largest_node
        self.cohort = cohort
        self.mu_squared: npt.NDArray[np.float64] = np.zeros((0, 0))
        self.first: Event | None = None
        self.selections: set[str] = set()
        self.is_seeded = False
        self.nodes = 0
        self.num_events = 0
        self.last_round = 0
        self.no_mixture = ""
        self.no_amplification = ""
        self.draws: dict[int, Draw] = {}
        self.kinds: Counter[DrawKind] = Counter()

    @property
    def num_clients(self) -> int:
        """K, as the events have it; 0 before the first one."""
        _, num_clients = self.mu_squared.shape
        return num_clients

    def why_count(self, event: Event) -> str:
        """Returns why the mixture does not hold with this event; "" if it does.

        It needs uniform selection, the same noise, C, B, cohort and nodes throughout,
        all clients of a draw, and the same ones in all attempts of a round. A round
        that is tried again before any other one may have failed because of who was
        drawn: a node was away, or a client refused. One that is repeated from a
        checkpoint did not.
        """
        if self.no_mixture:
            return self.no_mixture
        if event.client_selection != "uniform":
            return f"client_selection is {event.client_selection}"
        first = self.first or event
        if _constants_of(first) != _constants_of(event):
            return "noise, C, B, the cohort or the nodes changed"
        if event.round == self.last_round:
            return "a round was asked again at once, maybe because of who was drawn"
        return self._why_not_one_draw(event)

    def why_not_amplified(self, event: Event) -> str:
        """Returns why amplification does not hold with this event; "" if it does.

        Noise, C, B and cohort may change from round to round, if that was fixed in
        advance.
        """
        if self.no_amplification:
            return self.no_amplification
        is_seeded = event.noise_source == "seeded"
        of_settings = why_not_amplified(
            event.client_selection,
            event.discriminator_training,
            self.largest_node,
            event.num_participants,
            event.num_clients,
            is_seeded=is_seeded,
        )
        if of_settings:
            return of_settings
        return self._why_not_one_draw(event)

    def _why_not_one_draw(self, event: Event) -> str:
        # A masked round is asked only of nodes that are there. Each client that is left
        # was then not drawn with chance m / K, on which both theorems rest.
        if event.num_participants < self.cohort:
            return "a round was asked of fewer clients than were drawn"
        known = self.draws.get(event.round)
        if known is None:
            return ""
        if known.participants != event.participants:
            return "a repeated round asked other clients"
        return ""

    def draw_with(self, event: Event, costs: tuple[float, ...]) -> Draw:
        """Returns what the draw of the event's round is after the event."""
        known = self.draws.get(event.round)
        if known is not None:
            return known.plus(costs)
        cohort = (event.num_clients, event.num_participants)
        return Draw(event.participants, cohort, costs)

    def kinds_with(self, event: Event, draw: Draw) -> Counter[DrawKind]:
        """Returns `kinds` after an event whose round's draw becomes `draw`."""
        kinds = self.kinds.copy()
        known = self.draws.get(event.round)
        if known is not None:
            kinds[known.kind] -= 1
        kinds[draw.kind] += 1
        # The plus drops kinds of which no draw is left.
        return +kinds

    def add(self, event: Event, costs: tuple[float, ...]) -> None:
        """Counts one event.

        Args:
            event: the releases of one attempt of a round.
            costs: 1 / z^2 of it for each adversary, at least 0; inf is no noise.

        Raises:
            UserError: the number of clients differs from that of earlier events.
        """
        # Before the event counts: both compare it with what was there.
        self.no_mixture = self.why_count(event)
        self.no_amplification = self.why_not_amplified(event)
        if self.first is None:
            self.first = event
            self.nodes = event.counted_nodes
            shape = (len(costs), event.num_clients)
            self.mu_squared = np.zeros(shape)
        known = self.first.num_clients
        if event.num_clients != known:
            raise UserError(
                f"num_clients = {event.num_clients}: earlier events have {known} "
                "clients, so their costs cannot be added; state them one by one"
            )
        # mu^2 adds up over releases, even of answers that depend on earlier ones.
        column = np.array(costs)[:, None]
        self.mu_squared[:, event.positions] += column
        # A guarantee counts the noise of the fewest nodes: less noise is the safe side.
        self.nodes = min(self.nodes, event.counted_nodes)
        self.selections.add(event.client_selection)
        self.is_seeded |= event.noise_source == "seeded"
        self.num_events += 1
        self.last_round = event.round
        draw = self.draw_with(event, costs)
        # Before the draw is stored: the kind that it replaces is looked up.
        self.kinds = self.kinds_with(event, draw)
        self.draws[event.round] = draw


def _constants_of(event: Event) -> tuple[float, ...]:
    """Returns the numbers that must not change while the Binomial mixture holds."""
    return (
        event.noise_std,
        event.is_discrete,
        event.clip_bound,
        event.batch_size,
        event.num_participants,
        event.num_clients,
        event.counted_nodes,
    )
