"""Cells of an experiment: computed once, kept as JSON lines, found again.

A cell has a name. Its line is appended to one file, whole or not at all, so that
several processes can fill the same file; of a cell's lines the last counts, but a
failure never replaces what was found.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fedgs.app.commands.run_outcome import Exit, exit_if_stopped
from fedgs.app.commands.terminal import say
from fedgs.errors import UserError, first_n, wrap_error
from fedgs.files import append_whole, read_json_lines, without_nan

Line = dict[str, Any]


class Store:
    """A file of lines, each found by the name of its cell.

    Attributes:
        path: the path of the file; made with the first line.
        lines: the last one of each cell, by its name.
    """

    def __init__(self, path: Path, check: Callable[[Line], None] | None = None) -> None:
        """Reads what is there.

        Args:
            path: the path of the file.
            check: refuses a line that its reader can do nothing with.

        Raises:
            UserError: the file cannot be read, or has a line that is none of a cell.
        """
        self.path = path
        self.lines: dict[str, Line] = {}
        remedy = "restore the file, or remove this line to compute its cell again"
        for number, line in enumerate(read_json_lines(path), start=1):
            with wrap_error(UserError, f"{path}: line {number} is damaged", remedy):
                # A file of another kind must not be appended to.
                if "cell" not in line:
                    raise UserError("cell is missing")
                if check is not None:
                    check(line)
            name = str(line["cell"])
            if "failed" not in line or not self.has_scores(name):
                self.lines[name] = line

    def has_scores(self, name: str) -> bool:
        """Returns whether a cell has a line, and not that of a failure."""
        return name in self.lines and "failed" not in self.lines[name]

    def add(self, name: str, content: Line) -> Line:
        """Keeps what was found of a cell, and returns its line.

        Raises:
            UserError: it cannot be written.
        """
        line: Line = without_nan({"cell": name, **content})
        problem = f"output = {self.path.parent}: it cannot be written"
        with wrap_error(OSError, problem, "free the disk"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                kept = self.path.read_bytes()
                if kept and not kept.endswith(b"\n"):  # torn by a power cut
                    end_of_whole_lines = kept.rfind(b"\n") + 1
                    os.truncate(file.fileno(), end_of_whole_lines)
                text = f"{json.dumps(line)}\n"
                append_whole(file, text.encode())
        self.lines[name] = line
        return line


def each(work: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Does the work of every cell; returns the cells that failed, by name, and why.

    Raises:
        Exit: stopped by the user; the same command goes on.
    """
    failed: dict[str, str] = {}
    for name, work_of_cell in work.items():
        try:
            with exit_if_stopped("continue with the same command"):
                work_of_cell()
        except Exit:
            raise
        except Exception as error:
            # One cell must not cost the others, whatever is wrong with it.
            say(f"{name}: {error!r}", is_error=True)
            failed[name] = str(error) or repr(error)
    return failed


def end(failed: Collection[str]) -> None:
    """Ends a command with the names of what failed.

    Raises:
        UserError: if anything did.
    """
    if failed:
        raise UserError(f"{first_n(failed)}: failed; call again for these alone")
