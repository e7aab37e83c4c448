"""What a deployed run keeps between the starts of its server."""

import secrets
from typing import Any

from fedgs.errors import UserError
from fedgs.files import RESTORE, read_json, write_json
from fedgs.runs.run_folder import RunFolder

_FILE = "deployment.json"


def kept_of(folder: RunFolder) -> dict[str, Any]:
    """Returns what is kept of a deployed run across starts: `deployment.json`.

    `run_id`, under which clients keep their state, is drawn once, so that a run that is
    resumed finds it. `answered` is `RollCall`'s.

    Raises:
        UserError: the file is broken, or missing after the first release.
    """
    path = folder.path / _FILE
    if not path.exists():
        # With a new run_id its clients would take it for another run.
        if folder.read_ledger().length:
            raise UserError(
                f"{path}: it is missing, although the run has released something; "
                f"{RESTORE}"
            )
        nodes = list(folder.config.node_names)
        write_json(path, {"run_id": secrets.token_hex(8), "nodes": nodes})
    return read_json(path)


def keep(folder: RunFolder, **values: object) -> None:
    """Keeps more of a deployed run, or other values; see `kept_of`."""
    write_json(folder.path / _FILE, kept_of(folder) | values)
