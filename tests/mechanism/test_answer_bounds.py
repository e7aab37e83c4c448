"""The norm check: honest answers pass at the stated rate, poison moves little."""

import math

import pytest
import torch
from scipy.stats import binom, chi2
from torch import Tensor

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.mechanism.answer_bounds import FALSE_REJECTIONS, check_norms, largest_norm
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.quantization import release_step
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, sanitize
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
    words = "1 of 4 gradients .* norm above"
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
