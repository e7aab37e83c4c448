"""Federated DP-MERF: one release of clients' mean random Fourier features.

    phi(x) = [cos(W x), sin(W x)] / sqrt(D / 2),  W ~ N(0, 1 / s),  norm 1
    client: (1/n) sum_i onehot(y_i) phi(x_i)^T,   norm at most 1: clipping changes none
    server: fits G, so that the fakes have the noisy mean of all clients

The frequencies W come of the run's seed, so a request says nothing. The embedding is
also that of the central method that others published, whose unit is a record.

Source: Harder, Adamczewski, Park, "DP-MERF: differentially private mean embeddings with
random features for practical privacy-preserving data generation", AISTATS 2021;
https://github.com/frhrdr/dp-merf.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

from fedgs.config.method_settings import NetworkSettings
from fedgs.config.run_config import NetworkConfig
from fedgs.config.terms import Terms
from fedgs.gan.fit import Fit
from fedgs.gan.models import build_generator, sample_latents
from fedgs.methods.base import (
    Declared,
    Method,
    OneClient,
    Released,
    Request,
    State,
    asked,
)
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import Images, Labels

NUM_FEATURES = 10_000  # D, and s of the features' kernel: those of the published code
KERNEL_VARIANCE = 105.0
STEPS = 3000  # of the generator's fit
FAKES = 100  # in each of them
_DECAY = 0.9  # of its learning rate, every so many steps: the published epoch
_DECAY_STEPS = 600
_IMAGES_AT_ONCE = 500
_BELOW = 1 - 1e-6  # float32 must not round a norm above 1


class Embedding(nn.Module):
    """Random Fourier features by class: the same for private images and for fakes."""

    frequencies: Tensor
    target: Tensor  # of the fit: the released mean

    def __init__(
        self,
        classes: int,
        size: int,
        num_features: int,
        variance: float,
        seed: int,
    ) -> None:
        """Draws the frequencies W, public, for vectors of `size` numbers."""
        super().__init__()
        rng = stream(seed, "random-features")
        shape = (num_features // 2, size)  # each frequency makes a cosine and a sine
        drawn = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        drawn = drawn / math.sqrt(variance)
        # Not in checkpoints: they are large, and follow from the seed.
        self.register_buffer("frequencies", drawn, persistent=False)
        self.register_buffer("target", torch.zeros(classes, num_features))

    def sum(self, vectors: Tensor, labels: Labels) -> Tensor:
        """Returns sum_i onehot(y_i) phi(x_i)^T: shape (classes, D), each term norm 1.

        Privacy: of private images, reads private data; output private.
        """
        phases = vectors @ self.frequencies.T
        features = torch.cat([phases.cos(), phases.sin()], dim=1)
        # cos^2 + sin^2 = 1 for each frequency, so this makes the norm of phi 1.
        scale = _BELOW / math.sqrt(len(self.frequencies))
        one_hot = F.one_hot(labels, len(self.target)).to(features)
        return one_hot.T @ features * scale

    def total(
        self,
        images: Images,
        labels: Labels,
        vectors_of: Callable[[Images], Tensor],
    ) -> Tensor:
        """Returns `sum` over many images, of which a few at a time are embedded.

        Privacy: reads private data; output private.

        Args:
            images: (n, C, S, S).
            labels: (n,).
            vectors_of: returns what is embedded of a batch of images.
        """
        # Features of all images at once would take 40 kB each.
        device = self.target.device
        total = torch.zeros_like(self.target)
        for rows in torch.arange(len(labels)).split(_IMAGES_AT_ONCE):
            vectors = vectors_of(images[rows].to(device))
            total += self.sum(vectors, labels[rows].to(device))
        return total

    def approach(
        self,
        vectors: Tensor,
        labels: Labels,
        adam: Adam,
        rate: float,
        step: int,
    ) -> None:
        """Takes one step of the fit: the mean embedding of fakes nears the target.

        Privacy: post-processing of DP output.

        Args:
            vectors: the vectors of fakes, with a graph to the generator's weights.
            labels: the labels of the fakes.
            adam: the optimizer of the generator's weights.
            rate: its learning rate in the first step.
            step: from 0; by its number, so that a resumed fit has the same rate.
        """
        found = self.sum(vectors, labels) / len(labels)
        loss = (self.target - found).square().sum()
        adam.param_groups[0]["lr"] = rate * _DECAY ** (step / _DECAY_STEPS)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()


class DPMerf(Method[NetworkConfig]):
    """Clients answer with their mean embedding; the server fits its generator to it."""

    Settings = NetworkSettings

    recipe = MappingProxyType(
        {
            "num_rounds": 1,
            "generator": "upsample",
            "generator_dim": 8,
            "generator_learning_rate": 0.01,
            "spectral_norm": False,
            "latent": "normal",
            "latent_dim": 5,
            "ema_decay": 0.0,
        }
    )
    commits_every_round = True
    hides_duration = True

    def terms(self, config: NetworkConfig, round: int) -> Terms:
        """Returns one embedding by class and feature, clipped to C."""
        shape = (1, 1, config.num_classes, NUM_FEATURES)
        return Terms("embedding", config.noise_multiplier, config.clip_bound, shape)

    def declared(self, config: NetworkConfig, round: int) -> Mapping[str, Declared]:
        """Returns nothing: clients draw W themselves."""
        return {}

    def state(self, config: NetworkConfig) -> State:
        """Initialises the generator from the seed, and no target."""
        generator = build_generator(config, derived_seed(config.seed, "generator"))
        state = State.of(generator.to(config.device))
        self.join(config, state)
        return state

    def join(self, config: NetworkConfig, state: State) -> None:
        """Adds the embedding, which has the released mean."""
        state.parts["embedding"] = _embedding(config)

    def begin(self, config: NetworkConfig, state: State) -> tuple[Request, None]:
        """Asks for embeddings."""
        return asked(config, state, {}), None

    def answer(
        self,
        config: NetworkConfig,
        client: OneClient,
        request: Request,
    ) -> Tensor:
        """Returns the client's mean embedding: one sample.

        Privacy: reads private data; output private.
        """
        embedding = _embedding(config)
        images, labels = client.tensors(config.device)
        mean = embedding.total(images, labels, _flat) / len(labels)
        return mean[None, None]

    def finish(
        self,
        config: NetworkConfig,
        state: State,
        pending: None,
        released: Released,
    ) -> None:
        """Keeps the mean of the clients' embeddings.

        Privacy: post-processing of DP output.
        """
        # In the state, and so in the checkpoint, from which `settle` starts.
        mean = released.total[0, 0] / config.clients_per_round
        _of(state).target.copy_(mean)
        state.round += 1

    def settle(
        self,
        config: NetworkConfig,
        state: State,
        fit: Fit,
    ) -> bool:
        """Fits the generator to the released mean, with classes alike.

        Privacy: post-processing of DP output.
        """
        embedding = _of(state)
        adam = Adam(state.generator.parameters())  # `approach` sets its rate
        labels = (torch.arange(FAKES) % config.num_classes).to(config.device)
        parts = {"generator": state.generator, "adam": adam}
        for step in range(fit.begin(parts), STEPS):
            # A stream for each step: a fit that goes on has the same latents.
            rng = stream(config.seed, "latent", step)
            z = sample_latents(config, rng, FAKES).to(config.device)
            vectors = _flat(state.generator(z, labels))
            rate = config.generator_learning_rate
            embedding.approach(vectors, labels, adam, rate, step)
            fit.done(step + 1, STEPS)
        # The fit is no run of rounds that an average would smooth.
        state.ema.load_state_dict(state.generator.state_dict())
        return True


METHOD = DPMerf()


def _flat(images: Images) -> Tensor:
    return images.flatten(1)


def _of(state: State) -> Embedding:
    return cast(Embedding, state.parts["embedding"])


def _embedding(config: NetworkConfig) -> Embedding:
    embedding = Embedding(
        classes=config.num_classes,
        size=config.image_channels * config.image_size**2,
        num_features=NUM_FEATURES,
        variance=KERNEL_VARIANCE,
        seed=config.seed,
    )
    return embedding.to(config.device)
