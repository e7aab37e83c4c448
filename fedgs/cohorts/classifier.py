"""The classifier that tells which clients look wrong, and one client's part in it.

A client trains it for a fixed number of steps on its own images, for federated
averaging (`fedgs.methods.cohort_classifier`), and measures its accuracy on images of
its own that it never trained on.

Source:
    Network: Augenstein et al., "Generative models for effective ML on private,
    decentralized datasets", ICLR 2020; google-research/federated,
    `gans/experiments/emnist/classifier`.
    Training: McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017, algorithm 1 (FederatedAveraging).
"""

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedgs.config.run_config import ResolvedConfig
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import TensorDict

# Of a client in a round.
CLIENT_STEPS = 5
CLIENT_BATCH_SIZE = 20
CLIENT_LEARNING_RATE = 0.1
EVALUATION_SHARE = 0.3  # of a client's images, on which it evaluates itself
EVALUATED_AT_ONCE = 256  # images of a forward pass without gradients


class Classifier(nn.Module):
    """Three convolutions of 3x3 with two poolings between them, and two dense layers.

    Privacy: reads private data (through trained weights); output private.

    Args:
        config: uses `image_size`, `image_channels` and `num_classes`.

    Source: the reference's Keras model, without padding. Differs from the reference:
    images of 16 pixels are padded, for the third convolution has no pixels otherwise.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Makes the layers."""
        super().__init__()
        padding = 1 if config.image_size < 28 else 0
        self.conv1 = nn.Conv2d(config.image_channels, 32, 3, padding=padding)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=padding)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=padding)
        lost = 2 - 2 * padding  # pixels of a side that a convolution takes
        side = ((config.image_size - lost) // 2 - lost) // 2 - lost
        self.dense = nn.Linear(64 * side * side, 64)
        self.logits = nn.Linear(64, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (B, num_classes) of images (B, C, S, S) in [0, 1]."""
        h = F.relu(self.conv1(images))
        h = F.max_pool2d(h, 2)
        h = F.relu(self.conv2(h))
        h = F.max_pool2d(h, 2)
        h = F.relu(self.conv3(h)).flatten(1)  # (B, 64 * side * side)
        h = F.relu(self.dense(h))
        return self.logits(h)


def build_classifier(config: ResolvedConfig) -> Classifier:
    """Builds the untrained classifier, a function of the seed.

    torch's global random state is the same before and after.

    Args:
        config: resolved, so with `seed` and `num_classes`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_seed(config.seed, "classifier"))
        return Classifier(config)


def with_weights(config: ResolvedConfig, weights: TensorDict) -> Classifier:
    """Builds a classifier with copies of given weights; draws no random number.

    Privacy: public, as the weights.

    Args:
        config: as for `build_classifier`.
        weights: by name, float32.
    """
    with torch.device("meta"):
        model = Classifier(config)
    model = model.to_empty(device="cpu")
    model.load_state_dict(weights)
    return model


@lru_cache(maxsize=8)
def shapes(config: ResolvedConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights by name, in the order of the network."""
    with torch.device("meta"):
        model = Classifier(config)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def is_held_out(seed: int, name: str, count: int) -> NDArray[np.bool_]:
    """Tells which of a client's images it evaluates itself on.

    It holds out `EVALUATION_SHARE` of them, rounded, at least one and at most all but
    one; of a single image none. The draw depends on the seed and its name alone.

    Privacy: public, as a function of the client's number of images.

    Args:
        seed: the seed of the selection.
        name: the client's.
        count: its number of images, at least 1.

    Returns:
        Shape (count,).
    """
    size = max(round(EVALUATION_SHARE * count), 1)
    size = min(size, count - 1)  # it trains on at least one
    order = stream(seed, f"cohorts/held-out/{name}").permutation(count)
    chosen = np.zeros(count, bool)
    chosen[order[:size]] = True
    return chosen


def train(
    model: Classifier,
    images: NDArray[np.float32],
    labels: NDArray[np.int64],
    rng: np.random.Generator,
) -> None:
    """Takes `CLIENT_STEPS` of SGD in place, on images drawn with replacement.

    Privacy: reads private data; output private.

    Args:
        model: the server's classifier.
        images: shape (n, C, S, S), float32 in [0, 1], n at least 1.
        labels: shape (n,), int64.
        rng: the stream of the client's draws.
    """
    optimizer = torch.optim.SGD(model.parameters(), CLIENT_LEARNING_RATE)
    for _ in range(CLIENT_STEPS):
        drawn = rng.integers(len(labels), size=CLIENT_BATCH_SIZE)
        logits = model(torch.from_numpy(images[drawn]))
        loss = F.cross_entropy(logits, torch.from_numpy(labels[drawn]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(
    model: Classifier,
    images: NDArray[np.float32],
    labels: NDArray[np.int64],
) -> float:
    """Returns the share of images with the right label; NaN without images.

    Privacy: reads private data; output private.

    Args:
        model: any.
        images: shape (n, C, S, S), float32 in [0, 1].
        labels: shape (n,), int64.
    """
    if not len(labels):
        return math.nan
    right = 0
    for start in range(0, len(labels), EVALUATED_AT_ONCE):
        part = slice(start, start + EVALUATED_AT_ONCE)
        found = model(torch.from_numpy(images[part])).argmax(1)
        right += int((found == torch.from_numpy(labels[part])).sum())
    return right / len(labels)
