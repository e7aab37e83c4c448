"""Staged embeddings: which features each stage releases, and the terms of each release.

A run begins with one embedding round per stage; all other rounds are gradient rounds.
What both have in common is `Terms`: what a round's release is agreed to be.

>>> read_stages("random,classifier", "0.75,0.25", "500,100")[1]
Stage(kind='classifier', weight=0.25, steps=100)

This module imports no tensor library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from fedgs.config.fields import shortened
from fedgs.errors import UserError

# Of an image in each network of a stage: the feature that its number is released by. No
# client's embedding is shorter, so none is shorter than a clip bound of at most this.
MASS = 2.0
RANDOM_CHANNELS = 32  # of each convolution of a random network
CLASSIFIER_FEATURES = 128  # hidden units of a classifier
DEFAULT_STEPS = 400
MOST_STAGES = 100
MOST_FEATURES = 1_000_000  # of one image
MOST_CHARACTERS = 10_000  # of a text that may come from a hostile server


class Sizes(Protocol):
    """What the number of features depends on; settings of a run."""

    @property
    def image_size(self) -> int:
        """Side of the square images."""
        ...

    @property
    def latent_dim(self) -> int:
        """Length of z, and the most axes of a Gaussian."""
        ...

    @property
    def moment_features(self) -> int:
        """Number of low frequencies of one image."""
        ...


# The kinds whose releases determine a Gaussian for each class, in the order that they
# need; the generator is fitted to all others by gradients.
MOMENT_KINDS = ("means", "scatter", "moments", "parts")
SPLITS = 2  # a class is cut across its longest axes, so many of them
PARTS = 2**SPLITS  # of a class then


def _random_features(config: Sizes) -> int:
    second, third = config.image_size // 4, config.image_size // 8
    return RANDOM_CHANNELS * (second**2 + third**2)


def _pairs(size: int) -> int:
    return size * (size + 1) // 2


# Number of features that each kind of network has. The networks themselves are in
# `fedgs.gan.features`.
FEATURES: dict[str, Callable[[Sizes], int]] = {
    "means": lambda config: config.moment_features,
    "scatter": lambda config: _pairs(config.moment_features),
    "moments": lambda config: config.latent_dim + _pairs(config.latent_dim),
    "parts": lambda config: config.latent_dim + _pairs(config.latent_dim),
    "random": _random_features,
    "classifier": lambda config: CLASSIFIER_FEATURES,
}


@dataclass(frozen=True)
class Stage:
    """One stage as the settings describe it.

    Attributes:
        kind: of its feature networks, a key of `FEATURES`.
        weight: w, its mu^2 in units of one fake's gradient release; above 0.
        steps: of the generator, after its release; at least 1, but 0 of moments, which
            determine a Gaussian at once.
    """

    kind: str
    weight: float
    steps: int

    @property
    def is_moments(self) -> bool:
        """Whether its release is of moments, which determine a Gaussian."""
        return self.kind in MOMENT_KINDS

    def num_groups(self, num_classes: int) -> int:
        """Groups of images that its release has the mean features of."""
        return {"scatter": 1, "parts": PARTS * num_classes}.get(self.kind, num_classes)


@dataclass(frozen=True)
class Terms:
    """What one round's release is agreed to be.

    Attributes:
        release: "gradient", "embedding" or "update".
        noise_multiplier: one node's noise_std / (2 * clip_bound), at least 0.
        clip_bound: C > 0, the largest L2 norm of what one client adds to one sample.
        shape: (B, channels, rows, columns): B gradients in their basis, or, with B = 1,
            one embedding by network, class and feature, or one update as a row.
    """

    release: str
    noise_multiplier: float
    clip_bound: float
    shape: tuple[int, int, int, int]

    @property
    def batch_size(self) -> int:
        """B, the samples of one release, each clipped by itself."""
        return self.shape[0]

    @property
    def noise_std(self) -> float:
        """Standard deviation of one node's noise, 2 * clip_bound * noise_multiplier."""
        return 2.0 * self.clip_bound * self.noise_multiplier


@lru_cache(maxsize=16)
def read_stages(
    stages: str | None, weights: str | None, steps: str | None
) -> tuple[Stage, ...]:
    """Returns the stages of a run; settings as in `RunConfig`, empty when unset.

    Raises:
        UserError: unknown kinds, other numbers than there are stages, or numbers out of
            range.
    """
    if stages is None:
        return ()
    kinds = [kind.strip() for kind in stages[: MOST_CHARACTERS + 1].split(",")]
    if not set(kinds) <= FEATURES.keys() or len(kinds) > MOST_STAGES:
        raise UserError(
            f"stages = {shortened(stages)!r}: give --stages at most {MOST_STAGES} of "
            f"{', '.join(FEATURES)}, comma-separated"
        )
    count = len(kinds)
    of_weight = [1 / count] * count
    if weights is not None:
        of_weight = _numbers("stage_weights", weights, count)
    of_steps = [float(DEFAULT_STEPS)] * count
    if steps is not None:
        of_steps = _numbers("stage_steps", steps, count)
        if not all(number.is_integer() for number in of_steps):
            raise UserError(
                f"stage_steps = {shortened(steps)!r}: give --stage-steps whole numbers"
            )
    columns = zip(kinds, of_weight, map(int, of_steps), strict=True)
    return tuple(
        Stage(kind, weight, 0 if kind in MOMENT_KINDS else number)
        for kind, weight, number in columns
    )


def _numbers(name: str, text: str, count: int) -> list[float]:
    """Returns so many numbers from 1e-6 to 1e6, comma-separated."""
    try:
        numbers = [float(part) for part in text[: MOST_CHARACTERS + 1].split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(1e-6 <= n <= 1e6 for n in numbers):
        raise UserError(
            f"{name} = {shortened(text)!r}: give --{name.replace('_', '-')} one "
            f"positive number for each of the {count} stages, comma-separated"
        )
    return numbers
