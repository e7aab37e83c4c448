"""Staged embeddings: which features each stage releases, and the terms of each release.

A run begins with one embedding round per stage; all other rounds are gradient rounds.
What both have in common is `Terms`: what a round's release is agreed to be.

>>> read_stages("means:0.75,scatter:0.25")[1]
Stage(kind='scatter', weight=0.25)

This module imports no tensor library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from fedgs.config.fields import coerce_fields, entry, shortened
from fedgs.errors import UserError, wrap_error

# Of an image in each network of a stage: the feature that its number is released by. No
# client's embedding is shorter, so none is shorter than a clip bound of at most this.
MASS = 2.0
MOST_STAGES = 100
WEIGHTED = "give --stages a positive number for each, as means:0.5,scatter:0.5"
MOST_FEATURES = 1_000_000  # of one image
MOST_CHARACTERS = 10_000  # of a text that may come from a hostile server
# Layers of the networks that make features (`fedgs.gan.public_networks`), four of each:
# means over 7 x 7 fields of channels, squares over 4 x 4, means over 4 x 4, a last
# layer; and products of coordinates along the longest axes of the last one.
LAYERS = {"imagenet": (24 * 7**2, 24 * 4**2, 40 * 4**2, 40 * 2**2)}
LAYERS |= dict.fromkeys(("random", "fonts"), (32 * 7**2, 32 * 4**2, 64 * 4**2, 128))
TRUNK_AXES = 64
PRETRAINED = "pretrained-features"  # of networks that have seen public images
OF_TRUNKS = {"features": ["random"], PRETRAINED: ["fonts", "imagenet"]}
SPLITS = 2  # a class is cut across its longest axes, so many of them
PARTS = 2**SPLITS  # of a class then


def _pairs(size: int) -> int:
    return size * (size + 1) // 2


def _moments(coordinates: int, axes: int) -> int:
    return axes + _pairs(axes)


def layers_of(kind: str) -> tuple[int, ...]:
    """Returns the features of each layer of a kind's trunks, four for each of them."""
    return tuple(size for trunk in OF_TRUNKS[kind] for size in LAYERS[trunk])


def _of_layers(kind: str, coordinates: int, axes: int) -> int:
    return sum(layers_of(kind)) + len(OF_TRUNKS[kind]) * _pairs(TRUNK_AXES)


# Number of features of each kind by `moment_features` and `latent_dim`, in the order in
# which they determine a Gaussian for each class, and a network behind it:
# `fedgs.gan.features` computes them.
FEATURES: dict[str, Callable[[int, int], int]] = {
    "means": lambda coordinates, axes: coordinates,
    "scatter": lambda coordinates, axes: _pairs(coordinates),
    "moments": _moments,
    "parts": _moments,
    **{kind: partial(_of_layers, kind) for kind in OF_TRUNKS},
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

    release: str = entry(choices=("gradient", "embedding", "update"))
    noise_multiplier: float = entry(at_least=0)
    clip_bound: float = entry(above=0)
    shape: tuple[int, int, int, int] = entry()

    def __post_init__(self) -> None:
        """Refuses terms that bound nothing, whichever method they are of."""
        coerce_fields(self)
        sides = self.shape
        is_whole = all(type(side) is int and side > 0 for side in sides)
        if type(sides) is not tuple or len(sides) != 4 or not is_whole:
            remedy = "give (B, channels, rows, columns), whole numbers above 0"
            raise UserError(f"terms: shape = {sides!r}: {remedy}")

    @property
    def batch_size(self) -> int:
        """B, the samples of one release, each clipped by itself."""
        return self.shape[0]

    @property
    def noise_std(self) -> float:
        """Standard deviation of one node's noise, 2 * clip_bound * noise_multiplier."""
        return 2.0 * self.clip_bound * self.noise_multiplier


@lru_cache(maxsize=16)
def read_stages(stages: str | None) -> tuple[Stage, ...]:
    """Returns the stages of a run; the setting as in `RunConfig`, empty when unset.

    Raises:
        UserError: unknown kinds, too many, or weights of some only or out of range.
    """
    if stages is None:
        return ()
    parts = [part.partition(":") for part in stages[: MOST_CHARACTERS + 1].split(",")]
    kinds = [kind.strip() for kind, _, _ in parts]
    if not set(kinds) <= FEATURES.keys() or len(kinds) > MOST_STAGES:
        raise UserError(
            f"stages = {shortened(stages)!r}: give --stages at most {MOST_STAGES} of "
            f"{', '.join(FEATURES)}, comma-separated"
        )
    weights = [1 / len(kinds)] * len(kinds)
    if any(colon for _, colon, _ in parts):
        with wrap_error(ValueError, f"stages = {shortened(stages)!r}", WEIGHTED):
            weights = [float(weight) for _, _, weight in parts]
            if not all(1e-6 <= weight <= 1e6 for weight in weights):
                raise ValueError("a weight that is not from 1e-6 to 1e6")
    return tuple(map(Stage, kinds, weights))


def written(stages: Sequence[Stage]) -> str | None:
    """Returns the setting that `read_stages` reads as these stages."""
    return ",".join(f"{stage.kind}:{stage.weight!r}" for stage in stages) or None
