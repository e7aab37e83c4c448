"""Three hosts in network namespaces, started as docs/deployment.md says.

The run survives a killed server, a killed client and a cut link, and ends with the
bytes of the local engine, which nothing disturbed. Skipped where namespaces are not
permitted. The refusals below it need one host only.
"""

import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from events import read_events
from experiments.launch.certs import make_certificates
from fedgs.config.run_config import RunConfig
from fedgs.data.load import load_data
from fedgs.federation import local
from fedgs.federation.preparation import resolve
from fedgs.privacy.ledger import Ledger
from fedgs.runs.run_folder import RunFolder
from hosts import PATIENCE, Machines, Network, require_namespaces, words

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

PORT = 8000
LINK_DOWN_SECONDS = 6.0
ANSWER_KEYS = {"time", "event", "node", "round", "outcome", "seconds"}
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
    "warm_start": "public",
    "warm_start_rounds": 2,
    "generator": "upsample",
    "generator_dim": 4,
    "discriminator_dim": 4,
    "gradient_basis": "dct",
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


def undisturbed(folder: Path, settings: dict[str, object] = SETTINGS) -> bytes:
    """The generator that the local engine trains with the same settings."""
    pytest.importorskip("sklearn", reason="needs the digits of scikit-learn")
    own = {"engine": "local", "num_workers": 1, "data": f"npz:{folder}/all.npz"}
    own["output"] = str(folder / "local")
    config, data = resolve(RunConfig(**settings | own | {"clients_per_round": None}))
    run = RunFolder.create(config)
    local.train(run, data, lambda metrics: None, threading.Event())
    return (run.path / "generator.safetensors").read_bytes()


@pytest.fixture
def folder(tmp_path) -> Path:
    pytest.importorskip("sklearn", reason="needs the digits of scikit-learn")
    write_digits(tmp_path)
    (tmp_path / "limits.toml").write_text("allow_seeded_noise = true\n")
    return tmp_path


@pytest.fixture
def network() -> Iterator[Network]:
    require_namespaces()
    network = Network()
    yield network
    network.close()


@pytest.fixture
def machines(folder, network) -> Iterator[Machines]:
    machines = Machines(folder, network)
    yield machines
    machines.close()


# ------------------------------------------------------------------ the commands


def start_server(machines: Machines, host: str = "0.0.0.0"):
    where = ["--host", host, "--port", PORT, "--certs", "certs"]
    where += ["--log-json", "server.jsonl"]
    process = machines.start("server", "deploy", "server", *where)
    machines.until(lambda: "Uvicorn running on" in machines.log_of(process), process)
    return process


def start_client(machines: Machines, name: str, server: str, **more: object):
    given = {
        "server": f"{server}:{PORT}",
        "data": f"npz:{name}.npz",
        "ca": "certs/ca.crt",
        "key": f"certs/clients/{name}.key",
        "limits": "limits.toml",
        "log_json": f"{name}.jsonl",
    } | more
    return machines.start(name, "deploy", "client", name, *words(given))


def start_run(machines: Machines, *arguments: object):
    ca = ["--server", f"127.0.0.1:{PORT}", "--ca", "certs/ca.crt"]
    return machines.start("server", "deploy", "submit", *ca, *arguments)


def rounds_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def check_event_logs(folder: Path) -> None:
    """Who, which round, outcome and duration are there; nothing else is."""
    of_server = read_events(folder / "server.jsonl")
    rounds = [event["round"] for event in of_server if event["event"] == "round"]
    assert set(rounds) == set(range(1, 21))
    assert {e["node"] for e in of_server if e["event"] == "joined"} == {"a", "b"}
    for name in ("a", "b"):
        answers = [
            event
            for event in read_events(folder / f"{name}.jsonl")
            if event["event"] == "answer"
        ]
        assert {event["node"] for event in answers} == {name}
        assert {event.get("round") for event in answers} >= set(range(1, 21))
        assert {key for event in answers for key in event} <= ANSWER_KEYS


# ------------------------------------------------------------------ the tests


def test_run_survives_a_killed_server_a_killed_client_and_a_cut_link(
    folder, network, machines
):
    address = network.addresses["server"]
    machines.run(
        "server", "deploy", "certs", "certs", "--host", address,
        "--client", "a", "--client", "b",
    )  # fmt: skip
    server = start_server(machines)
    submitted = start_run(
        machines,
        *("--client", "a=certs/clients/a.pub", "--client", "b=certs/clients/b.pub"),
        *words(SETTINGS),
    )
    machines.until(lambda: "is submitted" in machines.log_of(submitted), server)
    clients = {name: start_client(machines, name, address) for name in ("a", "b")}
    run = folder / "fedgs-server" / "runs" / "digits"

    machines.until(lambda: rounds_of(run) >= 5, server, *clients.values())
    machines.kill(server)
    before = Ledger.read(run / "ledger.jsonl").length
    assert 5 <= before < 20
    server = start_server(machines)
    assert submitted.wait(PATIENCE) == 1, machines.logs()
    assert "continue with: fedgs deploy submit" in machines.log_of(submitted)
    submitted = start_run(machines, "--resume", "digits")

    machines.until(lambda: rounds_of(run) >= 9, server, submitted, *clients.values())
    machines.kill(clients["b"])
    time.sleep(2)
    clients["b"] = start_client(machines, "b", address)

    machines.until(lambda: rounds_of(run) >= 13, server, submitted, *clients.values())
    network.cut("a")
    time.sleep(LINK_DOWN_SECONDS)
    network.heal("a")

    assert submitted.wait(PATIENCE) == 0, machines.logs()
    machines.until(lambda: (run / "generator.safetensors").exists())
    assert (run / "generator.safetensors").read_bytes() == undisturbed(folder)
    events = Ledger.read(run / "ledger.jsonl").events
    assert {event.round for event in events} == set(range(1, 21))
    assert len(events) >= 20  # never fewer than what left the clients
    check_event_logs(folder)
    overview = json.loads(
        machines.run("server", "deploy", "status", "fedgs-server", "--json")
    )
    assert overview["server"]["state"] == "running"
    (status,) = overview["runs"]
    assert (status["state"], status["round"], status["released"]) == (
        "completed", 20, len(events)
    )  # fmt: skip
    for process in (server, *clients.values()):
        process.send_signal(signal.SIGTERM)
    for process in (server, *clients.values()):
        assert process.wait(60) is not None
    for name in ("a", "b"):
        state = folder / f"fedgs-client-{name}"
        assert state.stat().st_mode & 0o777 == 0o700


def test_control_is_refused_over_the_network(folder, network, machines):
    """Flower's own SuperLink would register the intruder's key and run his code."""
    address = network.addresses["server"]
    make_certificates(folder / "certs", [address], ["a"])
    start_server(machines)
    ca = ["--server", f"{address}:{PORT}", "--ca", "certs/ca.crt"]
    intruder = machines.start(
        "a",
        "deploy",
        "submit",
        *ca,
        "--client",
        "a=certs/clients/a.pub",
        "--resume",
        "x",
    )
    assert intruder.wait(120) == 1
    assert "403" in machines.log_of(intruder), machines.log_of(intruder)
    on_server = ["--server", f"127.0.0.1:{PORT}", "--ca", "certs/ca.crt", "--no-follow"]
    machines.run(
        "server", "deploy", "submit", *on_server, "--client", "a=certs/clients/a.pub",
        "--resume", "x",
    )  # fmt: skip


@pytest.fixture
def alone(folder, monkeypatch) -> Iterator[Machines]:
    """This machine itself, with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setattr("test_multihost.PORT", probe.getsockname()[1])
    machines = Machines(folder)
    yield machines
    machines.close()


def registered_node_ids(machines: Machines) -> int:
    return sum(
        machines.log_of(process).count("SuperNode ID:") for process in machines.started
    )


def test_unregistered_client_is_refused(folder, alone):
    make_certificates(folder / "certs", ["localhost"], ["a", "b"])
    server = start_server(alone, "127.0.0.1")
    client = start_client(alone, "b", "127.0.0.1")
    refusal = '/v1/fleet/activate-node HTTP/1.1" 4'
    alone.until(lambda: refusal in alone.log_of(server), server)
    assert registered_node_ids(alone) == 0
    client.terminate()


def test_server_of_another_authority_is_refused(folder, alone):
    make_certificates(folder / "certs", ["localhost"], ["a"])
    make_certificates(folder / "other", ["localhost"], ["a"])
    shutil.copy(folder / "other" / "ca.crt", folder / "other-ca.crt")
    server = start_server(alone, "127.0.0.1")
    client = start_client(alone, "a", "127.0.0.1", ca="other-ca.crt")
    alone.until(lambda: "CERTIFICATE_VERIFY_FAILED" in alone.log_of(client), server)
    assert client.wait(PATIENCE) == 1
    assert registered_node_ids(alone) == 0
    assert "/v1/fleet" not in alone.log_of(server)  # nothing was said to it


def test_server_under_another_name_is_refused(folder, alone):
    """A valid certificate of the same authority, but of another host."""
    make_certificates(folder / "certs", ["localhost"], ["a"])
    server = start_server(alone, "127.0.0.2")
    client = start_client(alone, "a", "127.0.0.2")
    alone.until(lambda: "CERTIFICATE_VERIFY_FAILED" in alone.log_of(client), server)
    assert client.wait(PATIENCE) == 1
    assert registered_node_ids(alone) == 0
