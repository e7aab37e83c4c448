"""The processes of Flower on a server machine, as argument lists; starts nothing."""

import socket
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

from fedgs.config.fields import check_ranges, flag
from fedgs.deployment import (
    INSECURE,
    LOG_JSON,
    QUIET,
    Command,
    address_of,
    check_loopback,
    event_log_variable,
    file_of,
    read_host,
    without_proxy,
)
from fedgs.errors import wrap_error
from fedgs.process import RUNS_VARIABLE

CERTIFICATES = {
    "ca.crt": "--ssl-ca-certfile",
    "server.crt": "--ssl-certfile",
    "server.key": "--ssl-keyfile",
}


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What `fedgs deploy server` is asked for.

    Attributes:
        state: directory of the run folders.
        certs: not looked at if insecure.
    """

    state: Path = flag(
        Path("fedgs-server"),
        "Folder of the server, with its run folders.",
        names=("--state-dir",),
    )
    host: str = flag("127.0.0.1", "Address to listen on; 0.0.0.0 means all addresses.")
    port: int = flag(
        8000,
        "Port that clients and submitters connect to.",
        at_least=1,
        at_most=65535,
    )
    certs: Path = flag(
        Path("certs"), "Folder with the certificates, made by `fedgs deploy certs`."
    )
    insecure: bool = flag(False, INSECURE)
    log_json: Path | None = flag(None, LOG_JSON)

    def __post_init__(self) -> None:
        """Checks host and port; makes the state directory absolute."""
        check_ranges(self)
        object.__setattr__(self, "host", read_host("host", self.host))
        object.__setattr__(self, "state", self.state.expanduser().absolute())

    def command(self) -> Command:
        """Returns the SuperLink's command; its environment is the SuperExec's too.

        Raises:
            UserError: a missing certificate, or plain text on a network.
        """
        command = [sys.executable, "-m", "server.launch.superlink"]
        if self.insecure:
            check_loopback(self.host)
            command.append("--insecure")
        else:
            for name, flag in CERTIFICATES.items():
                command += [flag, file_of("certs", self.certs / name)]
            command.append("--enable-supernode-auth")
        command += ["--host", self.host, "--port", str(self.port)]
        # Flower would start the SuperExec itself; `supervise` does, and ends it.
        command += ["--isolation", "process"]
        # Only what is installed here is run, never packages that a run asks for.
        command.append("--disable-runtime-dependency-installation")
        environment = {
            **QUIET,
            "FLWR_HOME": str(self.state / "flwr"),
            RUNS_VARIABLE: str(self.state / "runs"),
            **without_proxy(self.host),
        }
        return command, environment | event_log_variable(self.log_json)

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
            UserError: no certificates, a host that is none of this machine, or a port
                that is taken.
        """
        if not self.insecure:
            from server.launch.certs import check_issued  # takes a moment to load

            files = [file_of("certs", self.certs / name) for name in CERTIFICATES]
            with wrap_error(OSError, f"certs = {self.certs}: broken", "make them anew"):
                context = ssl.create_default_context(cafile=files[0])
                context.load_cert_chain(*files[1:], password="")  # it asks nobody
            authority, certificate, _ = map(Path, files)
            check_issued(certificate, authority)
        problem = f"host = {self.host} and port = {self.port} cannot be used"
        remedy = "give an address of this machine, or another port"
        with wrap_error(OSError, problem, remedy):
            family, *_, where = socket.getaddrinfo(self.host, self.port)[0]
            socket.create_server(where[:2], family=family).close()

    @property
    def _own_address(self) -> str:
        """HOST:PORT by which this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return address_of(host, self.port)
