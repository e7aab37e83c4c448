"""What is replaced of Flower 1.41: a handful of functions, and none of another version.

`hasten_simulation` hands messages to simulated nodes at once, and each node to one
worker. Flower looks for new messages ten times a second and gives a message to
whichever worker is idle, which then reads the node's state from disk. Here pushing a
message wakes the loop that looks for it, a node always gets the same worker, the next
message is already there when a worker has answered one, and a reply wakes the server.
Results do not change, for a node's state is on disk after every answer either way
(`clients.workers`). The launcher asks for it by an
environment variable, because the functions are in use before a run's settings are
known.

`make_resident` has a SuperNode answer inside its own process and connect again for as
long as it is asked to run (`clients.resident`).
"""

import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from email.utils import parsedate_to_datetime
from logging import WARNING
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import flwr
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from clients import CLIENT_APP_RAISED
from clients.parcels import deliver_in_parcels
from fedgs.process import FAST_VARIABLE, KNOWN_VERSION, OBJECT_SECONDS

SCAN_SECONDS = 0.5  # between looks at all nodes, for messages from before the change
POLL_LEAST, POLL_MOST = 0.05, 3.0  # seconds between looks for a message
POLL_SHARE = 0.02  # of the time without one: whoever is rarely asked looks rarely
HEARTBEAT_SECONDS = 10  # Flower's least; its 30 keep a killed node out for a minute
RECONNECT_SECONDS = 5.0  # at most, between tries to reach the server
ACTIVATION_SECONDS = 3.0  # at most, between tries to be taken for online
AGAIN_SECONDS = 2.0  # until a connection that ended is made anew
SKEW_SECONDS = 2.0  # of the clock, from which on it is corrected
CLOCK_TRIES, CLOCK_SECONDS = 6, 1.0  # a server writes its date once a second
NOT_ACTIVATED = 2004  # Flower's ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
UNAUTHORIZED = 401
# What TLS says where waiting mends nothing: another authority or name, no TLS at all.
FINAL_TLS_ERRORS = ("certificate", "wrong_version_number", "wrong version number")
# But the server replaces a certificate, and either clock may be wrong for a while.
PASSING_TLS_ERRORS = ("certificate has expired", "certificate is not yet valid")


def is_known(what: str, otherwise: str) -> bool:
    """Tells whether this is the Flower whose functions are known; logs it if not."""
    if flwr.__version__.startswith(KNOWN_VERSION):
        return True
    text = "%s: written for Flower %sx, this is %s; %s"
    log(WARNING, text, what, KNOWN_VERSION, flwr.__version__, otherwise)
    return False


# ------------------------------------------------------------------ simulation


def hasten_simulation() -> None:
    """Installs fast messages if this process was asked for them and can have them.

    Importing the client app is early enough: Flower loads it before it starts the
    simulation's threads.
    """
    is_asked = os.environ.get(FAST_VARIABLE) == "1"
    if is_asked and is_known("fast_messages", "messages go as usual"):
        install_fast_messages()


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
        # Before they are taken: a node that is added meanwhile wakes the next look.
        self._wake.clear()
        return iter([self._nodes.popleft() for _ in range(len(self._nodes))])


def install_fast_messages() -> None:
    """Replaces the functions; must run before the simulation's threads start."""
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
            # An iterator without nodes is true: only None has all of them looked at.
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
    # Past the pool, which gives work to whoever is idle.
    future = actor.run.remote(backend.app_fn, message, str(partition), context)
    _, reply, updated = ray.get(future)
    return reply, updated


# ------------------------------------------------------------------ resident client


class Waiting:
    """Stands in for the module `time` of the SuperNode's loop: it sleeps less."""

    def __init__(self) -> None:
        """Starts as if asked just now."""
        self.last = self.told = time.monotonic()

    def hear(self) -> None:
        """Notes that the server says when there is a message."""
        self.told = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleeps for a share of the time without a message or word, within limits."""
        waited = time.monotonic() - max(self.last, self.told)
        pause = min(max(POLL_LEAST, POLL_SHARE * waited), POLL_MOST, seconds)
        time.sleep(pause)


def make_resident(client_app: ClientApp) -> None:
    """Replaces the functions; must run before the SuperNode starts.

    Args:
        client_app: answers the messages, in this process.
    """
    from flwr.supernode.fleet_http_client import FleetHttpClient

    loop = _module("flwr.supernode.start_client_internal")
    waiting = Waiting()
    # Only in this module: the rest of Flower keeps its clock.
    loop.time = waiting
    loop._push_messages = _answering(client_app, loop, waiting, loop._push_messages)
    # No Runtime API: nobody else answers. Of the server, only its end is used.
    server = SimpleNamespace(should_exit=False)
    thread = SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False)
    command = _module("flwr.supernode.cli.flower_supernode")
    command._start_supernode_http_api = lambda *config: (server, thread)
    command.start_client_internal = _lasting(command.start_client_internal)
    connection = _module("flwr.supernode.fleet_http_connection")
    connection.make_simple_http_retry_invoker = _persistent(
        connection.make_simple_http_retry_invoker
    )
    for name in ("flwr.supercore.heartbeat", "flwr.supernode.fleet_http_connection"):
        _module(name).HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_SECONDS
    _module("flwr.supercore.retry.http_retry").MAX_RETRY_DELAY = RECONNECT_SECONDS
    objects = _module("flwr.supercore.inflatable.inflatable_utils")
    # Flower's first pause is a second, which its callers do not set.
    objects.pull_objects.__kwdefaults__.update(initial_backoff=OBJECT_SECONDS)
    client: Any = FleetHttpClient
    deliver_in_parcels(client, waiting.hear)
    client.ActivateNode = _patient(client.ActivateNode)
    client.SendNodeHeartbeat = _beating(client.SendNodeHeartbeat)
    _correct_clock()


def _module(name: str) -> Any:
    """Returns a module, where its package may have a function of the same name."""
    module: ModuleType = importlib.import_module(name)
    return module


def _answering(
    client_app: ClientApp, loop: Any, waiting: Waiting, stock_push: Callable[..., None]
) -> Callable[..., None]:
    """Returns a `_push_messages` that first answers, here, what was pulled."""
    from flwr.app import Error

    def push_messages(state: Any, object_store: Any, **send: Any) -> None:
        for announced in state.get_messages_legacy(is_reply=False):
            name = announced.metadata.message_id
            try:
                reply = _answer(client_app, state, object_store, announced)
            except Exception:  # a message that is none: its text may be the server's
                reply = Message(Error(CLIENT_APP_RAISED, "refused"), reply_to=announced)
            object_store.delete(name)
            # Both at once: how long it took depends on data and would be sent.
            state.record_message_processing_start(name)
            state.record_message_processing_end(name)
            loop._insert_message(reply, state, object_store)
        state.task_store.clear()  # for processes that nobody starts
        stock_push(state=state, object_store=object_store, **send)
        # A run is going on: the next message is looked for soon.
        waiting.last = time.monotonic()

    return push_messages


def _answer(client_app: ClientApp, state: Any, store: Any, announced: Any) -> Any:
    """Returns the ClientApp's reply to a message whose parts are in the store."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    name = announced.metadata.message_id
    tree = store.get_object_tree(name)
    parts = {
        part.object_id: store.get(part.object_id) for part in iterate_object_tree(tree)
    }
    message: Any = inflate_object_from_contents(name, parts)
    message.metadata.__dict__["_message_id"] = name
    series = state.get_run(announced.metadata.run_id).series_id
    return client_app(message=message, context=state.get_run_series_context(series))


def _lasting(stock: Callable[..., None]) -> Callable[..., None]:
    """Returns a `start_client_internal` that connects again when it was given up.

    Flower's returns then, and its process ends with code 0 as if it had been asked to.
    SIGTERM and Ctrl-C pass through as `SystemExit`, with 0.
    """
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.nodestate import NodeStateFactory

    def start(**config: Any) -> None:
        while True:
            # What was half received or half sent is gone: the server asks again.
            objects = ObjectStoreFactory()
            config["state_factory"] = NodeStateFactory(objectstore_factory=objects)
            stock(**config)
            text = "the connection to the server has ended; connecting again in %g s"
            log(WARNING, text, AGAIN_SECONDS)
            time.sleep(AGAIN_SECONDS)

    return start


def _persistent(stock: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a `make_simple_http_retry_invoker` that gives up only what is final.

    Flower's gives up at any error of TLS, such as a handshake with a server that stands
    still, and sends this process Ctrl-C where a signature is refused.
    """
    import httpx

    def make() -> Any:
        invoker = stock()
        give_up = invoker.should_giveup

        def should_give_up(error: Exception) -> bool:
            if isinstance(error, httpx.HTTPStatusError):
                refused = error.response.status_code == UNAUTHORIZED
                return refused or give_up(error)  # a new connection may be accepted
            text = str(error).lower()
            if any(words in text for words in PASSING_TLS_ERRORS):
                log(WARNING, "no valid certificate of the server yet: %s", error)
                return False
            return any(words in text for words in FINAL_TLS_ERRORS)

        invoker.should_giveup = should_give_up
        return invoker

    return make


def _beating(stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a `SendNodeHeartbeat` whose refusals are tried again like lost ones.

    At Flower's they end the thread that sends heartbeats, or the process. A refusal
    that lasts ends the connection in the main thread, which makes it anew.
    """
    import httpx

    def beat(client: Any, request: Any) -> Any:
        try:
            response = stock(client, request)
        except httpx.HTTPStatusError as error:
            raise httpx.TransportError(str(error)) from error
        if not response.success:
            raise httpx.TransportError("the server does not know this node")
        return response

    return beat


def _patient(stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns an `ActivateNode` that waits until it may.

    The key may be registered later, a process that was killed counts as online until
    its heartbeat has run out, and a server may be in trouble for a while; Flower's own
    ends with an error in all these cases.
    """
    import httpx
    from flwr.supercore.error import FlowerError

    def activate(client: Any, request: Any) -> Any:
        pause = 1.0
        while True:
            try:
                return stock(client, request)
            except httpx.HTTPStatusError as error:
                refusal = FlowerError.from_json(error.response.text)
                status = error.response.status_code
                if refusal is not None and refusal.code == NOT_ACTIVATED:
                    reason = "this node's key is not registered yet, or the process "
                    reason += "before it is still taken for online"
                elif status == UNAUTHORIZED or status >= 500:
                    reason = f"the server answers with status {status}"
                else:
                    raise
            log(WARNING, "%s; trying again in %g s", reason, pause)
            time.sleep(pause)
            pause = min(2 * pause, ACTIVATION_SECONDS)

    return activate


def _correct_clock() -> None:
    """Has requests signed with the server's time where this machine's clock is wrong.

    Flower takes signatures from 5 seconds ahead to 5 minutes behind its own clock, and
    a refused node ends itself.
    """
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore import constant
    from flwr.supercore.date import now

    auth = _module("flwr.supernode.node_auth_http_interceptor")
    interceptor = auth.NodeAuthHttpInterceptor
    stock = interceptor.intercept
    signed = (
        TIMESTAMP_HEADER,
        constant.FLEET_HTTP_PUBLIC_KEY_HEADER,
        constant.FLEET_HTTP_SIGNATURE_HEADER,
    )
    offset = timedelta()

    def intercept(self: Any, context: Any, call_next: Any) -> Any:
        nonlocal offset
        response = stock(self, context, call_next)
        for _ in range(CLOCK_TRIES):
            date = response.headers.get("date")
            if response.status_code != UNAUTHORIZED or date is None:
                break
            difference = parsedate_to_datetime(date) - now()
            if abs((difference - offset).total_seconds()) < SKEW_SECONDS:
                time.sleep(CLOCK_SECONDS)  # the date may be of before a step, or a stop
            else:
                text = "this machine's clock differs from the server's by %.0f s: set "
                text += "it; meanwhile requests are signed with the server's time"
                log(WARNING, text, difference.total_seconds())
                offset = difference
            response.close()
            for name in signed:
                context.request.headers.pop(name, None)
            response = stock(self, context, call_next)
        return response

    interceptor.intercept = intercept
    auth.now = lambda: now() + offset
