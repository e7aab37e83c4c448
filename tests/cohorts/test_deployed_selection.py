"""A selection across machines: what nodes count, what leaves them, what stays there."""

import csv
import dataclasses
import json
import math
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from clients.deployed_client import COHORTS
from deployed_grid import LIMITS, place_of
from fedgs.cohorts import classifier
from fedgs.cohorts.client_groups import read_client_cohorts
from fedgs.cohorts.cohort_file import write_memberships
from fedgs.cohorts.selection import (
    deployed_settings,
    membership,
)
from fedgs.cohorts.selection_settings import Thresholds
from fedgs.config.rounds import rounds_alike
from fedgs.data.load import load_data
from fedgs.errors import UserError
from fedgs.methods import cohort_counts, new_state, phase_at
from fedgs.methods.base import Hosted
from fedgs.methods.cohort_classifier import accuracy_of
from fedgs.methods.cohort_counts import outcome_of
from fedgs.privacy.client_limits import Limits, release_cost
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Event, Ledger
from fedgs.round.answer import raw_answers
from fedgs.round.checkpoint import load_tensors
from fedgs.round.messages import decode_request, encode_request
from fedgs.round.run import RunStopped
from fedgs.runs.epsilons import of_run
from fedgs.runs.run_folder import RunFolder
from live import Live
from refusals import assert_refused
from runs import at_round, ignore, interrupt_at, train
from server import server_app
from server.roll_call import public_settings
from server.strategy import FederatedGan
from simulated_grid import round_of
from tiny import (
    SINGLE_IMAGE_CLIENT,
    SIZES,
    next_request,
    tiny_config,
    tiny_data,
    write_tiny_npz,
)

K = len(SIZES)
HALF = {"below": 50, "are_percentiles": True}
BOTH = {"below": 40, "above": 60, "are_percentiles": True}
ALLOWED = LIMITS + "allow_updates = true\nallow_selection = true\n"
NAME = "ward-4711"  # of an owner, which must not leave its node


@pytest.fixture(autouse=True)
def _short_training(monkeypatch) -> None:
    monkeypatch.setattr(classifier, "CLIENT_STEPS", 2)
    monkeypatch.setattr(classifier, "CLIENT_BATCH_SIZE", 4)


def selecting(**asked: object) -> dict:
    """The settings of a selection among the tiny clients, on three nodes."""
    plan = {"num_rounds": 2, "noise_per_clip": 0.5} | (asked or HALF)
    own = deployed_settings(Thresholds(**plan), K, 3)
    return own | {"clients_per_node": K // 3}


@pytest.fixture
def select(deploy):
    """Makes a deployment of a selection, whose clients take part in it."""

    def select(limits: str = ALLOWED, **settings: object):
        run = deploy(mode="selected", **selecting() | settings)
        (run.root / "limits.toml").write_text(limits)
        return run

    return select


def cohorts_in(state_dir: Path) -> dict[str, str]:
    with (state_dir / COHORTS).open(newline="") as file:
        return {row["owner"]: row["cohort"] for row in csv.DictReader(file)}


def question(config, round: int = 3):
    """A request of a round after those of the classifier."""
    state = new_state(config)
    state.round = round - 1
    return next_request(config, state)


# ------------------------------------------------------------------ what is found


@pytest.mark.parametrize(
    "asked",
    [{"below": 0.5}, {"above": 0.3}, {"below": 0.2, "above": 0.7}, HALF, BOTH],
    ids=str,
)
def test_without_noise_thresholds_and_counts_are_those_of_the_accuracies(
    tmp_path, asked
):
    data = write_tiny_npz(tmp_path / "tiny.npz")
    own = {"data": data, "output": str(tmp_path / "run"), "noise_multiplier": 0.0}
    folder = RunFolder.create(tiny_config(**selecting(**asked) | own))
    train(folder)
    config = phase_at(folder.config, folder.config.num_rounds).config
    _, tensors = folder.load_checkpoint()
    load_tensors((state := new_state(config)).parts, tensors)
    found = outcome_of(config, state)

    weights = state.generator.state_dict()
    images = load_data(folder.config)
    own = np.array([accuracy_of(config, images.of(c), weights) for c in range(K)])
    assert math.isnan(own[SINGLE_IMAGE_CLIENT])
    if "are_percentiles" not in asked:
        assert found["thresholds"] == asked
    expected = Counter(membership(value, found["thresholds"]) for value in own)
    exact = {name: expected[name] for name in found["noisy_counts"]}
    assert found["noisy_counts"] == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize(
    ("asked", "targets"),
    [(HALF, {"below": 3.0}), (BOTH, {"below": 2.4, "above": 3.6})],
    ids=["half", "both"],
)
@pytest.mark.parametrize("last", [0.6, 0.8])
def test_the_search_halves_towards_the_percentile(
    tmp_path, monkeypatch, asked, targets, last
):
    """Against a bisection of the test's own, on accuracies that lie apart."""
    values = np.array([0.11, 0.23, 0.31, 0.47, 0.52, last])
    values[SINGLE_IMAGE_CLIENT] = math.nan
    monkeypatch.setattr(
        cohort_counts, "accuracy_of", lambda config, client, _: values[client.number]
    )
    data = write_tiny_npz(tmp_path / "tiny.npz")
    own = {"data": data, "output": str(tmp_path / "run"), "noise_multiplier": 0.0}
    folder = RunFolder.create(tiny_config(**selecting(**asked) | own))
    train(folder)
    config = phase_at(folder.config, folder.config.num_rounds).config
    _, tensors = folder.load_checkpoint()
    load_tensors((state := new_state(config)).parts, tensors)
    expected = {}
    for name, target in targets.items():
        tried, middle, step = {}, 0.5, 0.25
        for _ in range(8):
            # Who holds out nothing is not above, and not below either.
            at_most = {"below": (values <= middle).sum(), "above": K}[name]
            if name == "above":
                at_most -= (values > middle).sum()
            tried.setdefault(abs(at_most - target), []).append(middle)
            middle += step if at_most <= target else -step
            step /= 2
        expected[name] = min(tried[min(tried)])
    if len(expected) == 2:
        expected["above"] = max(expected.values())
    assert outcome_of(config, state)["thresholds"] == expected


@pytest.mark.parametrize("asked", [HALF, BOTH], ids=str)
def test_a_client_moves_the_counts_by_at_most_what_is_accounted_for(asked):
    config = tiny_config(**selecting(**asked))
    request = question(config)
    bounds = len(Thresholds(**asked).bounds)
    for limit in (-1.0, 0.3, 2.0):
        request.tensors["thresholds"] = torch.full((bounds,), limit)
        hosted = Hosted(tiny_data(config), range(K), 0)
        (*answers,) = raw_answers(config, hosted, request)
        for answer in answers:
            # So +C and -C apart, 2 C, which is a count of one client.
            assert float(answer.norm()) == pytest.approx(config.terms(3).clip_bound)
            assert answer.abs().unique().numel() == 1


@pytest.mark.parametrize(
    ("num_clients", "noise_per_clip", "expected"),
    [(539, 2.0, 539**0.5 / 2), (20_000, 4.0, 20_000**0.5 / 2)],
)
def test_noise_of_a_count_is_that_of_a_simulation(
    num_clients, noise_per_clip, expected
):
    plan = Thresholds(**BOTH, num_rounds=10, noise_per_clip=noise_per_clip)
    settings = deployed_settings(plan, num_clients, num_nodes=7)
    settings |= {"num_clients": num_clients, "clients_per_node": num_clients // 7 + 1}
    updates, counts = (alike.terms for alike in rounds_alike(tiny_config(**settings)))
    # Steps of +-C / sqrt(2) are counts of one half.
    of_sum = counts.noise_std * 7**0.5
    assert of_sum / (2 * counts.clip_bound / 2**0.5) == pytest.approx(expected)
    assert updates.noise_std * 7**0.5 == pytest.approx(noise_per_clip)


def test_counts_of_few_clients_cost_at_most_a_tenth():
    settings = selecting(below=50, are_percentiles=True, noise_per_clip=100)
    updates, counts = rounds_alike(tiny_config(**settings))
    costs = [
        alike.num_rounds * release_cost(alike.terms.noise_multiplier, 1)
        for alike in (updates, counts)
    ]
    assert costs[1] / sum(costs) == pytest.approx(0.1)


# ------------------------------------------------------------------ what leaves


def test_nodes_keep_who_is_in_which_cohort_and_the_server_gets_counts(select):
    run = select()
    path = Path(run.clients[0].node_config["data"].partition(":")[2])
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"clients": np.where(arrays["clients"], "b", NAME)})
    strategy = FederatedGan(run.folder, ignore, threading.Event())
    strategy.start(run.grid)
    server_app.write_cohorts(run.folder, strategy.training.server)

    summary = json.loads((run.folder.path / "cohorts.json").read_text())
    low = summary["thresholds"].pop("below")
    assert (summary["thresholds"], low % (1 / 256)) == ({}, 0)
    assert {*summary["noisy_counts"]} == {"selected", "rest"}
    stated = [row.to_json() for row in of_run(run.folder.path)]
    assert summary["statements"] == json.loads(json.dumps(stated))
    assert any("9 of 11 events" in each for each in stated[0]["conditions"])

    weights = strategy.training.server.generator.state_dict()
    config = dataclasses.replace(run.folder.config, nodes=None)
    for index, client in enumerate(run.clients):
        assert (client.state_dir / COHORTS).stat().st_mode & 0o777 == 0o600
        source = client.node_config["data"]
        own = load_data(dataclasses.replace(config, data=source, num_clients=2))
        assert cohorts_in(client.state_dir) == {
            name: membership(accuracy_of(config, own.of(i), weights), {"below": low})
            for i, name in enumerate(own.client_names)
        }
        assert run.counted(index) == list(range(1, 12))
    assert NAME in cohorts_in(run.clients[0].state_dir)

    for kind, _, reply in run.grid.replies:
        (record,) = reply.content.config_records.values()
        if kind == "train":
            answer = {"is_empty", "round", "node_id", "request", "noise_std"}
            assert {*record} == answer | {"clip_bound", "tensors"}
        assert NAME.encode() not in str(dict(record)).encode()
    for file in run.folder.path.rglob("*"):
        assert not file.is_file() or NAME.encode() not in file.read_bytes(), file


def test_the_same_question_gets_the_same_bytes_and_another_one_none(select):
    run = select()
    asked = []

    def keep(name, request):
        if name == run.clients[0].name and round_of(request) == 4:
            asked.append(request)
        return True

    run.grid.on_push = keep
    with pytest.raises(RunStopped):
        run.start(at_round(4, run.stop.set))
    client, (request,) = run.clients[0], asked
    answers = [
        bytes(reply.content["fedgs"]["tensors"])
        for _, name, reply in run.grid.replies
        if name == client.name and not reply.has_error() and "fedgs" in reply.content
        if dict(reply.content["fedgs"]).get("round") == 4
    ]
    before = run.counted(0)
    again = run.grid.answer(client, request)
    assert [bytes(again.content["fedgs"]["tensors"])] == answers
    config = run.folder.config
    sent = decode_request(request.content["fedgs"], config)
    other = {**sent.tensors, "thresholds": sent.tensors["thresholds"] + 0.125}
    changed = dataclasses.replace(sent, tensors=other)
    request.content["fedgs"]["tensors"] = encode_request(changed, config)["tensors"]
    refused = run.grid.answer(client, request)
    assert refused.error.reason == f"{client.name} failed; its own error.log says why"
    assert "already answered round 4" in (client.state_dir / "error.log").read_text()
    assert run.counted(0) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"thresholds": torch.zeros(2)}, "a request's thresholds: the shape is"),
        ({"thresholds": torch.tensor([math.nan])}, "not finite"),
        ({"more": torch.zeros(1)}, "other tensors"),
    ],
)
def test_a_hostile_question_is_refused(change, words):
    config = tiny_config(**selecting())
    sent = question(config)
    payload = encode_request(sent, config)
    assert decode_request(payload, config).digest() == sent.digest()
    hostile = dataclasses.replace(sent, tensors=sent.tensors | change)
    assert_refused(words, decode_request, encode_request(hostile, config), config)


def test_a_count_that_no_honest_node_sends_is_refused(select):
    run = select()

    def enlarged(who, request, reply):
        if round_of(request) == 3:
            values = {"gradients": torch.full((1, 1, 1, 1), 1e6)}
            reply.content["fedgs"]["tensors"] = save(values)
        return reply

    run.grid.spoil = enlarged
    with pytest.raises(RunStopped, match=r"1 of 1 counts .* norm above"):
        run.start()


# ------------------------------------------------------------------ limits, restarts


@pytest.mark.parametrize("missing", ["allow_selection", "allow_updates"])
def test_a_client_takes_part_only_where_its_file_says_so(select, missing):
    run = select(ALLOWED.replace(f"{missing} = true\n", ""))
    with pytest.raises(RunStopped, match=f"limit {missing}"):
        run.start()
    assert run.attempts() == []
    assert not list(run.root.rglob(COHORTS))


def test_a_question_beyond_the_limit_is_counted_by_nobody_and_not_answered(select):
    run = select()
    config = run.folder.config
    limits = Limits()
    costs = [limits.cost_of(config, config.terms(round)) for round in range(1, 12)]
    # Room for both rounds of the classifier, and for three questions.
    epsilon = epsilon_from_mu((sum(costs[:5]) + costs[5] / 2) ** 0.5, 1e-5)
    more = f'client_epsilon = {epsilon}\ndelta = 1e-5\nrelation = "replace-one"\n'
    (run.root / "limits.toml").write_text(ALLOWED + more)
    with pytest.raises(RunStopped, match="limit client_epsilon"):
        run.start()
    assert run.counted(0) == [1, 2, 3, 4, 5]
    assert not list(run.root.rglob(COHORTS))


def test_a_killed_selection_goes_on_and_counts_what_it_asks_again(select, undisturbed):
    run = select(checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(5))
    for client in run.clients:
        client.restart()
    run.start()
    assert run.product() == undisturbed(run)
    attempts = Counter(round for round, _ in run.attempts())
    for client in run.clients:
        assert len(cohorts_in(client.state_dir)) == 2
        path = client.state_dir / "releases" / "releases-00000.jsonl"
        events: list[Event] = [*Ledger.read(path).events]
        assert Counter(event.round for event in events) == attempts
        # Counted again is what was asked again, and nothing else.
        kinds = Counter(event.release for event in events)
        assert kinds == {"update": 2, "count": 10}


def test_a_selection_that_ends_early_leaves_no_cohorts_of_one_before(select):
    run = select()
    for client in run.clients:
        owners = np.load(client.node_config["data"].partition(":")[2])["clients"]
        client.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_memberships(client.state_dir / COHORTS, {str(owners[0]): "rest"})
    with pytest.raises(RunStopped):
        run.start(at_round(4, run.stop.set))
    assert not list(run.root.rglob(COHORTS))
    run.stop.clear()
    run.start()
    assert len(list(run.root.rglob(COHORTS))) == len(run.clients)


def test_a_node_that_misses_the_last_question_has_no_cohorts_of_another_selection(
    select,
):
    run = select(min_answers=2)
    late = run.clients[1]
    last = run.folder.config.num_rounds

    def another_selection() -> None:
        write_memberships(late.state_dir / COHORTS, {"0": "rest"})

    def leaves(name, request) -> bool:
        if name == late.name and round_of(request) == 1:
            another_selection()
        if name == late.name and round_of(request) == last:
            late.is_online = False
        return late.is_online or name != late.name

    run.grid.on_push = leaves
    run.start()
    # Questions 3 to 9 came after the other selection.
    kept = [client for client in run.clients if (client.state_dir / COHORTS).exists()]
    assert kept == [run.clients[0], run.clients[2]]


def test_joining_again_forgets_only_what_another_selection_has_written(select):
    run = select()
    settings = public_settings(run.folder.config)
    with pytest.raises(RunStopped):
        run.start(at_round(4, run.stop.set))
    place = place_of(run, run_id=run.states(0).parent.name)
    path = run.clients[0].state_dir / COHORTS
    write_memberships(path, {"0": "rest"})  # between two starts
    place.join(settings)
    assert not path.exists()
    run.stop.clear()
    run.start()
    own = path.read_bytes()
    place.join(settings)  # nothing is asked any more
    assert path.read_bytes() == own


def test_shards_have_no_cohorts(select):
    run = select()
    run.clients[1].node_config["partition"] = "iid"
    with pytest.raises(RunStopped, match="b-clinic failed"):
        run.start()
    error = (run.clients[1].state_dir / "error.log").read_text()
    assert "shards of data without names; give data that name their owners" in error


def test_memberships_are_written_whole_for_their_owner_alone(tmp_path):
    path = tmp_path / COHORTS
    path.write_text("owner,cohort\nold,rest\n")
    path.chmod(0o644)
    cohorts = {'Dr. "A", ward 3': "selected", "b\nc": "above"}
    write_memberships(path, cohorts)
    assert cohorts_in(tmp_path) == cohorts
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [path]


LINE_ENDS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85"]
LINE_ENDS += ["\u2028", "\u2029"]


def test_every_name_that_is_written_is_read_again(tmp_path):
    names = ["", " a ", "#a", 'Dr. "A", ward 3', "'", "owner", "\t"]
    names += [f"a{end}b" for end in LINE_ENDS]
    names += LINE_ENDS
    cohorts = dict.fromkeys(names, "rest") | {"ann": "selected"}
    write_memberships(tmp_path / COHORTS, cohorts)
    read = read_client_cohorts(tmp_path / COHORTS)
    assert {name: found.value for name, found in read.items()} == cohorts


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"phases": "cohort-classifier*2,cohort-counts*3"}, "cohort-counts\\*9"),
        ({"phases": "cohort-counts*9"}, "cohort-counts\\*9"),
        ({"client_selection": "balanced", "clients_per_round": 2}, "all clients"),
        ({"below": 101.0}, "below = 101"),
        ({"below": None}, "below is unset"),
    ],
)
def test_settings_of_no_selection_are_refused(change, words):
    settings = selecting() | change
    if "phases" in change:
        settings["num_rounds"] = 5 if "3" in change["phases"] else 9
    with pytest.raises(UserError, match=words):
        tiny_config(**settings)


def test_without_noise_there_is_no_selection_across_machines():
    assert_refused(
        "noise_per_clip is unset", deployed_settings, Thresholds(**HALF), K, 3
    )


# ------------------------------------------------------------------ real processes


@pytest.mark.slow
def test_command_selects_among_the_clients_of_real_processes(deployment):
    live: Live = deployment
    (live.folder / "limits.toml").write_text(ALLOWED)
    live.serve()
    for name in live.names:
        live.join(name)
    keys = [f"--client={n}=certs/clients/{n}.pub" for n in live.names]
    words = "--node-sizes 3,1 --num-classes 10 --image-size 16 --below 50 --percentiles"
    words += " --num-rounds 2 --noise-per-clip 1 --output digits"
    live.machines.run(
        "server", "deploy", "select-clients", *live.ca, *keys, *words.split()
    )
    found = json.loads((live.run / "cohorts.json").read_text())
    assert {*found} == {"thresholds", "noisy_counts", "statements"}
    assert all(row["guarantee"] for row in found["statements"])
    sizes = [len(cohorts_in(live.folder / f"fedgs-client-{n}")) for n in live.names]
    assert sizes == [3, 1]
