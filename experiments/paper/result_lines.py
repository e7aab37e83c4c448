"""Results of an experiment as JSON lines, so that it goes on where it was stopped."""

import contextlib
import json
from pathlib import Path
from typing import Any

from fedgs.errors import UserError
from fedgs.files import write_atomically

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Returns the objects of a file of JSON lines; nothing where there is no file.

    A last line that was torn by a crash is left out.

    Raises:
        UserError: the file cannot be read, or another line is no JSON object.
    """
    try:
        texts = path.read_text().split("\n")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); move it away") from error
    found: list[Line] = []
    for number, text in enumerate(texts[:-1], start=1):  # behind the last "\n": torn
        line = None
        with contextlib.suppress(ValueError):
            line = json.loads(text)
        if not isinstance(line, dict):
            raise UserError(f"{path}: line {number} is no JSON object; move it away")
        found.append(line)
    return found


class ResultLines:
    """A file of results; each is found again by its key.

    Attributes:
        path: the file; made with the first result.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there.

        Raises:
            UserError: the file is damaged.
        """
        self.path = path
        self.found = {line.get("key", ""): line for line in read_lines(path)}

    def get(self, key: str) -> Line | None:
        """Returns the last result of that key."""
        return self.found.get(key)

    def add(self, key: str, result: Line) -> Line:
        """Keeps a result under a key, durably, and returns it."""
        self.found[key] = {"key": key, **result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{json.dumps(line)}\n" for line in self.found.values())
        write_atomically(self.path, text.encode())
        return self.found[key]
