"""What makes Flower faster: when it is installed, and that every message still arrives.

That results are those of the stock path is tested by test_flower.py: its runs use
either path and all equal the local engine.
"""

import threading
import time
from importlib import import_module
from queue import Queue
from types import SimpleNamespace

import pytest
from flwr.common.logger import FLOWER_LOGGER
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.supercore.inflatable import inflatable_utils
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from clients import flower_speed
from clients.flower_speed import (
    DASHBOARD,
    PULLS,
    RESIDENT,
    SIMULATION,
    is_possible,
    silence_ray,
)
from fedgs.process import FAST_VARIABLE
from server.launch.flower_engine import MANY_ROUNDS, hastening
from tiny import run_config

# ------------------------------------------------------------------ by feature


@pytest.mark.parametrize("needed", [SIMULATION, RESIDENT, PULLS, DASHBOARD])
def test_this_flower_has_what_is_replaced(needed):
    """Run with the pinned Flower and with the newest one: `make check-flower`."""
    assert is_possible("it", needed)


@pytest.mark.parametrize(
    "missing",
    [
        {"flwr.no_such_module:f": None},
        {"flwr.supercore.inflatable.inflatable_utils:no_such_function": None},
        {"flwr.supercore.inflatable.inflatable_utils:pull_objects": "object_ids"},
        {"flwr.supercore.inflatable.inflatable_utils:PULL_MAX_TIME": "not a function"},
    ],
)
def test_what_another_flower_has_not_is_left_out_with_a_warning(
    monkeypatch, caplog, missing
):
    monkeypatch.setattr(FLOWER_LOGGER, "propagate", True)
    assert not is_possible("it", PULLS | missing)
    (place,) = missing
    assert f"it is not possible, because the installed Flower has no {place}" in (
        caplog.text
    )


@pytest.mark.parametrize(("variable", "is_fast"), [("1", True), ("0", False)])
def test_the_launcher_of_a_simulation_switches_it(monkeypatch, variable, is_fast):
    monkeypatch.setenv(FAST_VARIABLE, variable)
    installed: list[bool] = []
    monkeypatch.setattr(
        flower_speed, "install_fast_messages", lambda: installed.append(True)
    )
    flower_speed.hasten_simulation()
    assert bool(installed) is is_fast


@pytest.mark.parametrize(
    ("variable", "num_rounds", "expected"),
    [
        (None, 5, "0"),
        (None, MANY_ROUNDS - 1, "0"),
        (None, MANY_ROUNDS, "1"),
        ("1", 5, "1"),
        ("0", MANY_ROUNDS, "0"),
    ],
)
def test_messages_are_hastened_in_runs_of_many_rounds(
    monkeypatch, variable, num_rounds, expected
):
    monkeypatch.delenv(FAST_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(FAST_VARIABLE, variable)
    assert hastening(run_config(num_rounds=num_rounds)) == expected


def test_ray_asks_no_cloud_of_a_device_that_may_be_a_tpu(monkeypatch):
    """A group of VFIO, by which a host gives any device to a guest, is one to Ray."""
    from ray._private import accelerators
    from ray._private.node import Node
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    def found() -> object:
        return ResourceAndLabelSpec._get_current_node_accelerator(0, {})[0]

    tpu = accelerators.TPUAcceleratorManager
    monkeypatch.setattr(tpu, "get_current_node_num_accelerators", lambda: 4)
    monkeypatch.setattr(Node, "start_api_server", Node.start_api_server)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1,2,3")
    assert found() is tpu  # of which Ray goes on to ask the cloud
    silence_ray()
    assert found() is None


def test_parts_on_their_way_are_looked_for_soon_and_not_for_ever(monkeypatch):
    defaults = dict(inflatable_utils.pull_objects.__kwdefaults__)
    monkeypatch.setattr(inflatable_utils.pull_objects, "__kwdefaults__", defaults)
    flower_speed.hasten_pulls(0.2)
    looks: list[str] = []

    def not_yet(name: str) -> bytes:
        looks.append(name)
        if len(looks) < 3:
            raise inflatable_utils.ObjectUnavailableError(name)
        return b"there"

    def never(name: str) -> bytes:
        raise inflatable_utils.ObjectUnavailableError(name)

    started = time.monotonic()
    assert inflatable_utils.pull_objects(["a"], not_yet) == {"a": b"there"}
    with pytest.raises(inflatable_utils.ObjectPullError):
        inflatable_utils.pull_objects(["a"], never)
    assert time.monotonic() - started < 1  # Flower's first pause alone


# ------------------------------------------------------------------ simulation


@pytest.fixture
def installed(monkeypatch):
    """Installs the fast path on a grid that only names its messages; then undoes it."""
    for place in SIMULATION:
        module, _, name = place.partition(":")
        owner, _, name = name.rpartition(".")
        owner = getattr(import_module(module), owner) if owner else vce_api
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(
        InMemoryGrid, "push_messages", lambda self, sent: [str(m) for m in sent]
    )
    flower_speed.install_fast_messages()


def message(node):
    return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node))


class State:
    """A link state: messages of each node, taken out one at a time."""

    def __init__(self, **waiting):
        self.waiting = {int(node[1:]): list(m) for node, m in waiting.items()}

    def get_message_ins(self, node_id, limit):
        waiting = self.waiting[node_id]
        return [waiting.pop(0) for _ in range(min(limit, len(waiting)))]


@pytest.mark.usefixtures("installed")
def test_pushed_messages_arrive_at_once_and_those_from_before_as_well():
    stop, queue, nodes = threading.Event(), Queue(), dict.fromkeys((1, 2, 7), 0)
    arguments = State(n1="abc", n2="d", n7="z"), queue, nodes, stop
    loop = threading.Thread(target=vce_api.add_messages_to_queue, args=arguments)
    loop.start()
    try:
        started = time.monotonic()
        InMemoryGrid.push_messages(None, [message(n) for n in (1, 2, 1, 1)])
        assert sorted(queue.get(timeout=5) for _ in range(4)) == ["a", "b", "c", "d"]
        assert time.monotonic() - started < flower_speed.SCAN_SECONDS / 2
        assert queue.get(timeout=5) == "z"
    finally:
        stop.set()
        loop.join(timeout=5)
    assert not loop.is_alive()


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
