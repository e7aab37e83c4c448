"""Which start of the server a node's states belong to.

    STATE_DIR/RUN_ID/
      history.json                   the run's history, as it was when the node joined
      node-*/round-*.safetensors     states of that history
      node-*/aside-START/round-*     states of rounds that other starts made

A server that is started draws a name for this start and tells which starts made the
rounds before: the run's history. A server that was killed, or restored from a backup,
goes on from an older round; the states after it belong to no round of the new history.
They are set aside, not deleted: when a server state is put back whose history has
them, they are. A state that was set aside is deleted once a state at least as new is
committed (`fedgs.federation.node`).
"""

import contextlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from fedgs.errors import UserError
from fedgs.federation.node import mark_of
from fedgs.files import make_folder, read_json, read_metadata, sync, write_json
from fedgs.privacy.client_count import ReleaseCount
from fedgs.process import UNNAMED
from fedgs.runs.run_folder import state_path, state_rounds

START = re.compile(r"[0-9a-f]{16}")
MOST_STARTS = 10_000  # in a history: one per start that led to a commit
MOST_ASIDE = 16  # starts whose states are set aside: disk that a server could fill

History = Sequence[tuple[str, int]]  # (start, the round that it went on from)


def check_history(content: object) -> History:
    """Returns a history from a message or a file.

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
    # The new name first: a power cut may leave both, never none.
    sync(target)
    sync(source)


def newest_state(states: Path) -> int:
    """Returns the round of the newest state of any history, -1 without one."""
    folders = [states, *states.glob("aside-*")]
    return max((r for folder in folders for r in state_rounds(folder)), default=-1)


def check_count(state_dir: Path, count: ReleaseCount) -> None:
    """Refuses a count that was rolled back, emptied or exchanged.

    Every state of every run of the state directory says what the count must hold.
    States of earlier versions say nothing.

    Args:
        state_dir: of the client, with all its runs.
        count: the clients' own.

    Raises:
        UserError: names the file, and says what it must hold.
    """
    states = state_dir.glob("*/node-*/**/round-*.safetensors")
    marks = {mark_of(read_metadata(path)) for path in states}
    written = (mark for mark in marks if mark is not None)
    count.check_history(sorted(written, reverse=True))  # the longest says most
