"""A deployment without a network: who may join, and what leaves a client.

Faults are in test_deployment_faults.py; real processes, TLS and authentication in
test_resident.py and test_multihost.py.
"""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from clients.deployed_client import DeploymentConfig
from deployed_grid import LIMITS, NAMES, place_of
from fedgs.round.codec import stated_release_bytes
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import state_rounds
from refusals import assert_refused
from server import roll_call
from simulated_grid import round_of
from tiny import WITH_RELEASES, write_tiny_npz


def test_what_crosses_the_network_in_a_run_and_what_stays(deploy, tmp_path):
    public = write_tiny_npz(tmp_path / "public.npz")
    start = {"public_data": public, "phases": "moments,gs-wgan"}
    run = deploy(**WITH_RELEASES | start, message_precision="compact")
    requests = list[Message]()
    run.grid.on_push = lambda name, request: requests.append(request) or True

    run.start()
    allowed = {"is_empty", "round", "node_id", "noise_std", "clip_bound", "tensors"}
    sizes = []
    for request, (kind, name, reply) in zip(requests, run.grid.replies, strict=True):
        assert not reply.has_error()
        assert list(reply.content) == ["fedgs"]
        # By the server's clock: a wrong one of the client does no harm.
        assert reply.metadata.created_at == request.metadata.created_at
        assert reply.metadata.ttl == request.metadata.ttl
        sent, record = request.content["fedgs"], dict(reply.content["fedgs"])
        assert str(tmp_path) not in str({k: sent[k] for k in sent if k != "tensors"})
        if kind == "query":
            assert record == {"name": name, "protocol": roll_call.PROTOCOL}
        elif kind == "query.join":
            assert record == {"round": -1, "released": [], "refused": ""}
        else:
            assert set(record) <= allowed | {"request"}
            if record.get("round", 0) > 1:
                sizes.append(len(record["tensors"]))
    # A compact release weighs what is in it; what is stated of it depends on nothing.
    assert len(set(sizes)) > 1
    stated = stated_release_bytes(run.folder.config)
    assert stated == pytest.approx(np.mean(sizes), rel=0.1)
    lives = [(round_of(request), request.metadata.ttl) for request in requests]
    assert all(ttl <= 60.0 for round, ttl in lives if round)
    assert {round for round, _ in lives} == {None, 0, 1, 2, 3, 4}
    assert max(ttl for round, ttl in lives if round == 0) > 3600
    assert list(run.folder.private.iterdir()) == []  # nothing at the server
    for index, client in enumerate(run.clients):
        for folder in (client.state_dir, run.states(index).parent):
            assert folder.stat().st_mode & 0o777 == 0o700
        assert run.states(index).name == f"node-0000{index}"
        assert state_rounds(run.states(index))[-1] == 4
        assert run.counted(index) == [1, 2, 3, 4]


# ------------------------------------------------------------------ who may join


@pytest.mark.parametrize(
    ("registered", "claimed", "words"),
    [
        ("z-clinic", "z-clinic", "its name 'z-clinic' is not in this run"),
        ("", NAMES[2], "'c-clinic' is registered with another key"),
        # Two nodes of one name: the first keeps it.
        (NAMES[0], NAMES[0], "another client is online"),
        (NAMES[1], NAMES[0], "its key is registered for 'b-clinic'"),
    ],
)
def test_a_stranger_may_not_join(deploy, log, registered, claimed, words):
    run = deploy()
    stranger = run.clients[1]
    stranger.name, stranger.node_config["name"] = registered, claimed
    with pytest.raises(RunStopped, match=r"b-clinic.* did not join"):
        run.start()
    assert any(words in line for line in log)
    assert run.attempts() == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("data", "npz:six.npz", "has 6 clients, and the run expects 2"),
        ("classes", "digits", "classes = 'digits'"),
        ("data", "npz:nowhere.npz", "nowhere.npz"),
        ("limits", None, "allow_embeddings"),
    ],
)
def test_a_run_that_does_not_suit_a_client_is_refused_by_it(
    deploy, tmp_path, monkeypatch, name, value, words
):
    monkeypatch.chdir(tmp_path)
    write_tiny_npz(tmp_path / "six.npz")
    run = deploy()
    client = run.clients[1]
    client.node_config[name] = value
    if value is None:
        del client.node_config[name]
    told = "b-clinic failed; its own error.log says why"
    with pytest.raises(RunStopped, match=told if value else words):
        run.start()
    assert words in (client.state_dir / "error.log").read_text()
    assert run.attempts() == []


def test_another_run_under_a_known_id_is_refused(deploy):
    run = deploy()
    settings, place = roll_call.public_settings(run.folder.config), place_of(run)
    place.join(settings)
    words = "other settings for the same run"
    assert_refused(words, place.join, settings | {"batch_size": 2})


def test_pinned_numbers_are_compared_before_the_data_are_read(deploy):
    """Else who joins would tell a server of the largest label and of the images."""
    run = deploy()
    settings, place = roll_call.public_settings(run.folder.config), place_of(run)
    limits = Path(run.clients[0].node_config["limits"])
    limits.write_text(
        f"{LIMITS}num_classes = {settings['num_classes']}\nnum_clients = 2"
    )
    Path(run.clients[0].node_config["data"].partition(":")[2]).write_bytes(b"")
    for name, value in (("num_classes", 1), ("node_sizes", "3,1,2")):
        refusal = place.join(settings | {name: value}).refusal
        assert refusal.setting == name.replace("node_sizes", "num_clients")
    assert_refused("npz", place.join, settings)


def test_joining_again_takes_the_limits_as_they_are_now(deploy):
    run = deploy()
    settings, place = roll_call.public_settings(run.folder.config), place_of(run)
    limits = Path(run.clients[0].node_config["limits"])
    for most in (8, 64):
        limits.write_text(f"{LIMITS}max_batch_size = {most}\n")
        place.join(settings)
        assert place.worker().node(0).limits.permitted.max_batch_size == most
    limits.write_text(f"{LIMITS}max_batch_size = 1\n")
    assert "max_batch_size = 1" in str(place.join(settings).refusal)
    assert_refused("max_batch_size = 1", place.worker)


@pytest.mark.parametrize(
    "run_id", ["../../etc", "", "0" * 15, "0" * 17, "ABCDEF0123456789"]
)
def test_a_run_id_that_is_no_id_becomes_no_folder(deploy, run_id):
    assert_refused("^run_id ", place_of, deploy(), run_id=run_id)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "name is unset"),
        ({"data": 3}, "data is unset"),
        ({"state-dir": None}, "state-dir="),
        ({"noise-seed": 3}, "noise_seed:"),
        ({"num_rounds": 3}, "num_rounds:"),
        ({"background": "grey"}, "background = 'grey'"),
        ({"limits": "/no/limits.toml"}, "no/limits.toml"),
    ],
)
def test_a_wrong_node_config_is_refused_with_its_key(deploy, change, words):
    given = deploy().clients[0].node_config | change
    given = {key: value for key, value in given.items() if value is not None}
    assert_refused(words, DeploymentConfig.read, given)
