"""A node answers a request once: the same bytes again, whatever happened between."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

import fedgs.round.node
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.files import read_tensors
from fedgs.gan.discriminators import Discriminators
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Ledger
from fedgs.round.node import Node
from fedgs.round.node_state import clients_hash
from fedgs.runs.run_folder import node_folder, state_path
from refusals import assert_refused
from runs import limit_clients
from tiny import changed, digest, public_fakes, request_of, tiny_config, tiny_data


def _config(**overrides: object) -> RunConfig:
    """One node with all clients and noise that nobody can draw again."""
    return tiny_config(**({"clients_per_node": 6, "noise_seed": None} | overrides))


def _node(
    config: RunConfig, private: Path, node_id: int = 0, limits: Limits | None = None
) -> Node:
    """A node as a run starts it, or starts it again: with its request of round 0."""
    node = Node(config, node_id, tiny_data(config), private, limits)
    assert node.answer(public_fakes(config)) is None
    return node


def _digest(node: Node) -> str:
    return digest(node.state.discriminators.state())


@pytest.fixture
def work(monkeypatch) -> dict[str, int]:
    """Counts the training steps and the draws of noise."""
    counts = {"train": 0, "normal": 0}

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: object) -> object:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counted)

    count(Discriminators, "train")
    count(NoiseStream, "normal")
    return counts


# -------------------------------------------------------------------- repeated requests


def test_a_node_answers_a_round_once_with_the_same_bytes_and_nothing_changes_it(
    tmp_path, work
):
    """Not an old round, nor another request of the last one, nor a restart."""
    config = _config()
    unprepared = Node(config, 0, tiny_data(config), tmp_path)
    assert_refused("is missing from", unprepared.answer, request_of(config))
    assert not unprepared.state.folder.exists()
    node, request = _node(config, tmp_path), request_of(config, 2)
    node.answer(request_of(config))
    first, state, done = node.answer(request), _digest(node), dict(work)
    assert done["normal"] == 2
    assert (first.round, first.node_id) == (2, 0)
    assert (first.noise_std, first.clip_bound) == (1.0, 1.0)  # 2 * C * sigma, C
    node.save(keep_round=0)
    kept = {path: path.read_bytes() for path in node.state.folder.iterdir()}
    tensors, metadata = read_tensors(state_path(node.state.folder, 2))
    # No local generator of the warm start, no noise and no raw gradient.
    assert set(tensors) == {*node.state.discriminators.state(), "answer", "sha256"}
    assert torch.equal(tensors["answer"], first.values)
    names = clients_hash(tiny_data(config).client_names)
    assert metadata == {"digest": request.digest(), "clients": names}
    for asked in (node, _node(config, tmp_path)):
        for other in (
            changed(request, labels=(request.tensors["labels"] + 1) % 3),
            dataclasses.replace(request, participants=(0, 1, 2)),
            dataclasses.replace(request, trainees=()),
            request_of(config),
        ):
            words = f"answered round 2, .* request for round {other.round}"
            assert_refused(words, asked.answer, other)
        assert asked.answer(public_fakes(config)) is None
        again = asked.answer(dataclasses.replace(request, keep_round=1))
        assert torch.equal(again.values, first.values)
        asked.save(keep_round=0)
        assert _digest(asked) == state
    assert work == done
    assert {path: path.read_bytes() for path in node.state.folder.iterdir()} == kept
    assert _counted(tmp_path) == [(1, 1), (2, 1)]


def test_an_answer_that_was_lost_is_a_new_attempt_with_new_noise(
    tmp_path, work, monkeypatch
):
    config = _config()
    limit_clients(monkeypatch, _room_for(config, 2))
    request = request_of(config)
    first, second = (_node(config, tmp_path).answer(request) for _ in range(2))
    assert work["normal"] == 2  # each was killed before `save`
    assert not torch.isclose(first.values, second.values).all(dim=-1).any()
    assert _counted(tmp_path) == [(1, 1), (1, 2)]
    with pytest.raises(ClientRefused, match="client_epsilon"):  # both are spent
        _node(config, tmp_path).answer(request)


# ---------------------------------------------------------------------- restored state


@pytest.fixture
def saved(tmp_path) -> Path:
    """The state of a node that has answered round 1."""
    node = _node(_config(), tmp_path)
    node.answer(request_of(node.config))
    node.save(keep_round=0)
    return state_path(node_folder(tmp_path, 0), 1)


@pytest.mark.parametrize(
    ("damage", "settings", "message"),
    [
        (lambda content: content, {"discriminator_dim": 2}, "another architecture"),
        (  # one bit of some weight
            lambda content: (
                content[: (at := 2 * len(content) // 3)]
                + bytes([content[at] ^ 1])
                + content[at + 1 :]
            ),
            {},
            "corrupted state, of another hash; restore it",
        ),
    ],
)
def test_a_state_that_is_not_the_nodes_is_refused(
    tmp_path, saved, damage, settings, message
):
    saved.write_bytes(damage(saved.read_bytes()))
    config = _config(**settings)
    with pytest.raises(UserError, match=f"^{re.escape(str(saved.parent))}.*{message}"):
        _node(config, tmp_path).answer(request_of(config, 2))


# --------------------------------------------------------------- the clients' own count


def _counted(private: Path, node_id: int = 0) -> list[tuple[int, int]]:
    """(round, attempt) of every release that the node's clients have counted."""
    path = node_folder(private, node_id) / "releases-00000.jsonl"
    if not path.exists():
        return []
    return [(event.round, event.attempt) for event in Ledger.read(path).events]


def _room_for(config: RunConfig, releases: int) -> float:
    z = config.noise_multiplier / config.batch_size**0.5
    return epsilon_from_mu((releases + 0.5) ** 0.5 / z, 1e-5)


def test_a_release_is_counted_before_it_is_computed_and_stays_so_if_it_fails(
    tmp_path, monkeypatch
):
    config = _config()
    node, request = _node(config, tmp_path), request_of(config)

    def fail(*_: object) -> None:
        assert _counted(tmp_path) == [(1, 1)]
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(fedgs.round.node, "answer_of", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            node.answer(request)
    assert node.state.round == 0  # no answer is left behind
    assert node.answer(request).values.shape == (4, 1, 16, 16)
    assert _counted(tmp_path) == [(1, 1), (1, 2)]


def test_the_count_names_the_participants_and_the_nodes_own_noise(tmp_path):
    config = _config(clients_per_node=3, noise_multiplier=2.0, clip_bound=0.5)
    node = _node(config, tmp_path, node_id=1)
    node.answer(request_of(config, participants=(0, 3, 5)))
    folder = node_folder(tmp_path, 1)
    (event,) = Ledger.read(folder / "releases-00000.jsonl").events
    assert (event.participants, event.num_clients) == ((0, 2), 3)
    assert (event.noise_std, event.clip_bound, event.batch_size) == (2.0, 0.5, 4)
    assert (event.planned_nodes, event.counted_nodes) == (1, 1)
    names = json.loads((folder / "clients.json").read_text())
    assert names["releases-00000.jsonl"] == ["3", "4", "5"]


# ------------------------------------------------------------------- refused by a limit


def test_a_restarted_node_refuses_beyond_its_clients_epsilon(
    tmp_path, work, monkeypatch
):
    config = _config()
    limit_clients(monkeypatch, _room_for(config, 2))
    node = _node(config, tmp_path)
    for round in (1, 2):
        answer = node.answer(request_of(config, round, participants=(0, 5)))
        node.save(keep_round=0)
    node = _node(config, tmp_path)
    done = dict(work)
    node.check(request_of(config, 3, participants=(1, 2)))  # which have room
    for round, participants in ((3, (0, 1)), (4, (5,))):
        request = request_of(config, round, participants=participants)
        for refuses in (node.check, node.answer):
            with pytest.raises(ClientRefused, match="client_epsilon") as refused:
                refuses(request)
            assert refused.value.setting == "client_epsilon"
    assert work == done
    assert _counted(tmp_path) == [(1, 1), (2, 1)]
    # What was released already may be sent again.
    last = request_of(config, 2, participants=(0, 5))
    node.check(last)
    assert torch.equal(node.answer(last).values, answer.values)


# ----------------------------------------------------------- who hosts, trains, answers


def test_a_node_without_participants_trains_but_answers_nothing(tmp_path, work):
    config = _config(
        clients_per_node=3, discriminator_training="every_round", warm_start_rounds=0
    )
    request = request_of(config, participants=(0, 2))
    node = _node(config, tmp_path, node_id=1)
    for asked in (node, _node(config, tmp_path, node_id=1)):
        assert asked.answer(request) is None
        asked.save(keep_round=0)
        assert node.state.discriminators.steps.tolist() == [2, 2, 2]
        assert work == {"train": 2, "normal": 0}
    assert _counted(tmp_path, node_id=1) == []


def test_a_node_warm_starts_once_when_it_is_first_asked(tmp_path, work):
    config = _config()  # T_w = 2 rounds of n_dis = 2 steps
    node = Node(config, 0, tiny_data(config), tmp_path)
    assert work["train"] == 0
    for _ in range(2):
        assert node.answer(public_fakes(config)) is None
        assert node.state.round == 0
        assert node.state.discriminators.steps.tolist() == [4] * 6
        assert work == {"train": 4, "normal": 0}
    node.save(keep_round=0)
    restarted = _node(config, tmp_path)
    assert work == {"train": 4, "normal": 0}
    nobody = {"participants": (), "trainees": ()}
    assert restarted.answer(request_of(config, **nobody)) is None
    assert digest(restarted.state.discriminators.state()) == _digest(node)


def test_only_a_sanitized_answer_is_kept(tmp_path, monkeypatch):
    """What a node keeps is sent again on request without another look at it."""
    config = _config(noise_seed=7)
    node, request = _node(config, tmp_path), request_of(config)
    monkeypatch.setattr("fedgs.round.node.answer_of", lambda *_: torch.zeros(1))
    with pytest.raises(TypeError, match="SanitizedGradients"):
        node.answer(request)


# -------------------------------------------------------------------- whose state it is


def test_a_state_is_of_the_clients_that_it_was_made_with(tmp_path):
    """In their order: else one owner would be in the places of two."""
    config = _config()
    data = tiny_data(config)
    node = _node(config, tmp_path)
    node.save(0)
    first, *others = data.client_names
    for names in ([*others, first], ["somebody", *others]):
        changed_data = dataclasses.replace(data, client_names=names)
        other = Node(config, 0, changed_data, tmp_path)
        words = "other clients than those that this run began with"
        assert_refused(words, other.state.check_clients)
        assert_refused(words, other.answer, request_of(config))
    again = Node(config, 0, data, tmp_path)
    again.state.check_clients()
    assert again.answer(request_of(config)) is not None
