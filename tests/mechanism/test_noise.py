"""The noise: its distribution, source and independence, and that it is used once."""

import itertools
import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

from fedgs.gan.discriminators import Discriminators
from fedgs.mechanism.noise import NoiseStream
from fedgs.methods import new_state
from tiny import client_round, draw_fakes, global_state, tiny_config, tiny_data

NUM_DRAWS = 200_000
# A two-sided bound that a correct sampler misses with probability 2e-9.
SIX_SIGMA = 6.0
# P(sqrt(n) * D > x) < 2 exp(-2 x^2) (Dvoretzky, Kiefer, Wolfowitz, Massart): 4.6e-11.
KS_BOUND = 3.5


SOURCES = {"seeded": 7, "secure": None}
every_source = pytest.mark.parametrize("source", SOURCES)


def _draw(noise_seed=7, node_id=0, round=1, noise_std=1.0, num=NUM_DRAWS):
    return NoiseStream(noise_seed, node_id, round).normal((num,), noise_std)


def _stream(source: str) -> NoiseStream:
    return NoiseStream(SOURCES[source], 0, 1)


def _record_bytes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns what every later call of os.urandom gives."""
    given, urandom = [], os.urandom

    def recorded(size: int) -> bytes:
        given.append(urandom(size))
        return given[-1]

    monkeypatch.setattr(os, "urandom", recorded)
    return given


# ------------------------------------------------------------------ distribution


@every_source
@pytest.mark.parametrize("noise_std", [0.3, 2.14])  # 2.14 = 2 * 1 * 1.07, the paper's
def test_noise_has_the_asked_for_distribution(source, noise_std):
    draws = _stream(source).normal((NUM_DRAWS // 2, 2), noise_std)
    assert (draws.shape, draws.dtype) == ((NUM_DRAWS // 2, 2), np.float64)
    draws = draws.flatten()
    # Standard errors of n normal draws: s / sqrt(n) and s / sqrt(2 n).
    assert abs(draws.mean()) < SIX_SIGMA * noise_std / NUM_DRAWS**0.5
    error = abs(draws.std() - noise_std)
    assert error < SIX_SIGMA * noise_std / (2 * NUM_DRAWS) ** 0.5
    distance = stats.kstest(draws / noise_std, "norm").statistic
    assert distance < KS_BOUND / NUM_DRAWS**0.5
    # Of 200,000 draws 12.7 lie beyond 4 sigma and 540 beyond 3, +-6 sigma.
    beyond = [(np.abs(draws) > n * noise_std).sum() for n in (3, 4)]
    assert 401 <= beyond[0] <= 679
    assert 1 <= beyond[1] <= 34
    for lag in (1, 2, 3, 4, NUM_DRAWS // 2):
        for power in (1, 2):  # the squares share the radius in a careless Box-Muller
            first, second = draws[:-lag] ** power, draws[lag:] ** power
            bound = SIX_SIGMA / len(first) ** 0.5
            assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert not _stream(source).normal((10,), 0.0).any()


# ------------------------------------------------------------------ secure sampler


def test_secure_noise_is_the_documented_function_of_the_systems_bytes(monkeypatch):
    given = _record_bytes(monkeypatch)
    draws = NoiseStream(None, 0, 1).normal((5, 7), 3.0)
    uniforms = [
        [(int.from_bytes(word, "little") + 1) / 2**64 for word in _words(content)]
        for content in given
    ]
    assert [len(content) for content in given] == [8 * 35] * 8  # 64 bytes a coordinate
    for index, found in enumerate(draws.flatten().tolist()):
        total = 0.0
        for u, v in zip(uniforms[::2], uniforms[1::2], strict=True):
            radius = math.sqrt(-2 * math.log(u[index]))
            total += radius * math.cos(2 * math.pi * v[index])
        assert found == pytest.approx(3.0 * total / 2, rel=1e-12, abs=1e-14)


def _words(content: bytes) -> list[bytes]:
    return [content[start : start + 8] for start in range(0, len(content), 8)]


@pytest.mark.parametrize(
    ("byte", "expected"),
    # The smallest uniform, 2^-64: 4 / 2 * sqrt(128 ln 2). The largest, 1: ln 1 = 0.
    [(b"\x00", 2 * math.sqrt(128 * math.log(2))), (b"\xff", 0.0)],
)
def test_extreme_bytes_give_finite_noise(monkeypatch, byte, expected):
    monkeypatch.setattr(os, "urandom", lambda size: byte * size)
    draws = NoiseStream(None, 0, 1).normal((3,), 1.0)
    np.testing.assert_allclose(draws, expected, rtol=1e-12)


def test_too_few_bytes_of_the_system_make_no_noise(monkeypatch):
    urandom = os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: urandom(size - 1))
    with pytest.raises(RuntimeError, match=r"os.urandom gave \d+ of 24 bytes"):
        NoiseStream(None, 0, 1).normal((3,), 1.0)


@pytest.mark.parametrize("noise_seed", SOURCES.values())
def test_a_release_draws_from_the_source_of_its_run(monkeypatch, noise_seed):
    config = tiny_config(clients_per_round=1, noise_seed=noise_seed)
    request, _ = draw_fakes(config, new_state(config))
    hosted = [int(client) for client in request.participants]
    state = Discriminators(config, hosted)
    given = _record_bytes(monkeypatch)
    client_round(config, state, tiny_data(config), hosted, request, node_id=0)
    coordinates = math.prod(config.release_shape)
    expected = 64 * coordinates * (noise_seed is None)
    assert sum(len(content) for content in given) == expected


# ------------------------------------------------------------------ one use, one seed


@every_source
def test_a_noise_stream_is_used_once(source):
    noise = _stream(source)
    noise.normal((2,), 1.0)
    with pytest.raises(RuntimeError, match="already used"):
        noise.normal((2,), 1.0)


def test_seeded_noise_never_changes():
    # Of version 0.1; every seeded result rests on these bits.
    draws = NoiseStream(7, 3, 1).normal((4,), 2.0).tolist()
    assert draws[:2] == [-0.03122779804234611, -0.42442146604894043]
    assert draws[2:] == [0.7041831255866107, -3.1249873411383158]


def test_noise_differs_and_is_uncorrelated_between_nodes_rounds_seeds_and_draws():
    keys = [(7, 0, 1), (7, 1, 1), (7, 0, 2), (8, 0, 1)]
    draws = [_draw(*key) for key in keys]
    draws += [_stream("secure").normal((NUM_DRAWS,), 1.0) for _ in "ab"]
    for first, second in itertools.combinations(draws, 2):
        assert not np.isin(first[:1000], second).any()
        correlation = np.corrcoef(first, second)[0, 1]
        assert abs(correlation) < SIX_SIGMA / NUM_DRAWS**0.5


@every_source
def test_noise_neither_reads_nor_moves_the_global_random_state(source):
    def draw_after_seeding():  # numpy's global state is what is tested
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        seeded = global_state()
        draws = _stream(source).normal((100,), 1.0)
        assert global_state() == seeded
        return draws

    is_same = np.array_equal(draw_after_seeding(), draw_after_seeding())
    assert is_same == (source == "seeded")
