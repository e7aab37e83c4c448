"""Cohorts that only a deployed client knows: what it agrees to, what it never sends."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.common.serde import message_to_proto
from safetensors.torch import load

from clients.deployed_client import DeploymentConfig, agreed
from deployed_grid import LIMITS, NAMES, Client, Deployment, place_of
from refusals import assert_refused
from runs import undisturbed
from server.launch.certs import make_certificates
from server.launch.submit import client_key
from server.roll_call import public_settings
from server.server_app import log_verdicts
from tiny import write_tiny_npz

pytestmark = pytest.mark.usefixtures("server_process", "clock")
SECRET = "ward-4711"  # a value that no server asks for
OWNERS = [str(number) for number in range(6)]  # two on each node
DEPLOYED: dict[str, object] = {"engine": "flower", "nodes": ",".join(NAMES[:3])}
OF_GROUPS = DEPLOYED | {"mode": "moments", "phases": "group-means", "num_rounds": 1}
OF_COHORTS = OF_GROUPS | {"healthy": "v1", "suspicious": "v2"}
ALLOWED = f"{LIMITS}allow_groups = true\n"
ANSWER = {"is_empty", "node_id", "round", "request", "noise_std", "clip_bound"}


def table(folder: Path, *values: str) -> str:
    """Writes who is in which cohort; owners without a value are in none."""
    path = folder / f"cohorts-{'-'.join(values)}.csv"
    rows = [f"{owner},{value}\n" for owner, value in zip(OWNERS, values, strict=False)]
    path.write_text("owner,cohort\n" + "".join(rows))
    return str(path)


@pytest.fixture
def cohorts(deploy, tmp_path) -> Callable[..., Deployment]:
    """Makes a deployment in which each client has a file of its own two owners."""

    def make(name: str, *values: str, least: int = 1, **settings: object) -> Deployment:
        run = deploy(name, **OF_COHORTS | settings)
        limits = f"{ALLOWED}min_clients_per_group = {least}\n"
        for node, client in enumerate(run.clients):
            own = "".join(f"{2 * node + n},{values[2 * node + n]}\n" for n in range(2))
            (run.root / f"{client.name}.csv").write_text(f"owner,cohort\n{own}")
            client.node_config["cohorts"] = str(run.root / f"{client.name}.csv")
            Path(client.node_config["limits"]).write_text(limits)
        return run

    return make


def answers(run: Deployment) -> list[bytes]:
    """The sums that the nodes sent, in the order of the nodes."""
    sent = [reply.content["fedgs"] for kind, _, reply in run.grid.replies]
    found = {own["node_id"]: own["tensors"] for own in sent if "tensors" in own}
    return [found[node] for node in sorted(found)]


# ------------------------------------------------------------------ what a client says


def test_a_client_finds_its_cohorts_from_any_folder(deploy, monkeypatch, tmp_path):
    run = deploy(**OF_COHORTS)
    client = run.clients[0]

    def found() -> str | None:
        site = DeploymentConfig.read(client.node_config)
        return agreed(site, public_settings(run.folder.config)).cohorts

    assert found() is None
    selected = leftover(client, "0,v1\n")
    assert found() == str(selected)
    monkeypatch.chdir(tmp_path)
    client.node_config["cohorts"] = "own.csv"
    assert found() == str(tmp_path / "own.csv")


def leftover(client: Client, rows: str) -> Path:
    """Writes the file of cohorts that a selection has left at a client."""
    client.state_dir.mkdir(mode=0o700)
    selected = client.state_dir / "cohorts.csv"
    selected.write_text(f"owner,cohort\n{rows}")
    return selected


def test_owners_who_are_gone_since_the_selection_are_passed_over(deploy):
    """Of a file that somebody has given, they are an error."""
    run = deploy(**OF_COHORTS)
    client = run.clients[0]
    selected = leftover(client, "0,v1\n1,v2\nzoe,v1\n")
    Path(client.node_config["limits"]).write_text(ALLOWED)
    settings = public_settings(run.folder.config)
    place = place_of(run)
    words = f"{selected}: 1 of 3 owners in it are not in data = .* passed over"
    with pytest.warns(RuntimeWarning, match=words):
        assert place.join(settings).refusal is None
    known = place.worker().node(0).data.client_cohorts
    assert [known[number].value for number in range(2)] == ["v1", "v2"]
    client.node_config["cohorts"] = str(selected)
    assert_refused("has no client 'zoe'", place_of(run).join, settings)


@pytest.mark.parametrize("partition", ["auto", "iid"])
def test_a_run_of_no_cohorts_does_not_look_at_those_of_a_selection(deploy, partition):
    run = deploy(mode="moments", **DEPLOYED)
    for client in run.clients:
        leftover(client, "no table")
        client.node_config["partition"] = partition
    run.start()
    assert run.folder.read_ledger().events


def refusal(run: Deployment, limits: str) -> str | None:
    """Has the first client join a run; returns the limit that it refuses by."""
    client = run.clients[0]
    Path(client.node_config["limits"]).write_text(limits)
    refused = place_of(run).join(public_settings(run.folder.config)).refusal
    return None if refused is None else refused.setting


def test_a_client_refuses_what_its_owners_did_not_agree_to(deploy, tmp_path):
    """Before the data are read: who joins would tell of them."""
    of_cohorts = deploy("cohorts", **OF_COHORTS)
    look = deploy("look", mode="moments", cohort_value="v1", **DEPLOYED)
    sizes = {"num_clients": 24, "node_sizes": "8,8,8"}
    sites = deploy("sites", **OF_GROUPS | sizes)  # in groups of two
    alone = f"{LIMITS}allow_one_cohort = true\n"
    least = "min_clients_per_group = {}\n".format
    for run in (of_cohorts, look, sites):
        Path(run.clients[0].node_config["data"].removeprefix("npz:")).write_bytes(b"")
    for run, limits, named in (
        (of_cohorts, LIMITS, "allow_groups"),
        (of_cohorts, alone, "allow_groups"),
        (of_cohorts, ALLOWED, "cohorts"),
        (look, LIMITS, "allow_one_cohort"),
        (look, ALLOWED, "allow_one_cohort"),
        (look, alone, "cohorts"),
        (sites, LIMITS, "allow_groups"),
        # A server gets no group of an owner or two, whatever it asks for.
        (sites, ALLOWED, "min_clients_per_group"),
    ):
        assert refusal(run, limits) == named
    for run in (of_cohorts, look):
        run.clients[0].node_config["cohorts"] = table(tmp_path, "v1", "v2")
    assert refusal(look, alone) == "min_clients_per_group"
    # Only what is allowed needs the data, which are broken.
    for run, limits in ((of_cohorts, ALLOWED), (look, alone), (sites, ALLOWED)):
        assert_refused("npz", refusal, run, limits + least(2))


def test_a_server_cannot_choose_the_file_of_cohorts(cohorts, tmp_path):
    run = cohorts("run", "v1", "v2", "v1", "v2", "v1", "v2")
    settings = public_settings(run.folder.config)
    place = place_of(run)
    place.join(settings | {"cohorts": table(tmp_path, "v2", "v1")})
    found = place.worker().node(0).data.client_cohorts
    assert [found[client].value for client in range(2)] == ["v1", "v2"]


# ------------------------------------------------------------------ what is sent


def test_nothing_tells_a_group_that_is_too_small_from_an_empty_one(cohorts):
    """With seeded noise, which a real run has not: the same bytes."""
    values = ["v1", "v2"] * 3
    empty = cohorts("empty", *[SECRET] * 6)
    small = cohorts("small", *values, least=2)
    told = cohorts("told", *values)
    for run in (empty, small, told):
        run.start()
    assert answers(small) == answers(empty)
    assert all(a != b for a, b in zip(answers(told), answers(empty), strict=True))


def test_no_value_and_no_owner_leaves_a_client(cohorts, capfd):
    """But those two values that the server has named itself."""
    run = cohorts("run", "v1", SECRET, "v2", SECRET, "v1", "v2")
    run.start()
    sent = [
        message_to_proto(reply).SerializeToString() for *_, reply in run.grid.replies
    ]
    assert len(sent) == 3 * 3  # roll call, joining, the one answer
    printed = "".join(capfd.readouterr()).encode()
    for path in run.folder.path.rglob("*"):
        if path.is_file():
            sent.append(path.read_bytes())
    assert not any(SECRET.encode() in content for content in [*sent, printed])
    assert not any(b"v1" in content or b"v2" in content for content in sent[:9])
    for kind, _, reply in run.grid.replies:
        record = reply.content["fedgs"]
        if kind == "train":
            assert {*record} == ANSWER | {"tensors"}
            # One sum of all blocks, whoever is in which.
            shape = run.folder.config.terms(1).shape
            assert load(record["tensors"])["gradients"].shape == shape


def test_a_value_that_no_client_has_is_undecided_and_the_reason_is_logged(cohorts, log):
    run = cohorts("run", *["v1"] * 6, noise_multiplier=0.01)
    run.start()
    log_verdicts(run.folder)
    said = "verdict of v2: undecided. Undecided: the release shows no client of 'v2'"
    assert log[-2].startswith(said)
    other = cohorts("other", *["v1", "v2"] * 3, noise_multiplier=0.01)
    other.start()
    log_verdicts(other.folder)
    assert log[-2].startswith("verdict of v2: ")
    assert log[-1].startswith("picture: diagnosis.png ")


def test_cohorts_under_masks_give_the_bytes_of_one_curator(cohorts, tmp_path):
    make_certificates(tmp_path / "keys", [], NAMES[:3])
    values = ["v1", "v2"] * 3
    run = cohorts("run", *values, secure_aggregation=True)
    folder = tmp_path / "keys" / "clients"
    for client in run.clients:
        own = {"peers": str(folder), "key": str(folder / f"{client.name}.key")}
        client.node_config |= own
        client.public_key = client_key("", folder / f"{client.name}.pub")
    run.start()
    config = dataclasses.replace(run.folder.config, cohorts=table(tmp_path, *values))
    data = write_tiny_npz(tmp_path / "all.npz")
    assert run.product() == undisturbed(config, data, tmp_path / "local")
    # A part is uniform over all integers of 32 bits; the sum of all parts is not.
    parts = np.stack([np.frombuffer(own, "<i4") for own in answers(run)])
    assert np.abs(parts.sum(axis=0, dtype=np.int32)).max() < 2**28
    assert ((np.abs(parts.astype(float)) < 2**28).mean(axis=1) < 0.2).all()
