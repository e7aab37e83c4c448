"""What is done to a picture before it is an image of a run: its values, its shape.

The values of a file, of any bits, become 0 to 255; the picture becomes square. Both
depend on this one picture and on public settings, never on another picture: else one
owner's picture would move those of all others, and no epsilon would hold.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.config.settings import CROP, PAD, STRETCH
from fedgs.errors import UserError

BYTE_RANGE = (0.0, 255.0)
# Of a picture's own values, where `normalize` is set: a few burnt-in letters, or a few
# dead pixels, decide nothing.
DARKEST_PERCENTILE = 1
BRIGHTEST_PERCENTILE = 99
IN_GREY = "grey"
IN_COLOUR = "in colour"
MOST_SIDE = 8192  # pixels of a picture
RESIZE_CHUNK = 4096  # images in float32 at a time: bounds the memory
# How black and white are found, in reports.
BYTE_VALUES = "0 to 255"
FLOAT_VALUES = "0 to 1"
OWN_WINDOW = "own window"
OWN_TABLE = "own look-up table"
ALL_BITS = "range of bits"
NOBODY_SAYS = ""  # it is refused unless the settings say it
SAY_THE_RANGE = "give --window LOW,HIGH, as 0,65535, or --normalize"


@dataclass(frozen=True, eq=False)
class Picture:
    """The values of one picture, upright, and what its file says of them.

    Privacy: private.

    Attributes:
        values: shape (1, H, W) for grey or (3, H, W) for RGB, integers or floats.
        declared: the values that are black and white by the file; None where it says
            nothing, as of 16 bits.
        kind: the format of the values, as "8 bits".
        range_of: how the file says which values are black and white.
        is_inverted: whether the lower value is white.
        patient: the number of the person that the file names; "" for nobody.
    """

    values: NDArray[Any]
    declared: tuple[float, float] | None
    kind: str
    range_of: str = NOBODY_SAYS
    is_inverted: bool = False
    patient: str = ""


@dataclass(frozen=True)
class PictureRules:
    """How pictures become images; public, and the same for all of a source.

    Attributes:
        fit: how a picture becomes square: pad, crop or stretch.
        window: the values that become black and white; None: as the file says.
        normalize: whether each picture's own percentiles do.
        fill: the value of what `pad` adds, the background of the source, in [0, 255].
        side: the side of the images; None leaves them as they are, all of one size.
        channels: 1 for grey, 3 for RGB; None: RGB where the picture is in colour.
    """

    fit: str = PAD
    window: tuple[float, float] | None = None
    normalize: bool = False
    fill: int = 0
    side: int | None = None
    channels: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "PictureRules":
        """Returns the rules that a run's settings state.

        Privacy: public.
        """
        fill = 0
        if config.background == "light":  # it is inverted later
            fill = 255
        return cls(
            fit=config.fit,
            window=config.window_limits,
            normalize=config.normalize,
            fill=fill,
            side=config.image_size,
            channels=config.image_channels,
        )

    @property
    def has_own_range(self) -> bool:
        """Whether the rules, and not a file, say which values are black and white."""
        return self.normalize or self.window is not None

    def range_of(self, own: str) -> str:
        """Returns how black and white of a picture are found, for reports.

        Args:
            own: how the file says it.
        """
        if self.normalize:
            return "--normalize"
        if self.window is not None:
            return "--window"
        return own

    def in_bytes(
        self,
        values: NDArray[Any],
        declared: tuple[float, float] | None,
        where: str,
    ) -> NDArray[np.uint8]:
        """Returns the values of one picture as 0 to 255.

        Privacy: reads private data; output private.

        Args:
            values: the values of one picture, any shape, integers or floats.
            declared: the values that its file says are black and white; None where it
                says nothing.
            where: names the picture in errors.

        Raises:
            UserError: nobody says which values are black and white.
        """
        limits = declared
        # What the user says counts more than what the file says.
        if self.window is not None:
            limits = self.window
        if self.normalize:
            percentiles = (DARKEST_PERCENTILE, BRIGHTEST_PERCENTILE)
            lowest, highest = np.percentile(values, percentiles)
            if lowest == highest:
                # Thin strokes on a plain ground: all but a hundredth has one value.
                lowest = values.min()
                highest = values.max()
            limits = (float(lowest), float(highest))
        if limits is None:
            raise UserError(
                f"{where}: it has {values.dtype.itemsize * 8} bits, and nothing says "
                f"which values are black and white; {SAY_THE_RANGE}"
            )
        low, high = limits
        is_unchanged = values.dtype == np.uint8 and limits == BYTE_RANGE
        if is_unchanged:
            return values
        if low == high:  # a picture of one value
            return np.zeros(values.shape, np.uint8)
        # Values outside of the limits are as black, or as white, as those at them. They
        # are cut off first, so that no large one overflows.
        inside = values.astype(np.float64).clip(low, high)
        share = (inside - low) / (high - low)
        return np.rint(255 * share).astype(np.uint8)

    def squared(self, images: NDArray[np.uint8], where: str) -> NDArray[np.uint8]:
        """Returns images of one size as squares.

        Privacy: reads private data; output private.

        Args:
            images: shape (N, C, H, W).
            where: names the images in errors.

        Returns:
            Shape (N, C, S, S); S is the longer side, with `crop` the shorter one, and
            with `stretch` `side` if that is set.

        Raises:
            UserError: a side is too long.
        """
        height = images.shape[2]
        width = images.shape[3]
        # A thin picture of a damaged file would become a square of many gigabytes.
        if max(height, width) > MOST_SIDE:
            raise UserError(
                f"{where}: has {width} x {height} pixels; give pictures of at most "
                f"{MOST_SIDE} pixels a side"
            )
        if height == width:
            return images
        # At once to the size of the run: two resizes would blur twice.
        if self.fit == STRETCH:
            return resize(images, self.side or max(height, width))
        side = max(height, width)
        if self.fit == CROP:
            side = min(height, width)
        count = images.shape[0]
        channels = images.shape[1]
        squares = np.full((count, channels, side, side), self.fill, np.uint8)
        common_height = min(height, side)
        common_width = min(width, side)
        source = _middle(images, common_height, common_width)
        _middle(squares, common_height, common_width)[...] = source
        return squares


def _middle(images: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Returns a view of the middle of images."""
    top = (images.shape[2] - height) // 2
    left = (images.shape[3] - width) // 2
    bottom = top + height
    right = left + width
    return images[:, :, top:bottom, left:right]


@dataclass
class Found:
    """What the pictures of a source were, before anything was done to them.

    Privacy: private; counts of private pictures, for their owner's eyes.

    Attributes:
        sizes: number of pictures of each (width, height).
        kinds: number of pictures of each format of values, as "8 bits".
        ranges: number of pictures of each way in which black and white were found.
        inverted: number of pictures whose lower value is white.
        colours: number of pictures that are `IN_COLOUR` and that are `IN_GREY`.
        examples: what names the first picture of each of these two in errors.
        hidden: number of files and folders that were passed over, because their names
            begin with a dot.
    """

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    ranges: Counter[str] = field(default_factory=Counter)
    inverted: int = 0
    colours: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    hidden: int = 0

    def note(
        self,
        picture: Picture,
        range_of: str,
        is_colour: bool,
        where: str,
        count: int = 1,
    ) -> None:
        """Counts pictures of one shape.

        Args:
            picture: one of them.
            range_of: how its black and white were found.
            is_colour: whether its channels differ.
            where: names it in errors.
            count: number of pictures like it.
        """
        height = picture.values.shape[1]
        width = picture.values.shape[2]
        self.sizes[width, height] += count
        self.kinds[picture.kind] += count
        self.ranges[range_of] += count
        if picture.is_inverted:
            self.inverted += count
        colour = IN_GREY
        if is_colour:
            colour = IN_COLOUR
        self.colours[colour] += count
        self.examples.setdefault(colour, where)


def resize(images: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Resizes with antialiased bilinear interpolation, in chunks.

    Privacy: reads private data; output private.

    Args:
        images: shape (N, C, H, W), uint8.
        side: the side of the result, at least 1.
    """
    import torch
    from torchvision.transforms import functional

    count = images.shape[0]
    channels = images.shape[1]
    resized = np.empty((count, channels, side, side), np.uint8)
    for start in range(0, len(images), RESIZE_CHUNK):
        part = slice(start, start + RESIZE_CHUNK)
        # In float32, and rounded here: uint8 would be rounded in other ways.
        floats = images[part].astype(np.float32)
        chunk = torch.from_numpy(floats)
        chunk = functional.resize(chunk, [side, side], antialias=True)
        rounded = chunk.round()
        resized[part] = rounded.clamp(0, 255).numpy()
    return resized
