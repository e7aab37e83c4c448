"""The warm start: discriminators learn before their first answer (Algorithm 2, 16-27).

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Algorithm 2, ClientWarmStart;
reference source/pretrain.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedgs.config.run_config import GsWganConfig
from fedgs.data.federated import ClientImages, FederatedImages
from fedgs.gan.client_training import Draws, train_discriminators
from fedgs.gan.discriminators import Discriminators, ModuleStack, num_chunks
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


OnStep = Callable[[int, int], None]  # of a finished step, from 1, and their number


def nobody(step: int, steps: int) -> None:
    """Is told of a step, and does nothing."""


class Steps:
    """The steps of a warm start. These are kept nowhere; a node's are (`KeptSteps`)."""

    def __init__(self, on_step: OnStep = nobody) -> None:
        """Takes what is called after each step; what it raises ends the warm start."""
        self.on_step = on_step

    def begin(self, parts: Mapping[str, ModuleStack], first: int, last: int) -> int:
        """Returns how many steps are done, and puts the parts where these left them.

        Privacy: parts are trained on private data; what is kept of them is private.

        Args:
            parts: all that the steps of a chunk of clients change, by name.
            first: the steps before this chunk's.
            last: the steps up to the end of this chunk's.

        Returns:
            From `first` to `last`.
        """
        return first

    def done(self, step: int, steps: int) -> None:
        """Tells of a finished step, from 1, and of their number."""
        self.on_step(step, steps)


def num_steps(config: GsWganConfig, num_clients: int) -> int:
    """Returns the steps of a node with so many clients; each is of a chunk of them."""
    return config.warm_start_rounds * num_chunks(num_clients, config.stacked)


def warm_start(
    config: GsWganConfig,
    discriminators: Discriminators,
    data: FederatedImages,
    hosted: Sequence[int],
    public: tuple[Images, Labels] | None = None,
    steps: Steps | None = None,
) -> None:
    """Trains fresh discriminators before their first round (lines 16-27).

    `local` (the paper): against an own generator per client, which never leaves and is
    thrown away at the end. `public`: against the server's first fakes, in `public`.

    Privacy: reads private data; output private. Its length is fixed.

    Args:
        config: the resolved configuration.
        discriminators: those of the hosted clients; trained in place.
        data: all data that the node can see.
        hosted: the clients of this node.
        public: the server's first fakes (F, C, S, S) and their labels (F,), on the
            CPU, when `config.warm_start` is public.
        steps: where an interrupted warm start was, and who takes note of the steps.
    """
    steps = steps or Steps()
    rounds = config.warm_start_rounds
    total = num_steps(config, len(hosted))
    for number, chunk in enumerate(discriminators.chunks(range(len(hosted)))):
        clients = [data.of(hosted[index]) for index in chunk.tolist()]
        opponents: LocalGenerators | PublicFakes
        if public is None:
            opponents = LocalGenerators(config, clients)
        else:
            opponents = PublicFakes(config, clients, *public)
        parts = {"discriminators": discriminators, **opponents.parts}
        first = number * rounds
        begun = steps.begin(parts, first, first + rounds)
        if begun > first:
            steps.done(begun, total)  # who waits learns where it goes on
        for step in range(begun, first + rounds):
            opponents.train(discriminators, chunk, step - first + 1)
            steps.done(step + 1, total)


class PublicFakes:
    """The server's first fakes, against which all clients' discriminators train."""

    def __init__(
        self,
        config: GsWganConfig,
        clients: Sequence[ClientImages],
        fakes: Images,
        labels: Labels,
    ) -> None:
        self.config = config
        self.clients = clients
        self.fake_labels = labels.numpy()
        self.fakes = fakes.to(config.device)
        self.labels = labels.to(config.device)
        self.parts: dict[str, ModuleStack] = {}  # what training changes: nothing

    def train(self, nets: Discriminators, chunk: Positions, warm_round: int) -> None:
        """Takes the steps of a round of the warm start, from 1, of some clients."""
        draws = Draws(self.config, self.clients, PURPOSE, warm_round, self.fake_labels)
        config = self.config
        train_discriminators(config, nets, chunk, draws, self.fakes, self.labels)


class LocalGenerators:
    """The warm start's own generators of some clients; never sent, gone after it."""

    def __init__(self, config: GsWganConfig, clients: Sequence[ClientImages]) -> None:
        self.config = config
        self.clients = clients

        def build(index: int) -> Generator:
            client = clients[index].number
            seed = derived_seed(config.seed, "warm-start-generator", client)
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
        self.parts = {"generators": self.stack}  # what training changes

    def train(self, nets: Discriminators, chunk: Positions, warm_round: int) -> None:
        """Takes the steps of a round of the warm start, from 1, of some clients."""
        config = self.config
        draws = Draws(config, self.clients, PURPOSE, warm_round, None)
        # Fakes with the labels of the real images beside them, which the client has: it
        # never learns to tell real from fake by the labels that it happens to lack.
        labels = torch.from_numpy(draws.real_labels).flatten(1).to(config.device)
        fakes = self.draw(warm_round, labels)
        train_discriminators(config, nets, chunk, draws, fakes, labels)
        self.step(nets, chunk, warm_round)

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
            rng = stream(config.seed, purpose, client.number, warm_round)
            z.append(sample_latents(config, rng, count))
            labels.append(sample_labels(config, rng, count))
        all_z = torch.stack(z).to(config.device)
        all_labels = torch.stack(labels).to(config.device)
        return all_z, all_labels


def _made(generator: Any, z: Latents, labels: Labels) -> Images:
    return generator(z, labels)
