"""The table of docs/debugging.md: verdicts for planted bugs, over noise and seeds.

    python -m experiments.debug.bug_table --output DIR --data mnist-by-writer --data-dir
    DATA

For each seed and bug the cohorts are selected once; for each noise level a generator
per group is trained and the samples are diagnosed, as `fedgs debug` does. Each cell is
one line of DIR/table.jsonl and one folder of `fedgs debug`; a cell that is there is not
computed again, and one that was interrupted goes on. DIR/table.md is rewritten after
every cell.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.debug import bug_detection
from experiments.debug import cohorts as debug_cohorts
from experiments.debug.debug_request import BUGS, DebugRequest
from experiments.store import Line, Store, each, end
from fedgs.app.commands.terminal import say
from fedgs.app.flags import OutputOption, run_command, settings_flags
from fedgs.app.tables import Table
from fedgs.config.recipes import configure
from fedgs.config.run_config import RunConfig
from fedgs.files import write_atomically

DATA = {"data": "mnist-by-writer"}
SETTINGS = Path(__file__).with_suffix(".toml")  # over full-participation
DEBUG = DebugRequest(groups=4, clients_per_group=64, is_experiment=True)
SELECTION = dataclasses.replace(debug_cohorts.SELECTION, num_rounds=12)
SELECTION_SIZE = 28  # pixels
SHOWN = {"flip": 3, "rotate": 3, "none": 5}  # bugs, and seeds of each
EPSILONS = (None, 10.0, 3.0, 1.0)  # None is without noise
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


def cells() -> list[Cell]:
    """Returns all cells, seed by seed, so that an unfinished table is balanced."""
    return [
        Cell(seed, bug, epsilon)
        for seed in range(max(SHOWN.values()))
        for bug, seeds in SHOWN.items()
        for epsilon in EPSILONS
        if seed < seeds
    ]


@settings_flags("data", "data_dir", defaults=DATA)
def main(output: OutputOption, *, settings: dict[str, Any]) -> None:
    """Fill the table, in the folder OUTPUT."""
    given = {"engine": "local"} | DATA | settings
    config, output = configure("full-participation", SETTINGS, given), output.absolute()
    store = Store(output / "table.jsonl")
    work = {
        cell.name: partial(_fill, cell, _config(output, cell, config), store)
        for cell in cells()
        if cell.name not in store.lines
    }
    end(each(work))


def _config(output: Path, cell: Cell, settings: RunConfig) -> RunConfig:
    """Returns the settings of all runs of a cell."""
    noise: dict[str, Any] = {"target_epsilon": cell.epsilon}
    noise["noise_multiplier"] = 0.0 if cell.epsilon is None else None
    return dataclasses.replace(
        settings,
        **noise,
        corruption=BUGS[cell.bug],
        seed=cell.seed,
        output=str(output / cell.name),
    )


def _fill(cell: Cell, config: RunConfig, store: Store) -> None:
    """Selects the cohorts, unless they are there, trains and diagnoses one cell."""
    started, folder = time.monotonic(), Path(config.output)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "log.txt", "a") as log, contextlib.redirect_stdout(log):
        selected = _selection(folder.parent / "cohorts", cell, config)
        if (folder / "debug.json").exists():
            diagnosis = bug_detection.resume(folder)
        else:
            files = {c: selected / name for c, name in debug_cohorts.FILES.items()}
            of_cell = dataclasses.replace(DEBUG, **files)
            diagnosis = bug_detection.debug(config, of_cell)
    line = cell._asdict()
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
        debug_cohorts.select(folder, full, SELECTION)
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


if __name__ == "__main__":
    sys.exit(run_command(main))
