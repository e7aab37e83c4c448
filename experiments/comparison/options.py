"""What `fedgs benchmark` is asked for: its flags.

Imports no tensor library: the command line reads the flags from here at every start.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.grid.cells import Request
from fedgs.config.fields import flag
from fedgs.config.settings import settings_of
from fedgs.errors import UserError

METRICS = ("cnn", "images", "classifiers")
# Settings of a data set of the user's; --data-dir is a flag of every call.
_OF_DATA = settings_of("Data", "num_clients", "clients_per_node", "device")
OF_DATA = tuple(spec.name for spec in _OF_DATA if spec.name != "data_dir")


@dataclass(frozen=True, kw_only=True)
class BenchmarkRequest(Request):
    """What a call asks for; each flag's help says what it is.

    Raises:
        UserError: an unknown metric.
    """

    output: Path = flag(Path("runs/benchmark"), "Its folder.")
    metrics: tuple[str, ...] = flag(
        ("cnn",),
        "Of cnn (accuracy of a CNN), images (FID), classifiers (the thirteen; hours).",
    )
    method: tuple[str, ...] = flag(
        (), "More methods of fedgs baseline, each as module:object."
    )
    max_images_per_user: int = flag(
        100, "Of your own data: the cap of methods of record level.", at_least=1
    )
    full: bool = flag(False, "Reduce no setting: for a GPU, with --device cuda.")

    def __post_init__(self) -> None:
        """Checks the metrics."""
        if wrong := [name for name in self.metrics if name not in METRICS]:
            known = ", ".join(METRICS)
            raise UserError(f"metrics = {wrong[0]!r}: give --metrics of {known}")
