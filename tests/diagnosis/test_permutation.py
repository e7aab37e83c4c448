"""Permutation of groups and jackknife, against brute force, properties and rates."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedgs.diagnosis.permutation import (
    attainable_p,
    closed_test,
    distances,
    jackknife,
    p_value,
    splits,
)


def brute_force_distance(gram, healthy, suspicious):
    """|mean - mean|^2 from pairs of different groups, by loops."""

    def within(own):
        return np.mean([gram[i, j] for i in own for j in own if i != j])

    between = np.mean([gram[i, j] for i in healthy for j in suspicious])
    return math.sqrt(max(0.0, within(healthy) + within(suspicious) - 2 * between))


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_every_split_comes_once_and_the_true_one_first(count):
    rows = splits(count)
    assert rows.shape == (math.comb(2 * count, count) // 2, 2 * count)
    assert rows[0].tolist() == [False] * count + [True] * count
    halves = {frozenset(np.flatnonzero(row)) for row in rows}
    everyone = frozenset(range(2 * count))
    wanted = {frozenset(c) for c in itertools.combinations(everyone, count)}
    assert halves | {everyone - half for half in halves} == wanted
    assert len(halves) == len(rows)
    assert attainable_p(count) == pytest.approx(1 / len(rows))


@pytest.mark.parametrize("count", [2, 4])
def test_distances_are_those_of_a_loop(count):
    x = np.random.default_rng(0).normal(size=(2 * count, 3)) + 1
    gram, rows = x @ x.T, splits(count)
    halves = [(np.flatnonzero(~row), np.flatnonzero(row)) for row in rows]
    wanted = [brute_force_distance(gram, *own) for own in halves]
    unread = np.diag(np.full(2 * count, 99.0))  # a group's own product
    assert distances(gram + unread, rows) == pytest.approx(wanted, abs=1e-12)


@given(
    st.lists(st.floats(-10, 10), min_size=8, max_size=8),
    st.permutations(range(4)),
    st.permutations(range(4)),
)
def test_p_does_not_depend_on_order_or_names_of_cohorts(values, first, second):
    x = np.round(np.array(values), 3)

    def p(order):
        own = x[order][:, None]
        return p_value(distances(own @ own.T, splits(4)))

    original = p(np.arange(8))
    assert p(np.array([*first, *(4 + np.array(second))])) == original
    assert p(np.array([4, 5, 6, 7, 0, 1, 2, 3])) == original


def test_p_is_exact_on_exchangeable_groups():
    """P(p <= k/35) is k/35 for a continuous statistic; heavy tails change nothing."""
    rng, rows, count = np.random.default_rng(3), splits(4), 4000
    found = []
    for _ in range(count):
        x = rng.standard_t(2, size=(8, 3))
        found.append(p_value(distances(x @ x.T + 1e3, rows)))
    for k in (1, 2, 5):
        below = np.mean(np.array(found) <= k / 35 + 1e-9)
        # Ties at distance 0 can only raise p where it is large.
        error = 4 * math.sqrt(k / 35 / count)
        assert below == pytest.approx(k / 35, abs=error)


def test_closed_test_equals_all_subsets_by_hand():
    rng = np.random.default_rng(4)
    own = {name: rng.random(35) for name in "abc"}
    found = closed_test(own)
    for name in own:
        worst = max(
            p_value(np.max([own[n] for n in subset], axis=0))
            for size in (1, 2, 3)
            for subset in itertools.combinations("abc", size)
            if name in subset
        )
        assert found[name] == worst


def test_jackknife_of_a_mean_is_welchs_interval():
    rng = np.random.default_rng(7)
    x = rng.normal(size=10)

    def gap(healthy, suspicious):
        return suspicious @ x / suspicious.sum(1) - healthy @ x / healthy.sum(1)

    estimate, interval = jackknife(gap, np.repeat([0, 1], 5), 0.9)
    welch = stats.ttest_ind(x[5:], x[:5], equal_var=False).confidence_interval(0.9)
    assert estimate == pytest.approx(x[5:].mean() - x[:5].mean())
    assert interval == pytest.approx((welch.low, welch.high))
    # A statistic that is undefined somewhere has none.
    cohorts = np.repeat([0, 1], 4)
    found = jackknife(lambda h, s: np.where(h.sum(1) < 4, math.nan, 1.0), cohorts, 0.95)
    assert found == (1.0, None)
