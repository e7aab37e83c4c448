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
from fedgs.config.run_config import LowFrequencyConfig, MomentConfig
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
        mean: the classes' mean low frequencies, shape (classes, d).
        axes: coordinates are frequencies @ axes, shape (d, p); the last may be 0.
        back: from coordinates to frequencies, shape (p, d).
        centre: the class means in coordinates, shape (classes, p).
        covariance: in coordinates, shape (classes, p, p).
        is_public: whether it started from public images, and so without noise.
        middle: where classes are cut into parts, in coordinates, shape (classes, p).
        split: across what, shape (classes, p, SPLITS); None: classes have no parts.
        shares: the share of each part in its class, shape (classes, PARTS_OF_CLASS).
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
    config: MomentConfig,
    releases: Sequence[MeanFeatures],
    start: Model | None = None,
) -> Model:
    """Returns what the releases of moments so far say; before the first, the start.

    Args:
        config: the configuration of a phase of moments.
        releases: what the phases before have released.
        start: the model of public images, where there are any.
    """
    if start is None:
        model = blank(config)
    else:
        model = start
    for release in releases:
        update = _UPDATES.get(release.method)
        if update is not None:
            target = release.target.double()
            noise_std = release.noise_std.double()
            model = update(model, target, noise_std)
        if release.shares is not None:
            weights = release.shares.double().view(-1, PARTS_OF_CLASS)
            of_class = weights.sum(1, keepdim=True)
            model = replace(model, shares=weights / of_class)
    return model


def in_parts(model: Model) -> Model:
    """Cuts each class' Gaussian at its mean across its longest axes in pixels.

    The halves of a Gaussian along an axis of length s have means sqrt(2 / pi) s away
    from its mean, and the variance (1 - 2 / pi) s^2. So all parts are expected to have
    one share and one covariance.
    """
    # In pixels a coordinate has the length of its row of `back`: rows are orthogonal.
    scale = model.back.norm(dim=1)
    in_pixels = scale[:, None] * model.covariance * scale
    variances, axes = torch.linalg.eigh(in_pixels)  # upwards: the last are the longest
    variances = variances[:, -SPLITS:].clamp_min(1e-9)
    lengths = variances[:, None].sqrt()  # s
    axes = axes[:, :, -SPLITS:]
    # An axis may point either way: the same one wherever a run is resumed.
    largest = axes.abs().argmax(1, keepdim=True)
    directions = axes.gather(1, largest).sign()
    axes = axes * directions
    split = scale[:, None] * axes  # coordinates to lengths along these axes
    # How far a coordinate moves with one length along each axis.
    moved = model.covariance @ split / lengths
    # On which side of each axis a part lies; the first bit of its number is lowest.
    every_side = list(itertools.product((-1.0, 1.0), repeat=SPLITS))
    sides = torch.tensor(every_side).flip(1).double()
    sides = sides * math.sqrt(2 / math.pi)
    shift = torch.einsum("ks,cps->ckp", sides, moved)
    shift = shift.flatten(0, 1)  # a row for each part of each class
    mean = model.mean.repeat_interleave(PARTS_OF_CLASS, 0)
    centre = model.centre.repeat_interleave(PARTS_OF_CLASS, 0)
    covariance = model.covariance - 2 / math.pi * moved @ moved.mT
    return replace(
        model,
        mean=mean + shift @ model.back,
        centre=centre + shift,
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
    parts: list[Tensor] = []
    for part in images.split(IMAGES_AT_ONCE):
        parts.append(low_frequencies(part / 255, size))
    low = torch.cat(parts).double()
    overall = low.mean(0)
    total = torch.cov(low.T, correction=0)
    variances, axes = _longest(total, count)
    # How long an axis is of other images, a short one above all, is only roughly this.
    variances = variances + variances.mean()
    scale = variances.clamp_min(1e-9).sqrt()
    to_axes = axes / scale
    back = (axes * scale).T
    coordinates = low @ to_axes
    centres: list[Tensor] = []
    covariances: list[Tensor] = []
    for label in range(config.num_classes):
        own = coordinates[labels == label]
        centres.append(own.mean(0))
        covariances.append(torch.cov(own.T, correction=0))
    centre = torch.stack(centres)
    covariance = torch.stack(covariances)
    return Model(
        mean=_alike_beside_the_axes(overall, centre, to_axes, back),
        axes=to_axes,
        back=back,
        centre=centre,
        covariance=covariance.view(-1, count, count),
        is_public=True,
    )


def _longest(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the largest eigenvalues of a covariance, and their axes as columns."""
    variances, axes = torch.linalg.eigh(matrix)  # upwards
    return variances.flip(0)[:count], axes.flip(1)[:, :count]


def _alike_beside_the_axes(
    overall: Tensor,
    centre: Tensor,
    to_axes: Tensor,
    back: Tensor,
) -> Tensor:
    """Returns means of classes that differ along the axes alone: (classes, d).

    Beside the axes there is more noise than signal.
    """
    along = centre - overall @ to_axes
    return overall + along @ back


def blank(config: LowFrequencyConfig) -> Model:
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
        num_axes = model.axes.shape[1]
        rows, columns, scale = pairs(num_axes)
        second = model.covariance[:, rows, columns] * scale
        # Products of two coordinates come last.
        centre[:, -len(rows) :] = QUADRATIC_WEIGHT * second
    return centre


def _with_scatter(model: Model, target: Tensor, noise: Tensor) -> Model:
    """Finds the longest axes of all images that stand out of the scatter's noise."""
    size, most = model.axes.shape
    within = symmetric(target, size)[0]
    overall = model.mean.mean(0)
    # All images vary within their classes, and as the classes lie apart.
    apart = model.mean - overall
    between = apart.T @ apart / len(apart)
    variances, axes = _longest(within + between, most)
    # Noise of standard deviation s / sqrt(2) off the diagonal has eigenvalues up to
    # this radius r, and moves an eigenvalue l that is larger to l + r^2 / 4 l.
    radius = float(noise) * math.sqrt(2 * size)
    least = max(STANDS_OUT * radius, 1e-9)
    num_standing_out = int((variances > least).sum())
    count = max(1, num_standing_out)
    variances = variances[:count]
    axes = axes[:, :count]
    # Takes back what noise added to them: solves l + r^2 / 4 l for l.
    root = (variances**2 - radius**2).clamp_min(0).sqrt()
    variances = (variances + root) / 2
    scale = variances.clamp_min(1e-9).sqrt()
    to_axes = torch.zeros_like(model.axes)
    back = torch.zeros_like(model.back)
    to_axes[:, :count] = axes / scale
    back[:count] = (axes * scale).T
    centre = model.mean @ to_axes
    # So far, all classes have the covariance within them.
    covariance = to_axes.T @ within @ to_axes
    return Model(
        mean=_alike_beside_the_axes(overall, centre, to_axes, back),
        axes=to_axes,
        back=back,
        centre=centre,
        covariance=covariance.expand(len(centre), -1, -1),
    )


def _with_moments(model: Model, target: Tensor, noise: Tensor) -> Model:
    """Adds what was left of each class' mean and covariance, as far as believed."""
    axes = model.axes.shape[1]
    is_used = (model.axes != 0).any(0)  # the other axes have noise only
    count = int(is_used.sum())
    # Targets are the means of r and QUADRATIC_WEIGHT r r^T, with r = x - centre.
    first = target[:, :count]
    second = symmetric(target[:, axes:], axes) / QUADRATIC_WEIGHT
    variance = noise.square()[:, None]  # of the noise in a mean of r
    shift = torch.zeros_like(model.centre)
    shift[:, :count] = first * belief(first, variance)
    # What the covariances so far do not explain of the second moments.
    of_shift = shift[:, :, None] * shift[:, None, :]
    left = second - of_shift - model.covariance
    left = left[:, :count, :count]
    # The classes' common part has less noise than what makes them differ.
    common = left.mean(0)
    own = left - common
    variance = variance / QUADRATIC_WEIGHT**2 / 2  # of the noise in a product
    if model.is_public:  # else it also takes away the noise of the scatter before
        of_mean = variance.mean(0) / len(left)
        common = common * belief(common, of_mean)
    # Covariances of short axes are mostly noise: each band of axes has its own belief.
    of_axis = torch.arange(count) // BELIEVED_ALIKE
    band = torch.maximum(of_axis[:, None], of_axis[None, :])
    num_bands = int(band.max()) + 1
    for number in range(num_bands):
        is_in_band = band == number
        values = own[:, is_in_band]
        own[:, is_in_band] = values * belief(values, variance)
    covariance = model.covariance.clone()
    covariance[:, :count, :count] += common + own
    return replace(
        model,
        mean=model.mean + shift @ model.back,
        centre=model.centre + shift,
        covariance=covariance,
    )


def belief(values: Tensor, variance: Tensor) -> float:
    """Returns the share of the values' square that is not noise, in [0, 1]."""
    total = float(values.square().sum())
    expected = float(variance.expand_as(values).sum())
    if total == 0:
        return 0.0
    return max(0.0, 1 - expected / total)


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


def in_pixels(config: LowFrequencyConfig, frequencies: Tensor) -> Tensor:
    """Returns images (..., C, S, S) of low frequencies (..., d), not cut off."""
    block = (config.image_channels, config.moment_size, config.moment_size)
    return from_dct(frequencies.unflatten(-1, block), config.image_size)


@torch.no_grad()
def set_generator(
    config: LowFrequencyConfig,
    model: Model,
    *generators: Generator,
) -> None:
    """Gives generators the model's Gaussians: mean + factor^T z in pixels.

    Variances that noise made negative are 0.
    """
    variances, axes = torch.linalg.eigh(model.covariance)  # (classes, p), columns
    lengths = variances.clamp_min(0).sqrt()
    scaled = axes * lengths[:, None, :]
    factor = scaled.mT @ model.back
    if config.num_parts > 1:
        factor[:, 0] = 0  # of the shortest axis: z_0 chooses the part
    # Before parts are known, all parts of a class are alike.
    copies = 1
    if model.shares is None:
        copies = config.num_parts
    mean = model.mean.repeat_interleave(copies, 0)
    factor = factor.repeat_interleave(copies, 0)
    mean = in_pixels(config, mean)
    factor = in_pixels(config, factor)
    for generator in generators:
        if not isinstance(generator, GeneratorGaussian):
            raise TypeError("moments determine no other generator")
        generator.mean.copy_(mean)
        generator.factor.copy_(factor)
        if generator.shares is not None and model.shares is not None:
            generator.shares.copy_(model.shares)
