"""The norm check: honest answers pass at the stated rate, poison moves little."""

import math
from functools import lru_cache

import pytest
import torch
from scipy.stats import binom, chi2
from torch import Tensor

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.federation.round import draw_fakes, new_server, server_round
from fedgs.mechanism.answer_bounds import FALSE_REJECTIONS, check_norms, largest_norm
from fedgs.mechanism.noise import NoiseStream
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
    "compact": {"message_precision": "compact"},
    "compact, no noise": {"message_precision": "compact", "noise_multiplier": 0.0},
    "compact, three clients": {"message_precision": "compact", "clients_per_node": 3},
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
def test_honest_answers_pass_and_one_above_the_bound_is_refused(settings):
    config = tiny_config(**settings)
    clients = config.clients_per_node
    for seed in range(12):
        for is_aligned in (True, False):
            check_norms(_honest(config, seed, is_aligned), config, clients)
    values = torch.zeros(config.release_shape)
    values[2, 0, 1, 1] = 0.999 * largest_norm(config, clients)
    check_norms(values, config, clients)
    values[2, 0, 1, 1] *= 1.002
    words = "1 of 4 gradients with a norm above"
    with pytest.raises(UserError, match=words) as refused:
        check_norms(values, config, clients)
    assert f"{float(values.max()):.4g}" not in str(refused.value)  # quotes no value


def test_the_bound_is_the_chi_quantile_and_the_clip_bound():
    quantile = math.sqrt(chi2.isf(1e-12 / 4, 256))
    assert largest_norm(CONFIG, 1) == pytest.approx(1 + quantile, rel=1e-5)
    assert largest_norm(CONFIG, 3) == pytest.approx(3 + quantile, rel=1e-5)
    quiet = tiny_config(noise_multiplier=0.0)
    assert largest_norm(quiet, 2) == pytest.approx(2, rel=1e-5)
    assert FALSE_REJECTIONS == 1e-12


@pytest.mark.parametrize("rate", [0.2, 0.02])
def test_honest_noise_is_refused_as_often_as_stated(rate):
    """Without a gradient the bound is tight: only the union over B rows is left."""
    trials = 2000
    noise = NoiseStream(3, 0, 1).normal((trials, *CONFIG.release_shape), 1.0)
    norms = torch.from_numpy(noise).flatten(2).norm(dim=2)  # (trials, B)
    bound = largest_norm(CONFIG, 0, rate)
    refused = int((norms > bound).any(dim=1).sum())
    exact = 1 - (1 - rate / 4) ** 4
    low, high = binom.interval(1 - 1e-6, trials, exact)
    assert low <= refused <= high
    assert exact <= rate


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
