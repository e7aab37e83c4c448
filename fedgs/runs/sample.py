"""Drawing from a trained generator: arrays and picture grids; no privacy cost."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedgs.config.plugins import COHORT_CLASSIFIER
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, imported, raise_if_any, wrap_error
from fedgs.files import (
    REMEDY,
    read_json,
    read_tensors,
    replacing,
    temporary_path,
    write_atomically,
)
from fedgs.gan.models import build_generator, sample_labels, sample_latents
from fedgs.randomness import stream
from fedgs.runs.run_folder import CHECKPOINT, RunFolder

if TYPE_CHECKING:
    import datasets

Report = Callable[[int, int], None]  # how many of how many steps are done
FORMS = ("npz", "png", "folder", "hf")
PARQUET = "train-00000-of-00001.parquet"  # a name that load_dataset looks for
GRID_ROWS = 8
SAMPLE_BATCH = 256


def load_generator(folder: RunFolder) -> nn.Module:
    """Returns the averaged generator of a finished run, or of its last checkpoint.

    Privacy: post-processing of DP output.

    Raises:
        UserError: the run has no generator yet, or trains none.
    """
    if folder.config.method == COHORT_CLASSIFIER:
        raise UserError(
            f"{folder.path}: trains a classifier, which draws no images; give the "
            "folder of a `fedgs train`"
        )
    generator = build_generator(folder.config, 0)
    path = folder.path / "generator_ema.safetensors"
    if path.exists():
        tensors = read_tensors(path)[0]
    else:
        commit = folder.path / CHECKPOINT
        if not commit.exists():
            raise UserError(
                f"{folder.path}: no generator yet; run `fedgs resume {folder.path}`"
            )
        # Not the last by name: a crash may leave tensors that were not committed.
        stored = read_tensors(commit.with_name(str(read_json(commit).get("file"))))[0]
        tensors = {n[4:]: v for n, v in stored.items() if n.startswith("ema.")}
    with wrap_error(Exception, f"{path}: is no generator of this run", REMEDY):
        generator.load_state_dict(tensors)
    return generator.eval()


def draw(
    config: ResolvedConfig,
    generator: nn.Module,
    labels: npt.NDArray[np.int64],
    seed: int,
    report: Report = lambda done, total: None,
) -> npt.NDArray[np.float32]:
    """Draws one image per label.

    Privacy: post-processing of DP output.

    Args:
        config: the run's configuration.
        generator: in eval mode; drawing changes none of its state.
        labels: shape (n,), the classes asked for.
        seed: of the latents.
        report: is called with the images that are drawn, and all.

    Returns:
        Shape (n, C, S, S), float32 in [0, 1], 0 = background.
    """
    z = sample_latents(config, stream(seed, "sample"), len(labels))
    inputs = (x.split(SAMPLE_BATCH) for x in (z, torch.from_numpy(labels)))
    device = next(generator.parameters()).device
    parts: list[torch.Tensor] = []
    with torch.no_grad():
        for z_part, part in zip(*inputs, strict=True):
            parts.append(generator(z_part.to(device), part.to(device)).cpu())
            report(min(SAMPLE_BATCH * len(parts), len(labels)), len(labels))
    return torch.cat(parts).numpy()


@dataclass(frozen=True, eq=False)
class Samples:
    """Images that a generator drew, in the forms that other programs take.

    Privacy: post-processing of DP output.

    Attributes:
        images: shape (n, C, S, S), float32 in [0, 1], 0 = background.
        labels: shape (n,), int64.
        class_names: the name of each label.
    """

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        """Returns n."""
        return len(self.labels)

    def as_dataset(self) -> TensorDataset:
        """Returns a torch Dataset of (image, label)."""
        return TensorDataset(*map(torch.from_numpy, (self.images, self.labels)))

    def as_hugging_face(self) -> "datasets.Dataset":
        """Returns a data set with the columns `image` and `label`.

        Raises:
            UserError: the package `datasets` is missing.
        """
        datasets = imported("datasets", "as_hugging_face", "datasets")
        columns = {"image": self._pictures(), "label": self.labels}
        classes = datasets.ClassLabel(names=list(self.class_names))
        kinds = datasets.Features(image=datasets.Image(), label=classes)
        return datasets.Dataset.from_dict(columns, kinds)

    def write(self, output: str | Path) -> None:
        """Writes npz (images, labels), png (one grid), folder or hf; see `Output`.

        A folder gets CLASS/NUMBER.png, as torchvision's ImageFolder reads them; hf one
        parquet file, as `datasets.load_dataset(DIR)` reads it.

        Args:
            output: a name that ends in .npz or .png, that of a folder, or FORM:PATH.

        Raises:
            UserError: see `check_output`, or the package `datasets` is missing.
        """
        where = check_output(output)
        if where.form == "png":
            save_images(where.path, self.images, columns=min(len(self), 10))
        elif where.form == "npz":
            with replacing(where.path) as file:
                np.savez_compressed(file, images=self.images, labels=self.labels)
        else:
            with new_folder(where.path) as staging:
                fill = self.fill_hf if where.form == "hf" else self._fill_folder
                fill(staging)

    def _fill_folder(self, path: Path) -> None:
        for index, picture in enumerate(self._pictures()):
            folder = path / self.class_names[self.labels[index]]
            folder.mkdir(exist_ok=True)
            picture.save(folder / f"{index:06d}.png")

    def fill_hf(self, path: Path) -> None:
        """Writes them below a folder as Hugging Face reads it.

        Raises:
            UserError: the package `datasets` is missing.
        """
        (path / "data").mkdir()
        imported("datasets", "hf:", "datasets").disable_progress_bars()
        self.as_hugging_face().to_parquet(path / "data" / PARQUET)

    def _pictures(self) -> list[Any]:
        from torchvision.transforms.functional import to_pil_image

        return [to_pil_image(torch.from_numpy(image)) for image in self.images]


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
    def of(cls, text: str | Path) -> "Output":
        """Reads FORM:PATH, or a path whose ending is its form; without it a folder."""
        form, colon, rest = str(text).partition(":")
        if colon and form in FORMS and not isinstance(text, Path):
            return cls(form, Path(rest).expanduser())
        path = Path(text)
        return cls(path.suffix[1:] or "folder", path)


def check_output(output: str | Path) -> Output:
    """Refuses a name that samples cannot be written under, before they are drawn.

    Args:
        output: as of `Samples.write`.

    Raises:
        UserError: no form that is known, nowhere, or something is there.
    """
    where = Output.of(output)
    raise_if_any(f"output = {output}", _output_problems(where))
    return where


def _output_problems(where: Output) -> Iterator[str]:
    path = where.path
    if where.form not in FORMS or not path.name:
        yield (
            "give a name that ends in .npz or .png, or that of a new folder, or "
            f"{', '.join(f'{form}:PATH' for form in FORMS)}"
        )
    if not path.absolute().parent.is_dir():
        yield "its folder does not exist; make it first"
    if path.exists():
        yield "exists already; choose another name"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Makes a folder that appears whole, when the `with` block has filled it."""
    staging = temporary_path(path)
    staging.mkdir()
    try:
        yield staging
        staging.rename(path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # is gone after the rename


def draw_samples(
    folder: RunFolder,
    count: int,
    labels: int | Sequence[int] | None = None,
    seed: int = 0,
) -> Samples:
    """Draws images from a run's averaged generator.

    Privacy: post-processing of DP output.

    Args:
        folder: of a run with a generator, or with a checkpoint at least.
        count: how many, at least 1.
        labels: used in turn; drawn uniformly when None.
        seed: of the latents, and of uniform labels.

    Raises:
        UserError: an argument is out of range, or the run has no generator yet.
    """
    config = folder.config
    if count < 1:
        raise UserError(f"count = {count}: give -n at least 1")
    generator = load_generator(folder)
    if labels is None:
        wanted = uniform_labels(config, count, seed)
    else:
        last = config.num_classes - 1
        given = np.atleast_1d(np.array(labels, dtype=np.int64))
        is_known = len(given) > 0 and all(0 <= label <= last for label in given)
        if not is_known:
            knows = f"this generator knows labels 0 to {last}"
            raise UserError(f"labels = {','.join(map(str, given))}: {knows}")
        wanted = np.resize(given, count)
    names = config.class_names or tuple(map(str, range(config.num_classes)))
    return Samples(draw(config, generator, wanted, seed), wanted, names)


def uniform_labels(
    config: ResolvedConfig, count: int, seed: int
) -> npt.NDArray[np.int64]:
    """Draws labels uniformly, shape (count,)."""
    return sample_labels(config, stream(seed, "sample-labels"), count).numpy()


def write_grid(path: Path, config: ResolvedConfig, generator: nn.Module) -> None:
    """Writes a picture with one column per class, the same latents every time.

    Privacy: post-processing of DP output.
    """
    columns = config.num_classes
    labels = np.tile(np.arange(columns), GRID_ROWS)
    images = draw(config, generator, labels.astype(np.int64), seed=0)
    save_images(path, images, columns)


def save_images(path: Path, images: npt.NDArray[np.float32], columns: int) -> None:
    """Writes images (n, C, S, S) in [0, 1] as one PNG grid, atomically.

    Privacy: the file is as private as the images.
    """
    # Imported here: it loads a compiler, a third of the time a server takes to start.
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import make_grid

    grid = make_grid(torch.from_numpy(images), nrow=columns, padding=2, pad_value=0.3)
    content = BytesIO()
    to_pil_image(grid).save(content, format="PNG")
    write_atomically(path, content.getvalue())
