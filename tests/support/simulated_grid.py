"""A simulation without Ray: every node in this process, as Flower would ask it.

A grid of this process calls the ClientApp directly; every message goes through Flower's
own serialisation, as it would on a network.
"""

import threading
from collections.abc import Callable, Iterable

from flwr.app import Context, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid

from clients import workers as state
from clients.client_app import app as client_app
from fedgs.runs.run_folder import RunFolder
from runs import Report, ignore
from server.strategy import GsWgan
from tiny import FULL_PARTICIPATION, STAGED

MODES = {
    "selected": {"clients_per_round": 2},
    "full participation": FULL_PARTICIPATION,
    "silos that differ": {**FULL_PARTICIPATION, "node_sizes": "1,4,1"},
    "surrogate": {**FULL_PARTICIPATION, "surrogate_steps": 2},
    "staged": STAGED,
    "trains without answering": {
        "clients_per_round": 1,
        "discriminator_training": "every_round",
        "clients_per_node": 3,
    },
}
Spoil = Callable[[int, Message, Message], Message | None]


class InProcessGrid(Grid):
    """What our tests do not use of Flower's interface."""

    @property
    def run(self):
        raise NotImplementedError

    def set_run(self, run) -> None:
        raise NotImplementedError

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


class FakeGrid(InProcessGrid):
    """All nodes in this process.

    Args:
        num_nodes: how many supernodes there are.
        spoil: what the network makes of a reply: (node, request, reply) -> reply, or
            None for no reply at all.
        num_workers: workers that nodes hop between from message to message.

    Attributes:
        replies: every reply, as the nodes sent it, with the type of its request.
        contexts: one per node, as Flower keeps them.
    """

    def __init__(
        self, num_nodes: int, spoil: Spoil | None = None, num_workers: int = 1
    ) -> None:
        # Flower's ids are random, and not in the order of the nodes.
        self.indices = {(7919 * (i + 1)) % 1009: i for i in range(num_nodes)}
        self.contexts = {
            address: Context(
                run_id=1,
                node_id=address,
                node_config={"partition-id": index, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config={},
            )
            for address, index in self.indices.items()
        }
        self.spoil = spoil or (lambda node, request, reply: reply)
        self.workers: list[dict] = [{} for _ in range(num_workers)]
        self.calls = 0
        self.replies: list[tuple[str, int, Message]] = []
        self.waiting: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.indices)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = [name for name in message_ids if name in self.waiting]
        return [self.waiting.pop(name) for name in ready]

    def _deliver(self, message: Message) -> str:
        self.calls += 1
        name = f"message-{self.calls}"
        message.metadata.__dict__["_message_id"] = name
        address = message.metadata.dst_node_id
        request = message_from_proto(message_to_proto(message))
        state._workers.clear()
        worker = self.workers[self.calls % len(self.workers)]
        state._workers.update(worker)
        reply = client_app(message=request, context=self.contexts[address])
        worker.update(state._workers)
        node = self.indices[address]
        self.replies.append((request.metadata.message_type, node, reply))
        spoilt = self.spoil(node, request, reply)
        if spoilt is not None:
            self.waiting[name] = message_from_proto(message_to_proto(spoilt))
        return name


def start(folder: RunFolder, grid: FakeGrid, report: Report = ignore) -> None:
    GsWgan(folder, report, threading.Event()).start(grid)


def product(folder: RunFolder) -> list[bytes]:
    names = ("generator", "generator_ema")
    return [(folder.path / f"{name}.safetensors").read_bytes() for name in names]


def round_of(request: Message) -> int | None:
    """The round that a request is of; None at the roll call."""
    asked = dict(request.content["fedgs"]).get("round")
    return None if asked is None else int(str(asked))
