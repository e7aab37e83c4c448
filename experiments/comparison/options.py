"""What `fedgs compare` is asked for: its flags.

Imports no tensor library: the command line reads the flags from here at every start.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.grid.cells import TableRequest
from fedgs.config.fields import flag
from fedgs.errors import check_names

METRIC_NAMES = ("cnn", "images", "classifiers")
# Settings of a data set of the user's.
OF_DATA = ("Data", "num_clients", "clients_per_node", "device")


@dataclass(frozen=True, kw_only=True)
class CompareRequest(TableRequest):
    """What a call asks for; each flag's help says what it is.

    Raises:
        UserError: an unknown metric.
    """

    only: str = flag(
        "", "Regular expression; only cells with a matching name are computed."
    )
    output: Path = flag(Path("runs/compare"), "Folder of the results.")
    metrics: tuple[str, ...] = flag(
        ("cnn",),
        "Scores to compute, separated by commas: cnn (accuracy of a CNN), images "
        "(FID), classifiers (thirteen of them; takes hours).",
    )
    method: tuple[str, ...] = flag(
        (), "Further methods, each as module:object as for `fedgs baseline`."
    )

    def __post_init__(self) -> None:
        """Checks the metrics."""
        super().__post_init__()
        check_names("metrics", self.metrics, METRIC_NAMES)
