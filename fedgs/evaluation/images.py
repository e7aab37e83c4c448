"""The images that an evaluation compares: synthetic ones, real training and test ones.

A source of synthetic images is a run folder, an npz file as `fedgs sample` writes it,
or one of four yardsticks: `real` (the training split itself), `real-test` (the test
split), `fonts` (public digits) and `noise` (uniform pixels).
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.federated import to_float
from fedgs.data.load import federate, load_data, load_test_data
from fedgs.data.readers.arrays import from_arrays, read_arrays
from fedgs.data.records import Records
from fedgs.data.sources import load_records, place_of
from fedgs.errors import UserError, wrap_error
from fedgs.runs import sample
from fedgs.runs.run_folder import RunFolder

YARDSTICKS = ("real", "real-test", "fonts", "noise")
YARDSTICK = "yardstick"  # the purpose of a subset in their place
SMALLEST_SIDE = 16  # the classifiers halve it twice


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
        # By purpose, so that the choice for one metric is not that for another.
        generator = np.random.default_rng([seed, *purpose.encode()])
        rows = generator.permutation(len(self.labels))[:count]
        return LabelledImages(self.images[rows], self.labels[rows])


class RealImages(NamedTuple):
    """The real training and test split.

    Attributes:
        train: the training images, or some of them.
        test: the test images.
        num_classes: the number of labels.
        num_copies: how many test images are training images as well, of all of them.
    """

    train: LabelledImages
    test: LabelledImages
    num_classes: int
    num_copies: int = 0


def load_real(
    config: RunConfig,
    most: int | None = None,
    test_data: str | None = None,
) -> RealImages:
    """Loads the training and the test split of `config.data`, clean and of all clients.

    Privacy: reads private data; output private.

    Args:
        config: uses the settings that say where the data is and how to read it, what is
            held out, and the size and channels of the images, which are the training
            split's where they are unset.
        most: training images; a random subset, the same every time, where there are
            more. All test images are used.
        test_data: npz:FILE or folder:PATH in place of the test split.

    Raises:
        UserError: no test split, missing or malformed data, or one class only.
    """
    # Read once: they are split below into those to train on and those held out.
    own = _of_one_client(config)
    records = load_records(own)
    data = federate(own, records)
    # Test images are to be alike, whatever their own size is.
    channels, side, _ = data.images.shape[1:]
    config = dataclasses.replace(config, image_channels=channels, image_size=side)
    if test_data is None:
        images, labels = load_test_data(config, records)
        test = LabelledImages(images, labels)
    else:
        test = _test_of(config, test_data, data.num_classes)
    rows = np.sort(data.client_records[0])  # without what is held out
    # Seed 0, whatever the evaluation's is: all evaluations compare with the same ones.
    if most is not None and most < len(rows):
        rng = np.random.default_rng(0)
        rows = rng.permutation(rows)[:most]
    train = LabelledImages(to_float(data.images[rows]), data.labels[rows])
    if len(test.labels) == 0:
        raise UserError(
            f"data = {config.data!r}: no images are held out to test on; give --test "
            "npz:FILE or folder:PATH, or train with --test-owners 0.2"
        )
    for split, found in (("training", train), ("test", test)):
        present = np.unique(found.labels)
        if len(present) < 2:
            raise UserError(
                f"data = {config.data!r}: the {split} split has one class only; an "
                "evaluation needs at least two"
            )
    num_copies = count_copies(test, data.images[data.client_records[0]])
    return RealImages(train, test, data.num_classes, num_copies)


def trained_images(config: RunConfig) -> NDArray[np.uint8]:
    """Loads what a run was trained on, before any bug was planted, (n, C, S, S).

    Privacy: reads private data; output private.

    Raises:
        UserError: the data are missing or malformed.
    """
    data = load_data(_of_one_client(config))
    return data.images[data.client_records[0]]


def count_copies(test: LabelledImages, train: NDArray[np.uint8]) -> int:
    """Counts the test images whose pixels are those of a training image.

    Privacy: reads private data; output private.
    """
    known = {_digest(image) for image in train}
    pixels = np.rint(test.images * 255).astype(np.uint8)
    return sum(_digest(image) in known for image in pixels)


def _digest(image: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(image.tobytes(), digest_size=16).digest()


def _of_one_client(config: RunConfig) -> RunConfig:
    """Returns settings by which one client has all images, whatever the run's are."""
    return dataclasses.replace(
        config,
        corruption="none",
        cohort=None,
        partition="iid",
        num_clients=1,
        clients_per_round=1,
        privacy_unit="client",
        seed=0,
    )


def _test_of(config: RunConfig, source: str, classes: int) -> LabelledImages:
    """Loads test images of the user's own in the same way as the data."""
    where = f"test = {source!r}"
    remedy = "give --test npz:FILE or folder:PATH"
    own = dataclasses.replace(config, data=source, num_classes=None)
    if place_of(own) == place_of(config):
        raise UserError(
            f"{where}: it is the run's own data, {config.data!r}, so you would test on "
            f"images that it was trained on; {remedy} of others"
        )
    if source.partition(":")[0] not in ("npz", "folder"):
        raise UserError(f"{where}: {remedy}, of images that no run was trained on")
    with wrap_error(UserError, f"{where}: it cannot be used", remedy):
        found = _floats(load_records(own))
    check_labels(where, found, classes)
    return found


def draw_from_run(
    folder: RunFolder,
    count: int,
    seed: int,
    report: sample.Report = lambda done, total: None,
) -> LabelledImages:
    """Draws images with uniform labels from a run's averaged generator.

    Rounded to 256 values, as all synthetic images here; see `rounded`.

    Privacy: post-processing of DP output.

    Raises:
        UserError: the run has no generator yet.
    """
    generator = sample.load_generator(folder)
    labels = sample.uniform_labels(folder.config, count, seed)
    images = sample.draw(folder.config, generator, labels, seed, report)
    return LabelledImages(rounded(images), labels)


def rounded(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounds images to the 256 values of a picture, which real images have too.

    So a background is exactly 0. No classifier can use a difference that no picture
    shows, and trees train four times as fast.

    Privacy: post-processing.

    Args:
        images: values in [0, 1].
    """
    pixels = np.rint(images * 255)
    return to_float(pixels.astype(np.uint8))


def yardstick(name: str, real: RealImages, seed: int, count: int) -> LabelledImages:
    """Returns one of `YARDSTICKS` in the place of synthetic images.

    Privacy: reads private data; output private. Of `noise` and `fonts` only the shape.
    """
    if name == "real":
        return real.train.subset(count, seed, YARDSTICK)
    if name == "real-test":
        return real.test.subset(count, seed, YARDSTICK)
    shape = (count, *real.train.images.shape[1:])
    if name == "fonts":
        config = RunConfig(data="fonts", image_channels=shape[1], image_size=shape[2])
        fonts = _floats(load_records(config))
        return fonts.subset(count, seed, YARDSTICK)
    rng = np.random.default_rng(seed)
    images = rng.random(shape, dtype=np.float32)
    labels = rng.integers(real.num_classes, size=count)
    return LabelledImages(rounded(images), labels)


def read_npz(path: Path) -> LabelledImages:
    """Reads `images` and `labels` from an npz file.

    Privacy: post-processing of DP output, if that is what the file holds.

    Args:
        path: with images (N, H, W), (N, H, W, C) or (N, C, H, W), float in [0, 1] or
            integers in [0, 255], C = 1 or 3, square, 0 = background; and integer labels
            (N,). Other keys are ignored. The real images are fitted to their size and
            channels.

    Raises:
        UserError: missing, damaged, or not as above.
    """
    arrays, _ = read_arrays(
        where=str(path),
        path=path,
        needed={"images", "labels"},
        writer="`fedgs sample RUN -o FILE.npz`",
    )
    records = from_arrays(str(path), arrays)
    side = records.images.shape[2]
    if side < SMALLEST_SIDE:
        raise UserError(
            f"{path}: images of {side} pixels; give at least {SMALLEST_SIDE} on each "
            "side"
        )
    return _floats(records)


def _floats(records: Records) -> LabelledImages:
    return LabelledImages(to_float(records.images), records.labels)


def check_labels(source: str, images: LabelledImages, num_classes: int) -> None:
    """Checks that labels of images are among those of the real data.

    Privacy: as private as the images; of the real data only the number of labels.

    Raises:
        UserError: a label that is not real.
    """
    is_wrong = (images.labels < 0) | (images.labels >= num_classes)
    if is_wrong.any():
        wrong = images.labels[is_wrong][0]
        raise UserError(
            f"{source}: label {wrong}, the real labels are 0 to "
            f"{num_classes - 1}; give labels that fit --data"
        )
