"""What makes Flower faster from outside its public API: all of it is in this module.

Each of four parts is used where this Flower has what it replaces, by name and by
parameters; a warning says what it has not. The first one is for runs of a hundred
rounds and more; `FEDGS_FAST_MESSAGES=1` has it in any run, and 0 in none. Results are
the same either way.

`hasten_simulation` hands messages to simulated nodes at once, and each node to one
worker. Flower looks for new messages ten times a second and gives a message to
whichever worker is idle, which then reads the node's state from disk. Here pushing a
message wakes the loop that looks for it, a node always gets the same worker, and the
next message is already there when a worker has answered one.

`make_resident` has a SuperNode answer inside its own process, where Flower starts one
per message, look for messages after 0.2 s, where Flower sleeps for three seconds,
and connect again for as long as it is asked to run (`clients.resident`).

`hasten_pulls` has parts of a message looked for again after 20 ms, where Flower sleeps
for a second.

`silence_ray` leaves out Ray's dashboard, which no setting of Ray's does: a process that
nobody looks at, and that asks the metadata service of a cloud which cloud this is.
"""

import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from logging import WARNING
from operator import attrgetter
from queue import Empty, Queue, SimpleQueue
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from clients import CLIENT_APP_RAISED
from fedgs.process import FAST_VARIABLE

SCAN_SECONDS = 0.5  # between looks at all nodes, for messages from before the change
IDLE_LEAST = 0.2  # seconds between a client's looks for a message
IDLE_SHARE = 0.1  # of the time without one: whoever is rarely asked looks rarely
RECONNECT_SECONDS = 2.0  # until a connection that ended is made anew
MOST_RECONNECT_SECONDS = 8.0  # after several attempts in a row
TELL_AGAIN_SECONDS = 600.0  # until a reason that stays is told once more
PULL_SECONDS = 0.02  # until the second look for a part that is not there yet

VCE = "flwr.server.superlink.fleet.vce"
LOOP = "flwr.supernode.start_client_internal"
COMMAND = "flwr.supernode.cli.flower_supernode"
CONNECTION = "flwr.supernode.fleet_http_connection"
RETRY = "flwr.supercore.retry.http_retry"
INFLATABLE = "flwr.supercore.inflatable"
NODE_STATE = "flwr.supernode.nodestate.in_memory_nodestate:InMemoryNodeState"
# module:name -> its parameters; None: any, or it is no function
SIMULATION: Mapping[str, str | None] = {
    f"{VCE}.vce_api:add_messages_to_queue": "state queue nodes_mapping f_stop",
    f"{VCE}.backend.raybackend:RayBackend.process_message": "self message context",
    f"{VCE}.backend.raybackend:RayBackend.num_workers": None,
    "flwr.superlink.grid.inmemory_grid:InMemoryGrid.push_messages": "self messages",
}
PULLS: Mapping[str, str | None] = {
    f"{INFLATABLE}.inflatable_utils:pull_objects": (
        "object_ids pull_object_fn max_concurrent_pulls max_time max_tries_per_object "
        "initial_backoff backoff_cap"
    )
}
DASHBOARD: Mapping[str, str | None] = {
    "ray._private.node:Node.start_api_server": "self include_dashboard raise_on_failure"
}
RESIDENT: Mapping[str, str | None] = {
    f"{LOOP}:_push_messages": "state object_store send push_object",
    f"{LOOP}:_insert_message": "msg state store",
    f"{LOOP}:time": None,
    f"{COMMAND}:_start_supernode_http_api": "config state_factory",
    f"{COMMAND}:start_client_internal": None,
    f"{CONNECTION}:flwr_exit": "code message event_type event_details emit_telemetry",
    f"{CONNECTION}:os": None,
    f"{RETRY}:os": None,
    "flwr.supernode.nodestate:NodeStateFactory": "objectstore_factory",
    f"{NODE_STATE}.get_messages_legacy": "self run_ids is_reply limit",
    f"{NODE_STATE}.record_message_processing_start": "self message_id",
    f"{NODE_STATE}.record_message_processing_end": "self message_id",
    f"{NODE_STATE}.get_run_series_context": "self series_id",
    f"{INFLATABLE}.inflatable_object:iterate_object_tree": "tree",
    f"{INFLATABLE}.inflatable_utils:inflate_object_from_contents": None,
}


def is_possible(part: str, needed: Mapping[str, str | None]) -> bool:
    """Tells whether this Flower has what a part replaces.

    Args:
        part: its name, for the warning.
        needed: as `SIMULATION`.
    """
    for place, parameters in needed.items():
        module, _, name = place.partition(":")
        try:
            found = attrgetter(name)(import_module(module))
            names = parameters and " ".join(inspect.signature(found).parameters)
        except (ImportError, AttributeError, TypeError, ValueError):
            names = ""
        if names != parameters:
            text = "%s is not possible, because the installed Flower has no %s(%s)"
            log(WARNING, text, part, place, parameters or "")
            return False
    return True


# ------------------------------------------------------------------ simulation


def hasten_simulation() -> None:
    """Installs fast messages if this process was asked for them and can have them.

    Importing the client app is early enough: Flower loads it before it starts the
    simulation's threads.
    """
    is_asked = os.environ.get(FAST_VARIABLE) == "1"  # by the launcher
    if is_asked and is_possible("fast_messages", SIMULATION):
        install_fast_messages()


def install_fast_messages() -> None:
    """Replaces the functions; must run before the simulation's threads start."""
    from flwr.server.superlink.fleet.vce import vce_api
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
    from flwr.superlink.grid.inmemory_grid import InMemoryGrid

    pending = SimpleQueue[int]()  # nodes with a new message
    stock_push = InMemoryGrid.push_messages

    def push_messages(self: InMemoryGrid, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        ids = stock_push(self, pushed)
        for message in pushed:
            pending.put(message.metadata.dst_node_id)
        return ids

    def add_messages_to_queue(
        state: Any,
        queue: "Queue[Message]",
        nodes_mapping: dict[int, int],
        f_stop: threading.Event,
    ) -> None:
        while not f_stop.is_set():
            try:
                nodes = [pending.get(timeout=SCAN_SECONDS)]
            except Empty:
                nodes = list(nodes_mapping)
            for node in nodes:
                for message in state.get_message_ins(node_id=node, limit=1):
                    queue.put(message)

    InMemoryGrid.push_messages = push_messages
    vce_api.add_messages_to_queue = add_messages_to_queue
    RayBackend.process_message = _process_message  # type: ignore[method-assign]
    RayBackend.num_workers = property(_threads)  # type: ignore[method-assign]


def _threads(backend: Any) -> int:
    """Returns how many messages are with the workers: one at work, one at hand."""
    if not backend.pool:
        return 0
    return 2 * backend.pool.num_actors


def _process_message(
    backend: Any,
    message: Message,
    context: Context,
) -> tuple[Message, Context]:
    """Runs the client app in the node's own worker."""
    import ray

    partition = int(context.node_config["partition-id"])
    actor = backend.pool.pool[partition % backend.pool.num_actors]
    # Past the pool, which gives work to whoever is idle.
    future = actor.run.remote(backend.app_fn, message, str(partition), context)
    _, reply, updated = ray.get(future)
    return reply, updated


def silence_ray() -> None:
    """Keeps Ray from asking a cloud's metadata service, in a process that starts it.

    As early as `hasten_simulation`; in all other processes this does nothing.
    """
    if f"{VCE}.vce_api" not in sys.modules:
        return
    # Of a device that may be a TPU, Ray asks the cloud. None is used here.
    os.environ["TPU_VISIBLE_CHIPS"] = ""
    if is_possible("a Ray without a dashboard", DASHBOARD):
        from ray._private.node import Node

        def start_api_server(
            self: Node,
            *,
            include_dashboard: bool | None,
            raise_on_failure: bool,
        ) -> None:
            """Starts none."""

        Node.start_api_server = start_api_server


# ------------------------------------------------------------------ resident client


class Waiting:
    """Stands in for the module `time` of the SuperNode's loop: it sleeps less."""

    def __init__(self) -> None:
        """Starts as if asked just now."""
        self.last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleeps for a share of the time without a message, at most as long as told."""
        waited = time.monotonic() - self.last
        time.sleep(min(max(IDLE_LEAST, IDLE_SHARE * waited), seconds))


def make_resident(client_app: ClientApp) -> None:
    """Replaces the functions; must run before the SuperNode starts.

    Args:
        client_app: answers the messages, in this process.
    """
    names = (LOOP, COMMAND, CONNECTION, RETRY)
    modules: Iterable[Any] = map(import_module, names)
    loop, command, connection, retry = modules
    # Only in this module: the rest of Flower keeps its clock.
    waiting = Waiting()
    loop.time = waiting
    stock_push = loop._push_messages
    loop._push_messages = _answering(client_app, loop, waiting, stock_push)
    # No Runtime API: nobody else answers. Of the server, only its end is used.
    server = SimpleNamespace(should_exit=False)
    thread = SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False)
    command._start_supernode_http_api = lambda *config: (server, thread)
    command.start_client_internal = lasting(command.start_client_internal)
    # Whose key is not known (any more) connects again; Flower's ends the process.
    connection.flwr_exit = refused_unless_final(connection.flwr_exit)
    without_kill = SimpleNamespace(getpid=os.getpid, kill=_refused)
    connection.os = without_kill
    retry.os = without_kill
    threading.excepthook = _without_connections(threading.excepthook)
    hasten_pulls()


def _answering(
    client_app: ClientApp,
    loop: Any,
    waiting: "Waiting",
    stock_push: Callable[..., None],
) -> Callable[..., None]:
    """Returns a `_push_messages` that first answers, here, what was pulled."""

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
    # The one from the store has lost its id, by which the reply refers to it.
    message.metadata.__dict__["_message_id"] = name
    series = state.get_run(announced.metadata.run_id).series_id
    return client_app(message=message, context=state.get_run_series_context(series))


def lasting(stock: Callable[..., None]) -> Callable[..., None]:
    """Returns a `start_client_internal` that connects again when it was given up.

    Flower's returns then, and its process ends with code 0 as if it had been asked to.
    SIGTERM and Ctrl-C pass through as `SystemExit`, with 0. A client may wait for days
    until its key is registered: it tells of that seldom.
    """
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.nodestate import NodeStateFactory

    def start(**config: Any) -> None:
        told = ""
        told_at = -math.inf
        pause = RECONNECT_SECONDS
        while True:
            # What was half received or half sent is gone: the server asks again.
            objects = ObjectStoreFactory()
            config["state_factory"] = NodeStateFactory(objectstore_factory=objects)
            reason = "the connection to the server has ended"
            began = time.monotonic()
            try:
                stock(**config)
            except ConnectionError as error:
                reason = str(error)
            now = time.monotonic()
            if now - began > MOST_RECONNECT_SECONDS:  # it was a connection
                told = ""
                pause = RECONNECT_SECONDS
            if reason != told or now - told_at >= TELL_AGAIN_SECONDS:
                log(WARNING, "%s; trying again every few seconds", reason)
                told = reason
                told_at = now
            time.sleep(pause)
            pause = min(2 * pause, MOST_RECONNECT_SECONDS)

    return start


def _refused(*_: object) -> None:
    """Stands in for `os.kill`, by which Flower ends a client that is refused."""
    raise ConnectionError(
        "the server refuses this client's signature: set the clocks of both machines, "
        "or register the key of this client"
    )


def _without_connections(stock: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Returns a `threading.excepthook` that prints nothing where a connection ended.

    A heartbeat is refused beside the loop, whose own next request tells of it.
    """

    def hook(failure: Any) -> None:
        if not issubclass(failure.exc_type, ConnectionError):
            stock(failure)

    return hook


def refused_unless_final(stock: Callable[..., None]) -> Callable[..., None]:
    """Returns a `flwr_exit` that ends the process only for a wrong certificate.

    A key may be registered later, and a process that was killed counts as online until
    its heartbeat has run out.
    """

    def leave(code: int, message: str = "", **more: Any) -> None:
        if "certificate" in message.lower():
            stock(code, message, **more)
        line = " ".join(message.split())  # Flower's has two
        raise ConnectionError(
            f"{line.rstrip('.')}: is the key of this client registered? Ask who starts "
            "the runs"
        )

    return leave


# ------------------------------------------------------------------ parts of messages


def hasten_pulls(most: float | None = None) -> None:
    """Has parts of a message that are on their way looked for soon.

    Args:
        most: seconds to wait for them; None is Flower's own limit.
    """
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    if is_possible("pulls", PULLS) and pull_objects.__kwdefaults__:
        pull_objects.__kwdefaults__["initial_backoff"] = PULL_SECONDS
        if most is not None:
            pull_objects.__kwdefaults__["max_time"] = most
