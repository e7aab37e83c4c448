"""Independent implementations that tests compare with."""

import numpy as np
import torch
from torch import Tensor, nn

from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.models import (
    ADAM_BETAS,
    build_discriminator,
    sample_labels,
    sample_latents,
)
from fedgs.randomness import derived_seed, stream

PLAIN = {
    "spectral_norm": False,
    "generator_learning_rate": 1e-3,
    "discriminator_learning_rate": 1e-3,
}
# Rounding of a gradient near zero moves a weight by a share of Adam's step of 1e-3; a
# step of another algorithm moves most weights by about one.
PLAIN_TOLERANCE = {"rtol": 0.0, "atol": 3e-5}


def latents(
    config: RunConfig, count: int, purpose: str, *indices: int
) -> tuple[Tensor, Tensor]:
    """Returns the latents and labels that the run draws for this purpose."""
    rng = stream(config.seed, purpose, *indices)
    return sample_latents(config, rng, count), sample_labels(config, rng, count)


def adam(
    module: nn.Module, rate: float, betas: tuple[float, float]
) -> torch.optim.Adam:
    """Returns PyTorch's own Adam."""
    return torch.optim.Adam(module.parameters(), lr=rate, betas=betas)


class PlainGan:
    """A WGAN-GP of one client as one writes it, with the draws of the run."""

    def __init__(self, config: RunConfig, data: FederatedImages, client: int) -> None:
        self.config, self.client = config, client
        images, self.labels = (torch.from_numpy(x) for x in data.client(client))
        self.images = images
        seed = derived_seed(config.seed, "discriminator", client)
        self.discriminator = build_discriminator(config, seed)
        self.adam = adam(
            self.discriminator,
            config.discriminator_learning_rate,
            ADAM_BETAS,
        )

    def discriminator_steps(
        self, purpose: str, round: int, fakes: Tensor, labels: Tensor
    ) -> None:
        """Takes n_dis steps of Gulrajani's loss with drift, fresh fakes each."""
        config, discriminator = self.config, self.discriminator
        steps, size = config.discriminator_steps, config.discriminator_batch_size
        rng = stream(config.seed, purpose, self.client, round)
        records = rng.integers(len(self.images), size=(steps, size))
        mix_weights = rng.random((steps, size), dtype=np.float32)
        for step in range(steps):
            real, real_labels = self.images[records[step]], self.labels[records[step]]
            fake = fakes[step * size : (step + 1) * size]
            fake_labels = labels[step * size : (step + 1) * size]
            weight = torch.from_numpy(mix_weights[step]).view(-1, 1, 1, 1)
            mix = (weight * real + (1 - weight) * fake).requires_grad_()
            score = discriminator(mix, real_labels).sum()
            grads = torch.autograd.grad(score, mix, create_graph=True)[0]
            penalty = ((grads.flatten(1).norm(dim=1) - 1) ** 2).mean()
            real_scores = discriminator(real, real_labels)
            loss = discriminator(fake, fake_labels).mean() - real_scores.mean()
            loss = loss + 10 * penalty + 1e-3 * (real_scores**2).mean()
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()

    def generator_step(
        self,
        generator: nn.Module,
        adam: torch.optim.Adam,
        latents: tuple[Tensor, Tensor],
    ) -> None:
        """Takes one step of -mean D(G(z)) by ordinary back-propagation."""
        loss = -self.discriminator(generator(*latents), latents[1]).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
