"""Downstream accuracy: train on synthetic images, test on real ones.

The classifier is the CNN of the paper's appendix C.3: two convolutions with 32 and 64
kernels, dropout, ReLU. Epochs and optimizer are not in the paper; ours are below. The
other twelve classifiers are in `classifiers`.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, appendix C.3.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fedgs.evaluation.images import LabelledImages
from fedgs.runs.sample import Report as Report

_PREDICTED_AT_ONCE = 1000  # images: bounds the memory
CNN_IMAGES = 10_000  # of `downstream_cnn_accuracy` in an evaluation


class Recipe(NamedTuple):
    """A network that classifies images, and how it is trained.

    Attributes:
        build: makes it for channels, side and classes: images (B, C, S, S) in [0, 1] to
            logits (B, classes).
        num_epochs: passes over the images.
        batch_size: images of a step.
        optimizer: the optimizer of the parameters that it is given.
        schedule: makes the schedule of the learning rate, from the optimizer and the
            number of steps in an epoch. The rate is constant by default.
    """

    build: Callable[[int, int, int], nn.Module]
    num_epochs: int
    batch_size: int
    optimizer: Callable[[Any], Optimizer]
    schedule: Callable[[Optimizer, int], LRScheduler] = lambda optimizer, steps: (
        LambdaLR(optimizer, lambda step: 1.0)
    )


def cnn(channels: int, side: int, num_classes: int) -> nn.Module:
    """Builds the CNN of the paper for square images of the given side."""
    pooled_side = side // 4  # halved twice
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * pooled_side**2, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, num_classes),
    )


CNN = Recipe(cnn, num_epochs=3, batch_size=64, optimizer=partial(Adam, lr=1e-3))


def fit(
    recipe: Recipe,
    train: LabelledImages,
    num_classes: int,
    seed: int = 0,
    device: str = "cpu",
    report: Report = lambda done, total: None,
) -> nn.Module:
    """Trains a network; torch's global random state is the same before and after.

    Privacy: post-processing of DP output, where the training images are synthetic;
    otherwise reads private data, output private.

    Args:
        recipe: the network and its training.
        train: images and labels.
        num_classes: number of labels.
        seed: the seed of initialisation, order and dropout.
        device: cpu or cuda.
        report: is called after every epoch.
    """
    images = torch.from_numpy(train.images).to(device)
    labels = torch.from_numpy(train.labels).to(device)
    num_batches = math.ceil(len(images) / recipe.batch_size)
    with torch.random.fork_rng(devices=[]):
        # One stream for initialisation, order and dropout; the order is drawn on the
        # CPU, so that a GPU sees the same batches.
        torch.default_generator.manual_seed(seed)
        channels, side, _ = images.shape[1:]
        model = recipe.build(channels, side, num_classes).to(device)
        optimizer = recipe.optimizer(model.parameters())
        schedule = recipe.schedule(optimizer, num_batches)
        for epoch in range(recipe.num_epochs):
            order = torch.randperm(len(images)).to(device)
            for rows in order.split(recipe.batch_size):
                logits = model(images[rows])
                loss = functional.cross_entropy(logits, labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            report(epoch + 1, recipe.num_epochs)
    return model.eval()


def predict(model: nn.Module, images: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Returns the most likely label of each image, shape (n,).

    Privacy: as private as the model and the images.

    Args:
        model: in eval mode; its logits are (n, num_classes).
        images: shape (n, C, S, S), float32 in [0, 1].
    """
    device = next(model.parameters()).device
    parts = torch.from_numpy(images).split(_PREDICTED_AT_ONCE)
    with torch.no_grad():
        guesses = [model(part.to(device)).argmax(1).cpu() for part in parts]
    return torch.cat(guesses).numpy()


def cnn_accuracy(
    train: LabelledImages,
    test: LabelledImages,
    num_classes: int,
    seed: int = 0,
    device: str = "cpu",
    num_epochs: int = CNN.num_epochs,
    report: Report = lambda done, total: None,
) -> float:
    """Trains the CNN with Adam and returns its test accuracy.

    Privacy: post-processing of DP output, where the training images are synthetic.

    Args:
        train: synthetic images with their labels.
        test: real images with their labels.
        num_classes: number of labels.
        seed: the seed of initialisation, order and dropout.
        device: cpu or cuda.
        num_epochs: three, where the number is called `downstream_cnn_accuracy`.
        report: see `fit`.

    Returns:
        The share of correct labels, in [0, 1].
    """
    recipe = CNN._replace(num_epochs=num_epochs)
    model = fit(recipe, train, num_classes, seed, device, report)
    is_correct = predict(model, test.images) == test.labels
    return float(is_correct.mean())
