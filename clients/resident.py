r"""A client in one process: Flower's SuperNode with the ClientApp inside it.

    python -m clients.resident --superlink HOST:PORT --root-certificates ca.crt \
        --auth-supernode-private-key KEY --node-config 'name="a" data="..." ...'

The options are those of `flower-supernode`. The stock SuperNode starts an operating
system process per message, which imports torch and reads every state again, and sleeps
for seconds between looks. Here the models stay loaded; no port is opened, because
nobody else answers; only the installed fedgs is run, never code that a server sends;
and it connects again for as long as it is asked to run. For that a handful of functions
of one known Flower version are replaced, below; another version, or `--stock`, gets
Flower's own path.

Exit codes: 0 after SIGTERM or Ctrl-C, 2 for bad input, 1 for any other end.
"""

import importlib
import os
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from email.utils import parsedate_to_datetime
from logging import WARNING
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import flwr
from flwr.common.logger import log

from clients import CLIENT_APP_RAISED
from clients.site import Site
from fedgs.errors import UserError
from fedgs.process import KNOWN_VERSION, OBJECT_SECONDS, notify

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


class Waiting:
    """Stands in for the module `time` of the SuperNode's loop: it sleeps less.

    Privacy: public; how often a node looks depends on when it was asked.
    """

    def __init__(self) -> None:
        """Starts as if asked just now."""
        self.last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleeps for a share of the time without a message, within limits."""
        waited = time.monotonic() - self.last
        pause = min(max(POLL_LEAST, POLL_SHARE * waited), POLL_MOST, seconds)
        time.sleep(pause)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a client until it is told to end; see the module.

    Privacy: releases (epsilon, delta)-DP output; events: in the clients' own count.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    wants_stock = "--stock" in given
    given = [argument for argument in given if argument != "--stock"]
    is_known = flwr.__version__.startswith(KNOWN_VERSION)
    try:
        site = _site(given)
        _check_files(given)
        if wants_stock or not is_known:
            if not is_known:
                text = "clients.resident: written for Flower %sx, this is %s; a process"
                text += " is started for each message"
                log(WARNING, text, KNOWN_VERSION, flwr.__version__)
            command = str(Path(sys.executable).with_name("flower-supernode"))
            notify("READY=1")
            os.execv(command, [command, *given])
        site.open()
        notify("READY=1")  # it may still have to wait for the server
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv = ["flower-supernode", *given, "--isolation", "process"]
    install()
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


def _option(given: Sequence[str], wanted: str) -> str | None:
    """Returns the value of an option of the command line, None without it."""
    for place, argument in enumerate(given):
        name, has_value, value = argument.partition("=")
        if name == wanted:
            return value if has_value else "".join(given[place + 1 : place + 2])
    return None


def _site(given: Sequence[str]) -> Site:
    """Reads `--node-config` as Flower does, to refuse a wrong one at once."""
    from flwr.common.config import parse_config_args

    text = _option(given, "--node-config")
    if text is None:
        raise UserError("--node-config is missing: give name, data and state-dir")
    try:
        return Site.read(parse_config_args([text]))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--node-config {text}: {error}") from error


def _check_files(given: Sequence[str]) -> None:
    """Refuses files that Flower would end with a traceback or another code for."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    if ca := _option(given, "--root-certificates"):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
        except OSError as error:
            is_read = isinstance(error, ssl.SSLError)
            reason = "no PEM certificate" if is_read else error.strerror
            raise UserError(f"ca = {ca}: {reason}; give the server's ca.crt") from error
    if key := _option(given, "--auth-supernode-private-key"):
        try:
            found = load_ssh_private_key(Path(key).expanduser().read_bytes(), None)
        except (OSError, TypeError, ValueError, UnsupportedAlgorithm):
            found = None
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise UserError(
                f"key = {key}: not a private key of `fedgs deploy certs`; give NAME.key"
            )


def install() -> None:
    """Replaces the functions; must run before the SuperNode starts.

    Privacy: public; moves messages, reads none.
    """
    from flwr.supernode.fleet_http_client import FleetHttpClient

    loop = _module("flwr.supernode.start_client_internal")
    waiting = Waiting()
    loop.time = waiting
    loop._push_messages = _answering(loop, waiting, loop._push_messages)
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
    objects.pull_objects.__kwdefaults__.update(initial_backoff=OBJECT_SECONDS)
    client: Any = FleetHttpClient
    client.ActivateNode = _patient(client.ActivateNode)
    client.SendNodeHeartbeat = _beating(client.SendNodeHeartbeat)
    _correct_clock()


def _module(name: str) -> Any:
    """Returns a module, where its package may have a function of the same name."""
    found: ModuleType = importlib.import_module(name)
    return found


def _answering(
    loop: Any, waiting: Waiting, stock_push: Callable[..., None]
) -> Callable[..., None]:
    """Returns a `_push_messages` that first answers, here, what was pulled."""
    from flwr.app import Error, Message

    def push_messages(state: Any, object_store: Any, **send: Any) -> None:
        for announced in state.get_messages_legacy(is_reply=False):
            name = announced.metadata.message_id
            try:
                reply = _answer(state, object_store, announced)
            except Exception:  # a message that is none: its text may be the server's
                reply = Message(Error(CLIENT_APP_RAISED, "refused"), reply_to=announced)
            object_store.delete(name)
            # Both at once: how long it took depends on data and would be sent.
            state.record_message_processing_start(name)
            state.record_message_processing_end(name)
            loop._insert_message(reply, state, object_store)
        state.task_store.clear()  # for processes that nobody starts
        stock_push(state=state, object_store=object_store, **send)
        waiting.last = time.monotonic()

    return push_messages


def _answer(state: Any, store: Any, announced: Any) -> Any:
    """Returns the ClientApp's reply to a message whose parts are in the store."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    from clients.client_app import app

    name = announced.metadata.message_id
    tree = store.get_object_tree(name)
    parts = {
        part.object_id: store.get(part.object_id) for part in iterate_object_tree(tree)
    }
    message: Any = inflate_object_from_contents(name, parts)
    message.metadata.__dict__["_message_id"] = name
    series = state.get_run(announced.metadata.run_id).series_id
    return app(message=message, context=state.get_run_series_context(series))


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
                found = FlowerError.from_json(error.response.text)
                status = error.response.status_code
                if found is not None and found.code == NOT_ACTIVATED:
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
            found = parsedate_to_datetime(date) - now()
            if abs((found - offset).total_seconds()) < SKEW_SECONDS:
                time.sleep(CLOCK_SECONDS)  # the date may be of before a step, or a stop
            else:
                text = "this machine's clock differs from the server's by %.0f s: set "
                text += "it; meanwhile requests are signed with the server's time"
                log(WARNING, text, found.total_seconds())
                offset = found
            response.close()
            for name in signed:
                context.request.headers.pop(name, None)
            response = stock(self, context, call_next)
        return response

    interceptor.intercept = intercept
    auth.now = lambda: now() + offset


if __name__ == "__main__":
    main()
