"""Replies of a deployment, taken as they arrive: nobody's upload is waited for.

Flower announces a reply before its parts are there, announces it once, and then waits
for the parts inside `HttpGrid.pull_messages`: 180 s where the client died meanwhile, in
which no deadline is looked at and no other reply is taken. Here announcements are kept,
and each look takes what is there.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message
from flwr.app.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPushError,
    inflate_object_from_contents,
)
from flwr.superlink.grid.http_grid import HttpGrid

from fedgs.parcels import METHODS, MOST_REQUESTS, RUNTIME_PARCEL, Call, Courier
from fedgs.process import OBJECT_SECONDS

BRIEFLY = 0.1  # seconds for the parts of new replies, which are mostly on their way
MOST_PARTS = 16  # of a reply; a client's has three
MESSAGES_AT_ONCE = 16  # of three parts each: with `MOST_REQUESTS`, a parcel
UNREADABLE, UNAVAILABLE = 0, 3  # Flower's ErrorCode: UNKNOWN, MESSAGE_UNAVAILABLE


@dataclass
class Arriving:
    """A reply that was announced.

    Attributes:
        name: Flower's id of the reply.
        sender: Flower's address of the node.
        missing: ids of the parts that were not there at the last look.
        parts: id -> bytes of the others.
        is_lost: a part will never be there.
    """

    name: str
    sender: int
    missing: list[str]
    parts: dict[str, bytes] = field(default_factory=dict)
    is_lost: bool = False


class Arrivals:
    """Moves messages over a grid of Flower 1.41 in parcels, waiting for no reply.

    Args:
        grid: of the run, whose `push_messages` and `pull_messages` these stand in for.
        most: bytes of the largest answer; the SuperLink reads none that has more.
    """

    def __init__(self, grid: HttpGrid, most: int = 0) -> None:
        """Has asked for nothing yet."""
        self.grid, self.most = grid, most
        self._arriving: dict[str, Arriving] = {}  # by the message that it replies to
        self._courier: Courier | None = None

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Sends messages, several in a parcel; returns their names, "" if refused.

        Privacy: public; moves messages.
        """
        names: list[str] = []
        # A part's id is the hash of its bytes: here it is computed once a message.
        with no_object_id_recompute():
            remaining = list(messages)
            while remaining:
                names += self._push(remaining[:MESSAGES_AT_ONCE])
                del remaining[:MESSAGES_AT_ONCE]
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Returns the replies to these messages that are there; once each.

        A reply that can never be read any more is returned as an error.

        Privacy: public; moves messages.
        """
        names = list(message_ids)
        is_new = self._announce([n for n in names if n not in self._arriving])
        # Older ones have been waited for already; the caller looks at its deadline.
        until = time.monotonic() + BRIEFLY * is_new
        while True:
            awaited = [name for name in names if name in self._arriving]
            replies = self._pull_replies(awaited)
            if replies or not awaited or time.monotonic() >= until:
                return replies
            time.sleep(OBJECT_SECONDS)

    def _push(self, messages: list[Message]) -> list[str]:
        """Sends messages with all of their parts in one parcel."""
        request, parts = PushAppMessagesRequest(), dict[str, InflatableObject]()
        for message in messages:
            # Metadata has no setter for it; Flower's own grid does the same.
            message.metadata.__dict__["_message_id"] = message.object_id
            bare = remove_content_from_message(message)
            request.messages_list.append(message_to_proto(bare))
            request.message_object_trees.append(get_object_tree(message))
            parts |= get_all_nested_objects(message)
        push = Call("push-messages", request, PushAppMessagesResponse)
        uploads = [
            Call(
                "push-object",
                PushObjectRequest(
                    **self._own, object_id=name, object_content=part.deflate()
                ),
                PushObjectResponse,
            )
            for name, part in parts.items()
        ]
        pushed, *stored = self._call([push, *uploads])
        due = set(pushed.objects_to_push)
        for name, answer in zip(parts, stored, strict=True):
            if name in due and not answer.stored:
                run_id, session = self.grid.run.run_id, pushed.session_id
                raise ObjectPushError(name, run_id, session)  # as Flower's own
        return list(pushed.message_ids)

    def _announce(self, names: list[str]) -> bool:
        """Asks which replies to these messages there are; returns whether any is."""
        if not names:
            return False
        request = PullAppMessagesRequest(message_ids=names)
        pull = Call("pull-messages", request, PullAppMessagesResponse)
        (announced,) = self._call([pull])
        known = len(self._arriving)
        for reply, tree in zip(
            announced.messages_list, announced.message_object_trees, strict=True
        ):
            if reply.metadata.reply_to_message_id in names:
                # Equal parts have one id, and come once.
                missing = list({p.object_id: None for p in iterate_object_tree(tree)})
                if len(missing) > MOST_PARTS:
                    missing = []  # refused like any reply that lacks a part
                metadata = reply.metadata
                arriving = Arriving(metadata.message_id, metadata.src_node_id, missing)
                self._arriving[metadata.reply_to_message_id] = arriving
        return len(self._arriving) > known

    def _pull_replies(self, names: list[str]) -> list[Message]:
        """Pulls what is there of replies; returns those that are complete, or lost."""
        self._pull_parts(names)
        replies: list[Message] = []
        received: list[Call] = []
        for name in names:
            arriving = self._arriving[name]
            if arriving.is_lost:
                del self._arriving[name]
                reason = "its sender ended in its upload"
                replies.append(self._lost(name, UNAVAILABLE, reason))
            elif not arriving.missing:
                request = ConfirmMessageReceivedRequest(
                    **self._own, message_object_id=arriving.name
                )
                answer = ConfirmMessageReceivedResponse
                received.append(Call("confirm-message-received", request, answer))
                replies.append(self._read(name))
        # Once it is said, the SuperLink forgets the parts.
        for start in range(0, len(received), MOST_REQUESTS):
            self._call(received[start : start + MOST_REQUESTS])
        return replies

    def _pull_parts(self, names: list[str]) -> None:
        """Pulls missing parts of replies, many at once."""
        wanted = [(n, part) for n in names for part in self._arriving[n].missing]
        # The others come at the next look.
        wanted = wanted[:MOST_REQUESTS]
        calls = [
            Call(
                "pull-object",
                PullObjectRequest(**self._own, object_id=part),
                PullObjectResponse,
            )
            for _, part in wanted
        ]
        for (name, part), answer in zip(wanted, self._call(calls), strict=True):
            arriving = self._arriving[name]
            if not answer.object_found:
                arriving.is_lost = True
            elif answer.object_available:
                arriving.parts[part] = answer.object_content
                arriving.missing.remove(part)

    def _read(self, name: str) -> Message:
        """Returns a reply whose parts are there."""
        arriving = self._arriving.pop(name)
        try:
            reply = inflate_object_from_contents(arriving.name, arriving.parts)
        except Exception:  # a client may send anything; the run is not its to end
            reply = None
        if (
            # What was sent may name others than its announcement does.
            not isinstance(reply, Message)
            or reply.metadata.reply_to_message_id != name
            or reply.metadata.src_node_id != arriving.sender
        ):
            return self._lost(name, UNREADABLE, "a reply that is not what it said")
        reply.metadata.__dict__["_message_id"] = arriving.name
        return reply

    def _call(self, calls: list[Call]) -> list[Any]:
        """Makes calls over the grid's connection."""
        client: Any = self.grid._runtime_client
        # Flower's grid may have a new client since, and with it new methods.
        if self._courier is None or self._courier.client is not client:
            stock = {name: getattr(client, method) for name, method in METHODS.items()}
            self._courier = Courier(client, f"{RUNTIME_PARCEL}?most={self.most}", stock)
        return self._courier.call(calls)

    @property
    def _own(self) -> dict[str, Any]:
        """Whose requests they are."""
        return {"node": self.grid.node, "run_id": self.grid.run.run_id}

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
