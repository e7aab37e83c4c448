"""WGAN-GP without privacy: the ceiling that private methods are measured against.

One discriminator sees all data. Networks are the project's (the paper's of GS-WGAN by
default), so that what differs from a private run is the privacy.

Differs from the reference: labels of the fakes are drawn uniformly, and a discriminator
sees fakes of the labels of its real batch, as clients do in GS-WGAN; WGAN-GP itself is
not conditional. The drift term is GS-WGAN's.

Source: Gulrajani et al., "Improved training of Wasserstein GANs", NeurIPS 2017,
Algorithm 1; Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, reference source/main.py.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fedgs.baselines.contract import SECRET, Event, Facts, Guarantee
from fedgs.config.fields import Scalar, entry, flag
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError
from fedgs.federation.checkpoint import load_tensors, tensors_of, under
from fedgs.gan.client_training import Draws, train_discriminators
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.models import (
    ADAM_BETAS,
    Generator,
    advance_in_place,
    build_generator,
    sample_labels,
    sample_latents,
    update_ema,
)
from fedgs.methods.gs_wgan import jacobian_step
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import Images, Labels, TensorDict

DISCRIMINATOR = f"{SECRET}discriminators."  # begins its names in a state: private
NOT_PRIVATE = "not-private"  # a step that read private images and added no noise


@dataclass(frozen=True)
class Settings:
    """What wgan-gp can be told; the rest are settings of `RunConfig`."""

    steps: int = flag(20_000, "Updates of the generator.", at_least=1)
    discriminator_steps: int = entry(5, at_least=1)  # n_dis
    batch_size: int = flag(
        50, "Real and fake images of a discriminator step, and of a query.", at_least=1
    )
    learning_rate: float = flag(1e-4, "Adam's step size of both networks.", above=0)
    ema_decay: float = flag(
        0.999, "Decay of the averaged generator.", at_least=0, below=1
    )


class Wgan:
    """A training under way; see `fedgs.baselines.contract.Trainer`.

    Privacy: nothing is sanitized: everything in here tells of private data.
    """

    def __init__(
        self, settings: Settings, config: ResolvedConfig, data: FederatedImages
    ) -> None:
        """Builds the networks."""
        self.settings, self.num_steps = settings, settings.steps
        self.data = pooled(data)
        self.config = config = dataclasses.replace(
            config,
            discriminator_steps=settings.discriminator_steps,
            discriminator_batch_size=settings.batch_size,
            generator_learning_rate=settings.learning_rate,
            discriminator_learning_rate=settings.learning_rate,
        )
        self.discriminator = Discriminators(config, range(1))
        seed = derived_seed(config.seed, "generator")
        self._generator = build_generator(config, seed).to(config.device)
        self.average = copy.deepcopy(self._generator).eval().requires_grad_(False)
        weights, rate = self._generator.parameters(), config.generator_learning_rate
        self.optimizer = torch.optim.Adam(weights, rate, ADAM_BETAS)
        networks = {"generator": self._generator, "average": self.average}
        self.parts = {**networks, "adam": self.optimizer}

    @property
    def generator(self) -> Generator:
        """The averaged generator."""
        return self.average

    def step(self, index: int) -> dict[str, Any]:
        """Trains the discriminator n_dis steps, then the generator one."""
        advance_in_place(self._generator)
        rng = stream(self.config.seed, "latent", index)
        with torch.no_grad():
            fakes, labels = self._draw(rng, self.config.discriminator_steps)
        images, asked = self._draw(rng, 1)
        drawn = (self.data, (0,), "wgan-gp", index, labels.cpu().numpy())
        draws, stack = Draws(self.config, *drawn), self.discriminator
        only = torch.zeros(1, dtype=torch.int64, device=self.config.device)
        train_discriminators(self.config, stack, only, draws, fakes, labels)
        grads = stack.query(only, images.detach(), asked)[0]
        jacobian_step(self.optimizer, images, grads / len(images))
        update_ema(self.average, self._generator, index, self.settings.ema_decay)
        return {"kind": NOT_PRIVATE}

    def _draw(self, rng: np.random.Generator, batches: int) -> tuple[Images, Labels]:
        count = batches * self.settings.batch_size
        z = sample_latents(self.config, rng, count).to(self.config.device)
        labels = sample_labels(self.config, rng, count).to(self.config.device)
        return self._generator(z, labels), labels

    def state(self) -> TensorDict:
        """Returns the networks with their Adam moments."""
        flat = self.discriminator.state()
        flat = {f"{DISCRIMINATOR}{name}": value for name, value in flat.items()}
        return flat | tensors_of(self.parts)

    def load(self, state: TensorDict) -> None:
        """Goes on from what `state` returned."""
        self.discriminator.load_state(under(DISCRIMINATOR, state))
        load_tensors(self.parts, state)


def pooled(data: FederatedImages) -> FederatedImages:
    """Returns the data as that of one client, who owns all records.

    Privacy: reads private data; output private.
    """
    everything = (np.concatenate(data.client_records),)
    return dataclasses.replace(
        data, client_records=everything, client_names=("all",), client_test_records=()
    )


class WganGp:
    """The method; see `fedgs.baselines.contract.Baseline`."""

    name = "wgan-gp"
    title = "WGAN-GP, not private: the ceiling"
    unit = "none"
    Settings = Settings
    recipe: Mapping[str, Scalar] = MappingProxyType(
        {"generator": "resnet", "generator_dim": 64, "discriminator_dim": 64}
    )

    def calibrated(
        self, settings: Settings, facts: Facts, target_epsilon: float, delta: float
    ) -> Settings:
        """Refuses: there is no noise to calibrate."""
        raise UserError(
            f"target_epsilon = {target_epsilon:g}: wgan-gp adds no noise and "
            "guarantees nothing; leave out --target-epsilon, or use a private method "
            "(`fedgs baseline --list`) or `fedgs train`"
        )

    def guarantees(
        self, settings: Settings, facts: Facts, events: Sequence[Event], delta: float
    ) -> list[Guarantee]:
        """Returns nothing: every image of every client shaped the generator."""
        return []

    def trainer(
        self, settings: Any, config: ResolvedConfig, data: FederatedImages, seed: int
    ) -> Wgan:
        """Starts a training."""
        return Wgan(settings, dataclasses.replace(config, seed=seed), data)


METHOD = WganGp()
