"""Cohort selection over a grid of this process: averaging, answers, noise."""

import contextlib
import dataclasses
import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app import Error as FlowerError
from torch import Tensor

from clients import selection_app as classifier_app
from fedgs.cohorts import classifier
from fedgs.cohorts.selection import ARRAYS, CONFIG, Selection, membership, write_plan
from fedgs.federation.training import RunStopped
from fedgs.randomness import stream
from fedgs.runs.run_folder import RunFolder
from server import roll_call
from server import selection_app as classifier_server
from server.launch.local_grid import LocalGrid
from server.selection_app import Selecting
from tiny import SINGLE_IMAGE_CLIENT, SIZES, tiny_config, write_tiny_npz

K = len(SIZES)
HALF = {"below": None, "percentile_below": 50}
FAST = {"num_rounds": 3, "clients_per_round": 4, "steps": 2, "batch_size": 4}


class Grid(LocalGrid):
    """Remembers all messages; `spoil` is what becomes of a reply."""

    def __init__(self, num_workers: int = 1) -> None:
        super().__init__(classifier_app.app, K, num_workers)
        self.exchanged: list[tuple[str, int, RecordDict, Message]] = []
        self.spoil: Callable[[Message, Message], Message] = lambda _, reply: reply

    def _deliver(self, message: Message) -> Message:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        reply = self.spoil(message, super()._deliver(message))
        self.exchanged.append((kind, node - 2, message.content, reply))
        return reply


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    """An empty cache, and a roll call that does not wait."""
    classifier_app.clients_of.cache_clear()
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
        (path / "private").mkdir(parents=True)
        settings = FAST | {"below": 0.5} | settings
        config = tiny_config(data=data, num_clients=K, corruption=corruption)
        write_plan(path, config, Selection(**settings))
        reports = []
        found = Selecting(path, Grid(num_workers), reports.append, threading.Event())
        found.reports = reports
        return found

    return make


def accuracies(folder: Path) -> list[float]:
    values = [
        json.loads(path.read_text())["accuracy"]
        for path in sorted((folder / "private").glob("accuracy-*.json"))
    ]
    return [math.nan if value is None else value for value in values]


def weights(arrays: ArrayRecord) -> torch.Tensor:
    values = arrays.to_torch_state_dict().values()
    return torch.cat([value.flatten().double() for value in values])


def strategy_of(selecting: Selecting):
    """The strategy of a selection whose nodes have answered the roll call."""
    selecting.addresses = roll_call.roll_call(selecting.grid, K)
    config, selection = selecting.config, selecting.selection
    return classifier_server.strategy(config, selection, selecting.addresses)


def one_round(selecting: Selecting) -> tuple[ArrayRecord, list[Message], Any]:
    """The classifier before a round, the round's replies, and the strategy."""
    chosen, config = strategy_of(selecting), ConfigRecord()
    before = ArrayRecord(classifier.build_classifier(selecting.config).state_dict())
    config["folder"] = str(selecting.folder)
    messages = chosen.configure_train(1, before, config, selecting.grid)
    return before, list(selecting.grid.send_and_receive(messages)), chosen


def movement(selecting: Selecting) -> Tensor:
    """By what a round moves the classifier, without Flower's loop."""
    before, replies, chosen = one_round(selecting)
    return weights(chosen.aggregate_train(1, replies)[0]) - weights(before)


# ------------------------------------------------------------------ what comes out


@pytest.mark.parametrize(
    "thresholds",
    [
        {"below": 0.3, "above": 0.4},
        {"below": None, "percentile_below": 40, "percentile_above": 60},
    ],
)
def test_every_client_is_where_its_own_accuracy_puts_it(make, thresholds):
    selecting = make(keep_accuracies=True, **thresholds)
    found = selecting.run()
    own = np.array(accuracies(selecting.folder))
    assert found["low"] <= found["high"]
    expected = [membership(value, found["low"], found["high"]) for value in own]
    assert found["cohorts"] == expected
    assert math.isnan(own[SINGLE_IMAGE_CLIENT])
    assert found["cohorts"][SINGLE_IMAGE_CLIENT] == "rest"
    numbers = [report["round"] for report in selecting.reports]
    assert numbers == list(range(1, len(numbers) + 1))
    if "percentile_below" not in thresholds:
        assert (found["low"], found["high"]) == (0.3, 0.4)
    else:
        for limit, percentile in ((found["low"], 40), (found["high"], 60)):
            counts = [(own <= asked / 256).sum() for asked in range(1, 256)]
            nearest = min(abs(count - percentile / 100 * K) for count in counts)
            assert abs((own <= limit).sum() - percentile / 100 * K) == nearest
    threads = make(num_workers=3, keep_accuracies=True, **thresholds)
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


def test_launcher_that_looks_at_the_lock_does_not_end_it(make):
    selecting = make(num_rounds=1)
    (selecting.folder / ".flower").mkdir()
    held = contextlib.ExitStack()
    held.enter_context(RunFolder(selecting.folder, selecting.config).locked())
    looking = threading.Timer(0.2, held.close)
    looking.start()
    context = SimpleNamespace(run_config={"run_folder": str(selecting.folder)})
    classifier_server.main(selecting.grid, context)
    looking.join()
    outcome = json.loads((selecting.folder / ".flower" / "result.json").read_text())
    assert outcome["status"] == "completed"


def test_client_without_an_answer_ends_it(make):
    def fail(message: Message, reply: Message) -> Message:
        if message.metadata.message_type != "query.join":
            return reply
        return Message(FlowerError(0, "gone"), reply_to=message)

    selecting = make()
    selecting.grid.spoil = fail
    with pytest.raises(RunStopped, match=r"query.join: no answer of clients \[0, 1"):
        selecting.run()


# ------------------------------------------------------------------ what is sent


def test_replies_hold_weights_bits_and_cohorts_only(make):
    selecting = make(**HALF)
    selecting.run()
    kinds = Counter(kind for kind, *_ in selecting.grid.exchanged)
    queries = {"query": K, "query.measure": K, "query.compare": 8 * K, "query.join": K}
    assert kinds == {"train": 12} | queries
    for kind, client, _, reply in selecting.grid.exchanged:
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


def test_client_states_its_cohort_once_and_measures_no_more(make):
    """With noise, another answer or measurement would draw its noise again."""
    selecting = make(noise_per_clip=1.0, membership_epsilon=0.01)
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
    before, replies, chosen = one_round(selecting)
    after, other = (
        weights(chosen.aggregate_train(1, arrived)[0])
        for arrived in (replies, replies[::-1])
    )
    assert torch.equal(after, other)  # in whatever order they arrive
    clients = classifier_app.clients_of(str(selecting.folder))
    config, trained = selecting.config, []
    for client_id in range(K):
        model = classifier.with_weights(config, before.to_torch_state_dict())
        own = clients.part(client_id, clients.data, held_out=False)
        rng = stream(config.seed, "cohorts/batches", client_id, 1)
        classifier.train(model, *own, steps=2, batch_size=4, learning_rate=0.1, rng=rng)
        trained.append(weights(ArrayRecord(model.state_dict())))
    expected = torch.stack(trained).mean(0)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-6)
    assert (expected - weights(before)).norm() > 0.01


def test_no_client_takes_part_more_often_than_is_accounted_for(make):
    selecting = make(num_rounds=7)
    selecting.run()
    trained = Counter(c for kind, c, *_ in selecting.grid.exchanged if kind == "train")
    private = dataclasses.replace(selecting.selection, noise_per_clip=1.0)
    assert max(trained.values()) == private.cost(K).num_releases == 5


@pytest.mark.parametrize("train_corrupted", [False, True])
def test_bug_is_planted_after_the_training_unless_asked_for(make, train_corrupted):
    selecting = make(corruption="invert", train_corrupted=train_corrupted)
    clients = classifier_app.clients_of(str(selecting.folder))
    intact = classifier_app.Clients(make().folder)
    is_inverted = []
    for client_id in range(K):
        if client_id == SINGLE_IMAGE_CLIENT:
            continue
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
    monkeypatch.setattr(classifier, "train", lambda *_, **__: None)
    noise = movement(make(noise_per_clip=3.0, clip_bound=0.5, clients_per_round=5))
    expected = 3.0 * 0.5 / 5
    # The deviation of an estimated deviation of N numbers is 1 / sqrt(2 N) of it.
    tolerance = 5 / math.sqrt(2 * len(noise))
    assert float(noise.std()) == pytest.approx(expected, rel=tolerance)
    assert float(noise.mean()) == pytest.approx(0, abs=5 * expected / len(noise) ** 0.5)
    assert len(noise) > 50_000


@pytest.mark.parametrize("learning_rate", [1e-4, 10.0])
def test_update_that_leaves_a_client_is_within_the_bound(make, learning_rate):
    """The sum then moves by at most C if one becomes zero, 2C if it is replaced."""
    selecting = make(noise_per_clip=1.0, clip_bound=0.05, learning_rate=learning_rate)
    before, replies, _ = one_round(selecting)
    sent = [weights(reply.content.array_records[ARRAYS]) for reply in replies]
    norms = [float((values - weights(before)).norm()) for values in sent]
    assert max(norms) <= 0.05 * (1 + 1e-4)
    assert (max(norms) > 0.0499) == (learning_rate == 10.0)
    assert movement(make(clip_bound=1e-6)).norm() > 1e-3  # without privacy none is


@pytest.mark.parametrize(("noise", "is_kept"), [(None, True), (1.0, False)])
def test_round_without_all_answers_leaves_the_classifier(make, noise, is_kept):
    """Its average would carry less noise on the sum than is accounted for."""

    def lose(message: Message, reply: Message) -> Message:
        about = message.metadata
        lost = (about.message_type, about.dst_node_id) == ("train", 2)
        return Message(FlowerError(0, "gone"), reply_to=message) if lost else reply

    selecting = make(noise_per_clip=noise, clients_per_round=K)
    selecting.grid.spoil = lose
    _, replies, chosen = one_round(selecting)
    some = [reply for reply in replies if not reply.has_error()]
    assert len(some) == len(replies) - 1
    for answers in (replies, some):
        assert (chosen.aggregate_train(1, answers)[0] is not None) == is_kept


def test_memberships_are_noisy_in_private_mode(make):
    """With epsilon 0.01 an answer is next to a fair coin: none of 25 is one in 3e7."""
    answers = Counter()
    for _ in range(5):
        noise = {"noise_per_clip": 1.0, "membership_epsilon": 0.01}
        cohorts = make(below=1.0, num_rounds=1, **noise).run()["cohorts"]
        del cohorts[SINGLE_IMAGE_CLIENT]  # it alone is not in `selected`
        answers.update(cohorts)
    assert set(answers) == {"selected", "rest"}


def test_counts_are_noisy_in_private_mode(make):
    selecting = make(**HALF, noise_per_clip=1.0, num_rounds=1)
    selecting.run()
    counts = [selecting._counts([1.0])[0] for _ in range(200)]
    expected = selecting.selection.cost(K).count_noise_std
    assert np.std(counts) == pytest.approx(expected, rel=0.25)  # 5 deviations
    assert np.mean(counts) == pytest.approx(K - 1, abs=5 * expected / 200**0.5)
