"""Small DICOM files, written by pydicom as a scanner writes them."""

from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, generate_uid

RADIOGRAPH = UID("1.2.840.10008.5.1.4.1.1.1")  # computed radiography


def dataset(pixels: np.ndarray, **fields: object) -> FileDataset:
    """Returns a file of 12 bits in 16, grey or RGB of 8 bits; a field of None is out.

    Args:
        pixels: shape (H, W), uint16 or int16, or (H, W, 3), uint8.
        **fields: of the header, by pydicom's keywords.
    """
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = RADIOGRAPH
    meta.MediaStorageSOPInstanceUID = generate_uid()
    made = FileDataset(None, {}, file_meta=meta, preamble=bytes(128))
    made.SOPClassUID = RADIOGRAPH
    made.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    is_grey = pixels.ndim == 2
    made.Rows = pixels.shape[0]
    made.Columns = pixels.shape[1]
    made.SamplesPerPixel = 1 if is_grey else 3
    made.PhotometricInterpretation = "MONOCHROME2" if is_grey else "RGB"
    if not is_grey:
        made.PlanarConfiguration = 0
    made.BitsAllocated = 8 * pixels.dtype.itemsize
    made.BitsStored = 12 if is_grey else 8
    made.HighBit = made.BitsStored - 1
    made.PixelRepresentation = int(pixels.dtype.kind == "i")
    made.PixelData = pixels.tobytes()
    for name, value in fields.items():
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
    return made


def write(path: Path, pixels: np.ndarray, **fields: object) -> Path:
    """Writes such a file, with the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset(pixels, **fields).save_as(path, enforce_file_format=True)
    return path


def table(values: np.ndarray, bits: int) -> Dataset:
    """Returns a look-up table of the display."""
    item = Dataset()
    item.LUTDescriptor = [len(values), 0, bits]
    item.LUTData = values.astype("<u2").tobytes()
    return item
