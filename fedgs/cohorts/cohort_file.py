"""Cohorts: files of client names, the clients of a run, and what naming them cost.

A cohort file has one client name a line. Lines that begin with `#` are comments; one of
them may say how the clients were selected (`fedgs select-clients` writes it):

    # selection: not private
    # selection: private {"noise_per_clip": ..., ...}

Without such a line the cohort is the user's own, and costs nothing as long as nobody
looked at private data to make it. This module imports neither torch nor the data.
"""

import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedgs.config.plugins import COHORT_CLASSIFIER
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, first_n, wrap_error
from fedgs.files import read_text, replacing, write_atomically
from fedgs.privacy.selection_cost import SelectionCost

_MARK = "# selection: "  # begins the comment that tells of the selection
# How the clients of a cohort were chosen.
BY_THE_USER = "given"
SELECTED_OPENLY = "not private"
SELECTED_PRIVATELY = "private"
# What a run's cohort adds to each of its epsilons.
EXCLUDED = (
    "excludes cohort selection: the cohort was selected by accuracy without privacy, "
    "so this holds given who is in it; that somebody is in it is not protected"
)
INCLUDED = (
    "includes cohort selection: it was private, and `fedgs privacy` adds its cost to "
    "that of every run on the cohort"
)
TRAINED = (
    "excludes the questions that select cohorts by this classifier; cohorts.json, "
    "beside the run folder, states the selection as a whole"
)
OWN_COHORT = "the cohort is the user's own: it was made without looking at private data"


@dataclass(frozen=True)
class Cohort:
    """The content of a cohort file.

    Privacy: public, if the selection was paid for; see `selection`.

    Attributes:
        names: client names, each once, at least one.
        selection: `BY_THE_USER`, `SELECTED_OPENLY` or `SELECTED_PRIVATELY`.
        cost: the cost of a private selection, else None.
        selection_id: tells one private selection from another: two cohorts of the same
            one cost it once. "" is like no other.
    """

    names: tuple[str, ...]
    selection: str = BY_THE_USER
    cost: SelectionCost | None = None
    selection_id: str = ""


def write_cohort(path: Path, cohort: Cohort, title: str) -> None:
    """Writes a cohort file, atomically.

    Privacy: publishes who is in the cohort.

    Args:
        path: the file.
        cohort: with names that `check_names` accepts.
        title: one line for the reader.
    """
    lines = [f"# {title}"]
    if cohort.cost is not None:
        values = dataclasses.asdict(cohort.cost) | {"id": cohort.selection_id}
        lines.append(f"{_MARK}{SELECTED_PRIVATELY} {json.dumps(values)}")
    elif cohort.selection == SELECTED_OPENLY:
        lines.append(_MARK + SELECTED_OPENLY)
    lines.extend(cohort.names)
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())


def check_names(names: Sequence[str]) -> None:
    """Checks that a file can tell the names apart from each other and from comments.

    Raises:
        UserError: a name that begins with #, has a line break, or outer spaces.
    """
    for name in names:
        is_one_line = len(name.splitlines()) == 1
        if name.startswith("#") or name != name.strip() or not is_one_line:
            raise UserError(
                f"client {name!r}: a cohort file cannot hold this name; rename the "
                "client in the data"
            )


def read_cohort(path: Path, setting: str = "cohort") -> Cohort:
    """Reads a cohort file.

    Args:
        path: the file.
        setting: that names it, in errors.

    Raises:
        UserError: unreadable, empty, a name twice, or a selection that is not known.
    """
    where = f"{setting} = {path}"
    remedy = f"give --{setting} a text file with one client name a line"
    with wrap_error(Exception, f"{where}: it cannot be read", remedy):
        text = read_text(path)
    cohort = Cohort(())
    names: list[str] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if line.startswith(_MARK):
            if cohort.selection != BY_THE_USER:
                raise UserError(f"{where}: line {number}: a second selection")
            cohort = _selection(f"{where}: line {number}", line.removeprefix(_MARK))
        elif line and not line.startswith("#"):
            names.append(line)
    if not names:
        raise UserError(f"{where}: it names no client; give one name a line")
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UserError(
            f"{where}: {first_n(map(repr, twice))} twice; name every client once"
        )
    return dataclasses.replace(cohort, names=tuple(names))


def _selection(where: str, words: str) -> Cohort:
    """Returns what a selection line says, without names."""
    if words == SELECTED_OPENLY:
        return Cohort((), SELECTED_OPENLY)
    unknown = f"{where}: unknown selection"
    remedy = "select the cohort again with `fedgs select-clients`"
    with wrap_error((Exception, UserError), unknown, remedy):
        # Words of another kind are no JSON.
        values = json.loads(words.removeprefix(f"{SELECTED_PRIVATELY} "))
        cost = SelectionCost.from_json(values)
    return Cohort(
        names=(),
        selection=SELECTED_PRIVATELY,
        cost=cost,
        selection_id=str(values.get("id", "")),
    )


# ------------------------------------------------------------------ a node's own


def write_memberships(path: Path, cohorts: Mapping[str, str]) -> None:
    """Writes which cohort each client of a node is in, for this user alone.

    A CSV file with the header owner,cohort, written atomically, mode 0600.
    `read_client_cohorts` reads any name as it is.

    Privacy: private; the file stays on the client's machine.

    Args:
        path: the file.
        cohorts: by the clients' names.
    """
    text = io.StringIO()
    # A name with a character that ends a line of this file is written in quotes.
    # These are CR and LF, which are both in csv's own end of a line.
    table = csv.writer(text)
    table.writerow(("owner", "cohort"))
    table.writerows(cohorts.items())
    with replacing(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.getvalue().encode())


# ------------------------------------------------------------------ a run's cohort


def selection_condition(config: RunConfig) -> str | None:
    """Returns what a run's cohort, or selecting one, adds to each of its epsilons.

    Returns:
        None for a run without `cohort`.

    Raises:
        UserError: an unreadable cohort file.
    """
    if config.cohort is not None:
        conditions = {
            BY_THE_USER: OWN_COHORT,
            SELECTED_OPENLY: EXCLUDED,
            SELECTED_PRIVATELY: INCLUDED,
        }
        return conditions[read_cohort(Path(config.cohort)).selection]
    if config.method == COHORT_CLASSIFIER:
        return TRAINED
    return None


def selection_costs(configs: Iterable[RunConfig]) -> tuple[SelectionCost, ...]:
    """Returns what to compose with the releases of runs: each private selection once.

    A selection that is not private has no cost that could be added:
    `selection_condition` then says that the epsilon excludes it.

    Raises:
        UserError: an unreadable cohort file.
    """
    paths = [config.cohort for config in configs if config.cohort is not None]
    found = [read_cohort(Path(path)) for path in paths]
    costs: dict[object, SelectionCost] = {}
    for number, cohort in enumerate(found):
        if cohort.cost is not None:
            # A cohort without an id is of a selection of its own, as far as is known.
            which = cohort.selection_id or number
            costs[which, cohort.cost] = cohort.cost
    return tuple(costs.values())
