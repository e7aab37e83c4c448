"""Flower's two sides without Ray: workers, failures, and what a reply may hold.

The nodes are in this process, see `simulated_grid`.
"""

import functools
import logging
import re
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.files import read_json, read_tensors
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Ledger
from fedgs.process import FIT
from fedgs.round import node
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder, state_rounds
from refusals import assert_refused
from runs import attempts, json_lines, limit_clients, train
from server import server_app, strategy
from server.strategy import FederatedGan
from simulated_grid import MODES, FakeGrid, product, spoil_at, start
from tiny import REFINED, tiny_config, tiny_data

# ------------------------------------------------------------------ workers


def test_worker_keeps_its_share_of_the_nodes_only(create):
    folder = create("run", client_selection="all", num_workers=3, num_rounds=1)
    grid = FakeGrid(6)
    start(folder, grid)
    (worker,) = grid.workers[0].values()
    assert len(worker.nodes) == 3  # 6 nodes by 3 workers, and one


# ------------------------------------------------------------------ failing nodes


def test_a_node_that_fails_once_is_asked_again(create, monkeypatch, log):
    """It has trained by then: a second time from the same state."""
    whole, once, failed = create("whole"), create("once"), []
    start(whole, FakeGrid(6))
    original = node.answer_of

    def fail(*args):
        found = original(*args)
        if found.round == 2 and found.node_id not in failed:
            failed.append(found.node_id)
            raise LookupError("label 7 of writer 4711")
        return found

    monkeypatch.setattr(node, "answer_of", fail)
    start(once, FakeGrid(6))
    assert len(failed) == 2
    assert attempts(once) == [(1, 1), (2, 1), (3, 1)]
    assert [line for line in log if "failed" in line] == [
        f"round 2: node {node} says: node {node} failed; its own error.log says why"
        for node in failed
    ]
    assert product(once) == product(whole)


def test_the_server_learns_which_limit_of_a_client_refused(create, log, monkeypatch):
    # Room for two and a half releases: B = 4, sigma = 0.5, replace-one.
    limit = epsilon_from_mu(2.5**0.5 * 4**0.5 / 0.5, 1e-5)
    folder = create("run", **MODES["full participation"])
    limit_clients(monkeypatch, limit)
    grid = FakeGrid(folder.config.num_nodes)
    reason = "refused the request: its own limit client_epsilon forbids it"
    with pytest.raises(RunStopped, match=rf"round 3: 0 of 3 .*\n.*node 0 {reason}"):
        start(folder, grid)
    errors = [reply.error for _, _, reply in grid.replies if reply.has_error()]
    assert sorted(error.reason for error in errors) == sorted(
        2 * [f"node {index} {reason}" for index in range(3)]  # asked twice
    )
    assert attempts(folder) == [(1, 1), (2, 1), (3, 1)]
    for path in folder.private.iterdir():
        assert Ledger.read(path / "releases-00000.jsonl").length == 2
        assert state_rounds(path)[-1] == 2


# ------------------------------------------------------------------ roll call


@pytest.mark.parametrize("count", [2, 5, 7])
def test_wrong_number_of_supernodes_is_refused_with_the_remedy(create, log, count):
    folder = create("run")
    remedy = (
        rf"num-supernodes = {count}: .* 6 nodes.*num-supernodes=6.*clients_per_node"
    )
    assert_refused(remedy, start, folder, FakeGrid(count))
    assert attempts(folder) == []
    # Said long before the end of the wait, once.
    told = [line for line in log if re.search(remedy, line)]
    assert len(told) == (count < 6)


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_supernode_that_is_silent_or_there_twice_ends_the_run(create, is_silent):
    grid = FakeGrid(6, spoil_at({(4, None): lambda request, reply: None}))
    if not is_silent:
        grid = FakeGrid(6)
        next(iter(grid.contexts.values())).node_config["partition-id"] = 3
    assert_refused("5 of 6 nodes answered", start, create("run"), grid)


def test_another_number_of_partitions_is_refused_with_the_remedy(create):
    grid = FakeGrid(6)
    for context in grid.contexts.values():
        context.node_config["num-partitions"] = 7
    folder = create("run")
    assert_refused("num-partitions = 7 .* 6 nodes", start, folder, grid)
    assert attempts(folder) == []


def test_a_node_on_a_machine_without_the_run_folder_ends_the_run(create):
    """As a worker of Ray's on another machine, where the same path is nothing."""

    class Elsewhere(FakeGrid):
        def ask(self, who, memory, request):
            record = request.content["fedgs"]
            record["run_folder"] = f"{record['run_folder']}-elsewhere"
            return super().ask(who, memory, request)

    folder, grid = create("run"), Elsewhere(6)
    assert_refused("run folder .*: node .* share", start, folder, grid)
    assert attempts(folder) == []


def test_the_result_has_generator_and_metrics_of_every_round(create):
    folder = create("run")
    result = start(folder, FakeGrid(6))
    lines = json_lines(folder.path / "metrics.jsonl")
    by_round = result.train_metrics_clientapp
    assert [*by_round] == [line["round"] for line in lines]
    norms = [metrics["release_norm"] for metrics in by_round.values()]
    assert norms == [line["release_norm"] for line in lines]
    average, _ = read_tensors(folder.path / "generator_ema.safetensors")
    assert result.arrays.keys() == average.keys()


def test_flowers_own_loop_trains_the_same_generator_by_the_verbs(create):
    folder, alone = create("flower"), create("local")
    grid = FakeGrid(folder.config.num_nodes)
    gs_wgan = FederatedGan(folder, lambda metrics: None, threading.Event())
    with gs_wgan.opened(grid):
        result = Strategy.start(gs_wgan, grid, ArrayRecord(), num_rounds=3)
        trained = gs_wgan.training.server.generator.state_dict()
    train(alone)
    expected, _ = read_tensors(alone.path / "generator.safetensors")
    assert all(torch.equal(trained[name], value) for name, value in expected.items())
    assert attempts(folder) == attempts(alone)
    metrics = result.train_metrics_clientapp
    assert [metrics[round]["num_answers"] for round in (1, 2, 3)] == [2, 2, 2]


def test_apps_are_where_pyproject_says():
    root = Path(strategy.__file__).resolve().parent.parent
    app = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"] == {
        "serverapp": "server.server_app:app",
        "clientapp": "clients.client_app:app",
    }


@pytest.mark.parametrize(
    ("settings", "is_plain"),
    [
        ({"recipe": "demo"}, True),
        ({"nodes": "a,b", "num-clients": 2}, False),
        ({"recipe": "demo", "nodes": "a,b", "num-clients": 2}, False),
    ],
)
def test_refused_settings_are_said_with_the_remedy_of_who_gave_them(
    monkeypatch, settings, is_plain
):
    said: list[str] = []
    monkeypatch.setattr(
        server_app, "log", lambda level, text, *args: said.append(text % args)
    )
    flower = server_app.FLOWER_LOGGER
    monkeypatch.setattr(flower, "filters", [])
    context = SimpleNamespace(run_config=settings | {"num-rounds": -1})
    with pytest.raises(UserError) as refused:
        server_app.main(FakeGrid(1), context)
    assert str(refused.value) == said[0]  # what `submit` reads
    told = logging.LogRecord("flwr", logging.ERROR, "", 0, "raised", (), None)
    assert flower.filter(told)
    told.exc_info = (UserError, refused.value, None)
    assert not flower.filter(told)  # no traceback of Flower's
    exit_code = logging.LogRecord(
        "flwr", logging.ERROR, "", 0, "Exit Code: 202", (), None
    )
    assert not flower.filter(exit_code)
    remedy = "num_rounds = -1: give --num-rounds at least 1"
    assert said[0].startswith(f"the settings of this run are refused: {remedy}")
    assert said[0].endswith("key a-flag of --run-config") == is_plain


def test_a_run_that_stops_is_said_in_a_line_without_a_traceback(
    tmp_path, log, monkeypatch
):
    flower = server_app.FLOWER_LOGGER
    monkeypatch.setattr(flower, "filters", [])
    path = tmp_path / "result.json"
    ended = server_app.recorded_outcome(path, lambda *of: None)
    with pytest.raises(RunStopped) as stopped, ended:
        raise RunStopped("The run stopped: why")
    assert log == ["The run stopped: why"]
    outcome = {"status": "stopped", "message": "The run stopped: why"}
    assert read_json(path) == outcome
    raised = logging.LogRecord("flwr", logging.ERROR, "", 0, "raised", (), None)
    raised.exc_info = (RunStopped, stopped.value, None)
    assert not flower.filter(raised)


def test_a_run_that_is_not_there_is_said_with_the_folder_of_all_runs(
    monkeypatch, tmp_path
):
    """With all settings empty, as `fedgs deploy submit --resume` sends them."""
    monkeypatch.setenv("FEDGS_RUNS", str(tmp_path))
    monkeypatch.setattr(server_app.FLOWER_LOGGER, "filters", [])
    settings = dict.fromkeys(RunConfig().to_flat(), "")
    context = SimpleNamespace(run_config=settings | {"run_folder": "nope"})
    words = (
        f"refused: resume = nope: there is no run of this name in {tmp_path}; give "
        "--resume one that is there$"
    )
    assert_refused(words, server_app.main, FakeGrid(1), context)


def test_the_log_has_rounds_and_the_steps_of_the_refiners_fit(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        server_app, "log", lambda level, text, *of: said.append(text % of)
    )
    settings = REFINED | {"num_rounds": 4, "output": str(tmp_path / "run")}
    folder = RunFolder.create(tiny_config(**settings))
    data = tiny_data(folder.config)
    (folder.path / ".flower").mkdir()
    train(folder, functools.partial(server_app.log_progress, folder), data)
    assert said[3:5] == ["round 4 of 4", "fit: step 1 of 10"]
    assert said[-1] == "fit: step 10 of 10"
    fit = read_json(folder.path / ".flower" / FIT)
    assert fit == {"round": 4, "fit_step": 10, "fit_steps": 10, "is_first": False}
