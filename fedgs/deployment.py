"""What the commands of a deployment's server, clients and users share.

Addresses, plain text, names, files, proxies, and the environment of Flower's processes.
"""

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import getproxies, proxy_bypass

from fedgs.config.checks import NODE_NAME, NODE_NAME_RULE
from fedgs.config.fields import flag, shortened
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
CLIENT_CURVE = "secp384r1"  # P-384, the one that Flower's SuperNodes use
FLOWER_REMEDY = "install the flwr that fedgs' uv.lock names"
INSECURE = "Use neither encryption nor authentication; on one machine only."
LOG_JSON = "File to append events to as JSON lines: node, round, outcome, duration."
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
# If the last label is a number, the name is an IP address in some other notation.
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!([0-9]+|0x.*)$){_LABEL}")
_HOST_RULE = "give a host name or an IP address, with no port, scheme, path or space"
_ADDRESS_RULE = (
    "give HOST:PORT or [IPV6]:PORT, such as 10.0.0.1:8000 or [::1]:8000, with a port "
    "from 1 to 65535 and no scheme, path or space"
)


@dataclass(frozen=True, kw_only=True)
class Access:
    """How a server is reached: its address, and the authority unless insecure."""

    server: str = flag(MISSING, "Address of the server: HOST:PORT or [IPV6]:PORT.")
    ca: Path | None = flag(None, "Certificate of the authority: the file ca.crt.")
    insecure: bool = flag(False, INSECURE)

    def __post_init__(self) -> None:
        """Checks the address, and keeps it as Flower is to have it."""
        address = address_of(*read_address("server", self.server))
        object.__setattr__(self, "server", address)

    def check(self) -> None:
        """Refuses plain text on a network, and TLS without a certificate.

        Raises:
            UserError: names the remedy.
        """
        if self.insecure:
            check_loopback(read_address("server", self.server)[0])
        else:
            file_of("ca", self.ca)


def check_name(name: str) -> None:
    """Refuses a client name that cannot be a file's name.

    Raises:
        UserError: names the rule.
    """
    if not re.fullmatch(NODE_NAME, name):
        raise UserError(f"client = {name!r}: give {NODE_NAME_RULE}")


def read_address(setting: str, text: str) -> tuple[str, int]:
    """Reads HOST:PORT or [IPV6]:PORT: the only reader of addresses that people give.

    Returns:
        The host, as `read_host` returns it, and the port.

    Raises:
        UserError: another form; names the setting.
    """
    before, _, port = text.rpartition(":")
    host = None
    # Without brackets nobody can tell where an IPv6 address ends.
    if ":" not in before or before.startswith("["):
        host = _host_in(before)
    number = 0
    if re.fullmatch("[0-9]{1,5}", port):
        number = int(port)
    if host is None or not 1 <= number <= 65535:
        raise UserError(f"{setting} = {shortened(text)!r}: {_ADDRESS_RULE}")
    return host, number


def address_of(host: str, port: int) -> str:
    """Returns HOST:PORT or [IPV6]:PORT."""
    if ":" in host:  # IPv6
        host = f"[{host}]"
    return f"{host}:{port}"


def read_host(setting: str, text: str) -> str:
    """Reads a host without a port; an IPv6 address may have brackets.

    Returns:
        A name in lower case, or an address in its shortest form, without brackets.

    Raises:
        UserError: another form; names the setting.
    """
    host = _host_in(text)
    if host is None:
        raise UserError(f"{setting} = {shortened(text)!r}: {_HOST_RULE}")
    return host


def _host_in(text: str) -> str | None:
    """Returns a host as `read_host` does; None for another form."""
    is_bracketed = text.startswith("[") and text.endswith("]")
    number = text[1:-1] if is_bracketed else text
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(number)
        # Neither the name of a link of this machine nor IPv4 in brackets.
        if "%" in text or (is_bracketed and address.version == 4):
            return None
        return str(getattr(address, "ipv4_mapped", None) or address)
    name = text.lower()
    if not text.isascii() or not _HOST_NAME.fullmatch(name):
        return None
    return name


def is_loopback(host: str) -> bool:
    """Tells whether a host of `read_host` is this machine, for certain."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_loopback(host: str) -> None:
    """Refuses plain text on a network.

    Raises:
        UserError: says what is at stake.
    """
    if not is_loopback(host):
        raise UserError(
            f"insecure = True: {host} is not this machine alone: without TLS anybody "
            "on the way reads and changes messages and poses as a client; give "
            "certificates (fedgs deploy certs)"
        )


def file_of(name: str, path: Path | None) -> str:
    """Returns the absolute path of a file that must be there.

    Raises:
        UserError: names the flag.
    """
    flag = f"--{name.replace('_', '-')}"
    if path is None:
        raise UserError(
            f"{name} is unset: encryption needs it; give {flag}, a file that `fedgs "
            "deploy certs` made, or --insecure on one machine"
        )
    path = path.expanduser().absolute()
    if not path.is_file():
        remedy = f"give {flag} a file that `fedgs deploy certs` made"
        raise UserError(f"{name} = {path}: there is no such file; {remedy}")
    return str(path)


def private_key(where: str, path: Path) -> "ec.EllipticCurvePrivateKey":
    """Reads a private key of a client.

    Args:
        where: names the file for people.
        path: the file.

    Raises:
        UserError: it is none as `fedgs deploy certs` makes.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    key = _loaded(path, partial(load_ssh_private_key, password=None))
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"{where}: it is no private key of `fedgs deploy certs`; give NAME.key"
        )
    check_curve(where, key.curve)
    return key


def public_key(where: str, path: Path) -> "ec.EllipticCurvePublicKey":
    """Reads a public key of a client; as `private_key`."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    key = _loaded(path, load_ssh_public_key)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(
            f"{where}: it is no public key of `fedgs deploy certs`; give NAME.pub"
        )
    check_curve(where, key.curve)
    return key


def _loaded(path: Path, load: Callable[[bytes], object]) -> object:
    """Returns the key in a file, None if there is none that can be read."""
    with contextlib.suppress(Exception):  # a parser raises anything of what it is given
        return load(read_bytes(path))
    return None


def check_curve(where: str, curve: "ec.EllipticCurve") -> None:
    """Refuses a client's key on another curve than `fedgs deploy certs` uses.

    Args:
        where: names the file of the key for people.
        curve: of the key.

    Raises:
        UserError: names the remedy.
    """
    # Signatures of a larger curve do not fit into what announces a masking key.
    if curve.name != CLIENT_CURVE:
        raise UserError(
            f"{where}: its key is on the curve {curve.name}, and clients have keys on "
            f"{CLIENT_CURVE}; make a new pair with `fedgs deploy certs`"
        )


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
    own = str(Path(sys.executable).parent)
    path = os.pathsep.join([own, os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, **more}


def without_proxy(*hosts: str) -> dict[str, str]:
    """Returns the environment in which this machine and hosts are reached directly."""
    # A proxy that the HTTP client cannot use makes it fail for every host. Those that
    # it can use stay, for example for data that is downloaded.
    value = "*"
    if _can_use_proxies():
        excepted = [getproxies().get("no", ""), *THIS_MACHINE, *hosts]
        value = ",".join(filter(None, excepted))
    return {"no_proxy": value, "NO_PROXY": value}


def proxy_variables(server: str) -> dict[str, str]:
    """Returns the environment in which a server is reached, and says by which proxy.

    Raises:
        UserError: the proxies of this environment cannot be used.
    """
    host, _ = read_address("server", server)
    named = getproxies()
    # Never http_proxy: only this machine is reached in plain text.
    variable = "all"
    if named.get("https"):
        variable = "https"
    excepted = named.get("no", "").replace(" ", "").split(",")
    is_excepted = proxy_bypass(host, named) or {"*", server} & {*excepted}
    if is_loopback(host) or is_excepted or not named.get(variable):
        return without_proxy(host)
    # Without the user's name and password.
    proxy = re.sub(r"(?s)^(\w*://)?.*@", r"\1", named[variable])
    remedy = f"put {host} into no_proxy to go without it"
    if not _can_use_proxies():
        given = ", ".join(f"{name}_proxy" for name in named)
        raise UserError(
            f"{variable}_proxy = {proxy}: {given} of this environment cannot be used; "
            f"give http://HOST:PORT, or install socksio for SOCKS, or {remedy}"
        )
    print(
        f"{server} is reached through the proxy {proxy} ({variable}_proxy), which sees "
        f"sizes and times, but no content; {remedy}",
        flush=True,
    )
    return {}


def _can_use_proxies() -> bool:
    import httpx

    try:
        httpx.Client(verify=False).close()
    except (ImportError, ValueError, httpx.InvalidURL):
        return False
    return True


@contextlib.contextmanager
def environment_of(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process for a `with` block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def event_log_variable(path: Path | None) -> dict[str, str]:
    """Returns the environment of a process that writes its events to a file."""
    if path is None:
        return {}
    return {EVENT_LOG_VARIABLE: str(path.absolute())}
