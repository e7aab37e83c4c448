"""Hands messages to simulated nodes at once, and each node to one worker.

Flower's simulation looks for new messages ten times a second and gives a message to
whichever worker is idle, which then reads the node's state from disk. `install`
replaces five functions of one known Flower version: pushing a message wakes the loop
that looks for it, a node always gets the same worker, the next message is already there
when a worker has answered one, and a reply wakes the server. Results do not change, for
a node's state is on disk after every answer either way (`clients.workers`).

The launcher asks for it (setting `fast_messages`) by an environment variable, because
the functions are in use before a run's settings are known.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from logging import WARNING
from queue import Queue
from typing import Any

import flwr
from flwr.app import Context, Message
from flwr.common.logger import log

from fedgs.process import FAST_VARIABLE, KNOWN_VERSION

SCAN_SECONDS = 0.5  # between looks at all nodes, for messages from before `install`


class Arrivals:
    """The nodes that have new messages; the sender wakes who waits for them."""

    def __init__(self) -> None:
        """Starts without messages."""
        self._nodes: deque[int] = deque()
        self._wake = threading.Event()

    def add(self, nodes: Iterable[int]) -> None:
        """Notes a new message for each of the nodes."""
        self._nodes.extend(nodes)
        self._wake.set()

    def wait(self) -> Iterator[int] | None:
        """Waits for messages; returns their nodes, or None after `SCAN_SECONDS`."""
        if not self._wake.wait(SCAN_SECONDS):
            return None
        self._wake.clear()
        return iter([self._nodes.popleft() for _ in range(len(self._nodes))])


def is_wanted() -> bool:
    """Returns whether this process was asked for fast messages and can have them."""
    if os.environ.get(FAST_VARIABLE) != "1":
        return False
    if flwr.__version__.startswith(KNOWN_VERSION):
        return True
    text = "fast_messages: written for Flower %sx, this is %s; messages go as usual"
    log(WARNING, text, KNOWN_VERSION, flwr.__version__)
    return False


def install() -> None:
    """Replaces the functions; must run before the simulation's threads start.

    Importing the client app is early enough: Flower loads it first.

    Privacy: public; moves messages, reads none.
    """
    from flwr.server.superlink.fleet.vce import vce_api
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
    from flwr.server.superlink.linkstate import InMemoryLinkState
    from flwr.superlink.grid.inmemory_grid import InMemoryGrid

    arrivals, replied = Arrivals(), threading.Event()
    stock_push = InMemoryGrid.push_messages
    stock_store = InMemoryLinkState.store_message_res

    def push_messages(self: InMemoryGrid, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        ids = stock_push(self, pushed)
        arrivals.add(message.metadata.dst_node_id for message in pushed)
        return ids

    def add_messages_to_queue(
        state: Any,
        queue: "Queue[Message]",
        nodes_mapping: dict[int, int],
        f_stop: threading.Event,
    ) -> None:
        while not f_stop.is_set():
            for node in arrivals.wait() or list(nodes_mapping):
                for message in state.get_message_ins(node_id=node, limit=1):
                    queue.put(message)

    def store_message_res(self: InMemoryLinkState, message: Message) -> Any:
        stored = stock_store(self, message)
        replied.set()
        return stored

    def wait_for_reply(self: InMemoryGrid, seconds: float) -> None:
        replied.wait(seconds)
        replied.clear()

    InMemoryGrid.push_messages = push_messages
    InMemoryGrid.wait_for_reply = wait_for_reply  # type: ignore[attr-defined]
    InMemoryLinkState.store_message_res = store_message_res
    vce_api.add_messages_to_queue = add_messages_to_queue
    RayBackend.process_message = _process_message  # type: ignore[method-assign]
    RayBackend.num_workers = property(_threads)  # type: ignore[method-assign]


def _threads(backend: Any) -> int:
    """Returns how many messages are with the workers: one at work, one at hand."""
    return 2 * backend.pool.num_actors if backend.pool else 0


def _process_message(
    backend: Any, message: Message, context: Context
) -> tuple[Message, Context]:
    """Runs the client app in the node's own worker."""
    import ray

    partition = int(context.node_config["partition-id"])
    actor = backend.pool.pool[partition % backend.pool.num_actors]
    future = actor.run.remote(backend.app_fn, message, str(partition), context)
    _, reply, updated = ray.get(future)
    return reply, updated
