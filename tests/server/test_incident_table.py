"""docs/operations.md: the incident table shows the stored rows."""

from incident_cases import INCIDENTS
from incidents import BEGIN, END, PAGE, read_rows, table

TEXT = PAGE.read_text()


def test_incidents_have_names_of_their_own():
    names = [incident.name for incident in INCIDENTS]
    assert len(names) == len(set(names)) >= 30


def test_table_shows_the_stored_rows():
    rows = read_rows()
    known = [incident.name for incident in INCIDENTS]
    assert list(rows) == [name for name in known if name in rows]
    shown = TEXT.partition(BEGIN)[2].partition(END)[0]
    assert shown == table(list(rows.values()))
