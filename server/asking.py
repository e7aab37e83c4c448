"""Asks nodes and collects their answers, again where a message got lost.

A node that fails or answers wrongly is asked once more. What the network, Flower or a
restart of the node lost is asked again until the deadline: the same request gets the
same bytes, so that asking twice costs no privacy. Late and repeated replies are thrown
away. Only `push_messages`, `pull_messages` and `get_nodes` of the grid are used.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Protocol

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedgs.errors import UserError
from fedgs.event_log import log_event
from fedgs.federation.training import Stop
from fedgs.mechanism.sanitizer import SanitizedGradients

POLL_SHARE = 0.02  # of the time waited: polling takes the workers' cores
TRIES = 2  # of a node that fails or answers wrongly
PAUSES = (0.0, 1.0, 5.0)  # before a lost request is sent again, the last one repeated
RESEND_SECONDS = 60.0  # without any sign of a deployed node; doubles each time
WATCH_SECONDS = 2.0  # between looks which deployed nodes are online
LOG_SECONDS = 30.0  # between lines that say who is waited for
# Flower's ErrorCode: MESSAGE_, REPLY_MESSAGE_, NODE_UNAVAILABLE, CLIENT_APP_CRASHED.
LOST_CODES = frozenset({3, 4, 5, 8})

Decode = Callable[[Message, int], SanitizedGradients | None]


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
        return min(self.least + POLL_SHARE * waited, self.most)


IN_MEMORY = Polling(least=0.002, most=0.05)
OVER_HTTP = Polling(least=0.05, most=0.5)  # a request costs the SuperLink about 4 ms


class Watch(Protocol):
    """Knows which nodes of a deployment are online; `server.roll_call.RollCall`."""

    @property
    def active_since(self) -> Mapping[int, str]:
        """Address -> when the node was last activated, of those online."""
        ...

    def step(self) -> None:
        """Looks again; never waits."""
        ...


class LostReply(UserError):
    """Flower says that a request or its reply is gone."""


@dataclass
class Asked:
    """A node that has not answered yet.

    Attributes:
        send_at: when to send the request (again), by the monotonic clock.
        tries: wrong answers so far.
        losses: lost messages so far.
        resend: seconds until the request is sent again without any sign.
        active_since: of the node when the request was sent.
        gone_since: when it was first seen to be offline, None while online.
    """

    send_at: float
    tries: int = 0
    losses: int = 0
    resend: float = RESEND_SECONDS
    active_since: str = ""
    gone_since: float | None = None


@dataclass
class Asking:
    """Asks nodes over a grid; one instance for a whole run.

    Attributes:
        grid: of the Flower run.
        addresses: node -> Flower's address; may change while asking.
        polling: how often to look for replies.
        watch: asked about every `WATCH_SECONDS`; None in a simulation.
        title: returns what a node is called.
        reasons: node -> why it did not answer the last request.
    """

    grid: Grid
    addresses: Mapping[int, int]
    polling: Polling
    watch: Watch | None = None
    title: Callable[[int], str] = "node {}".format
    reasons: dict[int, str] = field(default_factory=dict)
    _late: set[str] = field(default_factory=set)  # messages nobody waits for any more

    def ask(
        self,
        nodes: Sequence[int],
        make: Callable[[int], Message],
        decode: Decode,
        deadline: float = math.inf,
        patience: float = math.inf,
        stop: Stop | None = None,
        waiting: Callable[[Sequence[int]], None] = lambda nodes: None,
    ) -> tuple[list[SanitizedGradients], list[int]]:
        """Sends a request to the nodes; returns the answers and who gave none.

        Privacy: post-processing of DP output.

        Args:
            nodes: whom to ask.
            make: returns the message for a node.
            decode: checks a reply of a node; raises `UserError` if it is wrong.
            deadline: by the monotonic clock.
            patience: seconds that a node may be offline before it is given up.
            stop: when set, gives up whoever has not answered yet.
            waiting: is told who has not answered, at every look at a deployment.
        """
        self.reasons.clear()
        started = logged = watched = time.monotonic()
        pending = {node: Asked(send_at=started) for node in nodes}
        owners: dict[str, int] = {}
        answers: list[SanitizedGradients] = []
        failed: list[int] = []
        while pending and (now := time.monotonic()) < deadline:
            if stop is not None and stop.is_set():
                break
            if self.watch:
                waiting(sorted(pending))
            due = [node for node, asked in pending.items() if asked.send_at <= now]
            self._send(due, make, pending, owners)
            replies = self._pull(owners)
            for reply, node in replies:
                if node in pending:
                    if self._take(reply, node, pending[node], decode, answers):
                        del pending[node]
                    elif pending[node].tries >= TRIES:
                        failed.append(node)
                        del pending[node]
            if self.watch and time.monotonic() - watched > WATCH_SECONDS:
                watched = time.monotonic()
                failed += self._look(self.watch, pending, patience)
            if self.watch and time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                log(INFO, "waiting for %s", ", ".join(map(self.title, sorted(pending))))
            if pending and not replies:
                self._sleep(started, deadline)
        waiting(())
        self._late.update(owners)
        for node in pending:
            self.reasons.setdefault(node, f"{self.title(node)}: no answer in time")
        return answers, sorted([*failed, *pending])

    def _sleep(self, started: float, deadline: float) -> None:
        now = time.monotonic()
        pause = min(self.polling.pause(now - started), max(deadline - now, 0.001))
        # Only the grid of `clients.fast_simulation` has it.
        getattr(self.grid, "wait_for_reply", time.sleep)(pause)

    def _send(
        self,
        due: Sequence[int],
        make: Callable[[int], Message],
        pending: Mapping[int, Asked],
        owners: dict[str, int],
    ) -> None:
        """Sends what is due; a node without an address is tried again later."""
        now = time.monotonic()
        for node in due:
            asked = pending[node]
            asked.send_at = math.inf
            if self.watch:
                asked.send_at, asked.resend = now + asked.resend, 2 * asked.resend
                address = self.addresses.get(node, -1)
                asked.active_since = self.watch.active_since.get(address, "")
        there = [node for node in due if node in self.addresses]
        for node in set(due) - set(there):
            self._again(node, pending[node], "has not joined")
        if not there:
            return
        ids = list(self.grid.push_messages([make(node) for node in there]))
        ids += [""] * (len(there) - len(ids))
        for name, node in zip(ids, there, strict=True):
            if name:
                owners[name] = node
            else:
                self._again(node, pending[node], "cannot be reached")

    def _pull(self, owners: dict[str, int]) -> list[tuple[Message, int]]:
        """Returns new replies with their nodes; throws away the late ones."""
        names = [*owners, *self._late]
        found: Iterable[Message] = self.grid.pull_messages(names) if names else []
        replies = []
        for reply in found:
            name = reply.metadata.reply_to_message_id
            if name in owners:
                replies.append((reply, owners.pop(name)))
            self._late.discard(name)
        return replies

    def _take(
        self,
        reply: Message,
        node: int,
        asked: Asked,
        decode: Decode,
        answers: list[SanitizedGradients],
    ) -> bool:
        """Returns whether a reply is a valid answer; else says when to ask again."""
        try:
            if self.watch and reply.has_error() and reply.error.code in LOST_CODES:
                raise LostReply(f"Flower error {reply.error.code}")
            answer = decode(reply, node)
        except LostReply as error:
            self._again(node, asked, str(error))
        except UserError as error:
            log(WARNING, "%s", error)
            log_event("refused", node=self.title(node), outcome=str(error))
            self.reasons[node] = str(error)
            asked.tries, asked.send_at = asked.tries + 1, time.monotonic()
        else:
            self.reasons.pop(node, None)
            if answer is not None:
                answers.append(answer)
            return True
        return False

    def _again(self, node: int, asked: Asked, reason: str) -> None:
        """Has a lost request sent again after a pause."""
        pause = PAUSES[min(asked.losses, len(PAUSES) - 1)]
        asked.losses += 1
        asked.send_at = time.monotonic() + pause
        self.reasons[node] = f"{self.title(node)}: {reason}"

    def _look(
        self, watch: Watch, pending: dict[int, Asked], patience: float
    ) -> list[int]:
        """Asks again who was restarted; gives up who has been offline for too long."""
        watch.step()
        now, gone = time.monotonic(), []
        for node, asked in pending.items():
            since = watch.active_since.get(self.addresses.get(node, -1))
            if since is None:
                asked.gone_since = asked.gone_since or now
                if now - asked.gone_since > patience:
                    gone_for = f"offline for {patience:g} s"
                    self.reasons[node] = f"{self.title(node)}: {gone_for}"
                    gone.append(node)
                continue
            if asked.gone_since is not None or since != asked.active_since:
                log(INFO, "%s is back: asking it again", self.title(node))
                asked.send_at = now
            asked.gone_since = None
        for node in gone:
            del pending[node]
        return gone
