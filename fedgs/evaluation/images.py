"""The images that an evaluation compares: synthetic ones, real training and test ones.

A source of synthetic images is a run folder, an npz file as `fedgs sample` writes it,
or one of three yardsticks: `real` (the training split itself), `real-test` (the test
split) and `noise` (uniform pixels).
"""

import dataclasses
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.federated import to_float
from fedgs.data.load import load_data, load_test_data
from fedgs.errors import UserError
from fedgs.runs import sample
from fedgs.runs.run_folder import RunFolder

YARDSTICKS = ("real", "real-test", "noise")
SMALLEST_SIDE = 16  # the classifiers halve it twice
NPZ_ERRORS = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


class LabelledImages(NamedTuple):
    """Images, shape (n, C, S, S), float32 in [0, 1], and labels, shape (n,), int64."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def subset(self, count: int, seed: int, purpose: str) -> "LabelledImages":
        """Returns a random subset in random order; all in order where there are fewer.

        The order matters: a data set may be sorted by class.
        """
        if count >= len(self.labels):
            return self
        generator = np.random.default_rng([seed, *purpose.encode()])
        rows = generator.permutation(len(self.labels))[:count]
        return LabelledImages(self.images[rows], self.labels[rows])


class RealImages(NamedTuple):
    """The real training and test split, and the number of labels."""

    train: LabelledImages
    test: LabelledImages
    num_classes: int


def load_real(config: RunConfig, most: int | None = None) -> RealImages:
    """Loads the training and the test split of `config.data`, clean and of all clients.

    Privacy: reads private data; output private.

    Args:
        config: uses the settings that say where the data is and how to read it, what is
            held out, and the size and channels of the images.
        most: training images; a random subset, the same every time, where there are
            more. All test images are used.

    Raises:
        UserError: no test split, missing or malformed data, or one class only.
    """
    config = dataclasses.replace(
        config,
        corruption="none",
        cohort=None,
        partition="iid",
        num_clients=1,
        clients_per_round=1,
        privacy_unit="client",
        seed=0,
    )
    data = load_data(config)
    test = LabelledImages(*load_test_data(config))
    rows = np.sort(data.client_records[0])  # without what is held out
    if most is not None and most < len(rows):
        rows = np.random.default_rng(0).permutation(rows)[:most]
    train = LabelledImages(to_float(data.images[rows]), data.labels[rows])
    for split, found in (("training", train), ("test", test)):
        if len(np.unique(found.labels)) < 2:
            raise UserError(
                f"data = {config.data!r}: the {split} split has one class only; an "
                "evaluation needs at least two"
            )
    return RealImages(train, test, data.num_classes)


def draw_from_run(folder: RunFolder, count: int, seed: int) -> LabelledImages:
    """Draws images with uniform labels from a run's averaged generator.

    Rounded to 256 values, as all synthetic images here; see `rounded`.

    Privacy: post-processing of DP output.

    Raises:
        UserError: the run has no generator yet.
    """
    generator = sample.load_generator(folder)
    labels = sample.uniform_labels(folder.config, count, seed)
    images = sample.draw(folder.config, generator, labels, seed)
    return LabelledImages(rounded(images), labels)


def rounded(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounds images to the 256 values of a picture, which real images have too.

    So a background is exactly 0. No classifier can use a difference that no picture
    shows, and trees train four times as fast.

    Privacy: post-processing.

    Args:
        images: values in [0, 1].
    """
    return to_float(np.rint(images * 255).astype(np.uint8))


def yardstick(name: str, real: RealImages, seed: int, count: int) -> LabelledImages:
    """Returns one of `YARDSTICKS` in the place of synthetic images.

    Privacy: reads private data; output private. Of `noise` only the shape is read.
    """
    if name == "real":
        return real.train.subset(count, seed, "yardstick")
    if name == "real-test":
        return real.test.subset(count, seed, "yardstick")
    shape = (count, *real.train.images.shape[1:])
    generator = np.random.default_rng(seed)
    return LabelledImages(
        rounded(generator.random(shape, dtype=np.float32)),
        generator.integers(real.num_classes, size=count),
    )


def read_npz(path: Path) -> LabelledImages:
    """Reads `images` and `labels` from an npz file.

    Privacy: post-processing of DP output, if that is what the file holds.

    Args:
        path: with images (N, H, W) or (N, C, H, W), float in [0, 1] or uint8, C = 1 or
            3, square, 0 = background; and integer labels (N,). Other keys are ignored.
            The real images are fitted to their size and channels.

    Raises:
        UserError: missing, damaged, or not as above.
    """
    try:
        with open(path, "rb") as content, np.load(content, allow_pickle=False) as file:
            keys = file.files
            missing = [key for key in ("images", "labels") if key not in keys]
            found = {key: file[key] for key in ("images", "labels") if key in keys}
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: does not exist; write it with `fedgs sample RUN -o FILE.npz`"
        ) from error
    except NPZ_ERRORS as error:
        raise UserError(
            f"{path}: cannot be read ({error}); write it with np.savez, without objects"
        ) from error
    if missing:
        raise UserError(
            f"{path}: holds {', '.join(keys) or 'no arrays'}, but no "
            f"{' and no '.join(missing)}; write both with np.savez"
        )
    images = _checked_images(path, found["images"])
    labels = found["labels"]
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise UserError(
            f"{path}: labels has shape {labels.shape} and dtype {labels.dtype}; give "
            f"one integer for each of the {len(images)} images"
        )
    return LabelledImages(images, labels.astype(np.int64))


def _checked_images(path: Path, images: NDArray[np.generic]) -> NDArray[np.float32]:
    if images.ndim == 3:
        images = images[:, None]
    square = images.ndim == 4 and images.shape[2] == images.shape[3]
    if not square or images.shape[1] not in (1, 3) or not len(images):
        raise UserError(
            f"{path}: images has shape {images.shape}; give at least one image, as "
            "(N, H, W) or (N, C, H, W) with C = 1 or 3 and H = W"
        )
    if images.shape[2] < SMALLEST_SIDE:
        raise UserError(
            f"{path}: images of {images.shape[2]} pixels; give at least "
            f"{SMALLEST_SIDE} on each side"
        )
    if images.dtype == np.uint8:
        return to_float(images.astype(np.uint8, copy=False))
    if images.dtype.kind != "f":
        raise UserError(
            f"{path}: images has dtype {images.dtype}; give uint8 in [0, 255] or "
            "floats in [0, 1]"
        )
    if not np.isfinite(images).all():
        index = int(np.flatnonzero(~np.isfinite(images).all(axis=(1, 2, 3)))[0])
        raise UserError(
            f"{path}: image {index} has NaN or infinite values; give floats in [0, 1]"
        )
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        raise UserError(
            f"{path}: images has values in [{low:g}, {high:g}]; give floats in [0, 1], "
            "0 = background, or uint8"
        )
    return rounded(images.astype(np.float32))


def check_labels(source: str, synthetic: LabelledImages, num_classes: int) -> None:
    """Checks that synthetic labels are among the real ones.

    Privacy: post-processing of DP output; of the real data only the number of labels.

    Raises:
        UserError: a label that is not real.
    """
    wrong = (synthetic.labels < 0) | (synthetic.labels >= num_classes)
    if wrong.any():
        raise UserError(
            f"{source}: label {synthetic.labels[wrong][0]}, the real labels are 0 to "
            f"{num_classes - 1}; give labels that fit --data"
        )
