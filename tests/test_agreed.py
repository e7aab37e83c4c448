"""What a deployed client agrees to, whatever its server sends or plans."""

import contextlib
import itertools
from pathlib import Path

import numpy as np
import pytest

from clients import state
from clients.deployment import DeployedPlace, Site
from fedgs.client_count import WHOLE, ReleaseCount, release_event
from fedgs.client_limits import ClientRefused, Limits, release_cost
from fedgs.config import RunConfig
from fedgs.data import sources
from fedgs.gaussian import epsilon_from_mu
from fedgs.node import Node
from server.roll_call import public_settings
from tiny import NUM_CLASSES, SIDE, tiny_config

COST = release_cost(0.5, 4)  # of a release of the tiny problem
NUM_RECORDS, TARGET = 24, 0
PEOPLE: list[object] = ["ann", "bob"] * (NUM_RECORDS // 2)
RUNS = itertools.count(1)


@pytest.fixture(autouse=True)
def _no_workers():
    state._workers.clear()
    yield
    state._workers.clear()


def _write_data(folder: Path, clients: list[object] | None = None) -> str:
    """Writes the client's images, with an owner of each or without owners."""
    path = folder / "own.npz"
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_RECORDS, 1, SIDE, SIDE)).astype(np.uint8)
    labels = np.arange(NUM_RECORDS) % NUM_CLASSES
    owners = {} if clients is None else {"clients": np.array(clients)}
    np.savez(path, images=images, labels=labels, **owners)
    return f"npz:{path}"


def _site(
    folder: Path, room: int, clients: list[object] | None = None, **own: object
) -> Site:
    """A client whose limits have room for so many releases of one record."""
    limits, data = folder / "limits.toml", _write_data(folder, clients)
    epsilon = epsilon_from_mu(((room + 0.5) * COST) ** 0.5, 1e-5)
    limits.write_text(
        f'client_epsilon = {epsilon}\ndelta = 1e-5\nrelation = "replace-one"\n'
    )
    values = {"name": "a", "data": data, "state_dir": str(folder / "s")}
    return Site.read(values | {"limits": str(limits)} | own)


def _node(site: Site, num_clients: int, **settings: object) -> Node:
    """Joins a run of its own in which the client hosts so many."""
    config = tiny_config(
        **{"num_clients": num_clients, "node_sizes": str(num_clients)}
        | {"clients_per_round": 1, "nodes": "a", "engine": "flower"}
        | {"noise_seed": None, "data": "digits"}
        | settings
    )
    place = DeployedPlace(site, f"{next(RUNS):016x}")
    place.join(public_settings(config), 0)
    return place.worker().node(0)


def _release(node: Node, clients: list[int]) -> None:
    """Counts what a node does before it releases; nothing is trained."""
    event = release_event(node.config, 1, clients, len(node.hosted))
    node.count.charge(event, node.limits)


def _shard_of(node: Node, record: int) -> int:
    records = node.data.client_records
    return next(c for c in node.hosted if record in records[c])


# ------------------------------------------------------------------ one data set


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_a_record_is_safe_from_servers_that_cut_the_data_anew(tmp_path, partition):
    """24 runs with other seeds and sizes, each asking the shard with one record."""
    site = _site(tmp_path, 3, partition=partition)
    released, shards = 0, set()
    for seed, size in itertools.product(range(6), (3, 4, 6, 8)):
        with contextlib.suppress(ClientRefused):
            node = _node(site, size, seed=seed)
            shards.add(shard := _shard_of(node, TARGET))
            _release(node, [shard])
            released += 1
    assert len(shards) > 1  # by the names of shards, none has released too much
    assert released == 3
    with pytest.raises(ClientRefused, match="the data set has released"):
        _node(site, 2)


def test_whoever_is_asked_a_release_of_shards_counts_for_all(tmp_path):
    node = _node(_site(tmp_path, 3, partition="iid"), 4)
    for shards in ([0], [3], [0, 1, 2, 3]):
        _release(node, shards)
    with pytest.raises(ClientRefused):
        _release(node, [2])


def test_a_partitioner_by_anything_but_natural_names_makes_shards(
    tmp_path, monkeypatch
):
    site = _site(tmp_path, 3, PEOPLE)
    records = sources.load_records(
        RunConfig(data=site.settings["data"], image_size=SIDE)
    )
    monkeypatch.setattr(sources, "load_records", lambda config: records)
    for partitioner, counted in (
        ("DirichletPartitioner", [WHOLE]),
        ("GroupedNaturalIdPartitioner", [WHOLE]),  # groups follow the server's seed
        ("NaturalIdPartitioner", ["ann", "bob"]),
        (None, ["ann", "bob"]),
    ):
        own = {"data": "hf:x", "partitioner": partitioner or ""}
        assert _node(_site(tmp_path, 3, **own), 2).count.clients == counted


def test_releases_of_shards_and_of_named_clients_add_up(tmp_path):
    named = _site(tmp_path, 4, PEOPLE)
    sharded = _site(tmp_path, 4, PEOPLE, partition="iid")
    node = _node(named, 2)
    _release(node, [0])
    _release(node, [1])  # a record is ann's or bob's: it counts once
    for _ in range(3):
        _release(_node(sharded, 4), [1])
    for site, size in ((sharded, 3), (named, 2)):
        with pytest.raises(ClientRefused):
            _node(site, size)
    with pytest.raises(ClientRefused):
        _release(node, [0])


def test_data_without_clients_is_one_client_and_the_whole_data_set(tmp_path):
    _release(_node(_site(tmp_path, 2), 1), [0])
    _release(_node(_site(tmp_path, 2, partition="iid"), 4), [2])
    with pytest.raises(ClientRefused):
        _node(_site(tmp_path, 2), 1)


def _old_count(site: Site, names: list[str], releases: int) -> None:
    """Writes the count of a version that charged shards by their names."""
    site.open()
    count = ReleaseCount(site.state_dir / "releases", names)
    for number in range(releases):
        event = release_event(tiny_config(), 1, [number % len(names)], len(names))
        count.charge(event, Limits())


@pytest.mark.parametrize(
    "own", [{"partition": "iid"}, {"clients": PEOPLE}], ids=["shards", "named"]
)
def test_what_shards_released_under_an_older_version_counts_in_full(tmp_path, own):
    site = _site(tmp_path, 4, **own)
    _old_count(site, ["0", "1", "2"], releases=3)
    node = _node(site, 2)
    _release(node, [0])
    with pytest.raises(ClientRefused):
        _release(node, [0])


def test_what_named_clients_released_under_an_older_version_is_theirs(tmp_path):
    site = _site(tmp_path, 4, PEOPLE)
    _old_count(site, ["ann", "bob"], releases=6)
    node = _node(site, 2)
    _release(node, [0])
    with pytest.raises(ClientRefused, match="client ann"):
        _release(node, [0])
    _release(node, [1])


def test_clients_that_the_data_calls_0_and_1_keep_their_own_counts(tmp_path):
    site = _site(tmp_path, 2, [0, 1] * (NUM_RECORDS // 2))
    for client in (0, 1):
        _release(_node(site, 2), [client])
    node = _node(site, 2)
    for client in (0, 1):
        _release(node, [client])
        with pytest.raises(ClientRefused, match=f"client {client}"):
            _release(node, [client])
