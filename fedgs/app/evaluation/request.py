"""What `fedgs evaluate` is asked for: its flags, and the names of its results.

Imports no tensor library: the command line reads the flags from here at every start.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from fedgs.config.fields import check_ranges, flag
from fedgs.config.method_settings import settings_with

READING = settings_with("reading")
SHAPE = tuple(name for name in settings_with("images") if name not in READING)
METRICS = ("images", "cnn", "classifiers", "label-efficiency")


@dataclass(frozen=True)
class EvaluationRequest:
    """One evaluation: each field's help says what it is.

    Attributes:
        data: real data with a test split; "" is the run's own.
        reading: settings of `READING` and `SHAPE` that the user gave, the run's
            otherwise; all of them once the data is known.

    Raises:
        UserError: a number out of range.
    """

    source: str = flag(
        MISSING,
        "Synthetic images: a run folder, or FILE.npz with images and labels. Or "
        "images to compare with: real (training images), real-test, fonts or noise.",
        metavar="RUN_OR_NPZ",
    )
    data: str = ""
    reading: Mapping[str, Any] = field(default_factory=dict)
    test: str | None = flag(
        None, "Real test images of your own: npz:FILE or folder:PATH."
    )
    count: int | None = flag(
        None,
        "Number of synthetic images. Default: as many as are real, but from 10000 to "
        "60000, and 10000 for `--metrics cnn`.",
        names=("-n", "--count"),
        at_most=100_000,  # all are in memory, and each is compared with many
    )
    seed: int = flag(
        0,
        "Seed of drawing images and of training classifiers.",
        at_least=0,
        at_most=2**32 - 1,
    )
    metrics: tuple[str, ...] = flag(
        METRICS, f"Scores to compute, of {', '.join(METRICS)}."
    )
    fast: bool = flag(
        False,
        "Use fewer images: 2000 synthetic ones, 10000 and 2000 real ones for training"
        " and test.",
    )
    device: str = flag(
        "cpu",
        "Processor that computes: cpu or cuda.",
        choices=("cpu", "cuda"),
    )
    output: Path | None = flag(
        None, "Folder to write the results into. Default: the run folder."
    )

    def __post_init__(self) -> None:
        """Checks every field by itself."""
        check_ranges(self)

    @property
    def network(self) -> str:
        """The classifier of the real data in the names of metrics."""
        # Scores by different networks cannot be compared. So whatever it is trained on
        # stands in the names of the metrics that it computes.
        parts = ["lenet", self.data.split(":")[0]]
        classes = self.reading.get("classes", "all")
        if classes != "all":
            parts.append(classes)
        if self.fast:
            parts.append("fast")
        return "_".join(parts).replace("-", "_")
