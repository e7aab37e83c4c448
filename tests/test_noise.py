"""The noise: its distribution, its independence, and that it is used once."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from fedgs.noise import NoiseStream

NUM_DRAWS = 200_000
# A two-sided bound that a correct sampler misses with probability 2e-9.
SIX_SIGMA = 6.0
# P(sqrt(n) * D > x) < 2 exp(-2 x^2) (Dvoretzky, Kiefer, Wolfowitz, Massart): 4.6e-11.
KS_BOUND = 3.5


def _draw(noise_seed=7, node_id=0, round=1, noise_std=1.0, num=NUM_DRAWS):
    return NoiseStream(noise_seed, node_id, round).normal((num,), noise_std)


@pytest.mark.parametrize("noise_seed", [7, None])
@pytest.mark.parametrize("noise_std", [0.3, 2.14])  # 2.14 = 2 * 1 * 1.07, the paper's
def test_noise_has_the_asked_for_distribution(noise_seed, noise_std):
    draws = _draw(noise_seed, noise_std=noise_std)
    # Standard errors of n normal draws: s / sqrt(n) and s / sqrt(2 n).
    assert abs(draws.mean()) < SIX_SIGMA * noise_std / NUM_DRAWS**0.5
    error = abs(draws.std() - noise_std)
    assert error < SIX_SIGMA * noise_std / (2 * NUM_DRAWS) ** 0.5
    distance = stats.kstest(draws / noise_std, "norm").statistic
    assert distance < KS_BOUND / NUM_DRAWS**0.5


def test_noise_has_tails():
    # 200,000 normal draws hold 12.6 beyond 4 sigma on average; none: probability 3e-6.
    assert 1 <= (np.abs(_draw()) > 4).sum() <= 40


def test_noise_has_the_shape_and_precision_that_the_sum_needs():
    draws = NoiseStream(7, 0, 1).normal((2, 1, 3, 3), 1.0)
    assert draws.shape == (2, 1, 3, 3)
    assert draws.dtype == np.float64


def test_a_noise_multiplier_of_zero_adds_nothing():
    assert not _draw(noise_std=0.0, num=10).any()


@pytest.mark.parametrize("noise_seed", [7, None])
def test_a_noise_stream_is_used_once(noise_seed):
    noise = NoiseStream(noise_seed, 0, 1)
    noise.normal((2,), 1.0)
    with pytest.raises(RuntimeError, match="already used"):
        noise.normal((2,), 1.0)


def test_seeded_noise_is_reproducible():
    assert np.array_equal(_draw(), _draw())


def test_seeded_noise_differs_and_is_uncorrelated_between_nodes_rounds_and_seeds():
    keys = [(7, 0, 1), (7, 1, 1), (7, 0, 2), (8, 0, 1)]
    draws = [_draw(*key) for key in keys]
    for first, second in itertools.combinations(draws, 2):
        assert not np.isin(first[:1000], second).any()
        correlation = np.corrcoef(first, second)[0, 1]
        assert abs(correlation) < SIX_SIGMA / NUM_DRAWS**0.5


def test_unseeded_noise_is_new_each_time():
    first, second = _draw(None), _draw(None)
    assert not np.isin(first[:1000], second).any()
    assert abs(np.corrcoef(first, second)[0, 1]) < SIX_SIGMA / NUM_DRAWS**0.5


def test_no_seed_is_not_seed_zero():
    assert not np.isin(_draw(None, num=100), _draw(0, num=100)).any()


@pytest.mark.parametrize("noise_seed", [7, None])
def test_noise_neither_reads_nor_moves_the_global_random_state(noise_seed):
    def draw_after_seeding():  # numpy's global state is what is tested
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
        draws = _draw(noise_seed, num=100)
        assert np.array_equal(np.random.get_state()[1], before[0])  # noqa: NPY002
        assert torch.equal(torch.get_rng_state(), before[1])
        return draws

    is_same = np.array_equal(draw_after_seeding(), draw_after_seeding())
    assert is_same == (noise_seed is not None)
