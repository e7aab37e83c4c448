"""What the report knows of one run: read from its folder, public files only.

`private/`, `flower.log` and the pictures of `fedgs evaluate` (they show real images)
are never opened, and of `audit/` only what attack A found, which reads no image.
"""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedgs.baselines.frame import BaselineRun, open_run
from fedgs.cohorts.files import selection_costs
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, wrap_error
from fedgs.files import read_json, read_json_lines
from fedgs.privacy.accountant import Statement, statements_of_runs
from fedgs.privacy.ledger import Event
from fedgs.privacy.participation import COUNT_THEOREM
from fedgs.privacy.same_clients import Run
from fedgs.privacy_label import privacy_label
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder

MOST_GRIDS = 5
MOST_POINTS = 16  # of the curve of epsilon


@dataclass(frozen=True)
class Grid:
    """A picture of generated images, as the run wrote it.

    Attributes:
        round: after which it was drawn.
        png: the file's content.
        width, height: in pixels.
    """

    round: int
    png: bytes
    width: int
    height: int


@dataclass(frozen=True)
class RunFacts:
    """One run, as its folder records it.

    Attributes:
        name: of the folder, without the path.
        config: the run's configuration.
        events: its ledger's, in order.
        metrics: lines of metrics.jsonl.
        statements: what the run has released so far.
        versions: content of versions.json.
        evaluation: results of `fedgs evaluate`, later lines over earlier ones.
        grids: first to last, at least one, at most `MOST_GRIDS`.
        is_finished: whether the generator is written.
        label: see `fedgs.privacy_label`.
        baseline: the run as one of `fedgs baseline`, which has no events here; None
            of `fedgs train`.
    """

    name: str
    config: ResolvedConfig
    events: Sequence[Event]
    metrics: Sequence[dict[str, Any]]
    statements: Sequence[Statement]
    versions: dict[str, Any]
    evaluation: dict[str, Any]
    grids: Sequence[Grid]
    is_finished: bool
    label: Mapping[str, Any]
    baseline: BaselineRun | None = None

    @property
    def round(self) -> int:
        """The last finished round."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def unit_of_time(self) -> str:
        """What the run counts: round or step."""
        return "round" if self.baseline is None else "step"

    @property
    def repeats(self) -> int:
        """Attempts beyond the first of a round; each cost privacy again."""
        return len(self.events) - len({event.round for event in self.events})

    @property
    def headline(self) -> Statement:
        """The statement that the run was made for: its own adversary and relation."""
        ranked = self.baseline is None  # a baseline's first line is its own
        rows = self.statements
        return epsilons.ranked(self.config, rows)[0] if ranked else rows[0]


def read_run(path: Path) -> RunFacts:
    """Reads what the report shows of a run folder.

    Privacy: post-processing of DP output, or public; reads nothing private.

    Raises:
        UserError: no run folder, a broken file, or no sample grid yet.
    """
    folder = RunFolder.open(path)
    baseline = open_run(folder.path) if folder.is_baseline else None
    return RunFacts(
        name=folder.path.name,
        config=folder.config,
        events=() if baseline else folder.read_ledger().events,
        metrics=read_json_lines(folder.path / "metrics.jsonl"),
        statements=baseline.guarantees() if baseline else epsilons.of_run(path),
        versions=read_json(folder.path / "versions.json"),
        evaluation=_evaluation(folder.path),
        grids=_grids(folder.path),
        is_finished=folder.is_finished,
        label=privacy_label(folder.path),
        baseline=baseline,
    )


def _evaluation(run: Path) -> dict[str, Any]:
    """Returns the last evaluation, filled up from earlier ones of the same kind."""
    lines = read_json_lines(run / "evaluations.jsonl")
    merged: dict[str, Any] = {}
    kind = ("data", "fast", "reading", "round")
    for line in lines:
        if all(line.get(name) == lines[-1].get(name) for name in kind):
            merged |= line
    return merged


def _grids(run: Path) -> list[Grid]:
    """Returns the last grid and some before it, evenly spread.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    paths = sorted((run / "samples").glob("round-*.png"))
    if not paths:
        raise UserError(
            f"{run}: no samples yet (samples/ has no round-*.png); train on with "
            f"`fedgs resume {run}`"
        )
    return [_grid(paths[place]) for place in _spread(len(paths), MOST_GRIDS)]


def _spread(count: int, most: int) -> list[int]:
    """Returns at most so many of the places 0 to count - 1, evenly; ends included.

    >>> _spread(7, 3), _spread(2, 3)
    ([0, 3, 6], [0, 1])
    """
    return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()


def _grid(path: Path) -> Grid:
    with wrap_error(ValueError, f"{path}: not named by its round", "remove it"):
        round = int(path.stem.removeprefix("round-"))
    damage = (OSError, SyntaxError, ValueError)  # what PIL raises
    with wrap_error(damage, f"{path}: no readable PNG", "restore it from a copy"):
        png = path.read_bytes()
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            image.verify()
            return Grid(round, png, *image.size)


# ------------------------------------------------------------------ epsilon by round


def epsilon_by_round(facts: RunFacts) -> dict[str, list[tuple[int, float]]]:
    """Returns epsilon after some rounds, for each adversary, without amplification.

    Returns:
        Adversary to pairs of round and epsilon, for the run's relation; an adversary
        against whom it is unbounded is left out.
    """
    config, events = facts.config, facts.events
    if config.amplification:  # the points are without it, or they would take minutes
        config = dataclasses.replace(config, amplification=False)
    points: dict[str, list[tuple[int, float]]] = {}
    whole = _statements(config, events)
    # Where counts decide for the run, they do for each point: more rounds came.
    more = whole[0].theorem.startswith(COUNT_THEOREM)
    for last in _spread(len(events), MOST_POINTS):
        done, rows = events[: last + 1], whole
        if len(done) < len(events):  # as if these rounds were all that was planned
            planned = max(event.round for event in done) + more
            rows = _statements(
                dataclasses.replace(config, num_rounds=planned, target_epsilon=None),
                done,
            )
        for row in rows:
            if row.relation == config.relation and row.epsilon is not None:
                point = (events[last].round, row.epsilon)
                points.setdefault(row.adversary, []).append(point)
    return points


def _statements(config: ResolvedConfig, events: Sequence[Event]) -> Sequence[Statement]:
    costs = selection_costs([config])
    run = Run(config, events, costs)
    return statements_of_runs([run], config.delta, selections=costs)
