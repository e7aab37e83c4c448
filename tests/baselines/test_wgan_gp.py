"""WGAN-GP: whose images a discriminator sees, and what the generator's step is."""

import dataclasses

import numpy as np
import pytest
import torch

from baselines import small_run
from fedgs.baselines import wgan_gp
from fedgs.baselines.wgan_gp import Wgan, pooled
from fedgs.errors import UserError
from fedgs.gan.client_training import Draws
from fedgs.randomness import stream


def training(tmp_path, name="wgan-gp", own=None, **settings) -> Wgan:
    run, data = small_run(name, tmp_path / "run", **settings)
    own = dataclasses.replace(run.settings, **own or {})
    return run.method.trainer(own, run.config, data, 3)


def test_central_is_one_discriminator_of_everybodys_images(tmp_path):
    run, data = small_run("wgan-gp", tmp_path / "run")
    whole = pooled(data)
    assert (whole.num_clients, whole.sizes.sum()) == (1, data.sizes.sum())
    wgan = run.method.trainer(run.settings, run.config, data, 3)
    assert len(wgan.discriminators) == 1


def test_per_client_gives_each_client_its_own(tmp_path):
    wgan = training(tmp_path, "wgan-gp per client")
    assert len(wgan.discriminators) == 12
    draws = Draws(wgan.config, wgan.data, range(12), "wgan-gp", 0, np.arange(20) % 10)
    for client, records in enumerate(draws.records):
        assert set(records.ravel()) <= set(wgan.data.client_records[client])


def test_the_generator_follows_the_mean_of_all_discriminators(tmp_path):
    """Its step is that of the loss -mean D_k(G(z)), differentiated in one piece."""
    wgan = training(tmp_path, "wgan-gp per client", {"discriminator_steps": 1})
    before = [p.detach().clone() for p in wgan._generator.parameters()]
    rng = stream(wgan.config.seed, "latent", 0)
    wgan.step(0)
    moved = [
        (p.detach() - b).sign()
        for p, b in zip(wgan._generator.parameters(), before, strict=True)
    ]
    # The first step of Adam is the sign of the gradient; now the same, by one loss.
    with torch.no_grad():
        for param, value in zip(wgan._generator.parameters(), before, strict=True):
            param.copy_(value)
    wgan._draw(rng, 1)
    images, labels = wgan._draw(rng, 1)
    loss = torch.zeros(())
    for client in range(12):
        tensors = wgan.discriminators.tensors(torch.tensor([client]))
        params, buffers = ({n: v[0] for n, v in part.items()} for part in tensors)
        loss = loss - wgan.discriminators.score(params, buffers)(images, labels).mean()
    grads = torch.autograd.grad(loss / 12, list(wgan._generator.parameters()))
    for sign, grad in zip(moved, grads, strict=True):
        is_clear = grad.abs() > 1e-5
        assert (sign[is_clear] == -grad.sign()[is_clear]).all()
    assert any((grad.abs() > 1e-5).any() for grad in grads)


def test_discriminators_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(wgan_gp, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match="discriminator_dim = 4: the discriminators of"):
        small_run("wgan-gp per client", tmp_path / "run")
    assert not (tmp_path / "run").exists()
