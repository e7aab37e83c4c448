"""The norm check: honest answers pass at the stated rate, poison moves little."""

import dataclasses
import math
from contextlib import nullcontext
from functools import lru_cache

import pytest
import torch
from scipy.stats import binom, chi2
from torch import Tensor

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.federation.round import draw_fakes, new_server, server_round
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.norm_check import FALSE_REJECTIONS, check_norms, largest_norm
from fedgs.mechanism.quantization import release_step
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, received, sanitize
from tiny import tiny_config

CONFIG = tiny_config()  # B = 4, d = 256, C = 1, noise_std = 1
SETTINGS = {
    "one client": {},
    "no noise": {"noise_multiplier": 0.0},
    "little noise": {"noise_multiplier": 1e-3},
    "three clients": {"clients_per_node": 3},
    "dct": {"dct_size": 5},
    "compact": {"transport": "compact"},
    "compact, no noise": {"transport": "compact", "noise_multiplier": 0.0},
    "compact, three clients": {"transport": "compact", "clients_per_node": 3},
    "large C": {"clip_bound": 50.0},
}


def _honest(config: RunConfig, seed: int, is_aligned: bool = True) -> Tensor:
    """The worst honest answer: every client's gradient has norm C, all in one line."""
    clients = config.clients_per_node
    raw = torch.zeros(clients, *config.release_shape)
    raw[..., 0, 0] = 1e6
    if not is_aligned:
        raw = torch.randn(raw.shape, generator=torch.Generator().manual_seed(seed))
    noise, step = NoiseStream(seed, 0, 1), release_step(config)
    parts = [clip(PerSampleGradients(raw), config.clip_bound)]
    return sanitize(parts, config.noise_std, noise, 1, 0, step).values


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_honest_answers_pass(settings):
    config = tiny_config(**settings)
    for seed in range(50):
        for is_aligned in (True, False):
            values = _honest(config, seed, is_aligned)
            check_norms(values, config, config.clients_per_node)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_answer_above_the_bound_is_refused(settings):
    config = tiny_config(**settings)
    bound = largest_norm(config, config.clients_per_node)
    for factor, refused in ((1.001, True), (0.999, False)):
        values = torch.zeros(config.release_shape)
        values[2, 0, 1, 1] = factor * bound
        words = "1 of 4 gradients with a norm above"
        expected = pytest.raises(UserError, match=words) if refused else nullcontext()
        with expected:
            check_norms(values, config, config.clients_per_node)


def test_the_bound_is_the_chi_quantile_and_the_clip_bound():
    quantile = math.sqrt(chi2.isf(1e-12 / 4, 256))
    assert largest_norm(CONFIG, 1) == pytest.approx(1 + quantile, rel=1e-5)
    assert largest_norm(CONFIG, 3) == pytest.approx(3 + quantile, rel=1e-5)
    quiet = tiny_config(noise_multiplier=0.0)
    assert largest_norm(quiet, 2) == pytest.approx(2, rel=1e-5)
    assert FALSE_REJECTIONS == 1e-12


def test_the_quantile_is_right_where_no_simulation_reaches():
    mpmath = pytest.importorskip("mpmath")  # comes with torch
    squared = (largest_norm(CONFIG, 0) / (1 + 1e-6)) ** 2  # n = 0: the noise alone
    with mpmath.workdps(40):
        tail = mpmath.gammainc(128, squared / 2, regularized=True)
    assert float(tail) == pytest.approx(1e-12 / 4, rel=1e-6)


@pytest.mark.parametrize("rate", [0.2, 0.02])
def test_honest_noise_is_refused_as_often_as_stated(rate):
    """Without a gradient the bound is tight: only the union over B rows is left."""
    trials = 4000
    noise = NoiseStream(3, 0, 1).normal((trials, *CONFIG.release_shape), 1.0)
    norms = torch.from_numpy(noise).flatten(2).norm(dim=2)  # (trials, B)
    bound = largest_norm(CONFIG, 0, rate)
    refused = int((norms > bound).any(dim=1).sum())
    exact = 1 - (1 - rate / 4) ** 4
    low, high = binom.interval(1 - 1e-6, trials, exact)
    assert low <= refused <= high
    assert exact <= rate


@pytest.mark.parametrize("rate", [0.2, 0.02])
def test_honest_answers_are_refused_no_more_often_than_stated(rate):
    trials = 2000
    values = torch.stack([_honest(CONFIG, seed) for seed in range(trials)])
    norms = values.double().flatten(2).norm(dim=2)
    refused = int((norms > largest_norm(CONFIG, 1, rate)).any(dim=1).sum())
    assert refused <= binom.isf(1e-6, trials, rate)


def test_the_text_quotes_no_value():
    values = torch.full(CONFIG.release_shape, 4711.0)
    with pytest.raises(UserError) as caught:
        check_norms(values, CONFIG, 1)
    assert "4711" not in str(caught.value)
    assert "75376" not in str(caught.value)  # the norm


# ------------------------------------------------------------------ what poison can do


def _generator_grads(config: RunConfig, releases: list[Tensor]) -> Tensor:
    """The generator's gradient after a round with these releases, flat."""
    server = new_server(config)
    asked = draw_fakes(config, server)
    noise = config.noise_std, config.clip_bound
    answers = [received(v, 1, node, *noise) for node, v in enumerate(releases)]
    server_round(config, server, asked[1], answers)
    grads = [p.grad for p in server.generator.parameters() if p.grad is not None]
    return torch.cat([grad.flatten() for grad in grads]).double()


@lru_cache
def _jacobian_norm(batch_size: int) -> float:
    """The largest singular value of d images / d parameters, for the B images."""
    config = tiny_config(batch_size=batch_size)
    server = new_server(config)
    _, answered = draw_fakes(config, server)
    pixels = answered.flatten()
    rows = torch.autograd.grad(
        pixels,
        [p for p in server.generator.parameters() if p.requires_grad],
        torch.eye(len(pixels)),
        is_grads_batched=True,
        materialize_grads=True,
    )
    jacobian = torch.cat([grads.flatten(1) for grads in rows], dim=1)
    return float(torch.linalg.matrix_norm(jacobian.double(), 2))


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.5])
def test_a_poisoned_answer_moves_the_generator_within_the_bound(
    noise_multiplier,
):
    config = tiny_config(noise_multiplier=noise_multiplier, batch_size=2)
    honest = [_honest(config, seed, is_aligned=False) for seed in (1, 2)]
    before = _generator_grads(config, honest)
    bound, count = largest_norm(config, 1), config.batch_size
    most = 2 * bound * math.sqrt(count) / (2 * count) * _jacobian_norm(count)
    for direction in (torch.ones_like(honest[0]), -honest[0]):
        rows = direction.flatten(1)
        poison = (rows / rows.norm(dim=1, keepdim=True)).view_as(direction)
        check_norms(0.999 * bound * poison, config, 1)
        moved = _generator_grads(config, [0.999 * bound * poison, honest[1]]) - before
        assert 0 < moved.norm() <= most
        # What the check refuses would have moved it by more than that.
        with pytest.raises(UserError):
            check_norms(1e4 * bound * poison, config, 1)
        far = _generator_grads(config, [1e4 * bound * poison, honest[1]]) - before
        assert far.norm() > most


def test_an_undisturbed_bound_holds_for_every_recipe():
    """The quantile is finite and the bound sensible at the sizes that are used."""
    for clients, size, batch in ((1, 28, 32), (539, 28, 32), (1, 64, 256)):
        sizes = {"num_clients": max(clients, 6), "clients_per_node": clients}
        sizes |= {"image_size": size, "batch_size": batch}
        config = dataclasses.replace(CONFIG, **sizes, noise_multiplier=1.07)
        noise = 2.14 * size
        bound = largest_norm(config, clients)
        assert clients + noise < bound < clients + 1.6 * noise
