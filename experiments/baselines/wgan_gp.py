"""WGAN-GP without privacy: the ceiling that private methods are measured against.

One discriminator sees all data. Networks are the project's (the paper's of GS-WGAN by
default), so that what differs from a private run is the privacy.

Differs from the reference: labels of the fakes are drawn uniformly, and a discriminator
sees fakes of the labels of its real batch, as clients do in GS-WGAN; WGAN-GP itself is
not conditional. The drift term is GS-WGAN's.

Source: Gulrajani et al., "Improved training of Wasserstein GANs", NeurIPS 2017,
Algorithm 1; Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, reference source/main.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from experiments.baselines.baseline import SECRET, Baseline, Facts, StepEvent
from fedgs.config.fields import Scalar, entry, flag
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError
from fedgs.gan.client_training import Draws, train_discriminators
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.models import ADAM_BETAS, advance_in_place, update_ema
from fedgs.methods.gs_wgan import jacobian_step
from fedgs.privacy.accountant import Statement
from fedgs.randomness import stream

_NOT_PRIVATE_STEP = "not-private"  # a step that read private images and added no noise


@dataclass(frozen=True)
class WganGpSettings:
    """What wgan-gp can be told; the rest are settings of `RunConfig`."""

    steps: int = flag(20_000, "Number of updates of the generator.", at_least=1)
    discriminator_steps: int = entry(5, at_least=1)  # n_dis
    batch_size: int = flag(
        50,
        "Number of real and of fake images in a discriminator step, and in a query.",
        at_least=1,
    )
    learning_rate: float = flag(
        1e-4,
        "Step size of the optimizer of both networks.",
        above=0,
    )
    ema_decay: float = flag(
        0.999,
        "Decay of the generator's moving average.",
        at_least=0,
        below=1,
    )


class WganGp(Baseline[WganGpSettings]):
    """The baseline `wgan-gp`.

    Privacy: nothing is sanitized: everything in here tells of private data.
    """

    name = "wgan-gp"
    title = "WGAN-GP, not private: the ceiling"
    unit = "none"
    Settings = WganGpSettings
    recipe: ClassVar[Mapping[str, Scalar]] = MappingProxyType(
        {"generator": "resnet", "generator_dim": 64, "discriminator_dim": 64}
    )

    def build(self) -> None:
        """Builds the networks."""
        settings = self.settings
        self.num_steps = settings.steps
        self.data = pooled(self.data)
        self.everything = [self.data.of(0)]
        # Its own settings by the names that the clients' training knows them by.
        self.config = dataclasses.replace(
            self.config,
            discriminator_steps=settings.discriminator_steps,
            discriminator_batch_size=settings.batch_size,
            generator_learning_rate=settings.learning_rate,
            discriminator_learning_rate=settings.learning_rate,
        )
        self.discriminator = Discriminators(self.config, range(1))
        self.average = self.new_generator().eval().requires_grad_(False)
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), settings.learning_rate, ADAM_BETAS
        )
        self.parts |= {"average": self.average, "adam": self.optimizer}
        self.parts[f"{SECRET}discriminators"] = self.discriminator

    def step(self, index: int) -> dict[str, Any]:
        """Trains the discriminator n_dis steps, then the generator one."""
        # Spectral norms follow the weights once a step, before anything is drawn.
        advance_in_place(self.net)
        config = self.config
        size = self.settings.batch_size
        rng = stream(self.seed, "latent", index)
        num_fakes = config.discriminator_steps * size
        fakes, labels = self.fakes(rng, num_fakes)
        z, asked = self.latents(rng, size)
        images = self.net(z, asked)
        # The discriminator sees real images of the fakes' labels, as clients do.
        labels_drawn = labels.cpu().numpy()
        draws = Draws(config, self.everything, "wgan-gp", index, labels_drawn)
        stack = self.discriminator
        only = torch.zeros(1, dtype=torch.int64, device=config.device)
        train_discriminators(config, stack, only, draws, fakes, labels)
        # As in GS-WGAN the generator gets gradients of its images, here without noise.
        grads = stack.query(only, images.detach(), asked)[0]
        jacobian_step(self.optimizer, images, grads / len(images))
        update_ema(self.average, self.net, index, self.settings.ema_decay)
        return {"kind": _NOT_PRIVATE_STEP}

    @classmethod
    def calibrated(
        cls,
        settings: WganGpSettings,
        facts: Facts,
        target_epsilon: float,
        delta: float,
    ) -> WganGpSettings:
        """Refuses: there is no noise to calibrate."""
        raise UserError(
            f"target_epsilon = {target_epsilon:g}: wgan-gp adds no noise and "
            "guarantees nothing; leave out --target-epsilon, or use a private method "
            "(`fedgs baseline --list`) or `fedgs train`"
        )

    @classmethod
    def guarantees(
        cls,
        settings: WganGpSettings,
        facts: Facts,
        events: Sequence[StepEvent],
        delta: float,
    ) -> list[Statement]:
        """Returns nothing: every image of every client shaped the generator."""
        return []


def pooled(data: FederatedImages) -> FederatedImages:
    """Returns the data as that of one client, who owns all records.

    Privacy: reads private data; output private.
    """
    everything = np.concatenate(data.client_records)
    return dataclasses.replace(
        data,
        client_records=(everything,),
        client_names=("all",),
        client_test_records=(),  # of clients that are none any more
    )
