"""One round of GS-WGAN; the numbers in comments are lines of its Algorithm 2.

    server                                        node, for its clients
    1-3   prepare ------------------------------> warm_start (fedgs/gan/warm_start.py)
    4     new_server
    5     for each round (RunSession.rounds)
    6       select
    8       draw_fakes -------------------------> client_round
                                           7, 9     n_dis discriminator steps
                                           28-32    one sanitized answer, B gradients
    11      server_round <----------------------
    12    the ledger has the event before 8 is sent

Algorithm 1 is the same round where the K clients are shards of one data set. Full
participation is the same round with m = K.

Source: Chen, Orekondy, Fritz, "GS-WGAN: a gradient-sanitized approach for learning
differentially private generators", NeurIPS 2020, Algorithms 1 and 2; reference
source/main.py, source/pretrain.py.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.config.stages import Terms
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.sources import load_records
from fedgs.errors import UserError
from fedgs.federation.codec import round_fakes
from fedgs.federation.messages import (
    EVERYONE,
    Clients,
    FakeBatch,
    StageRequest,
    clients_of,
)
from fedgs.gan.client_training import Draws, train_discriminators
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.features import StageRelease, embedding
from fedgs.gan.models import (
    ADAM_BETAS,
    Generator,
    GeneratorRefined,
    advance_in_place,
    build_generator,
    sample_labels,
    sample_latents,
    update_ema,
)
from fedgs.gan.moments import Model, model_of, set_generator, start_of
from fedgs.gan.public_networks import refiner_of_fonts
from fedgs.gan.refinement import reference, refine
from fedgs.gan.stages import make_stage, released
from fedgs.mechanism.integers import IntegerSum, sanitize_integers
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.quantization import release_step
from fedgs.mechanism.sanitizer import (
    ClippedGradients,
    PerSampleGradients,
    SanitizedGradients,
    clip,
    from_dct,
    sanitize,
    to_dct,
)
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import ImageGrads, Images, Labels, Positions

# ------------------------------------------------------------------ server


@dataclass
class ServerState:
    """What the server keeps between rounds; all of it is DP output or public.

    Attributes:
        generator: G.
        optimizer: Adam of G.
        ema: the average of G, which samples are drawn from.
        round: the last finished round, 0 before the first.
        stages: what the stages have released so far.
        start: the model of public images, that stages start from.
    """

    generator: Generator
    optimizer: torch.optim.Optimizer
    ema: Generator
    round: int = 0
    stages: list[StageRelease] = field(default_factory=list[StageRelease])
    start: Model | None = None


def new_server(config: ResolvedConfig) -> ServerState:
    """Initialises the generator, its optimizer and its average from the seed."""
    seed = derived_seed(config.seed, "generator")
    # 4: theta_G, and Adam for line 11.
    generator = build_generator(config, seed).to(config.device)
    if isinstance(generator, GeneratorRefined) and config.knows_fonts:
        generator.refiner.load_state_dict(refiner_of_fonts(config), strict=False)
    rate = config.generator_learning_rate
    optimizer = torch.optim.Adam(generator.parameters(), rate, ADAM_BETAS)
    average = copy.deepcopy(generator).eval().requires_grad_(False)
    start, _ = public_start(config)
    return ServerState(generator, optimizer, average, start=start)


@lru_cache(maxsize=1)
def public_start(config: ResolvedConfig) -> tuple[Model | None, frozenset[bytes]]:
    """Reads `public_data`; returns its model and `digests`, none where it is unset.

    Privacy: public, if the images are and nobody chose them by the private ones.

    Raises:
        UserError: missing or malformed data, or of other classes or channels.
    """
    public = config.public_data
    if public is None:
        return None, frozenset()
    # How the private data are read says nothing about these.
    own = {"data": public, "num_classes": "", "classes": "all"}
    try:
        records = load_records(
            RunConfig.from_flat(own | {"background": "auto"}, base=config)
        )
    except UserError as error:
        raise UserError(f"public_data = {public!r}: {error}") from error
    counts = np.bincount(records.labels, minlength=config.num_classes)
    if len(counts) > config.num_classes or not counts.all():
        raise UserError(
            f"public_data = {public!r}: has images of {np.count_nonzero(counts)} "
            f"classes, the run has {config.num_classes}; give public data with images "
            "of the same classes"
        )
    images, labels = torch.tensor(records.images), torch.tensor(records.labels)
    model = start_of(config, images, labels)
    return model, digests(records.images) | digests(255 - records.images)


def digests(images: NDArray[np.uint8]) -> frozenset[bytes]:
    """Returns a hash of each image that has more than one grey level.

    Privacy: as private as the images.

    Args:
        images: shape (N, channel, height, width).
    """
    shown = images[images.min(axis=(1, 2, 3)) < images.max(axis=(1, 2, 3))]
    return frozenset(blake2b(i.tobytes(), digest_size=16).digest() for i in shown)


def select(config: ResolvedConfig, round: int) -> Clients:
    """Returns the participants of a round, sorted, or "all".

    Privacy: public; independent of the data.

    Source: Algorithm 2, line 6, for `uniform` with m = 1.
    """
    # 6: sample the participants; by a public schedule, as accounting must know it.
    num_clients, count = config.num_clients, config.clients_per_round
    if config.client_selection == "all":
        return EVERYONE
    if config.client_selection == "uniform":
        rng = stream(config.schedule_seed, "selection", round)
        chosen = rng.choice(num_clients, size=count, replace=False)
        return tuple(int(client) for client in np.sort(chosen))
    lap, start = divmod((round - 1) * count, num_clients)
    seed = config.schedule_seed
    slots = _balanced_lap(seed, num_clients, count, lap)[start : start + count]
    if len(slots) < count:  # the round runs over into the next lap
        following = _balanced_lap(seed, num_clients, count, lap + 1)
        slots = slots + following[: count - len(slots)]
    return tuple(sorted(slots))


@lru_cache(maxsize=4)
def _balanced_lap(seed: int, num_clients: int, count: int, lap: int) -> tuple[int, ...]:
    """Returns a shuffled order of all clients, used up before the next one starts.

    A round that runs over two laps must not hold a client twice: whoever stands in
    its first part moves behind the others in the second lap. So a lap depends on the
    ones before it, back to the last lap that starts with a round.
    """
    first = lap
    while (first * num_clients) % count:
        first -= 1
    order: list[int] = []
    for number in range(first, lap + 1):
        shared = (number * num_clients) % count
        before = set(order[len(order) - shared :])
        order = stream(seed, "balanced", number).permutation(num_clients).tolist()
        order.sort(key=lambda client: client in before)  # stable
    return tuple(order)


def trainees(config: ResolvedConfig, participants: Clients) -> Clients:
    """Returns the clients whose discriminators train in a round of the participants."""
    trains_all = config.discriminator_training == "every_round"
    return EVERYONE if trains_all else participants


def draw_fakes(config: ResolvedConfig, server: ServerState) -> tuple[FakeBatch, Images]:
    """Draws the next round's request and keeps the graph of its answered images.

    Privacy: post-processing of DP output.

    Returns:
        The request with F = `config.fakes_sent` images, and the last B of them,
        attached to the generator's graph; only the request's are rounded by the
        compact precision.

    Source: Algorithm 2, lines 6 and 8.
    """
    round = server.round + 1
    # 8: z ~ P_z and labels; the first F - B fakes only train discriminators.
    latent_rng = stream(config.seed, "latent", round)
    z = sample_latents(config, latent_rng, config.fakes_sent).to(config.device)
    labels = sample_labels(config, latent_rng, config.fakes_sent)
    labels_there = labels.to(config.device)
    split = config.fakes_sent - config.batch_size
    server.generator.train()
    # One power iteration for the round: forward passes only read the vectors.
    advance_in_place(server.generator)
    # The graph of the last B waits for the answers of line 11.
    answered = server.generator(z[split:], labels_there[split:])
    images = answered.detach()
    if split:
        with torch.no_grad():
            others = server.generator(z[:split], labels_there[:split])
        images = torch.cat([others, images])
    participants = select(config, round)
    request = FakeBatch(
        round=round,
        images=round_fakes(images.cpu(), config),
        labels=labels,
        participants=participants,
        trainees=trainees(config, participants),
    )
    return request, answered


def public_fakes(config: ResolvedConfig, average: Generator | None = None) -> FakeBatch:
    """Draws the fakes of the public warm start: round 0, which nobody answers.

    A local warm start needs none; its request has black images.

    Privacy: post-processing of DP output, if there is any yet.

    Args:
        config: the resolved configuration.
        average: the generator after the stages; None: the untrained one.
    """
    rng = stream(config.seed, "latent", 0)
    z = sample_latents(config, rng, config.fakes_sent).to(config.device)
    labels = sample_labels(config, rng, config.fakes_sent)
    if config.is_warm_start_public:
        generator = average or new_server(config).generator.eval()
        with torch.no_grad():
            images = generator(z, labels.to(config.device)).cpu()
    else:
        side = config.image_size
        images = torch.zeros(len(labels), config.image_channels, side, side)
    images = round_fakes(images, config)
    return FakeBatch(0, images, labels, participants=(), trainees=EVERYONE)


def server_round(
    config: ResolvedConfig,
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
        answered: the last B fakes with their graph, from `draw_fakes`.
        answers: the releases, at least one.
    """
    # 11: 1/m sum over participants; in node order, so that bits do not depend on who
    # came first.
    total = torch.zeros(config.release_shape, dtype=torch.float64)
    for answer in sorted(answers, key=lambda answer: answer.node_id):
        total += answer.values.double()
    average = total / (config.clients_per_round * config.batch_size)
    if config.dct_size is not None:
        average = from_dct(average, config.image_size)
    # 11: theta_G <- Adam(theta_G, average * J_theta G(z)).
    jacobian_step(server.optimizer, answered, average.to(answered))
    update_ema(server.ema, server.generator, server.round, config.ema_decay)
    server.round += 1


def jacobian_step(
    optimizer: torch.optim.Optimizer, images: Images, image_grads: ImageGrads
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


def stage_request(config: ResolvedConfig, server: ServerState) -> StageRequest:
    """Makes the next stage's feature networks and what clients subtract.

    Privacy: post-processing of DP output.

    Source: docs/privacy.md, "Embedding releases".
    """
    round = server.round + 1
    if round == config.num_stages and config.has_features:
        network, centre = reference(config, server.ema)
        return StageRequest(round, (network,), centre)
    made = make_stage(config, server.stages, round, server.start)
    return StageRequest(round, *made)


def stage_round(
    config: ResolvedConfig,
    server: ServerState,
    request: StageRequest,
    answers: Sequence[SanitizedGradients],
) -> None:
    """Sets the generator to what the stages have released, with a new one.

    Privacy: post-processing of DP output.

    Args:
        config: the resolved configuration.
        server: updated in place: stages, generator, average and round.
        request: what was asked.
        answers: the releases, at least one.
    """
    terms = config.terms(request.round)
    total = torch.zeros(terms.shape, dtype=torch.float64)
    for answer in sorted(answers, key=lambda answer: answer.node_id):
        total += answer.values.double()
    # Variances of nodes add up; an opened sum is one answer with the noise of all.
    noise_std = answers[0].noise_std * len(answers) ** 0.5
    asked = (request.round, request.networks, request.centre)
    server.stages.append(released(config, *asked, total[0], noise_std))
    model = model_of(config, server.stages, server.start)
    set_generator(config, model, server.generator, server.ema)
    server.round += 1


def fit_refiner(
    config: ResolvedConfig, server: ServerState, check: Callable[[int], None]
) -> None:
    """Fits the generator to the release of its last stage.

    Privacy: post-processing of DP output.

    Args:
        config: the resolved configuration, whose last stage is one of features.
        server: as its last stage left it; generator and average are changed in place.
        check: called with each finished step; what it raises ends the fit.
    """
    generator, average = server.generator, server.ema
    if not (
        isinstance(generator, GeneratorRefined)
        and isinstance(average, GeneratorRefined)
    ):
        raise TypeError("no other generator is fitted to features")
    refine(config, server.stages[-1], generator, average, check)


# ------------------------------------------------------------------ client


def embedding_round(
    config: ResolvedConfig,
    data: FederatedImages,
    hosted: Sequence[int],
    request: StageRequest,
    node_id: int,
) -> SanitizedGradients | IntegerSum:
    """Makes the one release of a stage: the noisy sum of the clients' embeddings.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release with the
    noise and clip bound of the round's `Terms` and B = 1.

    Args:
        config: the resolved configuration.
        data: all data that the node can see.
        hosted: the clients of this node, who all take part.
        request: the stage's networks and centre.
        node_id: the node's index.

    Source: docs/privacy.md, "Embedding releases".
    """
    terms = config.terms(request.round)
    kind, device = config.stage_list[request.round - 1].kind, config.device
    networks = [{n: v.to(device) for n, v in net.items()} for net in request.networks]
    centre = request.centre.to(device)

    def embeddings() -> Iterator[PerSampleGradients]:
        # One after the other: only one client's images and features are in memory.
        for client in hosted:
            records = data.client_records[client]
            images = torch.from_numpy(to_float(data.images[records])).to(device)
            labels = torch.from_numpy(data.labels[records]).to(device)
            values = embedding(kind, networks, centre, images, labels)
            # One sample of one client, which is clipped as a whole.
            yield PerSampleGradients(values[None, None])

    return release_embeddings(config, terms, embeddings(), request.round, node_id)


def release_embeddings(
    config: ResolvedConfig,
    terms: Terms,
    embeddings: Iterable[PerSampleGradients],
    round: int,
    node_id: int,
) -> SanitizedGradients | IntegerSum:
    """Clips embeddings, sums them over the clients and adds noise once.

    Privacy: releases (epsilon, delta)-DP output; event: as `embedding_round`.

    Args:
        config: the resolved configuration.
        terms: of the round.
        embeddings: of some clients each, shape (n, 1, networks, classes, features).
        round: the stage.
        node_id: the node's index.
    """
    parts = [clip(part, terms.clip_bound) for part in embeddings]
    return release(config, terms, parts, round, node_id)


def release(
    config: ResolvedConfig,
    terms: Terms,
    parts: Sequence[ClippedGradients],
    round: int,
    node_id: int,
) -> SanitizedGradients | IntegerSum:
    """Sums a node's clipped gradients and adds its noise once.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release with the
    noise and clip bound of `terms`; with secure aggregation one of integers.

    Args:
        config: the resolved configuration.
        terms: of the round.
        parts: the node's participating clients, in order.
        round: the round.
        node_id: the node's index.
    """
    noise = NoiseStream(config.noise_seed, node_id, round)
    place = (terms.noise_std, noise, round, node_id)
    if units := config.units(terms):
        return sanitize_integers(parts, units, *place)
    return sanitize(parts, *place, release_step(config, terms))


def client_round(
    config: ResolvedConfig,
    discriminators: Discriminators,
    data: FederatedImages,
    hosted: Sequence[int],
    request: FakeBatch,
    node_id: int,
) -> SanitizedGradients | IntegerSum | None:
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
    # 28: the node has the fakes of line 8, never the generator.
    device = config.device
    fakes, labels = request.images.to(device), request.labels.to(device)
    one_set = None if config.fakes_per_round is None else request.labels.numpy()
    position = {client: index for index, client in enumerate(hosted)}
    # 7, 29-31: n_dis steps of each trainee's discriminator on its records and fakes.
    if config.discriminator_training != "frozen":
        trainees = [position[c] for c in clients_of(request.trainees, hosted)]
        for chunk in discriminators.chunks(trainees):
            clients = [hosted[index] for index in chunk.tolist()]
            draws = Draws(config, data, clients, "data", request.round, one_set)
            train_discriminators(config, discriminators, chunk, draws, fakes, labels)
    answering = [position[c] for c in clients_of(request.participants, hosted)]
    if not answering:
        return None
    # 9, 32: the gradient by each of the last B fakes, clipped to C, ...
    fakes, labels = fakes[-config.batch_size :], labels[-config.batch_size :]
    parts = [
        clip(query(config, discriminators, chunk, fakes, labels), config.clip_bound)
        for chunk in discriminators.chunks(answering)
    ]
    # ... summed over the node's participants, with one draw of noise for all of them.
    return release(config, config.terms(request.round), parts, request.round, node_id)


def query(
    config: ResolvedConfig,
    discriminators: Discriminators,
    chunk: Positions,
    fakes: Images,
    labels: Labels,
) -> PerSampleGradients:
    """Returns d L_G / d fake of each client and fake, in the run's basis, unclipped.

    Privacy: reads private data; output private.
    """
    grads = discriminators.query(chunk, fakes, labels)
    if config.dct_size is not None:
        grads = to_dct(grads, config.dct_size)
    return PerSampleGradients(grads)
