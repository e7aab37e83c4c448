"""What the clients of one node permit, and what they have released so far.

Every release is charged to the clients' own durable count before it is computed. Beyond
their limits it is refused, and then nothing is computed and nothing is counted.
"""

import dataclasses
from collections.abc import Sequence

from fedgs.config.run_config import ResolvedConfig
from fedgs.methods.base import Request
from fedgs.methods.schedule import clients_of
from fedgs.privacy.client_ledger import ClientLedger, release_event
from fedgs.privacy.client_limits import Limits
from fedgs.privacy.ledger import Event


class NodeLimits:
    """The limits of one node's clients, and the count of their releases.

    Attributes:
        permitted: what the clients agree to, from their own file.
        count: what they have released, over all runs that share this count.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        hosted: range,
        permitted: Limits,
        count: ClientLedger,
        source: str,
    ) -> None:
        """Touches no file yet.

        Args:
            config: the resolved configuration.
            hosted: the run's numbers of the node's clients.
            permitted: what these clients agree to.
            count: the number of these clients.
            source: names the run and the node in the count; see `source_of`.
        """
        self.permitted = permitted
        self.count = count
        self._config = config
        self._hosted = hosted
        self._source = source
        self._is_run_permitted = False

    @property
    def least_nodes(self) -> int:
        """How many nodes of an aggregation must add noise, this one included."""
        return self.permitted.shares(self._config)

    def check_run(self) -> None:
        """Refuses a run outside the clients' limits.

        It looks once, because neither the limits nor the run's settings change.

        Raises:
            ClientRefused: names the setting.
        """
        if not self._is_run_permitted:
            self.permitted.check_run(self._config)
            self._is_run_permitted = True

    def check_request(self, request: Request) -> None:
        """Refuses what `charge` would refuse now; counts nothing.

        Raises:
            ClientRefused: outside the clients' limits.
            UserError: the count is broken.
        """
        self.check_run()
        event = self.event_of(request)
        if event is not None:
            self.count.check(event, self.permitted)

    def check_round(self, round: int) -> None:
        """Refuses a release of all hosted clients in a round; counts nothing.

        Raises:
            ClientRefused: outside the clients' limits.
            UserError: the count is broken.
        """
        self.check_run()
        self.count.check(self._event(round, self._hosted), self.permitted)

    def charge(self, event: Event) -> None:
        """Counts a release; once this returns the count is on the disk.

        Args:
            event: the event that `event_of` returned.

        Raises:
            ClientRefused: outside the clients' limits; nothing is counted.
            UserError: the count is broken, or something was already masked under the
                event's context.
        """
        self.count.charge(event, self.permitted)

    def event_of(self, request: Request) -> Event | None:
        """Returns the release that a request asks for; None if no client takes part."""
        participants = clients_of(request.participants, self._hosted)
        if not participants:
            return None
        event = self._event(request.round, participants)
        return dataclasses.replace(event, source=self._source)

    def _event(self, round: int, participants: Sequence[int]) -> Event:
        # Only this node's clients and noise: the count knows nothing of other nodes.
        return release_event(
            config=self._config,
            round=round,
            positions=[client - self._hosted.start for client in participants],
            num_clients=len(self._hosted),
            shares=self.least_nodes,
        )
