"""The process of Flower on a client machine, and how `fedgs deploy client` becomes it.

One pid, its signals, its exit code: nothing looks after it but systemd or Docker.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from fedgs.config.fields import check_ranges, flag
from fedgs.deployment import (
    LOG_JSON,
    QUIET,
    Access,
    Command,
    check_name,
    event_log_variable,
    file_of,
    full_environment,
    proxy_variables,
    toml_value,
)
from fedgs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ClientOptions(Access):
    """What `fedgs deploy client` is asked for.

    Attributes:
        state: directory: discriminators, the client's own count.
        key: not used if insecure, except for masks.
        peers: folder of the public keys of other clients.
        settings: more of its data: data_dir, background, device, ...
    """

    name: str = flag(
        MISSING,
        "Name of this client, as it is registered at the server.",
        metavar="",
    )
    data: str = flag(
        MISSING, "Images of this client, written as for --data of `fedgs train`."
    )
    key: Path | None = flag(None, "Private key of this client: the file NAME.key.")
    state: Path | None = flag(
        None,
        "Folder for what the client has to remember: its discriminators, and the "
        "count of what it has released. Default: fedgs-client-NAME.",
        names=("--state-dir",),
    )
    limits: Path | None = flag(None, "TOML file that lists what this client permits.")
    peers: Path | None = flag(
        None,
        "Folder with the public keys (NAME.pub) of the other clients. With it, this "
        "client takes part only in runs with secure_aggregation, whose masks hide its "
        "answers.",
    )
    min_peers: int | None = flag(
        None,
        "Smallest number of nodes, this one included, whose answers may be summed "
        "under masks. Default: all of --peers and this one.",
        at_least=2,
    )
    log_json: Path | None = flag(None, LOG_JSON)
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the address, and the range of every value."""
        super().__post_init__()
        check_ranges(self)

    @property
    def folder(self) -> Path:
        """The state directory, from any working directory."""
        state = self.state or Path(f"fedgs-client-{self.name}")
        return state.expanduser().absolute()

    def command(self) -> Command:
        """Returns the SuperNode's command.

        Raises:
            UserError: a missing key or certificate, a name that is none, plain text on
                a network, or a proxy that cannot be used.
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
        environment |= proxy_variables(self.server)
        return command, environment | event_log_variable(self.log_json)

    def _node_config(self) -> str:
        values: dict[str, Any] = {"name": self.name, "data": self.data}
        values["state-dir"] = str(self.folder)
        if self.limits is not None:
            values["limits"] = file_of("limits", self.limits)
        if self.peers is not None:
            values["peers"] = str(self.peers.expanduser().absolute())
            if self.key is None:
                raise UserError(
                    "key is unset: the other clients know this one by its key; give "
                    "--key beside --peers"
                )
            # Only with peers: by itself the key is Flower's, which has it as a flag.
            values["key"] = file_of("key", self.key)
        if self.min_peers is not None:
            values["min-peers"] = self.min_peers
        for name, value in self.settings.items():
            if value is not None:
                values[name.replace("_", "-")] = value
        return " ".join(f"{name}={toml_value(name, v)}" for name, v in values.items())


def become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replaces this process by a command of this installation; does not return.

    What it writes is for its own user alone. A signal that comes too early for it waits
    until its `end_on_signals`.
    """
    os.umask(0o077)
    # Unblocked by `end_on_signals`, the first thing that the new program does.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    os.execvpe(command[0], list(command), full_environment(environment))
