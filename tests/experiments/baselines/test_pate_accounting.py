"""The accountants of votes against the published code's figures, and what holds.

Figures "of its code" were computed with `pate_core.py` of G-PATE and the formulas of
`pate_gan.py` of PATE-GAN.
"""

import numpy as np
import pytest
from dp_accounting.pld import common, privacy_loss_distribution
from hypothesis import given
from hypothesis import strategies as st

from experiments.baselines import pate_accounting as accounting

DELTA = 1e-5
ANSWERED = np.array([True])


def published(counts, num_queries):
    """The reference's epsilon of equal queries with its settings for epsilon 10."""
    votes = np.array([counts])
    one = accounting.confident_gnmax_rdp(votes, ANSWERED, 1000, 600, 100)
    return accounting.rdp_epsilon(num_queries * one, DELTA)


# GNMax


@pytest.mark.parametrize(
    ("counts", "epsilon"),
    [  # 10 steps of 64 fakes of 10 coordinates
        ([2000, *[0] * 9], 0.6486923740269508),
        ([1500, 500, *[0] * 8], 0.6486923805852658),
        ([1000, 1000, *[0] * 8], 6.122675810687001),
    ],
)
def test_published_accountant_gives_the_figures_of_its_code(counts, epsilon):
    assert published(counts, 6_400) == pytest.approx(epsilon, rel=1e-9)


def test_a_bound_of_the_votes_never_exceeds_the_one_for_all_votes():
    rng = np.random.default_rng(0)
    counts = np.stack(
        [rng.multinomial(2000, rng.dirichlet(np.full(10, 0.3))) for _ in range(200)]
    )
    log_q = accounting.log_pr_not_plurality(counts, 100.0)
    rdp = accounting.gnmax_rdp(log_q, 100.0)
    independent = accounting.GNMAX_ORDERS / 100**2
    assert (rdp <= independent).all()
    assert (rdp < 0.5 * independent).any()
    assert (rdp == independent).any()
    assert (rdp >= 0).all()


# Laplace


def moment(gap, needs_condition, inverse_scale=1.0):
    gaps = np.array([gap])
    return accounting.laplace_moments(gaps, inverse_scale, needs_condition)


def test_a_gap_of_two_divides_by_zero_in_the_published_formula():
    # q = (2 + 2) / (4 e^2) = e^-2, so 1 - q e^2 = 0.
    for needs_condition in (False, True):
        charged = moment(2, needs_condition)
        assert charged.tolist() == [2 * k * (k + 1) for k in range(1, 21)]


def test_the_bound_of_the_votes_is_taken_only_where_its_theorem_allows():
    # q < (e^2 - 1) / (e^4 - 1) = 0.1192: q is 0.2759 at a gap of 1, 0.0622 at 3.
    # The code takes it at a tie as well, where 2 lambda^2 l (l + 1) is what holds.
    for gap, by_code in ((0, 1.28142), (1, 0.42784)):
        assert moment(gap, needs_condition=False)[0] == pytest.approx(by_code, abs=1e-5)
        assert moment(gap, needs_condition=True)[0] == 4.0
    assert moment(3, needs_condition=True)[0] == pytest.approx(0.73617, abs=1e-5)
    assert moment(3, True).tolist() == moment(3, False).tolist()


def bit(gap, inverse_scale=1.0):
    """Chances that the side ahead by `gap` votes wins, and loses."""
    distance = inverse_scale * abs(gap)
    behind = (2 + distance) * np.exp(-distance) / 4
    chances = np.array([1 - behind, behind])
    return chances if gap >= 0 else chances[::-1]


def true_moment(gap, other, order, inverse_scale=1.0):
    """Log E e^(order loss) of one bit, computed."""
    votes, neighbour = bit(gap, inverse_scale), bit(other, inverse_scale)
    return np.log((votes * (votes / neighbour) ** order).sum())


@given(gap=st.integers(0, 30), inverse_scale=st.floats(0.05, 3.0))
def test_charged_moments_bound_the_true_ones(gap, inverse_scale):
    charged = moment(gap, True, inverse_scale)
    for order in (1, 2, 5, 20):
        for other in (gap - 2, gap + 2):
            true = true_moment(gap, other, order, inverse_scale)
            assert true <= charged[order - 1] + 1e-9


# Composition of pure differential privacy


@pytest.mark.parametrize(("pure", "count"), [(0.1, 100), (2.0, 10), (0.025, 6400)])
def test_composition_is_that_of_dp_accounting(pure, count):
    parameters = common.DifferentialPrivacyParameters(pure, 0)
    one = privacy_loss_distribution.from_privacy_parameters(
        parameters, value_discretization_interval=pure / 100
    )
    expected = one.self_compose(count).get_epsilon_for_delta(DELTA)
    assert accounting.pure_epsilon(pure, count, DELTA) == pytest.approx(
        expected, abs=1e-4
    )


def test_a_calibrated_query_spends_the_epsilon_and_no_more():
    for epsilon, count in [(10.0, 640), (1.0, 1), (0.1, 5_000)]:
        pure = accounting.pure_per_query(epsilon, count, DELTA)
        spent = accounting.pure_epsilon(pure, count, DELTA)
        assert epsilon * (1 - 1e-6) < spent <= epsilon


def test_no_query_costs_nothing_and_no_noise_everything():
    assert accounting.pure_epsilon(1.0, 0, DELTA) == 0
    assert accounting.pure_epsilon(np.inf, 1, DELTA) == np.inf
    assert accounting.pure_epsilon(1e-9, 3, DELTA) == 0
