"""Feature networks of stages: public, made by the server, evaluated by every client.

    random       two convolutions of random filters, ReLU, average pooling; and a third
    global       the same, and ReLU of random projections of the second one's output
    classifier   the hidden layer of a small CNN trained on the generator's own samples

A network is a dictionary of tensors; its architecture is its kind, and the run's
settings. So it travels as tensors of shapes that both sides know, never as code.

Privacy: a network depends on the generator, hence on earlier releases only.

Source: docs/privacy.md, "Embedding releases". Class means of random features as a
target: Harder, Adamczewski, Park, "DP-MERF", AISTATS 2021.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.stages import (
    CLASSIFIER_FEATURES,
    GLOBAL_FEATURES,
    RANDOM_CHANNELS,
)
from fedgs.shapes import Images, Labels, TensorDict

CLASSIFIER_CHANNELS = (16, 32)
CLASSIFIER_SAMPLES, CLASSIFIER_EPOCHS, CLASSIFIER_BATCH = 4000, 2, 50
SCALING_SAMPLES = 600  # that features are standardised on
IMAGES_AT_ONCE = 500

Shapes = dict[str, tuple[int, ...]]
Sample = Callable[[int], tuple[Images, Labels]]  # about so many, all classes alike


class Kind(NamedTuple):
    """One kind of feature network.

    Attributes:
        shapes: name -> shape of its float32 tensors.
        make: makes one, from a stream and samples of the generator.
        features: (tensors, images (n, C, S, S)) -> features (n, features).
    """

    shapes: Callable[[ResolvedConfig], Shapes]
    make: Callable[[ResolvedConfig, np.random.Generator, Sample], TensorDict]
    features: Callable[[TensorDict, Images], Tensor]


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


def _second(net: TensorDict, images: Images) -> Tensor:
    return _pooled(net, 2, _pooled(net, 1, images, 2), 1)  # (n, w, S/4, S/4)


def _random_features(net: TensorDict, images: Images) -> Tensor:
    second = _second(net, images)
    third = _pooled(net, 3, second, 1)  # (n, w, S/8, S/8)
    return torch.cat([second.flatten(1), 2 * third.flatten(1)], dim=1)


# ------------------------------------------------------------------ global


def _global_shapes(config: ResolvedConfig) -> Shapes:
    size, count = RANDOM_CHANNELS * (config.image_size // 4) ** 2, GLOBAL_FEATURES
    shapes = {"mean": (size,), "std": (size,), "projection": (size, count)}
    return _random_shapes(config) | shapes | {"offset": (count,)}


def _make_global(
    config: ResolvedConfig, rng: np.random.Generator, sample: Sample
) -> TensorDict:
    net = _make_random(config, rng, sample)
    second = _second(net, sample(SCALING_SAMPLES)[0]).flatten(1)
    net["mean"], net["std"] = second.mean(0), second.std(0) + 0.03
    projection = _normal(rng, (second.shape[1], GLOBAL_FEATURES))
    standardised = (second - net["mean"]) / net["std"]
    # A generator that draws one image only gives 0: then nothing is to be scaled.
    net["projection"] = projection / (standardised @ projection).std().clamp_min(1e-3)
    net["offset"] = 0.5 * _normal(rng, (GLOBAL_FEATURES,))
    return net


def _global_features(net: TensorDict, images: Images) -> Tensor:
    second = _second(net, images).flatten(1)
    projected = ((second - net["mean"]) / net["std"]) @ net["projection"]
    globals = 0.4 * F.relu(projected + net["offset"])
    return torch.cat([_random_features(net, images), globals], dim=1)


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
    net["scale"] = 1 / (hidden.std(0) + 0.1 * hidden.std()).clamp_min(1e-3)
    return net


def _hidden(net: TensorDict, images: Images) -> Tensor:
    h = F.conv2d(images, net["conv1.weight"], net["conv1.bias"], padding=2)
    h = F.max_pool2d(F.relu(h), 2)
    h = F.conv2d(h, net["conv2.weight"], net["conv2.bias"], padding=1)
    h = F.max_pool2d(F.relu(h), 2).flatten(1)
    return F.relu(F.linear(h, net["hidden.weight"], net["hidden.bias"]))


def _classifier_features(net: TensorDict, images: Images) -> Tensor:
    return _hidden(net, images) * net["scale"]


# ------------------------------------------------------------------ all kinds

KINDS = {
    "random": Kind(_random_shapes, _make_random, _random_features),
    "global": Kind(_global_shapes, _make_global, _global_features),
    "classifier": Kind(_classifier_shapes, _make_classifier, _classifier_features),
}


def class_sums(
    kind: str, net: TensorDict, images: Images, labels: Labels, num_classes: int
) -> Tensor:
    """Returns the sum of each class' features, (num_classes, features), float64.

    Privacy: of private images, reads private data; output private.

    Args:
        kind: of the network, a key of `KINDS`.
        net: its tensors, where the images are.
        images: shape (n, C, S, S), float32 in [0, 1].
        labels: shape (n,).
        num_classes: all classes, also those without an image.
    """
    one_hot = F.one_hot(labels, num_classes).double()
    total = torch.zeros((), dtype=torch.float64, device=images.device)
    for rows in torch.arange(len(labels)).split(IMAGES_AT_ONCE):
        features = KINDS[kind].features(net, images[rows])
        total = total + one_hot[rows].T @ features.double()
    return total


@torch.no_grad()
def embedding(
    kind: str,
    networks: Sequence[TensorDict],
    centre: Tensor,
    images: Images,
    labels: Labels,
) -> Tensor:
    """Returns one client's embedding: its class means' distance from the centre.

    Computes sum_i (L / n) onehot(y_i) x (f(x_i) - m_{y_i}), with L classes: where a
    client has all classes alike, the difference of its class means.

    Privacy: reads private data; output private, of any norm.

    Args:
        kind: of the networks.
        networks: of the stage.
        centre: m, shape (networks, classes, features).
        images: all n >= 1 images of the client, (n, C, S, S), float32 in [0, 1].
        labels: shape (n,).

    Returns:
        Shape (networks, classes, features), float64.

    Source: docs/privacy.md, "Embedding releases".
    """
    num_classes = centre.shape[1]
    counts = torch.bincount(labels, minlength=num_classes).double().unsqueeze(1)
    sums = [class_sums(kind, net, images, labels, num_classes) for net in networks]
    return (torch.stack(sums) - counts * centre.double()) * (num_classes / len(labels))


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def _initial(rng: np.random.Generator, shapes: Shapes, name: str) -> Tensor:
    """Returns an initial weight or bias by PyTorch's rule, to be trained."""
    weight = shapes[name.split(".")[0] + ".weight"]
    bound = 1 / math.sqrt(math.prod(weight[1:]))
    values = rng.uniform(-bound, bound, shapes[name]).astype(np.float32)
    return torch.from_numpy(values).requires_grad_()
