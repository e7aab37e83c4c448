"""Integers: the exact sampler of their noise, rounding, and their sum modulo 2^32."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from fedgs.config.integers import LEAST_NOISE, noise_units
from fedgs.mechanism import discrete
from fedgs.mechanism.discrete import MOST_STD, discrete_gaussian
from fedgs.mechanism.integer_sums import sanitize_integers, to_integers
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.sanitizer import PerSampleGradients, clip

NUM_DRAWS = 100_000
UNITS = 2**20
# P(sqrt(n) * D > x) < 2 exp(-2 x^2) (Dvoretzky, Kiefer, Wolfowitz, Massart): 4.6e-11.
KS_BOUND = 3.5
SOURCES = {"seeded": 7, "secure": None}


def _stream(source="seeded", round=1) -> NoiseStream:
    return NoiseStream(SOURCES[source], 0, round)


def _clipped(n=3, batch=2, side=4, clip_bound=1.0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    values = 5 * torch.randn(n, batch, 1, side, side, generator=rng)
    return clip(PerSampleGradients(values), clip_bound)


# ------------------------------------------------------------------ the sampler


@pytest.mark.parametrize(
    ("source", "std"), [("seeded", 1), ("seeded", 4), ("secure", 3)]
)
def test_draws_have_the_law_of_the_discrete_gaussian(source, std):
    drawn = _stream(source).discrete((NUM_DRAWS,), std)
    weights = np.exp(-(np.arange(-60, 61) ** 2) / (2 * std**2))
    expected = np.cumsum(weights / weights.sum())
    found = np.searchsorted(np.sort(drawn), np.arange(-60, 61), "right") / NUM_DRAWS
    assert np.abs(found - expected).max() * math.sqrt(NUM_DRAWS) < KS_BOUND


@pytest.mark.parametrize("std", [1000, MOST_STD])
def test_many_units_look_like_a_gaussian(std):
    drawn = _stream().discrete((NUM_DRAWS,), std) / std
    distance = stats.kstest(drawn, "norm").statistic  # a unit is 1 / std of it
    assert (distance - 0.4 / std) * math.sqrt(NUM_DRAWS) < KS_BOUND
    assert abs(drawn.var() - 1) < 6 * math.sqrt(2 / NUM_DRAWS)


@pytest.mark.parametrize("std", [1, 3, 5])
def test_a_proposal_is_accepted_with_the_chance_that_gives_the_law(std):
    never = pytest.fail  # no further bits are needed
    for block, place in itertools.product(range(6), range(std)):
        # The place in a block from the low bits, then a sign, then k zeros and a 1.
        width = (std - 1).bit_length()
        word = place | (1 << width) | (1 << (width + 1 + block))
        proposed = discrete.proposed(np.array([word], np.uint64), std)
        size = block * std + place
        assert [int(part[0]) for part in proposed] == [block, size, True]
        # It is proposed with 2^-(k+1) / s, so that the law is what is left.
        with mpmath.workdps(60):
            law = mpmath.exp(mpmath.mpf(-(size**2)) / (2 * std**2))
            chance = 2**block * law * 4 / 5
            coin = int(mpmath.floor(chance * 2**64))
        assert 0 < chance <= 1
        assert discrete.is_below(coin - 2, block, size, std, never)
        assert not discrete.is_below(coin + 2, block, size, std, never)


def test_a_coin_too_close_to_call_is_settled_by_further_bits():
    std, block, size = 1000, 1, 1234
    with mpmath.workdps(60):
        chance = mpmath.mpf(8) / 5 * mpmath.exp(mpmath.mpf(-(size**2)) / (2 * std**2))
        coin = int(mpmath.floor(chance * 2**64))
        following = int(mpmath.floor(chance * 2**128)) % 2**64
    sign, place = 0, size - std
    word = place | (sign << 10) | (1 << (11 + block))
    for more, is_taken in ((following - 1, True), (following + 1, False)):
        given = iter([[word], [coin], [more]])

        def words(count, given=given):
            found = np.array(next(given), np.uint64)
            assert len(found) == count
            return found

        taken = discrete.accepted(words, 1, std)
        assert taken.tolist() == [size] * is_taken


def test_the_sampler_draws_as_many_as_asked_and_refuses_what_it_cannot():
    words = _stream().words
    assert discrete_gaussian(words, 0, 5).shape == (0,)
    assert discrete_gaussian(words, 7, 0).tolist() == [0] * 7
    for std in (-1, MOST_STD + 1):
        with pytest.raises(ValueError, match="2\\^28"):
            discrete_gaussian(words, 1, std)


# ------------------------------------------------------------------ rounding


@pytest.mark.parametrize("clip_bound", [1.0, 0.3, 1e-3])
def test_rounding_is_towards_zero_and_keeps_the_integer_norm(clip_bound):
    values = _clipped(200, 4, clip_bound=clip_bound).values
    for units in (16, 1000, 2**28):
        integers = to_integers(values, units, clip_bound)
        exact = values * units / clip_bound
        assert (integers.abs() <= exact.abs()).all()
        assert (exact.abs() - integers.abs() <= 1 + 1e-9 * units).all()
        assert (integers * exact >= 0).all()
        # In Python's integers, that do not overflow.
        for row in integers.flatten(0, 1).flatten(1)[:50].tolist():
            assert sum(number**2 for number in row) <= units**2


@pytest.mark.parametrize(
    "row",
    [
        (1.0, 0.1),
        (2.0**32 / UNITS, 0.0),  # whose square is 2^64, and 0 in int64
        (2.0**31.5 / UNITS, 2.0**31.5 / UNITS),
        (math.nan, 0.1),
        (math.inf, 0.1),
        (1e300, 0.0),
    ],
)
def test_a_row_that_is_too_long_all_the_same_is_no_signal(row):
    values = torch.zeros(1, 2, 1, 1, 2, dtype=torch.float64)
    values[0, 0, 0, 0] = torch.tensor(row)
    values[0, 1, 0, 0] = torch.tensor([0.6, 0.8])
    integers = to_integers(values, UNITS, 1.0)
    assert integers[0, 0].abs().sum() == 0
    assert integers[0, 1].abs().sum() > 0


# ------------------------------------------------------------------ the sum


def test_a_node_releases_the_integer_sum_and_one_draw_of_noise():
    parts = [_clipped(3, seed=1), _clipped(2, seed=2)]
    noise_std = 2 * 0.7
    std = noise_units(0.7, UNITS)
    expected = sum(to_integers(p.values, UNITS, 1.0).sum(dim=0) for p in parts)
    expected = expected + torch.from_numpy(_stream().discrete((2, 1, 4, 4), std))
    released = sanitize_integers(parts, UNITS, noise_std, _stream(), 1, 5)
    assert torch.equal(released.values, expected)
    assert released.values.dtype == torch.int64
    assert (released.round, released.node_id, released.units) == (1, 5, UNITS)
    with pytest.raises(RuntimeError, match="already released"):
        sanitize_integers(parts, UNITS, noise_std, _stream(round=2), 2, 5)


def test_too_little_noise_for_the_proof_is_not_released():
    units, noise_std = 2**8, 2 * (LEAST_NOISE - 2) / 2**9
    with pytest.raises(ValueError, match="the proof needs"):
        sanitize_integers([_clipped()], units, noise_std, _stream(), 1, 0)
