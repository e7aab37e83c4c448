"""One picture file, as pixels that can be trained on.

Grey and 8-bit colour pictures are read; what would need a guess is refused: a
transparent background, 16 bits, and pictures that are not square.
"""

import io
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedgs.data.records import resize
from fedgs.errors import UserError, wrap_error
from fedgs.files import read_bytes

GREY_MODES = ("1", "L")
COLOUR_MODES = ("RGB", "RGBA", "LA", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB")


def read_picture(
    source: Path | bytes, where: str, channels: int | None, side: int | None
) -> NDArray[np.uint8]:
    """Reads one square picture.

    A colour picture whose three channels are equal counts as grey.

    Privacy: reads private data; output private.

    Args:
        source: a file, or the content of one; PNG, JPEG or what else Pillow reads.
        where: names the picture in errors.
        channels: 1 for grey, 3 for RGB (grey pictures are repeated), None for what the
            picture is.
        side: to which it is resized, None for its own.

    Returns:
        Shape (channels, side, side), uint8: the background is as in the picture.

    Raises:
        UserError: unreadable, not square, transparent, above 8 bits per channel, or in
            colour although channels is 1.
    """
    problem = f"{where}: cannot be read as a picture"
    with (
        wrap_error(Exception, problem, "replace or remove it"),
        warnings.catch_warnings(action="ignore"),  # of metadata that nothing uses
    ):
        # Of more pixels than this library takes for an attack, nothing is unpacked.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        content = source if isinstance(source, bytes) else read_bytes(source)
        with Image.open(io.BytesIO(content)) as opened:
            # To crop or to stretch would be a guess.
            if opened.width != opened.height:
                raise UserError(
                    f"{where}: has {opened.width} x {opened.height} pixels; give "
                    "square pictures (crop or pad them)"
                )
            pixels = pixels_of(ImageOps.exif_transpose(opened), where)
    if channels == 3:  # grey ones are repeated, colour stays
        pixels = np.repeat(pixels, 3 // len(pixels), axis=0)
    elif (pixels == pixels[:1]).all():
        pixels = pixels[:1]
    elif channels == 1:
        raise UserError(f"{where}: is in colour; give --image-channels 3")
    if side is None or pixels.shape[1] == side:
        return pixels
    return resize(pixels[None], side)[0]


def pixels_of(picture: Image.Image, where: str) -> NDArray[np.uint8]:
    """Returns the pixels of a picture, grey (1, H, W) or RGB (3, H, W), uint8.

    Privacy: reads private data; output private.

    Raises:
        UserError: transparent, or of another format than 8 bits per channel.
    """
    if picture.mode in GREY_MODES and not picture.has_transparency_data:
        return np.asarray(picture.convert("L"))[None]
    if picture.mode not in (*GREY_MODES, *COLOUR_MODES):
        raise UserError(
            f"{where}: has the pixel format {picture.mode}; give 8 bits per channel, "
            "grey or RGB"
        )
    if picture.has_transparency_data:
        # What is behind a transparent pixel, black or white, nobody has said.
        alpha = np.asarray(picture.convert("RGBA"))[..., 3]
        if alpha.min() < 255:
            raise UserError(
                f"{where}: has transparent pixels; flatten it onto its background"
            )
    return np.moveaxis(np.asarray(picture.convert("RGB")), 2, 0)
