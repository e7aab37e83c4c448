"""Fed-Avg GAN: clients train copies of one discriminator, the server the generator.

    server                                   node, for its clients
    both networks --------------------------> each client: n SGD steps of a copy of D
                                              update = D_client - D, clipped to C whole
    D += sum / m  <-------------------------- sum over its clients + Gaussian noise
    n SGD steps of G against D                (one release, B = 1)

The generator only sees the noisy discriminator. n is `discriminator_steps`, for both.

Networks are the project's discriminator without batch statistics and any generator of
the project: batch statistics of the published networks travel and are averaged with
their weights, and couple what one client sends to each of its images.

Differs from the reference: the nodes add the noise, in shares, and not the server;
conditional, with fakes of the real batch's labels; a client with fewer images than a
batch draws them again.

Source: Augenstein et al., "Generative models for effective ML on private, decentralized
datasets", ICLR 2020, Algorithm 2; reference google-research/federated, gans/.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedgs.config.fields import Problem
from fedgs.config.method_settings import NetworkSettings
from fedgs.config.run_config import NetworkConfig
from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.gan.discriminators import chunk_size
from fedgs.gan.losses import discriminator_loss
from fedgs.gan.models import (
    advance_in_place,
    build_discriminator,
    build_generator,
    sample_labels,
    sample_latents,
    update_ema,
)
from fedgs.methods.base import (
    Declared,
    Method,
    OneClient,
    Released,
    Request,
    State,
    asked,
)
from fedgs.randomness import stream
from fedgs.shapes import TensorDict

WEIGHT_DECAY = 2.5e-5  # of both networks; Augenstein et al., their code's default
NETWORKS = ("generator", "discriminator")


@dataclass(frozen=True)
class FedAvgGanSettings(NetworkSettings):
    """Settings of both networks, whose rates are of SGD."""

    def problems(self) -> Iterator[Problem]:
        """Yields why the discriminator is more than the weights that clients send."""
        yield from super().problems()
        if self.spectral_norm:
            why = "its vectors are state beside the weights, which clients do not send"
            yield "spectral_norm", f"{why}; give --no-spectral-norm"


class FedAvgGan(Method[NetworkConfig]):
    """Clients answer with the clipped update of a discriminator that all share."""

    Settings = FedAvgGanSettings
    recipe = MappingProxyType(
        {
            "num_rounds": 1000,
            "clip_bound": 0.1,
            "discriminator_steps": 6,
            "discriminator_learning_rate": 5e-4,
            "discriminator_dim": 32,
            "spectral_norm": False,
            "generator": "upsample",
            "generator_dim": 32,
            "generator_learning_rate": 5e-3,
            "latent": "normal",
            "latent_dim": 128,
            "ema_decay": 0.0,
        }
    )

    def terms(self, config: NetworkConfig, round: int) -> Terms:
        """Returns one update, clipped to C, as a row of weights."""
        shape = (1, 1, 1, _num_weights(config))
        return Terms("update", config.noise_multiplier, config.clip_bound, shape)

    def declared(self, config: NetworkConfig, round: int) -> Mapping[str, Declared]:
        """Returns the tensors of both networks under "<network>.<name>"."""
        named = _named(new_networks(config))
        return {name: Declared(tuple(tensor.shape)) for name, tensor in named}

    def state(self, config: NetworkConfig) -> State:
        """Initialises both networks from the seed."""
        state = State.of(new_networks(config)["generator"].to(config.device))
        self.join(config, state)
        return state

    def join(self, config: NetworkConfig, state: State) -> None:
        """Adds the discriminator that all share."""
        discriminator = new_networks(config)["discriminator"]
        state.parts["discriminator"] = discriminator.to(config.device)
        discriminator.requires_grad_(False)

    def begin(self, config: NetworkConfig, state: State) -> tuple[Request, None]:
        """Returns both networks as they are; draws nothing.

        Privacy: post-processing of DP output.
        """
        networks = {name: _network(state, name) for name in NETWORKS}
        tensors = {name: value.detach().cpu() for name, value in _named(networks)}
        return asked(config, state, tensors), None

    def check(self, config: NetworkConfig, request: Request) -> None:
        """Refuses a request that trains others than it asks."""
        # Clients train within `answer`, so nobody trains who does not answer.
        if request.trainees != request.participants:
            raise UserError("request that is no round of Fed-Avg GAN: refused")

    def answer(
        self,
        config: NetworkConfig,
        client: OneClient,
        request: Request,
    ) -> Tensor:
        """Returns the client's update: one sample, clipped as a whole.

        Privacy: reads private data; output private.
        """
        return self.answer_stacked(config, [client], request)[0]

    def answer_stacked(
        self,
        config: NetworkConfig,
        clients: Sequence[OneClient],
        request: Request,
    ) -> Tensor:
        """Returns the updates of several clients, each of its own copy.

        Privacy: reads private data; output private.
        """
        return client_updates(config, clients, request)[:, None, None, None]

    def stack_size(self, config: NetworkConfig) -> int:
        """Returns how many copies train in one batched call."""
        return chunk_size(config.stacked)

    def finish(
        self,
        config: NetworkConfig,
        state: State,
        pending: None,
        released: Released,
    ) -> None:
        """Moves the discriminator by the mean update, then trains the generator by it.

        Privacy: post-processing of DP output.
        """
        discriminator = _network(state, "discriminator")
        weights = parameters_to_vector(discriminator.parameters()).detach()
        # By the planned number, whoever answered: a missing node makes the step
        # smaller, and its noise no larger.
        mean = (released.total.flatten() / config.clients_per_round).to(weights)
        vector_to_parameters(weights + mean, discriminator.parameters())
        train_generator(config, state)
        update_ema(state.ema, state.generator, state.round, config.ema_decay)
        state.round += 1


METHOD = FedAvgGan()


def new_networks(config: NetworkConfig) -> dict[str, nn.Module]:
    """Returns both networks as they are before the first round."""
    return {
        "generator": build_generator(config, config.seed),
        "discriminator": build_discriminator(config, config.seed),
    }


@lru_cache(maxsize=8)
def _num_weights(config: NetworkConfig) -> int:
    # The seed decides values, not shapes, so any will do.
    network = build_discriminator(config, rng_seed=0)
    return sum(weights.numel() for weights in network.parameters())


def _named(networks: Mapping[str, nn.Module]) -> list[tuple[str, Tensor]]:
    return [
        (f"{key}.{name}", value)
        for key, network in networks.items()
        for name, value in network.state_dict().items()
    ]


def _network(state: State, name: str) -> nn.Module:
    network = state.parts[name]
    assert isinstance(network, nn.Module)  # noqa: S101 - of `state`
    return network


# ------------------------------------------------------------------ clients


def client_updates(
    config: NetworkConfig,
    clients: Sequence[OneClient],
    request: Request,
) -> Tensor:
    """Returns the updates of clients, shape (n, weights), in their order.

    Privacy: reads private data; output private.
    """
    networks = new_networks(config)
    for key, module in networks.items():
        sent = {name: request.tensors[f"{key}.{name}"] for name in module.state_dict()}
        module.load_state_dict(sent)
        # `_trained` makes copies of the weights, so the networks stay as they were
        # sent.
        module.to(config.device).requires_grad_(False)
    generator = networks["generator"]
    template = networks["discriminator"]
    start: TensorDict = {**dict(template.named_parameters())}

    def update(*batches: Tensor) -> Tensor:
        return _trained(config, template, start, *batches)

    # Drawn client by client, so that a client's numbers do not depend on its
    # neighbours.
    drawn = [_draw(config, generator, client, request.round) for client in clients]
    if not config.stacked:
        return torch.stack([update(*batches) for batches in drawn])
    stacked = [torch.stack(values) for values in zip(*drawn, strict=True)]
    return vmap(update)(*stacked)


def _draw(
    config: NetworkConfig,
    generator: nn.Module,
    client: OneClient,
    round: int,
) -> tuple[Tensor, ...]:
    """Draws a client's real images, their labels, fakes of these labels and mixes.

    Privacy: reads private data; output private.

    Returns:
        (steps, b, C, S, S) in [0, 1], (steps, b), like the first, (steps, b) in [0, 1).
    """
    device = config.device
    rng = stream(config.seed, "fedavg-gan", client.number, round)
    shape = (config.discriminator_steps, config.discriminator_batch_size)
    records = rng.integers(len(client.labels), size=shape)
    images = torch.from_numpy(client.images[records]).to(device)
    real = images.float().div_(255.0)
    labels = torch.from_numpy(client.labels[records]).to(device)
    count = math.prod(shape)
    z = sample_latents(config, rng, count).to(device)
    fakes = generator(z, labels.flatten())
    mix = torch.from_numpy(rng.random(shape, dtype=np.float32))
    return real, labels, fakes.view_as(real), mix.to(device)


def _trained(
    config: NetworkConfig,
    template: nn.Module,
    start: TensorDict,
    real: Tensor,
    labels: Tensor,
    fakes: Tensor,
    mix: Tensor,
) -> Tensor:
    """Returns the change of one client's copy after its SGD steps, (weights,)."""

    def loss(params: TensorDict, step: int) -> Tensor:
        def score(images: Tensor, of: Tensor) -> Tensor:
            return functional_call(template, params, (images, of))

        return discriminator_loss(
            score,
            real[step],
            labels[step],
            fakes[step],
            labels[step],  # fakes have the labels of the real images beside them
            mix[step],
            drift_weight=0.0,
        )

    # By hand, because torch's optimizers change tensors in place, which `vmap` cannot
    # do for many clients at once.
    params = start
    rate = config.discriminator_learning_rate
    for step in range(config.discriminator_steps):
        grads = grad(loss)(params, step)
        moved: TensorDict = {}
        for name, value in params.items():
            decayed = grads[name] + WEIGHT_DECAY * value
            moved[name] = value - rate * decayed
        params = moved
    # In the order of `parameters_to_vector`, by which the server reads it.
    changes: list[Tensor] = []
    for name, value in start.items():
        change = params[name] - value
        changes.append(change.flatten())
    return torch.cat(changes)


# ------------------------------------------------------------------ server


def train_generator(config: NetworkConfig, state: State) -> None:
    """Takes the generator's SGD steps: post-processing of the discriminator."""
    discriminator = _network(state, "discriminator")
    rate = config.generator_learning_rate
    sgd = torch.optim.SGD(state.generator.parameters(), rate, weight_decay=WEIGHT_DECAY)
    for step in range(config.discriminator_steps):
        rng = stream(config.seed, "latent", state.round, step)
        count = config.discriminator_batch_size
        z = sample_latents(config, rng, count).to(config.device)
        labels = sample_labels(config, rng, count).to(config.device)
        # One power iteration: forward passes only read the spectral vectors.
        advance_in_place(state.generator)
        fakes = state.generator(z, labels)
        loss = -discriminator(fakes, labels).mean()
        sgd.zero_grad(set_to_none=True)
        loss.backward()
        sgd.step()
