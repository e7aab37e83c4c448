"""Samples, in memory or as files: npz, a grid, a folder, Hugging Face's parquet.

They are written as they are drawn, so that memory holds a few of them at a time. What
does not fit on the disk is refused before the first one is drawn; what fails later
leaves nothing.
"""

import math
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch.utils.data import TensorDataset

from fedgs.errors import UserError, imported, raise_if_any, wrap_error
from fedgs.files import (
    inside,
    is_plain_name,
    replacing,
    temporary_path,
    write_atomically,
)

if TYPE_CHECKING:
    import datasets

Images = npt.NDArray[np.float32]  # shape (n, C, S, S), in [0, 1], 0 = background
FORMS = ("npz", "png", "folder", "hf")
TITLE = "Title"  # what PNG calls it
PARQUET = "train-00000-of-00001.parquet"  # a name that load_dataset looks for
MOST_IN_GRID = 10_000  # of one picture, which is made in memory
BLOCK = 4096  # bytes that a small file takes on a disk
COPIES = 3  # of images in memory, while they are looked at


@dataclass(frozen=True, eq=False)
class Samples:
    """Images that a generator draws, in the forms that other programs take.

    Privacy: post-processing of DP output.

    Attributes:
        labels: shape (n,), int64.
        class_names: the name of each label.
        shape: (C, S, S) of an image.
        parts: draws all images in their order, some at a time.
    """

    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Images]]

    def __len__(self) -> int:
        """Returns n."""
        return len(self.labels)

    @cached_property
    def images(self) -> Images:
        """Shape (n, C, S, S), float32 in [0, 1], 0 = background.

        Raises:
            UserError: memory cannot hold them.
        """
        bytes_of_float32 = 4
        needed = COPIES * bytes_of_float32 * len(self) * math.prod(self.shape)
        free = psutil.virtual_memory().available
        if needed > free:
            raise UserError(
                f"count = {len(self)}: these images need about {needed / 1e9:.1f} GB "
                f"of memory, {free / 1e9:.1f} GB are free; give fewer, or write them "
                "to files"
            )
        return np.concatenate([*self.parts()])

    def as_dataset(self) -> TensorDataset:
        """Returns a torch Dataset of (image, label)."""
        images = torch.from_numpy(self.images)
        labels = torch.from_numpy(self.labels)
        return TensorDataset(images, labels)

    def as_hugging_face(self) -> "datasets.Dataset":
        """Returns a data set with the columns `image` and `label`.

        Raises:
            UserError: the package `datasets` is missing.
        """
        return self.rows(self.images, self.labels)

    def rows(self, images: Images, labels: npt.NDArray[np.int64]) -> "datasets.Dataset":
        """Returns some of them as rows for Hugging Face."""
        datasets = imported("datasets", "as_hugging_face", "datasets")
        columns = {"image": pictures(images), "label": labels}
        classes = datasets.ClassLabel(names=list(self.class_names))
        kinds = datasets.Features(image=datasets.Image(), label=classes)
        return datasets.Dataset.from_dict(columns, kinds)

    def labelled(self) -> Iterator[tuple[Images, npt.NDArray[np.int64]]]:
        """Yields the parts with their labels."""
        done = 0
        for images in self.parts():
            yield images, self.labels[done : done + len(images)]
            done += len(images)

    def write(self, output: str | Path) -> None:
        """Writes npz (images, labels), png (one grid), folder or hf, all or nothing.

        A folder gets CLASS/NUMBER.png, as torchvision's ImageFolder reads them; hf one
        parquet file, as `datasets.load_dataset(DIR)` reads it.

        Args:
            output: a name that ends in .npz or .png, that of a folder, or FORM:PATH.

        Raises:
            UserError: see `check_output` and `check_room`; the disk fails, or the
                package `datasets` is missing.
        """
        where = check_output(output)
        check_room(output, self)
        make: Any = replacing
        if where.form in ("folder", "hf"):
            make = new_folder
        fill = FILL[where.form]
        with writing(output), make(where.path) as place:
            fill(place, self)
            check_output(output)  # another process may have written it meanwhile


def pictures(images: Images) -> list[Any]:
    """Returns images of PIL."""
    from torchvision.transforms.functional import to_pil_image

    return [to_pil_image(torch.from_numpy(image)) for image in images]


def save_images(path: Path, images: Images, columns: int, title: str = "") -> None:
    """Writes images as one PNG grid, atomically.

    Privacy: the file is as private as the images.
    """
    write_atomically(path, as_png(images, columns, title))


def as_png(images: Images, columns: int, title: str = "") -> bytes:
    """Returns images as one PNG grid.

    Privacy: as private as the images.

    Args:
        images: the cells of the grid, row by row.
        columns: number of cells in a row.
        title: what the file says of itself, by which `has_title` knows it.
    """
    # Imported here: it loads a compiler, a third of the time a server takes to start.
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import make_grid

    grid = make_grid(torch.from_numpy(images), nrow=columns, padding=2, pad_value=0.3)
    content = BytesIO()
    texts = PngInfo()
    if title:
        texts.add_text(TITLE, title)
    to_pil_image(grid).save(content, format="PNG", pnginfo=texts)
    return content.getvalue()


def has_title(path: Path, title: str) -> bool:
    """Tells whether a file is a PNG grid that was written with this title."""
    try:
        with Image.open(path, formats=["PNG"]) as opened:
            return opened.info.get(TITLE) == title
    except Exception:  # whatever a file that is no picture makes the library raise
        return False


# ------------------------------------------------------------------ where to


@dataclass(frozen=True)
class Output:
    """Where samples go.

    Attributes:
        form: npz, png, folder (of pictures by class) or hf (Hugging Face's parquet).
        path: the file or folder.

    >>> Output.of("folder:drawn"), Output.of("drawn.png").form
    (Output(form='folder', path=PosixPath('drawn')), 'png')
    """

    form: str
    path: Path

    @classmethod
    def of(cls, text: str | Path, form: str | None = None) -> "Output":
        """Reads FORM:PATH, or a path whose ending is its form; without it a folder.

        Args:
            text: what the user has given.
            form: where it is known, so that all of the text is the path.
        """
        if form is not None:
            return cls(form, Path(text).expanduser())
        form, colon, rest = str(text).partition(":")
        if colon and form in FORMS and not isinstance(text, Path):
            return cls(form, Path(rest).expanduser())
        path = Path(text)
        return cls(path.suffix[1:] or "folder", path)


def check_output(output: str | Path, form: str | None = None) -> Output:
    """Refuses a name that samples cannot be written under, before they are drawn.

    Args:
        output: as of `Samples.write`.
        form: as of `Output.of`.

    Raises:
        UserError: no form that is known, nowhere, or something is there.
    """
    where = Output.of(output, form)
    raise_if_any(f"output = {output}", _output_problems(where))
    return where


def _output_problems(where: Output) -> Iterator[str]:
    path = where.path
    if where.form not in FORMS or not path.name:
        forms = ", ".join(f"{form}:PATH" for form in FORMS)
        name = "a name that ends in .npz or .png, or that of a new folder"
        yield f"give {name}, or {forms}"
    if not path.absolute().parent.is_dir():
        yield "its folder does not exist; make it first"
    if path.exists():
        yield "it exists already; choose another name"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Makes a folder that appears whole, when the `with` block has filled it."""
    staging = temporary_path(path)
    staging.mkdir()
    try:
        yield staging
        staging.rename(path)  # fails where another process has filled one meanwhile
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # is gone after the rename


# ------------------------------------------------------------------ writing


def writing(output: str | Path) -> AbstractContextManager[None]:
    """Explains why an output cannot be written."""
    remedy = "free the disk, or choose another --output"
    return wrap_error(OSError, f"output = {output}: it cannot be written", remedy)


def check_room(
    output: str | Path,
    drawn: Samples,
    form: str | None = None,
) -> None:
    """Refuses samples that cannot be written there, before the first one is drawn.

    Args:
        output: as of `Samples.write`.
        drawn: the samples.
        form: as of `Output.of`.

    Raises:
        UserError: too many of them, or classes that cannot be the names of folders.
    """
    where = Output.of(output, form)
    raise_if_any(f"output = {output}", _room_problems(where, drawn))


def _room_problems(where: Output, drawn: Samples) -> Iterator[str]:
    names = drawn.class_names
    others = "give npz:PATH or hf:PATH"
    wrong = [name for name in names if not is_plain_name(name)]
    if where.form == "folder" and wrong:
        yield f"the class {wrong[0]!r} cannot be the name of a folder; {others}"
    if where.form in ("folder", "hf") and len({*names}) < len(names):
        yield "two classes have one name; give npz:PATH"
    count = len(drawn)
    values = math.prod(drawn.shape)
    if where.form == "png" and count > MOST_IN_GRID:
        yield f"a grid of {count} images is too large; {others}"
    # At most, in bytes of one image: pictures have a byte a value, and may compress.
    sizes = {"npz": 4 * values, "folder": max(values, BLOCK)}
    needed = count * sizes.get(where.form, values)
    free = shutil.disk_usage(where.path.absolute().parent).free
    if needed > free:
        yield (
            f"{count} images need up to {needed / 1e9:.3g} GB of disk, "
            f"{free / 1e9:.3g} GB are free; give fewer, or choose another --output"
        )


def _fill_png(file: IO[bytes], drawn: Samples) -> None:
    parts = list(drawn.parts())
    images = np.concatenate(parts)
    columns = min(len(images), 10)
    file.write(as_png(images, columns=columns))


def _fill_npz(file: IO[bytes], drawn: Samples) -> None:
    """Writes what `numpy.savez_compressed` does, some images at a time."""
    shape = (len(drawn), *drawn.shape)
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, header)
            for images in drawn.parts():
                member.write(images.astype("<f4").tobytes())
        with archive.open("labels.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, drawn.labels, allow_pickle=False)


def _fill_folder(path: Path, drawn: Samples) -> None:
    folders: dict[int, Path] = {}
    for label in np.unique(drawn.labels):
        folders[label] = inside(path, drawn.class_names[label], "class")
        folders[label].mkdir()  # fails where the disk takes two names for the same
    index = 0
    for images, labels in drawn.labelled():
        for picture, label in zip(pictures(images), labels, strict=True):
            picture.save(folders[label] / f"{index:06d}.png")
            index += 1


def fill_hf(path: Path, drawn: Samples) -> None:
    """Writes samples below a folder as Hugging Face reads them.

    Arrow writes to memory: its own files may end the process where a disk is full.

    Raises:
        UserError: the package `datasets` is missing.
    """
    parquet = imported("pyarrow.parquet", "hf:", "datasets")
    content = BytesIO()
    # The columns have to be known before the first image is drawn.
    no_images = np.empty((0, *drawn.shape), np.float32)
    schema = drawn.rows(no_images, drawn.labels[:0]).data.table.schema
    (path / "data").mkdir()
    with open(path / "data" / PARQUET, "wb") as file:
        with parquet.ParquetWriter(content, schema) as writer:
            for images, labels in drawn.labelled():
                rows = drawn.rows(images, labels)
                writer.write_table(rows.data.table)
                file.write(content.getvalue())
                content.seek(0)
                content.truncate()
        file.write(content.getvalue())


FILL: Any = {"npz": _fill_npz, "png": _fill_png, "folder": _fill_folder, "hf": fill_hf}
