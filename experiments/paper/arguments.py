"""What the commands of Table 2 and of the figures have in common on their command line.

Both train runs that they keep, at a scale, and compare their images with real ones.
"""

import argparse
from pathlib import Path
from typing import Any

from experiments.paper.scales import SCALES
from experiments.paper.scores import SAME_IMAGES, Protocol
from fedgs.data.sources import with_absolute_path


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser with the common flags for a module of this room."""
    program = f"python -m experiments.paper.{module}"
    found = argparse.ArgumentParser(prog=program, description=description)
    add = found.add_argument
    add("--output", type=Path, default=Path("runs") / module, help="its folder")
    add("--data", default="mnist-by-writer", help="as of fedgs train")
    add("--data-dir", help="as of fedgs train")
    add("--test-fraction", type=float, default=0.0, help="of data without a test split")
    add("--scale", default="small", help=f"{' or '.join(SCALES)}; see experiments")
    add("--count", type=int, help="synthetic images that are compared")
    add("--full-evaluation", action="store_true", help="not fedgs evaluate --fast")
    return found


def data_settings(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of the data that the runs train on."""
    return {"data": with_absolute_path(given.data), **_reading(given)}


def protocol(given: argparse.Namespace) -> Protocol:
    """Returns how images are compared with the real ones.

    Raises:
        UserError: too few images to compare.
    """
    data = with_absolute_path(given.data)
    return Protocol(
        data=SAME_IMAGES.get(data, data),
        reading=_reading(given),
        count=given.count,
        fast=not given.full_evaluation,
    )


def _reading(given: argparse.Namespace) -> dict[str, Any]:
    reading: dict[str, Any] = {"test_fraction": given.test_fraction}
    if given.data_dir is not None:
        reading["data_dir"] = str(Path(given.data_dir).expanduser().absolute())
    return reading
