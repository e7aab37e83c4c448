"""Flower's grid within this process: the same strategy and ClientApp without Ray.

Messages are handed to the ClientApp by threads and are not serialised. Replies do not
depend on the number of threads.
"""

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1  # Flower's address of the server; those of the nodes follow


class LocalGrid(Grid):
    """All nodes in this process, with a context each that stays with the node.

    Args:
        client_app: answers the messages.
        num_nodes: how many nodes there are.
        num_workers: threads.
    """

    def __init__(self, client_app: ClientApp, num_nodes: int, num_workers: int) -> None:
        """Makes a context for every node."""
        # What Flower sets in a process that it starts, and messages carry.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = SERVER
        self.client_app = client_app
        self.num_workers = num_workers
        self.numbers = itertools.count()
        self.replies: dict[str, Message] = {}
        self.contexts = {
            SERVER + 1 + index: Context(
                run_id=1,
                node_id=SERVER + 1 + index,
                node_config={"partition-id": index, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config={},
            )
            for index in range(num_nodes)
        }

    def get_node_ids(self) -> Iterable[int]:
        """Returns the addresses of all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Has all messages answered before it returns their ids."""
        with ThreadPoolExecutor(self.num_workers) as workers:
            replies = list(workers.map(self._deliver, messages))
        ids = [reply.metadata.reply_to_message_id for reply in replies]
        self.replies.update(zip(ids, replies, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns each reply once."""
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Returns the replies to all messages; needs no time limit."""
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, message: Message) -> Message:
        message.metadata.__dict__["_message_id"] = f"message-{next(self.numbers)}"
        context = self.contexts[message.metadata.dst_node_id]
        return self.client_app(message=message, context=context)

    # Parts of Flower's interface that no strategy of ours uses.

    def _unused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    run = property(_unused)  # pyright: ignore[reportIncompatibleMethodOverride]
    set_run = create_message = _unused
