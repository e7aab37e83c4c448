"""Hosts in network namespaces, started as docs/deployment.md says.

The run survives a killed server, a killed client and a cut link, and ends with the
bytes of the local engine, which nothing disturbed. Skipped where namespaces are not
permitted. The refusals below it need one host only, and so does the server whose disk
is really full: the reason is told where there is room.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import flags
from events import read_events
from experiments.commands.deploy_status import status_of
from experiments.launch.certs import make_certificates
from fedgs.baselines.run import Asked, new_run, open_run
from fedgs.baselines.run import train as train_in
from fedgs.privacy.ledger import Ledger
from hosts import PATIENCE, Network, require_namespaces
from live import CLIENTS, Live, prepare, undisturbed
from runs import generator, rounds_done

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

LINK_DOWN_SECONDS = 6.0
UPDATES = {"steps": 16, "batch_size": 8, "noise_multiplier": 1.0}
OF_UPDATES = {
    "node_sizes": "2,1,1",
    "num_classes": 10,
    "image_size": 16,
    "generator_dim": 4,
    "discriminator_dim": 4,
    "noise_seed": 7,
    "seed": 5,
    "checkpoint_every": 3,
    "round_timeout": 900,
}
ANSWER_KEYS = {"time", "event", "node", "round", "outcome", "seconds"}


@pytest.fixture
def folder(tmp_path) -> Path:
    return prepare(tmp_path)


@pytest.fixture
def network() -> Iterator[Network]:
    require_namespaces()
    network = Network()
    yield network
    network.close()


@pytest.fixture
def live(folder, network) -> Iterator[Live]:
    """Three hosts; nothing runs yet, and there are no certificates."""
    live = Live(folder, network)
    yield live
    live.machines.close()


def split(folder: Path) -> tuple[str, ...]:
    """Gives the four people's digits to three clients; returns their names."""
    data, owners = np.load(folder / "all.npz"), {"a": (0, 1), "b": (2,), "c": (3,)}
    for name, own in owners.items():
        kept = np.isin(data["clients"], own)
        np.savez(folder / f"{name}.npz", **{n: data[n][kept] for n in data.files})
    return tuple(owners)


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


def test_run_survives_a_killed_server_and_client_and_a_cut_link(folder, network, live):
    machines, run, log = live.machines, live.run, ("--log-json", "server.jsonl")
    machines.run(
        *("server", "deploy", "certs", "certs", "--host", live.address),
        *("--client", "a", "--client", "b"),
    )
    server = live.serve(*log)
    submitted = live.start_run()
    live.until(lambda: "is submitted" in live.log(submitted), server)
    clients = {name: live.join(name) for name in CLIENTS}

    live.until_round(5, server, *clients.values())
    machines.kill(server)
    before = Ledger.read(run / "ledger.jsonl").length
    assert 5 <= before < 20
    server = live.serve(*log)
    assert submitted.wait(PATIENCE) == 1, machines.logs()
    assert "continue with: fedgs deploy submit" in live.log(submitted)
    submitted = live.resume()

    live.until_round(9, server, submitted, *clients.values())
    machines.kill(clients["b"])
    time.sleep(2)
    clients["b"] = live.join("b")

    live.until_round(13, server, submitted, *clients.values())
    network.cut("a")
    time.sleep(LINK_DOWN_SECONDS)
    network.heal("a")

    assert submitted.wait(PATIENCE) == 0, machines.logs()
    live.until(lambda: (run / "generator.safetensors").exists())
    assert generator(run) == undisturbed(folder)
    events = Ledger.read(run / "ledger.jsonl").events
    assert {event.round for event in events} == set(range(1, 21))
    assert len(events) >= 20  # never fewer than what left the clients
    check_event_logs(folder)
    overview = json.loads(
        machines.run("server", "deploy", "status", "fedgs-server", "--json")
    )
    assert overview["server"]["state"] == "running"
    (status,) = overview["runs"]
    found = (status["state"], status["round"], status["released"])
    assert found == ("completed", 20, len(events))
    for process in (server, *clients.values()):
        process.send_signal(signal.SIGTERM)
    for process in (server, *clients.values()):
        assert process.wait(60) is not None
    for name in CLIENTS:
        state = folder / f"fedgs-client-{name}"
        assert state.stat().st_mode & 0o777 == 0o700


def test_masked_run_goes_on_without_a_killed_client_and_with_it_again(folder, live):
    """Every attempt is of nodes that know each other's keys; all of them count."""
    live.names = split(folder)
    live.certify(live.address)
    server = live.serve()
    own = {"peers": "certs/clients", "min_peers": 2}
    clients = {name: live.join(name, **own) for name in live.names}
    submitted = live.start_run(
        secure_aggregation=True,
        node_sizes="2,1,1",
        min_nodes=2,
        num_rounds=40,
        round_timeout=15,
    )
    live.until_round(3, server, submitted, *clients.values())
    live.machines.kill(clients["c"])

    def nodes() -> list[int]:
        events = Ledger.read(live.run / "ledger.jsonl").events
        assert all(event.counted_nodes == event.planned_nodes for event in events)
        return [event.counted_nodes for event in events]

    live.until(lambda: 2 in nodes(), server, submitted)
    live.until_next_round(server, submitted)
    live.join("c", **own)
    live.until(lambda: nodes()[-1] == 3, server, submitted)
    assert submitted.wait(PATIENCE) == 0, live.machines.logs()
    live.until(lambda: (live.run / "generator.safetensors").exists())
    events = Ledger.read(live.run / "ledger.jsonl").events
    assert {event.kind for event in events} == {"discrete"}
    first = nodes().index(2)
    again = events[first]  # at once, or in the round after, if c was between two
    assert nodes()[:first] == first * [3]
    assert again.attempt == 2 or again.round == events[first - 1].round + 1
    count = folder / "fedgs-client-a" / "releases" / "releases-00000.jsonl"
    contexts = [event.context for event in Ledger.read(count).events]
    assert len(set(contexts)) == len(contexts) == len(events)  # a key for each


def test_fed_avg_gan_survives_a_killed_server_and_client(folder):
    """Three clients with TLS and authentication; the bytes of one process."""
    live = Live(folder)
    live.names = split(folder)
    with contextlib.closing(live.machines):
        allowed = "allow_seeded_noise = true\nallow_updates = true\n"
        (folder / "limits.toml").write_text(allowed)
        live.certify()
        server = live.serve()
        clients = {name: live.join(name) for name in live.names}
        told = [*live.ca, *live.keys, *flags(**UPDATES | OF_UPDATES, output="digits")]
        words = ("deploy", "baseline", "fedavg-gan", *told)
        submitted = live.machines.start("server", *words)
        live.until_round(4, server, submitted, *clients.values())
        live.machines.kill(server)
        server = live.serve()
        assert submitted.wait(PATIENCE) == 1, live.machines.logs()
        submitted = live.resume()
        live.until_round(9, server, submitted, *clients.values())
        live.machines.kill(clients["b"])
        live.join("b")
        assert submitted.wait(PATIENCE) == 0, live.machines.logs()
        live.until(lambda: (live.run / "generator.safetensors").exists())
    assert "fedavg-gan, a round releases one update: steps = 16" in live.log(
        clients["a"]
    )
    own = {"data": f"npz:{folder}/all.npz", "output": str(folder / "local")}
    own["test_fraction"] = 0.0  # clients hold nothing out unless they are told to
    run, data = new_run("fedavg-gan", UPDATES, Asked(), OF_UPDATES | own)
    train_in(run, data, lambda metrics: None, threading.Event())
    assert generator(live.run) == generator(run.folder.path)
    assert {each.step for each in open_run(live.run).releases} == set(range(1, 17))


def test_control_is_refused_over_the_network(live):
    """Flower's own SuperLink would register the intruder's key and run his code."""
    live.certify(live.address)
    live.serve()
    ca = ["--server", f"{live.address}:{live.port}", "--ca", "certs/ca.crt"]
    run = ["--client", "a=certs/clients/a.pub", "--resume", "x"]
    intruder = live.machines.start("a", "deploy", "submit", *ca, *run)
    assert intruder.wait(120) == 1
    assert "403" in live.log(intruder), live.log(intruder)
    live.machines.run("server", "deploy", "submit", *live.ca, "--no-follow", *run)


def registered_node_ids(live: Live) -> int:
    return sum(live.log(p).count("SuperNode ID:") for p in live.machines.started)


def test_unregistered_client_is_refused(deployment):
    server = deployment.serve()
    client = deployment.join("b")
    refusal = '/v1/fleet/activate-node HTTP/1.1" 4'
    deployment.until(lambda: refusal in deployment.log(server), server)
    assert registered_node_ids(deployment) == 0
    client.terminate()


def check_the_server_is_refused(live: Live, **more: object) -> str:
    """A client breaks its connection off; returns what the server has logged."""
    server = live.serve()
    client = live.join("a", **more)
    live.until(lambda: "CERTIFICATE_VERIFY_FAILED" in live.log(client), server)
    assert client.wait(PATIENCE) == 1
    assert registered_node_ids(live) == 0
    return live.log(server)


def test_server_of_another_authority_is_refused(folder, deployment):
    make_certificates(folder / "other", ["localhost"], ["a"])
    shutil.copy(folder / "other" / "ca.crt", folder / "other-ca.crt")
    log = check_the_server_is_refused(deployment, ca="other-ca.crt")
    assert "/v1/fleet" not in log  # nothing was said to it


def test_server_under_another_name_is_refused(deployment):
    """A valid certificate of the same authority, but of another host."""
    deployment.host = deployment.address = "127.0.0.2"
    check_the_server_is_refused(deployment)


# ------------------------------------------------------------------ a full disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """The folder of runs is a file system of 24 MB."""
    place = tmp_path / "fedgs-server" / "runs"
    place.mkdir(mode=0o700, parents=True)
    place.parent.chmod(0o700)
    options = ["-t", "tmpfs", "-o", "size=24m,mode=700", "fedgs-test", str(place)]
    mounted = subprocess.run(["mount", *options], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(folder).free == 0
    return path


def test_reason_reaches_the_servers_stderr_and_flowers_status(small_disk, deployment):
    machines = deployment.machines
    log = ("--log-json", "server.jsonl")
    server, submitted = deployment.running(2, *log, num_rounds=500, checkpoint_every=1)
    filler = fill(small_disk)
    assert submitted.wait(300) == 1, machines.logs()
    reason = "No space left on device"
    assert reason in machines.log_of(submitted), machines.logs()
    events = read_events(machines.folder / "server.jsonl")
    (ended,) = [event for event in events if event["event"] == "ended"]
    assert ended["outcome"] == "failed"
    assert reason in ended["reason"]
    status = status_of(deployment.run)
    assert status.state == "interrupted"
    assert status.waiting_for == ()
    assert status.released == len(Ledger.read(deployment.run / "ledger.jsonl").events)
    filler.unlink()
    again = deployment.resume()
    deployment.until_round(rounds_done(deployment.run) + 2, server, again)
