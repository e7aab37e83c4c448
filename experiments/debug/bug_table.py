"""The table of docs/debugging.md: verdicts for planted bugs, over noise and seeds.

    python -m experiments.debug.bug_table --output DIR --data mnist-by-writer --data-dir
    DATA

For each seed and bug the cohorts are selected once; for each noise level a generator
per group is trained and the samples are diagnosed, as `fedgs debug` does. Each cell is
one line of DIR/table.jsonl; a cell that is there is not computed again, so the same
command continues after an interruption. DIR/table.md is rewritten after every cell.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from experiments.debug import bug_detection
from experiments.debug import cohorts as debug_cohorts
from experiments.debug import plan as debug_plan
from experiments.debug.request import BUGS, DebugRequest
from experiments.flags import request_flags, run_command
from experiments.tables import Table
from fedgs.config.fields import flag
from fedgs.config.recipes import configure
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, explained
from fedgs.files import read_json_lines, write_atomically, write_json

# Of the runs: small enough for 44 cells on two CPU cores. Over full-participation.
SETTINGS = {
    "image_size": 16,
    "dct_size": 8,
    "batch_size": 16,
    "discriminator_batch_size": 8,
    "fakes_per_round": 64,
    "generator_dim": 8,
    "discriminator_dim": 4,
    "warm_start_rounds": 10,
    "num_rounds": 50,
    "generator_learning_rate": 6e-3,
    "discriminator_steps": 3,
    "discriminator_learning_rate": 12e-3,
    "ema_decay": 0.9,
    "num_workers": 1,
    "checkpoint_every": 50,
}
SELECTION_SIZE = 28  # pixels
OUTCOMES = ("right", "undecided", "wrong")


@dataclasses.dataclass(frozen=True)
class Cell:
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
    bugs: Sequence[str], epsilons: Sequence[float | None], seeds: int, none_seeds: int
) -> list[Cell]:
    """Returns all cells, seed by seed, so that an unfinished table is balanced."""
    return [
        Cell(seed, bug, epsilon)
        for seed in range(max(seeds, none_seeds))
        for bug in bugs
        for epsilon in epsilons
        if seed < (none_seeds if bug == "none" else seeds)
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
    seeds: int = flag(3, "Of flip and rotate.")
    none_seeds: int = flag(5, "Of none.")
    groups: int = flag(4, "Of each cohort.")
    clients_per_group: int = flag(64, "As of fedgs debug.")
    selection_rounds: int = flag(12, "As of fedgs debug.")
    config: Path | None = flag(None, "TOML instead of `SETTINGS`.")

    def settings(self) -> RunConfig:
        """Returns the settings of all runs but those of a cell."""
        own = {"data": self.data, "data_dir": self.data_dir, "engine": self.engine}
        known = SETTINGS if self.config is None else {}
        return configure("full-participation", self.config, known | own)

    def of_debug(self) -> DebugRequest:
        """Returns what `fedgs debug` is asked for in every cell."""
        names = ("groups", "clients_per_group", "selection_rounds")
        return DebugRequest(**{name: getattr(self, name) for name in names})


@request_flags(TableRequest)
def main(*, given: dict[str, Any]) -> None:
    """Fill the table."""
    asked = TableRequest(**given)
    settings, request = asked.settings(), asked.of_debug()
    levels = [_epsilon(text) for text in asked.epsilons]
    if unknown := set(asked.bugs) - set(BUGS):
        raise UserError(f"bugs = {sorted(unknown)}: give --bugs of {', '.join(BUGS)}")
    output = asked.output.absolute()
    planned = cells(asked.bugs, levels, asked.seeds, asked.none_seeds)
    for cell in planned:
        _config(output, cell, settings)  # raises before anything is made
    output.mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate(planned):
        if is_done(output, cell, request):
            continue
        started = time.monotonic()
        row = compute(output, cell, settings, request)
        row["seconds"] = round(time.monotonic() - started, 1)
        rows = [r for r in read_rows(output) if r["cell"] != cell.name] + [row]
        text = "".join(json.dumps(line) + "\n" for line in rows)
        write_atomically(output / "table.jsonl", text.encode())
        write_atomically(output / "table.md", table(rows).encode())
        print(
            f"{number + 1} of {len(planned)}: {cell.name}: {row['verdict']}, "
            f"{row['outcome']}, {row['seconds']:.0f} s",
            flush=True,
        )


def _epsilon(text: str) -> float | None:
    remedy = "give --epsilons like none,10,3,1"
    with explained(ValueError, f"epsilons = {text!r}", remedy):
        return None if text == "none" else float(text)


def _config(output: Path, cell: Cell, settings: RunConfig) -> RunConfig:
    """Returns the settings of all runs of a cell.

    Raises:
        UserError: an epsilon or a seed out of range.
    """
    noise = {"target_epsilon": cell.epsilon}
    noise["noise_multiplier"] = 0.0 if cell.epsilon is None else None
    return dataclasses.replace(
        settings,
        **noise,  # type: ignore[arg-type]
        corruption=BUGS[cell.bug],
        seed=cell.seed,
        output=str(output / cell.name),
    )


def compute(
    output: Path, cell: Cell, settings: RunConfig, request: DebugRequest
) -> dict[str, Any]:
    """Selects the cohorts, unless they are there, trains and diagnoses one cell."""
    config = _config(output, cell, settings)
    with _quiet(output / "log.txt"):
        selected = _selection(output, cell, config, request)
        if (output / cell.name / "debug.json").exists():
            debug_plan.change_rule(output / cell.name, request.rule)
            diagnosis = bug_detection.resume(output / cell.name, as_json=False)
        else:
            of_cell = dataclasses.replace(request, cohorts=selected, is_experiment=True)
            diagnosis = bug_detection.debug(config, of_cell, as_json=False)
    kept = ("verdict", "outcome", "has_learned", "ranking", "two_sample", "effects")
    return {
        "cell": cell.name,
        **dataclasses.asdict(cell),
        **dataclasses.asdict(request.rule),
        **{name: diagnosis[name] for name in kept},
        "counts": diagnosis["planted"]["counts"],
        "num_rounds": config.num_rounds,
        "epsilons": sorted(
            (row["adversary"], row["relation"], row["epsilon"])
            for row in diagnosis["privacy"]
        ),
    }


def _selection(
    output: Path, cell: Cell, config: RunConfig, request: DebugRequest
) -> Path:
    """Returns the folder of the cohorts of this seed and bug; may select them."""
    folder = output / "cohorts" / f"{cell.bug}-{cell.seed}"
    if not (folder / "cohorts.json").exists():
        folder.parent.mkdir(exist_ok=True)
        started = time.monotonic()
        # At its own size: a dozen rounds of the classifier learn little at 16 pixels.
        full = dataclasses.replace(config, image_size=SELECTION_SIZE)
        debug_cohorts.select(folder, full, request)
        seconds = round(time.monotonic() - started, 1)
        write_json(folder / "seconds.json", {"seconds": seconds})
    return folder


@contextlib.contextmanager
def _quiet(path: Path) -> Iterator[None]:
    with open(path, "a") as log, contextlib.redirect_stdout(log):
        yield


def read_rows(output: Path) -> list[dict[str, Any]]:
    """Returns the cells that are there."""
    return read_json_lines(output / "table.jsonl")


def is_done(output: Path, cell: Cell, request: DebugRequest) -> bool:
    """Tells whether a cell is there, with the same rule of the verdict.

    With another rule the generators are used again: only the diagnosis is new.
    """
    rule = dataclasses.asdict(request.rule)
    return any(
        row["cell"] == cell.name and all(row.get(n) == v for n, v in rule.items())
        for row in read_rows(output)
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown: right / undecided / wrong of each noise level."""
    levels = sorted({row["epsilon"] for row in rows}, key=lambda e: -(e or 1e9))
    bugs = [bug for bug in BUGS if any(row["bug"] == bug for row in rows)]

    def counts(bug: str, level: float | None) -> str:
        of_cell = [row for row in rows if (row["bug"], row["epsilon"]) == (bug, level)]
        outcomes = [row["outcome"] for row in of_cell]
        return " / ".join(str(outcomes.count(outcome)) for outcome in OUTCOMES)

    shown = [
        ["noise-free" if level is None else f"{level:g}"]
        + [counts(bug, level) for bug in bugs]
        for level in levels
    ]
    head = ["epsilon", *(f"`--bug {bug}`" for bug in bugs)]
    return Table("", head, shown).markdown()


def command() -> None:
    """Runs the command line; bad input is one line and exit code 2."""
    sys.exit(run_command(main))


if __name__ == "__main__":
    command()
