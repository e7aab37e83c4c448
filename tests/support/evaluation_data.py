"""A tiny data set in MNIST's files: three classes of strokes with a test split."""

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgs.evaluation.images import LabelledImages

NUM_CLASSES = 3


def strokes(count: int, seed: int, side: int = 28) -> tuple[NDArray, NDArray]:
    """Images (count, side, side) uint8 and labels: a label says where strokes lie."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % NUM_CLASSES
    images = rng.integers(0, 40, (count, side, side)).astype(np.uint8)
    along = np.arange(2, side - 2)
    for image, label in zip(images, labels, strict=True):
        at = int(rng.integers(4, side - 6))
        if label == 0:
            image[at : at + 3, along] = rng.integers(150, 256)
        elif label == 1:
            image[along, at : at + 3] = rng.integers(150, 256)
        else:
            image[along, along] = image[along, along - 1] = rng.integers(150, 256)
    return images, labels


def labelled(count: int, seed: int, side: int = 16) -> LabelledImages:
    images, labels = strokes(count, seed, side)
    return LabelledImages(images[:, None].astype(np.float32) / 255, labels)


def write_mnist(folder: Path, num_train: int = 120, num_test: int = 60) -> None:
    """Writes MNIST/raw below the folder, in the idx format."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for seed, (name, count) in enumerate(
        {"train": num_train, "t10k": num_test}.items()
    ):
        images, labels = strokes(count, seed)
        header = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">4BI", 0, 0, 8, 1, count)
        content = header + labels.astype(np.uint8).tobytes()
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(content)
