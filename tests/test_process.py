"""Locks between processes, folders of sockets, and what a process says of others."""

import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from command_line import refused
from fedgs import process
from fedgs.process import hold_lock, homes_of, make_home, notify, processes_of
from refusals import assert_refused

HOLDS = "import sys, pathlib; from fedgs.process import hold_lock; "
HOLDS += "lock = hold_lock(pathlib.Path(sys.argv[1]), 'held'); "
HOLDS += "print(1, flush=True); sys.stdin.read()"


def test_a_lock_is_released_by_whichever_thread_ends_the_block(tmp_path):
    stack = ExitStack()
    stack.enter_context(hold_lock(tmp_path / "lock", "is held"))
    assert_refused("is held", hold_lock, tmp_path / "lock", "is held")
    thread = threading.Thread(target=stack.close)
    thread.start()
    thread.join()
    with hold_lock(tmp_path / "lock", "is held"):
        pass


def test_a_child_that_ends_leaves_its_parent_the_lock(tmp_path):
    """`preexec_fn` makes it a true fork, as the server's processes are."""
    with hold_lock(tmp_path / "lock", "is held"):
        subprocess.run([sys.executable, "-c", ""], preexec_fn=int, check=True)
        assert_refused("is held", hold_lock, tmp_path / "lock", "is held")


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"1\n"
        assert_refused("is held", hold_lock, tmp_path / "lock", "is held", 0.05)
        other.kill()
        other.wait()
        with hold_lock(tmp_path / "lock", "is held"):
            pass


def test_processes_that_cannot_be_looked_at_carry_no_token(monkeypatch):
    """Of another user, or ended meanwhile: psutil has no environment of them."""

    def iterate(attributes: list[str]):
        assert attributes == ["environ"]
        for pid, environment in ((5, None), (6, {}), (7, {"A": "x"}), (8, {"A": "y"})):
            process = psutil.Process()
            process.info, process._pid = {"environ": environment}, pid
            yield process

    monkeypatch.setattr(psutil, "process_iter", iterate)
    assert processes_of("x", "A") == [7]


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_is_told_over_its_socket(tmp_path, monkeypatch, is_abstract):
    path = "\0fedgs-test-notify" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path.replace("\0", "@"))
        notify("READY=1")
        assert systemd.recv(100) == b"READY=1"
    notify("READY=1")  # systemd is gone: no error
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")


def test_a_process_keeps_the_memory_that_it_frees():
    code = "from fedgs.process import keep_freed_memory; keep_freed_memory()\n"
    code += "import resource; bytearray(2**26)  # 64 MiB, freed at once\n"
    code += "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
    code += "before = used(); bytearray(2**26); print(used() - before)"
    pages = subprocess.check_output([sys.executable, "-c", code])
    assert int(pages) < 100  # 16,384 where the kernel gives new ones


# ------------------------------------------------------------------ folders of sockets

LONGEST = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


@pytest.fixture
def token() -> Iterator[str]:
    token = secrets.token_hex(16)
    yield token
    for home in homes_of(token):
        shutil.rmtree(home, ignore_errors=True)


def check_home(home: Path) -> None:
    """It is its owner's alone, empty, and its sockets have names that are possible."""
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert list(home.iterdir()) == []
    path = home / LONGEST
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def test_a_simulation_lives_in_tmpdir_where_it_can(monkeypatch, token):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        home = make_home(token)
        assert home.parent == Path(short)
        check_home(home)


@pytest.mark.parametrize(
    "name", ["missing", "a-file", "sp ace", "caf\u00e9", "quo'te", "x" * 100]
)
def test_a_simulation_lives_elsewhere_where_tmpdir_cannot_be_used(
    tmp_path, monkeypatch, token, name
):
    (tmp_path / "a-file").touch()
    if name not in ("missing", "a-file"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    home = make_home(token)
    assert str(home.parent) in process.TEMPORARY_FOLDERS
    check_home(home)


def test_without_a_place_for_sockets_nothing_begins(
    tmp_path, monkeypatch, token, fedgs
):
    """Ray's own error would come when a run is under way."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(process, "TEMPORARY_FOLDERS", (str(tmp_path / "missing"),))
    refusal = f"^TMPDIR = {long}: .*sockets.*give TMPDIR a folder"
    assert_refused(refusal, make_home, token)
    own = ("--data", "digits", "--noise-multiplier", "1", "--engine", "flower")
    output = tmp_path / "run"
    err = refused(fedgs("train", *own, "--output", output), "TMPDIR = ")
    assert "letters and digits" in " ".join(err.split())
    assert not output.exists()
    assert list(long.iterdir()) == []  # the attempt leaves nothing
