"""The run folder: whole or absent, refused when broken, and never a pickle."""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedgs.errors import UserError
from fedgs.files import read_json, read_tensors, write_tensors
from fedgs.privacy.ledger import Ledger
from fedgs.runs import run_folder
from fedgs.runs.run_folder import AVERAGE, RunFolder, state_path, state_rounds
from fedgs.runs.sample import load_generator
from refusals import assert_refused
from runs import TENSORS, keep_lines, tiny_event
from tiny import tiny_config


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder.create(tiny_config(output=str(tmp_path / "run")))


def save_rounds(folder: RunFolder, *rounds: int) -> None:
    with closing(folder.ledger()) as ledger:
        for round in rounds:
            ledger.append(tiny_event(round))
            folder.save_checkpoint(round, TENSORS, ledger)


def load(folder: RunFolder):
    with closing(folder.ledger()):
        return folder.load_checkpoint()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# ------------------------------------------------------------------ create and open


def test_new_folder_holds_settings_versions_and_an_empty_ledger(folder):
    stored = json.loads((folder.path / "config.json").read_text())
    assert stored == folder.config.to_flat() | {"counted": ""}
    versions = json.loads((folder.path / "versions.json").read_text())
    assert versions["format"] == 3
    assert versions["torch"] == torch.__version__.split("+")[0]
    assert [*folder.read_ledger().bound] == ["config.json", "salt"]
    assert folder.read_ledger().length == 0
    assert folder.private.stat().st_mode & 0o777 == 0o700  # closed to others


def test_run_keeps_a_copy_of_its_cohort(tmp_path):
    """The user's file may change or go away, and the folder may move."""
    own = tmp_path / "mine.txt"
    own.write_text("# selection: not private\n1\n4\n")
    config = tiny_config(cohort=str(own), output=str(tmp_path / "run"), num_clients=2)
    made = RunFolder.create(config)
    content = own.read_bytes()
    own.unlink()
    assert made.config.cohort == str(tmp_path / "run" / "cohort.txt")
    assert Path(made.config.cohort).read_bytes() == content
    assert RunFolder.open(made.path).config == made.config
    moved = RunFolder.open(made.path.rename(tmp_path / "moved"))
    assert moved.config.cohort == str(tmp_path / "moved" / "cohort.txt")


def full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("output", "prepare", "words"),
    [
        ("run", lambda root, _: (root / "run").touch(), "exists already; "),
        ("f/new/run", lambda root, _: (root / "f").touch(), "/f is a file; "),
        (
            "f/new/run",
            lambda _, patch: patch.setattr(os, "access", lambda path, mode: False),
            "cannot be written; ",
        ),
        (
            "run",
            lambda _, patch: patch.setattr(run_folder.files, "write_json", full_disk),
            "No space left",
        ),
    ],
)
def test_folder_that_cannot_be_made_leaves_nothing_behind(
    tmp_path, monkeypatch, output, prepare, words
):
    prepare(tmp_path, monkeypatch)
    before, config = names(tmp_path), tiny_config(output=str(tmp_path / output))
    assert_refused(f"output = .*{words}.*--output", RunFolder.create, config)
    config = dataclasses.replace(config, cohort=str(tmp_path / "no.txt"))
    assert_refused("(cohort|output) = ", RunFolder.create, config)
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, r"no run folder .*config.json.*--output"),
        ("config.json", '{"num_rounds": 3', "config.json: .*restore it from a backup"),
        ("config.json", '{"no_such": 1}', "no_such:"),
        ("versions.json", "", "versions.json: .*restore it from a backup"),
        ("versions.json", '{"format": 1}', "format 1, .* reads 3; use the version"),
    ],
)
def test_folder_that_is_no_run_of_this_version_is_refused(folder, name, content, words):
    (folder.path / name).unlink()
    if content is not None:
        (folder.path / name).write_text(content)
    assert_refused(words, RunFolder.open, folder.path)


# ------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory) -> tuple[RunFolder, dict[Path, bytes]]:
    """A folder with a checkpoint, and the bytes of the files that it is read from."""
    output = str(tmp_path_factory.mktemp("damaged") / "run")
    folder = RunFolder.create(tiny_config(output=output))
    save_rounds(folder, 1, 2)
    found = [*(folder.path / "checkpoint").iterdir(), folder.path / "ledger.jsonl"]
    state = folder.path / "checkpoint" / "state.safetensors"
    metadata = {"digest": "ab", "count": "1"}
    write_tensors(state, run_folder.sealed(TENSORS, metadata), metadata)
    return folder, {path: path.read_bytes() for path in (*sorted(found), state)}


@given(
    which=st.integers(0, 3),
    place=st.floats(0, 0.999),
    cut=st.integers(0, 9) | st.just(10**9),
    put=st.binary(max_size=3),
)
@settings(max_examples=100)
@example(which=0, place=0.0, cut=10**9, put=b"")
@example(which=1, place=0.0, cut=10**9, put=b"\x80\x04no tensors")
@example(which=1, place=0.999, cut=1, put=b"")
@example(which=1, place=0.999, cut=0, put=b"\0")
@example(which=2, place=0.0, cut=10**9, put=b"")
def test_damaged_bytes_are_refused_or_read_the_same(
    checkpointed, which, place, cut, put
):
    """Of the commit, its tensors, the ledger and a node's state, which seals itself."""
    folder, whole = checkpointed
    path = [*whole][which]
    start = min(int(place * len(whole[path]) + 0.5), len(whole[path]) - (place < 0.999))
    path.write_bytes(whole[path][:start] + put + whole[path][start + cut :])
    try:
        if which == 3:
            tensors, metadata = run_folder.read_state(path)
            assert metadata == {"digest": "ab", "count": "1"}
            tensors = {name: tensors[name] for name in TENSORS}
        else:
            round, tensors = load(folder)
            assert round == 2
        assert all(torch.equal(tensors[n], value) for n, value in TENSORS.items())
    except UserError as error:
        assert "restore" in str(error)  # noqa: PT017 most damage is refused, not all
    finally:
        path.write_bytes(whole[path])
        (folder.path / "ledger.json").unlink(missing_ok=True)


# ------------------------------------------------------------------ a shortened ledger


def finish(folder: RunFolder, *rounds: int) -> RunFolder:
    """Writes what a run leaves that ended after these rounds."""
    save_rounds(folder, *rounds)
    for round in rounds:
        folder.append_metrics({"round": round, "seconds": 0.1, "num_answers": 2})
    with closing(folder.ledger()) as ledger:
        folder.save_generator(TENSORS, TENSORS, ledger)
    return folder


WITNESSES = ("checkpoint/checkpoint.json", "ledger.json", "metrics.jsonl")
OTHERS = ("generator.safetensors", "generator_ema.safetensors")


def published(folder: RunFolder, *names: str) -> RunFolder:
    """Removes all that says how long the ledger was, but the given files."""
    for name in {*WITNESSES, *OTHERS} - {*names}:
        (folder.path / name).unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that has ended after three rounds."""
    path = tmp_path_factory.mktemp("finished") / "run"
    return finish(RunFolder.create(tiny_config(output=str(path))), 1, 2, 3).path


@pytest.mark.parametrize("kept", [2, 0, None])
@pytest.mark.parametrize("witness", WITNESSES + OTHERS)
def test_every_file_of_releases_refuses_a_shorter_or_another_ledger(
    finished, tmp_path, witness, kept
):
    folder = RunFolder.open(shutil.copytree(finished, tmp_path / "run"))
    published(folder, witness)
    ledger = folder.read_ledger()
    assert ledger.length == 3
    if kept is None and witness == "metrics.jsonl":
        return  # which has no hash of the ledger
    if kept is None:
        louder = [dataclasses.replace(e, noise_std=9.0) for e in ledger.events]
        Ledger.create(ledger.path, ledger.bound)
        with closing(Ledger.open(ledger.path)) as other:
            other.append(*louder)
    else:
        keep_lines(ledger.path, kept)
    words = "(line [0-3] is (the last|not the one)|round [13] has no event)"
    for opened in (folder.read_ledger, folder.ledger):  # to look, and to go on
        assert_refused(rf"{words}.*{witness} saw.*restore the file from a", opened)
    Ledger.open(ledger.path).close()  # no lock was left behind
    ledger.path.unlink()
    for opened in (folder.read_ledger, folder.ledger):
        assert_refused(r"ledger.jsonl: it is missing; restore", opened)
    assert not ledger.path.exists()


def test_finished_run_is_read_as_it_is_published(finished, tmp_path):
    folder = RunFolder.open(shutil.copytree(finished, tmp_path / "run"))
    published(folder, *OTHERS)
    shutil.rmtree(folder.path / "checkpoint")
    assert folder.read_ledger().length == 3


def test_a_run_folder_is_for_its_owner_alone(tmp_path):
    """Pictures of an evaluation in it are of real images."""
    folder = RunFolder.create(tiny_config(output=str(tmp_path / "runs" / "new")))
    assert folder.path.stat().st_mode & 0o077 == 0
    assert folder.path.parent.stat().st_mode & 0o055  # others may look at what is there


def test_a_lost_checkpoint_is_no_new_beginning(finished, tmp_path):
    folder = RunFolder.open(shutil.copytree(finished, tmp_path / "run"))
    (folder.path / "checkpoint" / "checkpoint.json").unlink()
    kept = sorted((folder.path / "checkpoint").iterdir())
    assert_refused(
        "checkpoint.json: it is missing, and round 3", folder.load_checkpoint
    )
    assert sorted((folder.path / "checkpoint").iterdir()) == kept


@pytest.mark.parametrize("name", ["checkpoint/checkpoint.json", "ledger.json"])
def test_a_head_that_is_no_text_is_refused(finished, tmp_path, name):
    folder = RunFolder.open(shutil.copytree(finished, tmp_path / "run"))
    content = json.loads((folder.path / name).read_text())
    for key in content:
        if "head" in key:
            content[key] = None
    (folder.path / name).write_text(json.dumps(content))
    assert_refused(f"{name}: corrupted", folder.read_ledger)


def test_a_damaged_line_of_metrics_takes_no_memory_for_its_round(finished, tmp_path):
    folder = RunFolder.open(shutil.copytree(finished, tmp_path / "run"))
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 10**30, "events": 3}) + "\n")
    assert_refused("round 4 has no event, metrics.jsonl saw", folder.read_ledger)


# ------------------------------------------------------------------ what is bound


def without_first_line(path: Path) -> None:
    ledger = Ledger.read(path / "ledger.jsonl")
    ledger.path.unlink()
    with closing(Ledger.open(ledger.path)) as again:
        again.append(*ledger.events)


def edit_settings(path: Path) -> None:
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"client"', '"record"'))


def add_event(**changes: object) -> Callable[[Path], None]:
    def add(path: Path) -> None:
        with closing(Ledger.open(path / "ledger.jsonl")) as ledger:
            ledger.append(dataclasses.replace(tiny_event(2), **changes))

    return add


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit_settings, "config.json: it is not what the run began with.*restore"),
        (
            lambda path: (path / "cohort.txt").unlink(),
            "cohort.txt: it is not what the run",
        ),
        (without_first_line, r"lost its first line.*restore"),
        (add_event(noise_std=9.0), "line 2: noise_std = .*settings say"),
        (
            lambda path: write_tensors(path / OTHERS[0], TENSORS),
            f"{OTHERS[0]}: it does not say under which ledger",
        ),
    ],
)
def test_what_does_not_belong_to_the_run_is_refused(tmp_path, change, words):
    cohort = tmp_path / "cohort.txt"
    cohort.write_text("0\n1\n2\n3\n4\n5\n")
    place = {"output": str(tmp_path / "run"), "cohort": str(cohort)}
    folder = finish(RunFolder.create(tiny_config(**place)), 1)
    change(folder.path)
    assert_refused(words, folder.read_ledger)


def test_a_line_of_metrics_says_how_long_the_ledger_was(folder):
    """A repeated round is in no other file before the next start or checkpoint."""
    with closing(folder.ledger()) as ledger:
        for _ in range(2):
            ledger.append(tiny_event(1))
            folder.append_metrics({"round": 1, "events": ledger.length})
    keep_lines(folder.path / "ledger.jsonl", 1)
    assert_refused(r"line 1 is the last, metrics.jsonl saw 2", folder.read_ledger)


def test_every_opening_and_commit_records_the_ledgers_length(folder):
    save_rounds(folder, 1)
    recorded = read_json(folder.path / "ledger.json")
    assert (recorded["length"], recorded["round"]) == (1, 1)
    with closing(folder.ledger()) as ledger:
        ledger.append(tiny_event(2))
    folder.ledger().close()
    recorded = {"length": 2, "head": ledger.head, "round": 1}
    assert read_json(folder.path / "ledger.json") == recorded


def test_looking_while_the_run_goes_on_refuses_nothing(folder, monkeypatch):
    """What tells of releases is read before the ledger, which only grows."""
    save_rounds(folder, 1)
    read = Ledger.read

    def meanwhile(path: Path) -> Ledger:
        found = read(path)
        with closing(Ledger.open(path)) as ledger:
            ledger.append(tiny_event(2))
            folder.save_checkpoint(2, TENSORS, ledger)
        return found

    monkeypatch.setattr(Ledger, "read", meanwhile)
    assert folder.read_ledger().length == 1
    monkeypatch.setattr(Ledger, "read", read)
    with open(folder.path / "metrics.jsonl", "a") as lines:
        lines.write('{"round": 2, "seconds": 1}\n{"round": 3, "sec')  # being written
    assert folder.read_ledger().length == 2


# ------------------------------------------------------------------ node states


@pytest.mark.parametrize(
    ("rounds", "committed", "kept"),
    [
        ([1, 2, 3, 4], 2, [2, 3, 4]),
        ([1, 5, 6, 7], 4, [1, 6, 7]),  # last asked long before the commit
        ([0, 1, 2, 3], 0, [0, 2, 3]),
        ([3, 4, 5], 5, [4, 5]),
    ],
)
def test_committed_state_and_the_two_newest_are_kept(folder, rounds, committed, kept):
    node = run_folder.node_folder(folder.private, 0)
    for round in rounds[:-1]:
        write_tensors(state_path(node, round), TENSORS)
    old = run_folder.old_states(node, committed)
    recycle = old.pop() if old else None
    write_tensors(state_path(node, rounds[-1]), TENSORS, recycle=recycle)
    assert (old, state_rounds(node)) == ([], kept)


def test_a_recycled_file_holds_the_new_tensors_only(tmp_path):
    longer = {"much": torch.ones(1000)}
    write_tensors(tmp_path / "old", longer)
    write_tensors(tmp_path / "new", TENSORS, {"a": "b"}, recycle=tmp_path / "old")
    write_tensors(tmp_path / "fresh", TENSORS, {"a": "b"})
    assert {path.name for path in tmp_path.iterdir()} == {"new", "fresh"}
    assert (tmp_path / "new").read_bytes() == (tmp_path / "fresh").read_bytes()


# ------------------------------------------------------------------ metrics and files


def test_metrics_of_repeated_rounds_and_a_torn_line_are_dropped(folder):
    for round in (1, 2, 3):
        folder.append_metrics({"round": round})
    with open(folder.path / "metrics.jsonl", "a") as lines:
        lines.write('{"round": 2')
    folder.truncate_metrics(2)
    text = (folder.path / "metrics.jsonl").read_text()
    assert text == '{"round": 1}\n{"round": 2}\n'


# ------------------------------------------------------------------ exchanged tensors


def other_values(tensors: dict) -> dict:
    return {name: value + 1 for name, value in tensors.items()}


def other_shape(tensors: dict) -> dict:
    return {name: value.view(3, 2) for name, value in tensors.items()}


def other_name(tensors: dict) -> dict:
    return {f"{name}s": value for name, value in tensors.items()}


def other_type(tensors: dict) -> dict:
    return {name: value.view(torch.int32) for name, value in tensors.items()}


CHANGES = (other_values, other_shape, other_name, other_type)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OTHERS)
def test_tensors_that_were_exchanged_under_their_metadata_are_refused(
    finished, tmp_path, name, change
):
    folder = RunFolder.open(shutil.copytree(finished, tmp_path / "run"))
    tensors, metadata = read_tensors(folder.path / name)
    write_tensors(folder.path / name, tensors, metadata)
    folder.read_ledger()
    write_tensors(folder.path / name, change(tensors), metadata)
    words = f"{name}: its tensors are not those that were written; restore"
    for read in (folder.read_ledger, folder.ledger):
        assert_refused(words, read)
    if name == AVERAGE:
        assert_refused(words, folder.average)


def test_a_generator_without_a_hash_is_of_an_earlier_version(finished, tmp_path):
    folder = RunFolder.open(shutil.copytree(finished, tmp_path / "run"))
    for name in OTHERS:
        tensors, metadata = read_tensors(folder.path / name)
        length, head, _ = metadata["ledger"].split()
        write_tensors(folder.path / name, tensors, {"ledger": f"{length} {head}"})
    assert folder.read_ledger().length == 3
    assert torch.equal(folder.average()["generator.weight"], *TENSORS.values())


def test_the_average_of_another_run_is_refused_where_it_is_sampled(finished, tmp_path):
    folder = RunFolder.open(shutil.copytree(finished, tmp_path / "run"))
    other = finish(RunFolder.create(tiny_config(output=str(tmp_path / "b"))), 1, 2)
    shutil.copy(other.path / AVERAGE, folder.path / AVERAGE)
    assert_refused(f"{AVERAGE}: it is of another ledger; restore", folder.average)
    assert_refused("line 2 is not the one", folder.read_ledger)


def test_a_checkpoint_is_sampled_only_as_it_was_committed(folder):
    save_rounds(folder, 1)
    assert folder.average() is None
    assert folder.committed()[0] == 1
    (path,) = (folder.path / "checkpoint").glob("*.safetensors")
    write_tensors(path, other_values(TENSORS))
    for read in (folder.committed, lambda: load_generator(folder)):
        assert_refused("corrupted checkpoint", read)
