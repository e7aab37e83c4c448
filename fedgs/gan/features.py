"""Features of images by public networks, which each client evaluates on its own.

    means        low frequencies of the image: the coefficients of a small DCT block
    group-means  the same, each with a weight that is the same for all data
    scatter      products of two of them, after the image's class mean is taken off
    moments      the same image along given axes, and products of two coordinates
    parts        the same, by the part of its class that the image lies in
    features     layers of a random trunk, and products of coordinates of the last one
    pretrained-features  the same of one that knows fonts and one that knows ImageNet

The server makes a network for each phase: `fedgs.gan.moments` the first four,
`fedgs.gan.refinement` the others. A network is a dictionary of tensors; its
architecture is its method, and the run's settings. So it travels as tensors of shapes
that both sides know, never as code. `mean_features` makes means of features out of the
noisy sum of what clients answer.

Privacy: a network depends on earlier releases only.

Source: docs/privacy.md, "Embedding releases".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgs.config.feature_settings import (
    MASS,
    OF_TRUNKS,
    SPLITS,
    TRUNK_AXES,
    frequency_weight,
    layers_of,
)
from fedgs.config.plugins import GROUP_MEANS
from fedgs.config.run_config import FeatureConfig, GroupMeansConfig, MomentConfig
from fedgs.config.settings import PARTS_OF_CLASS
from fedgs.gan.public_networks import trunk_features
from fedgs.gan.torchvision_network import TorchvisionNetwork
from fedgs.mechanism.sanitizer import to_dct
from fedgs.shapes import Images, Labels, TensorDict

QUADRATIC_WEIGHT = 0.5  # of products of coordinates beside the coordinates themselves
# Of a trunk's features: so that they, and not MASS, are most of an embedding's length.
FEATURE_SCALE = 2.5
IMAGES_AT_ONCE = 100
LEAST_SHARE = 0.2  # of a group, of what it has where all are alike
LEAST_WEIGHT = 1e-6  # of all clients, of the most that they can have

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class MeanFeatures:
    """What the server keeps of one phase's release; post-processing of DP output.

    Attributes:
        method: the phase's method.
        network: its tensors.
        target: the mean features of each group of images, a class, a part of it or all
            of them: shape (groups, features), float32.
        noise_std: standard deviation of the noise in each group's features, shape
            (groups,), float32.
        shares: of parts: how many images each has, 1 on average, shape (groups,).
    """

    method: str
    network: TensorDict
    target: Tensor
    noise_std: Tensor
    shares: Tensor | None = None

    def tensors(self) -> TensorDict:
        """Returns all of it but the method's name, as a checkpoint keeps it."""
        flat = {f"network.{name}": value for name, value in self.network.items()}
        flat |= {"target": self.target, "noise_std": self.noise_std}
        if self.shares is not None:
            flat["shares"] = self.shares
        return flat

    @classmethod
    def of(cls, method: str, tensors: TensorDict) -> Self:
        """Returns what `tensors` returned."""
        prefix = "network."
        network = {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        return cls(
            method=method,
            network=network,
            target=tensors["target"],
            noise_std=tensors["noise_std"],
            shares=tensors.get("shares"),
        )


class Kind(NamedTuple):
    """One kind of feature network.

    Attributes:
        shapes: name -> shape of its float32 tensors.
        features: (tensors, images (n, C, S, S), groups) -> features (n, features).
        groups: (tensors, images, labels) -> the group of each image, its class at most.
    """

    shapes: Callable[[Any], Shapes]
    features: Callable[[TensorDict, Images, Labels], Tensor]
    groups: Callable[[TensorDict, Images, Labels], Labels] = lambda net, x, y: y


def _model_shapes(config: MomentConfig) -> Shapes:
    classes = config.num_classes
    size = config.moment_features
    axes = config.latent_dim
    return {"mean": (classes, size), "axes": (size, axes), "centre": (classes, axes)}


def _part_shapes(config: MomentConfig) -> Shapes:
    classes = config.num_classes
    size = config.moment_features
    axes = config.latent_dim
    of_classes = {"middle": (classes, axes), "split": (classes, axes, SPLITS)}
    return {
        "axes": (size, axes),
        "centre": (classes * PARTS_OF_CLASS, axes),
        **of_classes,
    }


def _weight_shapes(config: GroupMeansConfig) -> Shapes:
    return {"weights": (config.moment_features,)}


def frequency_weights(config: GroupMeansConfig) -> Tensor:
    """Returns `frequency_weight` of each feature of group means, (features,), float32.

    Privacy: public.
    """
    sides = range(config.moment_size)
    block = [frequency_weight(row, column) for row in sides for column in sides]
    return torch.tensor(block).repeat(config.image_channels)


def _trunk_shapes(kind: str, config: FeatureConfig) -> Shapes:
    sizes = layers_of(kind)
    size = (sum(sizes),)
    return {"mean": size, "scale": size, "axes": (sum(sizes[3::4]), TRUNK_AXES)}


def low_frequencies(images: Images, count: int) -> Tensor:
    """Returns low DCT coefficients of images, (n, count), from all channels."""
    return to_dct(images, math.isqrt(count // images.shape[1])).flatten(1)


def _parts(net: TensorDict, images: Images, labels: Labels) -> Labels:
    """Returns 4 y + (on which side of the class' middle, across each of two axes)."""
    axes = net["axes"]
    along = low_frequencies(images, len(axes)) @ axes
    residual = along - net["middle"][labels]
    split = net["split"][labels]
    across = torch.einsum("np,nps->ns", residual, split)
    sides = across > 0
    bits = 2 ** torch.arange(SPLITS, device=labels.device)
    part = (sides * bits).sum(1)
    return labels * PARTS_OF_CLASS + part


def _mean_features(net: TensorDict, images: Images, labels: Labels) -> Tensor:
    mean = net["mean"]
    return low_frequencies(images, mean.shape[1]) - mean[labels]


def _group_mean_features(net: TensorDict, images: Images, labels: Labels) -> Tensor:
    return low_frequencies(images, len(net["weights"])) * net["weights"]


def _scatter_features(net: TensorDict, images: Images, labels: Labels) -> Tensor:
    return products(_mean_features(net, images, labels))


def _moment_features(net: TensorDict, images: Images, groups: Labels) -> Tensor:
    along = low_frequencies(images, len(net["axes"])) @ net["axes"]
    residual = along - net["centre"][groups]
    return torch.cat([residual, QUADRATIC_WEIGHT * products(residual)], dim=1)


def _layers(
    kind: str,
    net: TensorDict,
    images: Images,
    labels: Labels,
    chosen: TorchvisionNetwork | None = None,
) -> Tensor:
    """Returns what `mean_layers` does, of each image by itself."""
    return mean_layers(kind, net, images, len(images), chosen)


def mean_layers(
    kind: str,
    net: TensorDict,
    images: Images,
    groups: int,
    chosen: TorchvisionNetwork | None = None,
) -> Tensor:
    """Returns each group's means of the trunks' layers, and of products of the last.

    Privacy: no server chooses the trunks, which each client has from elsewhere.

    Args:
        kind: the kind of features, one of `OF_TRUNKS`.
        net: how they are scaled.
        images: shape (n, C, S, S): image i is of the group i modulo their number.
        groups: as many as divide n.
        chosen: as of `trunk_features`.

    Returns:
        Shape (groups, features).
    """
    sizes = layers_of(kind)
    found = trunk_features(kind, images, chosen)
    by_group = found.unflatten(0, (-1, groups))
    means = by_group.mean(0)
    scaled = (means - net["mean"]) * net["scale"]
    parts = [scaled]
    # The last of each trunk's four layers also has products.
    lasts = found.split(sizes, dim=1)[3::4]
    centres = net["mean"].split(sizes)[3::4]
    of_trunks = net["axes"].split(sizes[3::4])
    rows, columns, scale = pairs(TRUNK_AXES)
    for last, centre, axes in zip(lasts, centres, of_trunks, strict=True):
        deep = (last - centre) @ axes
        # No longer than a usual image's: where the generator's samples, which scale
        # them, are all alike, products would be most of every embedding's length.
        squares = deep.square().sum(1, keepdim=True)
        shortened = deep / squares.clamp_min(TRUNK_AXES)
        left = deep.unflatten(0, (-1, groups))
        right = shortened.unflatten(0, (-1, groups))
        sums = torch.einsum("ngi,ngj->gij", left, right)
        matrices = sums / len(left)
        upper = matrices[:, rows, columns]
        parts.append(upper * scale.to(upper))
    of_trunk = FEATURE_SCALE / math.sqrt(len(lasts))
    return of_trunk * torch.cat(parts, dim=1)


def products(vectors: Tensor) -> Tensor:
    """Returns the products of two coordinates, a vector of norm ||v||^2.

    Args:
        vectors: v, shape (n, d).

    Returns:
        Shape (n, d (d + 1) / 2): the upper triangle of v v^T, off the diagonal times
        sqrt(2).
    """
    rows, columns, scale = pairs(vectors.shape[1])
    return vectors[:, rows] * vectors[:, columns] * scale.to(vectors)


def pairs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows, columns and scales of the products of `size` coordinates."""
    rows, columns = torch.triu_indices(size, size)
    return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2))


KINDS = {
    "means": Kind(_model_shapes, _mean_features),
    GROUP_MEANS: Kind(_weight_shapes, _group_mean_features),
    "scatter": Kind(_model_shapes, _scatter_features),
    "moments": Kind(_model_shapes, _moment_features),
    "parts": Kind(_part_shapes, _moment_features, _parts),
    **{
        kind: Kind(partial(_trunk_shapes, kind), partial(_layers, kind))
        for kind in OF_TRUNKS
    },
}


def group_sums(
    kind: str,
    net: TensorDict,
    images: Images,
    labels: Labels,
    num_groups: int,
    chosen: TorchvisionNetwork | None = None,
) -> Tensor:
    """Returns each group's size and sum of features, (num_groups, 1 + f), float64.

    Privacy: of private images, reads private data; output private.

    Args:
        kind: the network's kind, a key of `KINDS`.
        net: its tensors, where the images are.
        images: shape (n, C, S, S), float32 in [0, 1].
        labels: shape (n,).
        num_groups: all of the kind, also those without an image; 1: of all images.
        chosen: as of `trunk_features`.
    """
    features_of = KINDS[kind].features
    if chosen is not None:
        features_of = partial(_layers, kind, chosen=chosen)
    groups_of = KINDS[kind].groups
    total = torch.zeros((), dtype=torch.float64, device=images.device)
    for rows in torch.arange(len(labels)).split(IMAGES_AT_ONCE):
        some = images[rows]
        groups = groups_of(net, some, labels[rows])
        features = features_of(net, some, groups).double()
        if num_groups > 1:
            together = groups
        else:
            together = torch.zeros_like(groups)
        one_hot = F.one_hot(together, num_groups).double()
        ones = features.new_ones(len(rows), 1)
        counted = torch.cat([ones, features], dim=1)
        total = total + one_hot.T @ counted
    return total


@torch.no_grad()
def embedding(
    kind: str,
    network: TensorDict,
    centre: Tensor,
    images: Images,
    labels: Labels,
    chosen: TorchvisionNetwork | None = None,
) -> Tensor:
    """Returns one client's embedding: what its images add to each group, by share.

    Computes (L / n) sum_i onehot(g_i) x (MASS, f(x_i) - m_{g_i}), with n images in L
    groups. The first feature tells how many images a group has. Its norm alone is at
    least MASS sqrt(L), so a clip bound of 1 makes all embeddings equally long, without
    a look at any; and its sum, which is released with the others, says by how much
    they were shortened.

    Privacy: reads private data; output private, of any norm.

    Args:
        kind: the network's kind.
        network: the phase's network.
        centre: m, shape (groups, features).
        images: all n images of the client, (n, C, S, S), float32 in [0, 1].
        labels: shape (n,).
        chosen: as of `trunk_features`.

    Returns:
        Shape (groups, 1 + features), float64; zeros without images.

    Source: docs/privacy.md, "Embedding releases".
    """
    num_groups, num_features = centre.shape
    if not len(labels):
        return centre.new_zeros(num_groups, 1 + num_features).double()
    sums = group_sums(kind, network, images, labels, num_groups, chosen)
    counts, sums = sums.split([1, num_features], dim=1)
    expected = counts * centre.double()
    total = torch.cat([MASS * counts, sums - expected], dim=1)
    of_image = num_groups / len(labels)
    return total * of_image


def mean_features(
    config: FeatureConfig,
    network: TensorDict,
    centre: Tensor,
    total: Tensor,
    noise_std: float,
    num_clients: int | None = None,
) -> MeanFeatures:
    """Makes means of the images' features out of the noisy sum of all embeddings.

    Embeddings are equally long, so each counts by what its clipping left of it, C / its
    norm. The sum of those weights, and each group's share of the images, stand in the
    first feature: dividing by it gives a mean over images, weighted by client, whatever
    the clip bound is. Only a group with less than LEAST_SHARE of what all have on
    average stays nearer to the centre than that, for its noise would be large.

    Privacy: post-processing of DP output.

    Args:
        config: the phase's configuration.
        network: that the clients had.
        centre: that they subtracted.
        total: sum over clients, shape (groups, 1 + features), float64.
        noise_std: standard deviation of each number in `total`, at least 0.
        num_clients: that the sum is over, at most; None is all of the run.

    Source: docs/privacy.md, "Embedding releases".
    """
    clients = num_clients or config.num_clients
    length = MASS * math.sqrt(len(total))  # of the first feature of all groups
    mass = total[:, 0] / MASS  # of every group; noise may make it negative
    # Clipping leaves this at most, and a weight below its own noise says nothing.
    most = clients * config.clip_bound / length
    of_noise = noise_std / length
    least = max(LEAST_WEIGHT * most, of_noise)
    weight = float(mass.mean().clamp(least, most))
    shares = (mass / weight).clamp_min(LEAST_SHARE)  # 1 where all are alike
    of_group = weight * shares
    differences = total[:, 1:] / of_group[:, None]
    target = centre.double() + differences
    noise = noise_std / of_group
    of_parts = None
    if config.method == "parts":
        of_parts = shares.float()
    return MeanFeatures(
        method=config.method,
        network=network,
        target=target.float(),
        noise_std=noise.float(),
        shares=of_parts,
    )
