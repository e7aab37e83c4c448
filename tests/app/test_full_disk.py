"""A disk without room: one line, nothing half written, and a run that can go on.

The kernel lets this process write no file beyond a size, which fails as a full disk
does, for root as well.
"""

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command_line import flags, printed, refused
from fedgs.app.commands import train as running
from fedgs.app.commands.run_outcome import Exit, exit_if_stopped, stopping_on_failure
from fedgs.errors import UserError
from fedgs.process import CANNOT_GO_ON
from fedgs.round.run import RunStopped
from report_folders import make_run
from runs import generator
from tiny import SETTINGS, write_tiny_npz

TINY = {n: v for n, v in SETTINGS.items() if n not in ("data", "num_classes")}
TINY |= {"recipe": "algorithm-2"}
SMALL = 100  # bytes, in which no file of a run fits
SELECTION = {"below": 0.5, "num_rounds": 1, "engine": "local"}
FULL = r"\(File too large\)"


@contextmanager
def room(size: int) -> Iterator[None]:
    """Has every file of this process end there."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_tiny_npz(tmp_path_factory.mktemp("data") / "tiny.npz")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run")


def tree(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


COMMANDS: dict[str, tuple[list[object], str]] = {
    "npz": (["sample", "RUN", "-n", 99, "-o", "s.npz"], f"output = s.npz: .* {FULL}"),
    "png": (["sample", "RUN", "-n", 99, "-o", "s.png"], f"output = s.png: .* {FULL}"),
    "folder": (["sample", "RUN", "-n", 99, "-o", "s"], f"output = s: .* {FULL}"),
    "hf": (["sample", "RUN", "-o", "hf:s"], f"output = hf:s: .* {FULL}; free the disk"),
    "publish": (["publish", "PRIVATE", "-o", "p"], f"output = p: .* {FULL}; free the"),
    "report": (["report", "RUN", "-o", "r.html"], f"output = r.html: .* {FULL}"),
    "sheet": (["data", "inspect", "DATA", "--sheet", "s.png"], f"sheet = .* {FULL}"),
    "certs": (["deploy", "certs", ".", "--client", "ann"], f"cannot be written {FULL}"),
    "train": (["train", *flags(data="DATA", output="run", **TINY)], f"made {FULL}"),
    "select": (
        ["select-clients", *flags(data="DATA", output="s", **SELECTION)],
        ".*plan.json: File too large",
    ),
    "audit": (
        ["audit", "RUN", "--trials", 1000],
        ".*report.json: File too large; check",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cannot_write_says_it_in_a_line_and_leaves_nothing(
    made, data, fedgs, tmp_path, monkeypatch, name
):
    words, said = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    places = {"RUN": made, "DATA": data, "PRIVATE": made}
    if name == "publish":
        places["PRIVATE"] = make_run(tmp_path / "run")
        monkeypatch.setattr(
            running, "privacy_label", lambda path: {"guarantee": "holds"}
        )
    before = tree(tmp_path)
    with room(SMALL):
        code, out, err = fedgs(*[places.get(str(word), word) for word in words])
    last = err.splitlines()[-1]
    assert re.match(f"Error: .*{said}", last), err
    assert (code, out, "Traceback" in err) == (2, "", False)
    left = {*tree(tmp_path)} - {*before}
    assert left <= {"s", "clients"}  # empty folders
    assert not any((tmp_path / name).is_file() for name in left)


# ------------------------------------------------------------------ a run that began


@pytest.mark.filterwarnings("ignore:.*the run goes on without:RuntimeWarning")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("ledger.jsonl", "line 2 could not be written|checkpoint of round 1"),
        (
            "checkpoint/*.safetensors",
            f"the checkpoint of round [123] .* {FULL}; free the",
        ),
        ("private/*/*.safetensors", r"File too large|\(File too large\)"),
    ],
)
def test_a_run_that_a_full_disk_stopped_has_code_1_and_goes_on(
    made_by, fedgs, tmp_path, monkeypatch, data, what, said
):
    whole = made_by("whole")
    (sample, *_) = sorted(whole.glob(what))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(path: Path, metrics: dict) -> None:
        if metrics["round"] == 1:
            size = (path / what).stat().st_size if (path / what).exists() else 0
            most = size + 10 if size else sample.stat().st_size - 10
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))

    path = tmp_path / "run"
    reports = lambda *arguments: lambda metrics: fill(path, metrics)  # noqa: E731
    monkeypatch.setattr(running.Progress, "rounds", reports)
    try:
        code, _, err = fedgs("train", *flags(data=data, output=path, **TINY))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, "Traceback" in err) == (1, False), err
    assert re.search(f"(?s)({said}).*continue with: fedgs resume {path}\n$", err), err
    assert not [
        name for name in tree(path) if "/." in f"/{name}" and ".lock" not in name
    ]
    monkeypatch.undo()
    printed(fedgs("resume", path))
    assert generator(path) == generator(whole)


@pytest.fixture
def made_by(fedgs, tmp_path, data):
    """Trains a run of the same settings that nothing disturbs."""

    def made_by(name: str) -> Path:
        printed(fedgs("train", *flags(data=data, output=tmp_path / name, **TINY)))
        return tmp_path / name

    return made_by


def full(path: str = "run/x") -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def wrapped() -> UserError:
    error = UserError("run: the ledger cannot be written; free the disk")
    error.__cause__ = full()
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (full(), "run/x: No space left on device\ngo on\n"),
        (OSError(errno.EIO, "Input/output error"), "a file or a stream: Input/"),
        (wrapped(), "run:"),
    ],
)
def test_what_the_system_refuses_stops_a_run_that_has_begun(error, said, capsys):
    with pytest.raises(Exit), exit_if_stopped("go on"), stopping_on_failure():
        raise error
    assert capsys.readouterr().err.startswith(said)


def test_what_nothing_continues_is_said_without_advice(capsys):
    with pytest.raises(Exit), exit_if_stopped("go on"):
        raise RunStopped(f"{CANNOT_GO_ON}: why")
    assert capsys.readouterr().err == f"{CANNOT_GO_ON}: why\n"


def test_bad_input_stays_bad_input():
    with pytest.raises(UserError), exit_if_stopped("go on"), stopping_on_failure():
        raise UserError("data = x: is bad")


def test_a_selection_whose_cohorts_cannot_be_written_is_one_that_stopped(
    fedgs, tmp_path, monkeypatch, data
):
    def no_room(path: Path, *_: object) -> None:
        raise full(str(path))

    monkeypatch.setattr("fedgs.cohorts.cohort_file.write_cohort", no_room)
    given = flags(data=data, output=tmp_path / "s", **SELECTION, seed=0)
    code, _, err = fedgs("select-clients", *given)
    said = f".txt: No space left on device\ncontinue with: fedgs resume {tmp_path}/s\n"
    assert (code, err.endswith(said)) == (1, True), err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/x"),
            "/x: Permission",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "/x: Read-only"),
        (OSError("no name"), "a file or a stream: no name; check its path"),
        (MemoryError("Unable to allocate 8 TiB"), "memory is full .Unable to alloc"),
    ],
)
def test_what_no_command_explains_is_a_line_too(made, fedgs, monkeypatch, error, said):
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fedgs.runs.epsilons.of_runs", broken)
    refused(fedgs("privacy", "of", made), said)
