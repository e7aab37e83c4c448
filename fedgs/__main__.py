"""`fedgs`, also as `python -m fedgs`: Ctrl-C ends it in one line from here on."""

import contextlib
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Runs the command line; the console script `fedgs`."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a shell's job in the back
        signal.signal(signal.SIGINT, _interrupted)
    from fedgs.app.streams import protect

    protect()
    if sys.argv[1:3] == ["deploy", "client"]:
        from fedgs.process import end_on_signals

        end_on_signals()  # it has nothing to finish while it starts
    # Here, for what is imported takes seconds.
    import logging

    from fedgs.app.cli import main as command_line

    log = logging.getLogger("fedgs")  # says what takes long; never data
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())

    command_line.main()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ends an import at once: libraries turn an exception there into tracebacks."""
    called = set[str]()
    while frame:
        called.add(frame.f_code.co_name)
        frame = frame.f_back
    if "run_app" in called and "_find_and_load" not in called:
        raise KeyboardInterrupt
    # No print: the signal may have interrupted one.
    with contextlib.suppress(OSError):
        os.write(2, b"\nInterrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
