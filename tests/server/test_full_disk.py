"""A server whose disk is really full: the reason is told where there is room."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from events import read_events
from experiments.commands.deploy_status import status_of
from fedgs.privacy.ledger import Ledger
from runs import rounds_done

pytestmark = [pytest.mark.multihost, pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """The folder of runs is a file system of 24 MB; Flower's database is elsewhere."""
    place = tmp_path / "fedgs-server" / "runs"
    place.mkdir(mode=0o700, parents=True)
    place.parent.chmod(0o700)
    options = ["-t", "tmpfs", "-o", "size=24m,mode=700", "fedgs-test", str(place)]
    mounted = subprocess.run(["mount", *options], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(folder).free == 0
    return path


def test_reason_reaches_the_servers_stderr_and_flowers_status(small_disk, deployment):
    machines = deployment.machines
    server = deployment.serve("--log-json", "server.jsonl")
    deployment.join("a")
    deployment.join("b")
    submitted = deployment.start_run(num_rounds=500, checkpoint_every=1)
    deployment.until_round(2, server, submitted)
    filler = fill(small_disk)
    assert submitted.wait(300) == 1, machines.logs()
    reason = "No space left on device"
    assert reason in machines.log_of(submitted), machines.logs()
    assert reason in machines.log_of(server), machines.logs()
    events = read_events(machines.folder / "server.jsonl")
    (ended,) = [event for event in events if event["event"] == "ended"]
    assert ended["outcome"] == "failed"
    assert reason in ended["reason"]
    status = status_of(deployment.run)
    assert status.state == "interrupted"
    assert status.waiting_for == ()
    assert status.released == len(Ledger.read(deployment.run / "ledger.jsonl").events)
    filler.unlink()
    again = deployment.submit("--resume", "digits")
    done = rounds_done(deployment.run)
    deployment.until_round(done + 2, server, again)
