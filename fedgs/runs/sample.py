"""Drawing from a trained generator: arrays and picture grids; no privacy cost."""

from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.files import read_tensors, write_atomically
from fedgs.gan.models import build_generator, sample_labels, sample_latents
from fedgs.randomness import stream
from fedgs.runs.run_folder import RunFolder

GRID_ROWS = 8
SAMPLE_BATCH = 256


def load_generator(folder: RunFolder) -> nn.Module:
    """Returns the averaged generator of a finished run, or of its last checkpoint.

    Privacy: post-processing of DP output.

    Raises:
        UserError: the run has no generator yet.
    """
    generator = build_generator(folder.config, 0)
    path = folder.path / "generator_ema.safetensors"
    if path.exists():
        tensors = read_tensors(path)[0]
    else:
        checkpoints = sorted((folder.path / "checkpoint").glob("*.safetensors"))
        if not checkpoints:
            raise UserError(
                f"{folder.path}: no generator yet; run `fedgs resume {folder.path}`"
            )
        stored = read_tensors(checkpoints[-1])[0]
        tensors = {n[4:]: v for n, v in stored.items() if n.startswith("ema.")}
    generator.load_state_dict(tensors)
    return generator.eval()


def draw(
    config: ResolvedConfig,
    generator: nn.Module,
    labels: npt.NDArray[np.int64],
    seed: int,
) -> npt.NDArray[np.float32]:
    """Draws one image per label.

    Privacy: post-processing of DP output.

    Args:
        config: the run's configuration.
        generator: in eval mode; drawing changes none of its state.
        labels: shape (n,), the classes asked for.
        seed: of the latents.

    Returns:
        Shape (n, C, S, S), float32 in [0, 1], 0 = background.
    """
    z = sample_latents(config, stream(seed, "sample"), len(labels))
    wanted = torch.from_numpy(labels)
    device = next(generator.parameters()).device
    with torch.no_grad():
        parts = [
            generator(z_part.to(device), part.to(device)).cpu()
            for z_part, part in zip(
                z.split(SAMPLE_BATCH), wanted.split(SAMPLE_BATCH), strict=True
            )
        ]
    return torch.cat(parts).numpy()


def uniform_labels(
    config: ResolvedConfig, count: int, seed: int
) -> npt.NDArray[np.int64]:
    """Draws labels uniformly, shape (count,)."""
    return sample_labels(config, stream(seed, "sample-labels"), count).numpy()


def write_grid(path: Path, config: ResolvedConfig, generator: nn.Module) -> None:
    """Writes a picture with one column per class, the same latents every time.

    Privacy: post-processing of DP output.
    """
    classes = config.num_classes
    columns = classes if config.conditional else 10
    labels = np.tile(np.arange(columns) % classes, GRID_ROWS)
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
