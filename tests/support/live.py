"""A deployment of real processes: a server and two clients with digits of four people.

On this machine or on three hosts (`hosts.Network`), started as docs/deployment.md says.
"""

import contextlib
from pathlib import Path

import numpy as np
import psutil
import pytest

import runs
import tiny
from command_line import flags
from fedgs.data.load import load_data
from fedgs.process import SERVER_VARIABLE, processes_of
from hosts import Machines, Network, Process
from server.launch.certs import make_certificates
from server.launch.flower_app import free_port
from tiny import run_config

CLIENTS = ("a", "b")
OF_THE_DATA = ("data", "clients_per_round", "clients_per_node", "num_workers")
SETTINGS: dict[str, object] = tiny.SETTINGS | tiny.FULL_PARTICIPATION
SETTINGS |= dict.fromkeys(OF_THE_DATA)  # no flags
SETTINGS |= {"num_clients": 4, "node_sizes": "3,1", "num_classes": 10}
SETTINGS |= {"discriminator_steps": 1, "noise_multiplier": 0.1, "output": "digits"}
SETTINGS |= {"num_rounds": 20, "round_timeout": 900, "recipe": "algorithm-2"}


def prepare(folder: Path) -> Path:
    """Writes the clients' digits (a.npz, b.npz), those of all, and the limits."""
    pytest.importorskip("sklearn", reason="needs the digits of scikit-learn")
    data = load_data(run_config(data="digits", num_clients=4, image_size=16, seed=1))
    for name, clients in (("a", (0, 1, 2)), ("b", (3,)), ("all", range(4))):
        kept = np.concatenate([data.client_records[c][:60] for c in clients])
        arrays = {"images": data.images[kept], "labels": data.labels[kept]}
        np.savez(folder / f"{name}.npz", clients=np.repeat(clients, 60), **arrays)
    (folder / "limits.toml").write_text("allow_seeded_noise = true\n")
    return folder


class Live:
    """A server and its clients; `machines.close` ends them.

    Args:
        folder: of everything, prepared.
        network: the hosts; this machine itself without one.

    Attributes:
        names: of the clients.
    """

    def __init__(self, folder: Path, network: Network | None = None) -> None:
        self.names: tuple[str, ...] = CLIENTS
        self.folder, self.machines = folder, Machines(folder, network)
        self.log, self.until = self.machines.log_of, self.machines.until
        self.address = network.addresses["server"] if network else "127.0.0.1"
        self.host = "0.0.0.0" if network else "127.0.0.1"
        self.port = free_port()
        self.state = folder / "fedgs-server"
        self.run = self.state / "runs" / "digits"
        self.ca = ["--server", f"127.0.0.1:{self.port}", "--ca", "certs/ca.crt"]

    def certify(self) -> None:
        """Makes the authority, the server's certificate and the clients' keys."""
        make_certificates(self.folder / "certs", [self.address], self.names)

    def serve(self, *more: object) -> Process:
        """Starts the server and waits until it takes connections."""
        where = flags(host=self.host, port=self.port, certs="certs")
        process = self.machines.start("server", "deploy", "server", *where, *more)
        self.until(lambda: "Uvicorn running on" in self.log(process), process)
        return process

    def join(self, name: str, **more: object) -> Process:
        """Starts a client; `more` are other flags than the usual ones."""
        given: dict[str, object] = {
            "server": f"{self.address}:{self.port}",
            "data": f"npz:{name}.npz",
            "ca": "certs/ca.crt",
            "key": f"certs/clients/{name}.key",
            "limits": "limits.toml",
            "log_json": f"{name}.jsonl",
        }
        own = flags(**given | more)
        return self.machines.start(name, "deploy", "client", name, *own)

    def submit(self, *arguments: object, command: str = "submit") -> Process:
        """Submits: its server, when it starts, knows no client."""
        keys = [f"--client={n}=certs/clients/{n}.pub" for n in self.names]
        words = ["deploy", command, *self.ca, *keys, *arguments]
        return self.machines.start("server", *words)

    def start_run(self, **settings: object) -> Process:
        return self.submit(*flags(**SETTINGS | settings))

    def running(self, rounds: int, **settings: object) -> tuple[Process, ...]:
        """Starts everything and waits for some rounds: the server, the submitter."""
        server = self.serve()
        for name in CLIENTS:
            self.join(name)
        submitted = self.start_run(**settings)
        self.until_round(rounds, server, submitted)
        return server, submitted

    def until_round(self, round: int, *alive: Process) -> None:
        """Waits until the run has finished so many rounds."""
        self.until(lambda: runs.rounds_done(self.run) >= round, *alive)

    def until_next_round(self, *alive: Process) -> None:
        self.until_round(runs.rounds_done(self.run) + 1, *alive)

    def wait_for(self, *roles: str) -> dict[str, int]:
        """Waits until processes of the server live: role -> pid."""
        found: dict[str, int] = {}

        def are_there() -> bool:
            for pid in self.left():
                with contextlib.suppress(psutil.Error):
                    words = psutil.Process(pid).cmdline()
                    names = " ".join(Path(word).name for word in words)
                    found.update({role: pid for role in roles if role in names})
            return {*found} == {*roles}

        self.until(are_there)
        return found

    def left(self) -> list[int]:
        return processes_of(str(self.state), SERVER_VARIABLE)
