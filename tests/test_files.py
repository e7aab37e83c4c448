"""A power cut: what must survive has its own bytes and all its names on the disk.

A file survives if it was synced before it got its name, and if the folder of the name
was synced afterwards; so does each new folder above it. The order of system calls is
recorded by inode, which a rename keeps.
"""

import os
import shutil
import stat
from contextlib import closing
from pathlib import Path

import pytest

from fedgs.files import write_tensors
from fedgs.privacy.client_ledger import ClientLedger
from fedgs.privacy.client_limits import Limits
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
        real = {name: getattr(os, name) for name in ("fsync", "mkdir")}
        real |= {name: getattr(os, name) for name in ("rename", "replace")}

        def fsync(descriptor: int) -> None:
            real["fsync"](descriptor)
            self.calls.append(("sync", os.fstat(descriptor).st_ino, 0))

        def mkdir(path, *arguments, **options) -> None:
            real["mkdir"](path, *arguments, **options)
            self._named(path)

        def renaming(name):
            def rename(source, target, **options) -> None:
                real[name](source, target, **options)
                self._named(target)

            return rename

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "mkdir", mkdir)
        monkeypatch.setattr(os, "rename", renaming("rename"))
        monkeypatch.setattr(os, "replace", renaming("replace"))

    def _named(self, path) -> None:
        path = Path(path)
        inodes = path.stat().st_ino, path.parent.stat().st_ino
        self.calls.append(("name", *inodes))

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


def test_a_new_run_folder_survives(tmp_path, disk):
    folder = create(tmp_path)
    for path in sorted(folder.path.rglob("*")):
        assert disk.lost(path) == []


def test_a_checkpoint_survives_in_the_order_of_its_commit(tmp_path, disk):
    folder = create(tmp_path)
    state = state_path(node_folder(folder.private, 0), 1)
    write_tensors(state, TENSORS)
    with closing(folder.ledger()) as ledger:
        ledger.append(tiny_event(1))
        folder.save_checkpoint(1, TENSORS, ledger)
    checkpoint = folder.path / "checkpoint"
    commit = disk.named(checkpoint / "checkpoint.json")
    (tensors,) = checkpoint.glob("round-*.safetensors")
    for path in (state, tensors, folder.path / "ledger.jsonl"):
        assert disk.lost(path, before=commit) == []
    assert disk.lost(checkpoint / "checkpoint.json") == []


def test_the_product_survives_before_it_says_that_the_run_is_complete(tmp_path, disk):
    folder = create(tmp_path)
    with closing(folder.ledger()) as ledger:
        folder.save_generator(TENSORS, TENSORS, ledger)
    last = folder.path / "generator.safetensors"
    for name in ("generator_ema.safetensors", "ledger.json"):
        assert disk.lost(folder.path / name, before=disk.named(last)) == []
    assert disk.lost(last) == []


def test_what_a_client_keeps_survives(tmp_path, disk):
    """A node's state before its answer leaves, the client's count, its keys."""
    state, folder = tmp_path / "far" / "state", tmp_path / "far" / "releases"
    make_private("state_dir", state)
    write_tensors(state_path(state, 1), TENSORS, is_durable=True)
    ClientLedger(folder, [*"abcdef"]).charge(tiny_event(1), Limits())
    make_certificates(tmp_path / "certs", ["localhost"], ["ann"])
    kept = [path for path in tmp_path.rglob("[!.]*.*") if path.is_file()]
    assert {"clients.json", "releases-00000.jsonl"} < {path.name for path in kept}
    for path in (state, *kept):
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
