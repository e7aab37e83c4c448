"""`flower-superlink` whose control is for its own machine only.

Flower 1.41 serves three interfaces on one port: Fleet (SuperNodes, authenticated by
their keys), Control (register a SuperNode, start a run) and Runtime (the ServerApp).
The open-source Control interface has no authentication: whoever reaches it registers a
key of his own and starts code of his own. Here, requests to anything but Fleet and
Flower's health check are refused unless they come from this machine or from a network
in $FEDGS_CONTROL_FROM. Users of other machines reach it by `ssh -L`.

Around the same application lies a post office (`server.launch.post_office`): a
message takes one request where Flower takes eight. Its state is in memory but for the
clients' keys (`server.launch.link_state`).

Takes the arguments of flower-superlink; replaces nothing but the application that it
hands to uvicorn, and what makes its state.
"""

import ipaddress
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from fedgs.errors import explained

HEALTH_PATH = "/health"
CONTROL_VARIABLE = "FEDGS_CONTROL_FROM"  # networks, separated by commas
STATE_MAKER = "get_objectstore_linkstate_factories"  # of flwr.superlink.main
OPEN_PATHS = ("/v1/fleet/", HEALTH_PATH)
GRACE_SECONDS = 3  # for open connections; clients keep theirs, and ask again elsewhere

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
App = Callable[..., Awaitable[None]]
log = logging.getLogger("uvicorn.error")


class Guard:
    """An ASGI application around Flower's, which sees only what may pass.

    Args:
        app: Flower's.
        networks: that may use Control and Runtime beside this machine.
    """

    def __init__(self, app: App, networks: tuple[Network, ...] = ()) -> None:
        """Keeps both."""
        self.app, self.networks = app, networks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on or answers 403."""
        if scope["type"] == "lifespan" or self.may_pass(scope):
            await self.app(scope, receive, send)
            return
        log.warning("refused %s from %s", scope.get("path"), scope.get("client"))
        if scope["type"] == "http":
            headers = [(b"content-type", b"text/plain")]
            start = {"type": "http.response.start", "status": 403, "headers": headers}
            await send(start)
            text = b"for the server's own machine only: fedgs docs/deployment.md\n"
            await send({"type": "http.response.body", "body": text})

    def may_pass(self, scope: Any) -> bool:
        """Tells whether a request is for a client, or comes from where users are."""
        path = str(scope.get("path", ""))
        # A path that goes up again could lead out of Fleet, behind this check.
        if scope["type"] == "http" and ".." not in path and path.startswith(OPEN_PATHS):
            return True
        if not scope.get("client"):
            return False
        peer = _address(scope["client"][0])
        own = scope.get("server") and _address(scope["server"][0])
        if peer is None:
            return False
        if peer.is_loopback or peer == own:  # no other machine can have our address
            return True
        return any(peer in network for network in self.networks)


def networks_of(text: str) -> tuple[Network, ...]:
    """Reads networks such as 10.0.0.0/24,10.1.2.3.

    Raises:
        UserError: no network.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    with explained(ValueError, f"control_from = {text!r}", "give 10.0.0.0/24"):
        return tuple(ipaddress.ip_network(part) for part in parts)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # a name, a Unix socket
        return None
    # A server that listens on IPv6 sees its IPv4 peers in this form.
    return getattr(address, "ipv4_mapped", None) or address


def main() -> None:
    """Runs flower-superlink with the guard, or not at all."""
    networks = networks_of(os.environ.get(CONTROL_VARIABLE, ""))
    try:
        import uvicorn

        from server.launch.link_state import factories
        from server.launch.post_office import ROUTES, PostOffice

        # Its package has a function of the same name.
        flower = import_module("flwr.superlink.cli.flower_superlink")
        serve = flower.uvicorn.run
        if flower.uvicorn is not uvicorn:
            raise AttributeError("flower_superlink.uvicorn")
        api: Any = import_module("flwr.superlink.main")
        if not hasattr(api, STATE_MAKER):
            raise AttributeError(STATE_MAKER)
        setattr(api, STATE_MAKER, factories)
        logs: Any = import_module("flwr.supercore.http_logging")
        logs.ROUTINE_ACCESS_PATHS |= ROUTES  # no line in the log for each
    except (ImportError, AttributeError) as error:
        sys.exit(f"this Flower is not known ({error}); install flwr 1.41")

    def run(app: App, **settings: Any) -> None:
        own = {
            "proxy_headers": False,  # no proxy may say where a request comes from
            "timeout_graceful_shutdown": GRACE_SECONDS,
        }
        post_office = PostOffice(app)
        server: Any = uvicorn.Server
        stock_exit = server.handle_exit

        def handle_exit(*signal: Any) -> None:
            post_office.waiting.end()  # who waits would hold up the end
            stock_exit(*signal)

        server.handle_exit = handle_exit
        serve(Guard(post_office, networks), **settings | own)

    flower.uvicorn.run = run
    flower.flower_superlink()


if __name__ == "__main__":
    main()
