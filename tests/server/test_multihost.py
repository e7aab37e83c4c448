"""Hosts in network namespaces, started as docs/deployment.md says.

Skipped where namespaces are not permitted; some of the refusals need one host only.
Incidents are in `test_incidents`.
"""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import flags
from fedgs.baselines.run import Asked, new_run, open_run
from fedgs.baselines.run import train as train_in
from fedgs.privacy.ledger import Ledger
from hosts import PATIENCE, Network, require_namespaces
from live import Live, prepare
from runs import generator
from server.launch.certs import make_certificates

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

UPDATES = {"steps": 16, "noise_per_clip": 1.0}
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


# ------------------------------------------------------------------ the tests


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
        min_answers=2,
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
    own |= {"test_fraction": 0.0}  # as deployed clients, which hold nothing out
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
    deployment.host, deployment.address = "0.0.0.0", "127.0.0.2"
    check_the_server_is_refused(deployment)
