"""Data sources as tests load them, and files in the formats that they read."""

from pathlib import Path

import numpy as np
import pytest

from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.errors import UserError
from tiny import run_config


def configured(data: str = "digits", **settings: object) -> RunConfig:
    return run_config(**{"data": data, "seed": 0, **settings}).validate()


def load(data: str = "digits", **settings: object) -> FederatedImages:
    return load_data(configured(data, **settings))


def refused(message: str, data: str = "digits", **settings: object) -> str:
    """Loads data that are refused in these words, in one line."""
    with pytest.raises(UserError, match=message) as caught:
        load(data, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_npz(path: Path, **arrays: object) -> str:
    """Writes a user's own file and returns the setting `data`."""
    np.savez(path, **arrays)
    return f"npz:{path}"


def write_idx(path: Path, array: np.ndarray, code: int = 0x08, dtype: str = "u1"):
    """Writes the format of MNIST: a type, a shape, values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes((0, 0, code, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(header + array.astype(dtype).tobytes())


def write_mnist(root: Path, pixels, labels, folder="MNIST", split="train") -> None:
    """Writes a split of MNIST, or of a family member, in torchvision's layout."""
    write_idx(root / folder / "raw" / f"{split}-images-idx3-ubyte", pixels)
    write_idx(root / folder / "raw" / f"{split}-labels-idx1-ubyte", labels)


def write_writers(root: Path, labels: np.ndarray, writers: np.ndarray) -> None:
    """Writes who wrote the images of MNIST, as QMNIST says it."""
    rows = np.zeros((len(labels), 8), np.int64)
    rows[:, 0], rows[:, 2] = labels, writers
    path = root / "QMNIST" / "raw" / "qmnist-train-labels-idx2-int"
    write_idx(path, rows, code=0x0C, dtype=">i4")
