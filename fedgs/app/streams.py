"""Standard output and error that are closed, full, or a pipe that nobody reads.

A work of hours does not end because nobody takes what it prints: that is dropped, and
a command whose output was lost says so at its end.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator

BROKEN_PIPE = 141  # exit code of a shell after SIGPIPE: the reader wanted no more


class Stream(io.TextIOWrapper):
    """A standard stream that fails in silence, and leads nowhere from then on.

    Attributes:
        error: what it failed for.
    """

    error: OSError | None = None

    def write(self, text: str, /) -> int:
        """Writes what it can."""
        with self._giving_up():
            super().write(text)
        return len(text)  # a caller that saw fewer would try to write the rest

    def flush(self) -> None:
        """Writes what it can of what waits."""
        with self._giving_up():
            super().flush()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            # What waits in the buffer is tried again at the next flush, and at the end
            # of the process: it has to go somewhere, else that fails once more.
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())


def protect() -> None:
    """Has this process print to a `Stream`; one that was closed leads nowhere."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The system gives a new file the lowest free number. Without this, the next
            # file that is opened would get what is printed.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)  # None if it was closed
        if old is None:
            is_by_line = False
            encoding = "utf-8"
        else:
            is_by_line = old.line_buffering or old.write_through
            encoding = old.encoding
        stream = Stream(
            open(number, "wb", closefd=False),  # noqa: SIM115
            encoding=encoding,
            errors="backslashreplace",  # names that the terminal has no letters for
            line_buffering=is_by_line,
        )
        setattr(sys, name, stream)


def lost() -> OSError | None:
    """Returns why standard output is not complete; None where it is."""
    if not isinstance(sys.stdout, Stream):  # of a test, or of a program that calls us
        return None
    sys.stdout.flush()
    return sys.stdout.error
