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
from tiny import SIZES, digest, request_of, tiny_config, tiny_data


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


def test_a_repeated_request_gets_the_same_bytes_without_any_work(tmp_path, work):
    config = _config()
    node, request = _node(config, tmp_path), request_of(config)
    first, state, done = node.answer(request), _digest(node), dict(work)
    assert done["normal"] == 1
    again = node.answer(dataclasses.replace(request, keep_round=1))
    assert torch.equal(again.values, first.values)
    assert work == done
    assert _digest(node) == state


def test_a_repeated_request_gets_the_same_bytes_after_a_restart(tmp_path, work):
    config = _config()
    node, request = _node(config, tmp_path), request_of(config)
    first, done = node.answer(request), dict(work)
    node.save(keep_round=0)
    restarted = _node(config, tmp_path)
    again = restarted.answer(request)
    assert torch.equal(again.values, first.values)
    assert (again.round, again.node_id) == (1, 0)
    assert (again.noise_std, again.clip_bound) == (1.0, 1.0)  # 2 * C * sigma, C
    assert work == done
    assert _digest(restarted) == _digest(node)


def test_an_answer_that_was_lost_is_a_new_attempt_with_new_noise(tmp_path, work):
    config = _config()
    request = request_of(config)
    first = _node(config, tmp_path).answer(request)  # killed before `save`
    second = _node(config, tmp_path).answer(request)
    assert work["normal"] == 2
    assert not torch.isclose(first.values, second.values).all(dim=-1).any()


def test_a_node_that_another_process_hosted_since_catches_up(tmp_path, work):
    config = _config()
    first, second = (_node(config, tmp_path) for _ in range(2))
    first.answer(request_of(config, 1))
    first.save(keep_round=0)
    answer = second.answer(request_of(config, 2))
    second.save(keep_round=0)
    done = dict(work)
    assert torch.equal(first.answer(request_of(config, 2)).values, answer.values)
    assert work == done
    assert _digest(first) == _digest(second)


# ---------------------------------------------------------------------- restored state


@pytest.mark.parametrize("stacking", ["stacked", "loop"])
@pytest.mark.parametrize("training", ["selected", "every_round"])
def test_a_restored_node_goes_on_bit_for_bit(tmp_path, stacking, training):
    config = _config(noise_seed=7, stacking=stacking, discriminator_training=training)
    steady = _node(config, tmp_path / "steady")
    for round in (1, 2, 3, 4):
        expected = steady.answer(request_of(config, round))
    for round in (1, 2, 3, 4):
        restarted = _node(config, tmp_path / "restarted")
        answer = restarted.answer(request_of(config, round))
        restarted.save(keep_round=0)
    assert torch.equal(answer.values, expected.values)
    assert _digest(restarted) == _digest(steady)


def test_going_back_to_the_committed_state_repeats_the_rounds_bit_for_bit(tmp_path):
    config = _config(noise_seed=7)
    node = _node(config, tmp_path)
    answers = {}
    for round in (1, 2, 3, 4):
        answers[round] = node.answer(request_of(config, round))
        node.save(keep_round=2)
    for round in (3, 4):  # what a resumed run does with rounds that did not commit
        state_path(node_folder(tmp_path, 0), round).unlink()
    resumed = _node(config, tmp_path)
    for round in (3, 4):
        again = resumed.answer(request_of(config, round))
        assert torch.equal(again.values, answers[round].values)
    assert _digest(resumed) == _digest(node)


def test_old_states_are_removed_and_the_committed_one_is_kept(tmp_path):
    config = _config()
    node, folder = _node(config, tmp_path), node_folder(tmp_path, 0)
    kept = []
    for round, committed in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 2), (6, 5), (7, 5)):
        node.answer(request_of(config, round))
        node.save(committed)
        kept.append(state_rounds(folder))
    # The committed round, or the newest one before it, and the two newest; of round 6
    # on the file of round 2 stays until round 7 overwrites it.
    before, after = [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]], [[2, 5, 6], [5, 6, 7]]
    assert kept == before + after


def test_the_committed_state_of_a_node_that_rarely_takes_part_is_kept(tmp_path):
    config = _config()
    node, folder = _node(config, tmp_path), node_folder(tmp_path, 0)
    for round, committed in ((1, 0), (7, 5), (8, 5), (9, 5)):
        node.answer(request_of(config, round))
        node.save(committed)
    assert state_rounds(folder) == [1, 8, 9]  # at round 5 the state was that of 1


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


def test_the_state_of_another_architecture_is_refused(tmp_path, saved):
    other = _config(discriminator_dim=2)
    with pytest.raises(UserError, match="another architecture"):
        _node(other, tmp_path).answer(request_of(other, 2))


def test_a_corrupted_state_is_refused(tmp_path, saved):
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(UserError, match="cannot be read"):
        _node(_config(), tmp_path).answer(request_of(_config(), 2))


def test_a_state_with_one_flipped_bit_is_refused(tmp_path, saved):
    content = bytearray(saved.read_bytes())
    content[-len(content) // 3] ^= 1  # of some weight
    saved.write_bytes(content)
    words = f"^{re.escape(str(saved))}: corrupted state, of another hash; restore it"
    with pytest.raises(UserError, match=words):
        _node(_config(), tmp_path).answer(request_of(_config(), 2))


# --------------------------------------------------------------- the clients' own count


def _counted(private: Path, node_id: int = 0) -> list[tuple[int, int]]:
    """(round, attempt) of every release that the node's clients have counted."""
    path = node_folder(private, node_id) / "releases-00000.jsonl"
    if not path.exists():
        return []
    return [(event.round, event.attempt) for event in Ledger.read(path).events]


def _room_for(config: RunConfig, releases: int) -> dict[str, float]:
    z = config.noise_multiplier / config.batch_size**0.5
    return {"client_epsilon": epsilon_from_mu((releases + 0.5) ** 0.5 / z, 1e-5)}


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


def test_a_repeated_request_counts_once_also_after_a_restart(tmp_path):
    config = _config()
    node, request = _node(config, tmp_path), request_of(config)
    for _ in range(2):
        node.answer(request)
    node.save(keep_round=0)
    _node(config, tmp_path).answer(request)
    assert _counted(tmp_path) == [(1, 1)]


def test_an_answer_whose_bytes_are_gone_counts_again(tmp_path):
    config, request = _config(), request_of(_config())
    for _ in range(3):
        _node(config, tmp_path).answer(request)  # killed before `save`
    assert _counted(tmp_path) == [(1, 1), (1, 2), (1, 3)]


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


def test_training_without_a_release_is_not_counted(tmp_path):
    config = _config(clients_per_node=3, discriminator_training="every_round")
    node = _node(config, tmp_path, node_id=1)
    assert node.answer(request_of(config, participants=(0, 2))) is None
    assert _counted(tmp_path, node_id=1) == []


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
def test_a_node_refuses_beyond_its_clients_epsilon(tmp_path, work, is_restarted):
    config = _config()
    config = dataclasses.replace(config, **_room_for(config, 2))
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


def test_lost_answers_use_up_epsilon(tmp_path):
    config = _config()
    config = dataclasses.replace(config, **_room_for(config, 2))
    for _ in range(2):
        _node(config, tmp_path).answer(request_of(config))
    with pytest.raises(ClientRefused, match="client_epsilon"):
        _node(config, tmp_path).answer(request_of(config))


def test_checking_changes_nothing(tmp_path, work):
    config = _config()
    config = dataclasses.replace(config, **_room_for(config, 2))
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
    limits = Limits(state_dir=counts, **_room_for(first, 3))

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
    node = _node(config, tmp_path, node_id=1)
    request = request_of(config, participants=(0, 2))
    assert node.answer(request) is None
    assert node._discriminators.steps.tolist() == [2, 2, 2]
    assert work == {"train": 2, "normal": 0}
    node.save(keep_round=0)
    restarted = _node(config, tmp_path, node_id=1)
    assert restarted.answer(request) is None
    assert work == {"train": 2, "normal": 0}


@pytest.mark.parametrize("kind", ["local", "public"])
def test_a_node_warm_starts_once_when_it_is_first_asked(tmp_path, work, kind):
    config = _config(warm_start=kind)  # T_w = 2 rounds of n_dis = 2 steps
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


def test_clients_are_dealt_to_nodes_in_order(tmp_path):
    config = _config(clients_per_node=4)
    hosted = [list(_node(config, tmp_path, node).hosted) for node in (0, 1)]
    assert hosted == [[0, 1, 2, 3], [4, 5]]


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


def test_every_node_adds_noise_of_its_own(tmp_path):
    settings = {"noise_seed": 7, "client_selection": "all", "clip_bound": 1e-9}
    config = _config(clients_per_node=1, noise_multiplier=1e9, **settings)
    request = request_of(config)
    answers = [_node(config, tmp_path, node_id).answer(request) for node_id in range(6)]
    for node_id, answer in enumerate(answers):
        # noise_std = 2 * C * sigma = 2; the gradients of norm 1e-9 drown.
        noise = NoiseStream(7, node_id, 1).normal((4, 1, 16, 16), 2.0)
        expected = torch.from_numpy(noise).float()
        torch.testing.assert_close(answer.values, expected, rtol=0, atol=1e-6)


def test_the_tiny_problem_has_the_clients_that_the_tests_assume():
    assert tiny_data(tiny_config()).sizes.tolist() == list(SIZES)
    assert tiny_config().num_nodes == 6


def test_only_a_sanitized_answer_is_kept(tmp_path, monkeypatch):
    """What a node keeps is sent again on request without another look at it."""
    config = _config(noise_seed=7)
    node, request = _node(config, tmp_path), request_of(config)
    monkeypatch.setattr("fedgs.federation.node.client_round", lambda *_: torch.zeros(1))
    with pytest.raises(TypeError, match="SanitizedGradients"):
        node.answer(request)
