"""One DICOM file, as values of one picture.

pydicom, of the extra `dicom`, reads the file, unpacks its pixels and applies what its
header says of them: the rescale to the values of the device, and the first window or
look-up table of the display. The number of the patient is read for one thing: files of
one owner must not be of two patients.

Source: DICOM PS3.3, C.7.6.3 (pixels), C.11.1 (rescale), C.11.2 (window).
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedgs.data.picture_rules import Picture
from fedgs.errors import UserError, imported, wrap_error

DICOM_EXTRA = "'fedgs[dicom]'"
PREAMBLE = 128  # bytes before the mark of the format
MARK = b"DICM"
GREY = ("MONOCHROME1", "MONOCHROME2")
INVERTED = "MONOCHROME1"  # its lowest value is white
# pydicom makes RGB of what JPEG stores.
COLOURED = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
DECOMPRESS = (
    "install its codec with `pip install 'pylibjpeg[all]'`, or unpack the file with "
    "`gdcmconv --raw IN OUT`"
)


def is_dicom(content: bytes) -> bool:
    """Tells whether the content of a file has the mark of DICOM."""
    end = PREAMBLE + len(MARK)
    return content[PREAMBLE:end] == MARK


def has_mark(path: Path) -> bool:
    """Tells whether a regular file has the mark of DICOM; False if it is unreadable."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return is_dicom(file.read(PREAMBLE + len(MARK)))
    return False


def read_dicom(content: bytes, where: str, is_raw: bool) -> Picture:
    """Reads the picture of a DICOM file.

    Privacy: reads private data; output private.

    Args:
        content: the content of the file.
        where: names the file in errors.
        is_raw: whether to leave out the window of the file, because the settings say
            which of the values of the device are black and white.

    Raises:
        UserError: pydicom or a codec is missing, the file is damaged, or it holds
            another thing than one picture, grey or RGB.
    """
    pydicom = imported("pydicom", where, DICOM_EXTRA)
    remedy = "get it again, or remove it"
    with wrap_error(Exception, f"{where}: it cannot be read as DICOM", remedy):
        dataset = pydicom.dcmread(io.BytesIO(content))
        _check(dataset, where)
        pixels = _unpacked(dataset, where)
        if dataset.PhotometricInterpretation not in GREY:
            return Picture(
                values=np.moveaxis(pixels, 2, 0),
                declared=(0, 2**dataset.BitsStored - 1),
                kind=f"DICOM, {dataset.BitsStored} bits, colour",
                patient=_patient(dataset),
            )
        values, declared = _grey(dataset, pixels, is_raw)
        return Picture(
            values=values[None],
            declared=declared,
            kind=f"DICOM, {dataset.BitsStored} bits",
            is_inverted=dataset.PhotometricInterpretation == INVERTED,
            patient=_patient(dataset),
        )


def _check(dataset: Any, where: str) -> None:
    """Refuses a file that holds no picture, or several, or one of other colours."""
    if "PixelData" not in dataset:
        raise UserError(f"{where}: it contains no picture (PixelData); get it again")
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames != 1:
        raise UserError(
            f"{where}: it contains {frames} frames (NumberOfFrames); give files of "
            "one picture each"
        )
    colours = dataset.PhotometricInterpretation
    if colours not in (*GREY, *COLOURED):
        raise UserError(
            f"{where}: it has the colours {colours} (PhotometricInterpretation); give "
            f"{', '.join(GREY)} or RGB"
        )
    count = dataset.Rows * dataset.Columns
    most = Image.MAX_IMAGE_PIXELS or count
    if count > most:
        raise UserError(f"{where}: it has {count} pixels; give at most {most}")


def _unpacked(dataset: Any, where: str) -> NDArray[Any]:
    """Returns the stored values, (H, W) or (H, W, 3)."""
    syntax = dataset.file_meta.TransferSyntaxUID
    if not syntax.is_compressed:
        pixels: NDArray[Any] = dataset.pixel_array
        return pixels
    problem = f"{where}: its pixels, compressed as {syntax.name}, cannot be unpacked"
    with wrap_error(Exception, problem, DECOMPRESS):
        pixels = dataset.pixel_array
    return pixels


def _grey(
    dataset: Any,
    pixels: NDArray[Any],
    is_raw: bool,
) -> tuple[NDArray[Any], tuple[float, float]]:
    """Returns values (H, W), and which of them are black and white.

    Without a window of the file these are the ends of what its bits can store.
    """
    display = imported("pydicom.pixels", "a DICOM file", DICOM_EXTRA)
    values = display.apply_rescale(pixels, dataset)
    has_window = dataset.get("WindowCenter") is not None
    if is_raw or not (dataset.get("VOILUTSequence") or has_window):
        stored = _stored_ends(dataset)
        black, white = display.apply_rescale(stored, dataset)
        return values, (float(black), float(white))
    if dataset.get("VOILUTSequence"):
        bits = dataset.VOILUTSequence[0].LUTDescriptor[2]
        shown = display.apply_voi(values, dataset)
        return shown, (0, 2**bits - 1)
    # What is far outside the window becomes the ends of the display.
    far = np.array([-1e12, 1e12])
    black, white = display.apply_windowing(far, dataset)
    shown = display.apply_windowing(values, dataset)
    return shown, (float(black), float(white))


def _stored_ends(dataset: Any) -> NDArray[np.int64]:
    """Returns the smallest and the largest value that the bits can store."""
    bits = dataset.BitsStored
    if dataset.PixelRepresentation == 0:  # without a sign
        return np.array([0, 2**bits - 1])
    half = 2 ** (bits - 1)
    return np.array([-half, half - 1])


def _patient(dataset: Any) -> str:
    """Returns the number of the patient, "" where the file names nobody."""
    return str(dataset.get("PatientID") or "").strip()
