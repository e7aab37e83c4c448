"""What a deployed run keeps between the starts of its server."""

import secrets
from typing import Any

from fedgs.files import read_json, write_json
from fedgs.process import UNNAMED
from fedgs.runs.run_folder import CHECKPOINT, RunFolder

FILE = "deployment.json"


def history_of(folder: RunFolder) -> list[tuple[str, int]]:
    """Returns which starts of the server made a deployed run's rounds; the last is new.

    It is kept with the checkpoint, so that the two are of one time in every backup.

    Raises:
        UserError: a malformed checkpoint.
    """
    committed, known = folder.last_round, []
    if committed:
        known = read_json(folder.path / CHECKPOINT).get("history", [(UNNAMED, 0)])
    # A start that committed no round of its own leaves nothing in the history.
    past = [(str(start), int(first)) for start, first in known if first < committed]
    return [*past, (secrets.token_hex(8), committed)]


def kept_of(folder: RunFolder) -> dict[str, Any]:
    """Returns what is kept of a deployed run across starts: `deployment.json`.

    `run_id`, under which clients keep their state, is drawn once, so that a run that is
    submitted again finds it. `answered` and `unheard` are `RollCall`'s.

    Raises:
        UserError: the file is broken.
    """
    path = folder.path / FILE
    if not path.exists():
        nodes = list(folder.config.node_names)
        write_json(path, {"run_id": secrets.token_hex(8), "nodes": nodes})
    return read_json(path)


def keep(folder: RunFolder, **values: object) -> None:
    """Keeps more of a deployed run, or other values; see `kept_of`."""
    write_json(folder.path / FILE, kept_of(folder) | values)
