"""The run folder: whole or absent, refused when broken, and never a pickle."""

import dataclasses
import errno
import itertools
import json
import re
import resource
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fedgs.errors import UserError
from fedgs.files import read_json, write_json, write_tensors
from fedgs.privacy.ledger import Ledger
from fedgs.runs import run_folder
from fedgs.runs.run_folder import RunFolder, state_path, state_rounds
from fedgs.shapes import TensorDict
from refusals import assert_refused
from runs import TENSORS, keep_lines, tiny_event
from tiny import tiny_config

LOCKER = "import fcntl, sys; file = open(sys.argv[1], 'w'); "
LOCKER += "fcntl.flock(file, fcntl.LOCK_EX); print(1, flush=True); sys.stdin.read()"


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


def refusal(folder: RunFolder) -> str:
    with pytest.raises(UserError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# ------------------------------------------------------------------ create and open


def test_new_folder_holds_settings_versions_and_an_empty_ledger(folder):
    assert names(folder.path) == [
        "checkpoint",
        "config.json",
        "ledger.jsonl",
        "private",
        "samples",
        "versions.json",
    ]
    stored = json.loads((folder.path / "config.json").read_text())
    assert stored == folder.config.to_flat() | {"counted": ""}
    versions = json.loads((folder.path / "versions.json").read_text())
    assert versions["format"] == 2
    assert versions["torch"] == torch.__version__.split("+")[0]
    assert [*folder.read_ledger().bound] == ["config.json"]
    assert folder.read_ledger().length == 0


def test_private_folder_is_closed_to_others(folder):
    assert folder.private.stat().st_mode & 0o777 == 0o700


def test_opened_folder_has_the_configuration_that_it_was_created_with(folder):
    assert RunFolder.open(folder.path).config == folder.config


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


def test_run_of_a_missing_cohort_is_not_created(tmp_path):
    output = tmp_path / "run"
    config = tiny_config(cohort=str(tmp_path / "no.txt"), output=str(output))
    assert_refused(r"cohort = .*no.txt: unreadable .No such", RunFolder.create, config)
    assert names(tmp_path) == []


def test_versions_name_the_git_commit_of_a_checkout():
    source = Path(run_folder.__file__).parents[2]
    if not (source / ".git").exists():
        pytest.skip("not a git checkout")
    commit = run_folder.versions()["git_commit"]
    assert len(commit) == 40
    assert not set(commit) - set("0123456789abcdef")


def create_refused(tmp_path: Path, words: str, output: str = "run") -> None:
    """Creates a folder, which is refused and changes nothing."""
    before, config = names(tmp_path), tiny_config(output=str(tmp_path / output))
    assert_refused(rf"output = .*{words}.*--output", RunFolder.create, config)
    assert names(tmp_path) == before


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_existing_output_is_refused_and_kept(tmp_path, make):
    make(tmp_path / "run")
    create_refused(tmp_path, "run: exists already; ")


@pytest.mark.parametrize("failing", ["write_json", "versions", "Ledger"])
def test_failed_creation_leaves_nothing_behind(tmp_path, monkeypatch, failing):
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "Ledger":
        monkeypatch.setattr(Ledger, "create", fail)
    else:
        monkeypatch.setattr(run_folder, failing, fail)
    create_refused(tmp_path, "No space left")


def test_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    create_refused(tmp_path, "Not a directory", "file/run")


def test_folder_that_is_no_run_is_refused(tmp_path):
    assert_refused(r"no run folder .*config.json.*--output", RunFolder.open, tmp_path)


@pytest.mark.parametrize("found", [1, 3, None])
def test_folder_of_another_format_is_refused(folder, found):
    run_folder.write_json(folder.path / "versions.json", {"format": found})
    words = rf"format {found}, .* reads 2; use the version"
    assert_refused(words, RunFolder.open, folder.path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"num_rounds": 3'),
        ("config.json", "[]"),
        ("versions.json", ""),
    ],
)
def test_broken_json_is_refused_with_its_path(folder, name, content):
    (folder.path / name).write_text(content)
    assert_refused(rf"{name}: .*restore it from a backup", RunFolder.open, folder.path)


def test_settings_of_another_fedgs_are_refused(folder):
    flat = folder.config.to_flat() | {"no_such_setting": 1}
    run_folder.write_json(folder.path / "config.json", flat)
    assert_refused("no_such_setting: unknown setting", RunFolder.open, folder.path)


def test_folder_in_use_is_refused_until_its_process_is_dead(folder):
    command = [sys.executable, "-c", LOCKER, str(folder.path / ".lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        assert_refused(r"another process trains .*; wait", folder.locked)
        other.kill()
        other.wait()
        with folder.locked():
            pass


# ------------------------------------------------------------------ checkpoints


def test_no_checkpoint_before_the_first(folder):
    assert load(folder) is None


def test_checkpoint_comes_back_equal(folder):
    save_rounds(folder, 4)
    round, tensors = load(folder)
    assert round == 4
    assert {name: value.tolist() for name, value in tensors.items()} == {
        "generator.weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    }


def test_one_checkpoint_is_kept(folder):
    save_rounds(folder, 1, 2, 3)
    found = names(folder.path / "checkpoint")
    assert found == ["checkpoint.json", "round-0000003.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content[:-8],
        lambda content: content + b"\0",
        lambda content: b"",
        None,
    ],
    ids=["one bit", "truncated", "longer", "empty", "missing"],
)
def test_damaged_tensors_are_refused_with_the_remedy(folder, damage):
    save_rounds(folder, 2)
    path = folder.path / "checkpoint" / "round-0000002.safetensors"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    text = refusal(folder)
    assert str(path) in text
    assert re.search(r"corrupted checkpoint \(.+\); restore it from a backup", text)


@pytest.mark.parametrize(
    "key", ["round", "file", "sha256", "ledger_length", "ledger_head"]
)
@pytest.mark.parametrize("value", ["missing", None])
def test_incomplete_commit_is_refused_with_the_remedy(folder, key, value):
    save_rounds(folder, 2)
    path = folder.path / "checkpoint" / "checkpoint.json"
    commit = json.loads(path.read_text())
    commit[key] = value
    if value == "missing":
        del commit[key]
    path.write_text(json.dumps(commit))
    assert "restore" in refusal(folder)


def test_torn_commit_is_refused_with_the_remedy(folder):
    save_rounds(folder, 2)
    path = folder.path / "checkpoint" / "checkpoint.json"
    path.write_text(path.read_text()[:20])
    assert "checkpoint.json: cannot be read" in refusal(folder)


def test_ledger_shorter_than_the_checkpoint_is_refused(folder):
    save_rounds(folder, 1, 2)
    keep_lines(folder.path / "ledger.jsonl", 1)
    text = refusal(folder)
    assert "line 1 is the last, checkpoint/checkpoint.json saw 2" in text
    assert "restore the file" in text


def test_ledger_of_another_run_is_refused(folder, tmp_path):
    save_rounds(folder, 1, 2)
    other = tmp_path / "ledger.jsonl"
    Ledger.create(other, folder.read_ledger().bound)
    with closing(Ledger.open(other)) as ledger:
        for round in (1, 1, 2):
            ledger.append(tiny_event(round))
    (folder.path / "ledger.jsonl").write_bytes(other.read_bytes())
    text = refusal(folder)
    assert "line 2 is not the one that checkpoint/checkpoint.json saw" in text


def test_ledger_longer_than_the_checkpoint_stays_as_it_is(folder):
    save_rounds(folder, 1)
    with closing(folder.ledger()) as ledger:
        ledger.append(tiny_event(2))
    before = (folder.path / "ledger.jsonl").read_bytes()
    assert load(folder)[0] == 1
    assert (folder.path / "ledger.jsonl").read_bytes() == before


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


@pytest.mark.parametrize("kept", [2, 0])
@pytest.mark.parametrize("witness", WITNESSES + OTHERS)
def test_every_file_of_releases_refuses_a_shorter_ledger(folder, witness, kept):
    finish(folder, 1, 2, 3)
    for other in {*WITNESSES, *OTHERS} - {witness}:
        (folder.path / other).unlink()
    assert folder.read_ledger().length == 3
    keep_lines(folder.path / "ledger.jsonl", kept)
    for opened in (folder.read_ledger, folder.ledger):  # to look, and to go on
        with pytest.raises(UserError) as caught:
            opened()
        assert "ledger.jsonl: " in str(caught.value)
        assert f"{witness} saw" in str(caught.value)
        assert "restore the file from a copy" in str(caught.value)
    Ledger.open(folder.path / "ledger.jsonl").close()  # no lock was left behind


@pytest.mark.parametrize("witness", WITNESSES[:2] + OTHERS)
def test_another_ledger_of_the_same_length_is_refused(folder, witness):
    finish(folder, 1, 2, 3)
    for other in {*WITNESSES[:2], *OTHERS} - {witness}:
        (folder.path / other).unlink()
    path, bound = folder.path / "ledger.jsonl", folder.read_ledger().bound
    Ledger.create(path, bound)
    with closing(Ledger.open(path)) as ledger:
        for round in (1, 2, 3):
            ledger.append(dataclasses.replace(tiny_event(round), noise_std=9.0))
    assert_refused(f"line 3 is not the one that {witness} saw", folder.read_ledger)


@pytest.mark.parametrize("begun", [False, True])
def test_missing_ledger_is_refused_and_not_made_anew(folder, begun):
    if begun:
        save_rounds(folder, 1)
    path = folder.path / "ledger.jsonl"
    path.unlink()
    for opened in (folder.read_ledger, folder.ledger):
        assert_refused(r"ledger.jsonl: is missing; restore", opened)
    assert not path.exists()


def test_finished_run_is_read_as_it_is_published(folder):
    finish(folder, 1, 2, 3)
    (folder.path / "ledger.json").unlink()
    assert folder.read_ledger().length == 3
    shutil.rmtree(folder.path / "checkpoint")  # as it is published
    assert folder.read_ledger().length == 3


def test_run_whose_budget_allowed_no_round_is_read(folder):
    finish(folder)
    (folder.path / "checkpoint" / "checkpoint.json").unlink(missing_ok=True)
    assert folder.read_ledger().length == 0


@pytest.mark.parametrize("kept", [1, 0])
def test_run_that_its_target_ended_needs_its_events_too(tmp_path, kept):
    config = tiny_config(output=str(tmp_path / "run"), target_epsilon=3.0)
    folder = finish(RunFolder.create(config), 1, 2)
    keep_lines(folder.path / "ledger.jsonl", kept)
    assert_refused(f"line {kept} is the last", folder.read_ledger)
    for other in WITNESSES:
        (folder.path / other).unlink()
    keep_lines(folder.path / "ledger.jsonl", 0)
    assert_refused(r"line 0 is the last, generator.safetens", folder.read_ledger)


# ------------------------------------------------------------------ what is bound


def published(folder: RunFolder, *names: str) -> RunFolder:
    """Removes all that says how long the ledger was, but the given files."""
    for name in {*WITNESSES, *OTHERS} - {*names}:
        (folder.path / name).unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("name", OTHERS)
def test_a_generator_of_another_run_is_refused(tmp_path, name):
    first, second = (
        finish(RunFolder.create(tiny_config(output=str(tmp_path / run), seed=seed)), 1)
        for run, seed in (("first", 1), ("second", 2))
    )
    shutil.copy(second.path / name, first.path / name)
    published(first, name)
    assert_refused(f"line 1 is not the one that {name} saw", first.read_ledger)


@pytest.mark.parametrize("name", OTHERS)
def test_a_generator_that_names_no_ledger_is_refused(folder, name):
    finish(folder, 1)
    write_tensors(folder.path / name, TENSORS)
    assert_refused(f"{name}: does not say under which ledger", folder.read_ledger)


def test_settings_that_were_changed_after_the_start_are_refused(folder):
    finish(folder, 1)
    path = folder.path / "config.json"
    path.write_text(path.read_text().replace('"client"', '"record"'))
    for opened in (folder.read_ledger, folder.ledger):
        assert_refused(r"config.json: is not what the run began with.*restore", opened)


@pytest.mark.parametrize("has_cohort", [True, False])
def test_a_cohort_can_neither_be_added_nor_taken_away(tmp_path, has_cohort):
    cohort = tmp_path / "cohort.txt"
    cohort.write_text("1\n2\n")
    config = tiny_config(output=str(tmp_path / "run"))
    given = {"cohort": str(cohort)} if has_cohort else {}
    folder = RunFolder.create(dataclasses.replace(config, **given))
    if has_cohort:
        (folder.path / "cohort.txt").unlink()
    else:
        shutil.copy(cohort, folder.path)
    assert_refused("cohort.txt: is not what the run began with", folder.ledger)


def test_a_ledger_without_its_first_line_is_refused(folder):
    finish(folder, 1, 2)
    path = folder.path / "ledger.jsonl"
    path.unlink()
    with closing(Ledger.open(path)) as ledger:
        ledger.append(tiny_event(1), tiny_event(2))
    assert_refused(r"lost its first line.*restore", folder.read_ledger)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_std": 9.0},
        {"noise_source": "os"},
        {"batch_size": 5},
        {"clip_bound": 2},
    ],
)
def test_an_event_of_other_terms_than_the_settings_is_refused(folder, changes):
    with closing(folder.ledger()) as ledger:
        ledger.append(tiny_event(1), dataclasses.replace(tiny_event(2), **changes))
    (name,) = changes
    assert_refused(f"line 2: {name} = .*settings say", folder.read_ledger)


def test_a_line_of_metrics_says_how_long_the_ledger_was(folder):
    """A repeated round is in no other file before the next start or checkpoint."""
    with closing(folder.ledger()) as ledger:
        for _ in range(2):
            ledger.append(tiny_event(1))
            folder.append_metrics({"round": 1, "events": ledger.length})
    keep_lines(folder.path / "ledger.jsonl", 1)
    assert_refused(r"line 1 is the last, metrics.jsonl saw 2", folder.read_ledger)


def test_every_opening_and_commit_records_the_ledgers_length(folder):
    def recorded() -> dict:
        return read_json(folder.path / "ledger.json")

    with closing(folder.ledger()) as ledger:
        assert recorded() == {"length": 0, "head": ledger.head, "round": 0}
        ledger.append(tiny_event(1))
        folder.save_checkpoint(1, TENSORS, ledger)
        assert (recorded()["length"], recorded()["round"]) == (1, 1)
        ledger.append(tiny_event(2))
    with closing(folder.ledger()) as ledger:
        assert (recorded()["length"], recorded()["head"]) == (2, ledger.head)
        folder.save_generator(TENSORS, TENSORS, ledger)
    with closing(folder.ledger()):  # a resumption of a finished run
        assert (recorded()["length"], recorded()["round"]) == (2, 1)


def test_full_disk_at_the_start_leaves_no_lock(folder, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_json", full)
        assert_refused(r"ledger.json: cannot be written .*free", folder.ledger)
    folder.ledger().close()


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


# ------------------------------------------------------------------ crashes


def test_crash_before_the_commit_leaves_the_checkpoint_before_it(folder, monkeypatch):
    save_rounds(folder, 1)

    def crash(path: Path, content: dict) -> None:
        if path.name == "checkpoint.json":
            raise KeyboardInterrupt
        write_json(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_json", crash)
        with pytest.raises(KeyboardInterrupt):
            save_rounds(folder, 5)
    assert load(folder)[0] == 1


def test_leftover_of_a_crash_does_not_displace_a_later_commit(folder):
    save_rounds(folder, 1)
    write_tensors(folder.path / "checkpoint" / "round-0000005.safetensors", TENSORS)
    save_rounds(folder, 3)
    assert load(folder)[0] == 3


def test_generator_file_is_the_last_one_written(folder, monkeypatch):
    written = []
    monkeypatch.setattr(
        run_folder, "write_tensors", lambda path, *_, **__: written.append(path.name)
    )
    with closing(folder.ledger()) as ledger:
        folder.save_generator(TENSORS, TENSORS, ledger)
    assert written == ["generator_ema.safetensors", "generator.safetensors"]


# ------------------------------------------------------------------ node states


def with_states(private: Path, node: int, rounds: list[int]) -> Path:
    for round in rounds:
        write_tensors(state_path(run_folder.node_folder(private, node), round), TENSORS)
    return run_folder.node_folder(private, node)


def test_no_flipped_bit_gives_another_state(tmp_path):
    tensors = TENSORS | {"count": torch.tensor(3), "none": torch.empty(0)}
    path, metadata = tmp_path / "state", {"digest": "ab", "count": "1"}
    write_tensors(path, run_folder.sealed(tensors, metadata), metadata)
    found, known = run_folder.read_state(path)
    assert known == metadata
    assert_same(found, tensors)
    content, refused = path.read_bytes(), 0
    for place, bit in itertools.product(range(len(content)), range(8)):
        other = bytearray(content)
        other[place] ^= 1 << bit
        path.write_bytes(other)
        try:
            found, known = run_folder.read_state(path)
        except UserError:
            refused += 1
            continue
        # The name of the hash itself: it is taken for a state of an earlier version.
        assert known == metadata
        assert_same({name: found[name] for name in tensors}, tensors)
    assert refused > 7.5 * len(content)


def assert_same(found: TensorDict, expected: TensorDict) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], value) for n, value in expected.items())


def test_a_state_of_an_earlier_version_has_no_hash_and_is_read(tmp_path):
    write_tensors(tmp_path / "state", TENSORS, {"digest": "ab"})
    found, metadata = run_folder.read_state(tmp_path / "state")
    assert metadata == {"digest": "ab"}
    assert_same(found, TENSORS)


def test_resuming_removes_the_states_that_no_checkpoint_committed(folder):
    nodes = [with_states(folder.private, node, [0, 2, 3, 4]) for node in (0, 11)]
    save_rounds(folder, 3)
    load(folder)
    assert [state_rounds(node) for node in nodes] == [[0, 2, 3]] * 2


def test_without_a_checkpoint_only_the_warm_start_stays(folder):
    node = with_states(folder.private, 0, [0, 1, 2])
    load(folder)
    assert state_rounds(node) == [0]


@pytest.mark.parametrize(
    ("rounds", "committed", "kept"),
    [
        ([1, 2, 3, 4], 2, [2, 3, 4]),
        ([1, 5, 6, 7], 4, [1, 6, 7]),  # last asked long before the commit
        ([5, 6, 7], 4, [6, 7]),
        ([1, 2], 0, [1, 2]),
        ([0, 1, 2, 3], 0, [0, 2, 3]),
        ([3, 4, 5], 5, [4, 5]),
    ],
)
def test_committed_state_and_the_two_newest_are_kept(folder, rounds, committed, kept):
    node = with_states(folder.private, 0, rounds[:-1])
    old = run_folder.old_states(node, committed)
    recycle = old.pop() if old else None
    write_tensors(state_path(node, rounds[-1]), TENSORS, recycle=recycle)
    assert not old
    assert state_rounds(node) == kept


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


def test_line_of_metrics_that_does_not_fit_leaves_no_half_behind(folder):
    """Else the next round's line continues it, and readers lose both."""
    path = folder.path / "metrics.jsonl"
    folder.append_metrics({"round": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = path.stat().st_size + 5
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with pytest.raises(OSError, match="No space left"):
            folder.append_metrics({"round": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder.append_metrics({"round": 3})
    assert path.read_text() == '{"round": 1}\n{"round": 3}\n'


def test_unreadable_tensors_are_a_user_error_with_the_path(tmp_path):
    (tmp_path / "state.safetensors").write_bytes(b"\x80\x04no tensors")
    words, path = "state.safetensors: cannot be read .*restore", "state.safetensors"
    assert_refused(words, run_folder.read_tensors, tmp_path / path)
