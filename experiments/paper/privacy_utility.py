"""The runs of a privacy-utility curve, and what they reached (Fig. 4 and A2).

noise-scale    one run for each target_epsilon, at its last round; 0 is no noise
iterations     one run, at several rounds
sampling-rate  one run for each number of clients (recipes that draw one of K), or
               for each number of participants, at several rounds
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.paper.figure_drawing import Point
from experiments.paper.scales import configured
from experiments.paper.scores import epsilon_of, metric, score
from experiments.paper.stored_runs import last_round, snapshot_rounds
from experiments.store import Line, Store
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, wrap_error
from fedgs.runs.run_folder import RunFolder

VALUES = {  # kind: scale: what is varied; ours, for the paper's text names no values
    "noise-scale": {
        "paper": (1.0, 3.0, 10.0, 30.0, 0.0),
        "small": (1.0, 3.0, 10.0, 0.0),
    },
    "iterations": {"paper": (), "small": ()},
    "sampling-rate": {"paper": (500, 1000, 2000), "small": (50, 100, 200)},
}
KINDS = tuple(VALUES)


def parse_values(kind: str, text: str | None, scale: str) -> tuple[float, ...]:
    """Returns what is varied: as given, or the scale's own.

    Raises:
        UserError: no numbers, or values for a kind that varies nothing.
    """
    if text is None:
        return VALUES[kind][scale]
    if kind == "iterations":
        raise UserError("values: iterations varies nothing; leave out --values")
    with wrap_error(ValueError, f"values = {text!r}", "give --values like 1,3,10"):
        values = tuple(float(value) for value in text.split(","))
    if min(values) < (kind == "sampling-rate"):
        raise UserError(f"values = {text}: give numbers that {kind} can have")
    return values


def variations(
    kind: str,
    recipe: str,
    scale: str,
    values: Sequence[float],
    settings: Mapping[str, Any],
) -> dict[str, RunConfig]:
    """Returns the configurations of a curve's runs by title.

    Raises:
        UserError: invalid settings.
    """
    base = configured(recipe, scale, settings)
    if kind == "iterations":
        return {"fedgs": base}
    found: dict[str, RunConfig] = {}
    for value in values:
        if kind == "noise-scale":
            change = {"target_epsilon": value} if value else {"noise_multiplier": 0.0}
            title = f"epsilon {value:g}" if value else "no noise"
        elif base.client_selection == "all" or (base.clients_per_round or 1) > 1:
            change = {"clients_per_round": int(value), "client_selection": "uniform"}
            title = f"{value:g} clients in a round"
        else:
            change = {"num_clients": int(value)}
            title = f"sampling rate 1/{value:g}"
        found[title] = configured(recipe, scale, settings, change)
    return found


def curves(
    kind: str,
    runs: Mapping[str, RunFolder],
    protocol: EvaluationRequest,
    store: Store,
    adversary: str,
    relation: str,
) -> tuple[dict[str, list[Point]], tuple[str, str]]:
    """Returns the points of every curve, and the names of the two scores.

    Privacy: reads private data; output private.

    Raises:
        UserError: the real data is missing, or the runs have no such adversary.
    """
    found: dict[str, list[Point]] = {}
    names = ("", "")
    is_last_only = kind == "noise-scale"
    for title, folder in runs.items():
        noise = folder.config.noise_multiplier
        for round in [last_round(folder)] if is_last_only else snapshot_rounds(folder):
            line = score(folder, round, protocol, store)
            names = (metric(line, "is_")[0], metric(line, "fid_")[0])
            is_varied = is_last_only and noise
            note = f"noise {noise:g}" if is_varied else f"round {round}"
            curve = found.setdefault("fedgs" if is_varied else title, [])
            curve.append(_point(line, note, adversary, relation))
    for points in found.values():
        points.sort(key=lambda point: point.epsilon or 0.0)
    return found, names


def _point(line: Line, note: str, adversary: str, relation: str) -> Point:
    try:
        epsilon = epsilon_of(line, adversary, relation)
    except KeyError as error:
        raise UserError(
            f"adversary = {adversary!r}: {line['run']} has no such epsilon; give "
            "--adversary of release, server, secagg"
        ) from error
    return Point(note, epsilon, metric(line, "is_")[1], metric(line, "fid_")[1])
