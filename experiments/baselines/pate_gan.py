"""PATE-GAN: teachers label fakes, a student learns from the labels, G from the student.

Each teacher is a network that tells its own clients' images from fakes. In each step

    1. teachers: n_T steps on own images and fakes, never released
    2. n_S times, on B fresh fakes: the label of a fake is 1 if
       n_1 + Lap(1/lambda) > n_0 + Lap(1/lambda), n_1 teachers calling it real; the
       student takes a step on fakes and labels
    3. G takes a step on the student's judgement of fresh fakes: -log S(G(z))

What is private leaves through 2 alone, as bits. One client casts one vote, which moves
both counts by 1: each bit is 2 lambda-DP for users, whatever the votes.

Differs from the reference:
    - Its Algorithm 1, not its code: teachers are networks that go on learning, each on
      its own part (in the code all get the last part, and are refitted logistic
      regressions); noise on both counts, of scale 1 / lambda as the accountant says
      (in the code one draw, of scale lambda).
    - Networks: this project's generator; Adam for RMSProp; labels of classes are drawn
      uniformly and shown to all networks, where the reference generates them as one
      more column. Teachers and student are the reference's student, one hidden layer.
    - One teacher for each client, where the reference has 10; so they are narrower.
    - The number of steps is fixed in advance, and noise is made for it; the reference
      goes on until a data-dependent epsilon is spent, which is itself private.

Source: Jordon, Yoon, van der Schaar, "PATE-GAN: generating synthetic data with
differential privacy guarantees", ICLR 2019, Algorithm 1; reference
https://github.com/vanderschaarlab/mlforhealthlabpub, `alg/pategan/pate_gan.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.baselines import pate_accounting as accounting
from experiments.baselines.baseline import AuditScores, Facts, StepEvent, descend
from experiments.baselines.teachers import (
    PATE_RECIPE,
    PateBaseline,
    TeacherSettings,
    trial_scores,
    valid_guarantees,
)
from fedgs.config.fields import Scalar, again, entry, flag
from fedgs.config.run_config import NetworkConfig
from fedgs.gan.models import build
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.accountant import Statement
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import Images, Labels, Scores

LAPLACE_VOTES = "laplace-votes"
HIDDEN_DIM = 64  # of teachers and student; the paper has as many as pixels
# What --reveal-votes writes, and whether the theorem's condition is asked for.
REVEALED = MappingProxyType({"moments_of_code": False, "moments_of_votes": True})
_HOW_REVEALED = MappingProxyType(
    {
        "moments_of_code": "moments of the votes, without the theorem's condition",
        "moments_of_votes": "moments of the votes, where the theorem holds",
    }
)


@dataclass(frozen=True)
class PateGanSettings(TeacherSettings):
    """What PATE-GAN is asked for; B, n_S and lambda are the reference's.

    Raises:
        UserError: a value outside its range.
    """

    teacher_steps: int = again(TeacherSettings, "teacher_steps", 5)  # n_T
    student_steps: int = entry(1, at_least=1)  # n_S, of the student per step
    inverse_noise: float = flag(
        1.0,
        "Inverse scale (lambda) of the Laplace noise on counts. A target epsilon sets"
        " it.",
        at_least=1e-100,
        at_most=1e100,
    )


class Judge(nn.Module):
    """Teacher and student: one hidden layer of ReLU on the image and its label."""

    def __init__(self, config: NetworkConfig) -> None:
        """Makes two linear layers."""
        super().__init__()
        self.num_labels = config.num_classes
        pixels = config.image_channels * config.image_size**2
        self.hidden = nn.Linear(pixels + self.num_labels, HIDDEN_DIM)
        self.output = nn.Linear(HIDDEN_DIM, 1)

    def forward(self, images: Images, labels: Labels) -> Scores:
        """Returns the logit of "real" of each image, shape (B,)."""
        inputs = images.flatten(1)
        one_hot = torch.eye(self.num_labels, device=inputs.device)[labels]
        inputs = torch.cat([inputs, one_hot], dim=1)
        hidden = F.relu(self.hidden(inputs))
        return self.output(hidden).squeeze(1)


def _is_real(teacher: Any, images: Images, labels: Labels) -> Tensor:
    """Returns a teacher's vote on each image, 0 or 1."""
    is_real = teacher(images, labels) > 0
    return is_real.long()


class PateGan(PateBaseline[PateGanSettings]):
    """The baseline `pate-gan`."""

    name = "pate-gan"
    title = "PATE-GAN: teachers label fakes for a student"
    unit = "user"
    Settings = PateGanSettings
    recipe: ClassVar[Mapping[str, Scalar]] = PATE_RECIPE

    build_teacher = staticmethod(partial(build, Judge))

    def build(self) -> None:
        """Builds teachers and student."""
        super().build()
        seed = derived_seed(self.seed, "student")
        self.student = build(Judge, self.config, seed)
        self.student.to(self.config.device)
        self.student_adam = self.new_adam(self.student)
        self.parts["student"] = self.student
        self.parts["student_adam"] = self.student_adam

    def step(self, index: int) -> dict[str, Any]:
        """Trains the teachers, the student on their labels, and the generator."""
        self.train_teachers(index)
        count = self.settings.batch_size
        steps = self.settings.student_steps
        first = index * steps  # no two steps of a run share a stream
        asked: list[npt.NDArray[np.int64]] = []
        for step in range(first, first + steps):
            rng = stream(self.seed, "labelled", step)
            images, labels = self.fakes(rng, count)
            ones = self._votes(images, labels)
            asked.append(ones)
            # The only thing that leaves the teachers, and it is noisy.
            released = self._release(step, ones)
            answers = torch.from_numpy(released).to(images)
            scores = self.student(images, labels)
            loss = F.binary_cross_entropy_with_logits(scores, answers)
            descend(self.student_adam, loss)
        rng = stream(self.seed, "latent", index)
        # The student is DP output, so that what it says of any image is too.
        z, labels = self.latents(rng, count)
        images = self.net(z, labels)
        judged = self.student(images, labels)
        loss = F.softplus(-judged).mean()
        self.move_generator(loss)
        return self._event(np.concatenate(asked))

    def _votes(self, images: Images, labels: Labels) -> npt.NDArray[np.int64]:
        """Returns n_1 of each fake, how many teachers call it real: private."""
        counts: list[Tensor] = []
        for answers in self.ask(_is_real, images, labels):
            counts.append(answers.sum(0))
        return torch.stack(counts).sum(0).cpu().numpy()

    def _release(
        self,
        step: int,
        ones: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float64]:
        """Returns the noisy labels of fakes, 0 or 1."""
        config = self.config
        source = NoiseStream(config.noise_seed, 0, step)
        # Four normal numbers make one of Laplace, on either count.
        noise = laplace(source.normal((2, 4, len(ones)), 1.0))
        zeros = config.num_clients - ones
        found = label(zeros, ones, noise, 1 / self.settings.inverse_noise)
        return found.astype(np.float64)

    def _event(self, ones: npt.NDArray[np.int64]) -> dict[str, Any]:
        settings = self.settings
        # Sums over queries: a label by itself costs no line.
        event: dict[str, Any] = {
            "kind": LAPLACE_VOTES,
            "num_queries": len(ones),
            "noise_scale": 1 / settings.inverse_noise,
        }
        if settings.reveal_votes:
            # n_0 and n_1 add up to the number of teachers.
            gaps = np.abs(self.config.num_clients - 2 * ones)
            for name, needs_condition in REVEALED.items():
                moments = accounting.laplace_moments(
                    gaps, settings.inverse_noise, needs_condition
                )
                event[name] = moments.tolist()
        return event

    @classmethod
    def calibrated(
        cls,
        settings: PateGanSettings,
        facts: Facts,
        target_epsilon: float,
        delta: float,
    ) -> PateGanSettings:
        """Returns settings with the noise for replace-one of a user's data set."""
        inverse = largest_inverse_noise(settings, 2.0, target_epsilon, delta)
        return dataclasses.replace(settings, inverse_noise=inverse)

    @classmethod
    def guarantees(
        cls,
        settings: PateGanSettings,
        facts: Facts,
        events: Sequence[StepEvent],
        delta: float,
    ) -> list[Statement]:
        """Returns what the labels so far cost."""
        lines = valid_guarantees(
            replaced=_epsilon(events, 2.0, delta),
            left_out=_epsilon(events, 1.0, delta),
            delta=delta,
            theorem="optimal composition of pure DP",
            is_revealed=any("moments_of_code" in event for event in events),
        )
        return lines + _as_published(events, delta)

    @classmethod
    def audit_scores(
        cls,
        settings: PateGanSettings,
        facts: Facts,
        event: StepEvent,
        relation: str,
        trials: int,
    ) -> AuditScores:
        """Returns how many fakes were labelled real, where one vote decides.

        The other teachers are split evenly, the unit's teacher calls every fake real
        (inside), not real (replace-one) or does not vote (zero-out). A long release is
        tried less often than asked; see `trial_scores`.
        """
        queries = int(event["num_queries"])
        scale = event["noise_scale"]
        half = (facts.num_clients - 1) // 2

        def scores(zeros: int, ones: int) -> npt.NDArray[np.float64]:
            against = np.full(queries, zeros)
            for_real = np.full(queries, ones)

            def labelled_real() -> float:
                normal = NoiseStream(None, 0, 0).normal((2, 4, queries), 1.0)
                is_real = label(against, for_real, laplace(normal), scale)
                return float(is_real.sum())

            return trial_scores(trials, 8 * queries, labelled_real)

        against = half
        if relation == "replace-one":  # the unit's teacher votes, for the other label
            against += 1
        outside = scores(against, half)
        inside = scores(half, half + 1)
        return outside, inside


def largest_inverse_noise(
    settings: PateGanSettings,
    moved: float,
    epsilon: float,
    delta: float,
) -> float:
    """Returns the lambda with which all labels stay within epsilon.

    Args:
        settings: the run's settings.
        moved: by how much one client moves both counts: 2, or 1 where it casts no vote.
        epsilon: above 0.
        delta: above 0 and below 1.
    """
    queries = settings.steps * settings.student_steps * settings.batch_size
    # A query is `moved` times lambda, because each vote moves a count by 1.
    per_query = accounting.pure_per_query(epsilon, queries, delta)
    return per_query / moved


def laplace(normal: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns Laplace noise of scale 1 from normal noise: n1 n2 + n3 n4.

    Args:
        normal: standard normal, shape (m, 4, ...).

    Returns:
        Shape (m, ...).

    Source: Kotz, Kozubowski, Podgorski, "The Laplace distribution", 2001, section 2.2.
    """
    first = normal[:, 0] * normal[:, 1]
    second = normal[:, 2] * normal[:, 3]
    return first + second


def label(
    zeros: npt.NDArray[np.int64],
    ones: npt.NDArray[np.int64],
    noise: npt.NDArray[np.float64],
    scale: float,
) -> npt.NDArray[np.bool_]:
    """Returns which fakes are labelled real: the larger of both noisy counts.

    Privacy: releases pure DP output, 2 / scale for one vote that changes; event: one
    `LAPLACE_VOTES` of `len(ones)` queries.

    Args:
        zeros: teachers that call a fake not real, shape (B,).
        ones: teachers that call it real, shape (B,).
        noise: Laplace noise of scale 1 on zeros and ones, shape (2, B).
        scale: the scale of the noise, 1 / lambda, in votes.

    Source: Jordon et al., Definition 5 (PATE mechanism).
    """
    noisy_zeros = zeros + scale * noise[0]
    noisy_ones = ones + scale * noise[1]
    return noisy_ones > noisy_zeros


def _epsilon(events: Sequence[StepEvent], moved: float, delta: float) -> float:
    """Returns epsilon where one client moves both counts by `moved` in all."""
    if not events:
        return 0.0
    scales = {event["noise_scale"] for event in events}
    # Composition is optimal for queries of one epsilon alone.
    if len(scales) > 1:
        raise ValueError("the releases of a run have one noise scale")
    queries = sum(event["num_queries"] for event in events)
    epsilon_of_query = moved / scales.pop()
    return accounting.pure_epsilon(epsilon_of_query, queries, delta)


def _as_published(events: Sequence[StepEvent], delta: float) -> list[Statement]:
    """Returns the reference's accountant, by the votes where they were revealed."""
    sums: dict[str, npt.NDArray[np.float64]] = {}  # moments, by how they were found
    is_revealed = bool(events)
    for event in events:
        if not REVEALED.keys() <= event.keys():
            is_revealed = False
    if is_revealed:
        for name, how in _HOW_REVEALED.items():
            moments = np.sum([event[name] for event in events], axis=0)
            sums[f"{how}: data-dependent, itself private"] = moments
    else:
        total = np.zeros(accounting.NUM_MOMENTS)
        tie = np.zeros(1)  # for which the data-independent branch is taken
        for event in events:
            of_query = accounting.laplace_moments(
                tie,
                inverse_scale=1 / event["noise_scale"],
                needs_condition=True,
            )
            total = total + event["num_queries"] * of_query
        sums["moments accountant, data-independent branch"] = total
    lines: list[Statement] = []
    for theorem, moments in sums.items():
        epsilon = 0.0  # of nothing; the accountant charges log(1/delta) for it
        if events:
            epsilon = accounting.moments_epsilon(moments, delta)
        line = Statement(
            label="as published",
            unit="user",
            relation="replace-one",
            epsilon=epsilon,
            delta=delta,
            theorem=theorem,
        )
        lines.append(line)
    return lines
