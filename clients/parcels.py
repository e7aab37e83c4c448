"""Flower's SuperNode sends and takes a message in one request each, not in parts.

`deliver_in_parcels` replaces five methods of the HTTP client of Flower 1.41, which its
loop calls in a fixed order: take a message, its parts, say that it came; announce the
reply, send its parts. Parts of a message are fetched together and then handed out; a
reply leaves when its last part is there. A client without work waits at the server.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from fedgs.parcels import FLEET_PARCEL, METHODS, WAIT_PATH, Call, Courier

MOST_PARTS = 16  # fetched at once; a request has four


class Mailbag:
    """What one connection of a client holds back, and has fetched beforehand.

    Args:
        client: Flower's HTTP client.
        stock: its own methods, by name.
        waited: called when the server was asked to say when there is a message.
    """

    def __init__(
        self,
        client: Any,
        stock: Mapping[str, Callable[[Any], Any]],
        waited: Callable[[], None],
    ) -> None:
        """Holds nothing yet."""
        self.courier, self.waited = Courier(client, FLEET_PARCEL, stock), waited
        self._lock = threading.Lock()  # Flower moves parts in two threads
        self._fetched: dict[str, Any] = {}  # part -> Flower's answer
        self._received: list[Call] = []  # to be said with the next parcel
        self._reply: Any = None
        self._parts: dict[str, Any] = {}  # of the reply, None until it is given

    def pull_messages(self, request: Any) -> Any:
        """Waits for a message and returns it; its parts are fetched with it."""
        if self.courier.is_known:
            there = self.courier.post(WAIT_PATH, request)
            if there is not None:
                self.waited()
                if not there.parts:
                    return PullMessagesResponse()
        pull = Call("pull-messages", request, PullMessagesResponse)
        response = self._call([pull])[0]
        # What was not asked for of the message before.
        self._fetched = {}
        # A part that is not fetched here, Flower asks for by itself, again and again.
        with contextlib.suppress(httpx.HTTPError):
            self._fetch(request.node, response)
        return response

    def pull_object(self, request: Any) -> Any:
        """Returns a part that was fetched with its message, or asks for it."""
        with self._lock:
            fetched = self._fetched.pop(request.object_id, None)
        if fetched is not None and fetched.object_available:
            return fetched
        return self.courier.stock["pull-object"](request)

    def confirm_message_received(self, request: Any) -> Any:
        """Has it said with the next parcel that a message came."""
        answer = ConfirmMessageReceivedResponse
        self._received.append(Call("confirm-message-received", request, answer))
        return answer()

    def push_messages(self, request: Any) -> Any:
        """Holds a reply back until its parts are there."""
        (tree,) = request.message_object_trees
        parts = [part.object_id for part in iterate_object_tree(tree)]
        self._reply, self._parts = request, dict.fromkeys(parts)
        return PushMessagesResponse(objects_to_push=[*self._parts])

    def push_object(self, request: Any) -> Any:
        """Sends the reply with its last part; called again, it sends it again."""
        with self._lock:
            self._parts[request.object_id] = request
            # Whichever of Flower's threads brings the last part sends all of them.
            if all(part is not None for part in self._parts.values()):
                push = Call("push-messages", self._reply, PushMessagesResponse)
                parts = self._parts.values()
                named = "push-object"
                calls = [Call(named, part, PushObjectResponse) for part in parts]
                pushed, *stored = self._call([push, *calls])
                due = set(pushed.objects_to_push)
                if any(
                    name in due and not answer.stored
                    for name, answer in zip(self._parts, stored, strict=True)
                ):
                    return PushObjectResponse(stored=False)
        return PushObjectResponse(stored=True)

    def _fetch(self, node: Any, response: Any) -> None:
        """Fetches the parts of a message that was pulled."""
        for message, tree in zip(
            response.messages_list, response.message_object_trees, strict=True
        ):
            run_id = message.metadata.run_id
            names = dict.fromkeys(part.object_id for part in iterate_object_tree(tree))
            calls = [
                Call(
                    "pull-object",
                    PullObjectRequest(node=node, run_id=run_id, object_id=name),
                    PullObjectResponse,
                )
                for name in [*names][:MOST_PARTS]
            ]
            self._fetched = dict(zip(names, self._call(calls), strict=False))

    def _call(self, calls: list[Call]) -> list[Any]:
        """Makes the calls, after what is still to be said."""
        # Lost where the call fails: then the SuperLink keeps a message for longer.
        said, self._received = self._received, []
        return self.courier.call([*said, *calls])[len(said) :]


def deliver_in_parcels(client: Any, waited: Callable[[], None]) -> None:
    """Replaces the methods.

    Args:
        client: Flower's class of HTTP clients.
        waited: called when a server has been asked to say when there is a message.
    """
    stock = {name: getattr(client, method) for name, method in METHODS.items()}

    def bag_of(own: Any) -> Mailbag:
        if "mailbag" not in vars(own):
            bound = {n: function.__get__(own) for n, function in stock.items()}
            vars(own)["mailbag"] = Mailbag(own, bound, waited)
        return vars(own)["mailbag"]

    def replaced(name: str) -> Callable[[Any, Any], Any]:
        def method(own: Any, request: Any) -> Any:
            return getattr(bag_of(own), name.replace("-", "_"))(request)

        return method

    for name, method in METHODS.items():
        setattr(client, method, replaced(name))
