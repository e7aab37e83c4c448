"""What every run on Flower is submitted with: a minimal app.

Imports neither torch nor Flower, so that `fedgs deploy` starts fast.
"""

import contextlib
import socket
import subprocess
import time

_APP = """\
[project]
name = "fedgs-run"
version = "0.1.0"

[tool.flwr.app]
publisher = "fedgs"

[tool.flwr.app.components]
serverapp = "server.server_app:app"
clientapp = "clients.client_app:app"

[tool.flwr.app.config]
"""


def app_project(config: str) -> str:
    """Returns the `pyproject.toml` of an app that names the installed packages.

    Args:
        config: the app's settings, lines of TOML.
    """
    return _APP + config


def free_port() -> int:
    """Returns a port of the loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(
    address: str,
    process: "subprocess.Popen[bytes]",
    timeout: float,
) -> bool:
    """Waits until a server listens; returns whether it does.

    Args:
        address: HOST:PORT.
        process: the process of the server; False as soon as it has ended.
        timeout: seconds.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1).close()
            return True
        time.sleep(0.1)
    return False
