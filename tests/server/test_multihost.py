"""Hosts in network namespaces, started as docs/deployment.md says.

Skipped where namespaces are not permitted; some of the refusals need one host only.
Incidents are in `test_incidents`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import flags
from fedgs.config.run_config import RunConfig
from fedgs.data.sources import load_records
from fedgs.files import read_json
from fedgs.privacy.ledger import Ledger
from hosts import PATIENCE, Network
from live import Live, prepare
from server.launch.certs import make_certificates

pytestmark = [pytest.mark.multihost, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path) -> Path:
    return prepare(tmp_path)


@pytest.fixture
def network() -> Iterator[Network]:
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


def radiographs(folder: Path, data_dir: Path) -> dict[str, int]:
    """Deals the patients of chest X-rays to three clients; returns how many each has.

    The classes are normal, bacteria and virus. sideways.npz is c's, each transposed.
    """
    if not (data_dir / "ChestXRay").is_dir():
        pytest.skip("needs the X-rays: FEDGS_DATA_DIR/ChestXRay/{NORMAL,PNEUMONIA}")
    records = load_records(RunConfig(data="chest-xray", data_dir=str(data_dir)))
    images = records.images
    labels = records.labels
    owners = records.clients
    everyone = np.random.default_rng(0).permutation(np.unique(owners))
    sizes: dict[str, int] = {}
    for name, own in zip("abc", np.array_split(everyone, 3), strict=True):
        kept = np.isin(owners, own)
        arrays = {"labels": labels[kept], "clients": owners[kept]}
        np.savez(folder / f"{name}.npz", images=images[kept], **arrays)
        sizes[name] = len(own)
    turned = images[kept].swapaxes(2, 3)
    np.savez(folder / "sideways.npz", images=turned, **arrays)
    return sizes


# ------------------------------------------------------------------ the tests


def test_masked_run_goes_on_without_a_killed_client_and_with_it_again(folder, live):
    """Every attempt is of nodes that know each other's keys; all of them count."""
    live.names = split(folder)
    live.certify()
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
    count = folder / "fedgs-client-a" / "releases" / "releases-00000.jsonl"
    contexts = [event.context for event in Ledger.read(count).events]
    assert len(set(contexts)) == len(contexts) == len(events)  # a key for each


def test_hospitals_find_the_one_whose_radiographs_lie_on_their_side(
    folder, live, data_dir
):
    """At epsilon 3 of a patient; the second run has no bug to find.

    The noise is seeded: of other noise, about one run in twenty leaves the bug open.
    """
    sizes = radiographs(folder, data_dir)
    live.names = tuple(sizes)
    live.certify()
    live.serve()
    limits = folder / "limits.toml"
    kinds = ("embeddings", "groups", "seeded_noise")
    limits.write_text("".join(f"allow_{kind} = true\n" for kind in kinds))
    clients = {name: live.join(name) for name in "ab"}
    asked = flags(node_sizes=",".join(map(str, sizes.values())), target_epsilon=3)
    asked += flags(num_classes=3, image_size=28, each=True, seed=1, noise_seed=1)

    def accused(output: str, data: str) -> dict[str, str]:
        """Has client c show some data; returns the bug of every site that has one."""
        own = {"data": f"npz:{data}.npz", "state_dir": f"state-{data}"}
        client = live.join("c", **own)
        run = live.submit(*asked, *flags(output=output), command="debug")
        assert run.wait(PATIENCE) == 0, live.machines.logs()
        client.terminate()
        assert client.wait(PATIENCE) == 0
        said = re.findall(r"verdict of (\w): ([\w-]+)\.", live.log(run))
        content = read_json(live.state / "runs" / output / "diagnosis.json")
        rows = content["comparisons"]
        assert said == [(row["suspicious"], row["verdict"]) for row in rows]
        return {row["suspicious"]: row["verdict"] for row in rows if row["is_accused"]}

    assert accused("sideways", "sideways") == {"c": "transpose"}
    assert accused("clean", "c") == {}
    assert all(client.poll() is None for client in clients.values())


def test_control_is_refused_over_the_network(live):
    """Flower's own SuperLink would register the intruder's key and run his code."""
    live.certify()
    live.serve()
    ca = ["--server", f"{live.address}:{live.port}", "--ca", "certs/ca.crt"]
    run = ["--client", "a=certs/clients/a.pub", "--resume", "x"]
    intruder = live.machines.start("a", "deploy", "submit", *ca, *run)
    assert intruder.wait(120) == 1
    assert "403" in live.log(intruder), live.log(intruder)
    live.machines.run("server", "deploy", "submit", *live.ca, "--no-follow", *run)


def test_unregistered_client_is_refused(deployment):
    server = deployment.serve()
    client = deployment.join("b")
    refusal = '/v1/fleet/activate-node HTTP/1.1" 4'
    deployment.until(lambda: refusal in deployment.log(server), server)
    assert "SuperNode ID:" not in deployment.log(client)


@pytest.mark.parametrize("wrong", ["authority", "name"])
def test_server_with_a_certificate_of_another_is_refused(folder, deployment, wrong):
    given: dict[str, object] = {}
    if wrong == "authority":
        make_certificates(folder / "other", ["localhost"], ["a"])
        given["ca"] = "other/ca.crt"
    else:  # of the same authority, but for another host
        deployment.host, deployment.address = "0.0.0.0", "127.0.0.2"
    server = deployment.serve()
    client = deployment.join("a", **given)
    refused = "CERTIFICATE_VERIFY_FAILED"
    deployment.until(lambda: refused in deployment.log(client), server)
    assert client.wait(PATIENCE) == 1
    assert "/v1/fleet" not in deployment.log(server)  # nothing was said to it
