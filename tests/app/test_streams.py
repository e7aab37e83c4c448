"""What a command prints may be lost: its work is not, and its code says it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from command_line import flags
from fedgs.app import streams
from report_folders import make_run
from runs import rounds_done
from tiny import SETTINGS, write_tiny_npz

FULL = "Error: standard output cannot be written: No space left on device\n"
TINY = {n: v for n, v in SETTINGS.items() if n not in ("data", "num_classes")}
TINY |= {"recipe": "algorithm-2"}


@contextmanager
def full() -> Iterator[int]:
    """A disk without room."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@contextmanager
def unread() -> Iterator[int]:
    """A pipe whose reader has gone: `| head -1`."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def fedgs(*words: object, closed: str = "", **more) -> subprocess.CompletedProcess:
    """Runs the command line in a process of its own; `closed` as a shell closes it."""
    command = [sys.executable, "-m", "fedgs", *map(str, words)]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    own = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run(shell, **own | more, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("trained") / "run")


COMMANDS = [["--version"], ["privacy", "of", "RUN"]]  # by print, and by rich


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("where", "code", "said"),
    [(full, 2, FULL), (unread, 141, "")],
    ids=["full", "pipe"],
)
def test_output_that_is_lost_is_said_once(run, words, where: Callable, code, said):
    with where() as stdout:
        words = [run if word == "RUN" else word for word in words]
        done = fedgs(*words, stdout=stdout)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_lead_nowhere_and_into_no_file(run, tmp_path, closed):
    done = fedgs("sample", run, "-n", 9, "-o", tmp_path / "s.npz", closed=closed)
    assert (done.returncode, done.stderr) == (0, "")
    assert np.load(tmp_path / "s.npz")["images"].shape[0] == 9
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.npz"]
    assert fedgs("--version", closed=closed).returncode == 0


def test_a_refusal_has_its_code_though_nobody_can_read_it(run):
    with full() as nowhere:
        done = fedgs("sample", run, "-o", "s.jpg", stdout=nowhere, stderr=nowhere)
    assert done.returncode == 2


def test_a_run_that_nobody_watches_is_trained_to_its_end(tmp_path):
    data = write_tiny_npz(tmp_path / "tiny.npz")
    words = ["train", *flags(data=data, output=tmp_path / "run", **TINY)]
    with unread() as nowhere:
        done = fedgs(*words, stdout=nowhere, stderr=nowhere)
    assert done.returncode == 141
    assert rounds_done(tmp_path / "run") == TINY["num_rounds"]
    assert (tmp_path / "run" / "generator.safetensors").exists()


def test_names_without_letters_of_the_terminal_are_printed(run, tmp_path):
    name = os.fsdecode(b"caf\xe9.npz")
    where = {"cwd": tmp_path, "env": os.environ | {"PYTHONIOENCODING": "ascii"}}
    done = fedgs("sample", run, "-n", 3, "-o", name, stdout=subprocess.PIPE, **where)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Wrote 3 images to caf\\udce9.npz\n"


def test_a_program_keeps_its_own_streams():
    assert streams.lost() is None
