"""Sends a request to nodes and yields their replies; again where a message got lost.

A node that fails or answers wrongly gets the request once more. What the network,
Flower or a restart of the node lost is sent again until the deadline: the same request
gets the same bytes, so that sending twice costs no privacy. Late and repeated replies
are thrown away. Only `push_messages`, `pull_messages` and `get_nodes` of the grid are
used.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING

import httpx
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedgs.event_log import log_event
from fedgs.round.run import Stop
from server.progress import RunProgress
from server.roll_call import LOG_SECONDS, RollCall

REPLY_POLL_SHARE = 0.02  # of the time waited: polling takes the workers' cores
TRIES = 2  # of a node that fails or answers wrongly
PAUSES = (0.0, 1.0, 5.0)  # before a lost request is sent again, the last one repeated
RESEND_SECONDS = 60.0  # without any sign of a deployed node; doubles each time
ONLINE_SECONDS = 2.0  # between looks which deployed nodes are online
# Flower's ErrorCode: MESSAGE_, REPLY_MESSAGE_, NODE_UNAVAILABLE, CLIENT_APP_CRASHED.
LOST_CODES = frozenset({3, 4, 5, 8})


class SilentStrategy(Strategy):
    """A Flower strategy without Flower's evaluation, of clients or of the server."""

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Sends nothing: clients evaluate nothing, for that would leave a client."""
        return []

    def aggregate_evaluate(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> MetricRecord | None:
        """Has nothing to aggregate."""
        return None


@dataclass(frozen=True)
class Polling:
    """How often the grid is asked for replies: it costs what computes or answers.

    Attributes:
        least, most: seconds between two looks.
    """

    least: float
    most: float

    def pause(self, waited: float) -> float:
        """Returns how long to sleep after having waited so long in vain."""
        return min(self.least + REPLY_POLL_SHARE * waited, self.most)


IN_MEMORY = Polling(least=0.002, most=0.05)
OVER_HTTP = Polling(least=0.05, most=0.5)  # a request costs the SuperLink about 4 ms


@dataclass
class Pending:
    """A node whose valid answer is outstanding.

    Attributes:
        request: the message for it; its address is that of the time of sending.
        send_at: when to send the request (again), by the monotonic clock.
        is_sent: whether it was sent before.
        refusals: wrong answers so far.
        losses: lost messages so far.
        resend: seconds until the request is sent again without any sign.
        active_since: of the node when the request was sent.
        gone_since: when it was first seen to be offline, None while online.
    """

    request: Message
    send_at: float
    is_sent: bool = False
    refusals: int = 0
    losses: int = 0
    resend: float = RESEND_SECONDS
    active_since: str = ""
    gone_since: float | None = None


@dataclass
class Messenger:
    """Messages between the server and its nodes; one instance for a whole run.

    Attributes:
        grid: the grid of the Flower run.
        addresses: node -> Flower's address; may change meanwhile.
        polling: how often to look for replies.
        progress: is told what is sent, refused and waited for.
        roll: knows which deployed nodes are online; None in a simulation.
        reasons: node -> why it gave no valid answer to the last request; public texts.
    """

    grid: Grid
    addresses: Mapping[int, int]
    polling: Polling
    progress: RunProgress
    roll: RollCall | None = None
    reasons: dict[int, str] = field(default_factory=dict)
    _pending: dict[int, Pending] = field(default_factory=dict)
    _awaited: dict[str, int] = field(default_factory=dict)  # message -> node
    _replied: dict[str, int] = field(default_factory=dict)  # message -> node
    _late: dict[str, int] = field(default_factory=dict)  # of earlier requests
    _is_wary: bool = False  # since a reply that cannot be read

    def send_and_receive(
        self,
        requests: Mapping[int, Message],
        timeout: float = math.inf,
        patience: float = math.inf,
        stop: Stop | None = None,
    ) -> Iterator[Message]:
        """Sends each node its request; yields replies as they come, until all did.

        Whoever takes a reply checks it before the next one: a node whose reply was
        given to `refuse` gets its request once more. Then `reasons` says who gave no
        valid answer, and why.

        Args:
            requests: by node.
            timeout: seconds for all of them.
            patience: seconds that a node may be offline before it is given up.
            stop: when set, gives up whoever has not answered yet.
        """
        started = time.monotonic()
        deadline = started + timeout
        watched = started
        logged = started
        self._begin(requests, started)
        while self._pending and time.monotonic() < deadline:
            if stop is not None and stop.is_set():
                break
            if self.roll:
                waiting = sorted(self._pending)
                reasons = {node: self.reasons.get(node, "") for node in waiting}
                self.progress.set_waiting(reasons)
            self._send_due(deadline)
            replies = self._pull()
            for reply in replies:
                yield from self._unless_lost(reply)
            now = time.monotonic()
            if self.roll and now - watched > ONLINE_SECONDS:
                watched = now
                self._follow(self.roll, patience)
            if self.roll and now - logged > LOG_SECONDS:
                logged = now
                outstanding = map(self._title, sorted(self._pending))
                log(INFO, "waiting for answers of %s", ", ".join(outstanding))
            if self._pending and not replies:
                self._sleep(started, deadline)
        self.progress.set_waiting({})
        for node in self._pending:
            self.reasons.setdefault(
                node, f"{self._title(node)}: it did not answer in time"
            )

    def _begin(self, requests: Mapping[int, Message], now: float) -> None:
        """Forgets the requests before these, but for replies that are late."""
        self.reasons.clear()
        # Whoever answers them now answers a question that is over.
        self._late |= self._awaited
        self._awaited = {}
        self._replied = {}
        self._pending = {}
        for node, message in requests.items():
            self._pending[node] = Pending(message, send_at=now)

    def node_of(self, reply: Message) -> int | None:
        """Returns the node whose request a reply answers; by its sender if unknown."""
        node = self._replied.get(reply.metadata.reply_to_message_id)
        if node is not None:
            return node
        for node, address in self.addresses.items():
            if address == reply.metadata.src_node_id:
                return node
        return None

    def refuse(self, node: int, reason: str) -> None:
        """Has a node whose reply is wrong get its request again, at most once.

        Args:
            node: whose reply it was.
            reason: a public text.
        """
        log(WARNING, "%s", reason)
        log_event("refused", node=self._title(node), outcome=reason)
        self.reasons[node] = reason
        self.progress.add_failure(node, reason)
        pending = self._pending.get(node)
        if pending is not None:
            pending.refusals += 1
            pending.send_at = time.monotonic()

    def _unless_lost(self, reply: Message) -> Iterator[Message]:
        """Yields a reply to a pending request; a refused one leaves it pending."""
        node = self._replied[reply.metadata.reply_to_message_id]
        pending = self._pending.get(node)
        if pending is None:
            return  # a repeated reply, to a request that was sent twice
        if self.roll and reply.has_error() and reply.error.code in LOST_CODES:
            self._send_again(
                node, pending, f"Flower lost the message (error {reply.error.code})"
            )
            return
        refusals = pending.refusals
        # Whoever takes it may call `refuse` before this goes on.
        yield reply
        if pending.refusals == refusals:
            self.reasons.pop(node, None)
            del self._pending[node]
        elif pending.refusals >= TRIES:
            del self._pending[node]

    def _sleep(self, started: float, deadline: float) -> None:
        now = time.monotonic()
        left = max(deadline - now, 0.001)
        pause = self.polling.pause(now - started)
        time.sleep(min(pause, left))

    def _send_due(self, deadline: float) -> None:
        """Sends what is due; a node without an address is tried again later."""
        now = time.monotonic()
        due: list[int] = []
        for node, pending in self._pending.items():
            if pending.send_at > now:
                continue
            # Nothing gets lost on one machine: only a deployed node is asked again
            # without a sign.
            pending.send_at = math.inf
            if self.roll:
                pending.send_at = now + pending.resend
                pending.resend *= 2
                address = self.addresses.get(node, -1)
                pending.active_since = self.roll.active_since.get(address, "")
            if node in self.addresses:
                due.append(node)
            else:
                self._send_again(node, pending, "it has not joined")
        if due:
            self._push(due, deadline)

    def _push(self, nodes: Sequence[int], deadline: float) -> None:
        messages = [self._message(node, deadline) for node in nodes]
        names = list(self.grid.push_messages(messages))
        # Flower returns no name, or an empty one, for a message that it did not take.
        names += [""] * (len(nodes) - len(names))
        for name, node in zip(names, nodes, strict=True):
            if name:
                self._awaited[name] = node
            else:
                self._send_again(node, self._pending[node], "it cannot be reached")

    def _message(self, node: int, deadline: float) -> Message:
        """Returns a node's request as a new message to where the node is now."""
        pending = self._pending[node]
        request = pending.request
        if pending.is_sent:
            self.progress.add_resend(node)
        pending.is_sent = True
        # What nobody waits for any more is not delivered to a node that is back.
        left = None
        if self.roll and deadline < math.inf:
            left = max(deadline - time.monotonic(), 1.0)
        kind = request.metadata.message_type
        return Message(request.content, self.addresses[node], kind, ttl=left)

    def _pull(self) -> list[Message]:
        """Returns replies to the last requests; throws away those to earlier ones."""
        # Late ones too: Flower keeps a reply until it is pulled.
        names = [*self._awaited, *self._late]
        replies: list[Message] = []
        for reply in self._pull_readable(names):
            name = reply.metadata.reply_to_message_id
            if name in self._awaited:
                self._replied[name] = self._awaited.pop(name)
                replies.append(reply)
            elif self.roll is not None:
                self.roll.add_late(self._late.get(name), reply)
            self._late.pop(name, None)
        return replies

    def _pull_readable(self, names: list[str]) -> Iterator[Message]:
        """Yields replies; a node whose reply Flower cannot read is asked again later.

        A client may send anything, and Flower then raises instead of giving the others'
        replies: these are asked for again, and from then on each by itself.
        """
        batches: list[list[str]] = []
        if names:
            batches = [names]
        if self._is_wary:
            batches = [[name] for name in names]
        for batch in batches:
            try:
                yield from self.grid.pull_messages(batch)
            except httpx.HTTPError:
                raise
            except Exception as error:
                kind = type(error).__name__
                log(WARNING, "a reply cannot be read (%s) and is asked for again", kind)
                self._is_wary = True
                for name in batch:
                    self._late.pop(name, None)
                    node = self._awaited.pop(name, None)
                    if node is not None and node in self._pending:
                        pending = self._pending[node]
                        self._send_again(node, pending, "its reply cannot be read")

    def _send_again(self, node: int, pending: Pending, reason: str) -> None:
        """Has a lost request sent again after a pause."""
        last = len(PAUSES) - 1
        pause = PAUSES[min(pending.losses, last)]
        pending.losses += 1
        pending.send_at = time.monotonic() + pause
        self.reasons[node] = f"{self._title(node)}: {reason}"

    def _follow(self, roll: RollCall, patience: float) -> None:
        """Sends again to who was restarted; gives up who was offline for too long."""
        roll.step()
        now = time.monotonic()
        for node, pending in list(self._pending.items()):
            address = self.addresses.get(node, -1)  # no node has this one
            since = roll.active_since.get(address)
            if since is None:
                if pending.gone_since is None:
                    pending.gone_since = now
                if now - pending.gone_since > patience:
                    gone_for = f"it was offline for {patience:g} s"
                    self.reasons[node] = f"{self._title(node)}: {gone_for}"
                    del self._pending[node]
                continue
            # Activated anew: the process that had the request is gone, and the request
            # with it.
            was_gone = pending.gone_since is not None
            if was_gone or since != pending.active_since:
                log(INFO, "%s is back, so it is asked again", self._title(node))
                pending.send_at = now
            pending.gone_since = None

    def _title(self, node: int) -> str:
        return self.progress.config.node_title(node)
