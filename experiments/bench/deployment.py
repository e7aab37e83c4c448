"""Seconds per round of a deployment on this machine: Flower's own clients and ours.

    python -m experiments.bench.deployment [--nodes 2 --nodes 8] [--rounds 20]

Every process is real: a server and N clients from `fedgs deploy` on the loopback, with
and without TLS and authentication. The work is small on purpose (B = 32 fakes of 28x28
down, 100 KB of gradients up, one client of width 4 per node), so that the time is that
of messages, processes and polls. CPU is of all processes together; unlike the seconds
it hardly depends on what else the machine does.
"""

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from experiments.flags import run_command
from experiments.launch.commands import Client, Command
from experiments.launch.control import control_of
from experiments.launch.flower_app import free_port, wait_for_port
from experiments.launch.processes import full_environment
from experiments.launch.submit import register
from experiments.tables import Table

STOCK_ROUNDS = 5  # a round of these takes many seconds
SKIPPED = 2  # first rounds: connections, caches
START_SECONDS = 120.0
RUN_SECONDS = 900.0
END_SECONDS = 30.0
WATCH_SECONDS = 0.05
SETTINGS = {
    "warm_start": "public",
    "warm_start_rounds": 1,
    "client_selection": "all",
    "discriminator_training": "every_round",
    "clients_per_node": 1,
    "noise_multiplier": 1.0,
    "fakes_per_round": 32,
    "generator": "upsample",
    "generator_dim": 4,
    "discriminator_dim": 4,
    "discriminator_steps": 1,
    "num_classes": 10,
    "sample_every": 1000,
}


def latency_table(
    nodes: list[int] | None = None, rounds: int = 20, skip_stock: bool = False
) -> None:
    """Print seconds per round by kind of client, security and number of nodes."""
    rows: list[list[str]] = []
    kinds = ("resident",) if skip_stock else ("resident", "stock")
    places = itertools.product(kinds, (False, True), nodes or [2, 8])
    for kind, is_secure, count in places:
        is_stock = kind == "stock"
        number = STOCK_ROUNDS if is_stock else rounds
        seconds, cpu = deployed_seconds(count, number, is_stock, is_secure)
        measures = (statistics.median(seconds), statistics.mean(seconds), max(seconds))
        security = "TLS and keys" if is_secure else "none"
        shown = [f"{x:.2f}" for x in (*measures, cpu)]
        rows.append([kind, security, f"{count}", *shown])
    head = ["clients", "security", "nodes", "median", "mean", "slowest", "CPU"]
    Table("deployment on the loopback, seconds per round", head, rows).show()


def deployed_seconds(
    nodes: int, rounds: int, is_stock: bool, is_secure: bool
) -> tuple[list[float], float]:
    """Trains on a server and clients of this machine.

    Returns:
        each round's seconds, and a round's CPU seconds.

    Raises:
        RuntimeError: a process ended early; its output is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="fedgs-bench-") as name:
        place = Place(Path(name), [f"client-{i}" for i in range(nodes)], is_secure)
        run = place.folder / "server" / "runs" / "bench"
        with running(place, is_stock), metered(run / "metrics.jsonl") as seen:
            place.submit({**SETTINGS, "num_rounds": rounds + SKIPPED})
        return seconds_of_rounds(run), cpu_of_round(seen)


@contextlib.contextmanager
def metered(metrics: Path) -> Iterator[dict[int, float]]:
    """Notes the CPU seconds of all processes started here at the end of each round."""
    seen: dict[int, float] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(WATCH_SECONDS):
            with contextlib.suppress(FileNotFoundError):
                count = metrics.read_bytes().count(b"\n")
                if count not in seen:
                    seen[count] = _cpu_seconds()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def cpu_of_round(seen: Mapping[int, float]) -> float:
    """Returns a round's CPU seconds from what `metered` noted."""
    counts = [count for count in seen if count >= SKIPPED]
    first, last = min(counts), max(counts)
    return (seen[last] - seen[first]) / (last - first)


def _cpu_seconds() -> float:
    """Returns what all living processes started here have computed."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def seconds_of_rounds(run: Path) -> list[float]:
    """Returns the seconds of a run's rounds without the first `SKIPPED`."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines[SKIPPED:]]


class Place:
    """A server and its clients: their addresses, files and commands.

    Args:
        folder: of all their files.
        names: of the clients.
        is_secure: with TLS and authentication.

    Attributes:
        address: of the server, HOST:PORT.
        address_for_clients: where the clients connect: to the server, or a proxy.
    """

    def __init__(self, folder: Path, names: Sequence[str], is_secure: bool) -> None:
        """Makes keys and data; starts nothing yet."""
        self.folder, self.names, self.is_secure = folder, names, is_secure
        self.address = self.address_for_clients = f"127.0.0.1:{free_port()}"
        self.certs, self.keys = folder / "certs", folder / "certs" / "clients"
        if is_secure:
            keys = [part for name in names for part in ("--client", name)]
            self.call("certs", self.certs, "--host", "127.0.0.1", *keys)
        rng = np.random.default_rng(0)
        for name in names:
            images = rng.integers(0, 256, (20, 28, 28), dtype=np.uint8)
            images[:, [0, -1]] = images[:, :, [0, -1]] = 0
            labels = np.arange(20) % 10
            np.savez(folder / f"{name}.npz", images=images, labels=labels)

    def server(self) -> list[object]:
        """Returns the server's command."""
        port = self.address.rpartition(":")[2]
        command = ["server", "--port", port, "--state-dir", self.folder / "server"]
        secure = ["--certs", self.certs]
        return [*command, *(secure if self.is_secure else ["--insecure"])]

    def client(self, name: str, is_stock: bool = False) -> Command:
        """Returns a client's command and its environment."""
        secure: dict[str, Any] = {"insecure": True}
        if self.is_secure:
            secure = {"ca": self.certs / "ca.crt", "key": self.keys / f"{name}.key"}
        return Client(
            name=name,
            server=self.address_for_clients,
            data=f"npz:{self.folder / name}.npz",
            state=self.folder / name,
            stock=is_stock,
            port=free_port() if is_stock else None,
            **secure,
        ).command()

    def submit(self, settings: dict[str, object]) -> Path:
        """Submits a run, waits for its end and returns its folder."""
        command: list[object] = ["submit", "--server", self.address]
        for name in self.names:  # registered already
            command += ["--client", name]
        command += ["--ca", self.certs / "ca.crt"] if self.is_secure else ["--insecure"]
        command += [*flags_of(settings), "--output", "bench"]
        self.call(*command, timeout=RUN_SECONDS)
        return self.folder / "server" / "runs" / "bench"

    def call(self, *arguments: object, timeout: float = START_SECONDS) -> None:
        """Runs a `fedgs deploy` command to its end."""
        done = subprocess.run(
            fedgs_deploy(*arguments),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments[0]} failed: {done.stdout}{done.stderr}")


@contextlib.contextmanager
def running(place: Place, is_stock: bool = False) -> Iterator[None]:
    """Runs the server and the clients until the end of the block."""
    with contextlib.ExitStack() as processes:

        def start(
            name: str, command: Sequence[str], environment: Mapping[str, str] | None
        ) -> "subprocess.Popen[bytes]":
            process = _process(place.folder / f"{name}.log", command, environment)
            return processes.enter_context(process)

        server = start("server", fedgs_deploy(*place.server()), None)
        if not wait_for_port(place.address, server, START_SECONDS):
            raise RuntimeError(f"the server on {place.address} does not answer")
        if place.is_secure:  # a stock client whose key is unknown ends by itself
            register_keys(place)
        if is_stock:
            for name in place.names:
                start(name, *place.client(name, is_stock))
        else:
            start("clients", _residents(place), None)
        yield


def _residents(place: Place) -> list[str]:
    """Returns the command that runs all of our own clients."""
    clients: list[tuple[list[str], dict[str, str], str]] = []
    for name in place.names:
        command, environment = place.client(name)
        arguments = command[command.index("clients.resident") + 1 :]
        clients.append((arguments, environment, str(place.folder / f"{name}.log")))
    commands = place.folder / "clients.json"
    commands.write_text(json.dumps(clients))
    return [sys.executable, "-m", "experiments.bench.residents", str(commands)]


@contextlib.contextmanager
def _process(
    log: Path, command: Sequence[str], environment: Mapping[str, str] | None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Runs a process until the end of the block; kills one that does not end."""
    given = full_environment(environment or {})
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=given)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def register_keys(place: Place) -> None:
    """Registers the clients' keys, as `fedgs deploy submit` would."""
    keys = [(name, place.keys / f"{name}.pub") for name in place.names]
    with control_of(place.address, place.certs / "ca.crt") as control:
        register(control, keys)


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Returns settings as flags of the command line."""
    pairs = ((f"--{name.replace('_', '-')}", str(v)) for name, v in settings.items())
    return [word for pair in pairs for word in pair]


def fedgs_deploy(*arguments: object) -> list[str]:
    """Returns a command of `fedgs deploy` as an argument list."""
    return [sys.executable, "-m", "fedgs", "deploy", *map(str, arguments)]


if __name__ == "__main__":
    sys.exit(run_command(latency_table))
