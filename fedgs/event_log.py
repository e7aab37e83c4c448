"""Structured events of a deployed server or client: JSON lines, never data.

    {"time": "2026-11-21T15:04:05.123Z", "event": "answer", "node": "hospital-a",
     "round": 3, "outcome": "ok", "seconds": 1.2}

A line says who, which round, what came of it and how long it took; of a finished round
also its public metrics. Nothing is written unless the environment variable names a
file, so that simulations and tests stay silent.
"""

import json
import os
import sys
import threading
from datetime import UTC, datetime
from io import FileIO

from fedgs.errors import UserError
from fedgs.files import append_whole

EVENT_LOG_VARIABLE = "FEDGS_EVENT_LOG"
Value = str | int | float | bool | None

_lock = threading.Lock()
_reported: set[str] = set()  # paths whose trouble has been said


def log_event(event: str, **values: Value) -> None:
    """Appends one line to the event log; a full disk loses it, not the run.

    Privacy: public: the caller passes names, rounds, outcomes, durations and public
        metrics, never anything computed from data before sanitization.

    Args:
        event: what happened, for example "answer" or "round".
        **values: node, round, outcome, seconds, ...

    Raises:
        UserError: a value that is no plain scalar.
    """
    for name, value in values.items():
        if not isinstance(value, str | int | float | bool | None):
            kind = type(value).__name__
            raise UserError(f"{name}: an event holds plain scalars, not {kind}")
    path = os.environ.get(EVENT_LOG_VARIABLE)
    if not path:
        return
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    time = now.replace("+00:00", "Z")
    line = json.dumps({"time": time, "event": event, **values})
    with _lock:
        _append(path, line + "\n")


def _append(path: str, line: str) -> None:
    """Appends a line, or says once on stderr that it cannot."""
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with FileIO(os.open(path, flags, 0o600), "a") as file:
            append_whole(file, line.encode())
    except OSError as error:
        # Once a path: a full disk would otherwise fill the terminal too.
        if path not in _reported:
            _reported.add(path)
            print(f"{path}: {error.strerror}; events are lost", file=sys.stderr)
