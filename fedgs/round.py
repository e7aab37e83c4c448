"""One round on one page: Algorithms 1 and 2 of GS-WGAN are the same functions.

    for each client k (when first needed):                     Algorithm 2
        warm_start(k)                                          lines 1-3, 16-27
    for round in 1..T:                                         line 5
        participants = select(round)                           line 6
        images = G(z, labels)                                  line 8
        each client: n_dis discriminator steps, then one
        sanitized answer for the last B images                 lines 9, 28-32
        theta_G <- Adam(theta_G, 1/(m B) sum g J_G(z))         line 11
    the ledger has the event before the request is sent        line 12

Algorithm 1 is the same round where the K clients are shards of one data set. Full
participation is the same round with m = K.

Source: Chen, Orekondy, Fritz, "GS-WGAN: a gradient-sanitized approach for learning
differentially private generators", NeurIPS 2020, Algorithms 1 and 2; reference
source/main.py, source/pretrain.py.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call

from fedgs.config import RunConfig
from fedgs.data import FederatedImages
from fedgs.discriminators import Discriminators, ModuleStack
from fedgs.messages import EVERYONE, FakeBatch, clients_of
from fedgs.models import (
    Generator,
    build_generator,
    sample_labels,
    sample_latents,
    update_ema,
)
from fedgs.noise import NoiseStream
from fedgs.sanitizer import (
    ClippedGradients,
    PerSampleGradients,
    SanitizedGradients,
    clip,
    from_dct,
    sanitize,
    to_dct,
)
from fedgs.shapes import Images, Labels, TensorDict
from fedgs.stream import derived_seed, stream

# ------------------------------------------------------------------ server


@dataclass
class ServerState:
    """What the server keeps between rounds; all of it is DP output.

    Attributes:
        generator: G.
        optimizer: Adam of G.
        ema: the average of G, which samples are drawn from.
        round: the last finished round, 0 before the first.
    """

    generator: Generator
    optimizer: torch.optim.Optimizer
    ema: Generator
    round: int = 0


def new_server(config: RunConfig) -> ServerState:
    """Initialises the generator, its optimizer and its average from the seed.

    Privacy: public.
    """
    seed = derived_seed(_seed(config), "generator")
    generator = build_generator(config, seed).to(config.device)
    optimizer = torch.optim.Adam(
        generator.parameters(),
        lr=config.generator_learning_rate,
        betas=(config.generator_beta1, config.generator_beta2),
    )
    average = copy.deepcopy(generator).eval().requires_grad_(False)
    return ServerState(generator, optimizer, average)


def select(config: RunConfig, round: int) -> Sequence[int] | str:
    """Returns the participants of a round, sorted, or "all".

    Privacy: public; independent of the data.

    Source: Algorithm 2, line 6, for `uniform` with m = 1.
    """
    num_clients, count = config.num_clients or 1, config.clients_per_round or 1
    if config.client_selection == "all":
        return EVERYONE
    if config.client_selection == "uniform":
        rng = stream(_seed(config), "selection", round)
        chosen = rng.choice(num_clients, size=count, replace=False)
        return tuple(int(client) for client in np.sort(chosen))
    lap, start = divmod((round - 1) * count, num_clients)
    slots = _balanced_lap(_seed(config), num_clients, count, lap)[start : start + count]
    if len(slots) < count:  # the round runs over into the next lap
        following = _balanced_lap(_seed(config), num_clients, count, lap + 1)
        slots = slots + following[: count - len(slots)]
    return tuple(sorted(slots))


@lru_cache(maxsize=4)
def _balanced_lap(
    seed: int, num_clients: int, count: int, lap: int
) -> tuple[int, ...]:
    """Returns a shuffled order of all clients, used up before the next one starts.

    A round that runs over two laps must not hold a client twice: whoever stands in
    its first part moves behind the others in the second lap.
    """
    order = stream(seed, "balanced", lap).permutation(num_clients).tolist()
    shared = (lap * num_clients) % count if lap else 0
    if shared:
        before = set(_balanced_lap(seed, num_clients, count, lap - 1)[-shared:])
        order.sort(key=lambda client: client in before)  # stable
    return tuple(order)


def draw_fakes(config: RunConfig, server: ServerState) -> tuple[FakeBatch, Images]:
    """Draws the next round's request and keeps the graph of its answered images.

    Round 0, the public warm start, has no answered images.

    Privacy: post-processing of DP output.

    Returns:
        The request with F = `config.fakes_sent` images, and the last B of them,
        attached to the generator's graph.

    Source: Algorithm 2, lines 6 and 8.
    """
    round = server.round + 1
    latent_rng = stream(_seed(config), "latent", round)
    z = sample_latents(config, latent_rng, config.fakes_sent).to(config.device)
    labels = sample_labels(config, latent_rng, config.fakes_sent)
    labels_there = labels.to(config.device)
    split = config.fakes_sent - config.batch_size
    server.generator.train()
    server.generator.advance_spectral_vectors()
    answered = server.generator(z[split:], labels_there[split:])
    with torch.no_grad():
        others = server.generator(z[:split], labels_there[:split]) if split else z[:0]
    images = answered.detach()
    if split:
        images = torch.cat([others, images])
    participants = select(config, round)
    trains_all = config.discriminator_training == "every_round"
    request = FakeBatch(
        round=round,
        images=images.cpu(),
        labels=labels,
        participants=participants,
        trainees=EVERYONE if trains_all else participants,
    )
    return request, answered


def public_fakes(config: RunConfig, server: ServerState) -> FakeBatch:
    """Draws the fakes of the public warm start: round 0, which nobody answers.

    Privacy: public; the generator is untrained.
    """
    rng = stream(_seed(config), "latent", 0)
    z = sample_latents(config, rng, config.fakes_sent).to(config.device)
    labels = sample_labels(config, rng, config.fakes_sent)
    with torch.no_grad():
        images = server.generator.eval()(z, labels.to(config.device)).cpu()
    return FakeBatch(0, images, labels, participants=(), trainees=EVERYONE)


def server_round(
    config: RunConfig,
    server: ServerState,
    answered: Images,
    answers: Sequence[SanitizedGradients],
) -> None:
    """Updates the generator from the nodes' releases (Algorithm 2, line 11).

    Averages over the *planned* participants, whoever answered, and over B; the
    average does not depend on the order in which answers came.

    Privacy: post-processing of DP output.

    Args:
        config: the resolved configuration.
        server: updated in place: generator, optimizer, average and round.
        answered: the B images with their graph, from `draw_fakes`.
        answers: the releases, at least one.
    """
    total = torch.zeros(config.release_shape, dtype=torch.float64)
    for answer in sorted(answers, key=lambda answer: answer.node_id):
        total += answer.values.double()
    average = total / ((config.clients_per_round or 1) * config.batch_size)
    if config.gradient_basis == "dct":
        average = from_dct(average, config.image_size)
    jacobian_step(server.optimizer, answered, average.to(answered))
    update_ema(server.ema, server.generator, server.round, config.ema_decay)
    server.round += 1


def jacobian_step(
    optimizer: torch.optim.Optimizer, images: Images, image_grads: Images
) -> None:
    """Multiplies image gradients by the generator's Jacobian and takes one step.

    Privacy: post-processing of DP output.

    Args:
        optimizer: of the generator that drew `images`.
        images: G(z, labels) with its graph, shape (B, C, S, S).
        image_grads: same shape.

    Source: GS-WGAN, Eq. 6: the chain rule d L / d theta = d L / d G(z) * J_theta G(z).
    """
    optimizer.zero_grad(set_to_none=True)
    images.backward(image_grads)
    optimizer.step()


# ------------------------------------------------------------------ client


def client_round(
    config: RunConfig,
    discriminators: Discriminators,
    data: FederatedImages,
    hosted: Sequence[int],
    request: FakeBatch,
    node_id: int,
) -> SanitizedGradients | None:
    """Trains the node's discriminators, then makes one release (lines 28-32).

    n_dis steps and one release, never n_dis releases. A node without participants
    trains if asked to and releases nothing.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release with
    `config.noise_std`, clip bound C and B fakes.

    Args:
        config: the resolved configuration.
        discriminators: of the hosted clients, trained in place.
        data: all data that the node can see.
        hosted: the clients of this node, in the order of `discriminators`.
        request: the server's fakes.
        node_id: the node's index.
    """
    device = config.device
    fakes, labels = request.images.to(device), request.labels.to(device)
    position = {client: index for index, client in enumerate(hosted)}
    if config.discriminator_training != "frozen":
        trainees = [position[c] for c in clients_of(request.trainees, hosted)]
        for chunk in discriminators.chunks(trainees):
            clients = [hosted[index] for index in chunk.tolist()]
            draws = _Draws(config, data, clients, "data", request.round, len(fakes))
            _train(config, discriminators, chunk, draws, fakes, labels)
    answering = [position[c] for c in clients_of(request.participants, hosted)]
    if not answering:
        return None
    fakes, labels = fakes[-config.batch_size :], labels[-config.batch_size :]
    parts = [
        _clipped_answer(config, discriminators, chunk, fakes, labels)
        for chunk in discriminators.chunks(answering)
    ]
    noise = NoiseStream(config.noise_seed, node_id, request.round)
    return sanitize(parts, config.noise_std, noise, request.round, node_id)


def _clipped_answer(
    config: RunConfig,
    discriminators: Discriminators,
    chunk: Tensor,
    fakes: Images,
    labels: Labels,
) -> ClippedGradients:
    grads = discriminators.query(chunk, fakes, labels)
    if config.gradient_basis == "dct":
        grads = to_dct(grads, config.dct_size)
    return clip(PerSampleGradients(grads), config.clip_bound)


def warm_start(
    config: RunConfig,
    discriminators: Discriminators,
    data: FederatedImages,
    hosted: Sequence[int],
    public: FakeBatch | None = None,
) -> None:
    """Trains fresh discriminators before their first round (lines 16-27).

    `local` (the paper): against an own generator per client, which is thrown away and
    never leaves. `public`: against the server's first fakes, in `public`.

    Privacy: reads private data; output private. Its length is fixed.

    Args:
        config: the resolved configuration.
        discriminators: of the hosted clients, trained in place.
        data: all data that the node can see.
        hosted: the clients of this node.
        public: the request of round 0 when `config.warm_start` is public.
    """
    for chunk in discriminators.chunks(range(len(hosted))):
        clients = [hosted[index] for index in chunk.tolist()]
        own = _LocalGenerators(config, clients) if public is None else None
        for warm_round in range(1, config.warm_start_rounds + 1):
            if own is not None:
                fakes, labels = own.draw(warm_round)
            else:
                assert public is not None
                fakes = public.images.to(config.device)
                labels = public.labels.to(config.device)
            draws = _Draws(
                config, data, clients, "warm-start-data", warm_round, fakes.shape[-4],
                is_in_order=own is not None,
            )
            _train(config, discriminators, chunk, draws, fakes, labels)
            if own is not None:
                own.step(discriminators, chunk, warm_round)


class _Draws:
    """What some clients draw for the n_dis steps of a round, each from its stream."""

    def __init__(
        self,
        config: RunConfig,
        data: FederatedImages,
        clients: Sequence[int],
        purpose: str,
        round: int,
        num_fakes: int,
        is_in_order: bool | None = None,
    ) -> None:
        self.data = data
        steps, size = config.discriminator_steps, config.discriminator_batch_size
        if is_in_order is None:
            is_in_order = config.fakes_per_round is None
        records, fakes, mix = [], [], []
        for client in clients:
            rng = stream(_seed(config), purpose, client, round)
            own = data.client_records[client]
            records.append(own[rng.integers(len(own), size=(steps, size))])
            mix.append(rng.random((steps, size), dtype=np.float32))
            if is_in_order:  # step t takes the t-th fresh batch
                fakes.append(np.arange(steps * size).reshape(steps, size))
            else:
                fakes.append(rng.integers(num_fakes, size=(steps, size)))
        self.records, self.mix, self.fakes = map(np.stack, (records, mix, fakes))

    def real(self, step: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Returns the private images (n, b, C, S, S) and labels (n, b) of a step."""
        records = self.records[:, step]
        return self.data.images[records], self.data.labels[records]


def _train(
    config: RunConfig,
    discriminators: Discriminators,
    chunk: Tensor,
    draws: _Draws,
    fakes: Images,
    labels: Labels,
) -> None:
    """Takes n_dis steps; fakes (F, ...) for all clients or (n, F, ...) one's own."""
    device, num_clients = config.device, len(chunk)
    if fakes.dim() == 4:
        fakes = fakes.expand(num_clients, *fakes.shape)
        labels = labels.expand(num_clients, *labels.shape)
    rows = torch.arange(num_clients, device=device).unsqueeze(1)
    for step in range(config.discriminator_steps):
        images, real_labels = draws.real(step)
        index = torch.from_numpy(draws.fakes[:, step]).to(device)
        discriminators.train(
            chunk,
            torch.from_numpy(images).to(device).float().div_(255.0),
            torch.from_numpy(real_labels).to(device),
            fakes[rows, index],
            labels[rows, index],
            torch.from_numpy(draws.mix[:, step].copy()).to(device),
        )


class _LocalGenerators:
    """The warm start's own generators of some clients; never stored, never sent."""

    def __init__(self, config: RunConfig, clients: Sequence[int]) -> None:
        self.config, self.clients = config, clients
        seed = _seed(config)
        self.stack = ModuleStack(
            lambda i: build_generator(
                config, derived_seed(seed, "warm-start-generator", clients[i])
            ),
            len(clients),
            config.generator_learning_rate,
            (config.generator_beta1, config.generator_beta2),
            config.stacked,
            config.device,
        )
        self.indices = torch.arange(len(clients), device=config.device)

    def draw(self, warm_round: int) -> tuple[Images, Labels]:
        """Returns n_dis fresh batches of each client: (n, F, C, S, S) and (n, F)."""
        size = self.config.discriminator_steps * self.config.discriminator_batch_size
        z, labels = self._latents("warm-start-latent", warm_round, size)
        with torch.no_grad():
            return self.stack.map(self._images, self.indices, z, labels), labels

    def step(self, discriminators: Discriminators, chunk: Tensor, round: int) -> None:
        """Takes one generator step per client against its discriminator (line 25)."""
        z, labels = self._latents("warm-start-step", round, self.config.batch_size)
        tensors = discriminators.tensors(chunk)

        def loss(params: TensorDict, buffers: TensorDict, *batch: Tensor) -> Tensor:
            own_params, own_buffers, z, labels = batch
            images = self._images(params, buffers, z, labels)
            score = discriminators.score(own_params, own_buffers)
            return -score(images, labels).mean()

        self.stack.step(loss, self.indices, *tensors, z, labels)

    def _images(
        self, params: TensorDict, buffers: TensorDict, z: Tensor, labels: Labels
    ) -> Images:
        return functional_call(self.stack.template, (params, buffers), (z, labels))

    def _latents(
        self, purpose: str, warm_round: int, count: int
    ) -> tuple[Tensor, Labels]:
        config, seed = self.config, _seed(self.config)
        z, labels = [], []
        for client in self.clients:
            rng = stream(seed, purpose, client, warm_round)
            z.append(sample_latents(config, rng, count))
            labels.append(sample_labels(config, rng, count))
        device = config.device
        return torch.stack(z).to(device), torch.stack(labels).to(device)


def _seed(config: RunConfig) -> int:
    if config.seed is None:
        raise ValueError("the configuration has no seed: resolve it first")
    return config.seed
