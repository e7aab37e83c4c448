"""A simulation without Ray: every node in this process, as Flower would ask it.

A grid of this process calls the ClientApp directly; every message goes through Flower's
own serialisation, as it would on a network.
"""

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore.task_identity import TaskIdentity

from clients import node_cache as state
from clients.client_app import app as client_app
from fedgs.runs.run_folder import RunFolder
from runs import Report, generator, ignore
from server.strategy import FederatedGan
from tiny import FULL_PARTICIPATION, MOMENTS, WITH_RELEASES

MODES = {
    "selected": {"clients_per_round": 2},
    "full participation": FULL_PARTICIPATION,
    "silos that differ": {**FULL_PARTICIPATION, "node_sizes": "1,4,1"},
    "with releases": WITH_RELEASES,
    "moments": MOMENTS,
    "trains without answering": {
        "clients_per_round": 1,
        "discriminator_training": "every_round",
        "clients_per_node": 3,
    },
}
# Of a run on Flower whose rounds cost little.
SHORT = {"engine": "flower", "checkpoint_every": 2}
SHORT |= {"discriminator_steps": 1}
Spoil = Callable[[Any, Message, Message], Message | None]
Make = Callable[[Message, Message], Message | None]


class FakeGrid(Grid):
    """All nodes of a simulation, who are known by their index.

    Args:
        num_nodes: how many supernodes there are.
        spoil: what the network makes of a reply: (who, request, reply) -> reply, or
            None for no reply at all.
        num_workers: workers that nodes hop between from message to message.
        app: answers the messages.

    Attributes:
        contexts: one per node, as Flower keeps them.
        replies: every reply as it was sent: (type of the request, who, reply).
        waiting: replies that nobody has pulled yet, by the request's id.
    """

    def __init__(
        self,
        num_nodes: int,
        spoil=None,
        num_workers: int = 1,
        app: ClientApp = client_app,
    ) -> None:
        # What Flower sets in a process that it starts, and messages carry.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.client_app, self.numbers = app, itertools.count()
        # Flower's ids are random, and not in the order of the nodes.
        self.indices = {(7919 * (i + 1)) % 1009: i for i in range(num_nodes)}
        every = {"num-partitions": num_nodes}
        self.contexts = {
            address: Context(1, address, {**every, "partition-id": i}, RecordDict(), {})
            for address, i in self.indices.items()
        }
        self.workers: list[dict] = [{} for _ in range(num_workers)]
        self.spoil = spoil or (lambda who, request, reply: reply)
        self.replies: list[tuple[str, Any, Message]] = []
        self.waiting: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return sorted(self.indices)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            names.append(name := f"message-{next(self.numbers)}")
            message.metadata.__dict__["_message_id"] = name
            if (reply := self.deliver(as_on_a_network(message))) is not None:
                self.waiting[name] = as_on_a_network(reply)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ready = [name for name in message_ids if name in self.waiting]
        return [self.waiting.pop(name) for name in ready]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Is what Flower's own loop uses."""
        return self.pull_messages(self.push_messages(messages))

    def deliver(self, request: Message) -> Message | None:
        """Has whom a request is for answer it; returns what the network makes of it."""
        self.workers.append(worker := self.workers.pop(0))  # each has its turn
        return self.ask(self.indices[request.metadata.dst_node_id], worker, request)

    def ask(self, who: Any, memory: dict, request: Message) -> Message | None:
        """Has a process with some memory answer a request."""
        state.workers.clear()
        state.workers.update(memory)
        context = self.contexts[request.metadata.dst_node_id]
        reply = self.client_app(message=request, context=context)
        memory.update(state.workers)
        state.workers.clear()
        self.replies.append((request.metadata.message_type, who, reply))
        return self.spoil(who, request, reply)

    # Parts of Flower's interface that no strategy of ours uses.

    def _unused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    run = property(_unused)
    set_run = create_message = _unused


def as_on_a_network(message: Message) -> Message:
    return message_from_proto(message_to_proto(message))


def start(folder: RunFolder, grid: FakeGrid, report: Report = ignore) -> Result:
    return FederatedGan(folder, report, threading.Event()).start(grid)


def product(folder: RunFolder) -> list[str]:
    return [generator(folder.path, n) for n in ("generator", "generator_ema")]


def round_of(request: Message) -> int | None:
    """The round that a request is of; None at the roll call."""
    asked = dict(request.content["fedgs"]).get("round")
    return None if asked is None else int(str(asked))


def spoil_at(where: dict[tuple[Any, int | None], Make]) -> Spoil:
    """Spoils replies by who sends them and the round: (request, reply) -> reply."""

    def spoil(who: Any, request: Message, reply: Message) -> Message | None:
        make = where.get((who, round_of(request)))
        return reply if make is None else make(request, reply)

    return spoil
