"""What runs have released, by their folders: every epsilon with all it depends on."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgs.cohorts.cohort_file import (
    INCLUDED,
    read_cohort,
    selection_condition,
    selection_costs,
)
from fedgs.config.method_settings import settings_with
from fedgs.config.run_config import RunConfig
from fedgs.config.settings import GIVEN
from fedgs.errors import UserError
from fedgs.privacy.accountant import Statement, statements_of_runs
from fedgs.privacy.ledger import Event
from fedgs.privacy.participation import COUNT_THEOREM
from fedgs.privacy.same_clients import Run
from fedgs.runs.run_folder import RunFolder


def of_run(run: Path, delta: float | None = None) -> list[Statement]:
    """Returns the statements of what a run has released so far.

    Raises:
        UserError: no run folder, or a broken ledger.
    """
    settings: dict[str, Any] = {}
    if delta is not None:
        settings["delta"] = delta
    return of_runs([run], settings)


def ranked(config: RunConfig, rows: Iterable[Statement]) -> list[Statement]:
    """Returns statements, that which the run was made for first.

    With amplification a guarantee has several bounds, of which the least counts.

    Args:
        config: the configuration of the run, with its own adversary and relation.
        rows: its statements.
    """

    def rank(row: Statement) -> tuple[bool, bool, bool, float]:
        return (
            row.adversary != config.adversary,
            row.relation != config.relation,
            not row.guarantee,
            row.epsilon or 0.0,
        )

    return sorted(rows, key=rank)


def of_runs(
    paths: Sequence[Path],
    settings: dict[str, Any],
    at_epsilon: float | None = None,
    same_clients: bool = False,
    colluding: int = 0,
) -> list[Statement]:
    """Returns the statements of what runs on the same clients released together.

    Args:
        paths: run folders, each once.
        settings: delta, in place of the runs' own.
        at_epsilon: state delta at this epsilon.
        same_clients: the user's word that the clients are the same, where the folders
            do not show it.
        colluding: nodes of a round whose noise the secagg adversary knows.

    Raises:
        UserError: no run folder, a broken ledger, or runs that do not belong together.
    """
    if at_epsilon is not None and "delta" in settings:
        raise UserError(
            "delta: --at-epsilon asks for the delta; leave out one of the two"
        )
    folders = [RunFolder.open(path) for path in paths]
    # Resolved: a link to a run is the same run.
    names = [str(folder.path.resolve()) for folder in folders]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name}: it is given twice; name each run once")
    runs = [_run(folder.config, folder.read_ledger().events) for folder in folders]
    # The runs keep their own settings: whether a budget ended one is a question of the
    # delta that it had.
    configs: dict[str, RunConfig] = {}
    for path, run in zip(paths, runs, strict=True):
        asked = dataclasses.replace(run.config, **settings)
        configs[str(path)] = asked.validate()
    deltas = {config.delta for config in configs.values()}
    if len(deltas) > 1 and at_epsilon is None:
        raise UserError(f"delta = {' and '.join(map(str, deltas))}: give --delta")
    is_reshuffled = _is_reshuffled(configs)
    if not same_clients:
        _check_same_clients(configs, is_reshuffled)
    found = statements_of_runs(
        runs,
        delta=configs[str(paths[0])].delta,
        at_epsilon=at_epsilon,
        is_reshuffled=is_reshuffled,
        selections=selection_costs(configs.values()),
        colluding=colluding,
    )
    return with_cohort_condition(found, configs.values())


def _run(config: RunConfig, events: Sequence[Event]) -> Run:
    return Run(config, events, selection_costs([config]))


def by_round(
    config: RunConfig,
    events: Sequence[Event],
    most: int,
) -> Iterator[tuple[int, Sequence[Statement]]]:
    """Yields rounds, and what is stated of all that was released until each.

    Without amplification, which would take minutes. A round that was repeated is there
    once, with all attempts until then.

    Args:
        config: the run's configuration.
        events: its ledger's.
        most: rounds, evenly spread, the last one included.
    """
    config = dataclasses.replace(config, amplification=False)
    run = _run(config, events)

    def stated(run: Run) -> Sequence[Statement]:
        return statements_of_runs([run], config.delta, selections=run.selections)

    whole = stated(run)
    ends: list[int] = []
    # From the end: of a repeated round, the last attempt is the first one met.
    for place in reversed(range(len(events))):
        if not ends or events[place].round < events[ends[-1]].round:
            ends.append(place)
    ends.reverse()
    # Where counts decide for the run, they do for each round: more rounds came.
    more = whole[0].theorem.startswith(COUNT_THEOREM)
    for index in spread(len(ends), most):
        last = ends[index]
        done = events[: last + 1]
        rows = whole
        if len(done) < len(events):  # as if these rounds were all that was planned
            shorter = run._replace(
                config=dataclasses.replace(config, target_epsilon=None),
                events=done,
                planned_rounds=max(event.round for event in done) + more,
            )
            rows = stated(shorter)
        yield events[last].round, rows


def spread(count: int, most: int) -> list[int]:
    """Returns at most so many of the places 0 to count - 1, evenly; ends included.

    >>> spread(7, 3), spread(2, 3)
    ([0, 3, 6], [0, 1])
    """
    num_places = min(count, most)
    places = np.linspace(0, count - 1, num_places)
    whole = places.round().astype(int)
    return whole.tolist()


def with_cohort_condition(
    found: Iterable[Statement],
    configs: Iterable[RunConfig],
) -> list[Statement]:
    """Adds how the cohorts were selected, where the statements do not say it yet."""
    texts = [selection_condition(config) for config in configs]
    # A dictionary keeps the order and says each text once.
    more = dict.fromkeys(text for text in texts if text and text != INCLUDED)
    return [
        dataclasses.replace(row, conditions=(*row.conditions, *more)) for row in found
    ]


def _is_reshuffled(configs: dict[str, RunConfig]) -> bool:
    """Tells whether the unit is a record that sits in another shard in every run."""
    is_record = all(config.privacy_unit == "record" for config in configs.values())
    seeds = {config.seed for config in configs.values()}
    # The seed deals the records out to shards.
    return is_record and len(seeds) > 1


# Sources whose clients are the owners, for every seed. Others may have owners too: then
# --same-clients is the user's word.
_WITH_OWNERS = ("fonts", "mnist-by-writer", "femnist", "chest-xray", "folder:")


def _check_same_clients(configs: dict[str, RunConfig], is_reshuffled: bool) -> None:
    (first, known), *others = configs.items()
    names = [*settings_with("clients")]
    is_by_owner = known.partition == "auto" and known.data.startswith(_WITH_OWNERS)
    has_owners = known.partition == "by-client" or is_by_owner
    if not has_owners and not is_reshuffled:
        names.append("seed")  # decides which records make a client
    for path, config in others:
        different = [
            name for name in names if getattr(known, name) != getattr(config, name)
        ]
        if known.data == GIVEN:  # images of a program: no folder tells which
            different.append("data")
        if _clients_of(known) != _clients_of(config):
            different.append("cohort")
        if different:
            name = different[0]
            one = getattr(known, name)
            other = getattr(config, name)
            why = "these are other clients, as far as the folders show"
            if name == "seed" and known.nodes is not None:
                why = (
                    "it decides which images make a client where a node's data name "
                    "no owners, which the folders do not show"
                )
            raise UserError(
                f"{name} = {one} in {first}, {other} in {path}: {why}; state the runs "
                "one by one, or give --same-clients if you know that they are the same"
            )


def _clients_of(config: RunConfig) -> frozenset[str] | None:
    """Returns the names in a run's cohort: every run has a copy of the file."""
    if config.cohort is None:
        return None
    return frozenset(read_cohort(Path(config.cohort)).names)
