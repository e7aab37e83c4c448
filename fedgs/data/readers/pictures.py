"""Picture files, as images that can be trained on: PNG, JPEG, DICOM.

Grey and RGB pictures of 8 bits are read as they are; grey ones of 16 bits where the
settings say which values are black and white; DICOM files say it themselves. What would
need a guess is refused: a transparent background, or who the patient of a file is.
"""

import io
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedgs.data.picture_rules import (
    BYTE_RANGE,
    BYTE_VALUES,
    Found,
    Picture,
    PictureRules,
    resize,
)
from fedgs.data.readers.dicom import SUFFIX, is_bare_dicom, is_dicom, read_dicom
from fedgs.errors import UserError, wrap_error
from fedgs.files import read_bytes

GREY_MODES = ("1", "L")
DEEP_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I")  # of PNG: 16 bits
COLOUR_MODES = ("RGB", "RGBA", "LA", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB")
REMOVE = "replace or remove it"
# Of files. Others, such as EPS, are programs that somebody would have to run.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
PORTABLE = "PPM"  # and PGM
PHOTOMETRIC = 262  # the tag of a TIFF that says which value is white
WHITE_IS_ZERO = 0
PHOTOGRAPH = "MPO"  # a JPEG of telephones, with more views of the scene behind it


class Patients:
    """Who the owners of DICOM files are, by what the files themselves say.

    An owner of two patients would be one client for both; a patient who is two owners
    would be protected less than the guarantee says. Neither is told from a name.

    Privacy: private. No error shows what identifies a person.
    """

    def __init__(self) -> None:
        """Starts without any."""
        self._patient_of_owner: dict[str, tuple[str, str]] = {}
        self._owner_of_patient: dict[str, tuple[str, str]] = {}

    def check(self, owner: str, patient: str, where: str) -> None:
        """Notes one more file, and refuses one that contradicts those before.

        Args:
            owner: whose file it is, by the source.
            patient: whose it is, by the file.
            where: names the file in errors.

        Raises:
            UserError: a file of the same owner is of another patient, or one of another
                owner of the same patient.
        """
        known, first = self._patient_of_owner.setdefault(owner, (patient, where))
        if known != patient:
            raise UserError(
                f"{where}: it is of another patient (PatientID) than {first}, and "
                f"both are of the owner {owner!r}; give each patient one owner's name"
            )
        known, first = self._owner_of_patient.setdefault(patient, (owner, where))
        if known != owner:
            raise UserError(
                f"{where}: it is of the same patient (PatientID) as {first}, and the "
                f"owners are {owner!r} and {known!r}; give each patient one owner's "
                "name, or blank the PatientID where it names nobody"
            )


@dataclass(frozen=True)
class PictureReader:
    """Reads the pictures of one source, all by the same rules.

    Attributes:
        rules: public.
        found: what the pictures were, counted as they are read.
        patients: the owners of the persons that DICOM files name.
    """

    rules: PictureRules
    found: Found = field(default_factory=Found)
    patients: Patients = field(default_factory=Patients)

    def read(
        self,
        source: Path | bytes,
        where: str,
        owner: str | None = None,
    ) -> NDArray[np.uint8]:
        """Reads one picture file as an image.

        Privacy: reads private data; output private.

        Args:
            source: a file, or the content of one.
            where: names the picture in errors.
            owner: whose it is; None where the source names nobody.

        Returns:
            Shape (channels, side, side); the background is as in the picture.

        Raises:
            UserError: unreadable, transparent, of 16 bits without a window, in colour
                although `channels` is 1, or a file of another patient than the owner's
                other files.
        """
        name = ""
        if isinstance(source, Path):
            name = source.name
        problem = f"{where}: it cannot be read as a picture"
        if name.lower().endswith(SUFFIX):
            problem = (
                f"{where}: it has no mark of DICOM, and cannot be read as a picture"
            )
        with (
            wrap_error(Exception, problem, REMOVE),
            warnings.catch_warnings(action="ignore"),  # of metadata that nothing uses
        ):
            # Of more pixels than this library takes for an attack, nothing is unpacked.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            content = source
            if isinstance(content, Path):
                content = read_bytes(content)
            if not content:
                raise UserError(f"{where}: it is empty; {REMOVE}")
            if is_dicom(content) or is_bare_dicom(content, name):
                picture = read_dicom(content, where, self.rules.has_own_range)
            else:
                with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
                    picture = opened_picture(opened, where)
        if owner is not None and picture.patient:
            self.patients.check(owner, picture.patient, where)
        return self.image_of(picture, where)

    def image_of(self, picture: Picture, where: str) -> NDArray[np.uint8]:
        """Returns the image of a picture: its values, then its channels, its shape.

        Privacy: reads private data; output private.

        Returns:
            Shape (channels, side, side).

        Raises:
            UserError: of 16 bits without a window, or in colour although `channels`
                is 1.
        """
        rules = self.rules
        pixels = rules.in_bytes(picture.values, picture.declared, where)
        if picture.is_inverted:
            pixels = np.uint8(255) - pixels
        is_grey = bool((pixels == pixels[:1]).all())
        self.found.note(
            picture,
            range_of=rules.range_of(picture.range_of),
            is_colour=not is_grey,
            where=where,
        )
        if rules.channels == 3:  # grey ones are repeated, colour stays
            repeats = 3 // len(pixels)
            pixels = np.repeat(pixels, repeats, axis=0)
        elif is_grey:
            pixels = pixels[:1]
        elif rules.channels == 1:
            raise UserError(
                f"{where}: it is in colour; give --image-channels 3, or remove it"
            )
        square = rules.squared(pixels[None], where)
        if rules.side is not None and square.shape[2] != rules.side:
            square = resize(square, rules.side)
        return square[0]


def opened_picture(opened: Image.Image, where: str) -> Picture:
    """Returns the values of a picture of Pillow, upright.

    Privacy: reads private data; output private.

    Raises:
        UserError: transparent, of several pictures, of a format that is neither grey
            nor RGB, or in colour of 16 bits.
    """
    frames = getattr(opened, "n_frames", 1)
    if frames > 1 and opened.format != PHOTOGRAPH:
        raise UserError(
            f"{where}: it contains {frames} pictures; give files of one picture each"
        )
    _check_depth(opened, where)
    # A photograph's orientation tag is followed.
    picture = ImageOps.exif_transpose(opened)
    mode = picture.mode
    if mode in GREY_MODES and not picture.has_transparency_data:
        values = np.asarray(picture.convert("L"))
        return _of_bytes(values[None])
    if mode in DEEP_MODES:
        values = np.asarray(picture)
        see_through = picture.info.get("transparency")  # a value of pixels
        if see_through is not None and (values == see_through).any():
            raise _transparent(where)
        if opened.format == PORTABLE:  # Pillow has its 16 bits in 32
            values = values.astype(np.uint16)
        return Picture(
            values=values[None],
            declared=None,
            kind=f"{8 * values.dtype.itemsize} bits",
            is_inverted=_is_white_zero(opened),
        )
    if mode not in (*GREY_MODES, *COLOUR_MODES):
        raise UserError(
            f"{where}: it has the pixel format {mode}; give 8 or 16 bits per channel, "
            "grey or RGB"
        )
    if picture.has_transparency_data:
        # What is behind a transparent pixel, black or white, nobody has said.
        channels = np.asarray(picture.convert("RGBA"))
        alpha = channels[..., 3]
        if alpha.min() < 255:
            raise _transparent(where)
    channels = np.asarray(picture.convert("RGB"))
    values = np.moveaxis(channels, 2, 0)
    return _of_bytes(values)


def _of_bytes(values: NDArray[np.uint8]) -> Picture:
    """Returns a picture of 8 bits, which says itself what is black and white."""
    return Picture(
        values=values,
        declared=BYTE_RANGE,
        kind="8 bits",
        range_of=BYTE_VALUES,
    )


def _is_white_zero(opened: Image.Image) -> bool:
    """Tells whether 0 is white in a TIFF; of 8 bits, Pillow inverts it already."""
    tags = getattr(opened, "tag_v2", {})
    return tags.get(PHOTOMETRIC) == WHITE_IS_ZERO


def _transparent(where: str) -> UserError:
    """Returns the error of a picture with transparent pixels."""
    return UserError(
        f"{where}: it has transparent pixels; flatten it onto its background"
    )


def _check_depth(opened: Image.Image, where: str) -> None:
    """Refuses a PNG, TIFF or PPM of 16 bits per channel of which Pillow keeps 8.

    Pillow has no colour, and no transparency, of 16 bits, and says nothing.
    """
    if opened.mode in DEEP_MODES:
        return
    # Until a file is unpacked, its tiles say how it stores pixels, as "RGB;16B".
    for tile in getattr(opened, "tile", ()):
        stored_as = str(tile[3])
        is_deep = ";16" in stored_as
        is_scaled = opened.format == PORTABLE and isinstance(tile[3], tuple)
        if is_scaled and opened.mode == "RGB":
            _, largest_value = tile[3]
            is_deep = largest_value > BYTE_RANGE[1]
        if is_deep:
            raise UserError(
                f"{where}: it has 16 bits per channel, and is in colour or has "
                "transparency; give 8 bits per channel, or grey of 16 bits alone"
            )
