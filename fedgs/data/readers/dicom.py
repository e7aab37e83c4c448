"""One DICOM file, as values of one picture.

pydicom, of the extra `dicom`, reads the file, unpacks its pixels and applies what its
header says of them: the rescale to the values of the device, and the first window or
look-up table of the display. The number of the patient is read for one thing: files of
one owner must not be of two patients.

Source: DICOM PS3.3, C.7.6.3 (pixels), C.11.1 (rescale), C.11.2 (window).
"""

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedgs.config.fields import shortened
from fedgs.data.picture_rules import ALL_BITS, OWN_TABLE, OWN_WINDOW, Picture
from fedgs.errors import UserError, imported, wrap_error

DICOM_EXTRA = "'fedgs[dicom]'"
PREAMBLE = 128  # bytes before the mark of the format
MARK = b"DICM"
# The first group of a file that begins without preamble and mark: of the file, or of
# the picture. No format of other pictures that is read begins with one of them.
FIRST_GROUPS = (b"\x02\x00", b"\x08\x00")
SUFFIX = ".dcm"
GREY = ("MONOCHROME1", "MONOCHROME2")
INVERTED = "MONOCHROME1"  # its lowest value is white
# pydicom makes RGB of what JPEG stores.
COLOURED = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
WINDOW = ("WindowCenter", "WindowWidth")
ABOVE_ZERO = math.ulp(0.0)  # the smallest number above 0
# The smallest width of a window, by the function of the display. By the first one, a
# width of 1 is a step.
LEAST_WIDTH = {"LINEAR": 1.0, "LINEAR_EXACT": ABOVE_ZERO, "SIGMOID": ABOVE_ZERO}
UNPACK = "unpack the file with `gdcmconv --raw IN OUT`"
INSTALL_CODEC = "install its codec with `pip install 'pylibjpeg[all]'`"
# Without them nothing says what the bytes of the pixels mean.
NEEDED = (
    "PhotometricInterpretation",
    "Rows",
    "Columns",
    "SamplesPerPixel",
    "BitsAllocated",
    "BitsStored",
    "PixelRepresentation",
)


def is_dicom(content: bytes) -> bool:
    """Tells whether the content of a file has the mark of DICOM."""
    end = PREAMBLE + len(MARK)
    return content[PREAMBLE:end] == MARK


def is_bare_dicom(content: bytes, name: str) -> bool:
    """Tells whether a file without the mark is DICOM by its name and its first group.

    Some old devices and archives leave the preamble and the mark out.
    """
    return name.lower().endswith(SUFFIX) and content.startswith(FIRST_GROUPS)


def has_mark(path: Path) -> bool:
    """Tells whether a regular file has the mark of DICOM; False if it is unreadable."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return is_dicom(file.read(PREAMBLE + len(MARK)))
    return False


def read_dicom(content: bytes, where: str, is_raw: bool) -> Picture:
    """Reads the picture of a DICOM file.

    Privacy: reads private data; output private.

    Args:
        content: the content of the file, with the mark of DICOM or without it.
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
        dataset = pydicom.dcmread(io.BytesIO(content), force=True)  # without a mark
        _check(dataset, where)
        _lift_groups(dataset)
        _complete_syntax(dataset, where)
        pixels = _unpacked(dataset, where)
        _check_shape(dataset, pixels, where)
        if dataset.PhotometricInterpretation not in GREY:
            return Picture(
                values=np.moveaxis(pixels, 2, 0),
                declared=(0, 2**dataset.BitsStored - 1),
                range_of=ALL_BITS,
                kind=f"DICOM, {dataset.BitsStored} bits, colour",
                patient=_patient(dataset),
            )
        _check_rescale(dataset, where)
        values, declared, range_of = _grey(dataset, pixels, where, is_raw)
        return Picture(
            values=values[None],
            declared=declared,
            range_of=range_of,
            kind=f"DICOM, {dataset.BitsStored} bits",
            is_inverted=dataset.PhotometricInterpretation == INVERTED,
            patient=_patient(dataset),
        )


def _check(dataset: Any, where: str) -> None:
    """Refuses a file that holds no picture, or several, or one of other colours."""
    if not dataset.get("PixelData"):
        raise UserError(f"{where}: it contains no picture (PixelData); get it again")
    _check_present(dataset, where, NEEDED)
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames != 1:
        raise UserError(
            f"{where}: it contains {frames} frames (NumberOfFrames); give files of "
            "one picture each"
        )
    high = dataset.get("HighBit")
    if high is not None and high != dataset.BitsStored - 1:
        raise UserError(
            f"{where}: its values end at bit {high} (HighBit) and have "
            f"{dataset.BitsStored} bits (BitsStored), so they do not begin at bit 0, "
            "which alone is read; get it again, or remove it"
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


def _check_present(dataset: Any, where: str, names: tuple[str, ...]) -> None:
    """Refuses a file whose header lacks an element, or has it without a value."""
    missing: list[str] = []
    for name in names:
        # As the file has it: what is no number cannot be converted to one.
        if name not in dataset or dataset.get_item(name).value in (None, "", b""):
            missing.append(name)
    if missing:
        raise UserError(
            f"{where}: its header lacks {', '.join(missing)}, without which its pixels "
            "cannot be read; get it again, or remove it"
        )


def _lift_groups(dataset: Any) -> None:
    """Moves to the top what an enhanced file says of its only frame elsewhere.

    Source: DICOM PS3.3, C.7.6.16.2.9 (rescale) and C.7.6.16.2.10 (window).
    """
    for groups in (
        "SharedFunctionalGroupsSequence",
        "PerFrameFunctionalGroupsSequence",
    ):
        for group in dataset.get(groups) or ():
            for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
                for item in group.get(name) or ():
                    for tag in item.keys() - dataset.keys():
                        dataset[tag] = item.get_item(tag)  # read where it is used


def _check_shape(dataset: Any, pixels: NDArray[Any], where: str) -> None:
    """Refuses pixels that are more or fewer than those of one picture."""
    shape = (dataset.Rows, dataset.Columns)
    if dataset.PhotometricInterpretation not in GREY:
        shape = (*shape, 3)
    if pixels.shape != shape:
        raise UserError(
            f"{where}: its pixels have the shape {pixels.shape}, and its header says "
            f"{shape} (Rows, Columns, PhotometricInterpretation); give files of one "
            "picture each, or get it again"
        )


def _check_rescale(dataset: Any, where: str) -> None:
    """Refuses half a rescale, and one that makes all values one, or none."""
    names = ("RescaleSlope", "RescaleIntercept")
    if not any(name in dataset for name in names):
        return
    _check_present(dataset, where, names)
    for name in names:
        value = _number(dataset, name)
        is_flat = name == "RescaleSlope" and value == 0
        if is_flat or value is None:
            raise _flat(where, _said(dataset, name))


def _check_window(dataset: Any, where: str) -> None:
    """Refuses a window of the file that is none, where it would be applied."""
    function = dataset.get("VOILUTFunction") or "LINEAR"
    if function not in LEAST_WIDTH:
        raise _no_window(where, f"VOILUTFunction = {function}")
    for name in WINDOW:
        value = _number(dataset, name)
        is_narrow = value is not None and value < LEAST_WIDTH[function]
        if value is None or (name == "WindowWidth" and is_narrow):
            raise _no_window(where, _said(dataset, name))


def _no_window(where: str, element: str) -> UserError:
    """Returns the error of a file by whose window nothing is black or white."""
    return UserError(
        f"{where}: its window has {element}, by which black and white cannot be told "
        "apart; give --window LOW,HIGH, get it again, or remove it"
    )


def _has_window(dataset: Any) -> bool:
    """Tells whether a file has a window, or half of one; an empty one is none."""
    return any(_shown(dataset, name) for name in WINDOW)


def _number(dataset: Any, name: str) -> float | None:
    """Returns a value, or that of the first window, None if it is no finite number."""
    try:
        value = dataset.get(name)
        has_several = not isinstance(value, int | float)
        if has_several and name in WINDOW:
            value = value[0]
        number = float(value)
    except Exception:  # text, or nothing, of which pydicom makes many errors
        return None
    if math.isfinite(number):
        return number
    return None


def _said(dataset: Any, name: str) -> str:
    """Returns what a file says of a number, whatever it is, for an error."""
    value = _number(dataset, name)
    shown = _shown(dataset, name)
    if value is not None:
        return f"{name} = {value:g}"
    if shown:
        return f"{name} = {shown}"
    return f"no {name}"


def _shown(dataset: Any, name: str) -> str:
    """Returns the value of an element of text for an error, "" if it has none."""
    if name not in dataset:
        return ""
    value = dataset.get_item(name).value
    if isinstance(value, bytes):
        value = value.decode("ascii", "backslashreplace")
    if value is None:
        return ""
    return shortened(str(value).strip(" \0"))


def _flat(where: str, rescale: str) -> UserError:
    """Returns the error of a file by whose rescale black is white."""
    return UserError(
        f"{where}: it has {rescale}, by which black and white cannot be told apart; "
        "get it again, or remove it"
    )


def _complete_syntax(dataset: Any, where: str) -> None:
    """Sets how the pixels are stored where a file without a mark does not say it.

    pydicom has found out how the header is stored, and pixels that are not compressed
    are stored in the same way.
    """
    if "TransferSyntaxUID" in dataset.file_meta:
        return
    if dataset["PixelData"].is_undefined_length:
        raise UserError(
            f"{where}: its pixels are compressed, and it does not say how "
            "(TransferSyntaxUID); get it again, or remove it"
        )
    uid = imported("pydicom.uid", where, DICOM_EXTRA)
    is_implicit, is_little = dataset.original_encoding
    syntax = uid.ExplicitVRLittleEndian
    if is_implicit:
        syntax = uid.ImplicitVRLittleEndian
    elif not is_little:
        syntax = uid.ExplicitVRBigEndian
    dataset.file_meta.TransferSyntaxUID = syntax


def _unpacked(dataset: Any, where: str) -> NDArray[Any]:
    """Returns the stored values, (H, W) or (H, W, 3)."""
    syntax = dataset.file_meta.TransferSyntaxUID
    if not syntax.is_compressed:
        pixels: NDArray[Any] = dataset.pixel_array
        return pixels
    problem = f"{where}: its pixels, compressed as {syntax.name}, cannot be unpacked"
    remedy = f"{INSTALL_CODEC}, or {UNPACK}"
    codecs = _codecs(dataset)
    if codecs is None:
        remedy = UNPACK
    elif codecs:
        problem += " by the codec that is installed; they are probably damaged"
        remedy = f"get it again, or {UNPACK}"
    with wrap_error(Exception, problem, remedy):
        pixels = dataset.pixel_array
    return pixels


def _codecs(dataset: Any) -> set[str] | None:
    """Returns the codecs that are installed for pixels that are compressed like these.

    Returns:
        None where no package has one, as for films.
    """
    decoders = imported("pydicom.pixels", "a DICOM file", DICOM_EXTRA)
    uid = imported("pydicom.uid", "a DICOM file", DICOM_EXTRA)
    syntax = dataset.file_meta.TransferSyntaxUID
    try:
        codecs = set(decoders.get_decoder(syntax).available_plugins)
    except NotImplementedError:
        return None
    # Of this kind, Pillow unpacks 8 bits only.
    if syntax == uid.JPEGExtended12Bit and dataset.BitsStored > 8:
        codecs.discard("pillow")
    return codecs


def _grey(
    dataset: Any,
    pixels: NDArray[Any],
    where: str,
    is_raw: bool,
) -> tuple[NDArray[Any], tuple[float, float], str]:
    """Returns values (H, W), which of them are black and white, and who says so.

    Without a window of the file these are the ends of what its bits can store. Black is
    never above white: a negative slope of the rescale turns the ends around.
    """
    display = imported("pydicom.pixels", "a DICOM file", DICOM_EXTRA)
    if dataset.get("ModalityLUTSequence"):
        table = dataset.ModalityLUTSequence[0]
        least, _ = _stored_ends(dataset)
        values, highest = _looked_up(dataset, table, pixels, least, where)
        lowest = 0.0
    else:
        values = display.apply_rescale(pixels, dataset)
        ends = display.apply_rescale(_stored_ends(dataset), dataset)
        lowest = float(ends.min())
        highest = float(ends.max())
    if lowest == highest:
        raise _flat(where, "a rescale (RescaleSlope) with equal ends")
    values = _without_padding(dataset, pixels, values)
    has_table = bool(dataset.get("VOILUTSequence"))
    if is_raw or not (has_table or _has_window(dataset)):
        return values, (lowest, highest), ALL_BITS
    if has_table:
        table = dataset.VOILUTSequence[0]
        shown, white = _looked_up(dataset, table, values, lowest, where)
        return shown, (0, white), OWN_TABLE
    _check_window(dataset, where)
    # What is far outside the window becomes the ends of the display.
    far = np.array([-1e12, 1e12])
    black, white = display.apply_windowing(far, dataset)
    shown = display.apply_windowing(values, dataset)
    if black > white:  # what is below the window is black all the same
        shown = black + white - shown
        black, white = white, black
    return shown, (float(black), float(white)), OWN_WINDOW


def _without_padding(
    dataset: Any,
    pixels: NDArray[Any],
    values: NDArray[Any],
) -> NDArray[Any]:
    """Returns values whose padding is as black as the blackest of the picture.

    Devices fill what they have not seen with a value far outside, which would count
    where a picture's own values say what is black and white.

    Args:
        dataset: the file, which says what of the stored values is padding.
        pixels: the stored values, shape (H, W).
        values: what they stand for, shape (H, W).

    Source: DICOM PS3.3, C.7.5.1.1.2.
    """
    first = dataset.get("PixelPaddingValue")
    if first is None:
        return values
    last = dataset.get("PixelPaddingRangeLimit")
    if last is None:
        last = first
    is_padding = (pixels >= min(first, last)) & (pixels <= max(first, last))
    if is_padding.all():
        return values
    seen = values[~is_padding]
    black = seen.min()
    if dataset.PhotometricInterpretation == INVERTED:
        black = seen.max()
    return np.where(is_padding, black, values)


def _looked_up(
    dataset: Any,
    table: Any,
    values: NDArray[Any],
    lowest: float,
    where: str,
) -> tuple[NDArray[np.int64], float]:
    """Returns what a look-up table of the file makes of values, and its white.

    pydicom's own look-up counts entries in 8 bits where entries have 8 bits.

    Args:
        dataset: the file.
        table: an item of one of its sequences of tables.
        values: shape (H, W).
        lowest: the smallest value that there may be.
        where: names the file in errors.

    Source: DICOM PS3.3, C.11.1.1 and C.11.2.1.1.
    """
    _check_present(table, where, ("LUTDescriptor", "LUTData"))
    count, first, bits = (int(number) for number in table.LUTDescriptor)
    count = count or 2**16  # which 16 bits cannot say
    # Without types in the header, pydicom reads a table that begins below 0 as if it
    # began far above.
    if first >= 2**15 and lowest < 0:
        first -= 2**16
    entries = _entries(dataset, table.LUTData, count, bits)
    if len(entries) < count or not 8 <= bits <= 16:
        raise UserError(
            f"{where}: its look-up table (LUTDescriptor) says {count} entries of "
            f"{bits} bits, and has {len(entries)}; get it again, or remove it"
        )
    numbers = np.rint(values).astype(np.int64) - first
    return entries[numbers.clip(0, count - 1)], float(2**bits - 1)


def _entries(
    dataset: Any,
    data: Any,
    count: int,
    bits: int,
) -> NDArray[np.int64]:
    """Returns the entries of a look-up table.

    Entries of 8 bits may lie two in a word; then there are as many bytes as entries, or
    one more, because elements of a file have an even length.
    """
    _, is_little = dataset.original_encoding
    word = "<u2" if is_little else ">u2"
    if not isinstance(data, bytes):
        data = np.atleast_1d(np.asarray(data, word)).tobytes()
    entry = word
    if bits == 8 and len(data) in (count, count + 1):
        entry = "u1"
    whole = len(data) - len(data) % np.dtype(entry).itemsize
    return np.frombuffer(data[:whole], entry).astype(np.int64)


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
