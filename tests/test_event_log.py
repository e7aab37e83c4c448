"""The event log of a deployed server or client: JSON lines, never data."""

from io import FileIO
from pathlib import Path

import pytest

from fedgs import event_log
from refusals import assert_refused
from runs import json_lines


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    """The file that this process's events go to, which is not made yet."""
    monkeypatch.setenv(event_log.EVENT_LOG_VARIABLE, str(tmp_path / "events.jsonl"))
    return tmp_path / "events.jsonl"


def test_events_are_json_lines_for_their_owner(log, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv(event_log.EVENT_LOG_VARIABLE)
        event_log.log_event("answer", node="a", round=1)  # nowhere
    given = {"node": "a", "round": 2, "outcome": "ok", "seconds": 0.5}
    event_log.log_event("answer", **given)
    (event,) = json_lines(log)
    assert event.pop("time").endswith("Z")
    assert event == {"event": "answer"} | given
    assert log.stat().st_mode & 0o777 == 0o600


def test_event_takes_scalars_only_so_that_no_tensor_slips_in():
    words = "pixels: an event holds plain scalars"
    assert_refused(words, event_log.log_event, "answer", pixels=[0.0])


def test_event_log_that_cannot_be_written_is_said_once_and_stops_no_run(log, capsys):
    log.mkdir()
    event_log.log_event("round", round=1)
    event_log.log_event("round", round=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{log}: Is a directory; events are lost"


def test_event_that_fits_in_part_leaves_no_half_behind(log, monkeypatch):
    class NearlyFull(FileIO):
        def write(self, line):
            return super().write(line[:9])

    event_log.log_event("round", round=1)
    with monkeypatch.context() as patch:
        patch.setattr(event_log, "FileIO", NearlyFull)
        event_log.log_event("round", round=2)
    event_log.log_event("round", round=3)
    assert [event["round"] for event in json_lines(log)] == [1, 3]
