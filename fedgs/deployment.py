"""What the commands of a deployment's server, clients and users share.

Addresses, plain text, names, files, and the environment of Flower's processes.
"""

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgs.config.checks import NODE_NAME, NODE_NAME_RULE
from fedgs.config.fields import flag
from fedgs.errors import UserError
from fedgs.event_log import EVENT_LOG_VARIABLE
from fedgs.files import read_bytes

if TYPE_CHECKING:  # loaded where a key is read
    from cryptography.hazmat.primitives.asymmetric import ec

Command = tuple[list[str], dict[str, str]]  # arguments, environment

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
# Of a deployed client: a server reads no request that weighs more than it and a frame,
# for what it reads is held twice before anybody can look at it.
MOST_ANSWER_BYTES = 2**26
FLOWER_REMEDY = "install the flwr that fedgs' uv.lock names"
INSECURE = "No TLS, no authentication; on one machine only."
LOG_JSON = "Append events as JSON lines: who, round, outcome, duration."


@dataclass(frozen=True, kw_only=True)
class Access:
    """How a server is reached: its address, and the authority unless insecure."""

    server: str = flag(MISSING, "HOST:PORT of the server.")
    ca: Path | None = flag(None, "Certificate of the authority, ca.crt.")
    insecure: bool = flag(False, INSECURE)

    def check(self) -> None:
        """Refuses plain text on a network, and TLS without a certificate.

        Raises:
            UserError: names the remedy.
        """
        host, _ = split_address(self.server)
        if self.insecure:
            check_loopback(host)
        else:
            file_of("ca", self.ca)


def check_name(name: str) -> None:
    """Refuses a client name that cannot be a file's name.

    Raises:
        UserError: names the rule.
    """
    if not re.fullmatch(NODE_NAME, name):
        raise UserError(f"client = {name!r}: give {NODE_NAME_RULE}")


def check_loopback(host: str) -> None:
    """Refuses plain text on a network.

    Raises:
        UserError: says what is at stake.
    """
    is_loopback = host == "localhost"
    with contextlib.suppress(ValueError):
        is_loopback |= ipaddress.ip_address(host.strip("[]")).is_loopback
    if not is_loopback:
        raise UserError(
            f"insecure = True: {host} is not this machine alone: without TLS anybody "
            "on the way reads and changes messages and poses as a client; give "
            "certificates (fedgs deploy certs)"
        )


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


def private_key(where: str, path: Path) -> "ec.EllipticCurvePrivateKey":
    """Reads a private key; raises `UserError` if `fedgs deploy certs` made none."""
    return _ssh_key(where, path, "private", "NAME.key")


def public_key(where: str, path: Path) -> "ec.EllipticCurvePublicKey":
    """Reads a public key; raises `UserError` if `fedgs deploy certs` made none."""
    return _ssh_key(where, path, "public", "NAME.pub")


def _ssh_key(where: str, path: Path, kind: str, name: str) -> Any:
    from cryptography.hazmat.primitives import serialization as ssh
    from cryptography.hazmat.primitives.asymmetric import ec

    with contextlib.suppress(Exception):
        password = [None] if kind == "private" else []
        key = getattr(ssh, f"load_ssh_{kind}_key")(read_bytes(path), *password)
        if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
            return key
    raise UserError(f"{where}: is no {kind} key of `fedgs deploy certs`; give {name}")


def toml_value(name: str, value: str | int | float | bool) -> str:
    """Returns a value as Flower's command line reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)
    if any(character in value for character in '"\\\n'):
        raise UserError(
            f"{name} = {value!r}: double quotes, backslashes and line ends cannot be "
            "passed to Flower; choose another value"
        )
    return f'"{value}"'


def full_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with this installation's commands first."""
    # Flower starts its commands by name: these must be the ones of this installation.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, **more}


def event_log_variable(path: Path | None) -> dict[str, str]:
    """Returns the environment of a process that writes its events to a file."""
    return {} if path is None else {EVENT_LOG_VARIABLE: str(path.absolute())}
