"""The cost of a private selection against other accountants, and by its definition."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given
from hypothesis import strategies as st

from fedgs.errors import UserError
from fedgs.privacy.gaussian import Law, binomial_law, delta_from_mu, fixed_law
from fedgs.privacy.participation import Releases
from fedgs.privacy.selection_cost import Composed, SelectionCost

COST = SelectionCost(
    noise_per_clip=2.0,
    num_releases=8,
    num_counts=16,
    count_noise_std=10.0,
    membership_epsilon=1.5,
)
DELTA = 1e-5


def test_gaussian_part_is_the_sum_of_squares():
    training = {"replace-one": 8 * (2 / 2.0) ** 2, "zero-out": 8 * (1 / 2.0) ** 2}
    for relation, expected in training.items():
        mu = COST.mu("release", relation)
        assert mu == pytest.approx(math.sqrt(expected + 16 / 10.0**2), rel=1e-12)


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_dp_accounting_composes_the_same_with_a_run(relation):
    """Its randomised response, its Gaussians and a run's nine, discretised."""
    step = 1e-3
    together = pld.from_gaussian_mechanism(
        1 / COST.mu("release", relation), value_discretization_interval=step
    )
    run = pld.from_gaussian_mechanism(3.0, value_discretization_interval=step)
    # dp-accounting's noise parameter: keep with probability 1 - noise / 2.
    noise = 2 / (1 + math.exp(COST.membership_epsilon))
    answer = pld.from_randomized_response(noise, 2, value_discretization_interval=step)
    together = together.compose(answer).compose(run.self_compose(9))
    ours = COST.composed("release", relation, fixed_law(9), ratio=3.0)
    assert ours.epsilon(DELTA) == pytest.approx(
        together.get_epsilon_for_delta(DELTA), abs=0.01
    )


@given(
    st.floats(0.1, 4.0), st.floats(0.05, 6.0), st.floats(1e-9, 0.5), st.integers(1, 9)
)
def test_lies_between_either_part_alone_and_their_sum(mu, response, delta, count):
    gaussian = fixed_law(count).epsilon(math.sqrt(count) / mu, delta)
    both = Composed(Releases(fixed_law(count), math.sqrt(count) / mu), response)
    epsilon = both.epsilon(delta)
    assert gaussian - 1e-6 <= epsilon <= gaussian + response + 1e-6
    assert both.delta(epsilon) <= delta * (1 + 1e-6)


def test_epsilon_is_the_least_one():
    both = COST.composed("release", "replace-one")
    epsilon = both.epsilon(DELTA)
    assert both.delta(epsilon) <= DELTA < both.delta(epsilon - 1e-6)


def test_response_alone_keeps_its_pure_epsilon():
    """With next to no Gaussian part, delta is that of the response: exact."""
    weak = Composed(Releases(Law(np.array([1.0]), np.ones(1), 0.0), 1e9), 1.5)
    assert weak.epsilon(1e-9) == pytest.approx(1.5, abs=1e-6)
    keep = math.exp(1.5) / (1 + math.exp(1.5))
    expected = keep - math.exp(0.5) * (1 - keep)
    assert weak.delta(0.5) == pytest.approx(expected, rel=1e-6)


def test_run_without_selection_noise_or_run_noise_is_unbounded():
    assert COST.composed("server", "replace-one").epsilon(DELTA) == math.inf
    assert COST.composed("secagg", "zero-out").epsilon(DELTA) == math.inf
    run = COST.composed("release", "replace-one", fixed_law(3), ratio=0.0)
    assert run.epsilon(DELTA) == math.inf


def test_random_number_of_releases_is_averaged():
    law, ratio = binomial_law({1: 30}, 0.1), 2.0
    both = COST.composed("release", "zero-out", law, ratio)
    mu, shift = COST.mu("release", "zero-out"), COST.membership_epsilon
    keep = 1 / (1 + math.exp(-shift))
    expected = law.tail
    for count, weight in zip(law.counts, law.weights, strict=True):
        total = math.sqrt(count / ratio**2 + mu**2)
        low, high = delta_from_mu(total, 4 - shift), delta_from_mu(total, 4 + shift)
        expected += weight * (keep * low + (1 - keep) * high)
    assert both.delta(4.0) == pytest.approx(expected, rel=1e-9)


def test_json_keeps_the_cost():
    assert SelectionCost.from_json(COST.to_json()) == COST


@pytest.mark.parametrize(
    "change",
    [
        {"noise_per_clip": 0.0},
        {"noise_per_clip": math.nan},
        {"num_releases": 0},
        {"num_counts": -1},
        {"count_noise_std": 0.0},
        {"membership_epsilon": math.inf},
        {"membership_epsilon": "x"},
    ],
)
def test_costs_out_of_range_are_refused(change):
    with pytest.raises(UserError):
        SelectionCost.from_json(COST.to_json() | change)
