"""Permutation of groups and jackknife, against brute force, properties and rates."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedgs.diagnosis.permutation import (
    MOST_SPLITS,
    arrangements,
    attainable_p,
    closed_test,
    jackknife,
    p_value,
    splits,
    squared_distance,
)


def distances(gram, rows):
    """The distance of the cohorts of every split; 0 where the estimate is below."""
    return np.sqrt(np.maximum(0, squared_distance(gram, ~rows, rows)))


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


@pytest.mark.parametrize(("suspicious", "healthy"), [(2, 4), (4, 2), (4, 8)])
def test_unequal_cohorts_have_every_split_once(suspicious, healthy):
    rows = splits(suspicious, healthy)
    total = healthy + suspicious
    assert rows[0].tolist() == [False] * healthy + [True] * suspicious
    wanted = {frozenset(c) for c in itertools.combinations(range(total), suspicious)}
    assert {frozenset(np.flatnonzero(row)) for row in rows} == wanted
    assert len(rows) == math.comb(total, suspicious)
    assert attainable_p(suspicious, healthy) == 1 / len(rows)


@pytest.mark.parametrize(("suspicious", "healthy"), [(2, 4), (3, 4), (4, 3)])
def test_p_of_unequal_cohorts_is_that_of_a_loop(suspicious, healthy):
    total = healthy + suspicious
    for seed in range(5):
        x = np.random.default_rng(seed).normal(size=(total, 3))
        x[healthy:] += 1
        gram = x @ x.T
        everyone = set(range(total))
        every_way = itertools.combinations(range(total), suspicious)
        all_values = [
            brute_force_distance(gram, everyone - {*own}, own) for own in every_way
        ]
        true_one = brute_force_distance(gram, range(healthy), range(healthy, total))
        wanted = np.mean(np.array(all_values) >= true_one - 1e-9)
        assert p_value(distances(gram, splits(suspicious, healthy))) == wanted


def test_p_of_four_against_eight_groups_is_exact():
    """P(p <= k/495) is k/495, and never more, of groups that are exchangeable."""
    rng, rows, count = np.random.default_rng(5), splits(4, 8), 4000
    found = []
    for _ in range(count):
        x = rng.standard_t(2, size=(12, 3))
        found.append(p_value(distances(x @ x.T, rows)))
    for level in (5 / 495, 0.05, 0.1, 0.3):
        exact = math.floor(level * 495 + 1e-9) / 495
        below = np.mean(np.array(found) <= level + 1e-9)
        error = 4 * math.sqrt(level / count)
        assert below <= exact + error
        assert below >= exact - error  # nor is it deaf


def test_of_very_many_splits_the_true_one_and_random_ones_are_compared():
    """C(21, 4) is 5985: few enough to know the exact p as well."""
    rows = splits(4, 17)
    assert rows.shape == (MOST_SPLITS, 21)
    assert rows[0].tolist() == [False] * 17 + [True] * 4
    assert (rows.sum(1) == 4).all()
    assert (rows == splits(4, 17)).all()
    assert attainable_p(4, 17) == 1 / MOST_SPLITS
    every_way = [*itertools.combinations(range(21), 4)]
    every_row = np.zeros((len(every_way), 21), bool)
    for row, own in zip(every_row, reversed(every_way), strict=True):
        row[list(own)] = True
    for seed in range(5):
        x = np.random.default_rng(seed).normal(size=(21, 3))
        gram = x @ x.T
        exact = p_value(distances(gram, every_row))
        error = 4 * math.sqrt(exact / MOST_SPLITS)
        assert p_value(distances(gram, rows)) == pytest.approx(exact, abs=error)


def test_arrangements_fill_every_site_and_the_true_one_comes_first():
    found = arrangements(3, 4)
    assert found[0].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for site in range(3):
        assert ((found == site).sum(1) == 4).all()
    assert (arrangements(2, 4) == splits(4)).all()


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


def test_jackknife_of_unequal_cohorts_is_welchs_interval():
    x = np.random.default_rng(8).normal(size=12)
    x[8:] *= 5

    def gap(healthy, suspicious):
        return suspicious @ x / suspicious.sum(1) - healthy @ x / healthy.sum(1)

    cohorts = np.repeat([0, 1], [8, 4])
    _, interval = jackknife(gap, cohorts, 0.9)
    welch = stats.ttest_ind(x[8:], x[:8], equal_var=False).confidence_interval(0.9)
    assert interval == pytest.approx((welch.low, welch.high))
