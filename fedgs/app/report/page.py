"""What `fedgs report` does: one self-contained page about runs.

The page needs no network and no script. It shows public files only: configuration,
ledger, metrics, sample grids, evaluations, diagnoses. The same folders give the same
bytes.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console

from fedgs.app.report import words
from fedgs.app.report.run import RunFacts, read_run
from fedgs.app.report.sections import Page
from fedgs.config.method_settings import settings_with
from fedgs.errors import UserError, wrap_error
from fedgs.files import write_atomically
from fedgs.privacy.accountant import Statement
from fedgs.runs import epsilons
from fedgs.runs.run_folder import check_free

FAILED = "it cannot be written"
console = Console()


def report(paths: Sequence[Path], output: Path) -> None:
    """Writes the page.

    Privacy: post-processing of DP output, or public; evaluations are neither, and the
    page says so.

    Raises:
        UserError: an output that exists or cannot be written, a path that is no run
            folder, a run without samples, runs of different data, a broken diagnosis, a
            package that is missing. Nothing is then written.
    """
    _check(output)
    # A name of a folder may not be UTF-8; then it is shown escaped.
    content = render(read_page(paths)).encode(errors="backslashreplace")
    with wrap_error(OSError, f"output = {output}: {FAILED}", "choose another --output"):
        write_atomically(output, content)
    size = words.num_bytes(len(content))
    console.print(f"report  {output}  ({size})", highlight=False, soft_wrap=True)


def _check(output: Path) -> None:
    """Checks that the page can be written, before the work."""
    if output.suffix not in (".html", ".htm"):
        raise UserError(f"output = {output}: give a name that ends in .html")
    check_free(str(output))
    # Whether a folder can be written only a file in it shows: permissions may say yes
    # where the file system is read-only.
    remedy = "choose a folder that exists and can be written"
    with wrap_error(OSError, f"output = {output}: {FAILED}", remedy):
        tempfile.TemporaryFile(dir=output.absolute().parent).close()


# ------------------------------------------------------------------ reading


def read_page(paths: Sequence[Path]) -> Page:
    """Reads run folders.

    Raises:
        UserError: as `report`.
    """
    # Resolved, because a link to a folder is the same folder. Its releases would be
    # added up twice.
    places = [str(path.resolve()) for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{path}: it is given twice; name each folder once")
    runs = _with_unique_names([read_run(path) for path in paths])
    _check_same_data(runs)
    return Page(runs, _together(paths))


def _with_unique_names(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Returns the runs with names that tell them apart."""
    counts = Counter[str]()
    found: list[RunFacts] = []
    for facts in runs:
        name = facts.name
        counts[name] += 1
        if counts[name] > 1:
            name = f"{name} ({counts[name]})"
        found.append(replace(facts, name=name))
    return found


def _together(paths: Sequence[Path]) -> Sequence[Statement] | None:
    """Returns what runs on the same clients released together, where that is known."""
    if len(paths) < 2:
        return None
    try:
        return epsilons.of_runs(paths, {})
    except UserError:
        # Runs on other clients, of other units or deltas are no error here: the page
        # says that their epsilons are not added up.
        return None


def _check_same_data(runs: Sequence[RunFacts]) -> None:
    # Side by side, pictures and scores of different data would look like a comparison.
    for run in runs[1:]:
        for name in settings_with("images"):
            one = getattr(runs[0].config, name)
            other = getattr(run.config, name)
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
    return environment().get_template("page.html").render(page=page)


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Returns the templates of pages."""
    return Environment(
        loader=PackageLoader("fedgs.app.report"),
        # Names and texts come from folders that somebody else may have made.
        autoescape=True,
        # A misspelt name in a template must fail and not leave a condition out.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
