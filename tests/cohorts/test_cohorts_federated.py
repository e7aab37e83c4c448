"""Cohort selection: rounds of the classifier, cohorts by its accuracy, and noise."""

import dataclasses
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch.nn.utils import parameters_to_vector

from fedgs.app.commands import select_clients
from fedgs.cohorts import classifier, selection
from fedgs.cohorts.selection import (
    CLASSIFIER,
    Selection,
    divided,
    membership,
    read_plan,
    training_settings,
    write_plan,
)
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.load import load_data
from fedgs.methods import cohort_classifier, new_state
from fedgs.methods.base import Hosted
from fedgs.methods.cohort_classifier import METHOD, accuracy_of, images_of
from fedgs.randomness import stream
from fedgs.round.answer import raw_answers, summed
from fedgs.runs.run_folder import RunFolder
from runs import at_round, attempts, interrupt, train
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
def _short_training(monkeypatch):
    monkeypatch.setattr(classifier, "CLIENT_STEPS", 2)
    monkeypatch.setattr(classifier, "CLIENT_BATCH_SIZE", 4)


@pytest.fixture
def make(tmp_path) -> Callable[..., RunFolder]:
    """Makes the folder of a selection; returns that of its classifier."""
    data = write_tiny_npz(tmp_path / "tiny.npz")
    number = iter(range(100))

    def make(corruption: str = "none", **settings: object) -> RunFolder:
        path = tmp_path / f"selection-{next(number)}"
        path.mkdir()
        settings = {"num_rounds": 3, "clients_per_round": 4, "below": 0.5} | settings
        asked = Selection(**settings)
        own = {"data": data, "output": str(path / CLASSIFIER), "corruption": corruption}
        config = tiny_config(**own | training_settings(asked, K))
        write_plan(path, config, asked)
        if not asked.train_corrupted:
            config = dataclasses.replace(config, corruption="none")
        return RunFolder.create(config)

    return make


def selected(folder: RunFolder) -> tuple[dict[str, float], dict[str, str]]:
    """Trains the classifier; returns the thresholds, and each client's cohort."""
    config, selection = read_plan(folder.path.parent)
    train(folder)
    data = load_data(config)
    own = select_clients.accuracies_of(folder, config, data)
    thresholds, cohorts = divided(selection, own)
    return thresholds, dict(zip(data.client_names, cohorts, strict=True))


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
    folder = make(**percentiles)
    thresholds, cohorts = selected(folder)
    low, high = thresholds["below"], thresholds["above"]
    config, data = folder.config, load_data(folder.config)
    weights = load((folder.path / "generator.safetensors").read_bytes())
    own = np.array([accuracy_of(config, data.of(c), weights) for c in range(K)])
    assert low <= high
    assert [*cohorts.values()] == [membership(value, thresholds) for value in own]
    assert math.isnan(own[SINGLE_IMAGE_CLIENT])
    assert cohorts[str(SINGLE_IMAGE_CLIENT)] == "rest"
    for limit, percentile in ((low, 40), (high, 60)):
        counts = [(own <= asked / 256).sum() for asked in range(1, 256)]
        nearest = min(abs(count - percentile / 100 * K) for count in counts)
        assert abs((own <= limit).sum() - percentile / 100 * K) == nearest
    assert attempts(folder) == [(1, 1), (2, 1), (3, 1)]


def test_interrupted_training_goes_on_to_the_same_cohorts(make):
    whole = selected(make(**HALF))
    folder = make(**HALF)
    with pytest.raises(KeyboardInterrupt):
        train(folder, at_round(2, interrupt))
    assert selected(folder) == whole


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
    asked = read_plan(folder.path.parent)[1]
    planned = asked.cost(K)
    train(folder)
    assert select_clients.cost_by_ledger(folder, asked) == planned
    assert planned.num_releases == 5  # 7 rounds of 4 of 6 clients
    folder = make(num_rounds=7, noise_per_clip=1.0)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            train(folder, at_round(1, interrupt))
    train(folder)
    assert select_clients.cost_by_ledger(folder, asked).num_releases == 10


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
    selected(folder)
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


def test_memberships_are_randomised_in_private_mode(monkeypatch):
    def other(cohort, cohorts, epsilon, rng):
        assert (epsilon, type(rng)) == (3.0, random.SystemRandom)
        return next(name for name in cohorts if name != cohort)

    monkeypatch.setattr(selection, "randomise", other)
    for noise, expected in ((None, "selected"), (1.0, "rest")):
        own = Selection(below=1.0, noise_per_clip=noise)
        _, cohorts = selection.divided(own, np.full(K, 0.5))
        assert set(cohorts) == {expected}


def test_counts_are_noisy_in_private_mode(monkeypatch):
    """Their noise is that which the cost states, as seen by the search."""
    asked = Selection(**HALF, noise_per_clip=1.0)
    seen = []
    original = selection.thresholds_after

    def seeing(settings, num_clients, counts):
        seen.extend(row[0] for row in counts[:1])
        return original(settings, num_clients, counts[:0])

    monkeypatch.setattr(selection, "thresholds_after", seeing)
    for _ in range(200):
        selection.divided(asked, np.array([0.1] * (K - 1) + [0.9]))
    counts = np.array(seen).reshape(200, -1)[:, 0]
    expected = asked.cost(K).count_noise_std
    assert np.std(counts) == pytest.approx(expected, rel=0.25)  # 5 deviations
    assert np.mean(counts) == pytest.approx(K - 1, abs=5 * expected / 200**0.5)
