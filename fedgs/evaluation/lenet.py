"""A classifier of the real data, in whose eyes images are compared.

It takes the place of the Inception network for images that ImageNet does not resemble,
and needs no download: two convolutions as in LeNet, with batch normalisation, trained
once on the real training split and cached by the hash of what it was trained on.

Source:
    LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document
    recognition", Proc. IEEE 1998.
    Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, appendix C.3: scores by "pre-trained
    classifiers on the real datasets", of unpublished kind, accuracies below.
"""

import contextlib
import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.optim import Adam
from torch.optim.lr_scheduler import OneCycleLR

from fedgs.evaluation.cache import cache_folder, content_hash, write_cached
from fedgs.evaluation.downstream import Recipe, Report, fit
from fedgs.evaluation.images import LabelledImages, RealImages
from fedgs.files import read_tensors, write_tensors

PAPER_TEST_ACCURACY = {  # appendix C.3
    "mnist": 0.9925,
    "mnist-by-writer": 0.9925,  # the same images
    "fashion-mnist": 0.9375,
    "femnist": 0.9216,
}
_VERSION = 1  # raise it with any change below: it names the cached file
LENET_FEATURES = 128
_IMAGES_AT_ONCE = 1000  # in one forward pass


class LeNet(nn.Module):
    """Images (B, C, S, S) in [0, 1] to logits (B, num_classes)."""

    def __init__(self, channels: int, side: int, num_classes: int) -> None:
        """Builds the layers for square images of the given side."""
        super().__init__()
        # A bias before batch normalisation would have no effect.
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(64)
        self.dropout = nn.Dropout(0.3)
        pooled_side = side // 4  # halved twice
        pooled_size = 64 * pooled_side**2
        self.hidden = nn.Linear(pooled_size, LENET_FEATURES)
        self.out = nn.Linear(LENET_FEATURES, num_classes)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the last hidden layer, shape (B, LENET_FEATURES), at least 0."""
        x = images
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            x = functional.max_pool2d(conv(x), 2)
            x = functional.relu(norm(x))
        x = self.dropout(x.flatten(1))
        return functional.relu(self.hidden(x))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        return self.out(self.features(images))


def _build(channels: int, side: int, num_classes: int) -> nn.Module:
    lenet = LeNet(channels, side, num_classes)
    return lenet.to(memory_format=torch.channels_last)  # twice as fast


_RECIPE = Recipe(
    _build,
    num_epochs=8,
    batch_size=128,
    optimizer=Adam,
    schedule=lambda adam, steps: OneCycleLR(adam, 4e-3, total_steps=8 * steps + 1),
)


class Outputs(NamedTuple):
    """What the classifier says of n images: features (n, F) and logits (n, classes)."""

    features: NDArray[np.float32]
    logits: NDArray[np.float32]


def cached_lenet(
    train: LabelledImages,
    num_classes: int,
    device: str,
    report: Report,
) -> tuple[str, LeNet]:
    """Returns the classifier of these training images, trained if it is not cached.

    Privacy: reads private data; output private, in the cache folder too.

    Args:
        train: the real training images.
        num_classes: number of labels.
        device: cpu or cuda.
        report: is called after every epoch of a training.

    Returns:
        Its name, with a hash of what it was trained on, and the classifier.

    Raises:
        UserError: the cache cannot be written.
    """
    key = content_hash(
        train.images,
        train.labels,
        num_classes=num_classes,
        version=_VERSION,
    )
    path = cache_folder() / f"lenet-{key}.safetensors"
    channels, side, _ = train.images.shape[1:]
    model = LeNet(channels, side, num_classes)
    is_cached = False
    with contextlib.suppress(Exception):  # there is none, or it is torn
        model.load_state_dict(read_tensors(path)[0])
        is_cached = True
    if not is_cached:
        started = time.monotonic()
        # Always from seed 0, so that the same images are seen by the same network.
        trained = fit(_RECIPE, train, num_classes, 0, device, report)
        weights = trained.state_dict()
        about = {
            "num_images": len(train.labels),
            "num_epochs": _RECIPE.num_epochs,
            "seconds": time.monotonic() - started,
        }
        write_cached(path.stem, about)
        write_tensors(path, weights)
        model.load_state_dict(weights)
    return path.stem, model.to(device).eval()


def outputs(model: LeNet, images: NDArray[np.float32]) -> Outputs:
    """Returns features and logits of images (n, C, S, S).

    Privacy: reads private data; output private.
    """
    device = next(model.parameters()).device
    parts: list[torch.Tensor] = []
    with torch.no_grad():
        for part in torch.from_numpy(images).split(_IMAGES_AT_ONCE):
            parts.append(model.features(part.to(device)))
        features = torch.cat(parts)
        logits = model.out(features)
    return Outputs(features.cpu().numpy(), logits.cpu().numpy())


def test_accuracy(found: Outputs, real: RealImages) -> float:
    """Returns the share of correct labels on the real test split, in [0, 1].

    Privacy: reads private data; output private.

    Args:
        found: what was found for the test images.
        real: with their labels.
    """
    is_correct = found.logits.argmax(1) == real.test.labels
    return float(is_correct.mean())
