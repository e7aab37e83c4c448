"""Which start of the server a node's states and releases belong to.

    STATE_DIR/RUN_ID/
      history.json                   the run's history, as it was when the node joined
      released.jsonl                 one line per release, written ahead of it
      node-*/round-*.safetensors     states of that history
      node-*/aside-START/round-*     states of rounds that other starts made

A server that is started draws a name for this start and tells which starts made the
rounds before: the run's history. A server that was killed, or restored from a backup,
goes on from an older round; the states after it belong to no round of the new history.
They are set aside, not deleted: when a server state is put back whose history has
them, they are. A state that was set aside is deleted once a state at least as new is
committed (`fedgs.node`).
"""

import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgs.client_count import Mark, ReleaseCount
from fedgs.config import UserError
from fedgs.durable import append_whole, make_folder, sync
from fedgs.ledger import Ledger
from fedgs.process import UNNAMED
from fedgs.run_folder import (
    read_json,
    state_path,
    state_rounds,
    tensor_names,
    write_json,
)

START = re.compile(r"[0-9a-f]{16}")
MOST_STARTS = 10_000  # in a history: one per start that led to a commit
MOST_ASIDE = 16  # starts whose states are set aside: disk that a server could fill

History = Sequence[tuple[str, int]]  # (start, the round that it went on from)


def check_history(content: object) -> History:
    """Returns a history from a message or a file.

    Privacy: public.

    Raises:
        UserError: malformed.
    """
    try:
        history = [(str(start), round) for start, round in content]  # type: ignore
    except (TypeError, ValueError):
        history = []
    rounds = [round for _, round in history]
    valid = all(START.fullmatch(start) for start, _ in history) and all(
        type(round) is int and round >= 0 for round in rounds
    )
    if not (valid and 0 < len(rounds) <= MOST_STARTS and _increase(rounds)):
        raise UserError("history of the run that cannot be read: refused")
    return history


def _increase(rounds: Sequence[int]) -> bool:
    return all(one < next for one, next in itertools.pairwise(rounds))


def start_of(history: History, round: int) -> str:
    """Returns which start made a round; round 0, the warm start, is of no start.

    >>> start_of([("a", 0), ("b", 4)], 4), start_of([("a", 0), ("b", 4)], 5)
    ('a', 'b')
    """
    return next((start for start, first in reversed(history) if first < round), "")


def read_history(run: Path) -> History:
    """Returns the history that a node joined last; UNNAMED's without one."""
    path = run / "history.json"
    if not path.exists():
        return [(UNNAMED, 0)]
    return check_history(read_json(path).get("history"))


def enter(run: Path, states: Path, history: History) -> None:
    """Has the states of a history in their place, and all others set aside.

    A crash at any moment loses nothing: the next joining does the rest. What stays in
    its place belongs to both histories, so the new one is written in between.

    Args:
        run: the run's folder, with the history joined last.
        states: the node's.
        history: of the server that is joined.

    Raises:
        UserError: states of too many starts are set aside.
    """
    if len(list(states.glob("aside-*"))) >= MOST_ASIDE:
        raise UserError(
            f"{states}: states of {MOST_ASIDE} starts of the server are set aside; "
            "delete the aside-* folders of server states that are gone for good"
        )
    known = read_history(run)
    for round in state_rounds(states):
        if (start := start_of(known, round)) != start_of(history, round):
            _move(states, states / f"aside-{start}", round)
    write_json(run / "history.json", {"history": history})
    for aside in states.glob("aside-*"):
        for round in state_rounds(aside):
            if aside.name == f"aside-{start_of(history, round)}":
                _move(aside, states, round)
        with contextlib.suppress(OSError):  # others stay
            aside.rmdir()


def _move(source: Path, target: Path, round: int) -> None:
    make_folder(target, 0o700)
    state_path(source, round).replace(state_path(target, round))
    sync(target)
    sync(source)


def newest_state(states: Path) -> int:
    """Returns the round of the newest state of any history, -1 without one."""
    folders = [states, *states.glob("aside-*")]
    return max((r for folder in folders for r in state_rounds(folder)), default=-1)


# ------------------------------------------------------------------ releases


@dataclass(frozen=True)
class Released:
    """One release of a run, and where the clients' own count was with it.

    Attributes:
        round: from 1.
        start: of the server, which asks for a round once: an answer that is computed
            again, because its first bytes were lost before they left, is the same.
        mark: of the count, which cannot be shorter from then on.
    """

    round: int
    start: str
    mark: Mark


class Record:
    """What a node has released in one run: `released.jsonl`.

    Privacy: public; participation, no data.

    Attributes:
        path: the file; one process writes it (`Site.open`).
        releases: oldest first.
    """

    def __init__(self, run: Path) -> None:
        """Reads the file, if there is one; a last line that was torn is none.

        Raises:
            UserError: the file is broken.
        """
        self.path = run / "released.jsonl"
        content = self.path.read_bytes() if self.path.exists() else b""
        self._size = content.rfind(b"\n") + 1
        try:
            lines = content[: self._size].splitlines()
            self.releases = [_parse(json.loads(line)) for line in lines]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.path}: cannot be read; restore the state-dir from a copy"
            ) from error

    def note(self, release: Released) -> None:
        """Writes a release down; once this returns it is on the disk, and may leave."""
        content = {"round": release.round, "start": release.start}
        line = json.dumps(content | {"count": release.mark}).encode() + b"\n"
        with open(self.path, "ab", buffering=0) as file:
            file.truncate(self._size)
            append_whole(file, line)
            os.fsync(file.fileno())
        if not self._size:  # the file may be new, also where its first line failed
            sync(self.path.parent)
        self._size += len(line)
        self.releases.append(release)

    def times(self, before: str) -> Counter[int]:
        """Returns how often each round was released before a start of the server."""
        others = {(r.round, r.start) for r in self.releases if r.start != before}
        return Counter(round for round, _ in others)


def unexplained(state_dir: Path, record: Record, most: int) -> Counter[int]:
    """Returns releases that only the count has: this run's folder may be restored.

    They are later than the last of this run's record, and of no other run's. A count
    outside of the state directory is not looked at: others may use it.

    Privacy: public.

    Args:
        state_dir: of the client, with its count and all its runs.
        record: of the run; an empty one (an older version's) tells nothing.
        most: the run's last round.

    Returns:
        round -> times.
    """
    if not record.releases:
        return Counter()
    name, length, _ = record.releases[-1].mark
    path = state_dir / "releases" / name
    others = [Record(found.parent) for found in state_dir.glob("*/released.jsonl")]
    marks = {release.mark for other in others for release in other.releases}
    known = {mark.length for mark in marks if mark.ledger == name}
    events = Ledger.read(path).events if path.exists() else ()
    return Counter(
        event.round
        for number, event in enumerate(events, start=1)
        if number > length and number not in known and event.round <= most
    )


def _parse(line: dict[str, Any]) -> Released:
    return Released(int(line["round"]), str(line["start"]), Mark(*line["count"]))


def check_count(state_dir: Path, states: Path, count: ReleaseCount) -> None:
    """Refuses a count that was rolled back, emptied or exchanged.

    Every run of the state directory says what the count must hold. States of a run
    that kept no record say it for their round.

    Privacy: public.

    Args:
        state_dir: of the client, with all its runs.
        states: of the node in the run that goes on.
        count: the clients' own.

    Raises:
        UserError: names the file, and says what it must hold.
    """
    marks: dict[str, Mark] = {}
    for path in sorted(state_dir.glob("*/released.jsonl")):
        for release in Record(path.parent).releases:
            name, length = release.mark.ledger, release.mark.length
            if name not in marks or length > marks[name].length:
                marks[name] = release.mark
    answered = {
        int(path.stem[6:])
        for path in states.rglob("round-*.safetensors")
        if "answer" in tensor_names(path)
    }
    count.check_history(list(marks.values()), answered)
