"""A node answers a request once: the same bytes again, whatever happened between."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

import fedgs.federation.node
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.federation.node import Node
from fedgs.federation.round import public_fakes
from fedgs.files import read_tensors
from fedgs.gan.discriminators import Discriminators
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Ledger
from fedgs.runs.run_folder import node_folder, state_path, state_rounds
from refusals import assert_refused
from runs import limit_clients
from tiny import digest, request_of, tiny_config, tiny_data


def _config(**overrides: object) -> RunConfig:
    """One node with all clients and noise that nobody can draw again."""
    return tiny_config(**({"clients_per_node": 6, "noise_seed": None} | overrides))


def _new_node(config: RunConfig, private: Path, node_id: int = 0) -> Node:
    return Node(config, node_id, tiny_data(config), private)


def _node(config: RunConfig, private: Path, node_id: int = 0) -> Node:
    """A node as a run starts it, or starts it again: with its request of round 0."""
    node = _new_node(config, private, node_id)
    assert node.answer(public_fakes(config)) is None
    return node


def _digest(node: Node) -> str:
    return digest(node._discriminators.state())


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


def test_a_repeated_request_gets_the_same_bytes_after_a_restart(tmp_path, work):
    config = _config()
    node, request = _node(config, tmp_path), request_of(config)
    first, state, done = node.answer(request), _digest(node), dict(work)
    assert done["normal"] == 1
    assert (first.round, first.node_id) == (1, 0)
    assert (first.noise_std, first.clip_bound) == (1.0, 1.0)  # 2 * C * sigma, C
    again = node.answer(dataclasses.replace(request, keep_round=1))
    node.save(keep_round=0)
    restarted = _node(config, tmp_path)
    for answer in (again, restarted.answer(request)):
        assert torch.equal(answer.values, first.values)
    assert work == done
    assert _digest(node) == _digest(restarted) == state
    other = dataclasses.replace(request, labels=(request.labels + 1) % 3)
    assert_refused("has already answered round 1", restarted.answer, other)
    assert _counted(tmp_path) == [(1, 1)]


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


# (round, committed round) of every save, and the states that then are there: the
# committed round's, or the newest before it, and the two newest.
KEPT = {
    "often": [
        *((1, 0, [1]), (2, 0, [1, 2]), (3, 2, [2, 3]), (4, 2, [2, 3, 4])),
        # Of round 6 on the file of round 2 stays until round 7 overwrites it.
        *((5, 2, [2, 4, 5]), (6, 5, [2, 5, 6]), (7, 5, [5, 6, 7])),
    ],
    # At round 5 the state was that of 1.
    "rarely": [(1, 0, [1]), (7, 5, [1, 7]), (8, 5, [1, 7, 8]), (9, 5, [1, 8, 9])],
}


@pytest.mark.parametrize("takes_part", KEPT)
def test_old_states_are_removed_and_the_committed_one_is_kept(tmp_path, takes_part):
    config = _config()
    node, folder = _node(config, tmp_path), node_folder(tmp_path, 0)
    for round, committed, kept in KEPT[takes_part]:
        node.answer(request_of(config, round))
        node.save(committed)
        assert state_rounds(folder) == kept


def test_an_unchanged_node_writes_nothing(tmp_path):
    config = _config()
    node, request = _node(config, tmp_path), request_of(config)
    node.answer(request)
    node.save(keep_round=0)
    path = state_path(node_folder(tmp_path, 0), 1)
    path.unlink()
    node.answer(request)
    node.save(keep_round=0)
    assert not path.exists()


@pytest.fixture
def saved(tmp_path) -> Path:
    """The state of a node that has answered round 1."""
    node = _node(_config(), tmp_path)
    node.answer(request_of(node.config))
    node.save(keep_round=0)
    return state_path(node_folder(tmp_path, 0), 1)


def test_what_a_node_stores_is_its_discriminators_and_its_answer(tmp_path):
    config = _config()
    node = _node(config, tmp_path)
    answer = node.answer(request_of(config))
    node.save(keep_round=0)
    tensors, metadata = read_tensors(state_path(node_folder(tmp_path, 0), 1))
    fresh = Discriminators(config, range(6)).state()
    # No local generator of the warm start, no noise and no raw gradient.
    assert set(tensors) == {*fresh, "answer", "sha256"}
    assert torch.equal(tensors["answer"], answer.values)
    assert metadata == {"digest": request_of(config).digest()}


@pytest.mark.parametrize(
    ("damage", "settings", "message"),
    [
        (lambda content: content, {"discriminator_dim": 2}, "another architecture"),
        (lambda content: content[:-1], {}, "cannot be read"),
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


def test_a_release_is_counted_on_the_disk_before_anything_is_computed(
    tmp_path, monkeypatch
):
    config, seen, client_round = _config(), [], fedgs.federation.node.client_round

    def watched(*args: object) -> object:
        seen.append(_counted(tmp_path))
        return client_round(*args)

    monkeypatch.setattr(fedgs.federation.node, "client_round", watched)
    node = _node(config, tmp_path)
    for round in (1, 2):
        node.answer(request_of(config, round))
    assert seen == [[(1, 1)], [(1, 1), (2, 1)]]


def test_a_release_that_failed_half_way_stays_counted_and_leaves_no_answer(
    tmp_path, monkeypatch
):
    config = _config()
    node, request = _node(config, tmp_path), request_of(config)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(fedgs.federation.node, "client_round", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            node.answer(request)
    assert node.round == 0  # no answer is left behind
    assert node.answer(request).values.shape == (4, 1, 16, 16)
    assert _counted(tmp_path) == [(1, 1), (1, 2)]


def test_a_count_that_cannot_be_written_stops_the_release(tmp_path, monkeypatch, work):
    config = _config(warm_start_rounds=0)
    node, request = _node(config, tmp_path), request_of(config)

    def full(*_: object) -> None:
        raise UserError("no space left")

    monkeypatch.setattr(Ledger, "append", full)
    assert_refused("no space left", node.answer, request)
    assert work == {"train": 0, "normal": 0}


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


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_node_refuses_beyond_its_clients_epsilon(
    tmp_path, work, is_restarted, monkeypatch
):
    config = _config()
    limit_clients(monkeypatch, _room_for(config, 2))
    node = _node(config, tmp_path)
    for round in (1, 2):
        answer = node.answer(request_of(config, round, participants=(0, 5)))
        node.save(keep_round=0)
    if is_restarted:
        node = _node(config, tmp_path)
    done = dict(work)
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


def test_checking_changes_nothing(tmp_path, work, monkeypatch):
    config = _config()
    limit_clients(monkeypatch, _room_for(config, 2))
    node = _node(config, tmp_path)
    before, done = _digest(node), dict(work)
    node.check(request_of(config))
    assert (_digest(node), work, node.round) == (before, done, 0)
    assert _counted(tmp_path) == []


@pytest.mark.parametrize("change", ["labels", "images"])
def test_a_node_refuses_a_request_outside_its_own_limits(tmp_path, work, change):
    config = _config()
    limits = Limits(num_classes=3, image_size=16)
    node = Node(config, 0, tiny_data(config), tmp_path, limits)
    node.answer(public_fakes(config))
    request, state, done = request_of(config), _digest(node), dict(work)
    other = {"labels": request.labels + 1, "images": request.images.repeat(1, 1, 2, 2)}
    with pytest.raises(ClientRefused):
        node.answer(dataclasses.replace(request, **{change: other[change]}))
    assert (_digest(node), work) == (state, done)
    assert _counted(tmp_path) == []


def test_a_count_in_state_dir_goes_on_over_runs_and_packings(tmp_path):
    counts = tmp_path / "counts"
    counts.mkdir()
    first, second = _config(clients_per_node=6), _config(clients_per_node=2)
    limits = Limits(state_dir=counts, client_epsilon=_room_for(first, 3))

    def node(config: RunConfig, run: str, node_id: int) -> Node:
        data = tiny_data(config)
        made = Node(config, node_id, data, tmp_path / run, limits)
        made.answer(public_fakes(config))
        return made

    whole = node(first, "first", 0)
    whole.answer(request_of(first, 1, participants=(0, 2)))
    whole.answer(request_of(first, 2, participants=(2, 4)))
    packed = node(second, "second", 1)  # hosts 2 and 3
    everyone = {"participants": (2, 3)}
    packed.answer(request_of(second, 1, **everyone))
    with pytest.raises(ClientRefused, match="client 2 has released"):
        packed.answer(request_of(second, 2, **everyone))
    packed.answer(request_of(second, 2, participants=(3,)))
    # The first run's node, still running, sees what the second one spent.
    with pytest.raises(ClientRefused, match="client 2 has released"):
        whole.answer(request_of(first, 3, participants=(2, 5)))
    whole.answer(request_of(first, 3, participants=(4, 5)))


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
        assert node._discriminators.steps.tolist() == [2, 2, 2]
        assert work == {"train": 2, "normal": 0}
    assert _counted(tmp_path, node_id=1) == []


@pytest.mark.parametrize("fakes", [None, 8])
def test_a_node_warm_starts_once_when_it_is_first_asked(tmp_path, work, fakes):
    config = _config(fakes_per_round=fakes)  # T_w = 2 rounds of n_dis = 2 steps
    node = _new_node(config, tmp_path)
    assert work["train"] == 0
    for _ in range(2):
        assert node.answer(public_fakes(config)) is None
        assert node.round == 0
        assert node._discriminators.steps.tolist() == [4] * 6
        assert work == {"train": 4, "normal": 0}
    node.save(keep_round=0)
    restarted = _node(config, tmp_path)
    assert work == {"train": 4, "normal": 0}
    nobody = {"participants": (), "trainees": ()}
    assert restarted.answer(request_of(config, **nobody)) is None
    assert digest(restarted._discriminators.state()) == _digest(node)


@pytest.mark.parametrize("clients_per_node", [1, 4])
def test_the_sum_of_all_nodes_does_not_depend_on_the_packing(
    tmp_path, clients_per_node
):
    settings = {"noise_multiplier": 0.0, "client_selection": "all"}
    one = _config(**settings)
    request = request_of(one)
    expected = _node(one, tmp_path / "one").answer(request).values
    config = _config(clients_per_node=clients_per_node, **settings)
    total = torch.zeros_like(expected)
    for node_id in range(config.num_nodes):
        total += _node(config, tmp_path / "many", node_id).answer(request).values
    # Adam turns rounding near a zero gradient into steps: see test_discriminators.
    assert (total - expected).norm() < 1e-3 * expected.norm()


def test_only_a_sanitized_answer_is_kept(tmp_path, monkeypatch):
    """What a node keeps is sent again on request without another look at it."""
    config = _config(noise_seed=7)
    node, request = _node(config, tmp_path), request_of(config)
    monkeypatch.setattr("fedgs.federation.node.client_round", lambda *_: torch.zeros(1))
    with pytest.raises(TypeError, match="SanitizedGradients"):
        node.answer(request)
