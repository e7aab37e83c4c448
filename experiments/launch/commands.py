"""The Flower commands of a server machine and of a client machine, as argument lists.

Nothing is started here: `fedgs deploy` prints these and then starts or becomes them.
"""

import socket
import ssl
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path

from experiments.launch.certs import check_name
from experiments.launch.flower_app import QUIET
from experiments.launch.processes import check_insecure, file_of, split_address
from experiments.launch.superlink import CONTROL_VARIABLE, HEALTH_PATH, networks_of
from fedgs.config.fields import check_ranges, flag
from fedgs.errors import UserError, explained
from fedgs.event_log import EVENT_LOG_VARIABLE
from fedgs.process import RUNS_VARIABLE

Command = tuple[list[str], dict[str, str]]  # arguments, environment


CERTIFICATES = {
    "ca.crt": "--ssl-ca-certfile",
    "server.crt": "--ssl-certfile",
    "server.key": "--ssl-keyfile",
}
INSECURE = "No TLS, no authentication; on one machine only."
INSECURE_NETWORK = "With --insecure: on a network too."
LOG_JSON = "Append events as JSON lines: who, round, outcome, duration."


@dataclass(frozen=True, kw_only=True)
class Server:
    """What `fedgs deploy server` is asked for.

    Attributes:
        state: directory of the run folders.
        certs: not looked at if insecure.
        control_from: networks that may submit runs beside this machine.
    """

    state: Path = flag(Path("fedgs-server"), "Run folders.", names=("--state-dir",))
    host: str = flag("127.0.0.1", "Address to listen on; 0.0.0.0 is all.")
    port: int = flag(8000, "The only port.", at_least=1, at_most=65535)
    certs: Path = flag(Path("certs"), "Of `fedgs deploy certs`.")
    control_from: str = flag("", "Networks that may submit runs, e.g. 10.0.0.0/24.")
    insecure: bool = flag(False, INSECURE)
    insecure_network: bool = flag(False, INSECURE_NETWORK)
    log_json: Path | None = flag(None, LOG_JSON)

    def __post_init__(self) -> None:
        """Checks the port; the state directory holds from any working directory."""
        check_ranges(self)
        object.__setattr__(self, "state", self.state.expanduser().absolute())

    def command(self) -> Command:
        """Returns the SuperLink's command; its environment is the SuperExec's too.

        Raises:
            UserError: a missing certificate, or plain text on a network.
        """
        check_insecure(self.host, self.insecure, self.insecure_network)
        networks_of(self.control_from)
        command = [sys.executable, "-m", "experiments.launch.superlink"]
        if self.insecure:
            command.append("--insecure")
        else:
            for name, flag in CERTIFICATES.items():
                command += [flag, file_of("certs", self.certs / name)]
            command.append("--enable-supernode-auth")
        command += ["--host", self.host, "--port", str(self.port)]
        command += ["--isolation", "process"]  # who starts it can start it again
        command.append("--disable-runtime-dependency-installation")
        environment = {
            **QUIET,
            "FLWR_HOME": str(self.state / "flwr"),
            RUNS_VARIABLE: str(self.state / "runs"),
        }
        if self.control_from:
            environment[CONTROL_VARIABLE] = self.control_from
        return command, environment | _logging(self.log_json)

    def superexec(self) -> list[str]:
        """Returns the command of Flower's SuperExec, which starts the runs."""
        access = ["--insecure"]
        if not self.insecure:
            access = ["--root-certificates", file_of("certs", self.certs / "ca.crt")]
        command = [str(Path(sys.executable).with_name("flower-superexec")), *access]
        return [*command, "--runtime-api-address", self._own_address]

    def check(self) -> None:
        """Refuses what the SuperLink would end of, before anything is started.

        Only for who holds the state directory.

        Raises:
            UserError: no certificates, or a port that is taken.
        """
        if not self.insecure:
            files = [file_of("certs", self.certs / name) for name in CERTIFICATES]
            with explained(OSError, f"certs = {self.certs}: broken", "make them anew"):
                context = ssl.create_default_context(cafile=files[0])
                context.load_cert_chain(*files[1:], password="")  # it asks nobody
        with explained(OSError, f"port = {self.port} on {self.host}", "give another"):
            family, *_, where = socket.getaddrinfo(self.host, self.port)[0]
            socket.create_server(where[:2], family=family).close()

    @property
    def certificates(self) -> dict[str, str]:
        """The files of certificates that run out one day, by whose they are."""
        if self.insecure:
            return {}
        names = {"server": "server.crt", "authority": "ca.crt"}
        return {who: file_of("certs", self.certs / n) for who, n in names.items()}

    @property
    def health(self) -> str:
        """The URL that the SuperLink answers while it serves."""
        scheme = "http" if self.insecure else "https"
        return f"{scheme}://{self._own_address}{HEALTH_PATH}"

    @property
    def _own_address(self) -> str:
        """HOST:PORT by which this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Access:
    """How a server is reached: its address, and the authority unless insecure."""

    server: str = flag(MISSING, "HOST:PORT of the server.")
    ca: Path | None = flag(None, "Certificate of the authority, ca.crt.")
    insecure: bool = flag(False, INSECURE)
    insecure_network: bool = flag(False, INSECURE_NETWORK)

    def check(self) -> None:
        """Refuses plain text on a network.

        Raises:
            UserError: names the remedy.
        """
        host, _ = split_address(self.server)
        check_insecure(host, self.insecure, self.insecure_network)

    def connection(self) -> str:
        """Returns the user's config.toml for Flower.

        Raises:
            UserError: no certificate, or plain text on a network.
        """
        self.check()
        access = "insecure = true"
        if not self.insecure:
            access = f'root-certificates = "{file_of("ca", self.ca)}"'
        return (
            '[superlink]\ndefault = "server"\n\n[superlink.server]\n'
            f'address = "{self.server}"\n{access}\n'
        )


@dataclass(frozen=True, kw_only=True)
class Client(Access):
    """What `fedgs deploy client` is asked for.

    Attributes:
        state: directory: discriminators, the client's own count.
        key: not used if insecure, except for masks.
        peers: folder of the public keys of other clients.
        settings: more of its data: data_dir, polarity, device, ...
    """

    name: str = flag(MISSING, "As registered at the server.", metavar="")
    data: str = flag(MISSING, "This client's own, as --data of train.")
    key: Path | None = flag(None, "Private key of this client, NAME.key.")
    state: Path | None = flag(
        None,
        "Discriminators, own count; fedgs-client-NAME when unset.",
        names=("--state-dir",),
    )
    limits: Path | None = flag(None, "TOML file of what this client agrees to.")
    peers: Path | None = flag(
        None,
        "Folder with NAME.pub of the other clients: answers under masks only, in "
        "runs with --secure-aggregation.",
    )
    min_peers: int | None = flag(
        None,
        "Nodes, this one included, that a sum under masks needs; all of --peers and "
        "this one when unset.",
        at_least=2,
    )
    log_json: Path | None = flag(None, LOG_JSON)
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the range of every value."""
        check_ranges(self)

    @property
    def folder(self) -> Path:
        """The state directory, from any working directory."""
        state = self.state or Path(f"fedgs-client-{self.name}")
        return state.expanduser().absolute()

    def command(self) -> Command:
        """Returns the SuperNode's command.

        Raises:
            UserError: a missing key or certificate, a name that is none, or plain text
                on a network.
        """
        check_name(self.name)
        self.check()
        command = [sys.executable, "-m", "clients.resident"]
        command += ["--superlink", self.server]
        if self.insecure:
            command.append("--insecure")
        else:
            command += ["--root-certificates", file_of("ca", self.ca)]
            command += ["--auth-supernode-private-key", file_of("key", self.key)]
        command += ["--node-config", self._node_config()]
        environment = {**QUIET, "FLWR_HOME": str(self.folder / "flwr")}
        return command, environment | _logging(self.log_json)

    def _node_config(self) -> str:
        values: dict[str, str | int | float | bool]
        values = {"name": self.name, "data": self.data, "state-dir": str(self.folder)}
        if self.limits is not None:
            values["limits"] = file_of("limits", self.limits)
        if self.peers is not None:
            values["peers"] = str(self.peers.expanduser().absolute())
            if self.key is None:
                raise UserError("key is unset: give --key, by which --peers know it")
            values["key"] = file_of("key", self.key)
        if self.min_peers is not None:
            values["min-peers"] = self.min_peers
        values |= {
            name.replace("_", "-"): value for name, value in self.settings.items()
        }
        return " ".join(
            f"{name}={toml_value(name, value)}" for name, value in values.items()
        )


def who_submits(server: Server) -> str:
    """Returns who may submit runs to a server, in one line."""
    others = f" and from {server.control_from}" if server.control_from else ""
    return f"runs can be submitted from this machine{others}, and by ssh -L to it"


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


def _logging(path: Path | None) -> dict[str, str]:
    return {} if path is None else {EVENT_LOG_VARIABLE: str(path.absolute())}
