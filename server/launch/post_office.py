"""The SuperLink's side of parcels: Flower's own handlers, several calls in one request.

Flower routes every request through FastAPI and seven middlewares, in threads that wait
for each other. Here the calls of a parcel (`fedgs.parcels`) are authenticated once, by
Flower's own function, and answered by its own handlers. A client without work waits in
one request until there is a message for it, and takes it by another: who died while
waiting takes nothing along.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from fastapi import HTTPException, Request, Response
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.dependencies.task import authenticate_task
from flwr.supercore.error import http_error_translator
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from google.protobuf.message import DecodeError

from fedgs.parcels import (
    FLEET_PARCEL,
    METHODS,
    MOST_REQUESTS,
    RUNTIME_PARCEL,
    WAIT_PATH,
    WAIT_SECONDS,
    Parcel,
)
from server.launch.link_state import LinkState

Handler = Callable[..., Any]
HEARTBEAT_PATH = "/v1/fleet/send-node-heartbeat"
ROUTES = frozenset({FLEET_PARCEL, RUNTIME_PARCEL, WAIT_PATH, HEARTBEAT_PATH})
BAD_REQUEST, UNAUTHORIZED, TOO_LARGE = 400, 401, 413
BESIDE = 2**20  # bytes that a client's request may have beside the tensors of an answer


class PostOffice:
    """An ASGI application around Flower's that takes parcels, and lets clients wait.

    Args:
        app: Flower's FastAPI application.

    Attributes:
        most: bytes of a client's request, by what the runs say; of a larger one nothing
            is read, for what it weighs is held several times until it is decoded.
    """

    def __init__(self, app: Any) -> None:
        """Is told of new messages from now on."""
        self.app, self.most = app, BESIDE
        self.state: LinkState = app.state.linkstate_factory.state()
        self.waiting = Waiting(self.state)
        self.routes: dict[str, Callable[[Request, bytes], Awaitable[bytes]]] = {
            FLEET_PARCEL: self._fleet_answers,
            RUNTIME_PARCEL: self._runtime_answers,
            WAIT_PATH: self._wait,
            HEARTBEAT_PATH: self._beat,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers what is for it, and passes everything else on to Flower."""
        path = scope.get("path", "")
        # One that does not say how large it is counts as too large.
        size = dict(scope.get("headers", ())).get(b"content-length", self.most + 1)
        if path.startswith("/v1/fleet/") and int(size) > self.most:
            await Response(status_code=TOO_LARGE)(scope, receive, send)
            return
        route = self.routes.get(path)
        if route is None or scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return

        async def answer(request: Request) -> Response:
            content = await route(request, await request.body())
            return Response(content, media_type=PROTOBUF_MEDIA_TYPE)

        # Flower's functions look for their state in the request's application.
        request = Request({**scope, "app": self.app}, receive)
        response = await http_error_translator(request, answer)
        await response(scope, receive, send)

    async def _fleet_answers(self, request: Request, body: bytes) -> bytes:
        """Answers a client's calls, which must all be of the node that signed them."""
        calls = _calls(body, "fleet", fleet_handlers)
        if len({message.node.node_id for _, message in calls}) != 1:
            raise HTTPException(UNAUTHORIZED, "calls of several nodes")
        _signed(request, calls[0][1])
        return self._answers(calls)

    async def _runtime_answers(self, request: Request, body: bytes) -> bytes:
        """Answers a run's calls."""
        token = request.headers.get(TASK_TOKEN_HEADER)
        task = authenticate_task(request, token, self.state)
        self.most = max(self.most, BESIDE + int(request.query_params.get("most", 0)))
        return self._answers(_calls(body, "runtime", runtime_handlers), task=task)

    async def _wait(self, request: Request, body: bytes) -> bytes:
        """Answers once there is a message for a node, or with nothing."""
        message = _signed(request, _message("fleet", "pull-messages", body))
        is_there = await self.waiting.wait(message.node.node_id)
        return Parcel([b"1"] * is_there).SerializeToString()

    async def _beat(self, request: Request, body: bytes) -> bytes:
        """Answers a heartbeat: most of what a server gets while nothing happens."""
        beat = _signed(request, _message("fleet", "send-node-heartbeat", body))
        answer = fleet_handlers.send_node_heartbeat(beat, self.state)
        return answer.SerializeToString()

    def _answers(self, calls: list[tuple[Handler, Any]], **others: Any) -> bytes:
        """Answers calls in order; objects belong to the messages before them."""
        given = {"state": self.state, "store": self.state.object_store, **others}
        answers: list[bytes] = []
        session = ""
        for handler, message in calls:
            if handler.__name__ == "push_object":
                message.session_id = session
            # Handlers differ in what they take: each gets what it names.
            wanted = inspect.signature(handler).parameters
            named = {name: given[name] for name in wanted if name in given}
            answer = handler(request=message, **named)
            session = getattr(answer, "session_id", session)
            answers.append(answer.SerializeToString())
        return Parcel(answers).SerializeToString()


class Waiting:
    """The clients that wait for a message.

    Args:
        state: tells when there is one.
    """

    def __init__(self, state: LinkState) -> None:
        """Is told of new messages from now on."""
        self.state = state
        self._events: dict[int, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ending = False
        state.on_message = lambda node: self._soon(self._wake, node)

    def end(self) -> None:
        """Sends everybody home; a signal handler may call it."""
        self._is_ending = True
        for node in list(self._events):
            self._soon(self._wake, node)

    async def wait(self, node: int) -> bool:
        """Waits for a message for the node; returns whether there may be one.

        Who waits for the same node already is sent home: it may be a dead connection.
        """
        self._loop = asyncio.get_running_loop()
        self._wake(node)
        event = self._events[node] = asyncio.Event()
        if not self.state.has_messages(node) and not self._is_ending:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), WAIT_SECONDS)
        # Another connection of the node may be waiting by now.
        if self._events.get(node) is event:
            del self._events[node]
        return self.state.has_messages(node)

    def _soon(self, function: Callable[[int], None], node: int) -> None:
        """Calls in the loop's own thread: messages may come from another."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(function, node)

    def _wake(self, node: int) -> None:
        if event := self._events.get(node):
            event.set()


def _signed(request: Request, message: Any) -> Any:
    """Returns a message of the node that signed the request, or refuses it."""
    request.state.protobuf_request = message
    authenticate_node(request)
    return message


def _calls(
    body: bytes, interface: str, handlers: ModuleType
) -> list[tuple[Handler, Any]]:
    """Returns a parcel's calls: Flower's handler, and the message for it."""
    parcel = Parcel()
    try:
        parcel.ParseFromString(body)
        names = [part.decode() for part in parcel.parts[::2]]
        if not 0 < len(names) <= MOST_REQUESTS or not METHODS.keys() >= set(names):
            raise ValueError("not what a parcel holds")
        pairs = list(zip(names, parcel.parts[1::2], strict=True))
    except ValueError as error:
        raise HTTPException(BAD_REQUEST, "no parcel") from error
    return [
        (getattr(handlers, name.replace("-", "_")), _message(interface, name, part))
        for name, part in pairs
    ]


def _message(interface: str, name: str, content: bytes) -> Any:
    """Returns Flower's message of a call."""
    kind: Any = PROTOBUF_REQUEST_TYPES["POST", f"/v1/{interface}/{name}"]
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise HTTPException(BAD_REQUEST, "no message of Flower") from error
