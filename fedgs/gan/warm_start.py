"""The warm start: discriminators learn before their first answer (Algorithm 2, 16-27).

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Algorithm 2, ClientWarmStart;
reference source/pretrain.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedgs.config.run_config import GsWganConfig
from fedgs.data.federated import ClientImages, FederatedImages
from fedgs.gan.client_training import Draws, train_discriminators
from fedgs.gan.discriminators import Discriminators, ModuleStack
from fedgs.gan.models import (
    ADAM_BETAS,
    Generator,
    build_generator,
    sample_labels,
    sample_latents,
)
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import Images, Labels, Latents, Positions

PURPOSE = "warm-start-data"


def warm_start(
    config: GsWganConfig,
    discriminators: Discriminators,
    data: FederatedImages,
    hosted: Sequence[int],
    public: tuple[Images, Labels] | None = None,
) -> None:
    """Trains fresh discriminators before their first round (lines 16-27).

    `local` (the paper): against an own generator per client, which is thrown away and
    never leaves. `public`: against the server's first fakes, in `public`.

    Privacy: reads private data; output private. Its length is fixed.

    Args:
        config: the resolved configuration.
        discriminators: those of the hosted clients; trained in place.
        data: all data that the node can see.
        hosted: the clients of this node.
        public: the server's first fakes (F, C, S, S) and their labels (F,), on the
            CPU, when `config.warm_start` is public.
    """
    for chunk in discriminators.chunks(range(len(hosted))):
        clients = [data.of(hosted[index]) for index in chunk.tolist()]
        if public is None:
            _against_own_generators(config, discriminators, clients, chunk)
            continue
        fakes, labels = public
        fake_labels = labels.numpy()
        fakes = fakes.to(config.device)
        labels = labels.to(config.device)
        for warm_round in range(1, config.warm_start_rounds + 1):
            draws = Draws(config, clients, PURPOSE, warm_round, fake_labels)
            train_discriminators(config, discriminators, chunk, draws, fakes, labels)


def _against_own_generators(
    config: GsWganConfig,
    discriminators: Discriminators,
    clients: Sequence[ClientImages],
    chunk: Positions,
) -> None:
    own = LocalGenerators(config, [client.number for client in clients])
    for warm_round in range(1, config.warm_start_rounds + 1):
        draws = Draws(config, clients, PURPOSE, warm_round, None)
        # Fakes with the labels of the real images beside them, which the client has: it
        # never learns to tell real from fake by the labels that it happens to lack.
        labels = torch.from_numpy(draws.real_labels).flatten(1).to(config.device)
        fakes = own.draw(warm_round, labels)
        train_discriminators(config, discriminators, chunk, draws, fakes, labels)
        own.step(discriminators, chunk, warm_round)


class LocalGenerators:
    """The warm start's own generators of some clients; never stored, never sent."""

    def __init__(self, config: GsWganConfig, clients: Sequence[int]) -> None:
        self.config = config
        self.clients = clients

        def build(index: int) -> Generator:
            seed = derived_seed(config.seed, "warm-start-generator", clients[index])
            return build_generator(config, seed)

        self.stack = ModuleStack(
            build=build,
            num_modules=len(clients),
            learning_rate=config.generator_learning_rate,
            betas=ADAM_BETAS,
            is_stacked=config.stacked,
            device=config.device,
        )
        self.indices = torch.arange(len(clients), device=config.device)

    def draw(self, warm_round: int, labels: Labels) -> Images:
        """Returns fresh fakes (n, F, C, S, S) of each client with its labels (n, F)."""
        count = labels.shape[1]
        z, _ = self._latents("warm-start-latent", warm_round, count)
        with torch.no_grad():
            return self.stack.map(_made, self.indices, z, labels)

    def step(
        self,
        discriminators: Discriminators,
        chunk: Positions,
        round: int,
    ) -> None:
        """Takes one generator step per client against its discriminator (line 25)."""
        z, labels = self._latents("warm-start-step", round, self.config.batch_size)
        tensors = discriminators.tensors(chunk)

        def loss(generator: Any, *batch: Any) -> Tensor:
            params, buffers, z, labels = batch
            score = discriminators.network(params, buffers)
            fakes = generator(z, labels)
            return -score(fakes, labels).mean()

        self.stack.step(loss, self.indices, *tensors, z, labels)

    def _latents(
        self,
        purpose: str,
        warm_round: int,
        count: int,
    ) -> tuple[Latents, Labels]:
        config = self.config
        z = []
        labels = []
        for client in self.clients:
            rng = stream(config.seed, purpose, client, warm_round)
            z.append(sample_latents(config, rng, count))
            labels.append(sample_labels(config, rng, count))
        all_z = torch.stack(z).to(config.device)
        all_labels = torch.stack(labels).to(config.device)
        return all_z, all_labels


def _made(generator: Any, z: Latents, labels: Labels) -> Images:
    return generator(z, labels)
