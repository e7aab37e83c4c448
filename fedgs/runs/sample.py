"""Drawing from a trained generator, in memory or into files; no privacy cost."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedgs.config.fields import shortened
from fedgs.config.plugins import COHORT_CLASSIFIER
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, wrap_error
from fedgs.files import REMEDY
from fedgs.gan.models import build_generator, sample_labels, sample_latents
from fedgs.randomness import stream
from fedgs.runs import sample_files
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample_files import Drawn, save_images

if TYPE_CHECKING:
    import datasets

Report = Callable[[int, int], None]  # how many of how many steps are done
GRID_ROWS = 8
SAMPLE_BATCH = 256
MOST_SAMPLES = 10_000_000  # of one drawing: their labels are held in memory
COPIES = 3  # of images in memory, while they are looked at


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
    tensors = folder.average()
    if tensors is None:
        committed = folder.committed()
        if committed is None:
            raise UserError(
                f"{folder.path}: no generator yet; run `fedgs resume {folder.path}`"
            )
        stored = committed[1].items()
        tensors = {n[4:]: v for n, v in stored if n.startswith("ema.")}
    problem = f"{folder.path}: has no generator of this run"
    with wrap_error(Exception, problem, REMEDY):
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

    Raises:
        UserError: memory cannot hold them.
    """
    shape = (len(labels), config.image_channels, config.image_size, config.image_size)
    needed, free = COPIES * 4 * math.prod(shape), psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"count = {len(labels)}: these images need about {needed / 1e9:.1f} GB of "
            f"memory, {free / 1e9:.1f} GB are free; give fewer, or write them to files "
            "with `fedgs sample`"
        )
    images, done = np.empty(shape, np.float32), 0
    for part in _parts(config, generator, labels, seed):
        images[done : done + len(part)] = part
        done += len(part)
        report(done, len(labels))
    return images


def _parts(
    config: ResolvedConfig,
    generator: nn.Module,
    labels: npt.NDArray[np.int64],
    seed: int,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yields the images of `draw`, at most `SAMPLE_BATCH` at a time."""
    rng, device = stream(seed, "sample"), next(generator.parameters()).device
    for part in torch.from_numpy(labels).split(SAMPLE_BATCH):
        z = sample_latents(config, rng, len(part))
        with torch.no_grad():
            images = generator(z.to(device), part.to(device))
        yield images.cpu().numpy()


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
        return sample_files.as_hugging_face(self.images, self.labels, self.class_names)

    def write(self, output: str | Path) -> None:
        """Writes npz (images, labels), png (one grid), folder or hf.

        Args:
            output: see `fedgs.runs.sample_files.write`, as for the errors.
        """
        starts = range(0, len(self), SAMPLE_BATCH)
        parts = (self.images[start : start + SAMPLE_BATCH] for start in starts)
        shape = self.images.shape[1:]
        drawn = Drawn(self.labels, self.class_names, shape, parts)
        sample_files.write(drawn, output)


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
        UserError: an argument is out of range, memory cannot hold them, or the run has
            no generator yet.
    """
    config, generator = folder.config, load_generator(folder)
    wanted = wanted_labels(config, count, labels, seed)
    images = draw(config, generator, wanted, seed)
    return Samples(images, wanted, names_of_classes(config))


def drawing(
    folder: RunFolder,
    count: int,
    labels: int | Sequence[int] | None = None,
    seed: int = 0,
) -> Drawn:
    """Returns what `draw_samples` does, drawn while it is written; see there."""
    config, generator = folder.config, load_generator(folder)
    wanted = wanted_labels(config, count, labels, seed)
    shape = (config.image_channels, config.image_size, config.image_size)
    parts = _parts(config, generator, wanted, seed)
    return Drawn(wanted, names_of_classes(config), shape, parts)


def wanted_labels(
    config: ResolvedConfig, count: int, labels: int | Sequence[int] | None, seed: int
) -> npt.NDArray[np.int64]:
    """Returns the labels to draw, shape (count,); arguments as of `draw_samples`.

    Raises:
        UserError: an argument is out of range.
    """
    if not 1 <= count <= MOST_SAMPLES:
        most = f"{MOST_SAMPLES}; another --seed draws others"
        raise UserError(f"count = {count}: give -n from 1 to {most}")
    if labels is None:
        return uniform_labels(config, count, seed)
    last = config.num_classes - 1
    given = [labels] if isinstance(labels, int) else [*labels]
    if not (given and all(0 <= label <= last for label in given)):
        knows = f"this generator knows labels 0 to {last}"
        shown = shortened(",".join(map(str, given)))
        raise UserError(f"labels = {shown}: {knows}")
    return np.resize(np.array(given, dtype=np.int64), count)


def names_of_classes(config: ResolvedConfig) -> tuple[str, ...]:
    """Returns the name of each label.

    Raises:
        UserError: the run folder names another number of classes than it has.
    """
    count, names = config.num_classes, config.class_names
    if names and len(names) != count:
        problem = f"names {len(names)} of {count} classes; restore config.json"
        raise UserError(f"classes = {config.classes!r}: {problem}")
    return names or tuple(map(str, range(count)))


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
