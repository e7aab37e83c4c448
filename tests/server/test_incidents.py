"""Incidents of a deployment of three hosts: `make incidents`.

The run is disturbed, goes on as docs/deployment.md says, and ends with the bytes of the
local engine, which nothing disturbed; the server's ledger shows every release that the
clients counted; nothing is left over. Needs root; skipped where network namespaces or
mounts are not permitted.
"""

import contextlib
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgs.privacy.ledger import Ledger
from fedgs.runs.run_folder import RunFolder
from hosts import PATIENCE, Network, ip
from live import CLIENTS, Live, prepare
from runs import generator, json_lines, undisturbed

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

STRIKE = 4  # the round after which an incident happens
LINK_DOWN_SECONDS = 6.0
ANSWER_KEYS = {"time", "event", "node", "round", "outcome", "seconds"}


class Site(Live):
    """A server and two clients on three hosts, and a run that has some rounds."""

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder, network)
        self.network, self.kills = network, Counter[str]()

    def begin(self) -> None:
        hosts = ["--host", self.address, "--client", "a", "--client", "b"]
        self.machines.run("server", "deploy", "certs", "certs", *hosts)
        self.server = self.serve("--log-json", "server.jsonl")
        self.clients = {name: self.join(name) for name in CLIENTS}
        self.submitted = self.start_run()
        self.until_round(STRIKE, self.server, *self.clients.values())

    def go_on(self) -> None:
        """What systemd and a person do."""
        if self.server.poll() is not None:
            self.server = self.serve("--log-json", "server.jsonl")
        assert self.submitted.wait(PATIENCE) == 1, self.machines.logs()
        assert "continue with: fedgs deploy submit" in self.log(self.submitted)
        self.submitted = self.submit("--resume", "digits")

    def counted(self, client: str) -> Path:
        """A client's own count of its releases."""
        state = self.folder / f"fedgs-client-{client}" / "releases"
        return state / "releases-00000.jsonl"

    def pids(self) -> list[str]:
        spaces = self.network.spaces.values()
        commands = (["ip", "netns", "pids", space] for space in spaces)
        return [pid for c in commands for pid in subprocess.check_output(c).split()]

    def finish(self) -> None:
        """The run ends as if nothing had happened, and leaves nothing."""
        assert self.submitted.wait(PATIENCE) == 0, self.machines.logs()
        self.until((self.run / "generator.safetensors").exists)
        config, data = RunFolder.open(self.run).config, f"npz:{self.folder}/all.npz"
        twin = undisturbed(config, data, self.folder / "local")
        assert generator(self.run) == twin
        events = Ledger.read(self.run / "ledger.jsonl").events
        released = Counter(event.round for event in events)
        assert set(released) == set(range(1, 21))
        for name in CLIENTS:
            own = Counter(e.round for e in Ledger.read(self.counted(name)).events)
            # It counts before it sends: who was killed may have sent one less.
            assert (own - released).total() <= self.kills[name]
        self.check_event_logs()
        processes = (self.server, *self.clients.values())
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in processes] == [0, 0, 0]
        assert self.pids() == []
        paths = self.folder.rglob(".*")
        assert [path for path in paths if path.suffix[1:].isdigit()] == []

    def check_event_logs(self) -> None:
        """Who, which round, outcome and duration are there; nothing else is."""
        of_server = json_lines(self.folder / "server.jsonl")
        rounds = {event["round"] for event in of_server if event["event"] == "round"}
        # A server that is killed may lose the line of its last round.
        assert len(set(range(1, 21)) - rounds) <= 1
        assert {e["node"] for e in of_server if e["event"] == "joined"} == {"a", "b"}
        for name in CLIENTS:
            events = json_lines(self.folder / f"{name}.jsonl")
            answers = [event for event in events if event["event"] == "answer"]
            assert {event["node"] for event in answers} == {name}
            assert {event.get("round") for event in answers} >= set(range(1, 21))
            assert {key for event in answers for key in event} <= ANSWER_KEYS


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """The folder of runs, a file system of 24 MB."""
    place = tmp_path / "fedgs-server" / "runs"
    place.mkdir(mode=0o700, parents=True)
    place.parent.chmod(0o700)
    options = ["-t", "tmpfs", "-o", "size=24m,mode=700", "fedgs-test", str(place)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def site(tmp_path, disk) -> Iterator[Site]:
    with contextlib.closing(Network()) as network:
        site = Site(prepare(tmp_path), network)
        with contextlib.closing(site.machines):
            yield site


def test_killed_server(site):
    site.begin()
    site.machines.kill(site.server)
    site.go_on()
    site.finish()


def test_killed_client(site):
    """After it has counted a release, before it is sent."""
    site.begin()
    size = site.counted("a").stat().st_size
    while site.counted("a").stat().st_size == size:
        time.sleep(0.0005)
    site.machines.kill(site.clients["a"])
    site.kills["a"] += 1
    site.clients["a"] = site.join("a")
    site.finish()


@pytest.mark.parametrize("seed", [0, 1])
def test_everybody_killed_once_at_random_moments(site, seed):
    """The seed decides in which order, and how long after the one before."""
    site.begin()
    rng = random.Random(seed)
    for victim in rng.sample(["server", *CLIENTS], 3):
        time.sleep(rng.uniform(0, 0.5))
        if victim == "server":
            site.machines.kill(site.server)
            site.go_on()
        else:
            site.machines.kill(site.clients[victim])
            site.kills[victim] += 1
            site.clients[victim] = site.join(victim)
    site.finish()


def test_cut_link(site):
    site.begin()
    for state, seconds in (("down", LINK_DOWN_SECONDS), ("up", 0.0)):
        ip(f"{site.network.center} link set to-a {state}")
        time.sleep(seconds)
    site.finish()


def test_full_disk(site, disk):
    site.begin()
    filler = disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(disk).free == 0
    assert site.submitted.wait(PATIENCE) == 1, site.machines.logs()
    reason = "No space left on device"
    assert reason in site.log(site.submitted), site.machines.logs()
    events = json_lines(site.folder / "server.jsonl")
    (ended,) = [event for event in events if event["event"] == "ended"]
    assert (ended["outcome"], reason in ended["reason"]) == ("failed", True)
    filler.unlink()
    site.go_on()
    site.finish()
