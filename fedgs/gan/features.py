"""Features of stages: public networks, made by the server, evaluated by every client.

    means        low frequencies of the image: the coefficients of a small DCT block
    scatter      products of two of them, after the image's class mean is taken off
    moments      the same image along given axes, and products of two coordinates
    parts        the same, by the part of its class that the image lies in
    random       two convolutions of random filters, ReLU, average pooling; and a third
    classifier   the hidden layer of a small CNN trained on the generator's own samples

The first four are for `fedgs.gan.moments`, the others for the fit of
`fedgs.gan.stages`. A network is a dictionary of tensors; its architecture is its kind,
and the run's settings. So it travels as tensors of shapes that both sides know, never
as code.

Privacy: a network depends on the generator, hence on earlier releases only.

Source: docs/privacy.md, "Embedding releases". Class means of random features as a
target: Harder, Adamczewski, Park, "DP-MERF", AISTATS 2021.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.stages import (
    CLASSIFIER_FEATURES,
    MASS,
    PARTS,
    RANDOM_CHANNELS,
    SPLITS,
)
from fedgs.mechanism.sanitizer import to_dct
from fedgs.shapes import Images, Labels, TensorDict

QUADRATIC_WEIGHT = 0.5  # of products of coordinates beside the coordinates themselves
CLASSIFIER_CHANNELS = (16, 32)
CLASSIFIER_SAMPLES, CLASSIFIER_EPOCHS, CLASSIFIER_BATCH = 4000, 2, 50
SCALING_SAMPLES = 600  # that features are standardised on
IMAGES_AT_ONCE = 100

Shapes = dict[str, tuple[int, ...]]
Sample = Callable[[int], tuple[Images, Labels]]  # about so many, all classes alike


@dataclass(frozen=True)
class StageRelease:
    """What the server keeps of one stage; post-processing of DP output.

    Attributes:
        kind: of the networks.
        networks: the tensors of each.
        target: the mean features of each group of images, a class, a part of it or all
            of them: shape (networks, groups, features), float32.
        noise_std: of the noise in each group's features, shape (groups,), float32.
        shares: of parts: how many images each has, 1 on average, shape (groups,).
    """

    kind: str
    networks: tuple[TensorDict, ...]
    target: Tensor
    noise_std: Tensor
    shares: Tensor | None = None


class Kind(NamedTuple):
    """One kind of feature network.

    Attributes:
        shapes: name -> shape of its float32 tensors.
        features: (tensors, images (n, C, S, S), groups) -> features (n, features).
        make: makes one, from a stream and samples of the generator; not for moments,
            whose networks `fedgs.gan.moments` makes.
        groups: (tensors, images, labels) -> the group of each image, its class at most.
    """

    shapes: Callable[[ResolvedConfig], Shapes]
    features: Callable[[TensorDict, Images, Labels], Tensor]
    make: Callable[[ResolvedConfig, np.random.Generator, Sample], TensorDict]
    groups: Callable[[TensorDict, Images, Labels], Labels] = lambda net, x, y: y


# ------------------------------------------------------------------ moments


def _model_shapes(config: ResolvedConfig) -> Shapes:
    classes, size, axes = config.num_classes, config.moment_features, config.latent_dim
    return {"mean": (classes, size), "axes": (size, axes), "centre": (classes, axes)}


def _part_shapes(config: ResolvedConfig) -> Shapes:
    classes, size, axes = config.num_classes, config.moment_features, config.latent_dim
    of_classes = {"middle": (classes, axes), "split": (classes, axes, SPLITS)}
    return {"axes": (size, axes), "centre": (classes * PARTS, axes), **of_classes}


def _not_made(
    config: ResolvedConfig, rng: np.random.Generator, sample: Sample
) -> TensorDict:
    raise TypeError("networks of moments are made by fedgs.gan.moments")


def low_frequencies(images: Images, count: int) -> Tensor:
    """Returns low DCT coefficients of images, (n, count), from all channels."""
    return to_dct(images, math.isqrt(count // images.shape[1])).flatten(1)


def _parts(net: TensorDict, images: Images, labels: Labels) -> Labels:
    """Returns 4 y + (on which side of the class' middle, across each of two axes)."""
    along = low_frequencies(images, len(net["axes"])) @ net["axes"]
    residual = along - net["middle"][labels]
    sides = torch.einsum("np,nps->ns", residual, net["split"][labels]) > 0
    bits = 2 ** torch.arange(SPLITS, device=labels.device)
    return labels * PARTS + (sides * bits).sum(1)


def _mean_features(net: TensorDict, images: Images, labels: Labels) -> Tensor:
    return low_frequencies(images, net["mean"].shape[1]) - net["mean"][labels]


def _scatter_features(net: TensorDict, images: Images, labels: Labels) -> Tensor:
    return products(_mean_features(net, images, labels))


def _moment_features(net: TensorDict, images: Images, groups: Labels) -> Tensor:
    along = low_frequencies(images, len(net["axes"])) @ net["axes"]
    residual = along - net["centre"][groups]
    return torch.cat([residual, QUADRATIC_WEIGHT * products(residual)], dim=1)


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


# ------------------------------------------------------------------ random


def _random_shapes(config: ResolvedConfig) -> Shapes:
    width = RANDOM_CHANNELS
    shapes: Shapes = {"conv1.weight": (width, config.image_channels, 5, 5)}
    shapes |= {f"conv{layer}.weight": (width, width, 3, 3) for layer in (2, 3)}
    return shapes | {f"conv{layer}.bias": (width,) for layer in (1, 2, 3)}


def _make_random(
    config: ResolvedConfig, rng: np.random.Generator, sample: Sample
) -> TensorDict:
    net = {name: _normal(rng, shape) for name, shape in _random_shapes(config).items()}
    filters = net["conv1.weight"]
    filters /= filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    for layer, bias in ((1, 0.3), (2, 0.2), (3, 0.2)):
        net[f"conv{layer}.bias"] *= bias
        if layer > 1:
            net[f"conv{layer}.weight"] *= math.sqrt(2 / (9 * RANDOM_CHANNELS))
    return net


def _pooled(net: TensorDict, layer: int, images: Tensor, padding: int) -> Tensor:
    weight, bias = net[f"conv{layer}.weight"], net[f"conv{layer}.bias"]
    return F.avg_pool2d(F.relu(F.conv2d(images, weight, bias, padding=padding)), 2)


def _random_features(net: TensorDict, images: Images, labels: Labels) -> Tensor:
    second = _pooled(net, 2, _pooled(net, 1, images, 2), 1)  # (n, w, S/4, S/4)
    third = _pooled(net, 3, second, 1)  # (n, w, S/8, S/8)
    # A quarter as many of the third layer: twice as large, they weigh the same.
    return torch.cat([second.flatten(1), 2 * third.flatten(1)], dim=1)


# ------------------------------------------------------------------ classifier


def _classifier_shapes(config: ResolvedConfig) -> Shapes:
    (first, second), hidden = CLASSIFIER_CHANNELS, CLASSIFIER_FEATURES
    size = second * (config.image_size // 4) ** 2
    return {
        "conv1.weight": (first, config.image_channels, 5, 5),
        "conv1.bias": (first,),
        "conv2.weight": (second, first, 3, 3),
        "conv2.bias": (second,),
        "hidden.weight": (hidden, size),
        "hidden.bias": (hidden,),
        "scale": (hidden,),
    }


def _make_classifier(
    config: ResolvedConfig, rng: np.random.Generator, sample: Sample
) -> TensorDict:
    """Trains it on samples of the generator; its last layer is thrown away."""
    shapes = _classifier_shapes(config)
    del shapes["scale"]
    shapes["output.weight"] = (config.num_classes, CLASSIFIER_FEATURES)
    shapes["output.bias"] = (config.num_classes,)
    net = {name: _initial(rng, shapes, name) for name in shapes}
    images, labels = sample(CLASSIFIER_SAMPLES)
    optimizer = torch.optim.Adam(net.values(), lr=2e-3)
    for _ in range(CLASSIFIER_EPOCHS):
        order = torch.from_numpy(rng.permutation(len(labels)))
        for rows in order.split(CLASSIFIER_BATCH):
            hidden = _hidden(net, images[rows])
            kept = torch.from_numpy(rng.random(tuple(hidden.shape)) >= 0.3)
            dropped = hidden * kept.to(hidden) / 0.7
            logits = F.linear(dropped, net["output.weight"], net["output.bias"])
            optimizer.zero_grad()
            F.cross_entropy(logits, labels[rows]).backward()
            optimizer.step()
    net = {name: value.detach() for name, value in net.items()}
    del net["output.weight"], net["output.bias"]
    hidden = _hidden(net, images[:: max(1, len(images) // SCALING_SAMPLES)])
    # The tenth keeps a feature that hardly varies from being scaled up to noise.
    net["scale"] = 1 / (hidden.std(0) + 0.1 * hidden.std()).clamp_min(1e-3)
    return net


def _hidden(net: TensorDict, images: Images) -> Tensor:
    h = F.conv2d(images, net["conv1.weight"], net["conv1.bias"], padding=2)
    h = F.max_pool2d(F.relu(h), 2)
    h = F.conv2d(h, net["conv2.weight"], net["conv2.bias"], padding=1)
    h = F.max_pool2d(F.relu(h), 2).flatten(1)
    return F.relu(F.linear(h, net["hidden.weight"], net["hidden.bias"]))


def _classifier_features(net: TensorDict, images: Images, labels: Labels) -> Tensor:
    return _hidden(net, images) * net["scale"]


# ------------------------------------------------------------------ all kinds

KINDS = {
    "means": Kind(_model_shapes, _mean_features, _not_made),
    "scatter": Kind(_model_shapes, _scatter_features, _not_made),
    "moments": Kind(_model_shapes, _moment_features, _not_made),
    "parts": Kind(_part_shapes, _moment_features, _not_made, _parts),
    "random": Kind(_random_shapes, _random_features, _make_random),
    "classifier": Kind(_classifier_shapes, _classifier_features, _make_classifier),
}


def group_sums(
    kind: str, net: TensorDict, images: Images, labels: Labels, num_groups: int
) -> Tensor:
    """Returns each group's size and sum of features, (num_groups, 1 + f), float64.

    Privacy: of private images, reads private data; output private.

    Args:
        kind: of the network, a key of `KINDS`.
        net: its tensors, where the images are.
        images: shape (n, C, S, S), float32 in [0, 1].
        labels: shape (n,).
        num_groups: all of the kind, also those without an image; 1: of all images.
    """
    total = torch.zeros((), dtype=torch.float64, device=images.device)
    for rows in torch.arange(len(labels)).split(IMAGES_AT_ONCE):
        groups = KINDS[kind].groups(net, images[rows], labels[rows])
        features = KINDS[kind].features(net, images[rows], groups).double()
        together = groups if num_groups > 1 else torch.zeros_like(groups)
        one_hot = F.one_hot(together, num_groups).double()
        ones = features.new_ones(len(rows), 1)
        total = total + one_hot.T @ torch.cat([ones, features], dim=1)
    return total


@torch.no_grad()
def embedding(
    kind: str,
    networks: Sequence[TensorDict],
    centre: Tensor,
    images: Images,
    labels: Labels,
) -> Tensor:
    """Returns one client's embedding: what its images add to each group, by share.

    Computes (L / n) sum_i onehot(g_i) x (MASS, f(x_i) - m_{g_i}), with n images in L
    groups. The first feature tells how many images a group has. Its norm alone is at
    least MASS sqrt(L), so a clip bound of 1 makes all embeddings equally long, without
    a look at any; and its sum, which is released with the others, says by how much
    they were shortened.

    Privacy: reads private data; output private, of any norm.

    Args:
        kind: of the networks.
        networks: of the stage.
        centre: m, shape (networks, groups, features).
        images: all n images of the client, (n, C, S, S), float32 in [0, 1].
        labels: shape (n,).

    Returns:
        Shape (networks, groups, 1 + features), float64; zeros without images.

    Source: docs/privacy.md, "Embedding releases".
    """
    num_groups = centre.shape[1]
    if not len(labels):
        return centre.new_zeros(*centre.shape[:2], 1 + centre.shape[2]).double()
    sums = [group_sums(kind, net, images, labels, num_groups) for net in networks]
    counts, sums = torch.stack(sums).split([1, centre.shape[2]], dim=2)
    sums = sums - counts * centre.double()
    return torch.cat([MASS * counts, sums], dim=2) * (num_groups / len(labels))


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def _initial(rng: np.random.Generator, shapes: Shapes, name: str) -> Tensor:
    """Returns an initial weight or bias by PyTorch's rule, to be trained."""
    weight = shapes[name.split(".")[0] + ".weight"]
    bound = 1 / math.sqrt(math.prod(weight[1:]))
    values = rng.uniform(-bound, bound, shapes[name]).astype(np.float32)
    return torch.from_numpy(values).requires_grad_()
