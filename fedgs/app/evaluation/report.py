"""What an evaluation shows: progress, one line of JSON, tables and a picture."""

import itertools
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from fedgs.app.commands.terminal import Progress, say
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.app.evaluation.score_tables import classifier_table, label_table
from fedgs.app.tables import Table, is_number
from fedgs.errors import UserError, wrap_error
from fedgs.evaluation.images import YARDSTICKS, LabelledImages, RealImages
from fedgs.files import append_whole
from fedgs.runs.run_folder import published_folder
from fedgs.runs.sample_files import save_images

GRID_ROWS = 8
console = Console()


def classifier_stage(
    progress: Progress,
    title: str,
    total: int,
) -> Callable[[str, dict[str, Any] | None, bool], None]:
    """Returns what the classifiers call with each result."""
    stage = progress.stage(title)
    # They are trained side by side and end in any order, so the results are counted.
    numbers = itertools.count(1)

    def report(name: str, result: dict[str, Any] | None, is_cached: bool) -> None:
        shown = "cannot be trained"
        if result is not None:
            if is_cached:
                how = "cached"
            else:
                how = f"{result['seconds']:.1f} s"
            shown = f"{result['accuracy']:.4f} ({how})"
        stage(next(numbers), total, f"{name} {shown}")

    return report


# ------------------------------------------------------------------ files


def places(request: EvaluationRequest) -> tuple[Path, Path]:
    """Returns the file of result lines and the folder of pictures.

    In the run folder; for FILE.npz and the yardsticks beside it and in the working
    directory, with its name in front; both in --output where that is given.
    """
    path = Path(request.source)
    if request.output is not None:
        base = request.output
        prefix = ""
    elif request.source in YARDSTICKS:
        base = Path()
        prefix = f"{request.source}-{request.data.split(':')[0]}."
    elif path.suffix == ".npz":
        base = path.parent
        prefix = f"{path.stem}."
    else:
        base = path
        prefix = ""
    return base / f"{prefix}evaluations.jsonl", base / f"{prefix}evaluation"


def check_private(request: EvaluationRequest) -> None:
    """Refuses to write into a published folder: results are private.

    Raises:
        UserError: the results would lie in one.
    """
    lines, _ = places(request)
    published = published_folder(lines)
    if published is None:
        return
    why = f"{published} is a published folder, and results of an evaluation are private"
    if request.output is None:
        problem = f"output is unset: {why}; give --output FOLDER"
    else:
        problem = f"output = {request.output}: {why}; give another --output"
    raise UserError(problem)


def check_writable(request: EvaluationRequest) -> None:
    """Checks that the result can be written, before the work which it is of.

    An evaluation that is stopped leaves neither an empty file nor an empty folder.

    Raises:
        UserError: the output cannot be written.
    """
    lines, folder = places(request)
    with _writing(lines):
        lines.parent.mkdir(parents=True, exist_ok=True)
        if lines.exists():
            lines.open("a").close()  # changes nothing that is in it
        TemporaryFile(dir=lines.parent).close()
        folder.mkdir(exist_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _writing(lines: Path) -> AbstractContextManager[None]:
    """Explains why results cannot be written."""
    problem = f"output = {lines.parent}: {lines.name} cannot be written"
    return wrap_error(OSError, problem, "give --output a folder that can be written")


def write(
    request: EvaluationRequest,
    result: dict[str, Any],
    real: RealImages,
    synthetic: LabelledImages,
) -> None:
    """Appends the result and writes the picture.

    Raises:
        UserError: the output cannot be written.
    """
    lines, folder = places(request)
    with _writing(lines):
        folder.mkdir(exist_ok=True)
        # The line comes last: whoever finds it finds its picture too.
        _write_samples(folder / "samples.png", real, synthetic)
        line = json.dumps(result, allow_nan=False) + "\n"
        with open(lines, "ab", buffering=0) as file:
            append_whole(file, line.encode())
            os.fsync(file.fileno())


def _write_samples(path: Path, real: RealImages, synthetic: LabelledImages) -> None:
    """Writes synthetic images above real test images, one column per class."""
    both = [
        rows_by_class(part, real.num_classes, GRID_ROWS)
        for part in (synthetic, real.test)
    ]
    _, channels, side, _ = synthetic.images.shape
    images = np.concatenate(both).reshape(-1, channels, side, side)
    save_images(path, images, columns=real.num_classes)


def rows_by_class(
    part: LabelledImages,
    num_classes: int,
    rows: int,
) -> NDArray[np.float32]:
    """Returns images of shape (rows, num_classes, C, S, S), one class a column.

    Privacy: as private as the images.

    Args:
        part: the images; where a class has too few of them, the column ends in black.
        num_classes: columns.
        rows: the rows of each class.
    """
    grid = np.zeros((rows, num_classes, *part.images.shape[1:]), np.float32)
    for label in range(num_classes):
        shown = part.images[np.flatnonzero(part.labels == label)[:rows]]
        grid[: len(shown), label] = shown
    return grid


# ------------------------------------------------------------------ terminal


def show(request: EvaluationRequest, result: dict[str, Any], as_json: bool) -> None:
    """Prints the result as one JSON object, or as tables."""
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    rows: list[list[str]] = []
    for name, value in result.items():
        if is_number(value):
            text = str(value)
            # Seconds are rounded already; further digits would be none of the clock's.
            if isinstance(value, float) and name != "seconds":
                text = f"{value:.4f}"
            rows.append([name, text])
        elif value is None:
            # A metric without a value has a row: it was computed and not skipped.
            rows.append([name, "undefined"])
    caption = f"{request.source} against {request.data}"
    Table(caption, ["metric", "value"], rows).show()
    # The FID that other papers state. Ours by another network is no substitute, so a
    # reader is told that it is missing.
    if "fid_inception_v3_pool3" not in result and "images" in request.metrics:
        say(
            "fid_inception_v3_pool3 was not computed: its weights are not in torch hub."
            " After `pip install torch-fidelity`, --download fetches them."
        )
    if "classifiers" in result:
        found = result["classifiers"]
        classifier_table("classifiers", request.data, found).show()
        _show_notes(found)
    if "label_efficiency" in result:
        label_table("label efficiency", result["label_efficiency"]).show()
    lines, folder = places(request)
    say(f"Results:   {lines}")
    say(f"Pictures:  {folder}; the lower half of samples.png shows real images")
    say("Privacy:   none; the scores are computed from real images. Keep them private.")


def _show_notes(result: dict[str, Any]) -> None:
    if len(result["calibrated"]) < len(result["accuracy"]):
        say(
            "Scores are calibrated only after the same classifiers were trained on the "
            "real images: run `fedgs evaluate real --metrics classifiers` on the same "
            "data once."
        )
    for reason in result["failed"].values():
        say(reason)
    if result["unconverged"]:
        names = ", ".join(result["unconverged"])
        say(f"These classifiers stopped at their limit of iterations: {names}")
