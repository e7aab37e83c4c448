"""Bugs of processing, as transformations of images or of labels.

One list for those who plant a bug (`corruption`) and those who look for one
(`fedgs.diagnosis.catalogue`). An entry is a pure function, with a degree where one
exists: the first is what gets planted, all of them are looked for.
"""

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedgs.data.federated import to_float
from fedgs.randomness import stream

Images = NDArray[np.float32]
Labels = NDArray[np.int64]
# Families of entries that are tested together.
INVERSION = "invert"
TURNS = "turns"
_REST = "rest"
Degree = Any  # a number or a pair of numbers; None where there is one degree only


@dataclass(frozen=True)
class Transformation:
    """One bug.

    Attributes:
        name: as of `--bug` and verdicts.
        words: what images of which it is true are.
        degrees: from the one that is planted.
        images: (images, degree) to images; shape (n, C, S, S), float32 in [0, 1].
        labels: (labels, number of classes, degree) to labels, shape (n,), int64.
        is_turn: whether another entry, or itself, undoes it.
        is_linear: whether the mean of changed images is the changed mean, but for what
            is cut off at black and white.
        kin: of entries that a mean of pictures cannot tell apart: a `curve` moves every
            pixel along it, and black stays black; a `zoom` of one cohort out is one of
            the other in; a `veil` makes black and white grey, be it noise that is cut
            off or a part of the images inverted.
    """

    name: str
    words: str
    degrees: tuple[Degree, ...] = (None,)
    images: Callable[[Images, Degree], Images] | None = None
    labels: Callable[[Labels, int, Degree], Labels] | None = None
    is_turn: bool = False
    is_linear: bool = False
    kin: str = ""

    @property
    def is_picture_turn(self) -> bool:
        """Whether it is inversion, a turn or a mirror: any learned picture shows it."""
        return self.is_turn and self.images is not None

    @property
    def family(self) -> str:
        """The entries that are tested together, for what they change is alike."""
        if not self.is_picture_turn:
            return _REST
        if self.name == INVERSION:
            return INVERSION
        return TURNS

    def degrees_of(self, num_classes: int) -> Sequence[Degree]:
        """Returns the degrees; of two classes all pairs, or none of very many."""
        if self.labels is None or self.degrees != (None,):
            return self.degrees
        if num_classes > MOST_PAIRED:
            return []
        if self.name == SWAPPED:  # in which the order says nothing
            return list(itertools.combinations(range(num_classes), 2))
        return list(itertools.permutations(range(num_classes), 2))

    def apply(
        self,
        images: Images,
        labels: Labels,
        num_classes: int,
    ) -> tuple[Images, Labels]:
        """Returns images and labels with the bug in all of them, at the first degree.

        Privacy: private where the images are.
        """
        # The first degree is the one that is planted; the search looks for all of them.
        degrees = self.degrees_of(num_classes)
        if not degrees:  # two labels need two classes
            return images, labels
        if self.images is not None:
            images = self.images(images, degrees[0])
        if self.labels is not None:
            labels = self.labels(labels, num_classes, degrees[0])
        return images, labels


VEIL = "veil"
SWAPPED = "swap-labels"
MOST_PAIRED = 12  # classes whose pairs are looked at: 198


def _turned(quarters: int, is_mirrored: bool) -> Callable[[Images, Degree], Images]:
    def turn(images: Images, degree: Degree) -> Images:
        if is_mirrored:
            images = images[..., ::-1]
        turned = np.rot90(images, quarters, axes=(2, 3))
        return np.ascontiguousarray(turned)

    return turn


def _blur(images: Images, sigma: float) -> Images:
    """Blurs with a Gaussian whose deviation is `sigma` of the side."""
    from scipy.ndimage import gaussian_filter

    pixels = sigma * images.shape[-1]
    smooth = gaussian_filter(images, (0, 0, pixels, pixels), mode="nearest")
    return smooth.astype(np.float32)


def _noise(images: Images, deviation: float) -> Images:
    # The same for any images: an entry of the catalogue is a function.
    rng = stream(0, "transformations/noise")
    noise = rng.normal(0, deviation, images.shape).astype(np.float32)
    noisy = images + noise
    return np.clip(noisy, 0, 1)


def _contrast(images: Images, factor: float) -> Images:
    # About each image's own mean, so that its brightness stays.
    mean = images.mean((1, 2, 3), keepdims=True)
    changed = mean + factor * (images - mean)
    return np.clip(changed, 0, 1).astype(np.float32)


def _brightness(images: Images, factor: float) -> Images:
    return np.clip(factor * images, 0, 1).astype(np.float32)


def _gamma(images: Images, gamma: float) -> Images:
    return np.clip(images, 0, 1) ** np.float32(gamma)


def _shift(images: Images, by: tuple[float, float]) -> Images:
    """Moves to the right and down by shares of the side; black comes in."""
    side = images.shape[-1]
    right = round(by[0] * side)
    down = round(by[1] * side)
    moved = np.roll(images, (down, right), (2, 3))
    for axis, count in ((2, down), (3, right)):
        lines = np.moveaxis(moved, axis, 0)  # a view
        if count > 0:
            lines[:count] = 0
        elif count < 0:
            lines[count:] = 0
    return moved


def _resized(images: Images, side: int) -> Images:
    import torch
    from torchvision.transforms.v2 import functional

    # torch takes no array that is turned about, and warns of one that is read-only.
    pixels = torch.from_numpy(images.copy())
    resized = functional.resize(pixels, [side, side])
    # Interpolation may leave the range by a rounding.
    limited = resized.clamp(0, 1)
    return np.asarray(limited.numpy(), np.float32)


def _crop(images: Images, share: float) -> Images:
    """Keeps the middle, `share` of the side, in the size of the whole."""
    side = images.shape[-1]
    edge = round(side * (1 - share) / 2)
    middle = slice(edge, side - edge)
    return _resized(images[:, :, middle, middle], side)


def _border(images: Images, share: float) -> Images:
    """Puts a white frame over the edge, `share` of the side wide."""
    width = round(share * images.shape[-1])
    width = max(width, 1)
    framed = np.ones_like(images)
    middle = slice(width, -width)
    framed[..., middle, middle] = images[..., middle, middle]
    return framed


def _blank(images: Images, half: tuple[int, int]) -> Images:
    """Blackens one half: (axis, 0 for the first or 1 for the second)."""
    axis, is_second = half
    middle = images.shape[-1] // 2
    blanked = images.copy()
    lines = np.moveaxis(blanked, axis, 0)  # a view
    if is_second:
        lines[middle:] = 0
    else:
        lines[:middle] = 0
    return blanked


def _scale(images: Images, factor: float) -> Images:
    """Shrinks the picture about its centre; around it is black."""
    small = _shrunk(images, factor)
    small_side = small.shape[-1]
    edge = (images.shape[-1] - small_side) // 2
    middle = slice(edge, edge + small_side)
    scaled = np.zeros_like(images)
    scaled[..., middle, middle] = small
    return scaled


def _low_resolution(images: Images, factor: float) -> Images:
    small = _shrunk(images, factor)
    return _resized(small, images.shape[-1])


def _shrunk(images: Images, factor: float) -> Images:
    """Returns the images at `factor` of their side, of two pixels at least."""
    side = round(images.shape[-1] * factor)
    return _resized(images, max(side, 2))


def _compressed(images: Images, quality: int) -> Images:
    """Compresses each channel as a JPEG of grey and reads it again."""
    pixels = np.round(255 * images).astype(np.uint8)
    compressed = np.empty_like(pixels)
    for place in np.ndindex(images.shape[:2]):
        file = io.BytesIO()
        grey = Image.fromarray(pixels[place])
        grey.save(file, "JPEG", quality=quality)
        with Image.open(file) as image:
            compressed[place] = np.asarray(image)
    return to_float(compressed)


def _swap_labels(labels: Labels, num_classes: int, pair: tuple[int, int]) -> Labels:
    one, other = pair
    swapped = labels.copy()
    swapped[labels == one] = other
    swapped[labels == other] = one
    return swapped


def _shift_labels(labels: Labels, num_classes: int, by: int) -> Labels:
    return (labels + by) % num_classes


def _mislabel(labels: Labels, num_classes: int, pair: tuple[int, int]) -> Labels:
    true, wrong = pair
    return np.where(labels == true, wrong, labels)


def _invert(images: Images, degree: Degree) -> Images:
    return np.float32(1) - images


_TURNS = {
    "rotate": ("rotated by 90 degrees", 1, False),
    "rotate-180": ("rotated by 180 degrees", 2, False),
    "rotate-270": ("rotated by 270 degrees", 3, False),
    "mirror": ("mirrored, left for right", 0, True),
    "upside-down": ("mirrored, top for bottom", 2, True),
    "transpose": ("mirrored at the falling diagonal", 1, True),
    "anti-transpose": ("mirrored at the rising diagonal", 3, True),
}
TRANSFORMATIONS = (
    Transformation(
        name=INVERSION,
        words="inverted",
        images=_invert,
        is_turn=True,
        is_linear=True,
        kin=VEIL,
    ),
    *(
        Transformation(
            name=name,
            words=words,
            images=_turned(quarters, mirrored),
            is_turn=True,
            is_linear=True,
        )
        for name, (words, quarters, mirrored) in _TURNS.items()
    ),
    Transformation(
        name="blur",
        words="blurred",
        degrees=(0.08, 0.04),
        images=_blur,
        is_linear=True,
    ),
    Transformation(
        name="noise",
        words="noisy",
        degrees=(0.3, 0.15),
        images=_noise,
        kin=VEIL,
    ),
    Transformation(
        name="contrast",
        words="of less contrast",
        degrees=(0.33, 0.66),
        images=_contrast,
        is_linear=True,
    ),
    Transformation(
        name="brightness",
        words="of other brightness",
        degrees=(0.4, 0.7, 1.6),
        images=_brightness,
        kin="curve",
    ),
    Transformation(
        name="gamma",
        words="of another gamma",
        degrees=(2.2, 0.45),
        images=_gamma,
        kin="curve",
    ),
    Transformation(
        name="shift",
        words="shifted",
        degrees=((0.15, 0), (-0.15, 0), (0, 0.15), (0, -0.15)),
        images=_shift,
        is_linear=True,
    ),
    Transformation(
        name="crop",
        words="cropped",
        degrees=(0.7, 0.85),
        images=_crop,
        is_linear=True,
        kin="zoom",
    ),
    Transformation(
        name="border",
        words="framed in white",
        degrees=(0.08, 0.15),
        images=_border,
        is_linear=True,
    ),
    Transformation(
        name="blank",
        words="half black",
        degrees=((3, 1), (3, 0), (2, 1), (2, 0)),
        images=_blank,
        is_linear=True,
    ),
    Transformation(
        name="scale",
        words="scaled down",
        degrees=(0.7, 0.85),
        images=_scale,
        is_linear=True,
        kin="zoom",
    ),
    Transformation(
        name="low-resolution",
        words="of low resolution",
        degrees=(0.3, 0.5),
        images=_low_resolution,
        is_linear=True,
    ),
    Transformation(
        name="compression",
        words="compressed",
        degrees=(5, 15),
        images=_compressed,
    ),
    Transformation(
        name=SWAPPED,
        words="with two labels swapped",
        labels=_swap_labels,
        is_turn=True,
    ),
    Transformation(
        name="shift-labels",
        words="with shifted labels",
        degrees=(1, -1),
        labels=_shift_labels,
        is_turn=True,
    ),
    Transformation(
        name="mislabel",
        words="with one class mislabelled",
        labels=_mislabel,
    ),
)
