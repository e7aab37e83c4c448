"""`flower-superlink` whose control is for its own machine only.

Flower 1.41 serves three interfaces on one port: Fleet (SuperNodes, authenticated by
their keys), Control (register a SuperNode, start a run) and Runtime (the ServerApp).
The open-source Control interface has no authentication: whoever reaches it registers a
key of his own and starts code of his own. Here, requests to anything but Fleet and
Flower's health check are refused unless they come from this machine. Users of other
machines reach it by `ssh -L`.

Requests of clients that weigh more than any answer does are not read.

Takes the arguments of flower-superlink; replaces nothing but the application that it
hands to uvicorn.
"""

import ipaddress
import logging
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from fedgs.deployment import FLOWER_REMEDY, MOST_ANSWER_BYTES

HEALTH_PATH = "/health"
FLEET = "/v1/fleet/"
OPEN_PATHS = (FLEET, HEALTH_PATH)
MOST_BYTES = MOST_ANSWER_BYTES + 2**20  # of a client's request, with its frame
GRACE_SECONDS = 3  # for open connections; clients keep theirs, and ask again elsewhere

App = Callable[..., Awaitable[None]]
log = logging.getLogger("uvicorn.error")


class Guard:
    """An ASGI application around Flower's, which sees only what may pass.

    Args:
        app: Flower's.
    """

    def __init__(self, app: App) -> None:
        """Keeps it."""
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on or answers 403."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif not self.may_pass(scope):
            text = b"for the server's own machine only: fedgs docs/deployment.md\n"
            await _refuse(scope, send, 403, text)
        elif is_too_large(scope):
            await _refuse(scope, send, 413, b"more than an answer weighs\n")
        else:
            await self.app(scope, receive, send)

    def may_pass(self, scope: Any) -> bool:
        """Tells whether a request is a client's, or comes from this machine."""
        path = str(scope.get("path", ""))
        # A path that goes up again could lead out of Fleet, behind this check.
        if scope["type"] == "http" and ".." not in path and path.startswith(OPEN_PATHS):
            return True
        if not scope.get("client"):
            return False
        peer = _address(scope["client"][0])
        if peer is None:
            return False
        if peer.is_loopback:
            return True
        # No other machine can have our address.
        return bool(scope.get("server")) and peer == _address(scope["server"][0])


def is_too_large(scope: Any) -> bool:
    """Tells whether a client's request weighs too much, or does not say what."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    if not str(scope["path"]).startswith(FLEET):
        return False
    headers = dict(scope.get("headers", ()))
    # A request that does not say its size could have any.
    size = headers.get(b"content-length", MOST_BYTES + 1)
    return int(size) > MOST_BYTES


async def _refuse(scope: Any, send: Any, status: int, text: bytes) -> None:
    line = "refused with status %d: %s from %s"
    log.warning(line, status, scope.get("path"), scope.get("client"))
    if scope["type"] == "http":
        headers = [(b"content-type", b"text/plain")]
        start = {"type": "http.response.start", "status": status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": text})


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # a name, a Unix socket
        return None
    # A server that listens on IPv6 sees its IPv4 peers in this form.
    return getattr(address, "ipv4_mapped", None) or address


def main() -> None:
    """Runs flower-superlink with the guard, or not at all."""
    try:
        import uvicorn

        # Its package has a function of the same name.
        flower = import_module("flwr.superlink.cli.flower_superlink")
        serve = flower.uvicorn.run
        if flower.uvicorn is not uvicorn:
            raise AttributeError("flower_superlink.uvicorn")
    except (ImportError, AttributeError) as error:
        sys.exit(
            f"flwr: this version of Flower is not known ({error}); {FLOWER_REMEDY}"
        )

    def run(app: App, **settings: Any) -> None:
        own = {
            "proxy_headers": False,  # no proxy may say where a request comes from
            "timeout_graceful_shutdown": GRACE_SECONDS,
        }
        serve(Guard(app), **settings | own)

    flower.uvicorn.run = run
    flower.flower_superlink()


if __name__ == "__main__":
    main()
