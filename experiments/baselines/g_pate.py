"""G-PATE: discriminators on disjoint data vote on how each fake should change.

Each teacher is a discriminator of one client's images. In each step every teacher takes
one step, then for every one of B fakes x_j of the generator:

    1. teacher: g = -d BCE(D(x_j), 1) / d x_j, which makes x_j more real
    2. public:  P_j of N(0, 1/k), k x pixels, drawn anew; the vote for each of the k
       coordinates is the bin of clip(P_j g, +-c), of equal bins
    3. private: confident GNMax of the votes of each coordinate: if max + N(0, s_t^2) is
       at least a share of the teachers, the bin at argmax(counts + N(0, s_a^2)), else 0
    4. public:  G takes one Adam step towards x_j + P_j^T (middles of the bins)

What is private leaves through 3 alone. One client casts one vote of each query, so the
guarantee is of users; `experiments.baselines.pate_accounting` has the bounds.

Differs from the reference:
    - Networks: this project's generator and discriminator, without batch statistics, so
      that a teacher's gradient of one fake is a function of that fake alone.
    - z is uniform on [0, 1), not on (-1, 1): a shift and a scale of the first layer.
    - One teacher for each client, where the reference cuts 60,000 images into 2,000.
    - The number of steps is fixed in advance, and noise is made for it; the reference
      goes on until a data-dependent epsilon is spent, which is itself private.

Source: Long, Wang, Yang et al., "G-PATE: scalable differentially private data generator
via private aggregation of teacher discriminators", NeurIPS 2021; reference
https://github.com/AI-secure/G-PATE, `model.py` and `rdp_utils.py`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from experiments.baselines import pate_accounting as accounting
from experiments.baselines.baseline import AuditScores, Facts, StepEvent
from experiments.baselines.teachers import (
    PATE_RECIPE,
    PateBaseline,
    TeacherSettings,
    trial_scores,
    valid_guarantees,
)
from fedgs.config.fields import NOISE, Scalar, again, entry, flag
from fedgs.gan.models import build_discriminator
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.accountant import Statement
from fedgs.privacy.gaussian import epsilon_from_mu, mu_from_epsilon
from fedgs.randomness import stream
from fedgs.shapes import ImageGrads, Images, Labels

GNMAX_VOTES = "confident-gnmax"
REPLACED = math.sqrt(2)  # how far a histogram moves where one vote changes its bin


@dataclass(frozen=True)
class GPateSettings(TeacherSettings):
    """What G-PATE is asked for; defaults are the reference's for MNIST at epsilon 10.

    Raises:
        UserError: a value outside its range.
    """

    steps: int = again(TeacherSettings, "steps", 200)
    teacher_batch_size: int = again(TeacherSettings, "teacher_batch_size", 30)
    projection_dim: int = entry(10, at_least=1)  # coordinates of each vote
    num_bins: int = entry(10, at_least=2)  # of each coordinate
    # Coordinates are clipped to +- this before they are binned.
    gradient_bound: float = entry(1e-4, above=0)
    vote_threshold: float = entry(0.5, at_least=0, at_most=1)  # share of the top bin
    threshold_ratio: float = entry(6.0, above=0)  # noise of threshold / of a count
    answer_noise: float = flag(
        100.0,
        "Standard deviation of the noise on a count of votes. A target epsilon "
        "sets it.",
        **NOISE,
    )


class GPate(PateBaseline[GPateSettings]):
    """The baseline `g-pate`."""

    name = "g-pate"
    title = "G-PATE: teachers vote on gradients of fakes"
    unit = "user"
    Settings = GPateSettings
    recipe: ClassVar[Mapping[str, Scalar]] = {
        **PATE_RECIPE,
        "discriminator_dim": 8,
        "spectral_norm": False,
    }

    build_teacher = staticmethod(build_discriminator)

    def step(self, index: int) -> dict[str, Any]:
        """Trains the teachers, asks them once, and moves the generator."""
        settings = self.settings
        self.train_teachers(index)
        rng = stream(self.seed, "latent", index)
        z, labels = self.latents(rng, settings.batch_size)
        images = self.net(z, labels)
        # Teachers judge the pixels; only the last step needs the generator's graph.
        fakes = images.detach()
        projections = self._projections(index, fakes)
        votes = self._votes(fakes, labels, projections)
        counts = votes.reshape(-1, settings.num_bins)
        coordinates, event = self._release(index, counts)
        middles = torch.from_numpy(coordinates).to(fakes)
        middles = middles.view(len(fakes), 1, -1)
        # Back from k coordinates to pixels: the same projection, transposed.
        improvement = middles @ projections
        wanted = fakes + improvement.view_as(fakes)
        loss = (images - wanted).square().sum()
        self.move_generator(loss)
        return event

    def _projections(self, index: int, images: Images) -> Tensor:
        """Draws P of each fake, (B, k, pixels), entries N(0, 1/k): public."""
        dim = self.settings.projection_dim
        # From the public seed: teachers and generator need the same one.
        rng = stream(self.seed, "projection", index)
        num_pixels = images[0].numel()
        shape = (len(images), dim, num_pixels)
        drawn = rng.standard_normal(shape, dtype=np.float32)
        scaled = drawn / math.sqrt(dim)
        return torch.from_numpy(scaled).to(images.device)

    def _votes(
        self,
        images: Images,
        labels: Labels,
        projections: Tensor,
    ) -> npt.NDArray[np.int64]:
        """Returns the histograms of all teachers' votes, (B, k, bins): private."""
        settings = self.settings
        counts: list[Tensor] = []
        for grads in self.ask(_improvement, images, labels):
            projected = torch.einsum("nbp,bkp->nbk", grads.flatten(2), projections)
            # One vote of each teacher for every coordinate of every fake.
            bins = bin_of(projected, settings.gradient_bound, settings.num_bins)
            counts.append(F.one_hot(bins, settings.num_bins).sum(0))
        return torch.stack(counts).sum(0).cpu().numpy()

    def _release(
        self,
        index: int,
        counts: npt.NDArray[np.int64],
    ) -> tuple[npt.NDArray[np.float64], dict[str, Any]]:
        """Returns the answered coordinates, 0 where there is none, and their event."""
        settings = self.settings
        config = self.config
        threshold = settings.vote_threshold * config.num_clients
        threshold_std = settings.threshold_ratio * settings.answer_noise
        answer_std = settings.answer_noise
        source = NoiseStream(config.noise_seed, 0, index)
        # A number for the threshold of each query, and one for each of its bins.
        shape = (len(counts), 1 + settings.num_bins)
        noise = source.normal(shape, 1.0)
        is_answered, winner = aggregate(
            counts,
            noise,
            threshold=threshold,
            threshold_std=threshold_std,
            answer_std=answer_std,
        )
        bound = settings.gradient_bound
        width = 2 * bound / settings.num_bins
        middles = (winner + 0.5) * width - bound
        event: dict[str, Any] = {
            "kind": GNMAX_VOTES,
            "num_queries": len(counts),
            "num_answered": int(is_answered.sum()),
            "threshold": threshold,
            "threshold_std": threshold_std,
            "answer_std": answer_std,
        }
        if settings.reveal_votes and settings.answer_noise:
            rdp = accounting.confident_gnmax_rdp(
                counts, is_answered, threshold, threshold_std, answer_std
            )
            event["rdp_of_votes"] = rdp.tolist()
        return np.where(is_answered, middles, 0.0), event

    @classmethod
    def calibrated(
        cls,
        settings: GPateSettings,
        facts: Facts,
        target_epsilon: float,
        delta: float,
    ) -> GPateSettings:
        """Returns settings with the noise for replace-one of a user's data set."""
        noise = smallest_noise(settings, REPLACED, target_epsilon, delta)
        return dataclasses.replace(settings, answer_noise=noise)

    @classmethod
    def guarantees(
        cls,
        settings: GPateSettings,
        facts: Facts,
        events: Sequence[StepEvent],
        delta: float,
    ) -> list[Statement]:
        """Returns what the queries so far cost."""
        lines = valid_guarantees(
            replaced=_epsilon(events, REPLACED, delta),
            left_out=_epsilon(events, 1.0, delta),
            delta=delta,
            theorem="GDP of every query, answered or not",
            is_revealed=any("rdp_of_votes" in event for event in events),
        )
        return [*lines, _as_published(events, delta)]

    @classmethod
    def audit_scores(
        cls,
        settings: GPateSettings,
        facts: Facts,
        event: StepEvent,
        relation: str,
        trials: int,
    ) -> AuditScores:
        """Returns scores of the aggregation with and without a vote that decides.

        Teachers are split between two bins, and the unit's teacher votes for one of
        them in every query (inside), for the other (replace-one) or not at all
        (zero-out). The score is the difference of how often either bin was answered.
        A long release is tried less often than asked; see `trial_scores`.
        """
        queries = int(event["num_queries"])
        bins = settings.num_bins
        voters = facts.num_clients - 1
        inside = np.zeros((queries, bins), np.int64)
        inside[:, 0] = voters // 2
        inside[:, 1] = voters - voters // 2
        outside = inside.copy()
        inside[:, 0] += 1
        if relation == "replace-one":
            outside[:, 1] += 1

        def score(votes: npt.NDArray[np.int64]) -> float:
            noise = NoiseStream(None, 0, 0).normal((queries, 1 + bins), 1.0)
            is_answered, winner = aggregate(
                votes,
                noise,
                threshold=event["threshold"],
                threshold_std=event["threshold_std"],
                answer_std=event["answer_std"],
            )
            sign = np.select([winner == 0, winner == 1], [1, -1], 0)
            return float((sign * is_answered).sum())

        numbers = queries * (1 + bins)
        of_outside = trial_scores(trials, numbers, partial(score, outside))
        of_inside = trial_scores(trials, numbers, partial(score, inside))
        return of_outside, of_inside


def _improvement(teacher: Any, images: Images, labels: Labels) -> ImageGrads:
    """Returns -d (mean BCE of "these are real") / d image, (B, C, S, S)."""

    def loss(fakes: Images) -> Tensor:
        return F.softplus(-teacher(fakes, labels)).mean()

    return -grad(loss)(images)


def bin_of(values: Tensor, bound: float, num_bins: int) -> Tensor:
    """Returns the bin of each value among equal bins of [-bound, bound], int64.

    Values beyond the ends are in the outermost bins; what is no number votes for 0.
    """
    # Every teacher has to vote: a vote that is missing would tell of its data.
    values = torch.nan_to_num(values, nan=0.0).clamp(-bound, bound)
    bins_per_unit = num_bins / (2 * bound)
    places = (values + bound) * bins_per_unit
    # The upper end itself belongs to the last bin.
    return places.long().clamp(max=num_bins - 1)


def aggregate(
    counts: npt.NDArray[np.int64],
    noise: npt.NDArray[np.float64],
    threshold: float,
    threshold_std: float,
    answer_std: float,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Answers queries by confident GNMax.

    Privacy: releases mu-GDP output; event: one `GNMAX_VOTES` of `len(counts)` queries.

    Args:
        counts: votes, shape (queries, bins).
        noise: standard normal, shape (queries, 1 + bins).
        threshold: votes that the top bin needs, before noise.
        threshold_std: s_t, in votes.
        answer_std: s_a, in votes.

    Returns:
        Which queries are answered, and the winning bin of each; that of a query that
        is not answered must not be used.

    Source: Papernot et al., ICLR 2018, Algorithm 1.
    """
    noisy_highest = counts.max(axis=1) + threshold_std * noise[:, 0]
    is_answered = noisy_highest >= threshold
    # With other noise than the threshold's: the two together are accounted for.
    noisy_counts = counts + answer_std * noise[:, 1:]
    return is_answered, noisy_counts.argmax(axis=1)


def smallest_noise(
    settings: GPateSettings,
    distance: float,
    epsilon: float,
    delta: float,
) -> float:
    """Returns the noise of a count with which all queries stay within epsilon.

    Args:
        settings: the run's settings.
        distance: how far one teacher moves a histogram: `REPLACED`, or 1 where it casts
            no vote.
        epsilon: above 0.
        delta: above 0 and below 1.
    """
    queries = settings.steps * settings.batch_size * settings.projection_dim
    ratio = settings.threshold_ratio
    # With noise of 1 on a count; mu falls as the noise grows.
    mu = accounting.confident_gnmax_mu(queries, ratio, 1.0, distance)
    return mu / mu_from_epsilon(epsilon, delta)


def _epsilon(events: Sequence[StepEvent], distance: float, delta: float) -> float:
    # Independent Gaussian releases compose as the squares of their mu.
    square = sum(_mu(event, distance) ** 2 for event in events)
    return epsilon_from_mu(math.sqrt(square), delta)


def _mu(event: StepEvent, distance: float) -> float:
    return accounting.confident_gnmax_mu(
        num_queries=event["num_queries"],
        threshold_std=event["threshold_std"],
        answer_std=event["answer_std"],
        distance=distance,
    )


def _as_published(events: Sequence[StepEvent], delta: float) -> Statement:
    """Returns the reference's accountant, by the votes where they were revealed."""
    orders = accounting.GNMAX_ORDERS
    total = np.zeros_like(orders)
    theorem = "RDP orders 1.1 to 199"
    for event in events:
        if "rdp_of_votes" in event:
            total = total + np.array(event["rdp_of_votes"])
            theorem = "RDP of the votes, data-dependent: itself private"
        else:
            # RDP of mu-GDP: order mu^2 / 2.
            total = total + orders * _mu(event, REPLACED) ** 2 / 2
    epsilon = 0.0  # of nothing; the conversion charges log(1/delta) for it
    if events:
        epsilon = accounting.rdp_epsilon(total, delta)
    return Statement(
        label="as published",
        unit="user",
        relation="replace-one",
        epsilon=epsilon,
        delta=delta,
        theorem=theorem,
    )
