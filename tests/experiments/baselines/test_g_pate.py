"""G-PATE: what one client can change, and that teachers' votes move the fakes."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from baselines import small_run, small_trainer
from experiments.baselines.baseline import Facts
from experiments.baselines.g_pate import (
    REPLACED,
    GPate,
    GPateSettings,
    aggregate,
    bin_of,
)
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.randomness import stream

FACTS = Facts(2000, 60_000, None, 10, (1, 28, 28))
DELTA = 1e-5


def events(settings, count=1):
    event = {
        "num_queries": settings.batch_size * settings.projection_dim,
        "threshold_std": settings.threshold_ratio * settings.answer_noise,
        "answer_std": settings.answer_noise,
    }
    return [event] * count


def votes_of(training, data=None):
    """All histograms on the same fakes; with other data, after one more step on it."""
    if data is not None:
        training.data = data
    images, labels = training.fakes(stream(3, "fakes", 0), 16)
    training.teach(images, labels, 0)
    projections = training._projections(0, images)
    return training._votes(images, labels, projections)


def test_a_client_changes_one_vote_of_each_query(tmp_path):
    run, data = small_run("g-pate", tmp_path / "data")
    mine = data.client_records[5]
    images = data.images.copy()
    images[mine] = 255 - images[mine]
    other = dataclasses.replace(data, images=images)
    votes = votes_of(small_trainer("g-pate", tmp_path))
    changed = votes_of(GPate(run.settings, run.config, data), other)
    moved = np.abs(votes - changed).sum(axis=-1)
    assert set(np.unique(moved)) <= {0, 2}  # left one bin, came into another
    assert moved.any()
    assert np.sqrt(((votes - changed) ** 2).sum(-1)).max() == pytest.approx(REPLACED)
    assert np.abs(votes.max(-1) - changed.max(-1)).max() <= 1
    assert (votes.sum(-1) == run.facts.num_clients).all()


def test_valid_epsilon_does_not_read_the_votes_and_counts_every_query():
    rows = GPate.guarantees(GPateSettings(), FACTS, events(GPateSettings(), 10), DELTA)
    mu = math.sqrt(6_400 * (1 / 600**2 + 2 / 100**2))
    assert rows[0].epsilon == pytest.approx(epsilon_from_mu(mu, DELTA), rel=1e-9)
    assert [(r.label, r.relation) for r in rows] == [
        ("valid", "replace-one"),
        ("valid", "zero-out"),
        ("as published", "replace-one"),
    ]
    # min over orders of 6400 order (1 / (2 600^2) + 1 / 100^2) + log(1e5) / (order - 1)
    orders = np.array([1.1, *range(2, 200)])
    rdp = 6_400 * orders * (0.5 / 600**2 + 1 / 100**2)
    expected = (rdp + math.log(1e5) / (orders - 1)).min()
    assert rows[2].epsilon == pytest.approx(expected, rel=1e-9)


def test_revealed_votes_are_accounted_by_the_published_code(tmp_path):
    training = small_trainer("g-pate", tmp_path, reveal_votes=True, answer_noise=1.0)
    event = training.step(0)
    settings = training.settings
    *rows, published = GPate.guarantees(settings, FACTS, [event], DELTA)
    assert "itself private" in published.theorem
    hidden = {n: v for n, v in event.items() if n != "rdp_of_votes"}
    counts = {"kind", "num_queries", "num_answered", "threshold"}
    assert set(hidden) == counts | {"threshold_std", "answer_std"}
    training.settings = dataclasses.replace(settings, reveal_votes=False)
    assert set(training.step(1)) == set(hidden)  # nothing of the votes unasked
    unseen = GPate.guarantees(settings, FACTS, [hidden], DELTA)
    assert published.epsilon < unseen[-1].epsilon
    assert unseen[0].epsilon == rows[0].epsilon
    # The valid line holds of a folder whose ledger is kept back, and says so.
    assert "ledger is published" in rows[0].conditions[-1]
    assert len(unseen[0].conditions) == 1


# The aggregation


def test_bins_are_those_of_a_histogram():
    values = torch.tensor([-5.0, -1.0, -0.81, -0.79, 0.0, 0.79, 0.81, 1.0, 9.0])
    edges = np.linspace(-1, 1, 11)
    expected = [np.histogram(np.clip([v], -1, 1), edges)[0].argmax() for v in values]
    assert bin_of(values, 1.0, 10).tolist() == expected
    broken = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert bin_of(broken, 1.0, 10).tolist() == [5, 9, 0]


def test_without_noise_the_plurality_answers_where_it_passes_the_threshold():
    counts = np.array([[1, 5, 4], [4, 3, 3], [0, 0, 10]])
    noise = np.random.default_rng(0).standard_normal((3, 4))
    answered, winner = aggregate(counts, noise, 5.0, 0.0, 0.0)
    assert answered.tolist() == [True, False, True]
    assert winner.tolist() == [1, 0, 2]


def test_noise_decides_as_often_as_the_gaussians_say():
    counts = np.tile([30, 20], (20_000, 1))
    noise = np.random.default_rng(0).standard_normal((20_000, 3))
    answered, winner = aggregate(counts, noise, 35.0, 10.0, 10.0)
    # P(N >= 0.5) = 0.3085 and P(N(10, 200) > 0) = 0.7602; 5 standard deviations: 0.017
    assert abs(answered.mean() - 0.3085) < 0.017
    assert abs((winner == 0).mean() - 0.7602) < 0.017


def test_what_is_not_answered_does_not_move_a_fake(tmp_path):
    training = small_trainer("g-pate", tmp_path, vote_threshold=1.0, answer_noise=0.0)
    counts = np.array([[12, *[0] * 9], [6, 6, *[0] * 8]])
    coordinates, event = training._release(0, counts)
    assert coordinates.tolist() == pytest.approx([-0.9e-4, 0.0])
    assert event["num_answered"] == 1


def test_the_answers_make_fakes_look_real_to_the_teachers(tmp_path):
    training = small_trainer(
        "g-pate", tmp_path, answer_noise=0.0, batch_size=32, projection_dim=40
    )

    def judged():
        images, labels = training.fakes(stream(3, "judged"), 200)
        asked = training.ask(lambda own, x, y: own(x, y), images, labels)
        return float(torch.cat(list(asked)).mean())

    training.step(0)
    before = judged()
    frozen = dataclasses.replace(training.settings, teacher_steps=0)
    training.settings = frozen
    for index in range(1, 9):
        training.step(index)
    assert judged() > before
