"""Reads the event log of a deployed server or client (`fedgs.event_log`)."""

import json
from pathlib import Path


def read_events(path: Path) -> list[dict]:
    """Returns the events of a file, oldest first; every line must be whole."""
    return [json.loads(line) for line in path.read_text().splitlines()]
