"""What the processes of a deployment are started with: state, environment, command.

`fedgs deploy client` becomes Flower's process: one pid, its signals, its exit code.
Nothing supervises it but systemd. `fedgs deploy server` has several processes
(experiments/launch/supervisor.py).
"""

import ipaddress
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedgs.errors import UserError
from fedgs.process import make_private


def check_insecure(host: str, insecure: bool, on_network: bool) -> None:
    """Refuses plain text on a network, unless asked for twice.

    Raises:
        UserError: says what is at stake, and the second flag.
    """
    if on_network and not insecure:
        raise UserError("insecure_network: goes with --insecure; leave it out")
    if insecure and not on_network and not is_loopback(host):
        raise UserError(
            f"insecure = True: {host} is not this machine alone: without TLS anybody "
            "on the way reads and changes messages and poses as a client; give "
            "certificates (fedgs deploy certs), or add --insecure-network"
        )


def is_loopback(host: str) -> bool:
    """Tells whether a host name or address is this machine's own loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT or [IPv6]:PORT.

    Raises:
        UserError: another form.
    """
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"server = {address!r}: give HOST:PORT, such as 10.0.0.1:8000")
    return host, int(port)


def file_of(name: str, path: Path | None) -> str:
    """Returns the absolute path of a file that must be there.

    Raises:
        UserError: names the flag.
    """
    flag = f"--{name.replace('_', '-')}"
    if path is None:
        raise UserError(f"{name} is unset: give {flag}, or --insecure on one machine")
    path = path.expanduser().absolute()
    if not path.is_file():
        raise UserError(f"{name} = {path}: no such file; give {flag} a file")
    return str(path)


def make_state(folder: Path) -> Path:
    """Makes a state directory with mode 0700 and returns its absolute path.

    Raises:
        UserError: it cannot be made, or others can look into it.
    """
    folder = folder.expanduser().absolute()
    make_private("state_dir", folder)
    return folder


def become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replaces this process by a command of this installation; does not return.

    What it writes is for its own user alone. A signal that comes too early for it waits
    until its `end_on_signals`.
    """
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    os.execvpe(command[0], list(command), full_environment(environment))


def full_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with this installation's commands first."""
    # Flower starts its commands by name: these must be the ones of this installation.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, **more}
