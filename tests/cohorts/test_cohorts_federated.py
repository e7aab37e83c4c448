"""Cohort selection over a grid of this process: averaging, answers, noise."""

import dataclasses
import json
import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app import Error as FlowerError

from clients import classifier_app
from fedgs.cohorts import classifier
from fedgs.cohorts.selection import ARRAYS, CONFIG, Selection, membership, write_plan
from fedgs.randomness import stream
from fedgs.round.run import RunStopped
from server import roll_call
from server import selection_app as classifier_server
from server.launch.local_grid import LocalGrid
from server.selection_app import Selecting
from tiny import SINGLE_IMAGE_CLIENT, SIZES, tiny_config, write_tiny_npz

K = len(SIZES)
HALF = {"below": 50, "are_percentiles": True}


class Grid(LocalGrid):
    """Remembers all messages; `spoil` is what becomes of a reply."""

    def __init__(self, num_workers: int = 1) -> None:
        super().__init__(classifier_app.app, K, num_workers)
        self.exchanged: list[tuple[str, int, Message]] = []
        self.spoil: Callable[[Message, Message], Message] = lambda _, reply: reply

    def _deliver(self, message: Message) -> Message:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        reply = self.spoil(message, super()._deliver(message))
        self.exchanged.append((kind, node - 2, reply))
        return reply


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    """An empty cache, short training, and a roll call that does not wait."""
    classifier_app.clients_of.cache_clear()
    monkeypatch.setattr(classifier, "STEPS", 2)
    monkeypatch.setattr(classifier, "BATCH_SIZE", 4)
    monkeypatch.setattr(roll_call, "POLL_SECONDS", 0.0)
    yield
    classifier_app.clients_of.cache_clear()


@pytest.fixture
def make(tmp_path) -> Callable[..., Selecting]:
    data = write_tiny_npz(tmp_path / "tiny.npz")
    number = iter(range(100))

    def make(
        num_workers: int = 1, corruption: str = "none", **settings: object
    ) -> Selecting:
        path = tmp_path / f"selection-{next(number)}"
        (path / ".flower").mkdir(parents=True)
        settings = {"num_rounds": 3, "clients_per_round": 4, "below": 0.5} | settings
        config = tiny_config(data=data, num_clients=K, corruption=corruption)
        write_plan(path, config, Selection(**settings))
        reports, grid = [], Grid(num_workers)
        selecting = Selecting(path, grid, reports.append, threading.Event())
        selecting.reports = reports
        return selecting

    return make


def weights(arrays: ArrayRecord) -> torch.Tensor:
    values = arrays.to_torch_state_dict().values()
    return torch.cat([value.flatten().double() for value in values])


def one_round(selecting: Selecting):
    """The classifier before a round, the round's replies, and what averages them."""
    addresses = roll_call.roll_call(selecting.grid, K)
    strategy = classifier_server.strategy(
        selecting.config, selecting.selection, addresses
    )
    before = ArrayRecord(classifier.build_classifier(selecting.config).state_dict())
    config = ConfigRecord({"folder": str(selecting.folder)})
    messages = strategy.configure_train(1, before, config, selecting.grid)
    replies = list(selecting.grid.send_and_receive(messages))
    return before, replies, lambda answers: strategy.aggregate_train(1, answers)[0]


def test_every_client_is_where_its_own_accuracy_puts_it(make):
    percentiles = {"below": 40, "above": 60, "are_percentiles": True}
    selecting = make(**percentiles)
    found = selecting.run()
    states = [context.state for context in selecting.grid.contexts.values()]
    own = np.array([s.config_records[classifier_app.OWN]["accuracy"] for s in states])
    assert found["low"] <= found["high"]
    expected = [membership(value, found["low"], found["high"]) for value in own]
    assert found["cohorts"] == expected
    assert math.isnan(own[SINGLE_IMAGE_CLIENT])
    assert found["cohorts"][SINGLE_IMAGE_CLIENT] == "rest"
    numbers = [report["round"] for report in selecting.reports]
    assert numbers == list(range(1, len(numbers) + 1))
    for limit, percentile in ((found["low"], 40), (found["high"], 60)):
        counts = [(own <= asked / 256).sum() for asked in range(1, 256)]
        nearest = min(abs(count - percentile / 100 * K) for count in counts)
        assert abs((own <= limit).sum() - percentile / 100 * K) == nearest
    threads = make(num_workers=3, **percentiles)
    assert threads.run() == found  # their number changes nothing


def test_stop_ends_the_roll_call_or_a_round(make):
    def stop(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            selecting.stop.set()
        return reply

    selecting = make()
    selecting.grid.spoil = stop
    with pytest.raises(RunStopped, match="after round 1; nothing was selected"):
        selecting.run()
    with pytest.raises(RunStopped, match="stopped during the roll call"):
        selecting.run()


def test_the_server_app_leaves_the_outcome_in_the_folder(make):
    selecting = make(num_rounds=1)
    context = SimpleNamespace(run_config={"run_folder": str(selecting.folder)})
    classifier_server.main(selecting.grid, context)
    flower = selecting.folder / ".flower"
    assert json.loads((flower / "result.json").read_text())["status"] == "completed"
    assert len(json.loads((flower / "outcome.json").read_text())["cohorts"]) == K


# ------------------------------------------------------------------ what is sent


def test_replies_hold_weights_bits_and_cohorts_only(make):
    selecting = make(**HALF)
    selecting.run()
    kinds = Counter(kind for kind, *_ in selecting.grid.exchanged)
    queries = {"query": K, "query.measure": K, "query.compare": 8 * K, "query.join": K}
    assert kinds == {"train": 12} | queries
    for kind, client, reply in selecting.grid.exchanged:
        content = reply.content
        if kind == "train":
            assert set(content) == {"arrays", "weight"}
            assert dict(content.metric_records["weight"]) == {"weight": 1}
            continue
        (record,) = content.config_records.values()
        assert len(content) == 1
        allowed: dict[str, list[object]] = {
            "query": [{"node_id": client}],
            "query.measure": [{}],
            "query.compare": [{"is_at_most": [False]}, {"is_at_most": [True]}],
            "query.join": [{"cohort": "selected"}, {"cohort": "rest"}],
        }
        assert dict(record) in allowed[kind]


def test_failure_is_reported_by_its_type_alone(make):
    selecting = make()
    addresses = roll_call.roll_call(selecting.grid, K)
    config = ConfigRecord({"folder": str(selecting.folder), "thresholds": [0.5]})
    message = Message(RecordDict({CONFIG: config}), addresses[2], "query.compare")
    (reply,) = selecting.grid.send_and_receive([message])  # has not measured itself
    assert reply.error.reason == "client 2 failed"


def test_client_states_its_cohort_once_and_measures_no_more(make, monkeypatch):
    """With noise, another answer or measurement would draw its noise again."""
    monkeypatch.setattr(classifier_app, "MEMBERSHIP_EPSILON", 0.01)
    selecting = make(noise_per_clip=1.0)
    arrays = ArrayRecord(classifier.build_classifier(selecting.config).state_dict())
    first = selecting.run()["cohorts"]
    for _ in range(8):
        with pytest.raises(RunStopped, match=r"query\.measure: no answer of clients"):
            selecting._ask("query.measure", {}, arrays)
        answers = selecting._ask("query.join", {"low": 0.5, "high": 2.0})
        assert [answer["cohort"] for answer in answers] == first
    with pytest.raises(RunStopped, match="no answer of clients"):
        selecting._ask("query.join", {"low": 0.6, "high": 2.0})


# ------------------------------------------------------------------ training


def test_round_is_the_mean_of_what_clients_train_alone(make):
    selecting = make(clients_per_round=K)
    before, replies, average = one_round(selecting)
    after = weights(average(replies))
    assert torch.equal(after, weights(average(replies[::-1])))  # in whatever order
    clients = classifier_app.clients_of(str(selecting.folder))
    config, trained = selecting.config, []
    for client_id in range(K):
        model = classifier.with_weights(config, before.to_torch_state_dict())
        own = clients.part(client_id, clients.data, held_out=False)
        rng = stream(config.seed, "cohorts/batches", client_id, 1)
        classifier.train(model, *own, rng)
        trained.append(weights(ArrayRecord(model.state_dict())))
    expected = torch.stack(trained).mean(0)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-6)
    assert (expected - weights(before)).norm() > 0.01


def test_no_client_takes_part_more_often_than_is_accounted_for(make):
    selecting = make(num_rounds=7)
    selecting.run()
    trained = Counter(c for kind, c, _ in selecting.grid.exchanged if kind == "train")
    private = dataclasses.replace(selecting.selection, noise_per_clip=1.0)
    assert max(trained.values()) == private.cost(K).num_releases == 5


@pytest.mark.parametrize("train_corrupted", [False, True])
def test_bug_is_planted_after_the_training_unless_asked_for(make, train_corrupted):
    selecting = make(corruption="invert", train_corrupted=train_corrupted)
    clients = classifier_app.clients_of(str(selecting.folder))
    intact = classifier_app.Clients(make().folder)
    is_inverted = []
    for client_id in set(range(K)) - {SINGLE_IMAGE_CLIENT}:
        now, _ = clients.part(client_id, clients.data, held_out=True)
        good, _ = intact.part(client_id, intact.data, held_out=True)
        is_inverted.append(not np.array_equal(now, good))
        if is_inverted[-1]:
            np.testing.assert_allclose(now, 1 - good, atol=1e-6)
        trained, _ = clients.part(client_id, clients.before, held_out=False)
        good, _ = intact.part(client_id, intact.data, held_out=False)
        changed = not np.array_equal(trained, good)
        assert changed == (is_inverted[-1] and train_corrupted)
    assert set(is_inverted) == {False, True}


# ------------------------------------------------------------------ private mode


def test_noise_on_the_sum_is_the_multiplier_times_the_bound(make, monkeypatch):
    monkeypatch.setattr(classifier, "train", lambda *_: None)
    monkeypatch.setattr(classifier_server, "CLIP_BOUND", 0.5)
    before, replies, average = one_round(make(noise_per_clip=3.0, clients_per_round=5))
    noise = weights(average(replies)) - weights(before)
    expected = 3.0 * 0.5 / 5
    # The deviation of an estimated deviation of N numbers is 1 / sqrt(2 N) of it.
    tolerance = 5 / math.sqrt(2 * len(noise))
    assert float(noise.std()) == pytest.approx(expected, rel=tolerance)
    assert float(noise.mean()) == pytest.approx(0, abs=5 * expected / len(noise) ** 0.5)
    assert len(noise) > 50_000


@pytest.mark.parametrize("learning_rate", [1e-4, 10.0])
def test_update_that_leaves_a_client_is_within_the_bound(
    make, monkeypatch, learning_rate
):
    """The sum then moves by at most C if one becomes zero, 2C if it is replaced."""
    monkeypatch.setattr(classifier_app, "CLIP_BOUND", 0.05)
    monkeypatch.setattr(classifier, "LEARNING_RATE", learning_rate)
    before, replies, _ = one_round(make(noise_per_clip=1.0))
    sent = [weights(reply.content.array_records[ARRAYS]) for reply in replies]
    norms = [float((values - weights(before)).norm()) for values in sent]
    assert max(norms) <= 0.05 * (1 + 1e-4)
    assert (max(norms) > 0.0499) == (learning_rate == 10.0)


@pytest.mark.parametrize(("noise", "is_kept"), [(None, True), (1.0, False)])
def test_round_without_all_answers_leaves_the_classifier(make, noise, is_kept):
    """Its average would carry less noise on the sum than is accounted for."""

    def lose(message: Message, reply: Message) -> Message:
        about = message.metadata
        lost = (about.message_type, about.dst_node_id) == ("train", 2)
        return Message(FlowerError(0, "gone"), reply_to=message) if lost else reply

    selecting = make(noise_per_clip=noise, clients_per_round=K)
    selecting.grid.spoil = lose
    _, replies, average = one_round(selecting)
    some = [reply for reply in replies if not reply.has_error()]
    assert len(some) == len(replies) - 1
    for answers in (replies, some):
        assert (average(answers) is not None) == is_kept


def test_memberships_are_randomised_in_private_mode(make, monkeypatch):
    def other(cohort, cohorts, epsilon, rng):
        assert (epsilon, type(rng)) == (3.0, random.SystemRandom)
        return next(name for name in cohorts if name != cohort)

    monkeypatch.setattr(classifier_app, "randomise", other)
    for noise, expected in ((None, "selected"), (1.0, "rest")):
        cohorts = make(below=1.0, num_rounds=1, noise_per_clip=noise).run()["cohorts"]
        del cohorts[SINGLE_IMAGE_CLIENT]  # it alone is in no cohort
        assert set(cohorts) == {expected}


def test_counts_are_noisy_in_private_mode(make):
    selecting = make(**HALF, noise_per_clip=1.0, num_rounds=1)
    selecting.run()
    counts = [selecting._counts([1.0])[0] for _ in range(200)]
    expected = selecting.selection.cost(K).count_noise_std
    assert np.std(counts) == pytest.approx(expected, rel=0.25)  # 5 deviations
    assert np.mean(counts) == pytest.approx(K - 1, abs=5 * expected / 200**0.5)
