"""Structured events of a deployed server or client: JSON lines, never data.

    {"time": "2026-11-21T15:04:05.123Z", "event": "answer", "node": "hospital-a",
     "round": 3, "outcome": "ok", "seconds": 1.2, "bytes_received": 12345}

A line says who, which round, what came of it, how long it took and how many bytes
moved. Nothing is written until `open_event_log` was called or the environment names a
file, so that simulations and tests stay silent.
"""

import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

from fedgs.config import UserError

EVENT_LOG_VARIABLE = "FEDGS_EVENT_LOG"
Value = str | int | float | bool | None

_lock = threading.Lock()
_paths: list[Path] = []  # of this process


def open_event_log(path: str | Path) -> None:
    """Has this process append its events to a file, beside the environment's one.

    Privacy: public.
    """
    path = Path(path).absolute()
    with _lock:
        if path not in _paths:
            _paths.append(path)


def close_event_log(path: str | Path) -> None:
    """Ends what `open_event_log` began."""
    with _lock:
        _paths.remove(Path(path).absolute())


def log_event(event: str, **values: Value) -> None:
    """Appends one line to each open event log; a full disk loses it, not the run.

    Privacy: public: the caller passes names, rounds, outcomes, durations and counts of
        bytes, never anything computed from data before sanitization.

    Args:
        event: what happened, for example "answer" or "round".
        **values: node, round, outcome, seconds, bytes_sent, bytes_received, ...

    Raises:
        UserError: a value that is no plain scalar.
    """
    for name, value in values.items():
        if not isinstance(value, str | int | float | bool | None):
            kind = type(value).__name__
            raise UserError(f"{name}: an event holds plain scalars, not {kind}")
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = json.dumps({"time": now, "event": event, **values}) + "\n"
    with _lock:
        for path in {*_paths, *_from_environment()}:
            _append(path, line)


def read_events(path: Path) -> list[dict[str, Value]]:
    """Returns the events of a file, oldest first; skips what is no whole line.

    Privacy: public.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # torn by a crash
            continue
        if isinstance(event, dict) and "event" in event:
            found.append(event)
    return found


def _from_environment() -> list[Path]:
    path = os.environ.get(EVENT_LOG_VARIABLE)
    return [Path(path)] if path else []


def _append(path: Path, line: str) -> None:
    """Appends in one write, so that lines of several processes do not mix."""
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        return
    try:
        os.write(descriptor, line.encode())
    except OSError:
        pass
    finally:
        os.close(descriptor)
