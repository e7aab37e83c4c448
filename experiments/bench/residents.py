"""Many clients of a benchmark: real processes, forked from one that has imported all.

    python -m experiments.bench.residents COMMANDS.json

A client by itself takes half a gigabyte and seconds of imports; forked ones share both.
The file holds a list of arguments, environment and log file of each client.
"""

import contextlib
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType

from clients import resident

SHARED = ("clients.client_app", "flwr.supernode.cli.flower_supernode")  # torch, Flower


def main(commands: Path) -> None:
    """Runs the clients until they have ended; SIGTERM ends them."""
    for module in SHARED:
        import_module(module)
    children: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    for arguments, environment, log in json.loads(commands.read_text()):
        if child := os.fork():
            children.append(child)
            continue
        os.environ.update(environment)
        output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output, stream.fileno())
        resident.main(arguments)
        os._exit(1)  # it never returns
    signal.signal(signal.SIGTERM, end)
    for child in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
