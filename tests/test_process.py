"""Locks between processes, and what a process says of others."""

import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

import psutil
import pytest

from fedgs.process import hold_lock, notify, processes_of
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
