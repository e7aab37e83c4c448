"""Replies of a deployment, taken as they arrive: nobody's upload is waited for.

Flower announces a reply before its parts are there, announces it once, and then waits
for the parts inside `HttpGrid.pull_messages`: 180 s where the client died meanwhile, in
which no deadline is looked at and no other reply is taken. Here announcements are kept,
and each look takes what is there.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr.app import Error, Message
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.superlink.grid.http_grid import HttpGrid

from fedgs.process import OBJECT_SECONDS

BRIEFLY = 0.1  # seconds for the parts of new replies, which are mostly on their way
MOST_PARTS = 16  # of a reply; a client's has three, and each costs a request
UNREADABLE, UNAVAILABLE = 0, 3  # Flower's ErrorCode: UNKNOWN, MESSAGE_UNAVAILABLE


@dataclass
class Arriving:
    """A reply that was announced.

    Attributes:
        name: Flower's id of the reply.
        sender: Flower's address of the node.
        missing: ids of the parts that were not there at the last look.
        parts: id -> bytes of the others.
    """

    name: str
    sender: int
    missing: list[str]
    parts: dict[str, bytes] = field(default_factory=dict)


class Arrivals:
    """Pulls replies over a grid of Flower 1.41 without waiting for any of them.

    Args:
        grid: of the run, whose `pull_messages` this stands in for.
    """

    def __init__(self, grid: HttpGrid) -> None:
        """Has asked for nothing yet."""
        self.grid = grid
        self._arriving: dict[str, Arriving] = {}  # by the message that it replies to

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Returns the replies to these messages that are there; once each.

        A reply that can never be read any more is returned as an error.

        Privacy: public; moves messages.
        """
        names = list(message_ids)
        is_new = self._announce([n for n in names if n not in self._arriving])
        until = time.monotonic() + BRIEFLY * is_new
        while True:
            awaited = [name for name in names if name in self._arriving]
            pulled = [self._pull_parts(name) for name in awaited]
            replies = [reply for reply in pulled if reply is not None]
            if replies or not pulled or time.monotonic() >= until:
                return replies
            time.sleep(OBJECT_SECONDS)

    def _announce(self, names: list[str]) -> bool:
        """Asks which replies to these messages there are; returns whether any is."""
        if not names:
            return False
        request = PullAppMessagesRequest(message_ids=names)
        announced = self.grid._runtime_client.PullMessages(request)
        known = len(self._arriving)
        for reply, tree in zip(
            announced.messages_list, announced.message_object_trees, strict=True
        ):
            if reply.metadata.reply_to_message_id in names:
                missing = list({p.object_id: None for p in iterate_object_tree(tree)})
                if len(missing) > MOST_PARTS:
                    missing = []  # refused like any reply that lacks a part
                metadata = reply.metadata
                arriving = Arriving(metadata.message_id, metadata.src_node_id, missing)
                self._arriving[metadata.reply_to_message_id] = arriving
        return len(self._arriving) > known

    def _pull_parts(self, name: str) -> Message | None:
        """Pulls what is there of a reply; returns the reply once it is complete."""
        arriving, client = self._arriving[name], self.grid._runtime_client
        node, run_id = self.grid.node, self.grid.run.run_id
        pull = make_pull_object_fn_protobuf(client.PullObject, node, run_id)
        try:
            while arriving.missing:
                arriving.parts[arriving.missing[0]] = pull(arriving.missing[0])
                del arriving.missing[0]
        except ObjectUnavailableError:
            return None
        except ObjectPullError:
            del self._arriving[name]
            return self._lost(name, UNAVAILABLE, "its sender ended in its upload")
        del self._arriving[name]
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=node, run_id=run_id, message_object_id=arriving.name
            )
        )
        try:
            reply = inflate_object_from_contents(arriving.name, arriving.parts)
        except Exception:  # a client may send anything; the run is not its to end
            reply = None
        if (
            not isinstance(reply, Message)
            or reply.metadata.reply_to_message_id != name
            or reply.metadata.src_node_id != arriving.sender
        ):
            return self._lost(name, UNREADABLE, "a reply that is not what it said")
        reply.metadata.__dict__["_message_id"] = arriving.name
        return reply

    def _lost(self, name: str, code: int, reason: str) -> Message:
        """Returns the error in place of a reply, as Flower makes it."""
        metadata = Metadata(
            run_id=self.grid.run.run_id,
            message_id="",
            src_node_id=self.grid.node.node_id,
            dst_node_id=self.grid.node.node_id,
            message_type=SYSTEM_MESSAGE_TYPE,
            group_id="",
            ttl=0,
            reply_to_message_id=name,
            created_at=time.time(),
        )
        return make_message(metadata=metadata, error=Error(code, reason))
