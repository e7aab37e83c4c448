"""Seconds per round of a deployment on this machine.

Every process is real: a server and clients from `fedgs deploy` on the loopback, with
TLS and authentication. The work is small on purpose (32 fakes of 28x28 down, 100 KB of
gradients up, one client of width 4 per node), so that the time is that of messages,
processes and polls.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fedgs.deployment import full_environment
from fedgs.errors import UserError
from server.launch.flower_app import free_port, wait_for_port

SKIPPED = 2  # first rounds: connections, caches
START_SECONDS, RUN_SECONDS, END_SECONDS = 120.0, 900.0, 30.0
SETTINGS: Mapping[str, object] = {
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
}


def deployed_seconds(nodes: int, rounds: int) -> list[float]:
    """Trains on a server and clients of this machine; returns each round's seconds.

    Raises:
        UserError: a process ended early; its output is in the message.
    """
    names = [f"client-{number}" for number in range(nodes)]
    with tempfile.TemporaryDirectory(prefix="fedgs-bench-") as place:
        folder, address = Path(place), f"127.0.0.1:{free_port()}"
        certs = folder / "certs"
        _call("certs", certs, "--host", "127.0.0.1", *_each("client", names))
        port, state = address.rpartition(":")[2], folder / "server"
        server = ["server", "--port", port, "--state-dir", state, "--certs", certs]
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(_running(folder / "server.log", *server))
            if not wait_for_port(address, process, START_SECONDS):
                raise UserError(f"the server on {address} does not answer")
            for name in names:
                stack.enter_context(_running_client(folder, name, address))
            keys = [f"{name}={certs}/clients/{name}.pub" for name in names]
            settings = {**SETTINGS, "num_rounds": rounds + SKIPPED, "output": "bench"}
            given = [f"--{n.replace('_', '-')}={v}" for n, v in settings.items()]
            where = ["--server", address, "--ca", certs / "ca.crt"]
            _call("submit", *where, *_each("client", keys), *given, seconds=RUN_SECONDS)
        lines = (state / "runs" / "bench" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["seconds"] for line in lines[SKIPPED:]]


def _running_client(
    folder: Path, name: str, address: str
) -> contextlib.AbstractContextManager[object]:
    """Runs a client with 20 images of its own."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    images[:, [0, -1]] = images[:, :, [0, -1]] = 0
    np.savez(folder / f"{name}.npz", images=images, labels=np.arange(20) % 10)
    key = folder / "certs" / "clients" / f"{name}.key"
    where = ["--server", address, "--ca", folder / "certs" / "ca.crt", "--key", key]
    own = ["--data", f"npz:{folder / name}.npz", "--state-dir", folder / name]
    return _running(folder / f"{name}.log", "client", name, *where, *own)


def _each(flag: str, values: list[str]) -> list[str]:
    return [word for value in values for word in (f"--{flag}", value)]


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "fedgs", "deploy", *map(str, words)]


def _call(*words: object, seconds: float = START_SECONDS) -> None:
    """Runs a command of `fedgs deploy` to its end."""
    asked = {"capture_output": True, "text": True, "timeout": seconds, "check": False}
    done = subprocess.run(_command(*words), **asked)  # pyright: ignore
    if done.returncode:
        raise UserError(f"{words[0]} failed: {done.stdout}{done.stderr}")


@contextlib.contextmanager
def _running(log: Path, *words: object) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a command of `fedgs deploy` until the end of the block."""
    environment = full_environment({})
    with open(log, "wb") as output:
        process = subprocess.Popen(
            _command(*words), stdout=output, stderr=output, env=environment
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_SECONDS)
        process.kill()  # does nothing to one that has ended
        process.wait()
