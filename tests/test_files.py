"""A power cut: what must survive has its own bytes and all its names on the disk.

A file survives if it was synced before it got its name, and if the folder of the name
was synced afterwards; so does each new folder above it. The order of system calls is
recorded by inode, which a rename keeps.
"""

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fedgs.files import write_tensors
from fedgs.process import make_private
from fedgs.runs.run_folder import RunFolder, node_folder, state_path
from runs import TENSORS, tiny_event
from server.launch.certs import make_certificates
from tiny import tiny_config


class Disk:
    """The order of syncs and new names below a folder.

    Args:
        root: is on the disk already.
        monkeypatch: records for the rest of the test.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.calls: list[tuple[str, int, int]] = []  # what, inode, inode of the folder
        fsync = os.fsync

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            self.calls.append(("sync", os.fstat(descriptor).st_ino, 0))

        monkeypatch.setattr(os, "fsync", synced)
        for name, position in (("mkdir", 0), ("rename", 1), ("replace", 1)):
            monkeypatch.setattr(os, name, self._naming(getattr(os, name), position))

    def _naming(self, call: Callable, position: int) -> Callable:
        """Returns a call that gives the argument at a position its name."""

        def named(*arguments, **options) -> None:
            call(*arguments, **options)
            path = Path(arguments[position])
            inodes = path.stat().st_ino, path.parent.stat().st_ino
            self.calls.append(("name", *inodes))

        return named

    def syncs(self, inode: int) -> list[int]:
        return [i for i, call in enumerate(self.calls) if call[:2] == ("sync", inode)]

    def named(self, path: Path) -> int:
        """When the path got its name: its last rename, or it was made and synced."""
        inode, folder = path.stat().st_ino, path.parent.stat().st_ino
        call = ("name", inode, folder)
        found = [i for i, other in enumerate(self.calls) if other == call]
        return found[-1] if found else min(self.syncs(inode), default=-1)

    def lost(self, path: Path, before: int | None = None) -> list[str]:
        """What a power cut could take of a path, now or just before a call."""
        end = len(self.calls) if before is None else before
        problems = []
        if stat.S_ISREG(path.stat().st_mode):
            # Without a later commit the name itself is the commit.
            last = self.named(path) if before is None else before
            if not [i for i in self.syncs(path.stat().st_ino) if i <= last]:
                problems.append(f"{path}: its bytes")
        while path != self.root:
            named = self.named(path)
            synced = self.syncs(path.parent.stat().st_ino)
            if not [i for i in synced if named < i < end]:
                problems.append(f"{path}: its name")
            path = path.parent
        return problems


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


def create(tmp_path: Path) -> RunFolder:
    own = tmp_path / "mine.txt"
    own.write_text("1\n4\n")
    output = str(tmp_path / "new" / "runs" / "run")
    return RunFolder.create(
        tiny_config(output=output, cohort=str(own), num_clients=2, clients_per_round=2)
    )


def test_a_run_folder_survives_in_the_order_of_its_commits(tmp_path, disk):
    folder = create(tmp_path)
    for path in sorted(folder.path.rglob("*")):
        assert disk.lost(path) == []
    state = state_path(node_folder(folder.private, 0), 1)
    write_tensors(state, TENSORS)
    with closing(folder.ledger()) as ledger:
        ledger.append(tiny_event(1))
        folder.save_checkpoint(1, TENSORS, ledger)
        checkpoint = folder.path / "checkpoint"
        commit = checkpoint / "checkpoint.json"
        (tensors,) = checkpoint.glob("round-*.safetensors")
        for path in (state, tensors, ledger.path):
            assert disk.lost(path, before=disk.named(commit)) == []
        assert disk.lost(commit) == []
        folder.save_generator(TENSORS, TENSORS, ledger)
    last = folder.path / "generator.safetensors"  # says that the run is complete
    for name in ("generator_ema.safetensors", "ledger.json"):
        assert disk.lost(folder.path / name, before=disk.named(last)) == []
    assert disk.lost(last) == []


def test_the_folder_of_a_client_and_its_keys_survive(tmp_path, disk):
    state = tmp_path / "far" / "state"
    make_private("state_dir", state)
    make_certificates(tmp_path / "certs", ["localhost"], ["ann"])
    for path in (state, *(tmp_path / "certs").rglob("*.*")):
        assert disk.lost(path) == []
    assert state.stat().st_mode & 0o777 == 0o700


def test_a_deployed_run_survives_on_the_server_and_on_its_clients(deploy, monkeypatch):
    run = deploy()
    shutil.rmtree(run.folder.path)
    disk = Disk(run.root, monkeypatch)
    run.folder = RunFolder.create(run.folder.config)
    run.start()
    server, client = run.folder.path, run.clients[0].state_dir
    names = ("config.json", "ledger.jsonl", "deployment.json", "checkpoint/*.json")
    found = [path for name in names for path in server.glob(name)]
    assert len(found) == 4
    found += client.glob("*/run.json")
    found += client.glob("*/node-*/round-*.safetensors")
    found += client.glob("releases/*.json*")
    assert len(found) == 10  # three states and two files of the count
    for path in found:
        assert disk.lost(path) == []
