"""The table of docs/debugging.md: verdicts for planted bugs, over noise and seeds.

    python -m experiments.debug.bug_table --output DIR --data mnist-by-writer --data-dir
    DATA

For each seed and bug the cohorts are selected once; for each noise level a generator
per group is trained and the samples are diagnosed, as `fedgs debug` does. Each cell is
one line of DIR/table.jsonl and one folder of `fedgs debug`; a cell that is there is not
computed again. DIR/table.md is rewritten after every cell.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.debug import bug_detection
from experiments.debug import cohorts as debug_cohorts
from experiments.debug import plan as debug_plan
from experiments.debug.request import BUGS, DebugRequest
from experiments.store import Line, Store, each, end
from fedgs.app.commands.progress import say
from fedgs.app.flags import request_flags, run_command
from fedgs.app.tables import Table
from fedgs.config.fields import flag
from fedgs.config.recipes import configure
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, wrap_error
from fedgs.files import write_atomically

SETTINGS = Path(__file__).with_suffix(".toml")  # over full-participation
DEBUG = DebugRequest(groups=4, clients_per_group=64, selection_rounds=12)
SELECTION_SIZE = 28  # pixels
NONE_SEEDS = 5  # of cohorts alike
OUTCOMES = ("right", "undecided", "wrong")


class Cell(NamedTuple):
    """One experiment of the table.

    Attributes:
        seed: of data split, bug, selection and generators.
        bug: a key of `BUGS`.
        epsilon: user-level, of all generators together; None is without noise.
    """

    seed: int
    bug: str
    epsilon: float | None

    @property
    def name(self) -> str:
        """Of its folder."""
        noise = "noise-free" if self.epsilon is None else f"epsilon-{self.epsilon:g}"
        return f"{self.bug}-{self.seed}-{noise}"


def cells(
    bugs: Sequence[str], epsilons: Sequence[float | None], seeds: int
) -> list[Cell]:
    """Returns all cells, seed by seed, so that an unfinished table is balanced."""
    return [
        Cell(seed, bug, epsilon)
        for seed in range(max(seeds, NONE_SEEDS))
        for bug in bugs
        for epsilon in epsilons
        if seed < (NONE_SEEDS if bug == "none" else seeds)
    ]


@dataclasses.dataclass(frozen=True)
class TableRequest:
    """What the command is asked for; each flag's help says what it is."""

    output: Path = flag(MISSING, "Folder; continued if it exists.")
    data: str = flag("mnist-by-writer", "As of fedgs train.")
    data_dir: str = flag("", "As of fedgs train.")
    engine: str = flag("local", "As of fedgs train.")
    bugs: tuple[str, ...] = flag(
        ("flip", "rotate", "none"), "Which bugs, of those of --bug."
    )
    epsilons: tuple[str, ...] = flag(("none", "10", "3", "1"), "none is without noise.")
    seeds: int = flag(3, f"Of bugs; cohorts alike have {NONE_SEEDS}.")
    config: Path | None = flag(None, "TOML instead of bug_table.toml.")


@request_flags(TableRequest)
def main(*, given: dict[str, Any]) -> None:
    """Fill the table."""
    request = TableRequest(**given)
    if unknown := set(request.bugs) - set(BUGS):
        raise UserError(f"bugs = {sorted(unknown)}: give --bugs of {', '.join(BUGS)}")
    levels = [_epsilon(text) for text in request.epsilons]
    names = ("data", "data_dir", "engine")
    known = {name: getattr(request, name) for name in names}
    settings = configure("full-participation", request.config or SETTINGS, known)
    output = request.output.absolute()
    configs = {  # raises before anything is made
        cell: _config(output, cell, settings)
        for cell in cells(request.bugs, levels, request.seeds)
    }
    store = Store(output / "table.jsonl")
    missing = [cell for cell in configs if not is_done(store, cell)]
    end(
        each(
            {cell.name: partial(_fill, cell, configs[cell], store) for cell in missing}
        )
    )


def _epsilon(text: str) -> float | None:
    remedy = "give --epsilons like none,10,3,1"
    with wrap_error(ValueError, f"epsilons = {text!r}", remedy):
        return None if text == "none" else float(text)


def _config(output: Path, cell: Cell, settings: RunConfig) -> RunConfig:
    """Returns the settings of all runs of a cell.

    Raises:
        UserError: an epsilon or a seed out of range.
    """
    noise: dict[str, Any] = {"target_epsilon": cell.epsilon}
    noise["noise_multiplier"] = 0.0 if cell.epsilon is None else None
    return dataclasses.replace(
        settings,
        **noise,
        corruption=BUGS[cell.bug],
        seed=cell.seed,
        output=str(output / cell.name),
    )


def is_done(store: Store, cell: Cell) -> bool:
    """Tells whether a cell is there, with the same rule of the verdict.

    With another rule the generators are used again: only the diagnosis is new.
    """
    line = store.lines.get(cell.name, {})
    rule = dataclasses.asdict(DEBUG.rule)
    return all(line.get(name) == value for name, value in rule.items())


def _fill(cell: Cell, config: RunConfig, store: Store) -> None:
    """Selects the cohorts, unless they are there, trains and diagnoses one cell."""
    started, folder = time.monotonic(), Path(config.output)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "log.txt", "a") as log, contextlib.redirect_stdout(log):
        selected = _selection(folder.parent / "cohorts", cell, config)
        if (folder / "debug.json").exists():
            debug_plan.change_rule(folder, DEBUG.rule)
            diagnosis = bug_detection.resume(folder, as_json=False)
        else:
            of_cell = dataclasses.replace(DEBUG, cohorts=selected, is_experiment=True)
            diagnosis = bug_detection.debug(config, of_cell, as_json=False)
    line = cell._asdict() | dataclasses.asdict(DEBUG.rule)
    line |= {name: diagnosis[name] for name in ("verdict", "outcome", "has_learned")}
    line["seconds"] = round(time.monotonic() - started, 1)
    store.add(cell.name, line)
    write_atomically(folder.parent / "table.md", table(store.lines.values()).encode())
    say(f"{cell.name}: {line['verdict']}, {line['outcome']}, {line['seconds']:.0f} s")


def _selection(folder: Path, cell: Cell, config: RunConfig) -> Path:
    """Returns the folder of the cohorts of this seed and bug; may select them."""
    folder = folder / f"{cell.bug}-{cell.seed}"
    if not (folder / "cohorts.json").exists():
        folder.parent.mkdir(exist_ok=True)
        # At its own size: a dozen rounds of the classifier learn little at 16 pixels.
        full = dataclasses.replace(config, image_size=SELECTION_SIZE)
        debug_cohorts.select(folder, full, DEBUG)
    return folder


def table(lines: Iterable[Line]) -> str:
    """Returns the table in Markdown: right / undecided / wrong of each noise level."""
    outcomes: dict[tuple[float | None, str], list[str]] = {}
    for line in lines:
        of_cell = outcomes.setdefault((line["epsilon"], line["bug"]), [])
        of_cell.append(line["outcome"])
    bugs = [bug for bug in BUGS if any(bug == known for _, known in outcomes)]
    levels = sorted({level for level, _ in outcomes}, key=lambda e: -(e or 1e9))

    def counts(level: float | None, bug: str) -> str:
        of_cell = outcomes.get((level, bug), [])
        return " / ".join(str(of_cell.count(outcome)) for outcome in OUTCOMES)

    shown = [
        ["noise-free" if level is None else f"{level:g}"]
        + [counts(level, bug) for bug in bugs]
        for level in levels
    ]
    head = ["epsilon", *(f"`--bug {bug}`" for bug in bugs)]
    return Table("", head, shown).markdown()


def command() -> None:
    """Runs the command line; bad input is one line and exit code 2."""
    sys.exit(run_command(main))


if __name__ == "__main__":
    command()
