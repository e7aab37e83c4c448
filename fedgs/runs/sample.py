"""Drawing from a trained generator, in memory or into files; no privacy cost."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedgs.config.fields import shortened
from fedgs.config.plugins import COHORT_CLASSIFIER, COHORT_COUNTS
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, wrap_error
from fedgs.files import RESTORE
from fedgs.gan.models import build_generator, sample_labels, sample_latents
from fedgs.randomness import stream
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample_files import Images, Samples, save_images

Report = Callable[[int, int], None]  # how many of how many steps are done
_GRID_ROWS = 8
SAMPLE_BATCH = 256
_MOST_SAMPLES = 10_000_000  # of one drawing: their labels are held in memory


def check_draws_images(folder: RunFolder) -> None:
    """Refuses runs that were made for something else than images.

    Raises:
        UserError: it is the run of a selection of clients, or of `fedgs debug`.
    """
    check_trains_generator(folder)
    # It has a generator, as every run, but of one release for a comparison: noise.
    if folder.config.compares_groups:
        raise UserError(
            f"{folder.path}: a run of `fedgs debug` compares groups of clients, and "
            "its generator draws no images that are of use; give the folder of a "
            "`fedgs train` (`fedgs report` shows what was compared)"
        )


def check_trains_generator(folder: RunFolder) -> None:
    """Refuses the run of a selection of clients, which trains a classifier alone.

    Raises:
        UserError: it is such a run.
    """
    if folder.config.method in (COHORT_CLASSIFIER, COHORT_COUNTS):
        raise UserError(
            f"{folder.path}: this run trains a classifier, which draws no images; "
            "give the folder of a `fedgs train` (`fedgs privacy of` states what a "
            "selection cost)"
        )


def load_generator(folder: RunFolder) -> nn.Module:
    """Returns the averaged generator of a finished run, or of its last checkpoint.

    Privacy: post-processing of DP output.

    Raises:
        UserError: the run has no generator yet, or none for images, or its ledger is
            missing or altered.
    """
    check_draws_images(folder)
    folder.check_history()
    generator = build_generator(folder.config, 0)
    tensors = folder.average()
    if tensors is None:
        committed = folder.committed()
        if committed is None:
            raise UserError(f"{folder.path}: no generator yet; run `{folder.go_on}`")
        _, state = committed
        tensors = {
            name.removeprefix("ema."): value
            for name, value in state.items()
            if name.startswith("ema.")
        }
    problem = f"{folder.path}: it has no generator of this run"
    with wrap_error(Exception, problem, RESTORE):
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
        seed: the seed of the latents.
        report: is called with the images that are drawn, and all.

    Returns:
        Shape (n, C, S, S), float32 in [0, 1], 0 = background.

    Raises:
        UserError: memory cannot hold them.
    """
    return _samples(config, generator, labels, seed, report).images


def _samples(
    config: ResolvedConfig,
    generator: nn.Module,
    labels: npt.NDArray[np.int64],
    seed: int,
    report: Report = lambda done, total: None,
) -> Samples:
    """Returns what `draw` draws; nothing is drawn yet."""
    device = next(generator.parameters()).device

    def parts() -> Iterator[Images]:
        # A new stream for each pass, so that every pass draws the same images.
        rng = stream(seed, "sample")
        done = 0
        for part in torch.from_numpy(labels).split(SAMPLE_BATCH):
            z = sample_latents(config, rng, len(part))
            with torch.no_grad():
                images = generator(z.to(device), part.to(device)).cpu()
            done += len(part)
            report(done, len(labels))
            yield images.numpy()

    names = config.class_names[: config.num_classes]
    # A class without a name is called by its number.
    names += tuple(str(label) for label in range(len(names), config.num_classes))
    shape = (config.image_channels, config.image_size, config.image_size)
    return Samples(labels, names, shape, parts)


def draw_samples(
    folder: RunFolder,
    count: int,
    labels: int | Sequence[int] | None = None,
    seed: int = 0,
) -> Samples:
    """Returns images of a run's averaged generator, which are drawn when they are used.

    Privacy: post-processing of DP output.

    Args:
        folder: the folder of a run with a generator, or with a checkpoint at least.
        count: how many, at least 1.
        labels: used in turn; drawn uniformly when None.
        seed: the seed of the latents, and of uniform labels.

    Raises:
        UserError: an argument is out of range, or the run has no generator yet.
    """
    config = folder.config
    if not _is_integer(count):
        raise UserError(f"count = {count!r}: give a whole number")
    if not 1 <= count <= _MOST_SAMPLES:
        most = f"{_MOST_SAMPLES}; another --seed draws others"
        raise UserError(f"count = {count}: give -n from 1 to {most}")
    generator = load_generator(folder)
    if labels is None:
        wanted = uniform_labels(config, count, seed)
    else:
        last = config.num_classes - 1
        given: list[Any] = [labels]
        if isinstance(labels, Iterable) and not isinstance(labels, str):
            given = [*labels]
        is_known = all(_is_integer(label) and 0 <= label <= last for label in given)
        if not given or not is_known:
            shown = shortened(",".join(str(label) for label in given))
            raise UserError(
                f"labels = {shown}: this generator knows labels 0 to {last}; give "
                "such labels"
            )
        # Repeated until there are enough.
        wanted = np.resize(np.array(given, dtype=np.int64), count)
    return _samples(config, generator, wanted, seed)


def _is_integer(value: object) -> bool:
    """Tells whether a value is a whole number, of Python or of NumPy; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def uniform_labels(
    config: ResolvedConfig,
    count: int,
    seed: int,
) -> npt.NDArray[np.int64]:
    """Draws labels uniformly, shape (count,)."""
    return sample_labels(config, stream(seed, "sample-labels"), count).numpy()


def write_grid(path: Path, config: ResolvedConfig, generator: nn.Module) -> None:
    """Writes a picture with one column per class, the same latents every time.

    Privacy: post-processing of DP output.
    """
    columns = config.num_classes
    labels = np.tile(np.arange(columns, dtype=np.int64), _GRID_ROWS)
    images = draw(config, generator, labels, seed=0)
    save_images(path, images, columns)
