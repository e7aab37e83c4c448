"""Standard output and error that are closed, full, or a pipe that nobody reads.

A work of hours does not end because nobody takes what it prints: that is dropped, and
a command whose output was lost says so at its end.
"""

import contextlib
import io
import os
import sys
from typing import Any

BROKEN_PIPE = 141  # exit code of a shell after SIGPIPE: the reader wanted no more


class Stream(io.FileIO):
    """A standard stream, by its number, that fails in silence.

    Attributes:
        error: why something could not be written first, if anything.
    """

    error: OSError | None = None

    def write(self, content: Any, /) -> int | None:
        """Writes what it can."""
        try:
            return super().write(content)
        except OSError as error:
            self.error = self.error or error
            return len(content)


def protect() -> None:
    """Has this process print to `Stream`s; one that was closed leads nowhere."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # else the next file that is opened would get what is printed
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        is_by_line = old is not None and (old.line_buffering or old.write_through)
        stream = io.TextIOWrapper(
            io.BufferedWriter(Stream(number, "w", closefd=False)),
            encoding=old.encoding if old else "utf-8",
            errors="backslashreplace",  # names that the terminal has no letters for
            line_buffering=is_by_line,
        )
        setattr(sys, name, stream)


def lost() -> OSError | None:
    """Returns why standard output is not complete; None where it is."""
    stream: Any = sys.stdout
    with contextlib.suppress(AttributeError):  # it is another stream, as in a test
        stream.flush()
        return stream.buffer.raw.error
    return None
