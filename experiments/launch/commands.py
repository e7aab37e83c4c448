"""The Flower commands of a server machine and of a client machine, as argument lists.

Nothing is started here: `fedgs deploy` prints these and then starts or becomes them.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from experiments.launch.certs import check_name
from experiments.launch.flower_app import QUIET
from experiments.launch.processes import check_insecure, file_of, split_address
from experiments.launch.superlink import CONTROL_VARIABLE, HEALTH_PATH, networks_of
from fedgs.errors import UserError
from fedgs.event_log import EVENT_LOG_VARIABLE
from fedgs.process import RUNS_VARIABLE

Command = tuple[list[str], dict[str, str]]  # arguments, environment


@dataclass(frozen=True, kw_only=True)
class Server:
    """What `fedgs deploy server` was asked for.

    Attributes:
        host, port: to listen on.
        state: directory, absolute: Flower's database, run folders.
        certs: folder of `fedgs deploy certs`; not looked at if insecure.
        insecure, insecure_network: no TLS and no authentication; the second flag for
            any host but the loopback.
        control_from: networks that may submit runs beside this machine.
        log_json: file of structured events.
    """

    host: str
    port: int
    state: Path
    certs: Path
    insecure: bool = False
    insecure_network: bool = False
    control_from: str = ""
    log_json: Path | None = None

    def command(self) -> Command:
        """Returns the SuperLink's command; its environment is the SuperExec's too.

        Raises:
            UserError: a missing certificate, or plain text on a network.
        """
        check_insecure(self.host, self.insecure, self.insecure_network)
        networks_of(self.control_from)
        if not 0 < self.port < 65536:
            raise UserError(f"port = {self.port}: give --port from 1 to 65535")
        command = [sys.executable, "-m", "experiments.launch.superlink"]
        if self.insecure:
            command.append("--insecure")
        else:
            for flag, name in (
                ("--ssl-ca-certfile", "ca.crt"),
                ("--ssl-certfile", "server.crt"),
                ("--ssl-keyfile", "server.key"),
            ):
                command += [flag, file_of("certs", self.certs / name)]
            command.append("--enable-supernode-auth")
        command += ["--host", self.host, "--port", str(self.port)]
        command += ["--database", str(self.state / "superlink.db")]
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
        command = [sys.executable, "-m", "experiments.launch.superexec", *access]
        return [*command, "--runtime-api-address", self._own_address]

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
class Client:
    """What `fedgs deploy client` was asked for.

    Attributes:
        name: under which the client is registered.
        data: as --data of `fedgs train`, only this client's own.
        server: HOST:PORT.
        state: directory, absolute: discriminators, the client's own count.
        ca, key: certificate of the authority, private key; not used if insecure.
        limits: TOML file of what the client agrees to.
        settings: more of its data: data_dir, polarity, device, ...
        stock: Flower's own SuperNode, slow, which runs the server's code.
        port: of the stock SuperNode's local interface.
    """

    name: str
    data: str
    server: str
    state: Path
    ca: Path | None = None
    key: Path | None = None
    limits: Path | None = None
    settings: tuple[tuple[str, str | int | float | bool], ...] = ()
    stock: bool = False
    port: int | None = None
    insecure: bool = False
    insecure_network: bool = False
    log_json: Path | None = None

    def command(self) -> Command:
        """Returns the SuperNode's command.

        Raises:
            UserError: a missing key or certificate, a name that is none, or plain text
                on a network.
        """
        check_name(self.name)
        host, _ = split_address(self.server)
        check_insecure(host, self.insecure, self.insecure_network)
        command = [sys.executable, "-m", "clients.resident"]
        command += ["--superlink", self.server]
        if self.insecure:
            command.append("--insecure")
        else:
            command += ["--root-certificates", file_of("ca", self.ca)]
            command += ["--auth-supernode-private-key", file_of("key", self.key)]
        if self.stock:
            command.append("--stock")
        if self.port is not None:
            command += ["--port", str(self.port)]
        command += ["--node-config", self._node_config()]
        environment = {**QUIET, "FLWR_HOME": str(self.state / "flwr")}
        return command, environment | _logging(self.log_json)

    def _node_config(self) -> str:
        values = {"name": self.name, "data": self.data, "state-dir": str(self.state)}
        if self.limits is not None:
            values["limits"] = file_of("limits", self.limits)
        values |= {name.replace("_", "-"): value for name, value in self.settings}
        return " ".join(
            f"{name}={toml_value(name, value)}" for name, value in values.items()
        )


def connection(server: str, ca: Path | None, insecure: bool, on_network: bool) -> str:
    """Returns the user's config.toml for Flower: how to reach the server.

    Raises:
        UserError: no certificate, or plain text on a network.
    """
    host, _ = split_address(server)
    check_insecure(host, insecure, on_network)
    access = "insecure = true"
    if not insecure:
        access = f'root-certificates = "{file_of("ca", ca)}"'
    return (
        '[superlink]\ndefault = "server"\n\n[superlink.server]\n'
        f'address = "{server}"\n{access}\n'
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
