"""Keeps the processes of a server, and ends all of them together.

    fedgs deploy server     this process: holds the lock of the state directory
        superlink           Flower's server; if it ends, the server ends
        superexec           starts a process for every run; if it ends, a new one
            serverapp       one run

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
from types import FrameType

import httpx

from experiments.launch.processes import full_environment
from fedgs.event_log import log_event
from fedgs.files import remove_temporaries, write_json
from fedgs.process import (
    SERVER_VARIABLE,
    STOP_SECONDS,
    end_processes,
    hold_lock,
    notify,
    processes_of,
    start_of,
)

LOCK_FILE, PROCESS_FILE = "server.lock", "processes.json"
LOCK_SECONDS = 5.0  # for a server that is about to end
LOOK_SECONDS = 0.25  # between looks at the processes
HEALTH_SECONDS = 5.0  # between health checks, and looks for runs
START_SECONDS = 1.0  # the same until it has answered once
HEALTH_TIMEOUT = 3.0  # of one; SIGTERM may have to wait for it
MOST_FAILURES = 24  # health checks in a row, two minutes and more
MOST_RESTARTS, RESTART_SECONDS = 5, 600.0  # so many within so many seconds
LEAVE_SECONDS = 5.0  # that the superlink has for its clients' last requests
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class ServerEnded(RuntimeError):
    """A process that the server needs has ended; says which one and how."""


class Supervisor:
    """The processes of one server.

    Args:
        state: the server's state directory, absolute; it must exist.
        superlink, superexec: their commands.
        environment: of all of them.
        health: URL that the superlink answers while it serves.
        certificates: whose -> its file, for `fedgs deploy status`.
        check: refuses what they would end of; called before any is started.
    """

    def __init__(
        self,
        state: Path,
        superlink: Sequence[str],
        superexec: Sequence[str],
        environment: Mapping[str, str],
        health: str,
        certificates: Mapping[str, str] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts nothing yet."""
        self.state, self.health, self.check = state, health, check
        self.certificates = dict(certificates or {})
        self.commands = {"superlink": superlink, "superexec": superexec}
        more = {**environment, SERVER_VARIABLE: str(state)}
        self.environment = full_environment(more)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ends: list[float] = []  # of superexecs lately, monotonic
        self.restarts = 0  # of the superexec
        self.failures = 0  # of health checks in a row
        self.is_ready = False
        self._is_stopping = False  # no Event: its lock may be held when a signal comes
        self._written: dict[str, object] = {}
        self._next_check = 0.0

    def run(self) -> None:
        """Serves until a signal asks for the end; then ends all processes.

        Raises:
            UserError: another server has the state directory, or bad input.
            ServerEnded: a process that is needed has ended, or does not answer.
        """
        os.umask(0o077)  # what they write is for their own user alone
        os.environ.update(self.environment)
        refusal = (
            f"state_dir = {self.state}: another server uses it; stop that one, or "
        )
        refusal += "or give another --state-dir"
        with hold_lock(self.state / LOCK_FILE, refusal, LOCK_SECONDS):
            reason = ""
            try:
                self._serve()
            except Exception as error:
                reason = str(error) or type(error).__name__
                raise
            finally:
                self._end(reason)

    def _serve(self) -> None:
        """Starts the processes and looks after them until a signal comes."""
        # What outlived a server that was killed would use the same database.
        end_processes(str(self.state), 0.0, SERVER_VARIABLE)
        for folder in (self.state, self.state / "runs"):
            remove_temporaries(folder)
        self.check()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        for role in self.commands:
            self._start(role)
        while not self._is_stopping:
            self._check_processes()
            time.sleep(LOOK_SECONDS)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True

    def _start(self, role: str) -> None:
        self.processes[role] = subprocess.Popen(
            list(self.commands[role]),
            start_new_session=True,  # Ctrl-C is for this process, which ends them
            preexec_fn=_die_with_parent,
        )

    def _check_processes(self) -> None:
        """Looks at every process once.

        Raises:
            ServerEnded: one that is needed has ended.
        """
        superlink = self.processes["superlink"]
        if superlink.poll() is not None:
            raise ServerEnded(f"the superlink {_how(superlink)}")
        if self.processes["superexec"].poll() is not None:
            self._restart()
        if time.monotonic() >= self._next_check:
            self._check_health()
            pause = HEALTH_SECONDS if self.is_ready else START_SECONDS
            self._next_check = time.monotonic() + pause
            self._write_down("running")

    def _restart(self) -> None:
        """Starts the superexec again, unless it ends again and again."""
        how = f"the superexec {_how(self.processes['superexec'])}"
        now = time.monotonic()
        self.ends = [end for end in self.ends if end > now - RESTART_SECONDS] + [now]
        if len(self.ends) > MOST_RESTARTS:
            often = f"{len(self.ends)} times in {RESTART_SECONDS:g} s"
            raise ServerEnded(f"{how}, {often}; its messages are above")
        print(f"{how}; starting it again", file=sys.stderr, flush=True)
        log_event("superexec", outcome=f"restarted: {how}")
        self._start("superexec")
        self.restarts += 1
        self._write_down("running")

    def _check_health(self) -> None:
        """Asks the superlink whether it serves, and tells systemd so."""
        if _answers(self.health):
            self.failures = 0
            notify("WATCHDOG=1" if self.is_ready else "READY=1\nWATCHDOG=1")
            self.is_ready = True
            return
        if not self.is_ready:
            return  # it is starting; systemd has a limit for that
        self.failures += 1  # counted, not timed: this process may have stood still
        if self.failures >= MOST_FAILURES:
            raise ServerEnded(f"the superlink did not answer {self.failures} times")

    def _write_down(self, state: str, reason: str = "") -> None:
        """Writes down which processes there are, if that has changed."""
        pids = {"server": os.getpid()}
        pids |= {role: process.pid for role, process in self.processes.items()}
        roles = [*pids.items(), *(("serverapp", pid) for pid in self._serverapps())]
        content: dict[str, object] = {
            "state": state,
            "reason": reason,
            "superexec_restarts": self.restarts,
            "certificates": self.certificates,
            "processes": [
                {"role": role, "pid": pid, "start": start}
                for role, pid in roles
                if (start := start_of(pid)) is not None
            ],
        }
        if content != self._written:
            self._written = content
            try:
                write_json(self.state / PROCESS_FILE, content)
            except OSError as error:  # a full disk ends no server
                print(f"{PROCESS_FILE}: {error}", file=sys.stderr, flush=True)

    def _serverapps(self) -> list[int]:
        known = {process.pid for process in self.processes.values()}
        return [
            pid
            for pid in processes_of(str(self.state), SERVER_VARIABLE)
            if pid not in known
        ]

    def _end(self, reason: str) -> None:
        """Ends runs first, so that they can commit, then the rest."""
        notify("STOPPING=1")
        self._write_down("stopping", reason)
        superlink = self.processes.get("superlink")
        # Without it no run can end in order: it would wait for answers.
        if superlink is not None and superlink.poll() is None:
            for pid in self._serverapps():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            while self._serverapps() and time.monotonic() < deadline:
                if superlink.poll() is not None:
                    break  # nobody is left to answer them
                time.sleep(LOOK_SECONDS)
            for process in self.processes.values():
                process.terminate()
            deadline = time.monotonic() + LEAVE_SECONDS
            for process in self.processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for process in self.processes.values():
            process.kill()
            process.wait()
        end_processes(str(self.state), 0.0, SERVER_VARIABLE)
        self._write_down("ended", reason)
        log_event("server", outcome=reason or "ended as asked")


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


def _answers(url: str) -> bool:
    """Tells whether the own superlink answers; who it is needs no certificate."""
    client = httpx.Client(verify=False, trust_env=False, timeout=HEALTH_TIMEOUT)
    try:
        with client:
            return client.get(url).status_code == 200
    except httpx.HTTPError:  # also where something else has the port
        return False
