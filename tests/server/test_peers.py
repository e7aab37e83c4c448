"""A client that stands still in its upload or sends too much: real processes."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clients.client_command import ClientOptions
from hosts import PATIENCE
from live import Live, prepare
from runs import json_lines, rounds_done

pytestmark = pytest.mark.slow

# A client that stops itself in its next upload once a file `stop` is there: its answer
# is counted and announced, and none of its parts has left.
STOPS_IN_ITS_UPLOAD = """
import os, pathlib, signal
from clients import resident
from flwr.supernode.fleet_http_client import FleetHttpClient

push = FleetHttpClient.PushObject

def stop(self, request):
    try:
        pathlib.Path("stop").rename("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
    except FileNotFoundError:
        pass
    return push(self, request)

FleetHttpClient.PushObject = stop
resident.main()
"""


class Site(Live):
    """One server that runs, and two clients, on this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.certify()
        self.server = self.serve()

    def start_client(
        self, name: str, code: str = "from clients import resident; resident.main()"
    ):
        command, environment = ClientOptions(
            name=name,
            data=f"npz:{self.folder}/{name}.npz",
            server=f"127.0.0.1:{self.port}",
            state=self.folder / f"fedgs-client-{name}",
            ca=self.folder / "certs/ca.crt",
            key=self.folder / f"certs/clients/{name}.key",
            limits=self.folder / "limits.toml",
        ).command()
        arguments = command[command.index("clients.resident") + 1 :]
        command = [sys.executable, "-c", code, *arguments]
        return self.machines.launch(name, command, environment)

    def metrics(self) -> list[dict]:
        return json_lines(self.run / "metrics.jsonl")


@pytest.fixture(name="site")
def fixture_site(tmp_path) -> Iterator[Site]:
    site = Site(prepare(tmp_path))
    yield site
    site.machines.close()


def stop_in_upload(site: Site, client) -> int:
    """Has a client stop in its next upload; returns how many rounds there are then."""
    (site.folder / "stop").touch()
    site.until((site.folder / "stopped").exists, site.server, client)
    return rounds_done(site.run)


def test_a_client_that_stands_still_in_its_upload_is_not_waited_for_long(site):
    """Flower waits for its parts in the same call as for others': up to the limit."""
    limit = 25.0
    run = site.start_run(min_answers=1, round_timeout=limit, num_rounds=12)
    a, b = site.start_client("a"), site.start_client("b", STOPS_IN_ITS_UPLOAD)
    site.until_round(3, site.server, a, b)
    before, started = stop_in_upload(site, b), time.monotonic()
    site.until_round(before + 1, site.server, a)
    assert time.monotonic() - started < 2 * limit + 16  # with a round's own work
    assert site.metrics()[before]["num_answers"] == 1
    b.send_signal(signal.SIGCONT)
    site.until(lambda: site.metrics()[-1]["num_answers"] == 2, site.server, a, b)
    assert run.wait(PATIENCE) == 0, site.machines.logs()


# A client whose second answer is of 300 MB.
SENDS_TOO_MUCH = """
from clients import client_app, resident

encode = client_app.encode_answer

def encode_too_much(answer, config, request):
    payload = encode(answer, config, request)
    return payload | {"tensors": bytes(300_000_000)} if request.round == 2 else payload

client_app.encode_answer = encode_too_much
resident.main()
"""


def test_an_answer_that_is_far_too_large_costs_the_server_nothing(site):
    run = site.start_run(min_answers=1, round_timeout=15, num_rounds=3)
    clients = site.start_client("a"), site.start_client("b", SENDS_TOO_MUCH)
    pids = site.wait_for("superlink", "serverapp")
    site.until_round(1, site.server, *clients)
    before = {role: psutil.Process(pids[role]).memory_info().rss for role in pids}
    most = dict(before)
    while run.poll() is None:
        for role in ("superlink", "serverapp"):
            with contextlib.suppress(psutil.NoSuchProcess):
                now = psutil.Process(pids[role]).memory_info().rss
                most[role] = max(most[role], now)
        time.sleep(0.02)
    assert run.returncode == 0, site.machines.logs()
    assert [line["num_answers"] for line in site.metrics()][1] == 1
    assert "413" in site.log(site.server)
    for role in before:
        assert most[role] - before[role] < 60e6, role
