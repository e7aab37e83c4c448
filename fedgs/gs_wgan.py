"""GS-WGAN on one page: Algorithms 1 and 2, slow and obviously right.

Plain loops over rounds, nodes and clients: one module and one optimizer for each
client, everything in this process and on the CPU. The numbers in comments are lines of
Algorithm 2; Algorithm 1 is the same where the clients are shards of one data set.

Every engine is tested against this page (tests/test_gs_wgan.py). It draws from the same
random streams, so its results are theirs but for rounding. To train, use `fedgs.train`:
this page has no ledger, no checkpoint, no second attempt of a round, no budget that
ends a run and no limits of the clients' own. It leaves out three settings:
client_selection = balanced, message_precision = compact and other phases.

Source: Chen, Orekondy, Fritz, "GS-WGAN: a gradient-sanitized approach for learning
differentially private generators", NeurIPS 2020, appendix B; reference source/main.py,
source/pretrain.py.
"""

import copy
import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Adam

from fedgs.config.run_config import GsWganConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan import client_training, losses, models
from fedgs.mechanism import sanitizer
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.accountant import Statement, statements
from fedgs.privacy.plan import Plan
from fedgs.randomness import derived_seed, secret, stream
from fedgs.shapes import Images, Labels, Latents


class Trained(NamedTuple):
    """What Algorithm 2 returns: the generator and its privacy cost.

    Privacy: DP output; the cost is public.

    Attributes:
        generator: G.
        average: the moving average of G, which samples are drawn from.
        cost: every epsilon of the run, with its conditions.
    """

    generator: models.Generator
    average: models.Generator
    cost: tuple[Statement, ...]


# ------------------------------------------------------------------ server


def train(config: GsWganConfig, data: FederatedImages) -> Trained:
    """Trains a generator, one client after the other.

    Privacy: releases (epsilon, delta)-DP output; events: in every round, one Gaussian
    release with `config.noise_std` of each node that hosts a participant.

    Args:
        config: the resolved configuration.
        data: the clients' images.

    Raises:
        ValueError: one of the three settings that this page leaves out.
    """
    if config.client_selection == "balanced" or config.message_precision == "compact":
        raise ValueError(
            "client_selection = balanced, message_precision = compact: left out"
        )
    if len(config.phases) > 1:
        raise ValueError("phases: other ones are left out, the paper has none")
    # Whoever finds the seed from the generator must not find who took part.
    config = dataclasses.replace(config, selection_key=secret())
    seed = derived_seed(config.seed, "generator")
    generator = models.build_generator(config, seed)  # 4
    average = copy.deepcopy(generator)
    everyone = range(config.num_clients)
    clients = [Client(config, data, k) for k in everyone]
    z, labels = draw_latents(config, config.fakes_sent, "latent", 0)
    with torch.no_grad():
        fakes = generator(z, labels)
    for client in clients:  # 1, in parallel
        client.warm_start(fakes, labels)  # 2, 3
    rate = config.generator_learning_rate
    optimizer = Adam(generator.parameters(), rate, models.ADAM_BETAS)
    for round in range(1, config.num_rounds + 1):  # 5
        participants = select(config, round)  # 6; in the paper, one client
        z, labels = draw_latents(config, config.fakes_sent, "latent", round)  # 8
        models.advance_in_place(generator)
        # The last B fakes are answered; the others only train the discriminators.
        split = config.fakes_sent - config.batch_size
        answered = generator(z[split:], labels[split:])  # keeps its graph for line 11
        with torch.no_grad():
            others = generator(z[:split], labels[:split])
        fakes = torch.cat([others, answered.detach()])

        # In the paper, who takes part trains.
        trainees = {"selected": participants, "every_round": everyone, "frozen": ()}
        for k in trainees[config.discriminator_training]:
            one_set = config.fakes_per_round is not None
            clients[k].train("data", round, fakes, labels, one_set)  # 7, 9
        answering = {k: clients[k] for k in participants}
        total = summed(config, answering, fakes[split:], labels[split:], round)
        image_grads = total / (len(participants) * config.batch_size)  # mean over m, B
        if config.dct_size is not None:
            image_grads = sanitizer.from_dct(image_grads, config.image_size)
        optimizer.zero_grad()
        answered.backward(image_grads.to(answered))  # 11: times the Jacobian of G
        optimizer.step()
        models.update_ema(average, generator, round - 1, config.ema_decay)
    cost = statements(Plan.from_config(config), config.delta)  # 12, known in advance
    return Trained(generator, average, cost)  # 14


def summed(
    config: GsWganConfig,
    clients: "dict[int, Client]",
    fakes: Images,
    labels: Labels,
    round: int,
) -> Tensor:
    """Returns the sum of the nodes' releases of a round, in the shape of one.

    Each node adds noise once to the sum of those of its clients that take part.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release of each
    node that hosts one of the clients.
    """
    total = torch.zeros(config.release_shape, dtype=torch.float64)
    for node in range(config.num_nodes):
        hosted = [k for k in config.hosting.hosted(node) if k in clients]
        answers = [clients[k].answer(fakes, labels) for k in hosted]
        if answers:
            noise = NoiseStream(config.noise_seed, node, round)
            # 32, Eq. 9: the privacy barrier. One Gaussian release of the node.
            release = sanitizer.sanitize(answers, config.noise_std, noise, round, node)
            total += release.values
    return total


def select(config: GsWganConfig, round: int) -> list[int]:
    """Returns who takes part in a round (6)."""
    if config.client_selection == "all":
        return list(range(config.num_clients))
    rng = stream(config.schedule_seed, "selection", round)
    chosen = rng.choice(config.num_clients, config.clients_per_round, replace=False)
    return sorted(chosen.tolist())


def draw_latents(
    config: GsWganConfig,
    count: int,
    purpose: str,
    *indices: int,
) -> tuple[Latents, Labels]:
    """Draws z ~ P_z and labels for some fakes, from a stream of their own."""
    rng = stream(config.seed, purpose, *indices)
    z = models.sample_latents(config, rng, count)
    return z, models.sample_labels(config, rng, count)


# ------------------------------------------------------------------ client


class Client:
    """One client with its discriminator, which never leaves it.

    Privacy: reads private data; what `answer` returns is sent with noise only.
    """

    def __init__(self, config: GsWganConfig, data: FederatedImages, k: int) -> None:
        """Initialises the discriminator (18)."""
        self.config = config
        self.data = data
        self.k = k
        seed = derived_seed(config.seed, "discriminator", k)
        self.discriminator = models.build_discriminator(config, seed)
        rate = config.discriminator_learning_rate
        self.optimizer = Adam(self.discriminator.parameters(), rate, models.ADAM_BETAS)

    def warm_start(self, fakes: Images, labels: Labels) -> None:
        """ClientWarmStart (16): against a generator of its own, or on the first fakes.

        Args:
            fakes: images of the untrained G, shape (F, C, S, S).
            labels: shape (F,).
        """
        config = self.config
        steps = range(1, self.config.warm_start_rounds + 1)
        if config.is_warm_start_public:
            for step in steps:
                self.train("warm-start-data", step, fakes, labels, is_one_set=True)
            return
        seed = derived_seed(config.seed, "warm-start-generator", self.k)
        rival = models.build_generator(config, seed)  # 18; thrown away
        rate = config.generator_learning_rate
        optimizer = Adam(rival.parameters(), rate, models.ADAM_BETAS)
        for step in steps:  # 19
            rng = stream(config.seed, "warm-start-data", self.k, step)
            records = self.draw_records(rng).flatten()  # 21, drawn again by `train`
            labels = torch.from_numpy(self.data.labels[records])
            count = len(labels)
            z, _ = draw_latents(config, count, "warm-start-latent", self.k, step)
            with torch.no_grad():
                fakes = rival(z, labels)  # 22, labelled as the real images beside them
            self.train("warm-start-data", step, fakes, labels, False)  # 20-24
            size = config.batch_size
            z, labels = draw_latents(config, size, "warm-start-step", self.k, step)
            models.advance_in_place(rival)
            loss = -self.discriminator(rival(z, labels), labels).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # 25

    def draw_records(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Draws what n_dis steps train on, with replacement (29, 30): (n_dis, b).

        Privacy: reads private data; output private.
        """
        mine = self.data.client_records[self.k]  # 29: S_k
        shape = self.config.discriminator_steps, self.config.discriminator_batch_size
        return mine[rng.integers(len(mine), size=shape)]

    def train(
        self,
        purpose: str,
        round: int,
        fakes: Images,
        labels: Labels,
        is_one_set: bool,
    ) -> None:
        """Takes n_dis steps of the discriminator (7, 20; 29-31).

        Args:
            purpose: the name of the random stream.
            round: the round, or the step of the warm start.
            fakes: shape (F, C, S, S).
            labels: shape (F,).
            is_one_set: draw from all fakes such as have the labels of the real images,
                rather than use them up in turn.
        """
        config = self.config
        data = self.data
        rng = stream(config.seed, purpose, self.k, round)
        records = self.draw_records(rng)
        mix = torch.from_numpy(rng.random(records.shape, dtype=np.float32))
        chosen = np.arange(records.size).reshape(records.shape)
        if is_one_set:
            wanted = data.labels[records]
            chosen = client_training.draw_matching(rng, wanted, labels.numpy())
        real = torch.from_numpy(data.images[records]).float() / 255
        real_labels = torch.from_numpy(data.labels[records])
        for step in range(config.discriminator_steps):
            models.advance_in_place(self.discriminator)
            loss = losses.discriminator_loss(
                self.discriminator,
                real[step],
                real_labels[step],
                fakes[chosen[step]],
                labels[chosen[step]],
                mix[step],
            )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()  # 31

    def answer(self, fakes: Images, labels: Labels) -> sanitizer.ClippedGradients:
        """Returns d L_G / d image of each fake, clipped to norm C (32, Eq. 7 and 8)."""
        grads = losses.generator_image_grads(self.discriminator, fakes, labels).detach()
        if self.config.dct_size is not None:
            grads = sanitizer.to_dct(grads, self.config.dct_size)
        per_sample = sanitizer.PerSampleGradients(grads[None])
        return sanitizer.clip(per_sample, self.config.clip_bound)
