"""A deployment of real processes: a server and two clients with digits of four people.

On this machine or on three hosts (`hosts.Network`), started as docs/deployment.md says.
"""

import contextlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest

import runs
from command_line import flags
from fedgs.config.run_config import RunConfig
from fedgs.data.load import load_data
from fedgs.federation.preparation import resolve
from fedgs.process import SERVER_VARIABLE, processes_of
from fedgs.runs.run_folder import RunFolder
from hosts import FEDGS, Machines, Network
from server.launch.certs import make_certificates
from server.launch.flower_app import free_port

PORT = 8000  # of a server with a host of its own
CLIENTS = ("a", "b")
ROLES = ("superlink", "superexec", "serverapp")
SETTINGS: dict[str, object] = {
    "num_clients": 4,
    "node_sizes": "3,1",
    "num_classes": 10,
    "client_selection": "all",
    "discriminator_training": "every_round",
    "noise_multiplier": 0.1,
    "noise_seed": 7,
    "seed": 5,
    "num_rounds": 20,
    "image_size": 16,
    "batch_size": 8,
    "fakes_per_round": 16,
    "discriminator_steps": 1,
    "discriminator_batch_size": 8,
    "warm_start_rounds": 2,
    "generator": "upsample",
    "generator_dim": 4,
    "discriminator_dim": 4,
    "dct_size": 8,
    "checkpoint_every": 3,
    "round_timeout": 900,
    "output": "digits",
}


def write_digits(folder: Path) -> None:
    """Writes real digits: a.npz of three clients, b.npz of one, all.npz of all."""
    data = load_data(RunConfig(data="digits", num_clients=4, image_size=16, seed=1))
    owners = np.full(len(data.images), -1)
    for client, records in enumerate(data.client_records):
        owners[records[:60]] = client
    for name, clients in (("a", (0, 1, 2)), ("b", (3,)), ("all", (0, 1, 2, 3))):
        kept = np.isin(owners, clients)
        np.savez(
            folder / f"{name}.npz",
            images=data.images[kept],
            labels=data.labels[kept],
            clients=owners[kept],
        )


def undisturbed(folder: Path, settings: dict[str, object] = SETTINGS) -> str:
    """The hash of the generator that the local engine trains with the same settings."""
    pytest.importorskip("sklearn", reason="needs the digits of scikit-learn")
    own = {"engine": "local", "num_workers": 1, "data": f"npz:{folder}/all.npz"}
    own["output"] = str(folder / "local")
    config, data = resolve(RunConfig(**settings | own | {"clients_per_round": None}))
    run = RunFolder.create(config)
    runs.train(run, data=data)
    return runs.generator(run.path)


def prepare(folder: Path) -> Path:
    """Writes the clients' data and limits."""
    pytest.importorskip("sklearn", reason="needs the digits of scikit-learn")
    write_digits(folder)
    (folder / "limits.toml").write_text("allow_seeded_noise = true\n")
    return folder


class Live:
    """A server and its clients; `machines.close` ends them.

    Args:
        folder: of everything, prepared.
        network: the hosts; this machine itself and a free port without one.

    Attributes:
        names: of the clients.
    """

    def __init__(self, folder: Path, network: Network | None = None) -> None:
        self.names: tuple[str, ...] = CLIENTS
        self.folder, self.machines = folder, Machines(folder, network)
        self.address = network.addresses["server"] if network else "127.0.0.1"
        self.host = "0.0.0.0" if network else "127.0.0.1"
        self.port = PORT if network else free_port()
        self.state = folder / "fedgs-server"
        self.run = self.state / "runs" / "digits"
        self.ca = ["--server", f"127.0.0.1:{self.port}", "--ca", "certs/ca.crt"]

    def certify(self, *hosts: str) -> None:
        """Makes the authority, the server's certificate and the clients' keys."""
        names = hosts or ("localhost", "127.0.0.1")
        make_certificates(self.folder / "certs", list(names), list(self.names))

    def serve(
        self, *more: object, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Starts the server and waits until it takes connections."""
        where = ["--host", self.host, "--port", str(self.port), "--certs", "certs"]
        command = [*FEDGS, "deploy", "server", *where, *map(str, more)]
        process = self.machines.launch("server", command, environment)
        self.until(lambda: "Uvicorn running on" in self.log(process), process)
        return process

    def join(self, name: str, **more: object) -> "subprocess.Popen[bytes]":
        """Starts a client; `more` are other flags than the usual ones."""
        given: dict[str, object] = {
            "server": f"{self.address}:{self.port}",
            "data": f"npz:{name}.npz",
            "ca": "certs/ca.crt",
            "key": f"certs/clients/{name}.key",
            "limits": "limits.toml",
            "log_json": f"{name}.jsonl",
        }
        return self.machines.start(
            name, "deploy", "client", name, *flags(**given | more)
        )

    def submit(self, *arguments: object) -> "subprocess.Popen[bytes]":
        words = ["deploy", "submit", *self.ca, *arguments]
        return self.machines.start("server", *words)

    @property
    def keys(self) -> list[str]:
        """The flags that register the clients: a server that starts knows none."""
        return [f"--client={n}=certs/clients/{n}.pub" for n in self.names]

    def start_run(self, **settings: object) -> "subprocess.Popen[bytes]":
        return self.submit(*self.keys, *flags(**SETTINGS | settings))

    def resume(self) -> "subprocess.Popen[bytes]":
        """Continues the run."""
        return self.submit("--resume", "digits", *self.keys)

    def running(self, rounds: int, *more: object, **settings: object):
        """Starts everything and waits for some rounds: the server, the submitter."""
        server = self.serve(*more)
        for name in CLIENTS:
            self.join(name)
        submitted = self.start_run(**settings)
        self.until_round(rounds, server, submitted)
        return server, submitted

    def log(self, process: "subprocess.Popen[bytes]") -> str:
        return self.machines.log_of(process)

    def until(self, condition, *alive: object) -> None:
        """Waits for a condition while the given processes live."""
        self.machines.until(condition, *alive)

    def until_round(self, round: int, *alive: object) -> None:
        """Waits until the run has finished so many rounds."""
        self.until(lambda: runs.rounds_done(self.run) >= round, *alive)

    def until_next_round(self, *alive: object) -> None:
        self.until_round(runs.rounds_done(self.run) + 1, *alive)

    def processes(self) -> dict[str, int]:
        """Role -> pid of the server's processes that live."""
        found: dict[str, int] = {}
        for pid in self.left():
            with contextlib.suppress(psutil.Error):
                names = " ".join(Path(w).name for w in psutil.Process(pid).cmdline())
                found |= {role: pid for role in ROLES if role in names}
        return found

    def wait_for(self, *roles: str) -> dict[str, int]:
        self.until(lambda: set(roles) <= set(self.processes()))
        return self.processes()

    def left(self) -> list[int]:
        return processes_of(str(self.state), SERVER_VARIABLE)
