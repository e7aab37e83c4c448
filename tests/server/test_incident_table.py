"""docs/incidents.jsonl: what came of each incident when it was last made to happen."""

from incident_cases import INCIDENTS
from incidents import read_rows


def test_incidents_have_names_of_their_own():
    names = [incident.name for incident in INCIDENTS]
    assert len(names) == len(set(names)) >= 30


def test_every_incident_has_a_stored_row_and_all_are_good():
    rows = read_rows()
    assert list(rows) == [incident.name for incident in INCIDENTS]
    assert all(row.is_good for row in rows.values())
