"""Ends the processes of a run by pid, and lets a run notice that its launcher died.

Flower and Ray start daemons in sessions of their own, which outlive a killed launcher.
All of them inherit the environment, so a token in it tells whose they are.

Here too is what different processes must write alike: names of environment variables,
and what joining a deployed run is agreed on.
"""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import psutil
from filelock import AcquireReturnProxy, FileLock, Timeout

from fedgs.errors import UserError, wrap_error
from fedgs.files import make_folder

TOKEN_VARIABLE = "FEDGS_RUN_TOKEN"
LOCK_VARIABLE = "FEDGS_LAUNCHER_LOCK"
SERVER_VARIABLE = "FEDGS_SERVER"  # the state directory of a deployed server
FAST_VARIABLE = "FEDGS_FAST_MESSAGES"  # of simulations: "1" or "0"
RUNS_VARIABLE = "FEDGS_RUNS"  # the folder of all run folders; a deployed server has one
FIT = "fit.json"  # in `.flower`: how far the fit is
REFUSED = "the settings of this run are refused"  # what a server says of a submission
CANNOT_GO_ON = "The run cannot go on"  # what is said of one that no `resume` finishes
PROTOCOL = 4  # of joining and answering a deployed run
WATCH_SECONDS = 0.5  # between looks whether the process that started this one lives
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # where TMPDIR cannot be used
# Of ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.
RAY_SOCKET_CHARACTERS = 67
TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD of glibc's malloc.h
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
STOP_SECONDS = 15.0  # that a deployed run has for its round and its checkpoint


def keep_freed_memory() -> None:
    """Lets this process keep large blocks of memory that it frees, for later ones.

    glibc gives them back, and the kernel clears the pages of the next ones: a fifth of
    a generator step of the paper. The process stays as large as it was at its peak.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc
        library.mallopt(TRIM_THRESHOLD, 2**31 - 1)
        library.mallopt(MMAP_THRESHOLD, 2**30)


def make_private(setting: str, folder: Path) -> None:
    """Makes a folder with mode 0700, or checks that nobody else can look into it.

    Raises:
        UserError: it cannot be made, or others can look into it.
    """
    where = f"{setting} = {folder}"
    with wrap_error(
        OSError, f"{where}: it cannot be made", f"choose another {setting}"
    ):
        make_folder(folder, 0o700)
        mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        remedy = f"others can look into it; run chmod 700 {folder}"
        raise UserError(f"{where}: it has mode {mode:o}, {remedy}")


def check_protocol(who: str, theirs: object, we: str) -> None:
    """Refuses to join with another fedgs, whose messages may mean something else.

    Raises:
        UserError: says which protocols the two speak.
    """
    if theirs != PROTOCOL:
        spoken = "none"
        if type(theirs) is int:  # it comes from outside and may be of any type
            spoken = str(theirs)
        raise UserError(
            f"{who} uses version {spoken} of the protocol, and {we} uses version "
            f"{PROTOCOL}; install the same version of fedgs on both"
        )


def processes_of(token: str, variable: str = TOKEN_VARIABLE) -> list[int]:
    """Returns the pids of all other processes that carry the token.

    Args:
        token: the variable's value.
        variable: the variable of the environment that they were started with.
    """
    pids: list[int] = []
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"]
        # Without one it is another user's, or it has ended.
        if not environment or process.pid == os.getpid():
            continue
        if environment.get(variable) == token:
            pids.append(process.pid)
    return pids


def end_processes(
    token: str,
    patience: float = 5.0,
    variable: str = TOKEN_VARIABLE,
) -> None:
    """Terminates all other processes that carry the token, then kills what is left.

    Args:
        token: the run's token.
        patience: seconds between SIGTERM and SIGKILL; 0 kills at once.
        variable: as of `processes_of`.
    """
    deadline = time.monotonic() + patience
    number = signal.SIGTERM
    if patience == 0:
        number = signal.SIGKILL
    # In a loop, because a process that ends may have started another one.
    while pids := processes_of(token, variable):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        time.sleep(0.1)


def end_on_signals() -> None:
    """Has SIGTERM and Ctrl-C end this process with 0, until another takes them.

    For a process that has nothing to finish while it starts, which takes seconds.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


def notify(text: str) -> None:
    """Tells systemd how this process stands, for example READY=1.

    Does nothing in a process that no unit with Type=notify started.
    """
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = path
    if path.startswith("@"):  # a socket without a file, as systemd writes it
        address = "\0" + path[1:]
    with (
        contextlib.suppress(OSError),  # systemd is gone: nothing depends on it here
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out,
    ):
        out.sendto(text.encode(), address)


def hold_lock(path: Path, refusal: str, patience: float = 0.0) -> AcquireReturnProxy:
    """Locks a file until it is released or this process ends, however it ends.

    The kernel frees the lock of a process that was killed. What that process has
    started may hold it for a moment longer.

    Args:
        path: made if it is missing; it stays when the lock is released.
        refusal: what to say when another process holds it.
        patience: seconds to wait for it.

    Returns:
        The held lock: release it at the end of a `with` block, or keep a reference.

    Raises:
        UserError: another process holds it.
    """
    try:
        # Whichever thread ends the block releases the lock.
        lock = FileLock(path, thread_local=False)
        return lock.acquire(timeout=patience, poll_interval=0.1)
    except Timeout as error:
        raise UserError(refusal) from error


def end_simulation(token: str, patience: float = 5.0) -> None:
    """Ends a simulation's processes, as `end_processes`, and removes its folder."""
    end_processes(token, patience)
    for home in homes_of(token):
        shutil.rmtree(home, ignore_errors=True)


def homes_of(token: str) -> list[Path]:
    """Returns where a run's temporary folder may be, the best place first."""
    places = [os.environ.get("TMPDIR"), *TEMPORARY_FOLDERS]
    return [Path(place).absolute() / f"fedgs-{token[:8]}" for place in places if place]


def make_home(token: str) -> Path:
    """Makes a run's temporary folder, with mode 0700, where Ray can have its sockets.

    The system limits a socket's name to 107 bytes, and Ray takes plain names only.
    TMPDIR may be too long, on a file system without sockets, or missing.

    Raises:
        UserError: there is no such place.
    """
    for home in homes_of(token):
        if not re.fullmatch("[A-Za-z0-9/._-]+", str(home)):
            continue
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            as_long_as_rays = f"{home}-{'s' * RAY_SOCKET_CHARACTERS}"
            probe.bind(as_long_as_rays)
            os.unlink(as_long_as_rays)
            home.mkdir(mode=0o700)
            return home
    raise UserError(
        f"TMPDIR = {os.environ.get('TMPDIR', '')}: a simulation has no folder for its "
        f"sockets, there or in {', '.join(TEMPORARY_FOLDERS)}; give TMPDIR a folder "
        "that you can write to, with a short name of letters and digits"
    )


def watch_launcher() -> None:
    """Ends this process and its siblings soon after the launcher has died.

    Their temporary folder goes with them. Does nothing in a process that no launcher
    started (a plain `flwr run`).
    """
    path = os.environ.get(LOCK_VARIABLE)
    token = os.environ.get(TOKEN_VARIABLE)
    if path and token:
        threading.Thread(target=_watch, args=(path, token), daemon=True).start()


def _watch(path: str, token: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # the run folder is gone
        # Free as soon as the launcher is dead, however it died.
        FileLock(path).acquire(poll_interval=WATCH_SECONDS)
    end_processes(token, patience=0)
    # Once this process, whose main thread may be writing there, is gone.
    remove = f"while kill -0 {os.getpid()}; do sleep 0.05; done; rm -rf "
    remove += shlex.join(map(str, homes_of(token)))
    subprocess.Popen(["sh", "-c", f"({remove}) 2>/dev/null"], env={"PATH": os.defpath})
    os._exit(1)


def forget_peak_memory() -> None:
    """Has `peak_memory` count from now on, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Returns the most memory that this process held, in bytes; None: not known.

    Not by `resource`: its peak cannot be set back, and holds the parent's.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
