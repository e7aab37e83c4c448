"""What comes of incidents of a deployment: `make incidents`.

Every incident happens to a deployment of three hosts (`incident_site`), to a run of its
own that is disturbed, recovers as documented and finishes. A row says whether the
generator has the bytes of the local engine, which nothing disturbed; whether the
server's ledger shows at least every release that the clients counted; how long it took
from the disturbance to the next finished round; and what was left over.

    make incidents                  all of them
    make incidents ONLY=NAME,NAME   these
    make incidents CONTINUE=1       those without a good row

Needs root (network namespaces, mounts), iproute2, sqlite3 and a C compiler.
"""

import argparse
import dataclasses
import json
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hosts import ROOT, require_namespaces
from incident_cases import INCIDENTS, Incident
from incident_site import Run, Site, reference

ROWS = ROOT / "docs" / "incidents.jsonl"
START_LIMIT = 300.0  # seconds for a new deployment
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LINGER = 20.0  # for what ends by itself after a run


@dataclass(frozen=True)
class Row:
    """What came of one incident.

    Attributes:
        name, what, remedy: as of `Incident`.
        same_bytes: of the generator, None without a run.
        ledger: whether the ledger shows at least what the clients released.
        seconds: from the disturbance to the next finished round.
        left: what was left over, should be nothing.
        problem: why the incident did not end as it should; empty if it did.
        wall: seconds that the row took.
    """

    name: str
    what: str
    remedy: str
    same_bytes: bool | None = None
    ledger: bool | None = None
    seconds: float | None = None
    left: Sequence[str] = ()
    problem: str = ""
    wall: float = 0.0

    @property
    def is_good(self) -> bool:
        fine = self.same_bytes is not False and self.ledger is not False
        return fine and not self.left and not self.problem

    def line(self) -> str:
        """The row in Markdown."""
        seconds = "–" if self.seconds is None else f"{self.seconds:.0f}"
        left = ", ".join(self.left) or "nothing"
        remedy = self.remedy if not self.problem else f"**{self.problem}**"
        cells = [self.what, remedy, _yes(self.same_bytes), _yes(self.ledger)]
        return "| " + " | ".join([*cells, seconds, left.replace("|", "/")]) + " |"


def _yes(value: bool | None) -> str:
    return "–" if value is None else ("yes" if value else "**no**")


class TookTooLong(Exception):
    """An incident's time is over."""


class Limit:
    """Raises `TookTooLong` in this thread when the time is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._over)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _over(self, number: int, frame: object) -> None:
        raise TookTooLong(f"not over after {self.seconds:g} s")


class Table:
    """Runs incidents; keeps one deployment for as long as nothing goes wrong."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder, self.patience = folder, patience
        with Limit(START_LIMIT * patience):
            self.reference = reference(folder / "undisturbed")
        self.site: Site | None = None
        self.sites = 0

    def row(self, incident: Incident) -> Row:
        """Has an incident happen; whatever goes wrong is in the row."""
        started = time.monotonic()
        row = Row(incident.name, incident.what, incident.remedy)
        try:
            with Limit(START_LIMIT * self.patience):
                site = self._ready()
            with Limit(incident.limit * self.patience):
                row = self._happen(incident, site, row)
        except Exception as error:
            print(traceback.format_exc(), file=sys.stderr)
            text = COLOUR.sub("", f"{type(error).__name__}: {error}")
            row = dataclasses.replace(row, problem=" ".join(text.split())[-300:])
        if not row.is_good:
            self._give_up(incident.name)
        return dataclasses.replace(row, wall=round(time.monotonic() - started, 1))

    def _ready(self) -> Site:
        """A deployment whose three processes run."""
        if self.site is None:
            self.sites += 1
            folder = self.folder / f"site-{self.sites}"
            folder.mkdir()
            self.site = Site(folder)
        self.site.revive()
        return self.site

    def _happen(self, incident: Incident, site: Site, row: Row) -> Row:
        run: Run | None = None
        values: dict[str, Any] = {}
        if incident.has_run:
            run = site.start_run(**incident.settings)
            incident.act(site, run)
            run.finish()
            values["same_bytes"] = run.is_same(self.reference)
            missing = run.uncounted()
            values["ledger"] = not missing
            values["seconds"] = run.seconds and round(run.seconds, 1)
            if missing:
                values["problem"] = f"the ledger lacks releases: {missing}"
        else:
            incident.act(site)
        deadline = time.monotonic() + LINGER * self.patience
        while (left := site.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return dataclasses.replace(row, left=tuple(left), **values)

    def _give_up(self, name: str) -> None:
        """Ends a deployment that may be broken; its logs are kept."""
        if self.site is not None:
            logs = self.folder / f"{name}.log"
            logs.write_text(self.site.machines.logs())
            print(f"logs: {logs}", file=sys.stderr)
        self.close()

    def close(self) -> list[str]:
        """Ends the deployment; returns what was left over."""
        site, self.site = self.site, None
        if site is None:
            return []
        found = site.close()
        shutil.rmtree(site.folder)
        return found


def read_rows(path: Path = ROWS) -> dict[str, Row]:
    """The stored rows, by name."""
    if not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {values["name"]: Row(**values) for values in found}


def write_rows(path: Path, rows: dict[str, Row]) -> None:
    """Writes rows, in the order of the incidents."""
    known = [rows[i.name] for i in INCIDENTS if i.name in rows]
    lines = [json.dumps(dataclasses.asdict(row), ensure_ascii=False) for row in known]
    path.write_text("".join(line + "\n" for line in lines))


def main() -> None:
    """Has the incidents happen; exit code 1 if one did not end as it should."""
    parser = argparse.ArgumentParser(description="Have incidents happen.")
    parser.add_argument("--only", default="", help="Names, separated by commas.")
    parser.add_argument("--proceed", action="store_true", help="Keep good rows.")
    parser.add_argument("--patience", type=float, default=1.0, help="Of time limits.")
    parser.add_argument("--rows", type=Path, default=ROWS, help="Where to keep them.")
    given = parser.parse_args()
    try:
        require_namespaces()
    except pytest.skip.Exception as error:
        sys.exit(f"incidents: {error}")
    names = [name for name in given.only.split(",") if name]
    known = {incident.name: incident for incident in INCIDENTS}
    if unknown := set(names) - known.keys():
        sys.exit(f"incidents: no {', '.join(sorted(unknown))}")
    rows = read_rows(given.rows) if names or given.proceed else {}
    if names:
        todo = [known[name] for name in names]
    else:
        todo = [i for i in INCIDENTS if i.name not in rows or not rows[i.name].is_good]
    folder = Path(tempfile.mkdtemp(prefix="fedgs-incidents-"))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    left, bad = [], 0
    incidents = Table(folder, given.patience)
    try:
        for incident in todo:
            row = incidents.row(incident)
            bad += not row.is_good
            print(f"{row.wall:5.0f} s  {incident.name}: {row.line()}", flush=True)
            write_rows(given.rows, rows := {**rows, row.name: row})
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # removing is not interrupted
            signal.signal(number, signal.SIG_IGN)
        left = incidents.close()
        if not bad:  # else it has the logs
            shutil.rmtree(folder)
    if left:
        print(f"left over at the end: {left}", file=sys.stderr)
    sys.exit(1 if bad or left else 0)


if __name__ == "__main__":
    main()
