"""A SuperLink that takes parcels: the same messages, by Flower's own handlers.

Flower's application, clients and grid in one process; HTTP without a network.
"""

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from clients import parcels
from fedgs.parcels import (
    FLEET_PARCEL,
    METHODS,
    MOST_REQUESTS,
    WAIT_PATH,
    Call,
    Courier,
    Parcel,
)
from server.arrivals import Arrivals
from server.launch import link_state, post_office

OWNER = "any", "any"
HEARTBEAT = 60
pytestmark = pytest.mark.usefixtures("server_process")
MIGRATES = pytest.mark.filterwarnings(  # Flower's own call of alembic
    "ignore:No path_separator found:DeprecationWarning"
)


def new_state(database=":memory:") -> link_state.LinkState:
    manager = NoOpFederationManager()
    objects = ObjectStoreFactory().store()
    return link_state.LinkState(str(database), manager, objects)


class Network(httpx.BaseTransport):
    """Hands requests of any thread to an application, in a thread of its own."""

    def __init__(self, app) -> None:
        self.transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self.run(self._respond(request))

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        response = await self.transport.handle_async_request(request)
        content = await response.aread()
        return httpx.Response(response.status_code, content=content)

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Site:
    """A SuperLink with a run, and its clients.

    Attributes:
        paths: of the requests that it got.
    """

    def __init__(self, app_of) -> None:
        self.state = new_state()
        self.app = app_of(SimpleNamespace(state=lambda: self.state))
        self.network = Network(self.app)
        self.paths: list[str] = []

        def note(request: httpx.Request) -> None:
            self.paths.append(request.url.path)

        hooks = {"request": [note]}
        self.http = httpx.Client(
            transport=self.network, base_url="http://any", event_hooks=hooks
        )
        fab = self.state.store_fab(Fab("", b"any", {}))
        names = "a/b", "1.0.0", fab, {}, "@none/default", None, "any"
        run_id = self.state.create_run(*names, TaskType.SERVER_APP)
        (self.run,) = self.state.get_run_info(run_ids=[run_id])
        task = self.run.primary_task_id
        token = self.state.claim_task(task)
        assert self.state.activate_task(task)
        TaskIdentity.run_id = run_id
        self.grid = HttpGrid("any", insecure=True, token=token)
        self.grid.set_run(self.run)
        self.grid._runtime_client._client = self.http
        self.arrivals = Arrivals(self.grid)

    def client(self) -> tuple[FleetHttpClient, Node]:
        """A client whose key is registered."""
        keys = generate_key_pairs()
        public = public_key_to_bytes(keys[1])
        self.state.create_node(*OWNER, public, 0)
        client = FleetHttpClient.from_server_address(
            "any", True, None, interceptors=[NodeAuthHttpInterceptor(*keys)]
        )
        client._client = self.http
        request = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT)
        return client, Node(node_id=client.ActivateNode(request).node_id)

    def request_to(self, node: Node, content: str = "a request") -> Message:
        record = RecordDict({"fedgs": ConfigRecord({"text": content})})
        return Message(record, node.node_id, "train")


@pytest.fixture(name="flower_app", scope="module")
def fixture_flower_app():
    from flwr.superlink.main import create_app

    return create_app()


@pytest.fixture(name="make_site")
def fixture_make_site(monkeypatch, flower_app):
    """Makes a site, whose SuperLink has a post office or is Flower's own."""
    for name in METHODS.values():
        monkeypatch.setattr(FleetHttpClient, name, getattr(FleetHttpClient, name))
    monkeypatch.setattr(post_office, "WAIT_SECONDS", 0.2)
    parcels.deliver_in_parcels(FleetHttpClient, lambda: None)
    with contextlib.ExitStack() as sites:

        def make(takes_parcels: bool) -> Site:
            def app_of(factory):
                flower_app.state.linkstate_factory = factory
                flower_app.state.runtime_state_factory = factory
                return (
                    post_office.PostOffice(flower_app) if takes_parcels else flower_app
                )

            site = Site(app_of)
            sites.callback(site.http.close)
            return site

        yield make


@pytest.fixture(name="office")
def fixture_office(make_site) -> Site:
    return make_site(True)


def take(client: FleetHttpClient, node: Node) -> Message | None:
    """Takes a message as Flower's SuperNode does; returns it."""
    pulled = client.PullMessages(PullMessagesRequest(node=node))
    if not pulled.messages_list:
        return None
    (announced,), (tree,) = pulled.messages_list, pulled.message_object_trees
    run_id, name = announced.metadata.run_id, announced.metadata.message_id
    pull = make_pull_object_fn_protobuf(client.PullObject, node, run_id)
    parts = pull_objects([part.object_id for part in iterate_object_tree(tree)], pull)
    confirm = client.ConfirmMessageReceived
    make_confirm_message_received_fn_protobuf(confirm, node, run_id)(name)
    message = inflate_object_from_contents(name, parts)
    message.metadata.__dict__["_message_id"] = name
    return message


def give(client: FleetHttpClient, node: Node, asked: Message, text: str) -> None:
    """Sends a reply as Flower's SuperNode does."""
    content = RecordDict({"fedgs": ConfigRecord({"text": text})})
    reply = Message(content, reply_to=asked)
    reply.metadata.__dict__["_src_node_id"] = node.node_id
    reply.metadata.__dict__["_message_id"] = reply.object_id
    request = PushMessagesRequest(
        node=node,
        messages_list=[message_to_proto(remove_content_from_message(reply))],
        message_object_trees=[get_object_tree(reply)],
    )
    pushed = client.PushMessages(request)
    run_id = asked.metadata.run_id
    push = make_push_object_fn_protobuf(
        client.PushObject, node, run_id, pushed.session_id
    )
    objects = get_all_nested_objects(reply)
    push_objects(objects, push, object_ids_to_push=set(pushed.objects_to_push))


@pytest.mark.parametrize("takes_parcels", [True, False])
def test_messages_arrive_whole_in_few_requests_or_in_flowers_own(
    make_site, takes_parcels
):
    site = make_site(takes_parcels)
    clients = [site.client() for _ in range(3)]
    site.paths.clear()
    texts = [f"request {index}" for index in range(3)]
    requests = [site.request_to(n, t) for (_, n), t in zip(clients, texts, strict=True)]
    names = site.arrivals.push_messages(requests)
    for (client, node), text in zip(clients, texts, strict=True):
        asked = take(client, node)
        assert asked.content["fedgs"]["text"] == text
        give(client, node, asked, f"answer to {text}")
        assert take(client, node) is None
    replies = site.arrivals.pull_messages(names)
    answers = sorted(reply.content["fedgs"]["text"] for reply in replies)
    assert answers == [f"answer to request {index}" for index in range(3)]
    assert len(site.state.object_store) == 0  # nothing is kept of what has arrived
    assert not site.state._object_push_sessions
    stock_paths = [path for path in site.paths if path.endswith("-object")]
    if takes_parcels:
        assert stock_paths == []
        assert site.paths.count(FLEET_PARCEL) == 3 * 3  # message, its parts, the reply
    else:
        assert len(stock_paths) >= 3 * 12


def test_a_reply_in_two_tries_is_stored_once(office):
    client, node = office.client()
    names = office.arrivals.push_messages([office.request_to(node)])
    asked = take(client, node)
    for _ in range(2):
        give(client, node, asked, "the same")
    assert len(office.arrivals.pull_messages(names)) == 1


def courier_of(client: FleetHttpClient) -> Courier:
    return Courier(client, FLEET_PARCEL, {})


def test_a_parcel_with_another_nodes_call_is_refused(office):
    (client, own), (_, other) = office.client(), office.client()
    office.arrivals.push_messages([office.request_to(other)])
    own_call, others_call = (
        Call("pull-messages", PullMessagesRequest(node=node), PullMessagesResponse)
        for node in (own, other)
    )
    for calls in ([others_call], [own_call, others_call], [others_call, own_call]):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            courier_of(client).call(calls)
        assert refused.value.response.status_code == 401
    with pytest.raises(httpx.HTTPStatusError):  # nor does it learn of its messages
        courier_of(client).post(WAIT_PATH, PullMessagesRequest(node=other))
    assert office.state.has_messages(other.node_id)


def test_a_heartbeat_keeps_its_own_node_online_and_no_other(office):
    client, node = office.client()
    other = office.client()[1]
    for one in (node, other):
        assert office.state.deactivate_node(one.node_id)
    beat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
    assert client.SendNodeHeartbeat(beat).success
    beat.node.node_id = other.node_id
    with pytest.raises(httpx.HTTPStatusError) as refused:
        client.SendNodeHeartbeat(beat)
    assert refused.value.response.status_code == 401
    online = office.state.get_node_info(statuses=["online"])
    assert [found.node_id for found in online] == [node.node_id]


def test_a_run_without_its_token_is_refused(office):
    grid = HttpGrid("any", insecure=True, token="another")
    grid._retry_invoker = None  # Flower's ends the process
    grid.set_run(office.run)
    grid._runtime_client._client = office.http
    _, node = office.client()
    with pytest.raises(httpx.HTTPStatusError):
        Arrivals(grid).push_messages([office.request_to(node)])
    assert not office.state.has_messages(node.node_id)


def test_what_is_no_parcel_is_refused_with_status_400(office):
    bodies = [
        b"",
        b"\xff\xff\xff\xffabc",
        *(
            Parcel(parts).SerializeToString()
            for parts in (
                [b"pull-messages"],
                [b"create-node", b""],
                [b"\xff", b""],
                [b"pull-messages", b"\xff\xff"],
                [b"pull-messages", b""] * (MOST_REQUESTS + 1),
            )
        ),
    ]
    answers = [office.http.post(FLEET_PARCEL, content=body) for body in bodies]
    answers.append(office.http.post(WAIT_PATH, content=bodies[1]))
    assert [answer.status_code for answer in answers] == [400] * 8


def posted(office: Site, path: str, size: int) -> int:
    """The status of a client's request of so many bytes, none of which is there."""

    async def receive() -> dict:
        raise LookupError("it is read")

    sent: list[dict] = []

    async def send(event: dict) -> None:
        sent.append(event)

    headers = [(b"content-length", b"%d" % size)] if size else []
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    office.network.run(office.app(scope, receive, send))
    return sent[0]["status"]


def test_what_weighs_more_than_an_answer_can_is_not_read(office):
    """What is read is held several times before its size could be looked at."""
    _, node = office.client()
    for path in (FLEET_PARCEL, "/v1/fleet/push-object", "/v1/fleet/any"):
        assert posted(office, path, post_office.BESIDE + 1) == 413
        assert posted(office, path, 0) == 413  # it does not say
    Arrivals(office.grid, most=1000).push_messages([office.request_to(node)])
    assert posted(office, FLEET_PARCEL, post_office.BESIDE + 1001) == 413
    # Flower's code of what failed: it was read.
    assert posted(office, FLEET_PARCEL, post_office.BESIDE + 1000) == 500


def test_a_client_waits_until_there_is_a_message_or_in_vain(office, monkeypatch):
    client, node = office.client()
    request = PullMessagesRequest(node=node)
    assert courier_of(client).post(WAIT_PATH, request).parts == []
    monkeypatch.setattr(post_office, "WAIT_SECONDS", 30.0)
    message = office.request_to(node)
    send = threading.Timer(0.1, office.arrivals.push_messages, [[message]])
    send.start()
    started = time.monotonic()
    assert courier_of(client).post(WAIT_PATH, request).parts == [b"1"]
    assert time.monotonic() - started < 10
    send.join()
    assert take(client, node) is not None


def test_who_waits_is_sent_home_by_another_one_and_at_the_end(office, monkeypatch):
    monkeypatch.setattr(post_office, "WAIT_SECONDS", 30.0)
    _, node = office.client()
    waiting = office.app.waiting

    async def wait() -> list[bool]:
        first = asyncio.create_task(waiting.wait(node.node_id))
        await asyncio.sleep(0)
        second = asyncio.create_task(waiting.wait(node.node_id))
        found = [await first]
        waiting.end()
        return [*found, await second, await waiting.wait(node.node_id)]

    started = time.monotonic()
    assert office.network.run(wait()) == [False] * 3
    assert time.monotonic() - started < 10


# ------------------------------------------------------------------ the state


@MIGRATES
def test_keys_outlive_the_process_also_those_in_a_database_of_flowers_own(tmp_path):
    path = str(tmp_path / "superlink.db")
    stock = SqlLinkState(path, NoOpFederationManager(), ObjectStoreFactory().store())
    stock.initialize()
    old = stock.create_node(*OWNER, b"old", 0, name="before")
    assert stock.activate_node(old, HEARTBEAT)
    state = new_state(path)
    assert state.activate_node(old, HEARTBEAT)  # its process is none of ours any more
    new, removed = (state.create_node(*OWNER, key, 0) for key in (b"new", b"removed"))
    with pytest.raises(ValueError, match="already in use"):
        state.create_node(*OWNER, b"new", 0)
    state.delete_node(OWNER[0], removed)  # it has never been online
    for found in (state, new_state(path)):
        keys = (b"old", b"new", b"removed")
        assert [*map(found.get_node_id_by_public_key, keys)] == [old, new, None]
        (node,) = found.get_node_info(node_ids=[old])
        assert node.name == "before"


def test_each_node_gets_its_own_messages_in_order_and_once(office):
    nodes = [office.client()[1] for _ in range(2)]
    texts = ["first", "second", "third"]
    for text in texts:
        messages = [office.request_to(node, text) for node in nodes]
        office.arrivals.push_messages(messages)
    taken = [office.state.get_message_ins(nodes[0].node_id, limit=1) for _ in range(4)]
    assert [len(messages) for messages in taken] == [1, 1, 1, 0]
    names = [messages[0].metadata.message_id for messages in taken[:3]]
    assert len(set(names)) == 3
    assert len(office.state.get_message_ins(nodes[1].node_id, limit=None)) == 3
    assert not office.state.has_messages(nodes[0].node_id)


def test_what_a_node_did_not_fetch_in_time_leaves_no_parts(office):
    _, node = office.client()
    for ttl in (0.05, 60.0):
        message = office.request_to(node, f"for {ttl} s")
        message.metadata.ttl = ttl
        office.arrivals.push_messages([message])
        time.sleep(0.1)
        assert len(office.state.object_store) == 3
    (found,) = office.state.get_message_ins(node.node_id, limit=None)
    assert found.metadata.ttl == 60.0


# ------------------------------------------------------------------ the bytes


@pytest.mark.parametrize("parts", [[], [b""], [b"a", b"", b"bc" * 200]])
def test_a_parcel_is_read_as_it_was_written(parts):
    read = Parcel()
    read.ParseFromString(Parcel(parts).SerializeToString())
    assert read.parts == parts


def test_a_parcel_that_ends_early_is_refused():
    whole = Parcel([b"abc"]).SerializeToString()
    for end in range(1, len(whole)):
        with pytest.raises(ValueError, match="ends early"):
            Parcel().ParseFromString(whole[:end])
