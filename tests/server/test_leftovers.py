"""What a killed save leaves behind is removed when the folder's owner starts again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clients import deployed_client as deployment
from clients.deployed_client import DeploymentConfig
from fedgs.files import remove_temporaries, write_atomically, write_tensors
from fedgs.process import hold_lock
from fedgs.runs.run_folder import RunFolder, node_folder, state_path
from refusals import assert_refused
from runs import TENSORS
from tiny import tiny_config

KILLED = """
import os, sys
from pathlib import Path
from fedgs.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), 9)
"""


def killed_save(path: Path) -> Path:
    """What a save of that file by a killed process leaves behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left = path.with_name(f".{path.name}.12345")
    left.write_bytes(b"half")
    return left


def test_a_save_that_is_killed_leaves_what_is_removed(tmp_path):
    (tmp_path / "a.json").write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a.json")])
    assert done.returncode == -9
    assert len(os.listdir(tmp_path)) == 2
    (tmp_path / ".lock").touch()
    remove_temporaries(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", "a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"old"


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """A full disk, also where an old file was to be overwritten: a reader has that."""

    def full(descriptor):
        raise OSError(28, "No space left on device")

    write_atomically(tmp_path / "old", b"old")
    (tmp_path / "spare").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_tensors(
            tmp_path / "new", TENSORS, recycle=tmp_path / "spare", is_durable=True
        )
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "old", b"new")
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"


def test_a_run_that_goes_on_removes_what_its_killed_process_wrote(tmp_path):
    folder = RunFolder.create(tiny_config(output=str(tmp_path / "run")))
    states = node_folder(folder.private, 3)
    write_tensors(state_path(states, 0), TENSORS)
    names = ("checkpoint/round-0000001.safetensors", "checkpoint/checkpoint.json")
    names += ("generator.safetensors", "metrics.jsonl", ".flower/nodes.json")
    names += ("samples/round-0000001.png", state_path(states, 1))
    left = [killed_save(folder.path / name) for name in names]
    others = killed_save(folder.path / "my-picture.png")  # of `fedgs sample`, at work
    with folder.locked():
        folder.load_checkpoint()
    assert [path for path in left if path.exists()] == []
    assert others.exists()
    assert state_path(states, 0).exists()


def test_a_client_that_starts_again_removes_what_its_killed_process_wrote(
    tmp_path, monkeypatch
):
    """But not while another process of this client may be writing it."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    run = state / ("0" * 16)
    left = [
        killed_save(run / "run.json"),
        killed_save(state_path(node_folder(run, 0), 7)),
        killed_save(state / "releases" / "clients.json"),
    ]
    own = state_path(node_folder(run, 0), 6)
    write_tensors(own, TENSORS)
    monkeypatch.setattr(deployment, "CLIENT_LOCK_SECONDS", 0.0)
    with hold_lock(state / ".client.lock", ""):
        assert_refused(
            "another client process", DeploymentConfig("ann", state, {}).open
        )
    assert all(path.exists() for path in left)
    DeploymentConfig("ann", state, {}).open()
    assert not any(path.exists() for path in left)
    assert own.exists()
