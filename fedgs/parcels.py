"""Several of Flower's requests in one: a message crosses the network at once.

Flower 1.41 sends a message as some eight requests, one for each of its parts, and each
is signed, routed and committed on its own. A parcel carries them together; each is
still answered by Flower's own handler, in order (`server.launch.post_office`).
Where the server takes no parcels the requests go one by one, as Flower sends them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx

FLEET_PARCEL, RUNTIME_PARCEL = "/v1/fleet/parcel", "/v1/runtime/parcel"
WAIT_PATH = "/v1/fleet/wait"
WAIT_SECONDS = 20.0  # of a client for a message, in one request; Flower gives up at 30
MOST_REQUESTS = 256  # in a parcel; a client's has five, a run's 49
METHODS = {  # Flower's path -> its method
    "push-messages": "PushMessages",
    "pull-messages": "PullMessages",
    "push-object": "PushObject",
    "pull-object": "PullObject",
    "confirm-message-received": "ConfirmMessageReceived",
}
LENGTH_BYTES = 4
NOT_FOUND = 404


class Call(NamedTuple):
    """One of Flower's requests.

    Attributes:
        name: as in `METHODS`.
        request: Flower's protobuf message.
        answer: the type of the message that answers it.
    """

    name: str
    request: Any
    answer: Any


class Parcel:
    """A list of bytes, with the two methods of a protobuf message that HTTP needs."""

    def __init__(self, parts: Iterable[bytes] = ()) -> None:
        """Holds the parts."""
        self.parts = list(parts)

    def SerializeToString(self, deterministic: bool = True) -> bytes:
        """Returns every part after its length."""
        sized = ((len(part).to_bytes(LENGTH_BYTES, "big"), part) for part in self.parts)
        return b"".join(piece for pair in sized for piece in pair)

    def ParseFromString(self, content: bytes) -> None:
        """Reads what `SerializeToString` wrote.

        Raises:
            ValueError: a length is not that of what follows.
        """
        self.parts, start = [], 0
        while start < len(content):
            body = start + LENGTH_BYTES
            start = body + int.from_bytes(content[start:body], "big")
            if start > len(content) or body > len(content):
                raise ValueError("a parcel that ends early")
            self.parts.append(content[body:start])


class Courier:
    """Takes calls to a server in parcels, or one by one where it knows none.

    Args:
        client: Flower's HTTP client.
        path: of parcels at the server.
        stock: Flower's own methods by name, as in `METHODS`.

    Attributes:
        is_known: whether the server takes parcels; assumed until it has refused one.
    """

    def __init__(
        self, client: Any, path: str, stock: Mapping[str, Callable[[Any], Any]]
    ) -> None:
        """Has asked for nothing yet."""
        self.client, self.path, self.stock = client, path, stock
        self.is_known = True

    def call(self, calls: Sequence[Call]) -> list[Any]:
        """Returns the answers, in order."""
        if self.is_known and calls:
            sent = Parcel(
                part
                for call in calls
                for part in (call.name.encode(), call.request.SerializeToString())
            )
            received = self.post(self.path, sent)
            if received is not None:
                pairs = zip(calls, received.parts, strict=True)
                return [call.answer.FromString(part) for call, part in pairs]
        return self._one_by_one(calls)

    def post(self, path: str, request: Any) -> Parcel | None:
        """Returns the server's answer, or None if it does not know the path."""
        try:
            return self.client._unary_unary(
                path=path, rpc_method=path, request=request, response_type=Parcel
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code != NOT_FOUND:
                raise
            self.is_known = False
            return None

    def _one_by_one(self, calls: Sequence[Call]) -> list[Any]:
        """Sends each call as Flower does; objects belong to the messages before."""
        answers: list[Any] = []
        session = ""
        for call in calls:
            if call.name == "push-object":
                call.request.session_id = session
            answers.append(self.stock[call.name](call.request))
            session = getattr(answers[-1], "session_id", session)
        return answers
