"""What a deployed client agrees to, whatever its server sends or plans."""

import contextlib
import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from clients import agreement
from clients.deployed_client import DeployedClient, DeploymentConfig, agreed
from fedgs.config.run_config import ResolvedConfig
from fedgs.data import sources
from fedgs.deployment import MOST_ANSWER_BYTES
from fedgs.methods.schedule import clients_of, select
from fedgs.privacy.accountant import statements_of_runs
from fedgs.privacy.client_ledger import SHARDED_DATASET, release_event
from fedgs.privacy.client_limits import ClientRefused, Limits, release_cost
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.rounding import upper
from fedgs.privacy.same_clients import Run
from fedgs.round.node import Node
from fedgs.round.preparation import resolve_deployed
from fedgs.round.run import new_event
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from server import nodes
from server.roll_call import public_settings
from tiny import NUM_CLASSES, SIDE, record_calls, run_config, tiny_config

pytestmark = pytest.mark.usefixtures("server_process", "clock")
COST = release_cost(0.5, 4)  # of a release of the tiny problem
NUM_RECORDS, TARGET = 24, 0
PEOPLE: list[object] = ["ann", "bob"] * (NUM_RECORDS // 2)
RUNS = itertools.count(1)


def _write_data(folder: Path, clients: list[object] | None = None) -> str:
    """Writes the client's images, with an owner of each or without owners."""
    path = folder / "own.npz"
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_RECORDS, 1, SIDE, SIDE)).astype(np.uint8)
    labels = np.arange(NUM_RECORDS) % NUM_CLASSES
    owners = {} if clients is None else {"clients": np.array(clients)}
    np.savez(path, images=images, labels=labels, **owners)
    return f"npz:{path}"


OF_A_NODE = (
    "an owner with all images, or a shard, which is no person, if a node's data name "
    "no owners or are cut"
)


def _site(
    folder: Path, room: int, clients: list[object] | None = None, **own: object
) -> DeploymentConfig:
    """A client whose limits have room for so many releases of one record."""
    limits, data = folder / "limits.toml", _write_data(folder, clients)
    epsilon = epsilon_from_mu(((room + 0.5) * COST) ** 0.5, 1e-5)
    limits.write_text(
        f'client_epsilon = {epsilon}\ndelta = 1e-5\nrelation = "replace-one"\n'
    )
    values = {"name": "a", "data": data, "state_dir": str(folder / "s")}
    return DeploymentConfig.read(values | {"limits": str(limits)} | own)


def _node(site: DeploymentConfig, num_clients: int, **settings: object) -> Node:
    """Joins a run of its own in which the client hosts so many."""
    config = tiny_config(
        **{"num_clients": num_clients, "node_sizes": str(num_clients)}
        | {"clients_per_round": 1, "nodes": "a", "engine": "flower"}
        | {"noise_seed": None, "data": "digits"}
        | settings
    )
    place = DeployedClient(site, f"{next(RUNS):016x}")
    joined = place.join(public_settings(config))
    if joined.refusal is not None:
        raise joined.refusal
    return place.worker().node(0)


def _release(node: Node, clients: list[int]) -> None:
    """Counts what a node does before it releases; nothing is trained."""
    event = release_event(node.config, 1, clients, len(node.hosted))
    node.limits.charge(event)


def _shard_of(node: Node, record: int) -> int:
    records = node.data.client_records
    return next(c for c in node.hosted if record in records[c])


# ------------------------------------------------------------------ one data set


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_a_record_is_safe_from_servers_that_cut_the_data_anew(tmp_path, partition):
    """9 runs with other seeds and sizes, each asking the shard with one record."""
    site = _site(tmp_path, 3, partition=partition)
    released, shards = 0, set()
    for seed, size in itertools.product(range(3), (3, 4, 8)):
        with contextlib.suppress(ClientRefused):
            node = _node(site, size, seed=seed)
            shards.add(shard := _shard_of(node, TARGET))
            _release(node, [shard])
            released += 1
    assert len(shards) > 1  # by the names of shards, none has released too much
    assert released == 3
    assert_refused("the data set has released", _node, site, 2)


def test_a_partitioner_not_by_natural_names_makes_shards(tmp_path, monkeypatch):
    site = _site(tmp_path, 3, PEOPLE)
    records = sources.load_records(
        run_config(data=site.settings["data"], image_size=SIDE)
    )
    monkeypatch.setattr(sources, "load_records", lambda config: records)
    for partitioner, counted in (
        ("DirichletPartitioner", [SHARDED_DATASET]),
        ("GroupedNaturalIdPartitioner", [SHARDED_DATASET]),  # by the server's seed
        ("NaturalIdPartitioner", ["ann", "bob"]),
        (None, ["ann", "bob"]),
    ):
        query = f"?partitioner={partitioner}" if partitioner else ""
        own = {"data": f"hf:x{query}"}
        assert _node(_site(tmp_path, 3, **own), 2).limits.count.clients == counted


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


# ------------------------------------------------------------------ who takes part


def test_a_client_learns_of_no_other_who_takes_part(deploy, monkeypatch):
    settings = {"clients_per_round": 3, "clients_per_node": 2, "num_rounds": 3}
    settings["noise_seed"] = None
    run = deploy(mode="selected", **settings)
    packed = record_calls(monkeypatch, nodes, "pack_request")
    told: list[tuple[str, Message]] = []
    run.grid.on_push = lambda name, request: told.append((name, request)) or True
    run.start()
    config, names = run.folder.config, run.folder.config.node_names
    asked = set()
    for name, message in told:
        record = dict(message.content["fedgs"])
        if message.metadata.message_type == "train" and record["round"]:
            hosted = config.hosting.hosted(names.index(name))
            drawn = clients_of(select(config, record["round"]), hosted)
            assert record["participants"] == ",".join(map(str, drawn))
            assert record["trainees"] == record["participants"]
            asked.add((record["round"], name))
        assert config.selection_key not in str(record)
    assert len(asked) > 3  # several nodes in a round
    assert len(packed) <= 3 + 3  # once for each round and warm start, not each node
    joins = [m.content["fedgs"] for _, m in told if "join" in m.metadata.message_type]
    told = [json.loads(str(own["settings"])) for own in joins]
    assert len(told) == 3
    for theirs in map(ResolvedConfig.from_flat, told):
        assert_refused("selection_key is unset", select, theirs, 1)
        guessed = dataclasses.replace(theirs, selection_key=str(config.seed))
        rounds = range(1, 20)
        drawn = [select(config, round) for round in rounds]
        assert drawn != [select(guessed, round) for round in rounds]


def test_the_server_of_a_deployment_draws_the_selection_itself(tmp_path):
    given = {"nodes": "a,b", "engine": "flower", "num_clients": 2, "seed": 5}
    wanted = dataclasses.replace(tiny_config(**given), noise_seed=None)
    keys = set[str]()
    for name in "abc":
        resolved = resolve_deployed(wanted)
        own = dataclasses.replace(resolved, output=str(tmp_path / name))
        config = RunFolder.create(own).config
        keys.add(config.selection_key)
        settings = public_settings(config)
        assert config.selection_key not in str(settings)
        assert settings["selection_hash"] == ""
        assert settings["seed"] == 5
    assert [len(bytes.fromhex(key)) for key in keys] == [32] * 3


def test_a_run_whose_answers_no_server_reads_is_refused():
    given = {"nodes": "a,b", "engine": "flower", "num_clients": 2, "seed": 5}
    heaviest = tiny_config(**given, batch_size=MOST_ANSWER_BYTES // (4 * 16 * 16))
    resolve_deployed(heaviest)
    heavier = dataclasses.replace(heaviest, batch_size=heaviest.batch_size + 1)
    problem = "batch_size = 65537: an answer of this run has 64 MiB"
    assert_refused(problem, resolve_deployed, heavier)


# ------------------------------------------------------------------ no amplification

AMPLIFIED = {
    "amplification": True,
    "discriminator_training": "every_round",
    "clients_per_round": 1,
}
DEPLOYED = {"engine": "flower", "nodes": "a,b,c,d,e,f"}
REFUSED = "amplification = True: refused: nodes = .* leave out --amplification"


def test_amplification_is_refused_where_nodes_are_deployed(tmp_path):
    tiny_config(**AMPLIFIED)
    config = dataclasses.replace(tiny_config(**AMPLIFIED), **DEPLOYED)
    for attempt in (config.validate, lambda: resolve_deployed(config)):
        assert_refused(REFUSED, attempt)
    settings = public_settings(config)
    place = DeployedClient(_site(tmp_path, 3), "0" * 16)
    assert_refused(REFUSED, place.join, settings)


def test_an_older_deployed_run_with_amplification_gets_none():
    config = dataclasses.replace(tiny_config(**AMPLIFIED), **DEPLOYED)
    run = Run(config, (new_event(config, 1, (0,), 1),))
    found = statements_of_runs([run], 1e-5)
    assert not any(row.theorem.startswith("amplification") for row in found)
    assert any("sampling: in a deployment" in text for text in found[0].conditions)


# ------------------------------------------------------------------ without limits

NO_NOISE = r"noise_multiplier = .*set min_noise_multiplier = 0 in the client's limits"
SEEDED = r"noise_seed = 7: .*set allow_seeded_noise = true in the client's limits file"


@pytest.mark.parametrize(
    ("settings", "problem", "limit"),
    [
        ({"noise_multiplier": 0.0}, NO_NOISE, "min_noise_multiplier"),
        ({"noise_multiplier": 1e-9}, NO_NOISE, "min_noise_multiplier"),
        ({"noise_seed": 7}, SEEDED, "allow_seeded_noise"),
    ],
)
def test_a_client_that_says_nothing_answers_neither_without_noise_nor_with_seeded(
    tmp_path, settings, problem, limit
):
    site = dataclasses.replace(_site(tmp_path, 3), limits=None)
    with pytest.raises(ClientRefused, match=problem) as refused:
        _node(site, 1, **settings)
    assert refused.value.setting == limit
    _node(site, 1)
    allowed = "min_noise_multiplier = 0\nallow_seeded_noise = true\n"
    (tmp_path / "limits.toml").write_text(allowed)
    _node(dataclasses.replace(site, limits=tmp_path / "limits.toml"), 1, **settings)


# ------------------------------------------------------------------ joining


def test_joining_prints_what_is_agreed(tmp_path, log):
    site = _site(tmp_path, 9)
    for released in (0, 1):
        _release(_node(site, 1, num_rounds=4), [0])
        planned, spent = (
            epsilon_from_mu((n * COST) ** 0.5, 1e-5) for n in (4, released)
        )
        for words in (
            "noise_multiplier 0.5, clip_bound 1, batch_size 4, 4 rounds",
            f"unit: one client ({OF_A_NODE}). Warning: the run's clients here (1) are",
            f"epsilon {upper(planned)} (replace-one, delta 1e-05)",
            f"released so far: epsilon {upper(spent)}",
        ):
            assert words in log[released]


@pytest.mark.parametrize(("trusted", "shares"), [(None, 1), (2, 2)])
def test_what_is_agreed_counts_the_noise_that_the_client_trusts(trusted, shares):
    own = {"client_selection": "all", "engine": "flower", "secure_aggregation": True}
    config, limits = tiny_config(**own), Limits(min_honest_nodes=trusted)
    expected = epsilon_from_mu((config.num_rounds * COST / shares) ** 0.5, 1e-5)
    text = agreement.cost_in_words(config, limits)
    assert text.startswith(f"epsilon {upper(expected)} (replace-one")
    assert text.endswith("adds to it, without a bound")


def test_a_client_refuses_public_data_of_the_family_of_its_own(tmp_path):
    names = {"nodes": "a,b,c", "engine": "flower", "public_data": "mnist"}
    start = {"phases": "moments", "generator": "gaussian"}
    start |= {"latent": "normal", "client_selection": "all", "clients_per_node": 2}
    settings = public_settings(tiny_config(**start | names, moment_size=4))
    site = DeploymentConfig("a", tmp_path, {"data": "hf:ylecun/mnist"})
    assert_refused("public_data = 'mnist':", agreed, site, settings)
