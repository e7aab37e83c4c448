"""What `fedgs report` does: one self-contained page about runs and debug folders.

The page needs no network and no script. It shows public files only: configuration,
ledger, metrics, sample grids, evaluations, and the diagnosis of a debug folder. The
same folders give the same bytes.
"""

import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console

from experiments.report import pictures as report_pictures
from experiments.report import words
from experiments.report.baseline import page_of
from experiments.report.curves import curves
from experiments.report.debug import DebugFacts, is_debug, read_debug_folder
from experiments.report.drawing import draw
from experiments.report.evaluation import evaluation_tables
from experiments.report.run import RunFacts, read_run, shown_data, train_command
from experiments.report.tables import (
    PrivacyTable,
    communication_table,
    privacy_table,
    settings_tables,
    stages_tables,
    versions_table,
)
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.settings import IMAGES, settings_with
from fedgs.errors import UserError, explained
from fedgs.files import write_atomically
from fedgs.privacy.accounting import Statement
from fedgs.privacy_label import unit_in_words
from fedgs.runs import epsilons
from fedgs.runs.data_card import in_words
from fedgs.runs.run_folder import is_baseline

FAILED = "cannot be written"
console = Console()


def report(paths: Sequence[Path], output: Path) -> None:
    """Writes the page, and its sample grids as PNG files beside it.

    Privacy: post-processing of DP output, or public; evaluations are neither, and the
    page says so.

    Raises:
        UserError: an output that exists or cannot be written, a path that is no run or
            debug folder, a run without samples, runs of different data, a package that
            is missing. Nothing is then written.
    """
    pictures = _checked(output)
    baselines = [path for path in paths if is_baseline(path)]
    if baselines:
        content, files = _of_baselines(paths, baselines)
    else:
        page = read_page(paths)
        files = report_pictures.png_files(
            page.runs, {d.name: d.picture for d in page.debugs if d.picture is not None}
        )
        content = render(page).encode()
    with explained(OSError, f"output = {output}: {FAILED}", "choose another --output"):
        pictures.mkdir()
        for name, png in files.items():
            write_atomically(pictures / name.replace("/", "-"), png)
        write_atomically(output, content)
    size = words.num_bytes(len(content))
    console.print(f"report  {output}  ({size})", highlight=False, soft_wrap=True)
    console.print(f"grids   {pictures}{os.sep}", highlight=False, soft_wrap=True)


def _of_baselines(
    paths: Sequence[Path], baselines: Sequence[Path]
) -> tuple[bytes, dict[str, bytes]]:
    """Returns the page of runs of `fedgs baseline`, and its pictures by file name."""
    if others := [path for path in paths if path not in baselines]:
        raise UserError(
            f"{others[0]}: is of `fedgs train`, {baselines[0]} of `fedgs baseline`: "
            "their epsilons stand in different tables; make a report of each"
        )
    shown = page_of(baselines)
    _check_same_data([found.facts for found in shown["baselines"]])
    files = report_pictures.png_files([f.facts for f in shown["baselines"]], {})
    return environment().get_template("baseline.html").render(shown).encode(), files


def _checked(output: Path) -> Path:
    """Checks that both outputs can be written and returns the folder of pictures."""
    if output.suffix not in (".html", ".htm"):
        raise UserError(f"output = {output}: give a name that ends in .html")
    pictures = output.with_name(f"{output.stem}-grids")
    for path in (output, pictures):
        if path.exists() or path.is_symlink():
            raise UserError(
                f"output = {path}: exists already; choose another --output or remove it"
            )
    parent = output.absolute().parent
    if not parent.is_dir():
        raise UserError(f"output = {output}: its folder does not exist; make it first")
    remedy = "choose a folder that can be written"
    with (
        explained(OSError, f"output = {output}: {FAILED}", remedy),
        tempfile.TemporaryFile(dir=parent),
    ):
        return pictures


# ------------------------------------------------------------------ the page's content


@dataclass(frozen=True)
class Page:
    """All that the template shows.

    Attributes:
        debugs: debug folders, in the order given.
        singles: run folders, in the order given.
        together: what all singles released together; None if that cannot be stated.
    """

    debugs: Sequence[DebugFacts]
    singles: Sequence[RunFacts]
    together: Sequence[Statement] | None

    @cached_property
    def runs(self) -> list[RunFacts]:
        """Every run, those of debug folders first."""
        return [run for debug in self.debugs for run in debug.runs] + [*self.singles]

    @property
    def title(self) -> str:
        """The page's name."""
        if len(self.debugs) == 1 and not self.singles:
            return f"{self.debugs[0].name}: suspicious against healthy clients"
        if self.debugs:
            return f"{len(self.debugs) + len(self.singles)} results compared"
        if len(self.singles) == 1:
            return self.singles[0].name
        return f"{len(self.singles)} runs compared"

    @property
    def data(self) -> str:
        """The data that all runs trained on."""
        return shown_data(self.config.data)

    @property
    def config(self) -> ResolvedConfig:
        """The first configuration, for what all runs share."""
        return self.runs[0].config

    @cached_property
    def privacy(self) -> list[PrivacyTable]:
        """One table for each run, one for all debug groups, one for runs together."""
        tables: list[PrivacyTable] = []
        alone: list[RunFacts] = []  # runs that no table of a debug folder covers
        for debug in self.debugs:
            if debug.statements:
                caption = f"{debug.name}: all groups, each client in one of them"
                config = debug.runs[0].config
                tables.append(privacy_table(caption, debug.statements, config))
            else:
                alone += debug.runs
        tables += [
            privacy_table(run.name, run.statements, run.config, run.headline)
            for run in (*alone, *self.singles)
        ]
        if self.together:
            caption = "All of these runs together, on the same clients"
            config = self.singles[0].config
            tables.append(privacy_table(caption, self.together, config))
        return tables

    @property
    def commands(self) -> list[str]:
        """Commands that look at the folders again; names stand for their places."""
        commands = []
        for facts in self.singles:
            data = shlex.quote(shown_data(str(facts.evaluation.get("data", self.data))))
            place = " --data-dir DATA" if facts.config.data_dir else ""
            name = shlex.quote(facts.name)
            commands.append(f"fedgs privacy {name}")
            commands.append(f"fedgs sample {name} -n 80 -o samples.png")
            commands.append(f"fedgs evaluate {name} --data {data}{place}")
        names = [shlex.quote(found.name) for found in (*self.debugs, *self.singles)]
        return [*commands, f"fedgs report {' '.join(names)} -o report.html"]

    @property
    def is_not_added_up(self) -> bool:
        """Whether no table says what all folders released together."""
        count = len(self.debugs) + len(self.singles)
        return count > 1 and (bool(self.debugs) or self.together is None)

    @property
    def hides_seeds(self) -> bool:
        """Whether a run claims amplification, so that its seeds are left out."""
        return any(run.config.amplification for run in self.runs)


def read_page(paths: Sequence[Path]) -> Page:
    """Reads run folders and debug folders.

    Raises:
        UserError: as `report`.
    """
    places = [str(path.resolve()) for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{path}: given twice; name every folder once")
    debugs = [read_debug_folder(path) for path in paths if is_debug(path)]
    plain = [path for path in paths if not is_debug(path)]
    singles = [read_run(path) for path in plain]
    debugs, singles = _with_unique_names(debugs, singles)
    page = Page(debugs, singles, _together(plain))
    _check_same_data(page.runs)
    return page


def _with_unique_names(
    debugs: Sequence[DebugFacts], singles: Sequence[RunFacts]
) -> tuple[list[DebugFacts], list[RunFacts]]:
    """Returns the folders with names that tell them apart."""
    given: set[str] = set()

    def unique(name: str) -> str:
        choices = (name, *(f"{name} ({number})" for number in range(2, 10_000)))
        chosen = next(choice for choice in choices if choice not in given)
        given.add(chosen)
        return chosen

    named = []
    for debug in debugs:
        debug = replace(debug, name=unique(debug.name))
        prefix = f"{debug.name}/" if len(debugs) > 1 or singles else ""
        cohorts = {
            cohort: [replace(run, name=unique(prefix + run.name)) for run in runs]
            for cohort, runs in debug.cohorts.items()
        }
        named.append(replace(debug, cohorts=cohorts))
    return named, [replace(run, name=unique(run.name)) for run in singles]


def _together(paths: Sequence[Path]) -> Sequence[Statement] | None:
    """Returns what runs on the same clients released together, where that is known."""
    if len(paths) < 2:
        return None
    try:
        return epsilons.of_runs(paths, {})
    except UserError:  # other clients, units or deltas; the page says so
        return None


def _check_same_data(runs: Sequence[RunFacts]) -> None:
    for run in runs[1:]:
        for name in settings_with(IMAGES):
            one, other = (getattr(r.config, name) for r in (runs[0], run))
            if one != other:
                raise UserError(
                    f"{name} = {one} in {runs[0].name}, {other} in {run.name}: runs of "
                    "different data cannot be compared; make a report of each"
                )


# ------------------------------------------------------------------ the template


def render(page: Page) -> str:
    """Returns the page as HTML.

    Raises:
        UserError: matplotlib is missing.
    """
    return (
        environment()
        .get_template("report.html")
        .render(
            page=page,
            curves=curves(page.runs),
            communication=communication_table(page.runs),
            stages=stages_tables(page.runs),
            evaluations=evaluation_tables(page.runs),
            settings=settings_tables(page.runs),
            versions=versions_table(page.runs),
        )
    )


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Returns the templates of pages, with their filters."""
    made = Environment(
        loader=PackageLoader("experiments.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "data_uri": report_pictures.data_uri,
        "number": words.number,
        "epsilon": words.epsilon,
        "in_words": in_words,
    }
    made.globals |= {
        "alternative": report_pictures.alternative,
        "command": train_command,
        "unit": unit_in_words,
        "draw": draw,
        "words": words,
    }
    return made
