"""Staged embeddings: which features each stage releases, and the terms of each release.

A run begins with one embedding round per stage; all other rounds are gradient rounds.
What both have in common is `Terms`: what a round's release is agreed to be.

>>> read_stages("means,scatter", "0.75,0.25")[1]
Stage(kind='scatter', weight=0.25)

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
MOST_STAGES = 100
MOST_FEATURES = 1_000_000  # of one image
MOST_CHARACTERS = 10_000  # of a text that may come from a hostile server


class Sizes(Protocol):
    """What the number of features depends on; settings of a run."""

    @property
    def latent_dim(self) -> int:
        """Length of z, and the most axes of a Gaussian."""
        ...

    @property
    def moment_features(self) -> int:
        """Number of low frequencies of one image."""
        ...


SPLITS = 2  # a class is cut across its longest axes, so many of them
PARTS = 2**SPLITS  # of a class then


def _pairs(size: int) -> int:
    return size * (size + 1) // 2


# Number of features of each kind, in the order in which they determine a Gaussian for
# each class. What computes them is in `fedgs.gan.features`.
FEATURES: dict[str, Callable[[Sizes], int]] = {
    "means": lambda config: config.moment_features,
    "scatter": lambda config: _pairs(config.moment_features),
    "moments": lambda config: config.latent_dim + _pairs(config.latent_dim),
    "parts": lambda config: config.latent_dim + _pairs(config.latent_dim),
}


@dataclass(frozen=True)
class Stage:
    """One stage as the settings describe it.

    Attributes:
        kind: of its features, a key of `FEATURES`.
        weight: w, its mu^2 in units of one fake's gradient release; above 0.
    """

    kind: str
    weight: float

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
def read_stages(stages: str | None, weights: str | None) -> tuple[Stage, ...]:
    """Returns the stages of a run; settings as in `RunConfig`, empty when unset.

    Raises:
        UserError: unknown kinds, other weights than there are stages, or weights out of
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
        try:
            parts = weights[: MOST_CHARACTERS + 1].split(",")
            of_weight = [float(part) for part in parts]
        except ValueError:
            of_weight = []
    if len(of_weight) != count or not all(1e-6 <= w <= 1e6 for w in of_weight):
        raise UserError(
            f"stage_weights = {shortened(weights or '')!r}: give --stage-weights one "
            f"positive number for each of the {count} stages, comma-separated"
        )
    return tuple(map(Stage, kinds, of_weight))
