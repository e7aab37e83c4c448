"""What of a run may go out, in a folder of its own: for others, on a hub or a disk.

    README.md             the card: what is guaranteed, and how to use the rest
    privacy_label.json    the same for programs; see `fedgs.privacy_label`
    generator.safetensors the averaged generator, and the settings that build it
    samples.png           a grid of samples, one column per class
    data/                 more of them, as Hugging Face reads them

The run folder is its owner's alone: names of clients, paths and seeds are in it.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, wrap_error
from fedgs.files import read_tensors, write_atomically, write_json, write_tensors
from fedgs.gan.models import build_generator
from fedgs.runs.data_card import CARD, LABEL, NO_GUARANTEE, data_card
from fedgs.runs.run_folder import GENERATOR, RunFolder
from fedgs.runs.sample import (
    GRID,
    Samples,
    check_output,
    draw_samples,
    drawn,
    load_generator,
    make_folder,
    write_grid,
)

# What a generator and its inputs are made of: nothing of data, clients or seeds.
SETTINGS = ("image_size", "image_channels", "num_classes", "classes", "generator")
SETTINGS += ("generator_dim", "latent", "latent_dim", "spectral_norm", "stages")
# Of the run's training: not published, and without a say in what is drawn.
UNKNOWN = {"num_clients": 1, "clients_per_round": 1, "noise_multiplier": 0.0, "seed": 0}


def publish(
    folder: RunFolder, output: str | Path, label: Mapping[str, Any], count: int
) -> None:
    """Writes the folder, whole or not at all.

    Privacy: post-processing of DP output, and the label, which is public.

    Args:
        folder: of a finished run.
        output: the folder to make.
        label: `privacy_label` of the run.
        count: samples beside the grid.

    Raises:
        UserError: it exists, the run is not finished or guarantees nothing, or the
            package `datasets` is missing.
    """
    path = check_output(f"hf:{output}").path
    if not folder.is_finished:
        raise UserError(
            f"{folder.path}: is not finished; run `fedgs resume {folder.path}` first"
        )
    if label["guarantee"].startswith(NO_GUARANTEE):
        raise UserError(
            f"{folder.path}: {label['guarantee']}; nothing of it may go out, publish a "
            "run with an epsilon"
        )
    samples = draw_samples(folder, count)
    make_folder(path, partial(_fill, folder, load_generator(folder), label, samples))


def _fill(
    folder: RunFolder,
    generator: nn.Module,
    label: Mapping[str, Any],
    samples: Samples,
    path: Path,
) -> None:
    samples.fill_hf(path)
    settings = {name: getattr(folder.config, name) for name in SETTINGS}
    metadata = {"settings": json.dumps(settings)}
    write_tensors(path / GENERATOR, generator.state_dict(), metadata, is_durable=True)
    write_grid(path / GRID, folder.config, generator)
    write_json(path / LABEL, dict(label))
    write_atomically(path / CARD, data_card(len(samples), label).encode())


def draw_published(
    path: str | Path,
    count: int,
    labels: int | Sequence[int] | None = None,
    seed: int = 0,
) -> Samples:
    """Draws images from a published generator; see `draw_samples`.

    Privacy: post-processing of DP output.

    Raises:
        UserError: no such folder, or an argument is out of range.
    """
    file = Path(path) / GENERATOR
    tensors, metadata = read_tensors(file)
    wrong = (KeyError, ValueError)
    with wrap_error(wrong, f"{file}: is of no `fedgs publish`", "give its -o"):
        config = ResolvedConfig.from_flat(UNKNOWN | json.loads(metadata["settings"]))
    generator = build_generator(config, 0)
    generator.load_state_dict(tensors)
    return drawn(config, generator.eval(), count, labels, seed)
