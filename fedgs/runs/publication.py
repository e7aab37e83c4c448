"""What of a run may go out, in a folder of its own: for others, on a hub or a disk.

    README.md             the card: what is guaranteed, and how to use the rest
    privacy_label.json    the same for programs; see `fedgs.privacy_label`
    generator_ema.safetensors  the averaged generator; config.json and versions.json are
                          what `fedgs sample` needs beside it
    samples.png           a grid of samples, one column per class
    data/                 more of them, as Hugging Face reads them

The run folder is its owner's alone: names of clients, paths and seeds are in it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgs.config.plugins import METHODS
from fedgs.errors import UserError
from fedgs.files import write_atomically, write_json, write_tensors
from fedgs.runs import sample, sample_files
from fedgs.runs.data_card import CARD, LABEL, NO_GUARANTEE, data_card
from fedgs.runs.run_folder import AVERAGE, RunFolder

# What a generator and its inputs are made of: nothing of data, clients or seeds.
_OF_GENERATOR = (
    "image_size",
    "image_channels",
    "num_classes",
    "classes",
    "generator",
    "generator_dim",
    "latent",
    "latent_dim",
    "phases",
)


def publish(
    folder: RunFolder,
    output: str | Path,
    label: Mapping[str, Any],
    count: int,
) -> None:
    """Writes the folder, whole or not at all.

    Privacy: post-processing of DP output, and the label, which is public.

    Args:
        folder: the folder of a finished run.
        output: the folder to make.
        label: `privacy_label` of the run.
        count: samples beside the grid.

    Raises:
        UserError: it exists or cannot be written, the run is not finished or guarantees
            nothing, or the package `datasets` is missing.
    """
    path = sample_files.check_output(output, form="hf").path
    problem = ""
    if label["guarantee"].startswith(NO_GUARANTEE):
        problem = f"{label['guarantee']}; publish a run that has an epsilon"
    elif not folder.is_finished:
        problem = f"it is not finished; run `{folder.go_on}` first"
    if problem:
        raise UserError(f"{folder.path}: {problem}")
    generator = sample.load_generator(folder)
    drawn = sample.draw_samples(folder, count)
    # Samples are drawn while they are written: what does not fit is refused before.
    sample_files.check_room(output, drawn, form="hf")
    flat = folder.config.to_flat()
    # Named one by one: a setting that is added later stays here unless it is named.
    settings = {name: flat[name] for name in _OF_GENERATOR if name in flat}
    if any(phase.method not in METHODS for phase in folder.config.phases):
        del settings["phases"]  # whoever samples need not have other people's code
    writing = sample_files.writing(output)
    with writing, sample_files.new_folder(path) as staging:
        sample_files.fill_hf(staging, drawn)
        tensors = generator.state_dict()
        write_tensors(staging / AVERAGE, tensors, is_durable=True, is_sealed=True)
        write_json(staging / "config.json", settings)
        write_json(staging / "versions.json", label["versions"])
        sample.write_grid(staging / "samples.png", folder.config, generator)
        write_json(staging / LABEL, dict(label))
        write_atomically(staging / CARD, data_card(count, label).encode())
