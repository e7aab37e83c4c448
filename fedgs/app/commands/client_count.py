"""What `fedgs privacy of` prints of a client's state directory: its own count."""

import json
from pathlib import Path
from typing import Any

from fedgs.app.commands.terminal import say
from fedgs.app.tables import Table
from fedgs.config.run_config import RunConfig
from fedgs.privacy.client_ledger import INDEX, Spent, read_spent
from fedgs.privacy.client_limits import Limits
from fedgs.privacy.plan import SENSITIVITIES
from fedgs.privacy.rounding import upper


def counted_in(path: Path) -> Path | None:
    """Returns the folder of a client's count, None where there is none.

    Args:
        path: what the user gave: a client's state directory, or the folder itself.
    """
    for folder in (path / "releases", path):
        if (folder / INDEX).is_file():
            return folder
    return None


def show(folder: Path, delta: float | None, as_json: bool) -> None:
    """Prints what the server can have learned of any client that a folder counts.

    Privacy: public; participation and noise, no data and no name.

    Args:
        folder: of the count.
        delta: of the epsilons; None is the default one.
        as_json: print JSON instead of a table.

    Raises:
        UserError: the count is broken, or delta is out of range.
    """
    if delta is None:
        delta = RunConfig.delta
    spent = read_spent(folder)
    found = _epsilons(spent, delta)
    if as_json:
        print(json.dumps(_values(folder, spent, delta, found), indent=2))
        return
    rows = [(relation, _cell(epsilon)) for relation, epsilon in found.items()]
    head = ("relation", f"epsilon at delta {upper(delta, 6)}")
    Table(f"what {folder} counts", head, rows).show()
    for line in _lines(spent):
        say(line)


def _epsilons(spent: Spent, delta: float) -> dict[str, float | None]:
    """Returns the epsilon of each relation, None where none is counted."""
    found: dict[str, float | None] = {}
    for relation in SENSITIVITIES:
        limits = Limits(delta=delta, relation=relation)
        found[relation] = limits.epsilon_of(spent.largest)
    if spent.is_sharded:
        found["zero-out"] = None
    return found


def _cell(epsilon: float | None) -> str:
    if epsilon is None:
        return "not counted"
    return upper(epsilon)


def _values(
    folder: Path,
    spent: Spent,
    delta: float,
    found: dict[str, float | None],
) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "adversary": "server",
        "num_clients": spent.num_clients,
        "delta": delta,
        "epsilons": found,
        "releases": spent.releases,
    }


def _lines(spent: Spent) -> list[str]:
    """Returns what the numbers mean, in sentences."""
    counted = "one data set as a whole"
    if spent.num_clients == 1:
        counted = "1 client"
    elif spent.num_clients:
        counted = f"{spent.num_clients} clients"
    number = sum(spent.releases.values())
    runs: list[str] = []
    for run, releases in spent.releases.items():
        runs.append(f"{releases} in {run or 'runs without a name'}")
    lines = [
        f"This is the count of {counted}, with {number} releases: {', '.join(runs)}.",
        "The epsilons are of the client that has spent most, against the server. They "
        "include answers that were counted and may never have arrived.",
    ]
    if spent.is_sharded:
        lines.append(
            "A run cut the data into shards, so no owner's part is counted: zero-out "
            "has no number."
        )
    return lines
