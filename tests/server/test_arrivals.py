"""A client that ends in its upload: the deadline decides, others are taken meanwhile.

Flower's own grid over a SuperLink that is a dictionary: replies are announced once, and
their parts come when they come. It takes parcels, or as Flower's own does, none.
"""

import dataclasses
import time
from types import SimpleNamespace

import httpx
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

from fedgs.parcels import METHODS, RUNTIME_PARCEL, Parcel
from server.exchange import LOST_CODES, OVER_HTTP, Exchange
from server.progress import Progress
from server.server_app import _hasten
from tiny import tiny_config

pytestmark = pytest.mark.usefixtures("server_process")
ADDRESSES = {0: 70, 1: 71}
PATIENCE = 0.3  # seconds of the tests' deadline


class SuperLink:
    """The server's half of Flower, as far as replies go.

    Attributes:
        parts: of all replies, by id; b"" is announced and not there yet.
        pulled: the ids of the parts in the order in which they were asked for.
        confirmed: the ids of the replies that were said to have arrived.
    """

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}
        self.announced: list[tuple[Message, Message]] = []
        self.pulled: list[str] = []
        self.confirmed: list[str] = []
        self.looks = 0
        self.takes_parcels = True
        self.parcels = 0  # that came
        self.sessions: list[str] = []  # of the parts that were sent

    def _unary_unary(self, path, rpc_method, request, response_type):
        if not self.takes_parcels:
            refused = httpx.Request("POST", "http://any")
            raise httpx.HTTPStatusError(
                "", request=refused, response=httpx.Response(404, request=refused)
            )
        assert path.startswith(f"{RUNTIME_PARCEL}?most=")
        self.parcels += 1
        names, parts = request.parts[::2], request.parts[1::2]
        answers = []
        for name, part in zip(names, parts, strict=True):
            method = getattr(self, METHODS[name.decode()])
            kind = PROTOBUF_REQUEST_TYPES["POST", f"/v1/runtime/{name.decode()}"]
            answer = method(kind.FromString(part))
            answers.append(b"" if answer is None else answer.SerializeToString())
        return Parcel(answers)

    def PushMessages(self, request):
        names = [m.metadata.message_id for m in request.messages_list]
        parts = {
            part.object_id
            for tree in request.message_object_trees
            for part in iterate_object_tree(tree)
        }
        return PushAppMessagesResponse(
            message_ids=names, objects_to_push=parts, session_id="a session"
        )

    def PushObject(self, request):
        self.sessions.append(request.session_id)
        self.parts[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def upload(
        self, request: Message, sender: int, to: str = "", records: int = 1
    ) -> list[str]:
        """Announces a node's reply; returns the ids of its parts, none there yet.

        Args:
            request: that is answered.
            sender: whose name is in the reply.
            to: which request is named in the reply, if another one.
            records: how many there are in the reply.
        """
        content = RecordDict({"fedgs": ConfigRecord({"from": sender})})
        for index in range(1, records):
            content[f"more-{index}"] = ConfigRecord({"any": index})
        reply = Message(content, reply_to=request)
        reply.metadata.__dict__["_src_node_id"] = sender
        if to:
            reply.metadata.__dict__["_reply_to_message_id"] = to
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.objects = {
            k: v.deflate() for k, v in get_all_nested_objects(reply).items()
        }
        self.parts |= dict.fromkeys(self.objects, b"")
        self.announced.append((request, reply))
        return list(self.objects)

    def arrive(self, *names: str) -> None:
        """Parts of the reply that was announced last are there."""
        self.parts |= {name: self.objects[name] for name in names}

    def PullMessages(self, request):
        self.looks += 1
        found = [
            (asked, reply)
            for asked, reply in self.announced
            if asked.metadata.message_id in request.message_ids
        ]
        self.announced = [item for item in self.announced if item not in found]
        protos = []
        for asked, reply in found:
            proto = message_to_proto(reply)
            proto.metadata.reply_to_message_id = asked.metadata.message_id
            proto.metadata.src_node_id = asked.metadata.dst_node_id
            protos.append(proto)
        trees = [get_object_tree(reply) for _, reply in found]
        return PullAppMessagesResponse(messages_list=protos, message_object_trees=trees)

    def PullObject(self, request):
        self.pulled.append(request.object_id)
        content = self.parts.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None,
            object_available=bool(content),
            object_content=content,
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)


@pytest.fixture(name="link", params=["parcels", "one by one"])
def fixture_link(request) -> SuperLink:
    link = SuperLink()
    link.takes_parcels = request.param == "parcels"
    return link


@pytest.fixture(name="grid")
def fixture_grid(link) -> HttpGrid:
    """Flower's grid as a deployed ServerApp gets it; messages are only numbered."""
    grid = HttpGrid(token="any")
    grid._client = link
    fields = dataclasses.fields(Run)
    grid.set_run(Run(**{field.name: 1 for field in fields}))
    _hasten(grid, tiny_config())
    return grid


def request_to(node: int) -> Message:
    content = RecordDict({"fedgs": ConfigRecord({"round": 1})})
    message = Message(content, ADDRESSES[node], "train")
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


@pytest.fixture(name="requests")
def fixture_requests() -> dict[int, Message]:
    return {node: request_to(node) for node in ADDRESSES}


@pytest.fixture(name="exchange")
def fixture_exchange(grid, requests, monkeypatch) -> Exchange:
    """Its messages have the ids of the requests."""
    ids = {ADDRESSES[n]: r.metadata.message_id for n, r in requests.items()}

    def push(messages):
        return [ids[message.metadata.dst_node_id] for message in messages]

    monkeypatch.setattr(grid, "push_messages", push)
    return Exchange(grid, ADDRESSES, OVER_HTTP, Progress(None, tiny_config(), "", 0))


def senders(exchange: Exchange, requests: dict[int, Message]) -> list[int]:
    """Who gave a valid reply."""
    found = []
    for reply in exchange.send_and_receive(requests, timeout=PATIENCE):
        if reply.has_error():
            exchange.refuse(exchange.node_of(reply), reply.error.reason)
        else:
            found.append(reply.content["fedgs"]["from"])
    return found


def test_a_client_that_ends_in_its_upload_holds_up_neither_the_round_nor_the_others(
    link, exchange, requests
):
    broken = link.upload(requests[0], 70)
    link.arrive(*broken[1:])  # one part never comes
    link.arrive(*link.upload(requests[1], 71))
    started = time.monotonic()
    assert senders(exchange, requests) == [71]
    assert time.monotonic() - started < PATIENCE + 2
    assert exchange.reasons == {0: "node 0: no answer in time"}


def test_every_part_is_taken_once_whenever_it_comes(link, grid):
    request = request_to(0)
    name = request.metadata.message_id
    parts = link.upload(request, 70)
    assert grid.pull_messages([name]) == []
    for part in parts[:-1]:
        link.arrive(part)
        assert grid.pull_messages([name]) == []
    assert link.confirmed == []
    link.arrive(parts[-1])
    link.pulled.clear()
    (reply,) = grid.pull_messages([name])
    assert reply.content["fedgs"]["from"] == 70
    assert reply.metadata.message_id in parts
    assert link.confirmed == [reply.metadata.message_id]
    assert len(link.pulled) < len(parts)  # some were there before
    assert link.looks == 1  # Flower announces a reply once
    assert grid.pull_messages([name]) == []


def test_a_reply_on_its_way_is_not_left_for_the_next_look(link, grid, monkeypatch):
    request = request_to(0)
    parts = link.upload(request, 70)
    monkeypatch.setattr(
        "server.arrivals.time.sleep", lambda seconds: link.arrive(*parts)
    )
    assert len(grid.pull_messages([request.metadata.message_id])) == 1


def test_an_upload_that_expired_is_a_lost_reply(link, grid):
    request = request_to(0)
    name = request.metadata.message_id
    parts = link.upload(request, 70)
    assert grid.pull_messages([name]) == []
    for part in parts:
        del link.parts[part]
    (reply,) = grid.pull_messages([name])
    assert reply.error.code in LOST_CODES
    assert reply.metadata.reply_to_message_id == name
    assert link.confirmed == []


@pytest.mark.parametrize("spoilt", ["bytes", "sender", "request", "parts"])
def test_a_reply_that_is_not_what_was_announced_is_refused_and_ends_nothing(
    link, exchange, requests, spoilt
):
    request = requests[0]
    sender, to = (71 if spoilt == "sender" else 70), "f" * 64 * (spoilt == "request")
    parts = link.upload(request, sender, to, 50 if spoilt == "parts" else 1)
    link.arrive(*parts)
    if spoilt == "bytes":
        link.parts |= dict.fromkeys(parts, b"ConfigRecord  3\x00abc")
    assert senders(exchange, {0: request}) == []
    assert exchange.reasons == {0: "a reply that is not what it said"}
    assert len(link.pulled) <= 3  # a flood of small parts would take the round's time


def test_messages_are_sent_with_all_of_their_parts(link, grid):
    messages = [request_to(node) for node in ADDRESSES]
    names = grid.push_messages(messages)
    assert names == [message.object_id for message in messages]
    expected = {
        name: part.deflate()
        for message in messages
        for name, part in get_all_nested_objects(message).items()
    }
    assert link.parts == expected
    session = "" if link.takes_parcels else "a session"  # the server knows it
    assert link.sessions == [session] * len(expected)
    assert link.parcels == (1 if link.takes_parcels else 0)


def test_a_part_that_the_server_did_not_store_ends_the_run(link, grid, monkeypatch):
    answer = PushObjectResponse(stored=False)
    monkeypatch.setattr(link, "PushObject", lambda request: answer)
    with pytest.raises(ObjectPushError):
        grid.push_messages([request_to(0)])


def test_another_flower_or_grid_keeps_its_own_way(monkeypatch):
    grid = SimpleNamespace(pull_messages="its own")
    _hasten(grid, tiny_config())
    assert grid.pull_messages == "its own"
    monkeypatch.setattr("flwr.__version__", "1.42.0")
    grid = HttpGrid(token="any")
    _hasten(grid, tiny_config())
    assert not {"pull_messages", "push_messages"} & vars(grid).keys()
