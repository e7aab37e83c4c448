"""Flower's two sides without Ray: bits, failures, and what a reply may hold.

The nodes are in this process, see `simulated_grid`.
"""

import logging
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app import Error as FlowerError
from flwr.serverapp.strategy import Strategy
from safetensors.torch import load

from fedgs.errors import UserError
from fedgs.federation import node
from fedgs.federation.messages import EVERYONE, FakeBatch, encode_batch
from fedgs.federation.training import RunStopped
from fedgs.files import read_tensors
from fedgs.privacy.client_count import ReleaseCount, release_event
from fedgs.privacy.client_limits import Limits
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Ledger
from fedgs.runs.run_folder import RunFolder, node_folder, state_rounds
from refusals import assert_refused
from runs import attempts, events, interrupt_at, num_answers, train
from server import server_app, strategy
from server.strategy import GsWgan
from simulated_grid import MODES, FakeGrid, Spoil, product, round_of, spoil_at, start


def node_state(folder: RunFolder, node: int) -> dict[str, list]:
    path = node_folder(folder.private, node)
    last = path / f"round-{state_rounds(path)[-1]:07d}.safetensors"
    return {name: value.tolist() for name, value in read_tensors(last)[0].items()}


# ------------------------------------------------------------------ bit for bit


@pytest.mark.parametrize("mode", MODES)
def test_flower_trains_bit_for_bit_as_the_local_engine(create, mode):
    flower, alone = (create(name, **MODES[mode]) for name in ("flower", "local"))
    start(flower, FakeGrid(flower.config.num_nodes))
    train(alone)
    assert product(flower) == product(alone)
    assert events(flower) == events(alone)
    made = sorted(path.name for path in alone.private.iterdir())
    assert sorted(path.name for path in flower.private.iterdir()) == made
    for name in made:
        node = int(name[-5:])
        assert node_state(flower, node) == node_state(alone, node)


@pytest.mark.parametrize("mode", ["selected", "full participation"])
def test_nodes_may_hop_between_workers(create, mode):
    """Three workers that keep few nodes: most messages find an old state, or none."""
    flower, alone = (create(name, **MODES[mode]) for name in ("flower", "local"))
    start(flower, FakeGrid(flower.config.num_nodes, num_workers=3))
    train(alone)
    assert product(flower) == product(alone)


def test_worker_keeps_its_share_of_the_nodes_only(create):
    folder = create("run", client_selection="all", num_workers=3)
    grid = FakeGrid(6)
    start(folder, grid)
    (worker,) = grid.workers[0].values()
    assert len(worker.nodes) == 3  # 6 nodes by 3 workers, and one


@pytest.mark.parametrize(
    ("mode", "round"), [("selected", 3), ("full participation", 1)]
)
def test_resumed_simulation_equals_the_uninterrupted_one(create, mode, round):
    whole, folder = (create(name, **MODES[mode]) for name in ("whole", "run"))
    start(whole, FakeGrid(whole.config.num_nodes))
    with pytest.raises(KeyboardInterrupt):
        start(folder, FakeGrid(folder.config.num_nodes), interrupt_at(round))
    start(RunFolder.open(folder.path), FakeGrid(folder.config.num_nodes))
    assert product(folder) == product(whole)
    assert len(attempts(folder)) > 3


# ------------------------------------------------------------------ what leaves a node


ANSWER = {"is_empty", "round", "node_id", "noise_std", "clip_bound", "tensors"}
ANSWER |= {"request"}  # its hash


@pytest.mark.parametrize("mode", MODES)
def test_only_sanitized_gradients_and_public_identifiers_leave_a_node(create, mode):
    folder = create("run", **MODES[mode])
    grid = FakeGrid(folder.config.num_nodes)
    start(folder, grid)
    sizes: dict[int, set[int]] = {}
    for kind, index, reply in grid.replies:
        assert not reply.has_error()
        assert list(reply.content) == ["fedgs"]
        record = reply.content["fedgs"]
        assert isinstance(record, ConfigRecord)
        if kind == "query":
            assert dict(record) == {"node_id": index}
        elif record["is_empty"]:
            assert dict(record) == {"is_empty": 1}
        else:
            assert set(record) == ANSWER
            assert (record["node_id"], record["round"] in (1, 2, 3)) == (index, True)
            terms = folder.config.terms(record["round"])
            agreed = (terms.noise_std, terms.clip_bound)
            assert (record["noise_std"], record["clip_bound"]) == agreed
            tensors = load(record["tensors"])
            assert set(tensors) == {"gradients"}
            assert tuple(tensors["gradients"].shape) == terms.shape
            sizes.setdefault(record["round"], set()).add(len(record["tensors"]))
    # A client of one image and one of twelve look the same.
    assert {len(found) for found in sizes.values()} == {1}
    # Nor does anything travel in what Flower would carry from message to message.
    assert all(not context.state for context in grid.contexts.values())


def test_request_holds_fakes_and_public_settings_only(create):
    allowed = {"round", "participants", "trainees", "keep_round", "is_saved"}
    allowed |= {"tensors", "run_folder"}

    def check(node: int, request: Message, reply: Message) -> Message:
        assert list(request.content) == ["fedgs"]
        record = request.content["fedgs"]
        if request.metadata.message_type != "query":
            assert set(load(record["tensors"])) == {"images", "labels"}
            assert set(record) <= allowed
        return reply

    grid = FakeGrid(6, check)
    start(create("run"), grid)
    assert len(grid.replies) > 6  # not the roll call alone


# ------------------------------------------------------------------ failing nodes


SECRET = "label 7 of writer 4711"


def failing(monkeypatch, round: int, times: int) -> list[int]:
    """Nodes train, and then fail, the first `times` that they are asked in a round."""
    failed: list[int] = []
    original = node.client_round

    def fail(*args, **kwargs):
        found = original(*args, **kwargs)
        if found.round == round and failed.count(found.node_id) < times:
            failed.append(found.node_id)
            raise LookupError(SECRET)
        return found

    monkeypatch.setattr(node, "client_round", fail)
    return failed


def test_node_that_fails_once_is_asked_again(create, monkeypatch, log):
    whole, folder = create("whole"), create("run")
    start(whole, FakeGrid(6))
    failed = failing(monkeypatch, round=2, times=1)
    start(folder, FakeGrid(6))
    assert len(failed) == 2
    assert product(folder) == product(whole)
    assert attempts(folder) == [(1, 1), (2, 1), (3, 1)]
    assert [line for line in log if "failed" in line] == [
        f"round 2: node {node} says: node {node} failed; its own error.log says why"
        for node in failed
    ]


def test_the_server_learns_which_limit_of_a_client_refused(create, log):
    # Room for two and a half releases: B = 4, sigma = 0.5, replace-one.
    limit = epsilon_from_mu(2.5**0.5 * 4**0.5 / 0.5, 1e-5)
    folder = create("run", **MODES["full participation"], client_epsilon=limit)
    grid = FakeGrid(folder.config.num_nodes)
    reason = "refused by its clients' limit: client_epsilon"
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


def test_a_run_goes_on_without_a_node_that_refuses(create, tmp_path):
    (tmp_path / "counts").mkdir()
    limits = tmp_path / "limits.toml"
    limits.write_text(
        f"client_epsilon = {epsilon_from_mu(3.5**0.5 * 4**0.5 / 0.5, 1e-5)}\n"
        'delta = 1e-5\nrelation = "replace-one"\n'
        'allow_seeded_noise = true\nstate_dir = "counts"\n'
    )
    mode = MODES["full participation"] | {"client_limits": str(limits)}
    folder = create("run", **mode, min_nodes=2)
    count = ReleaseCount(tmp_path / "counts", ("5",))  # in an earlier run
    for round in (1, 2):
        event = release_event(folder.config, round, (0,), 1)
        count.charge(event, Limits())
    start(folder, FakeGrid(folder.config.num_nodes))
    assert num_answers(folder) == [3, 2, 2]


def test_round_without_answers_is_counted_and_resumed(create, monkeypatch):
    whole, folder = create("whole"), create("run")
    start(whole, FakeGrid(6))
    with monkeypatch.context() as patch:
        failing(patch, round=2, times=2)
        with pytest.raises(RunStopped, match=r"round 2: 0 of 2 nodes .*discarded"):
            start(folder, FakeGrid(6))
    assert attempts(folder) == [(1, 1), (2, 1)]
    start(RunFolder.open(folder.path), FakeGrid(6))
    assert attempts(folder) == [(1, 1), (2, 1), (2, 2), (3, 1)]
    assert product(folder) == product(whole)


def lose(of_round: int, make: Callable[[Message], Message | None]) -> Spoil:
    """Spoils every reply of the first node that is asked in a round."""
    victims: list[int] = []

    def spoil(node: int, request: Message, reply: Message) -> Message | None:
        if round_of(request) != of_round:
            return reply
        victims.append(node)
        return make(reply) if node == victims[0] else reply

    return spoil


def changed(**values: object) -> Callable[[Message], Message]:
    def change(reply: Message) -> Message:
        record = dict(reply.content["fedgs"]) | values
        reply.content["fedgs"] = ConfigRecord(record)
        return reply

    return change


def without_record(reply: Message) -> Message:
    reply.content = RecordDict({"other": ConfigRecord({"loss": 4711.0})})
    return reply


# What else an answer may be is in `hostile_answers`.
WRONG = {
    "no tensors": changed(tensors=b"4711 \x80 not safetensors"),
    "noise": changed(noise_std=0.0),
    "node": changed(node_id=4711),
    "no record": without_record,
    "no answer": lambda reply: None,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_answer_is_logged_without_data_and_min_nodes_decides(create, log, wrong):
    folder = create("run", min_nodes=1)
    start(folder, FakeGrid(6, lose(2, WRONG[wrong])))
    assert num_answers(folder) == [2, 1, 2]
    assert attempts(folder) == [(1, 1), (2, 1), (3, 1)]
    about = [line for line in log if line.startswith(("round 2", "answer of", "mess"))]
    assert about[-1].startswith("round 2: no answer of node ")
    assert "4711" not in "\n".join(log)


@pytest.mark.parametrize("wrong", ["noise", "no answer"])
def test_wrong_answer_stops_a_run_that_needs_all_nodes(create, wrong):
    folder = create("run")
    with pytest.raises(RunStopped, match=r"round 2: 1 of 2 nodes .* 1 s"):
        start(folder, FakeGrid(6, lose(2, WRONG[wrong])))
    assert attempts(folder) == [(1, 1), (2, 1)]
    start(RunFolder.open(folder.path), FakeGrid(6))
    assert attempts(folder)[2:] == [(2, 2), (3, 1)]


def test_answer_that_was_lost_is_sent_again_with_the_same_noise(create):
    folder = create("run", noise_seed=None)
    answers: list[bytes] = []

    def lose_first(node: int, request: Message, reply: Message) -> Message:
        if round_of(request) != 2:
            return reply
        answers.append(reply.content["fedgs"]["tensors"])
        if len(answers) > 2:
            return reply
        return Message(FlowerError(3, "lost on the way"), reply_to=request)

    start(folder, FakeGrid(6, lose_first))
    assert len(answers) == 4  # two nodes, asked twice
    assert sorted(answers[:2]) == sorted(answers[2:])
    assert attempts(folder) == [(1, 1), (2, 1), (3, 1)]


def test_request_that_a_node_refuses_changes_nothing(create):
    """Fakes outside [0, 1] could make a node leak more than planned."""
    folder, grid = create("run", **MODES["full participation"]), FakeGrid(3)
    start(folder, grid)
    before = node_state(folder, 0)
    shape, config = (folder.config.fakes_sent, 1, 16, 16), folder.config
    labels = torch.zeros(shape[0], dtype=torch.int64)
    batch = FakeBatch(3, torch.full(shape, 2.0), labels, EVERYONE, EVERYONE, 0)
    record = encode_batch(batch, config) | {"run_folder": str(folder.path)}
    address = next(a for a, index in grid.indices.items() if index == 0)
    request = Message(RecordDict({"fedgs": ConfigRecord(record)}), address, "train")
    (reply,) = grid.send_and_receive([request])
    assert reply.error.reason == "node 0 failed; its own error.log says why"
    log = (node_folder(folder.private, 0) / "error.log").read_text()
    assert "fakes outside [0, 1]: refused" in log
    assert node_state(folder, 0) == before


# ------------------------------------------------------------------ roll call


@pytest.mark.parametrize("count", [2, 5, 7])
def test_wrong_number_of_supernodes_is_refused_with_the_remedy(create, count):
    folder = create("run")
    remedy = (
        rf"num-supernodes = {count}: .* 6 nodes.*num-supernodes=6.*clients_per_node"
    )
    assert_refused(remedy, start, folder, FakeGrid(count))
    assert attempts(folder) == []


def test_supernode_that_does_not_say_who_it_is_ends_the_run(create):
    grid = FakeGrid(6, spoil_at({(4, None): lambda request, reply: None}))
    assert_refused("roll call: 5 of 6 nodes answered", start, create("run"), grid)


def test_two_supernodes_of_one_index_end_the_run(create):
    grid = FakeGrid(6)
    next(iter(grid.contexts.values())).node_config["partition-id"] = 3
    assert_refused("roll call: 5 of 6 nodes answered", start, create("run"), grid)


def test_flowers_own_loop_trains_the_same_generator_by_the_verbs(create):
    folder, alone = create("flower"), create("local")
    grid = FakeGrid(folder.config.num_nodes)
    gs_wgan = GsWgan(folder, lambda metrics: None, threading.Event())
    with gs_wgan.opened(grid):
        result = Strategy.start(gs_wgan, grid, ArrayRecord(), num_rounds=3)
        trained = gs_wgan.training.server.generator.state_dict()
    train(alone)
    expected, _ = read_tensors(alone.path / "generator.safetensors")
    assert all(torch.equal(trained[name], value) for name, value in expected.items())
    assert attempts(folder) == attempts(alone)
    metrics = result.train_metrics_clientapp
    assert [metrics[round]["num_answers"] for round in (1, 2, 3)] == [2, 2, 2]


def test_strategy_never_evaluates_on_clients(create):
    gs_wgan = GsWgan(create("run"), lambda metrics: None, threading.Event())
    nothing = RecordDict()
    assert list(gs_wgan.configure_evaluate(1, nothing, nothing, FakeGrid(1))) == []
    assert gs_wgan.aggregate_evaluate(1, []) is None


def test_apps_are_where_pyproject_says():
    root = Path(strategy.__file__).resolve().parent.parent
    app = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"] == {
        "serverapp": "server.server_app:app",
        "clientapp": "clients.client_app:app",
    }


@pytest.mark.parametrize(
    ("settings", "is_plain"), [({}, True), ({"nodes": "a,b", "num_clients": 2}, False)]
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
    context = SimpleNamespace(run_config=settings | {"num_rounds": -1})
    with pytest.raises(UserError) as refused:
        server_app.main(FakeGrid(1), context)
    assert str(refused.value) == said[0]  # what `submit` reads
    told = logging.LogRecord("flwr", logging.ERROR, "", 0, "raised", (), None)
    assert flower.filter(told)
    told.exc_info = (UserError, refused.value, None)
    assert not flower.filter(told)  # no traceback of Flower's
    remedy = "num_rounds = -1: give --num-rounds at least 1"
    assert said[0].startswith(f"the settings of this run are refused: {remedy}")
    assert said[0].endswith("key a_flag of --run-config") == is_plain
