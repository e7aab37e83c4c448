"""Starts the processes of a server, and ends all of them as soon as one has ended.

    fedgs deploy server     this process: holds the lock of the state directory
        superlink           Flower's server
        superexec           starts a process for every run
            serverapp       one run

Nothing is started a second time here: systemd or Docker starts the server again.
Imports neither torch nor Flower.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedgs.deployment import full_environment
from fedgs.files import remove_temporaries
from fedgs.process import (
    SERVER_VARIABLE,
    STOP_SECONDS,
    end_processes,
    hold_lock,
    processes_of,
)

LOCK_FILE = "server.lock"
SERVER_LOCK_SECONDS = 5.0  # for a server that is about to end
LOOK_SECONDS = 0.25  # between looks at the processes
LEAVE_SECONDS = 5.0  # that the superlink has for its clients' last requests
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class ServerEnded(RuntimeError):
    """A process that the server needs has ended; says which one and how."""


def supervise(
    state: Path,
    commands: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    check: Callable[[], None],
) -> None:
    """Serves until a signal asks for the end; in any case ends all processes.

    Args:
        state: the server's state directory, absolute; it must exist.
        commands: of "superlink" and "superexec", in the order of their start.
        environment: the environment of all of them.
        check: refuses what they would end of; called before any is started.

    Raises:
        UserError: another server has the state directory, or bad input.
        ServerEnded: a process has ended.
    """
    os.umask(0o077)  # what they write is for their own user alone
    environment = full_environment({**environment, SERVER_VARIABLE: str(state)})
    processes: dict[str, subprocess.Popen[bytes]] = {}
    is_stopping = False  # no Event: its lock may be held when a signal comes

    def stop(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True

    refusal = f"state_dir = {state}: another server uses it; stop that one, or give "
    with hold_lock(
        state / LOCK_FILE, refusal + "another --state-dir", SERVER_LOCK_SECONDS
    ):
        # What outlived a server that was killed would use the same port and folders.
        end_processes(str(state), 0.0, SERVER_VARIABLE)
        remove_temporaries(state / "runs")
        check()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            for role, command in commands.items():
                processes[role] = subprocess.Popen(
                    list(command),
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for us, who end them in order
                    preexec_fn=_die_with_parent,
                )
            while not is_stopping:
                for role, process in processes.items():
                    if process.poll() is not None:
                        raise ServerEnded(f"the {role} {_how(process)}")
                time.sleep(LOOK_SECONDS)
        finally:
            _end(state, processes)


def _end(state: Path, processes: Mapping[str, "subprocess.Popen[bytes]"]) -> None:
    """Ends runs first, so that they can commit, then the superlink, then the rest."""
    superlink = processes.get("superlink")

    def others() -> list[int]:
        pids = processes_of(str(state), SERVER_VARIABLE)
        if superlink is not None and superlink.pid in pids:
            pids.remove(superlink.pid)
        return pids

    # Without a superlink no run can end in order: it would wait for answers.
    if superlink is not None and superlink.poll() is None:
        for pid in others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while superlink.poll() is None and others() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        superlink.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            superlink.wait(LEAVE_SECONDS)
    end_processes(str(state), 0.0, SERVER_VARIABLE)
    for process in processes.values():
        process.wait()


def _die_with_parent() -> None:
    """Has the kernel kill this new process as soon as the server has died."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _how(process: "subprocess.Popen[bytes]") -> str:
    """Returns how a process ended, for people."""
    code = process.returncode
    if code >= 0:
        return f"(pid {process.pid}) ended with exit code {code}"
    return f"(pid {process.pid}) was ended by {signal.Signals(-code).name}"
