"""Commands of `fedgs` that are research: comparison, speed, the paper's numbers.

They come to the command line by entry points of the group `fedgs.commands`
(pyproject.toml), and `fedgs baseline` from `experiments.baseline_commands`.
"""

from typing import Annotated, Any

import typer

from experiments.comparison.options import OF_DATA, CompareRequest
from fedgs.app.flags import JsonOption, request_flags, settings_flags


@settings_flags(*OF_DATA)
@request_flags(CompareRequest)
def compare(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Train and compare all methods at every epsilon; what is stored is printed.

    --data, and how it is read, is for a data set of your own in place of the three.
    """
    request = CompareRequest(**given)
    # Loads torch.
    from experiments.comparison.compare import compare

    compare(request, settings)


def bench(device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu") -> None:
    """Measure the speed of this machine; nothing is kept."""
    # Loads torch.
    from experiments.speed.bench import bench as measure

    measure(device)


def reproduce(as_json: JsonOption = False) -> None:
    """Recompute the numbers of the analysis, and compare them with the paper's."""
    from experiments.paper import reproduce as reproduction

    reproduction.main(as_json)
