"""The records of one source, and how they are fitted to the images of a run.

A reader (`sources`, `npz`, `femnist`, `folder`, `hugging_face`) makes `Records`; `fit`
checks labels, resizes, adds channels and turns a light background dark.
"""

import dataclasses
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, some

DARK, LIGHT, UNCLEAR = "dark-background", "light-background", "unclear"
CLEAR_SHARE = 0.75  # of the border pixels that must agree for a guess
GUESSED_FROM = 4096  # images, evenly spread
MOST_CLASSES = 1000  # a larger label is no class but a mistake
RESIZE_CHUNK = 4096  # images in float32 at a time: bounds the memory


class DataWarning(UserWarning):
    """Something about the data that the user should look at; nothing is refused."""


@dataclass(frozen=True, eq=False)
class Records:
    """The records of one source, before they are split into clients.

    Attributes:
        images: shape (N, channel, height, width), uint8; after `fit` 0 = background.
        labels: shape (N,), int64, in [0, num_classes).
        num_classes: number of labels, at least 1.
        clients: owner of each record, shape (N,), integers or strings; None without.
        polarity: what the source's format declares, dark- or light-background.
        guess: what the pixels look like, as `guess_polarity` of the source's pixels.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    num_classes: int
    clients: NDArray[np.generic] | None = None
    polarity: str = DARK
    guess: str = UNCLEAR


class Gathering:
    """Collects users' images one after another in an array of known capacity.

    Memory that is not used is not touched, so a capacity above the need costs nothing.

    Privacy: reads private data; output private.

    Args:
        capacity: the largest number of records.
        shape: (channel, height, width) of an image.
    """

    def __init__(self, capacity: int, shape: tuple[int, int, int]) -> None:
        self._images = np.empty((capacity, *shape), np.uint8)
        self._labels = np.empty(capacity, np.int64)
        self._sizes: dict[str | int, int] = {}
        self._end = 0

    def add(
        self,
        user: str | int,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64] | int,
    ) -> None:
        """Appends images (n, C, H, W) of one user, in any number of calls."""
        end = self._end + len(images)
        self._images[self._end : end] = images
        self._labels[self._end : end] = labels
        self._sizes[user] = self._sizes.get(user, 0) + len(images)
        self._end = end

    def records(self, data: str, num_classes: int, polarity: str) -> Records:
        """Returns everything; warns about users without images and leaves them out.

        Raises:
            UserError: nobody has an image.
        """
        sizes = {user: size for user, size in self._sizes.items() if size}
        if not sizes:
            raise UserError(
                f"data = {data!r}: none of its {len(self._sizes)} users has an image "
                "of these classes; give other data or --classes all"
            )
        if empty := [user for user in self._sizes if user not in sizes]:
            warnings.warn(
                f"data = {data!r}: {len(empty)} of {len(self._sizes)} users have no "
                f"images and are left out ({some(empty)})",
                DataWarning,
                stacklevel=2,
            )
        owners = np.repeat(np.array([*sizes]), [*sizes.values()])
        used = slice(self._end)
        return Records(
            self._images[used], self._labels[used], num_classes, owners, polarity
        )


def guess_polarity(images: NDArray[np.uint8]) -> str:
    """Guesses from the outermost pixels whether the background is dark or light.

    Privacy: reads private data; output private.

    Args:
        images: shape (N, C, H, W), uint8.

    Returns:
        dark-background, light-background, or unclear where fewer than three quarters
        of the border pixels are on one side of 127.5.

    >>> guess_polarity(np.full((1, 1, 4, 4), 255, np.uint8))
    'light-background'
    """
    part = images[:: -(-len(images) // GUESSED_FROM)] > 127
    middle = part[:, :, 1:-1]
    border = [part[:, :, [0, -1]], middle[..., [0, -1]]]
    share = np.concatenate([pixels.ravel() for pixels in border]).mean()
    if 1 - CLEAR_SHARE < share < CLEAR_SHARE:
        return UNCLEAR
    return LIGHT if share >= CLEAR_SHARE else DARK


def fit(config: RunConfig, records: Records) -> Records:
    """Checks labels against `num_classes`; fits size, channels and polarity.

    Privacy: reads private data; output private.

    Raises:
        UserError: labels beyond `num_classes`, or RGB images for a grey run.
    """
    num_classes = config.num_classes or records.num_classes
    _check_labels(config, records.labels, num_classes)
    images = records.images
    channels = images.shape[1]
    if channels > config.image_channels:
        raise UserError(
            f"image_channels = {config.image_channels}: data = {config.data!r} has RGB "
            "images; give --image-channels 3"
        )
    if images.shape[2:] != (config.image_size, config.image_size):
        images = resize(images, config.image_size)
    if channels < config.image_channels:
        images = np.repeat(images, config.image_channels, axis=1)
    guess = guess_polarity(images)
    declared = records.polarity if config.polarity == "auto" else config.polarity
    if guess not in (declared, UNCLEAR):
        warnings.warn(
            f"polarity = {config.polarity}: data = {config.data!r} is read as "
            f"{declared}, but its border pixels look like {guess}; look at `fedgs data "
            f"inspect {config.data}` and give --polarity {guess} if that is right",
            DataWarning,
            stacklevel=2,
        )
    if declared == LIGHT:
        target = images if images.flags.writeable else None
        images = np.subtract(np.uint8(255), images, out=target)
    return dataclasses.replace(
        records, images=images, num_classes=num_classes, polarity=declared, guess=guess
    )


def _check_labels(
    config: RunConfig, labels: NDArray[np.int64], num_classes: int
) -> None:
    most = max(config.num_classes or 0, MOST_CLASSES)
    beyond = f"num_classes = {num_classes}: "
    for wrong, setting, remedy in (
        (labels < 0, "", "labels from 0"),
        (labels >= most, "", f"labels below {most}"),
        (labels >= num_classes, beyond, f"--num-classes above {labels.max(initial=0)}"),
    ):
        if wrong.any():
            index = int(wrong.argmax())
            raise UserError(
                f"{setting}data = {config.data!r}: image {index} has the label "
                f"{labels[index]}; give {remedy}"
            )


def resize(images: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Resizes with antialiased bilinear interpolation, in chunks.

    Privacy: reads private data; output private.

    Args:
        images: shape (N, C, H, W), uint8.
        side: of the result, at least 1.
    """
    import torch
    from torchvision.transforms import functional

    resized = np.empty((*images.shape[:2], side, side), np.uint8)
    for start in range(0, len(images), RESIZE_CHUNK):
        part = slice(start, start + RESIZE_CHUNK)
        chunk = torch.from_numpy(images[part].astype(np.float32))
        chunk = functional.resize(chunk, [side, side], antialias=True)
        resized[part] = chunk.round().clamp(0, 255).numpy()
    return resized
