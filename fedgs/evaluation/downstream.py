"""Downstream accuracy: train on synthetic images, test on real ones.

The classifier is the CNN of the paper's appendix C.3: two convolutions with 32 and 64
kernels, dropout, ReLU. Epochs and optimizer are not in the paper; ours are below. The
other twelve classifiers are in `classifiers`.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, appendix C.3.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from fedgs.evaluation.images import LabelledImages

NUM_EPOCHS = 3
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
NUM_IMAGES = 10_000  # of `downstream_cnn_accuracy` in an evaluation


class CnnClassifier(nn.Module):
    """Images (B, C, S, S) in [0, 1] to logits (B, num_classes)."""

    def __init__(self, channels: int, side: int, num_classes: int) -> None:
        """Builds the layers for square images of the given side."""
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.dropout = nn.Dropout(0.5)
        self.hidden = nn.Linear(64 * (side // 4) ** 2, 128)
        self.out = nn.Linear(128, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        x = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = self.dropout(functional.relu(self.hidden(x.flatten(1))))
        return self.out(x)


def train_cnn(
    train: LabelledImages,
    num_classes: int,
    seed: int = 0,
    num_epochs: int = NUM_EPOCHS,
    device: str = "cpu",
) -> CnnClassifier:
    """Trains the CNN with Adam.

    Privacy: post-processing of DP output, where the training images are synthetic.

    Args:
        train: images and labels.
        num_classes: number of labels.
        seed: of initialisation, order and dropout.
        num_epochs: passes over the images.
        device: cpu or cuda.
    """
    images, labels = (torch.from_numpy(array).to(device) for array in train)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = CnnClassifier(images.shape[1], images.shape[2], num_classes)
        model.to(device).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        for _ in range(num_epochs):
            for rows in torch.randperm(len(images)).split(BATCH_SIZE):
                loss = functional.cross_entropy(
                    model(images[rows.to(device)]), labels[rows.to(device)]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model.eval()


def predict(model: nn.Module, images: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Returns the most likely label of each image, shape (n,).

    Privacy: as private as the model and the images.

    Args:
        model: in eval mode; its logits are (n, num_classes).
        images: shape (n, C, S, S), float32 in [0, 1].
    """
    device = next(model.parameters()).device
    with torch.no_grad():
        guesses = [
            model(part.to(device)).argmax(1).cpu()
            for part in torch.from_numpy(images).split(1000)
        ]
    return torch.cat(guesses).numpy()


def cnn_accuracy(
    train: LabelledImages,
    test: LabelledImages,
    num_classes: int,
    seed: int = 0,
    device: str = "cpu",
    num_epochs: int = NUM_EPOCHS,
) -> float:
    """Trains the CNN for three epochs of Adam and returns its test accuracy.

    Privacy: post-processing of DP output, where the training images are synthetic.

    Args:
        train: synthetic images with their labels.
        test: real images with their labels.
        num_classes: number of labels.
        seed: of initialisation, order and dropout.
        device: cpu or cuda.
        num_epochs: three, where the number is called `downstream_cnn_accuracy`.

    Returns:
        The share of correct labels, in [0, 1].
    """
    model = train_cnn(train, num_classes, seed, num_epochs, device)
    return float((predict(model, test.images) == test.labels).mean())
