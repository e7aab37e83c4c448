"""Commands of `fedgs` that are research: comparison, speed, the paper's numbers.

They come to the command line by entry points of the group `fedgs.commands`
(pyproject.toml), and `fedgs baseline` from `experiments.baseline_commands`.
"""

from typing import Annotated, Any

import typer

from experiments.comparison.options import OF_DATA, CompareRequest
from fedgs.app.flags import JsonOption, request_flags, settings_flags


# Without --data there are three data sets, and each method's recipe has its own nodes.
@settings_flags(*OF_DATA, defaults={"data": None, "clients_per_node": None})
@request_flags(CompareRequest)
def compare(*, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Train all methods at several epsilons, and print a table of their scores.

    Results that are stored already are not computed again. With --data, the
    methods are compared on your data instead of three public data sets.
    """
    request = CompareRequest(**given)
    # Loads torch.
    from experiments.comparison.compare import compare

    compare(request, settings)


def bench(
    device: Annotated[
        str, typer.Option(help="Processor to measure: cpu or cuda.")
    ] = "cpu",
) -> None:
    """Measure how fast this machine trains. Nothing is written."""
    # Loads torch.
    from experiments.speed.bench import bench as measure

    measure(device)


def reproduce(as_json: JsonOption = False) -> None:
    """Recompute the paper's privacy numbers, and compare them with the printed ones."""
    from experiments.paper import reproduce as reproduction

    reproduction.main(as_json)
