"""One round of GS-WGAN; the numbers in comments are lines of its Algorithm 2.

    server                                        node, for its clients
    1-3   prepare ------------------------------> warm_start (fedgs/gan/warm_start.py)
    4     state
    6, 8  begin --------------------------------> train
                                           7, 29-31 n_dis discriminator steps
                                                  answer
                                           9, 32    one sanitized answer, B gradients
    11    finish <------------------------------
    12    the ledger has the event before 8 is sent (the frame)

Algorithm 1 is the same round where the K clients are shards of one data set. Full
participation is the same round with m = K. Other phases may come before, such as those
of `fedgs.methods.feature_means`, which set the same generator.

Source: Chen, Orekondy, Fritz, "GS-WGAN: a gradient-sanitized approach for learning
differentially private generators", NeurIPS 2020, Algorithms 1 and 2; reference
source/main.py, source/pretrain.py.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedgs.config.method_settings import GsWganSettings
from fedgs.config.run_config import GsWganConfig
from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.gan import models
from fedgs.gan.client_training import Draws, train_discriminators
from fedgs.gan.discriminators import Discriminators, chunk_size
from fedgs.mechanism.sanitizer import from_dct, to_dct
from fedgs.methods.base import Declared, Method, OneClient, Released, Request, State
from fedgs.methods.schedule import EVERYONE, select, trainees
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import ImageGrads, Images, Labels, Latents, Positions


class GsWgan(Method[GsWganConfig]):
    """Clients' own discriminators answer at the server's fakes."""

    Settings = GsWganSettings
    has_discriminators = True

    def terms(self, config: GsWganConfig, round: int) -> Terms:
        """Returns B gradients of the fakes, each clipped to C."""
        return config.phase_terms(round)

    def declared(self, config: GsWganConfig, round: int) -> Mapping[str, Declared]:
        """Returns F fakes in [0, 1], 0 = background, and their labels."""
        count = config.fakes_sent
        side = config.image_size
        return {
            "images": Declared((count, config.image_channels, side, side)),
            "labels": Declared((count,), torch.int64),
        }

    # -------------------------------------------------------------- server

    def state(self, config: GsWganConfig) -> State:
        """Initialises the generator, its optimizer and its average from the seed."""
        # 4: theta_G.
        seed = derived_seed(config.seed, "generator")
        generator = models.build_generator(config, seed).to(config.device)
        state = State.of(generator)
        self.join(config, state)
        return state

    def join(self, config: GsWganConfig, state: State) -> None:
        """Adds the generator's optimizer, for line 11."""
        state.parts["adam"] = torch.optim.Adam(
            state.generator.parameters(),
            lr=config.generator_learning_rate,
            betas=models.ADAM_BETAS,
        )

    def begin(self, config: GsWganConfig, state: State) -> tuple[Request, Images]:
        """Draws the round's F fakes and keeps the graph of the last B, the answered.

        Privacy: post-processing of DP output.

        Source: Algorithm 2, lines 6 and 8.
        """
        round = state.round + 1
        # 8: z ~ P_z and labels; the first F - B fakes only train discriminators.
        z, labels = _latents(config, round)
        split = config.fakes_sent - config.batch_size
        state.generator.train()
        # One power iteration for the round: forward passes only read the vectors.
        models.advance_in_place(state.generator)
        # The graph of the last B fakes waits for line 11, which needs their answers.
        answered = state.generator(z[split:], labels[split:])
        images = answered.detach()
        if split:
            with torch.no_grad():
                others = state.generator(z[:split], labels[:split])
            images = torch.cat([others, images])
        participants = select(config, round)  # 6
        tensors = {"images": images.cpu(), "labels": labels.cpu()}
        request = Request(
            round,
            tensors,
            participants=participants,
            trainees=trainees(config, participants),
        )
        return request, answered

    def prepare(self, config: GsWganConfig, state: State) -> Request:
        """Draws the fakes of the warm start: round 0, which nobody answers.

        A warm start at the clients themselves needs no fakes, so its request has black
        images. Otherwise the averaged generator draws them if other phases came before,
        and the untrained generator if not.

        Privacy: post-processing of DP output, if there is any yet.
        """
        z, labels = _latents(config, 0)
        side = config.image_size
        images = torch.zeros(len(labels), config.image_channels, side, side)
        if config.is_warm_start_public:
            drawn_by = state
            if not config.rounds_before:
                drawn_by = self.state(config)
            with torch.no_grad():
                images = drawn_by.ema(z, labels).cpu()
        tensors = {"images": images, "labels": labels.cpu()}
        return Request(0, tensors, participants=(), trainees=EVERYONE)

    def finish(
        self,
        config: GsWganConfig,
        state: State,
        pending: Images,
        released: Released,
    ) -> None:
        """Updates the generator from the nodes' releases (Algorithm 2, line 11).

        The average is over the *planned* participants, whoever answered, and over B.

        Privacy: post-processing of DP output.
        """
        # 11: 1/m times the sum over participants.
        num_gradients = config.clients_per_round * config.batch_size  # m * B
        average = released.total / num_gradients
        # The generator draws pixels, so the gradient goes back to them.
        if config.dct_size is not None:
            average = from_dct(average, config.image_size)
        # 11: theta_G <- Adam(theta_G, average * J_theta G(z)).
        adam = cast(Optimizer, state.parts["adam"])
        jacobian_step(adam, pending, average.to(pending))
        models.update_ema(state.ema, state.generator, state.round, config.ema_decay)
        state.round += 1

    # -------------------------------------------------------------- client

    def check(self, config: GsWganConfig, request: Request) -> None:
        """Refuses fakes and labels outside their ranges."""
        images = request.tensors["images"]
        labels = request.tensors["labels"]
        # NaN compares false, so it is refused, too.
        is_in_range = (images >= 0) & (images <= 1)
        if not bool(is_in_range.all()):
            raise UserError("fakes outside [0, 1]: refused")
        # A label is an index, and one outside would fail deep within torch.
        is_class = (labels >= 0) & (labels < config.num_classes)
        if not bool(is_class.all()):
            raise UserError(f"labels outside [0, {config.num_classes}): refused")

    def train(
        self,
        config: GsWganConfig,
        clients: Sequence[OneClient],
        request: Request,
    ) -> None:
        """Takes n_dis steps of each client's discriminator, on its records (29-31).

        Privacy: reads private data; output private.
        """
        if config.discriminator_training == "frozen":
            return
        # 28: the node has the fakes of line 8, never the generator.
        fakes, labels = _fakes_of(config, request)
        own_labels = request.tensors["labels"].numpy()
        one_set = None
        if config.fakes_per_round is not None:
            # All steps draw their fakes from the one set that was sent.
            one_set = own_labels
        nets, chunk = _stack_of(clients)
        draws = Draws(config, clients, "data", request.round, one_set)
        train_discriminators(config, nets, chunk, draws, fakes, labels)

    def answer(
        self,
        config: GsWganConfig,
        client: OneClient,
        request: Request,
    ) -> Tensor:
        """Returns the gradient by each of the last B fakes, in the run's basis (9, 32).

        A client takes n_dis steps and answers once; it never answers n_dis times.

        Privacy: reads private data; output private.
        """
        return self.answer_stacked(config, [client], request)[0]

    def answer_stacked(
        self,
        config: GsWganConfig,
        clients: Sequence[OneClient],
        request: Request,
    ) -> Tensor:
        """Returns the same for several clients, whose discriminators share nothing.

        Privacy: reads private data; output private.
        """
        fakes, labels = _fakes_of(config, request)
        nets, chunk = _stack_of(clients)
        answered = slice(-config.batch_size, None)
        grads = nets.query(chunk, fakes[answered], labels[answered])
        # Before clipping, because the frequencies that are cut off here get no noise.
        if config.dct_size is not None:
            grads = to_dct(grads, config.dct_size)
        return grads

    def stack_size(self, config: GsWganConfig) -> int:
        """Returns how many discriminators train and answer in one batched call."""
        return chunk_size(config.stacked)


METHOD = GsWgan()


def _fakes_of(config: GsWganConfig, request: Request) -> tuple[Images, Labels]:
    images = request.tensors["images"]
    labels = request.tensors["labels"]
    return images.to(config.device), labels.to(config.device)


def _stack_of(clients: Sequence[OneClient]) -> tuple[Discriminators, Positions]:
    """Returns the stack of these clients' discriminators, and their places in it."""
    nets = clients[0].discriminators
    if nets is None:
        raise UserError(f"client {clients[0].number}: it has no discriminator yet")
    positions = [client.position for client in clients]
    places = torch.tensor(positions, dtype=torch.int64)
    return nets, places.to(nets.steps.device)


def _latents(config: GsWganConfig, round: int) -> tuple[Latents, Labels]:
    """Draws z ~ P_z (F, latent_dim) and labels (F,) of a round; 0 is the warm start."""
    rng = stream(config.seed, "latent", round)
    # Both come from one stream, so z is always drawn first.
    z = models.sample_latents(config, rng, config.fakes_sent)
    labels = models.sample_labels(config, rng, config.fakes_sent)
    return z.to(config.device), labels.to(config.device)


def jacobian_step(
    optimizer: Optimizer,
    images: Images,
    image_grads: ImageGrads,
) -> None:
    """Multiplies image gradients by the generator's Jacobian and takes one step.

    Privacy: post-processing of DP output.

    Args:
        optimizer: the optimizer of the generator that drew `images`.
        images: G(z, labels) with its graph, shape (B, C, S, S).
        image_grads: same shape.

    Source: GS-WGAN, Eq. 6: the chain rule d L / d theta = d L / d G(z) * J_theta G(z).
    """
    optimizer.zero_grad(set_to_none=True)
    images.backward(image_grads)
    optimizer.step()
