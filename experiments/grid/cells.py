"""Lists of cells: which runs a table has, and which of them a call asks for.

Imports no tensor library: the command line reads the flags from here at every start.
"""

import math
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.baselines import find
from experiments.baselines.target import NOISES
from fedgs.config.fields import flag
from fedgs.errors import UserError, wrap_error

CellSettings = dict[str, Any]
NO_NOISE = math.inf
NOTHING: Mapping[Any, Any] = MappingProxyType({})
SEEDS = range(1000)


class Source(NamedTuple):
    """Private data and its clients.

    `cap` is the most images of a user that methods of record level train on.
    """

    settings: Mapping[str, Any] = NOTHING
    cap: int | None = None


class CellMethod(NamedTuple):
    """One way to train: settings over a recipe, and more of them by epsilon.

    `reduced` are settings below the published ones, for 15 minutes on two cores. A
    method of others has the name of its `baseline` in place of a recipe; its settings
    are those of the method and of the run.
    """

    recipe: str = ""
    settings: Mapping[str, Any] = NOTHING
    epsilons: Mapping[float, Mapping[str, Any]] = NOTHING
    data: Collection[str] = ()  # all where empty
    seeds: Collection[int] = SEEDS  # of those that are asked for
    reduced: Mapping[str, Any] = NOTHING
    baseline: str = ""
    is_capped: bool = False


def unit(method: CellMethod) -> str:
    """Returns whom a row's guarantee is about: "user", "record" or "none"."""
    if not method.baseline:
        return "user"
    return find(method.baseline, is_typed=True).unit


class Cell(NamedTuple):
    """One run of a table; its data and its method by name and by content."""

    data: str
    method: str
    epsilon: float
    seed: int
    source: Source
    how: CellMethod

    @property
    def row(self) -> str:
        """What its seeds have in common."""
        return f"{self.data}-{self.method}-eps{self.epsilon:g}"

    @property
    def name(self) -> str:
        """Name of the run folder and of the line."""
        return f"{self.row}-seed{self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """What its line says that it is."""
        asked: float | None = self.epsilon
        if asked == NO_NOISE:  # JSON has no infinity
            asked = None
        return {
            "data": self.data,
            "method": self.method,
            "asked_epsilon": asked,
            "seed": self.seed,
        }

    @property
    def settings(self) -> CellSettings:
        """Its settings over the method's recipe; the noise has no seed."""
        how = self.how
        settings: CellSettings = {
            "data": self.data,
            **self.source.settings,
            **how.settings,
            **how.reduced,
            **how.epsilons[self.epsilon],
        }
        if self.epsilon == NO_NOISE:
            # Those of others say it by settings of their own.
            if not how.baseline:
                settings["noise_multiplier"] = 0.0
        elif not NOISES & settings.keys():  # else its epsilon is what that noise costs
            settings["target_epsilon"] = self.epsilon
        settings["seed"] = self.seed
        settings["num_workers"] = 1
        if how.is_capped:
            settings["max_images_per_user"] = self.source.cap
        return settings


class Cells(NamedTuple):
    """The rows of a table: every method on its data, at its epsilons."""

    data: Mapping[str, Source]
    methods: Mapping[str, CellMethod]

    @classmethod
    def read(cls, path: Path) -> "Cells":
        """Reads a TOML file: tables of `Source` and of `CellMethod`, by name.

        Epsilons are keys; `none` is without noise.
        """
        known = tomllib.loads(path.read_text())
        data: dict[str, Source] = {}
        for name, values in known["data"].items():
            data[name] = Source(**values)
        methods: dict[str, CellMethod] = {}
        for name, values in known["methods"].items():
            # TOML has texts as keys only.
            named = values.get("epsilons", {})
            values["epsilons"] = {_epsilon(key): more for key, more in named.items()}
            methods[name] = CellMethod(**values)
        return cls(data, methods)

    def with_settings(self, settings: Mapping[str, Any]) -> "Cells":
        """Returns the cells with settings over those of all data."""
        data: dict[str, Source] = {}
        for name, source in self.data.items():
            values = {**source.settings, **settings}
            data[name] = source._replace(settings=values)
        return self._replace(data=data)

    def at_full_scale(self) -> "Cells":
        """Returns the cells with no setting below the published ones."""
        methods: dict[str, CellMethod] = {}
        for name, how in self.methods.items():
            methods[name] = how._replace(reduced={})
        return self._replace(methods=methods)

    def of_seeds(self, seeds: Sequence[int]) -> list[Cell]:
        """Returns the cells in the order of the table."""
        cells: list[Cell] = []
        for data, source in self.data.items():
            for name, how in self.methods.items():
                if how.data and data not in how.data:
                    continue
                own_seeds = [seed for seed in seeds if seed in how.seeds]
                for epsilon in how.epsilons:
                    for seed in own_seeds:
                        cell = Cell(
                            data=data,
                            method=name,
                            epsilon=epsilon,
                            seed=seed,
                            source=source,
                            how=how,
                        )
                        cells.append(cell)
        return cells


def _epsilon(key: str) -> float:
    if key == "none":
        return NO_NOISE
    return float(key)


@dataclass(frozen=True, kw_only=True)
class TableRequest:
    """What a call asks for; each flag's help says what it is.

    Attributes:
        only: regular expression; the cells with such a name.
        output: the folder of the cells.
        metrics: keys of `experiments.grid.runs.SCORES_OF_METRICS`.
    """

    seeds: tuple[str, ...] = flag(
        ("0", "1", "2"), "Seeds to train each row with, separated by commas."
    )
    full: bool = flag(False, "Use the full settings, which need a GPU (--device cuda).")
    printed: bool = flag(
        False,
        "Print what is stored, and compute nothing.",
        names=("--print",),
    )
    only: str = ""
    output: Path = Path()
    metrics: tuple[str, ...] = ("cnn",)

    def __post_init__(self) -> None:
        """Makes the output a path that holds everywhere, without `~`.

        Raises:
            UserError: there is no such user as the output names.
        """
        problem = f"output = {self.output}: its user is not known"
        with wrap_error(RuntimeError, problem, "give another --output"):
            object.__setattr__(self, "output", self.output.expanduser())

    def of(self, cells: Cells) -> list[Cell]:
        """Returns the cells that are asked for, in the order of the table.

        Raises:
            UserError: no such cell, a bad expression or bad seeds.
        """
        given = f"seeds = {','.join(self.seeds)!r}"
        with wrap_error(ValueError, given, "give --seeds like 0,1"):
            seeds = [int(seed) for seed in self.seeds]
        if not seeds or not set(seeds) <= set(SEEDS):
            raise UserError(f"{given}: give --seeds from {SEEDS[0]} to {SEEDS[-1]}")
        with wrap_error(re.error, f"only = {self.only!r}", "give a regular expression"):
            asked = re.compile(self.only)
        known = cells.of_seeds(seeds)
        chosen = [cell for cell in known if asked.search(cell.name)]
        if not chosen:
            data = ", ".join(cells.data)
            methods = ", ".join(cells.methods)
            raise UserError(
                f"only = {self.only!r}: give --only a part of DATA-METHOD-epsE-seedS, "
                f"with DATA of {data}, and METHOD of {methods}"
            )
        return chosen
