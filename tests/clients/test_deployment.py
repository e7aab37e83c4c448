"""A deployment without a network: bits, who may join, and what leaves a client.

Faults are in test_deployment_faults.py; real processes, TLS and authentication in
test_resident.py and test_multihost.py.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from clients import site as deployment
from clients.history import read_history
from clients.site import Site
from deployed_grid import LIMITS, MODES, NAMES, place_of
from fedgs.errors import UserError
from fedgs.federation.training import RunStopped
from fedgs.privacy.client_limits import ClientRefused
from fedgs.runs.run_folder import state_rounds
from refusals import assert_refused
from server import roll_call
from server.progress import Progress
from simulated_grid import round_of
from tiny import write_tiny_npz

HISTORY = [("a" * 16, 0)]

# ------------------------------------------------------------------ bits and words


@pytest.mark.parametrize("mode", MODES)
def test_a_deployment_gives_the_local_engines_bytes(deploy, undisturbed, mode):
    run = deploy(mode=mode)
    run.start()
    assert run.product() == undisturbed(run)
    assert run.attempts() == [(1, 1), (2, 1), (3, 1), (4, 1)]
    content = run.progress()
    assert all(node["joined"] for node in content["nodes"].values())


def test_only_public_words_and_sanitized_gradients_leave_a_client(deploy):
    run = deploy()
    run.start()
    for kind, name, reply in run.grid.replies:
        assert not reply.has_error()
        assert list(reply.content) == ["fedgs"]
        record = dict(reply.content["fedgs"])
        if kind == "query":
            assert record == {"name": name, "protocol": roll_call.PROTOCOL}
        elif kind == "query.join":
            nothing = {"round": -1, "newest": -1, "released": [], "refused": ""}
            assert record == nothing
        else:
            allowed = {"is_empty", "round", "node_id", "noise_std", "clip_bound"}
            assert set(record) <= allowed | {"tensors", "request"}


@pytest.mark.parametrize("transport", ["exact", "compact"])
def test_counted_bytes_do_not_depend_on_single_releases(deploy, transport, monkeypatch):
    """A compact release weighs what is in it, which who sees the sum must not see."""
    counted: list[int] = []
    monkeypatch.setattr(
        Progress, "add_bytes", lambda self, sent=0, received=0: counted.append(received)
    )
    run = deploy(transport=transport)
    run.start()
    counted = [received for received in counted if received]
    records = [reply.content["fedgs"] for _, _, reply in run.grid.replies]
    sizes = [len(record["tensors"]) for record in records if "tensors" in record]
    assert len(counted) == len(sizes) == 12
    assert counted == [counted[0]] * 12
    assert counted[0] == pytest.approx(np.mean(sizes), rel=0.1)
    assert (len(set(sizes)) > 1) == (transport == "compact")


def test_no_path_of_the_server_reaches_a_client_and_none_of_a_client_the_server(deploy):
    run = deploy()
    requests: list[Message] = []
    run.grid.on_push = lambda name, request: requests.append(request) or True
    run.start()
    root = str(run.root)
    for request in requests:
        record = request.content["fedgs"]
        assert root not in str({k: v for k, v in record.items() if k != "tensors"})
    for _, _, reply in run.grid.replies:
        assert root not in str(reply.content["fedgs"].get("name"))


def test_state_of_a_client_is_its_own(deploy):
    run = deploy()
    run.start()
    assert list(run.folder.private.iterdir()) == []  # nothing at the server
    for index, client in enumerate(run.clients):
        for folder in (client.state_dir, run.states(index).parent):
            assert folder.stat().st_mode & 0o777 == 0o700
        assert run.states(index).name == f"node-0000{index}"
        assert state_rounds(run.states(index))[-1] == 4
        assert run.counted(index) == [1, 2, 3, 4]


def test_replies_carry_the_servers_clock(deploy):
    run = deploy()
    asked: list[Message] = []
    run.grid.on_push = lambda name, request: asked.append(request) or True
    run.start()
    for request, (_, _, reply) in zip(asked, run.grid.replies, strict=True):
        assert reply.metadata.created_at == request.metadata.created_at
        assert reply.metadata.ttl == request.metadata.ttl


def test_a_state_is_on_the_disk_before_its_answer_leaves(deploy, monkeypatch):
    run = deploy()
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def spoil(name: str, request: Message, reply: Message) -> Message:
        asked = round_of(request)
        if asked is not None:
            state_file = f"round-{asked:07d}.safetensors"
            assert any(f"state-{name}" in p and state_file in p for p in synced)
        return reply

    monkeypatch.setattr(os, "fsync", recorded)
    run.grid.spoil = spoil
    run.start()


def test_a_request_lives_as_long_as_its_round_a_warm_start_longer(deploy):
    run = deploy(round_timeout=60.0)
    lives: dict[int, float] = {}

    def arrives(name: str, request: Message) -> bool:
        asked = round_of(request)
        lives[asked] = max(lives.get(asked, 0.0), request.metadata.ttl)
        return True

    run.grid.on_push = arrives
    run.start()
    assert all(lives[round] <= 60.0 for round in (1, 2, 3, 4))
    assert lives[0] > 3600


# ------------------------------------------------------------------ who may join


def test_a_client_that_claims_anothers_name_is_refused(deploy, log):
    run = deploy()
    run.clients[1].node_config["name"] = NAMES[0]
    run.clients[1].registered = NAMES[1]
    with pytest.raises(RunStopped, match="roll call: b-clinic did not join"):
        run.start()
    claim = "claims the name 'a-clinic', is registered as 'b-clinic'"
    assert any(claim in line for line in log)
    assert run.attempts() == []


@pytest.mark.parametrize("who", ["nobody of the run", "without a registered name"])
def test_a_stranger_may_not_join(deploy, log, who):
    run = deploy()
    stranger = run.clients[1]
    if who == "nobody of the run":
        stranger.node_config["name"] = stranger.registered = "z-clinic"
        words = "its name 'z-clinic' is not in this run"
    else:
        stranger.registered, stranger.node_config["name"] = "", NAMES[2]
        words = "'c-clinic' is registered with another key"
    with pytest.raises(RunStopped, match="b-clinic"):
        run.start()
    assert any(words in line for line in log)


def test_of_two_nodes_with_one_name_the_first_keeps_it(deploy, log):
    run = deploy()
    twin = run.clients[1]
    twin.node_config["name"] = twin.registered = NAMES[0]
    with pytest.raises(RunStopped, match="b-clinic"):
        run.start()
    assert any("another node that is online has joined" in line for line in log)


@pytest.mark.parametrize("wrong", ["count", "labels", "file", "noise", "memory"])
def test_a_run_that_does_not_suit_a_client_is_refused_by_it(deploy, wrong, monkeypatch):
    run = deploy()
    client = run.clients[1]
    told = "b-clinic failed; its own error.log says why"
    if wrong == "count":
        client.node_config["data"] = write_tiny_npz(run.root / "six.npz")
        words = "has 6 clients, the run gives this node 2"
    elif wrong == "labels":
        client.node_config["classes"] = "digits"
        words = "classes = 'digits'"
    elif wrong == "file":
        client.node_config["data"] = "npz:/nowhere.npz"
        words = "nowhere.npz"
    elif wrong == "noise":
        del client.node_config["limits"]
        told = words = "allow_seeded_noise"
    else:
        monkeypatch.setattr(deployment, "check_capacity", _no_room)
        words = "too large"
    with pytest.raises(RunStopped, match=told):
        run.start()
    assert words in (client.state_dir / "error.log").read_text()
    assert run.attempts() == []


def _no_room(config, folder) -> None:
    if folder.name == "state-b-clinic":
        raise UserError("too large")


def test_another_run_under_a_known_id_is_refused(deploy):
    run = deploy()
    run.start()
    settings = roll_call.public_settings(run.folder.config)
    run_id = json.loads((run.folder.path / "deployment.json").read_text())["run_id"]
    place = place_of(run, run_id=run_id)
    known = read_history(place.folder)
    assert place.join(settings, known).round == 4
    with pytest.raises(UserError, match="other settings under the same run"):
        place.join(settings | {"batch_size": 2}, known)


def test_settings_of_an_older_version_are_the_same_run(deploy):
    """A state without a setting that came later, and whose default is meant."""
    run = deploy()
    settings, place = roll_call.public_settings(run.folder.config), place_of(run)
    place.join({k: v for k, v in settings.items() if k != "node_sizes"}, HISTORY)
    place.join(settings, HISTORY)


@pytest.mark.parametrize("sizes", ["2,2,2," * 300_000, "9,1", "2,2,-2", "x\n"])
def test_sizes_of_nodes_that_cannot_be_are_refused_in_few_words(deploy, sizes):
    run = deploy()
    settings, place = roll_call.public_settings(run.folder.config), place_of(run)
    with pytest.raises(UserError, match="node_sizes = ") as refused:
        place.join(settings | {"node_sizes": sizes}, HISTORY)
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()  # one line of a log
    assert not place.folder.exists()


def test_joining_again_takes_the_limits_as_they_are_now(deploy):
    run = deploy()
    settings, place = roll_call.public_settings(run.folder.config), place_of(run)
    limits = Path(run.clients[0].node_config["limits"])
    for most in (8, 64):
        limits.write_text(f"{LIMITS}max_batch_size = {most}\n")
        place.join(settings, HISTORY)
        assert place.worker().limits.max_batch_size == most
        assert place.worker().node(0).limits.max_batch_size == most
    limits.write_text(f"{LIMITS}max_batch_size = 1\n")
    assert "max_batch_size = 1" in str(place.join(settings, HISTORY).refusal)
    with pytest.raises(ClientRefused, match="max_batch_size = 1"):
        place.worker()


@pytest.mark.parametrize(
    "run_id", ["../../etc", "", "0" * 15, "0" * 17, "ABCDEF0123456789"]
)
def test_a_run_id_that_is_no_id_becomes_no_folder(deploy, run_id):
    assert_refused("not 16 hexadecimal", place_of, deploy(), run_id=run_id)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "name is missing"),
        ({"data": 3}, "data is missing"),
        ({"state-dir": None}, "state-dir="),
        ({"noise-seed": 3}, "noise_seed: unknown"),
        ({"num_rounds": 3}, "num_rounds: unknown"),
        ({"polarity": "grey"}, "polarity = 'grey'"),
        ({"limits": "/no/limits.toml"}, "no/limits.toml"),
    ],
)
def test_a_wrong_node_config_is_refused_with_its_key(deploy, change, words):
    given = deploy().clients[0].node_config | change
    given = {key: value for key, value in given.items() if value is not None}
    assert_refused(words, Site.read, given)


def test_state_directory_that_others_can_read_is_refused(deploy):
    site = Site.read(deploy().clients[0].node_config)
    site.state_dir.mkdir(mode=0o755)
    assert_refused("chmod 700", site.open)
