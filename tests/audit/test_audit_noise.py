"""Tests of the noise: faults of every kind are seen, honest noise is not refuted."""

import itertools

import numpy as np
import pytest
from scipy.stats import binom

from fedgs.audit import noise_check as module
from fedgs.audit.crafted_releases import audited
from fedgs.audit.finding import HOLDS, OF_NOISE, REFUTED, Check
from fedgs.audit.noise_check import check_noise, p_values
from fedgs.mechanism.noise import NoiseStream
from fedgs.round import answer as rounds
from fedgs.round.run import new_event
from tiny import FULL_PARTICIPATION, MOMENTS, tiny_config

ALPHA = OF_NOISE
SHAPE = (60, 3, 4, 1, 8, 8)
INTEGERS = {"secure_aggregation": True}


@pytest.fixture(autouse=True)
def _same_noise_every_time(monkeypatch):
    """Noise of the operating system becomes reproducible, and there is little of it."""
    seeds = itertools.count()

    def make(noise_seed, *rest):
        seed = next(seeds) if noise_seed is None else noise_seed
        return NoiseStream(seed, *rest)

    monkeypatch.setattr(rounds, "NoiseStream", make)
    monkeypatch.setattr(module, "NUM_DRAWS", 60_000)


def checked(**settings) -> Check:
    """The check of the first round of three nodes, whose noise is not seeded."""
    config = tiny_config(defaults=FULL_PARTICIPATION, **{"noise_seed": None} | settings)
    event = new_event(config, 1, "all", 1)
    return check_noise(audited(config), event, ALPHA)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        INTEGERS,
        {"noise_seed": 7},
        {"noise_seed": 7} | INTEGERS,
        {"message_precision": "compact"},
        {"noise_multiplier": 300.0, "clip_bound": 0.01},
        {"num_workers": 2, "clients_per_node": 1},
        {"clients_per_node": 6},
        MOMENTS,
    ],
    ids=str,
)
def test_honest_noise_holds_and_the_row_says_what_was_tested(settings):
    check = checked(**settings)
    assert check.verdict == HOLDS, check
    assert 0 < check.found < check.allowed < 6
    assert "in standard errors" in check.tested
    nodes = 1 if settings.get("clients_per_node") == 6 else 2
    shape = "1 x 1 x 3 x 17" if "phases" in settings else "4 x 1 x 8 x 8"
    assert f"rounds of {nodes} nodes, each {shape}: " in check.tested


def test_honest_noise_is_refuted_no_more_often_than_stated():
    least = []
    for seed in range(300):
        noise = np.random.default_rng(seed).standard_normal((9, 2, 2, 1, 5, 6))
        found = p_values(noise)
        least.append(len(found) * min(found.values()))
    for alpha in (0.1, 0.01):
        refuted = sum(value < alpha for value in least)
        assert binom.sf(refuted - 1, 300, alpha) > 1e-3
        assert binom.cdf(refuted, 300, alpha) > 1e-4  # and it is not blind


def test_honest_releases_of_many_seeds_hold():
    found = [checked(noise_seed=seed) for seed in range(25)]
    assert {check.verdict for check in found} == {HOLDS}
    assert len({check.found for check in found}) == 25


# ------------------------------------------------------------------ planted faults


def one_value(draw, shape):
    return np.broadcast_to(draw((1, 1, 1, 1)), shape)


def one_value_by_row(draw, shape):
    return np.broadcast_to(draw((*shape[:-1], 1)), shape)


def one_value_by_sample(draw, shape):
    return np.broadcast_to(draw((shape[0], 1, 1, 1)), shape)


def same_for_all_samples(draw, shape):
    return np.broadcast_to(draw((1, *shape[1:])), shape)


def none_in_a_coordinate(draw, shape):
    noise = draw(shape)
    noise[..., 3, 5] = 0
    return noise


def none_in_a_sample(draw, shape):
    noise = draw(shape)
    noise[-1] = 0
    return noise


def less_in_a_row(draw, shape):
    noise = draw(shape)
    noise[..., 2, :] = noise[..., 2, :] * 0.8
    return noise


def more_here_and_less_there(draw, shape):
    noise = draw(shape)
    noise[..., ::2] = noise[..., ::2] * 1.1
    noise[..., 1::2] = noise[..., 1::2] * (2 - 1.1**2) ** 0.5
    return noise


def less_everywhere(draw, shape):
    return draw(shape) * 0.96


def twice_as_much(draw, shape):
    return draw(shape) * 2


def none_at_all(draw, shape):
    return draw(shape) * 0


def next_to_each_other_alike(draw, shape):
    noise = draw(shape)
    noise[..., 1::2] = noise[..., ::2]
    return noise


def antithetic(draw, shape):
    noise = draw(shape)
    noise[..., 1::2] = -noise[..., ::2]
    return noise


def shuffled_between_samples(draw, shape):
    noise = draw(shape)
    order = np.random.default_rng(3).permutation(noise[0].size)
    noise[1] = noise[0].ravel()[order].reshape(noise[0].shape)
    return noise


def in_some_directions_only(draw, shape):
    """Of half as many directions as coordinates, with the right variance in each."""
    size = int(np.prod(shape))
    mixing = np.random.default_rng(3).standard_normal((size, size // 2))
    mixing /= np.linalg.norm(mixing, axis=1, keepdims=True)
    return (mixing @ draw((size // 2,))).reshape(shape)


def with_a_mean(draw, shape):
    noise = draw(shape)
    return noise + 0.05 * np.abs(noise).mean()


FAULTS = [
    *[one_value, one_value_by_row, one_value_by_sample, same_for_all_samples],
    *[none_in_a_coordinate, none_in_a_sample, none_at_all, less_in_a_row],
    *[more_here_and_less_there, less_everywhere, twice_as_much, with_a_mean],
    *[next_to_each_other_alike, antithetic, shuffled_between_samples],
    *[in_some_directions_only],
]


def plant(monkeypatch, fault, name: str = "normal") -> None:
    original = getattr(NoiseStream, name)
    dtype = {"normal": np.float64, "discrete": np.int64}[name]

    def faulty(self, shape, std):
        def draw(part):
            # A stream draws once, and some faults are made of several draws.
            return original(NoiseStream(None, 0, 1), part, std)

        return np.array(fault(draw, shape), dtype)

    monkeypatch.setattr(NoiseStream, name, faulty)


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_noise_is_refuted(fault, monkeypatch):
    plant(monkeypatch, fault)
    check = checked()
    assert check.verdict == REFUTED
    assert check.check == "noise, gradient"


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_integer_noise_is_refuted(fault, monkeypatch):
    plant(monkeypatch, fault, "discrete")
    assert checked(**INTEGERS).verdict == REFUTED


def uniform(rng, shape):
    return rng.uniform(-(3**0.5), 3**0.5, shape)


def laplace(rng, shape):
    return rng.laplace(0, 0.5**0.5, shape)


def signs(rng, shape):
    return rng.choice([-1.0, 1.0], shape)


def cut_off(rng, shape):
    return np.clip(rng.standard_normal(shape), -3, 3)


@pytest.mark.parametrize("law", [uniform, laplace, signs, cut_off])
def test_another_law_of_the_same_variance_is_refuted(law, monkeypatch):
    rng = np.random.default_rng(0)
    plant(monkeypatch, lambda draw, shape: law(rng, shape))
    assert checked(noise_multiplier=0.5, clip_bound=1.0).verdict == REFUTED


@pytest.mark.parametrize("forgotten", ["node", "round", "both"])
@pytest.mark.parametrize("settings", [{}, INTEGERS], ids=["real", "integers"])
def test_a_seeded_run_that_reuses_noise_is_refuted(forgotten, settings, monkeypatch):
    def make(noise_seed, node_id, round):
        node = 0 if forgotten in ("node", "both") else node_id
        return NoiseStream(noise_seed, node, 0 if forgotten != "node" else round)

    monkeypatch.setattr(rounds, "NoiseStream", make)
    assert checked(noise_seed=7, **settings).verdict == REFUTED


def test_a_node_that_draws_its_noise_once_is_refuted(monkeypatch):
    """From the operating system, but the same for all of its rounds."""
    kept = {}

    def make(noise_seed, node_id, round):
        return NoiseStream(kept.setdefault(node_id, node_id), 0, 0)

    monkeypatch.setattr(rounds, "NoiseStream", make)
    assert checked().verdict == REFUTED


def test_less_noise_than_the_ledger_records_is_refuted():
    config = tiny_config(**FULL_PARTICIPATION, noise_seed=None)
    event = new_event(config, 1, "all", 1)
    less = tiny_config(**FULL_PARTICIPATION, noise_seed=None, noise_multiplier=0.45)
    assert check_noise(audited(less), event, ALPHA).verdict == REFUTED


def test_what_is_no_number_is_refuted(monkeypatch):
    plant(monkeypatch, lambda draw, shape: draw(shape) * np.nan)
    assert checked().verdict == REFUTED
