"""What `fedgs baseline` and `fedgs resume` do with methods that others published."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from fedgs.app.commands import forecast
from fedgs.app.commands.run_outcome import (
    end_when_hurried,
    exit_if_stopped,
    near,
    show_end,
)
from fedgs.app.commands.terminal import Progress, say
from fedgs.app.tables import Table, epsilon
from fedgs.baselines import METHODS, find
from fedgs.baselines.contract import Guarantee
from fedgs.baselines.frame import (
    CURATOR,
    Asked,
    BaselineRun,
    is_finished,
    load_run_data,
    new_run,
    open_run,
)
from fedgs.baselines.frame import train as train_in
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError
from fedgs.privacy.accountant import SEEDED
from fedgs.round.run import stop_on_signal


def list_methods() -> None:
    """Prints every method with the unit of its guarantee."""
    methods = {name: find(name) for name in METHODS}
    rows = [[name, method.unit, method.title] for name, method in methods.items()]
    note = (
        "By default settings; `fedgs baseline NAME --help` lists them. Who runs them "
        "sees all images. A method of your own: module:object (docs/baselines.md)."
    )
    head = ["name", "unit", "title"]
    Table("Baselines", head, rows, note, numeric=False).show()


def train(name: str, given: Mapping[str, Any]) -> BaselineRun:
    """Creates a run folder and trains in it.

    Args:
        name: of the method, or module:object.
        given: settings of the method, of `Asked`, and of `RunConfig`.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: the run stopped early (code 1).
    """
    kinds = (find(name, is_typed=True).Settings, Asked)
    own, asked = (
        {spec.name: given[spec.name] for spec in fields(kind) if spec.name in given}
        for kind in kinds
    )
    settings = {n: v for n, v in given.items() if n not in own and n not in asked}
    run, data = new_run(name, own, Asked(**asked), settings)
    for warning in forecast.warnings_of(run.config, data, run.target_epsilon):
        say(f"Warning: {warning}", is_error=True)
    say(f"scores: {forecast.evaluation_note(run.config, data)}")
    _train(run, data)
    return run


def resume(path: Path, typed: str = "") -> None:
    """Continues a run folder.

    Args:
        path: of the folder.
        typed: a method that the user named on the command line, and so trusts.

    Raises:
        UserError: not a run folder, or a corrupted one.
        typer.Exit: the run stopped early (code 1).
    """
    run = open_run(path, typed)
    if is_finished(run):
        say(f"{path}: is finished, its generator is written")
        return
    _train(run, load_run_data(run))


def _train(run: BaselineRun, data: FederatedImages) -> None:
    say(_description(run))
    path = near(run.folder.path)
    go_on = f"fedgs resume {path}"
    with (
        exit_if_stopped(f"continue with: {go_on}"),
        end_when_hurried(),
        stop_on_signal(go_on) as stop,
        Progress(Console()) as progress,
    ):
        report = progress.rounds(run.config.num_rounds, "step")
        train_in(run, data, report, stop)
    show_end(path, run.name)


def _description(run: BaselineRun) -> str:
    facts = run.facts
    noise = ""
    if run.unit == "none":
        noise = ", NOT PRIVATE"
    elif run.config.noise_seed is not None:
        noise = f", noise {SEEDED}"
    return (
        f"{run.method.title}: {facts.num_records} images, central, "
        f"{run.config.num_rounds} steps{noise}"
    )


# ------------------------------------------------------------------ guarantees


def privacy(
    paths: Sequence[Path], settings: dict[str, Any], as_json: bool = False
) -> None:
    """Prints what one run of a baseline guarantees.

    Args:
        paths: run folders; of a baseline only one at a time.
        settings: delta, in place of the run's own.
        as_json: print JSON.

    Raises:
        UserError: several runs, other settings than delta, or a broken folder.
    """
    if len(paths) > 1:
        raise UserError(
            f"RUN = {', '.join(map(str, paths))}: a baseline's run is accounted "
            "alone; give one RUN, and add epsilons and deltas of one unit and relation"
        )
    if others := settings.keys() - {"delta"}:
        name = sorted(others)[0]
        raise UserError(
            f"{name} = {settings[name]}: RUN is of `fedgs baseline`, which takes only "
            f"--delta here; leave out --{name.replace('_', '-')}"
        )
    run = open_run(paths[0])
    rows = run.guarantees(settings.get("delta"), with_private=True)
    if as_json:
        content = {"method": run.method.name, "unit": run.unit}
        content |= {"trust": CURATOR, "num_releases": len(run.releases)}
        stated = [dataclasses.asdict(r) | {"guarantee": r.is_guarantee} for r in rows]
        content |= {"guarantees": stated}
        print(json.dumps(content, indent=2))
    else:
        show(run, rows)


def tables(run: BaselineRun, rows: Sequence[Guarantee]) -> list[Table]:
    """Returns guarantees as tables, one for each unit: never one column."""
    found: list[Table] = []
    for unit in ("user", "record"):
        own = [row for row in rows if row.unit == unit]
        cells = [
            (r.label, r.relation, epsilon(r.epsilon), f"{r.delta:g}", r.theorem)
            for r in own
        ]
        caption = f"{run.method.name}: epsilon of one {unit}"
        head = ["label", "relation", "epsilon", "delta", "theorem"]
        conditions = dict.fromkeys(text for row in own for text in row.conditions)
        note = "\n".join(f"- {text}" for text in conditions)
        if own:
            found.append(Table(caption, head, cells, note, numeric=False))
    return found


def show(run: BaselineRun, rows: Sequence[Guarantee]) -> None:
    """Prints what a run guarantees, or that it guarantees nothing."""
    for table in tables(run, rows):
        table.show()
    if not rows:
        say(f"epsilon: none; {run.method.name} guarantees nothing")
    say(f"trust: {CURATOR}; releases in the ledger: {len(run.releases)}")
