"""Moments: class means and covariances of images, and the generator of them.

    means     the class means of the images' low frequencies
    scatter   the covariance around them, one for all classes
    moments   the mean and covariance of every class, along the longest axes of the two
              before; again: what the model so far does not explain of them
    parts     the same of four parts of every class, cut across its two longest axes

The model is a function of the releases alone, and of public images where there are any:
one Gaussian for each class or part, in the coordinates of the longest axes, in which
all images together have variance 1. Nothing in it is tuned on private data: how many
axes stand out of the noise, and how far a released moment is believed, follow from the
noise, which is public.

Privacy: post-processing of DP output.

Source: docs/privacy.md, "Embedding releases". A Gaussian for each class: Fisher 1936
(one covariance), quadratic discriminant analysis (one for each class). Belief by the
positive part of 1 - noise / size: James, Stein 1961. Eigenvalues of a matrix with
symmetric Gaussian noise: Benaych-Georges, Nadakuditi 2011.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgs.config.feature_settings import SPLITS
from fedgs.config.run_config import MomentConfig
from fedgs.config.settings import PARTS_OF_CLASS
from fedgs.gan.features import (
    IMAGES_AT_ONCE,
    QUADRATIC_WEIGHT,
    MeanFeatures,
    low_frequencies,
    pairs,
)
from fedgs.gan.models import Generator, GeneratorGaussian
from fedgs.mechanism.sanitizer import from_dct
from fedgs.shapes import Labels, TensorDict

STANDS_OUT = 1.2  # radii of the noise's eigenvalues that an axis must exceed
BELIEVED_ALIKE = 5  # neighbouring axes whose covariances are believed to one degree


@dataclass(frozen=True)
class Model:
    """One Gaussian for each class, in d low frequencies and p coordinates; float64.

    After `in_parts`, mean, centre and covariance have a row for each part of a class.

    Attributes:
        mean: of the classes' low frequencies, shape (classes, d).
        axes: coordinates are frequencies @ axes, shape (d, p); the last may be 0.
        back: from coordinates to frequencies, shape (p, d).
        centre: the class means in coordinates, shape (classes, p).
        covariance: in coordinates, shape (classes, p, p).
        is_public: whether it started from public images, and so without noise.
        middle: where classes are cut into parts, in coordinates, shape (classes, p).
        split: across what, shape (classes, p, SPLITS); None: classes have no parts.
        shares: of each part in its class, shape (classes, PARTS_OF_CLASS).
    """

    mean: Tensor
    axes: Tensor
    back: Tensor
    centre: Tensor
    covariance: Tensor
    is_public: bool = False
    middle: Tensor | None = None
    split: Tensor | None = None
    shares: Tensor | None = None

    @property
    def network(self) -> TensorDict:
        """What clients compute the features of a phase of moments with, float32."""
        tensors = {"mean": self.mean, "axes": self.axes, "centre": self.centre}
        if self.middle is not None and self.split is not None:
            del tensors["mean"]
            tensors |= {"middle": self.middle, "split": self.split}
        return {name: value.float().contiguous() for name, value in tensors.items()}


def model_of(
    config: MomentConfig, releases: Sequence[MeanFeatures], start: Model | None = None
) -> Model:
    """Returns what the releases of moments so far say; before the first, the start.

    Args:
        config: of a phase of moments.
        releases: of the phases before.
        start: the model of public images, where there are any.
    """
    if start is None:
        model = _blank(config)
    else:
        model = start
    for release in releases:
        update = _UPDATES.get(release.method)
        if update is not None:
            model = update(model, release.target.double(), release.noise_std.double())
        if release.shares is not None:
            of_class = release.shares.double().view(-1, PARTS_OF_CLASS)
            model = replace(model, shares=of_class / of_class.sum(1, keepdim=True))
    return model


def in_parts(model: Model) -> Model:
    """Cuts each class' Gaussian at its mean across its longest axes in pixels.

    The halves of a Gaussian along an axis of length s have means sqrt(2 / pi) s away
    from its mean, and the variance (1 - 2 / pi) s^2. So all parts are expected to have
    one share and one covariance.
    """
    scale = model.back.norm(dim=1)  # the rows of `back` are orthogonal
    lengths, axes = torch.linalg.eigh(scale[:, None] * model.covariance * scale)
    lengths = lengths[:, -SPLITS:].clamp_min(1e-9)
    axes = axes[:, :, -SPLITS:]
    # An axis may point either way: the same one wherever a run is resumed.
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    split = scale[:, None] * axes  # coordinates to lengths along these axes
    moved = model.covariance @ split / lengths[:, None].sqrt()  # by one length each
    sides = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=SPLITS)))
    sides = sides.flip(1).double() * math.sqrt(2 / math.pi)  # the first bit is lowest
    shift = torch.einsum("ks,cps->ckp", sides, moved).flatten(0, 1)
    covariance = model.covariance - 2 / math.pi * moved @ moved.mT
    return replace(
        model,
        mean=model.mean.repeat_interleave(PARTS_OF_CLASS, 0) + shift @ model.back,
        centre=model.centre.repeat_interleave(PARTS_OF_CLASS, 0) + shift,
        covariance=covariance.repeat_interleave(PARTS_OF_CLASS, 0),
        middle=model.centre,
        split=split,
    )


def start_of(config: MomentConfig, images: Tensor, labels: Labels) -> Model:
    """Returns the model of public images, along their `latent_dim` longest axes.

    Privacy: public, as the images are.

    Args:
        config: with `latent_dim` at most `moment_features`.
        images: shape (n, C, S, S), uint8.
        labels: shape (n,), every class at least once.
    """
    size = config.moment_features
    count = config.latent_dim
    parts = images.split(IMAGES_AT_ONCE)
    low = torch.cat([low_frequencies(part / 255, size) for part in parts]).double()
    overall = low.mean(0)
    lengths, axes = torch.linalg.eigh(torch.cov(low.T, correction=0))
    # eigh sorts upwards; the longest are wanted.
    lengths = lengths.flip(0)[:count]
    axes = axes.flip(1)[:, :count]
    # How long an axis is of other images, a short one above all, is only roughly this.
    scale = (lengths + lengths.mean()).clamp_min(1e-9).sqrt()
    to_axes = axes / scale
    back = (axes * scale).T
    along = [(low @ to_axes)[labels == c] for c in range(config.num_classes)]
    centre = torch.stack([own.mean(0) for own in along])
    covariance = torch.stack([torch.cov(own.T, correction=0) for own in along])
    # Beside the axes, all classes are alike.
    mean = overall + (centre - overall @ to_axes) @ back
    covariance = covariance.view(-1, count, count)
    return Model(mean, to_axes, back, centre, covariance, is_public=True)


def _blank(config: MomentConfig) -> Model:
    """Returns the model that knows nothing."""
    classes = config.num_classes
    size = config.moment_features
    axes = config.latent_dim

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64)

    return Model(
        mean=zeros(classes, size),
        axes=zeros(size, axes),
        back=zeros(axes, size),
        centre=zeros(classes, axes),
        covariance=zeros(classes, axes, axes),
    )


def expected(model: Model, kind: str, groups: int, features: int) -> Tensor:
    """Returns the mean features that the model expects, (groups, features), float32.

    They are 0 where the features themselves start from the model's means.
    """
    centre = torch.zeros(groups, features)
    if kind in ("moments", "parts"):
        rows, columns, scale = pairs(model.axes.shape[1])
        second = model.covariance[:, rows, columns] * scale
        centre[:, -len(rows) :] = QUADRATIC_WEIGHT * second
    return centre


def _with_scatter(model: Model, target: Tensor, noise: Tensor) -> Model:
    """Finds the longest axes of all images that stand out of the scatter's noise."""
    size, most = model.axes.shape
    within = symmetric(target, size)[0]
    overall = model.mean.mean(0)
    apart = model.mean - overall
    lengths, axes = torch.linalg.eigh(within + apart.T @ apart / len(apart))
    lengths = lengths.flip(0)[:most]
    axes = axes.flip(1)[:, :most]
    # Noise of standard deviation s / sqrt(2) off the diagonal has eigenvalues up to
    # this radius r, and moves an eigenvalue l that is larger to l + r^2 / 4 l.
    radius = float(noise) * math.sqrt(2 * size)
    count = max(1, int((lengths > max(STANDS_OUT * radius, 1e-9)).sum()))
    lengths = lengths[:count]
    axes = axes[:, :count]
    lengths = (lengths + (lengths**2 - radius**2).clamp_min(0).sqrt()) / 2
    scale = lengths.clamp_min(1e-9).sqrt()
    to_axes = torch.zeros_like(model.axes)
    back = torch.zeros_like(model.back)
    to_axes[:, :count] = axes / scale
    back[:count] = (axes * scale).T
    centre = model.mean @ to_axes
    # Beside the axes, where there is more noise than signal, all classes are alike.
    mean = overall + (centre - overall @ to_axes) @ back
    covariance = (to_axes.T @ within @ to_axes).expand(len(mean), -1, -1)
    return Model(mean, to_axes, back, centre, covariance)


def _with_moments(model: Model, target: Tensor, noise: Tensor) -> Model:
    """Adds what was left of each class' mean and covariance, as far as believed."""
    axes = model.axes.shape[1]
    # Targets are the means of r and QUADRATIC_WEIGHT r r^T, with r = x - centre.
    count = int((model.axes != 0).any(0).sum())  # the others have noise only
    shift = torch.zeros_like(model.centre)
    left = target[:, :count]
    variance = noise.square()[:, None]
    shift[:, :count] = left * belief(left, variance)
    second = symmetric(target[:, axes:], axes) / QUADRATIC_WEIGHT
    second = second - shift[:, :, None] * shift[:, None, :] - model.covariance
    second = second[:, :count, :count]
    # The classes' common part has less noise than what makes them differ.
    common = second.mean(0)
    own = second - common
    variance = variance / QUADRATIC_WEIGHT**2 / 2
    if model.is_public:  # else it also takes away the noise of the scatter before
        common = common * belief(common, variance.mean(0) / len(second))
    band = torch.arange(count) // BELIEVED_ALIKE
    band = torch.maximum(band[:, None], band[None, :])
    for number in range(int(band.max()) + 1):
        own[:, band == number] *= belief(own[:, band == number], variance)
    covariance = model.covariance.clone()
    covariance[:, :count, :count] += common + own
    mean = model.mean + shift @ model.back
    return replace(model, mean=mean, centre=model.centre + shift, covariance=covariance)


def belief(values: Tensor, variance: Tensor) -> float:
    """Returns the share of the values' square that is not noise, in [0, 1]."""
    total = float(values.square().sum())
    expected = float(variance.expand_as(values).sum())
    if total:
        return max(0.0, 1 - expected / total)
    return 0.0


_UPDATES: dict[str, Callable[[Model, Tensor, Tensor], Model]] = {
    "means": lambda model, target, noise: replace(model, mean=model.mean + target),
    "scatter": _with_scatter,
    "moments": _with_moments,
    "parts": lambda model, target, noise: _with_moments(in_parts(model), target, noise),
}


def symmetric(values: Tensor, size: int) -> Tensor:
    """Returns the symmetric matrices (n, size, size) that `features.products` made.

    >>> symmetric(torch.tensor([[1.0, 2.0**1.5, 4.0]]), 2).round().tolist()
    [[[1.0, 2.0], [2.0, 4.0]]]
    """
    rows, columns, scale = pairs(size)
    matrices = values.new_zeros(len(values), size, size)
    matrices[:, rows, columns] = values / scale.to(values)
    matrices[:, columns, rows] = matrices[:, rows, columns]
    return matrices


@torch.no_grad()
def set_generator(config: MomentConfig, model: Model, *generators: Generator) -> None:
    """Gives generators the model's Gaussians: mean + factor^T z in pixels.

    Variances that noise made negative are 0.
    """
    variances, axes = torch.linalg.eigh(model.covariance)  # (classes, p), columns
    factor = (axes * variances.clamp_min(0).sqrt()[:, None, :]).mT @ model.back
    if config.num_parts > 1:
        factor[:, 0] = 0  # of the shortest axis: z_0 chooses the part
    block = (config.image_channels, config.moment_size, config.moment_size)
    # Before parts are known
    if model.shares is None:
        copies = config.num_parts
    else:
        copies = 1
    rows = model.mean.repeat_interleave(copies, 0), factor.repeat_interleave(copies, 0)
    mean, factor = (from_dct(r.unflatten(-1, block), config.image_size) for r in rows)
    for generator in generators:
        if not isinstance(generator, GeneratorGaussian):
            raise TypeError("moments determine no other generator")
        generator.mean.copy_(mean)
        generator.factor.copy_(factor)
        if generator.shares is not None and model.shares is not None:
            generator.shares.copy_(model.shares)
