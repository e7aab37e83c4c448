"""Fast messages: when they are installed, and that every message still arrives.

That results are those of the stock path is tested by test_flower.py: its runs use
either path and all equal the local engine.
"""

import threading
import time
from queue import Queue
from types import SimpleNamespace

import flwr
import pytest
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from clients import flower_1_41
from fedgs.process import FAST_VARIABLE


@pytest.fixture
def installed(monkeypatch):
    """Installs the fast path on a grid that only names its messages; then undoes it."""
    names = {vce_api: "add_messages_to_queue", InMemoryGrid: "push_messages"}
    for owner, name in names.items():
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("process_message", "num_workers"):
        monkeypatch.setattr(RayBackend, name, getattr(RayBackend, name))
    monkeypatch.setattr(
        InMemoryGrid, "push_messages", lambda self, sent: [str(m) for m in sent]
    )
    monkeypatch.setattr(InMemoryGrid, "wait_for_reply", None, raising=False)
    monkeypatch.setattr(
        InMemoryLinkState, "store_message_res", lambda self, reply: f"stored {reply}"
    )
    flower_1_41.install_fast_messages()


def message(node):
    return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node))


class State:
    """A link state: messages of each node, taken out one at a time."""

    def __init__(self, **waiting):
        self.waiting = {int(node[1:]): list(m) for node, m in waiting.items()}

    def get_message_ins(self, node_id, limit):
        waiting = self.waiting.get(node_id, [])
        return [waiting.pop(0) for _ in range(min(limit, len(waiting)))]


@pytest.fixture
def extract():
    """Runs the installed loop in a thread."""
    stop, queue, threads = threading.Event(), Queue(), []

    def extract(state, nodes):
        arguments = (state, queue, dict.fromkeys(nodes, 0), stop)
        loop = threading.Thread(
            target=vce_api.add_messages_to_queue, args=arguments, daemon=True
        )
        loop.start()
        threads.append(loop)
        return queue

    yield extract
    stop.set()
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("variable", "version", "expected"),
    [
        ("1", f"{flower_1_41.KNOWN_VERSION}0", True),
        ("1", "1.42.0", False),
        ("0", f"{flower_1_41.KNOWN_VERSION}0", False),
        (None, f"{flower_1_41.KNOWN_VERSION}0", False),
    ],
)
def test_wanted_only_when_asked_for_and_only_in_a_known_version(
    monkeypatch, caplog, variable, version, expected
):
    monkeypatch.setattr(flwr, "__version__", version)
    monkeypatch.delenv(FAST_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(FAST_VARIABLE, variable)
    monkeypatch.setattr(flwr.common.logger.FLOWER_LOGGER, "propagate", True)
    installed: list[bool] = []
    monkeypatch.setattr(
        flower_1_41, "install_fast_messages", lambda: installed.append(True)
    )
    flower_1_41.hasten_simulation()
    assert bool(installed) is expected
    warned = "fast_messages" in caplog.text
    assert warned is (version == "1.42.0")


def test_the_pinned_flower_is_the_known_version():
    assert flwr.__version__.startswith(flower_1_41.KNOWN_VERSION)


@pytest.mark.usefixtures("installed")
def test_a_pushed_message_is_handed_over_at_once(extract):
    state = State()
    queue = extract(state, [1, 2])
    time.sleep(0.05)
    state.waiting[2] = ["a"]
    started = time.monotonic()
    assert InMemoryGrid.push_messages(None, [message(2)])
    assert queue.get(timeout=5) == "a"
    assert time.monotonic() - started < flower_1_41.SCAN_SECONDS / 2


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("is_early", [True, False])
def test_a_reply_wakes_the_server(is_early):
    started = time.monotonic()
    reply = threading.Timer(0.05, InMemoryLinkState.store_message_res, (None, "a"))
    if is_early:
        assert InMemoryLinkState.store_message_res(None, "a") == "stored a"
    else:
        reply.start()
    InMemoryGrid.wait_for_reply(None, 30.0)
    assert time.monotonic() - started < 15
    reply.cancel()
    started = time.monotonic()
    InMemoryGrid.wait_for_reply(None, 0.05)  # no other one: it waits its time
    assert time.monotonic() - started >= 0.04


@pytest.mark.usefixtures("installed")
def test_several_messages_of_one_node_all_arrive(extract):
    queue = extract(State(n1="abc", n2="d"), [1, 2])
    InMemoryGrid.push_messages(None, [message(n) for n in (1, 2, 1, 1)])
    assert sorted(queue.get(timeout=5) for _ in range(4)) == ["a", "b", "c", "d"]


@pytest.mark.usefixtures("installed")
def test_messages_from_before_are_found_by_the_scan(extract):
    assert extract(State(n7="z"), [7]).get(timeout=5) == "z"


@pytest.mark.usefixtures("installed")
def test_a_node_keeps_its_worker(monkeypatch):
    seen = []

    def worker(name):
        def remote(app_fn, message, partition, context):
            seen.append((name, partition))
            return partition, message, context

        return SimpleNamespace(run=SimpleNamespace(remote=remote))

    monkeypatch.setattr("ray.get", lambda future: future)
    pool = SimpleNamespace(pool=[worker("a"), worker("b")], num_actors=2)
    backend = SimpleNamespace(pool=pool, app_fn=None)
    for partition in (0, 1, 2, 3, 0, 1):
        context = SimpleNamespace(node_config={"partition-id": partition})
        reply = RayBackend.process_message(backend, "message", context)
        assert reply == ("message", context)
    assert seen == [(("a", "b")[int(p) % 2], p) for p in "012301"]
    assert RayBackend.num_workers.fget(backend) == 4
