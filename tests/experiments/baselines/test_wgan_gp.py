"""WGAN-GP: whose images its discriminator sees, and what the generator's step is."""

import torch

from baselines import small_run
from fedgs.gan.client_training import Draws
from fedgs.randomness import stream


def test_the_generator_follows_a_discriminator_of_everybodys_images(tmp_path):
    """Its step is that of the loss -mean D(G(z)), differentiated in one piece."""
    run, data = small_run("wgan-gp", tmp_path / "run")
    wgan = run.training(data)
    assert (wgan.data.num_clients, wgan.data.sizes.sum()) == (1, data.sizes.sum())
    assert len(wgan.discriminator) == 1
    draws = Draws(wgan.config, wgan.everything, "wgan-gp", 0, None)
    drawn = {*wgan.data.client_records[0][draws.records.ravel()]}
    owners = [{*records} & drawn for records in data.client_records]
    assert sum(map(bool, owners)) > 1
    generator = wgan.net
    before = [p.detach().clone() for p in generator.parameters()]
    rng = stream(wgan.config.seed, "latent", 0)
    wgan.step(0)
    moved = [
        (p.detach() - b).sign()
        for p, b in zip(generator.parameters(), before, strict=True)
    ]
    # The first step of Adam is the sign of the gradient; now the same, by one loss.
    with torch.no_grad():
        for param, value in zip(generator.parameters(), before, strict=True):
            param.copy_(value)
    size = wgan.settings.batch_size
    wgan.latents(rng, wgan.settings.discriminator_steps * size)
    z, labels = wgan.latents(rng, size)
    images = wgan.net(z, labels)
    tensors = wgan.discriminator.tensors(torch.tensor([0]))
    params, buffers = ({n: v[0] for n, v in part.items()} for part in tensors)
    loss = -wgan.discriminator.network(params, buffers)(images, labels).mean()
    grads = torch.autograd.grad(loss, list(generator.parameters()))
    for sign, grad in zip(moved, grads, strict=True):
        is_clear = grad.abs() > 1e-5
        assert (sign[is_clear] == -grad.sign()[is_clear]).all()
    assert any((grad.abs() > 1e-5).any() for grad in grads)
