"""Cohort selection over a grid of this process: rounds, questions, answers, noise."""

import dataclasses
import functools
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
from flwr.app import ConfigRecord, Message, RecordDict
from torch.nn.utils import parameters_to_vector

from clients import classifier_app
from fedgs.app.commands import select_clients
from fedgs.cohorts import classifier
from fedgs.cohorts.selection import (
    CLASSIFIER,
    Selection,
    membership,
    noisy_counts,
    read_plan,
    training_settings,
    write_plan,
)
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.load import load_data
from fedgs.methods import cohort_classifier, new_state
from fedgs.methods.base import Hosted
from fedgs.methods.cohort_classifier import METHOD, Members, images_of
from fedgs.randomness import stream
from fedgs.round.answer import raw_answers, summed
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder
from runs import at_round, attempts, ignore, interrupt, train
from server import roll_call, selection_app
from server.nodes import Nodes
from simulated_grid import FakeGrid
from tiny import (
    SINGLE_IMAGE_CLIENT,
    SIZES,
    embedding_round,
    server_round,
    tiny_config,
    write_tiny_npz,
)

K = len(SIZES)
HALF = {"below": 50, "are_percentiles": True}


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    """An empty cache, short training, and a roll call that does not wait."""
    classifier_app.members_of.cache_clear()
    monkeypatch.setattr(classifier, "CLIENT_STEPS", 2)
    monkeypatch.setattr(classifier, "CLIENT_BATCH_SIZE", 4)
    monkeypatch.setattr(roll_call, "ROLL_CALL_POLL_SECONDS", 0.0)
    yield
    classifier_app.members_of.cache_clear()


@pytest.fixture
def make(tmp_path) -> Callable[..., RunFolder]:
    """Makes the folder of a selection; returns that of its classifier."""
    data = write_tiny_npz(tmp_path / "tiny.npz")
    number = iter(range(100))

    def make(corruption: str = "none", **settings: object) -> RunFolder:
        path = tmp_path / f"selection-{next(number)}"
        path.mkdir()
        settings = {"num_rounds": 3, "clients_per_round": 4, "below": 0.5} | settings
        selection = Selection(**settings)
        own = {"data": data, "output": str(path / CLASSIFIER), "corruption": corruption}
        config = tiny_config(**own | training_settings(selection, K))
        write_plan(path, config, selection)
        if not selection.train_corrupted:
            config = dataclasses.replace(config, corruption="none")
        folder = RunFolder.create(config)
        (folder.path / ".flower").mkdir()
        return folder

    return make


def start(folder: RunFolder, grid: FakeGrid | None = None) -> dict:
    """Runs the ServerApp; returns its outcome."""
    context = SimpleNamespace(run_config={"run_folder": str(folder.path)})
    selection_app.main(grid or new_grid(), context)
    return json.loads((folder.path / ".flower" / "outcome.json").read_text())


def new_grid(spoil=None) -> FakeGrid:
    return FakeGrid(K, spoil, app=classifier_app.app)


def locally(folder: RunFolder) -> dict:
    plan = read_plan(folder.path.parent)
    members, stop = Members(*plan, load_data(plan[0])), threading.Event()
    return select_clients.select_locally(folder, members, ignore, stop)


def asking(grid: FakeGrid, folder: RunFolder):
    """Returns what asks the nodes of a grid a question."""
    nodes = Nodes(folder, stop := threading.Event())
    nodes.find(grid)
    return functools.partial(selection_app.ask_nodes, nodes, stop)


def answers_of(config: ResolvedConfig, data, request) -> list:
    return [
        answer
        for node in range(K)
        if (answer := embedding_round(config, data, [node], request, node)) is not None
    ]


def weights(network: torch.nn.Module) -> torch.Tensor:
    return parameters_to_vector(network.parameters()).detach().double()


def test_every_client_is_where_its_own_accuracy_puts_it(make):
    percentiles = {"below": 40, "above": 60, "are_percentiles": True}
    grid = new_grid()
    found = start(folder := make(**percentiles), grid)
    states = [context.state for context in grid.contexts.values()]
    own = np.array([s.config_records[classifier_app.OWN]["accuracy"] for s in states])
    assert found["low"] <= found["high"]
    expected = [membership(value, found["low"], found["high"]) for value in own]
    assert found["cohorts"] == expected
    assert math.isnan(own[SINGLE_IMAGE_CLIENT])
    assert found["cohorts"][SINGLE_IMAGE_CLIENT] == "rest"
    for limit, percentile in ((found["low"], 40), (found["high"], 60)):
        counts = [(own <= asked / 256).sum() for asked in range(1, 256)]
        nearest = min(abs(count - percentile / 100 * K) for count in counts)
        assert abs((own <= limit).sum() - percentile / 100 * K) == nearest
    assert attempts(folder) == [(1, 1), (2, 1), (3, 1)]
    assert locally(make(**percentiles)) == found  # the other engine changes nothing


def test_interrupted_training_goes_on_to_the_same_cohorts(make):
    whole = start(make(**HALF))
    folder = make(**HALF)

    def stop(who: int, request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            (folder.path / ".flower" / "stop").touch()
        return reply

    with pytest.raises(RunStopped, match="stopped after round 1"):
        start(folder, new_grid(stop))
    (folder.path / ".flower" / "stop").unlink()
    assert start(folder) == whole
    assert attempts(folder) == [(1, 1), (2, 1), (3, 1)]


# ------------------------------------------------------------------ what is sent


def test_replies_hold_updates_bits_and_cohorts_only(make):
    grid = new_grid()
    start(make(**HALF), grid)
    kinds = Counter(kind for kind, *_ in grid.replies)
    assert kinds == {"query": K, "train": 12, "query.cohort": (1 + 8 + 1) * K}
    allowed = [{}, *({"is_at_most": [bit]} for bit in (False, True))]
    allowed += [{"cohort": name} for name in ("selected", "rest")]
    for kind, _, reply in grid.replies:
        (record,) = reply.content.config_records.values()
        assert len(reply.content) == 1
        if kind == "query.cohort":
            assert dict(record) in allowed


def test_failure_is_reported_by_its_type_alone(make):
    folder, grid = make(), new_grid()
    place = {"run_folder": str(folder.path)}
    asked = ConfigRecord({"question": "compare", "thresholds": [0.5], **place})
    address = next(iter(grid.indices))  # has not measured itself
    message = Message(RecordDict({"fedgs": asked}), address, "query.cohort")
    (reply,) = grid.pull_messages(grid.push_messages([message]))
    assert reply.error.reason == "client 0 failed"
    with pytest.raises(RunStopped, match=r"compare:"):
        asking(grid, folder)("compare", {"thresholds": [0.5]})


def test_client_states_its_cohort_once_and_measures_no_more(make, monkeypatch):
    """With noise, another answer or measurement would draw its noise again."""
    monkeypatch.setattr(cohort_classifier, "MEMBERSHIP_EPSILON", 0.01)
    folder, grid = make(noise_per_clip=1.0), new_grid()
    first = start(folder, grid)["cohorts"]
    ask = asking(grid, folder)
    trained = (folder.path / "generator.safetensors").read_bytes()
    for _ in range(8):
        with pytest.raises(RunStopped, match="measure:"):
            ask("measure", {"weights": trained})
        answers = ask("join", {"low": 0.5, "high": 2.0})
        assert [answer["cohort"] for answer in answers] == first
    with pytest.raises(RunStopped, match="no answer of clients"):
        ask("join", {"low": 0.6, "high": 2.0})


# ------------------------------------------------------------------ training


def test_round_is_the_mean_of_what_clients_train_alone(make):
    config = make(clients_per_round=K).config
    data, server = load_data(config), new_state(config)
    before, request = weights(server.generator), METHOD.begin(config, server)[0]
    trained = []
    for client in range(K):
        model = classifier.with_weights(config, request.tensors)
        own = images_of(config, data.of(client), is_held_out=False)
        rng = stream(config.seed, "cohorts/batches", client, 1)
        classifier.train(model, *own, rng)
        trained.append(weights(model))
    expected = torch.stack(trained).mean(0)
    server_round(config, server, None, answers_of(config, data, request))
    for network in (server.generator, server.ema):
        found = weights(network)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (expected - before).norm() > 0.01
    assert server.round == 1


def test_repeated_rounds_count_again_in_the_cost(make):
    folder = make(num_rounds=7, noise_per_clip=1.0)
    selection = read_plan(folder.path.parent)[1]
    planned = selection.cost(K)
    train(folder)
    assert select_clients.cost_by_ledger(folder, selection) == planned
    assert planned.num_releases == 5  # 7 rounds of 4 of 6 clients
    folder = make(num_rounds=7, noise_per_clip=1.0)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            train(folder, at_round(1, interrupt))
    train(folder)
    assert select_clients.cost_by_ledger(folder, selection).num_releases == 10


@pytest.mark.parametrize("train_corrupted", [False, True])
def test_bug_is_planted_after_the_training_unless_asked_for(
    make, monkeypatch, train_corrupted
):
    seen = {True: {}, False: {}}

    def seeing(config, client, is_held_out: bool):
        found = images_of(config, client, is_held_out)
        seen[is_held_out][client.number] = found[0]
        return found

    monkeypatch.setattr(cohort_classifier, "images_of", seeing)
    asked = {"corruption": "invert", "train_corrupted": train_corrupted}
    folder = make(clients_per_round=K, **asked)
    config = dataclasses.replace(folder.config, corruption="none")
    intact, is_inverted = load_data(config), []
    start(folder)
    for client in set(range(K)) - {SINGLE_IMAGE_CLIENT}:
        now, trained = seen[True][client], seen[False][client]
        good, _ = images_of(config, intact.of(client), is_held_out=True)
        is_inverted.append(not np.array_equal(now, good))
        if is_inverted[-1]:
            np.testing.assert_allclose(now, 1 - good, atol=1e-6)
        good, _ = images_of(config, intact.of(client), is_held_out=False)
        changed = not np.array_equal(trained, good)
        assert changed == (is_inverted[-1] and train_corrupted)
    assert set(is_inverted) == {False, True}


# ------------------------------------------------------------------ private mode


def test_noise_on_the_sum_is_the_multiplier_times_the_bound(make, monkeypatch):
    monkeypatch.setattr(classifier, "train", lambda *_: None)
    folder = make(noise_per_clip=3.0, clients_per_round=5)
    config, data = folder.config, load_data(folder.config)
    request = METHOD.begin(config, new_state(config))[0]
    total, noise_std, _ = summed(config, 1, answers_of(config, data, request))
    # The deviation of an estimated deviation of N numbers is 1 / sqrt(2 N) of it.
    tolerance = 5 / math.sqrt(2 * total.numel())
    assert noise_std == pytest.approx(3.0 * config.clip_bound) == pytest.approx(3.0)
    assert float(total.std()) == pytest.approx(3.0, rel=tolerance)
    assert float(total.mean()) == pytest.approx(0, abs=5 * 3.0 / total.numel() ** 0.5)
    assert total.numel() > 50_000


@pytest.mark.parametrize(("bound", "is_clipped"), [(0.05, True), (1e6, False)])
def test_update_that_leaves_a_client_is_within_the_bound(make, bound, is_clipped):
    """The sum then moves by at most C if one becomes zero, 2C if it is replaced."""
    config = dataclasses.replace(make().config, clip_bound=bound)
    data, request = load_data(config), METHOD.begin(config, new_state(config))[0]
    answers = answers_of(config, data, request)
    raw = raw_answers(config, Hosted(data, range(K), 0), request)
    for answer, update in zip(answers, raw, strict=True):
        norm, own = answer.values.double().norm(), update.double().norm()
        assert norm == pytest.approx(bound if is_clipped else float(own), rel=1e-4)


def test_memberships_are_randomised_in_private_mode(make, monkeypatch):
    def other(cohort, cohorts, epsilon, rng):
        assert (epsilon, type(rng)) == (3.0, random.SystemRandom)
        return next(name for name in cohorts if name != cohort)

    monkeypatch.setattr(cohort_classifier, "randomise", other)
    for noise, expected in ((None, "selected"), (1.0, "rest")):
        folder = make(below=1.0, num_rounds=1, noise_per_clip=noise)
        cohorts = locally(folder)["cohorts"]
        del cohorts[SINGLE_IMAGE_CLIENT]  # it alone is in no cohort
        assert set(cohorts) == {expected}


def test_counts_are_noisy_in_private_mode():
    selection = Selection(**HALF, noise_per_clip=1.0)
    bits = [{"is_at_most": [True]}] * (K - 1) + [{"is_at_most": [False]}]
    asked = selection, K, lambda *question: bits, [1.0]
    counts = [noisy_counts(*asked)[0] for _ in range(200)]
    expected = selection.cost(K).count_noise_std
    assert np.std(counts) == pytest.approx(expected, rel=0.25)  # 5 deviations
    assert np.mean(counts) == pytest.approx(K - 1, abs=5 * expected / 200**0.5)
