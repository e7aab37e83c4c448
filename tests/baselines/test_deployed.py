"""Fed-Avg GAN deployed without a network: bits, faults, limits, what is refused."""

import threading
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from fedgs.baselines.fedavg_gan import run_config
from flwr.app import Message

import runs
import tiny
from clients.deployed_client import DeployedClient
from command_line import refused
from deployed_grid import LIMITS, NAMES, Deployment, kill_after_count, place_of
from fedgs.app.commands import deploy_status
from fedgs.baselines import deployed, frame
from fedgs.baselines.frame import Asked, open_run
from fedgs.config.run_config import RunConfig
from fedgs.privacy.accountant import SEEDED
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.ledger import Ledger
from fedgs.process import RUNS_VARIABLE
from fedgs.round import preparation
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import interrupt_at
from server.launch import submit
from server.roll_call import public_settings
from server.server_app import open_folder, strategy_of
from simulated_grid import spoil_at
from tiny import write_tiny_npz

pytestmark = pytest.mark.usefixtures("server_process", "clock")

OWN: dict[str, Any] = {"steps": 3, "batch_size": 4, "noise_per_clip": 2.0}
OWN |= {"discriminator_steps": 1, "generator_steps": 1}
NAMED = ("image_size", "num_classes", "num_clients", "seed", "noise_seed")
NAMED += ("generator_dim", "discriminator_dim", "latent_dim")
SETTINGS: dict[str, Any] = {name: tiny.SETTINGS[name] for name in NAMED}
SETTINGS |= {"clients_per_node": 2, "round_timeout": 60.0, "checkpoint_every": 1}
ALLOWED = LIMITS + "allow_updates = true\n"
EPSILON = 'client_epsilon = %s\ndelta = 1e-5\nrelation = "replace-one"\n'


def submitted(told: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The settings of a run as its server gets them."""
    nodes = {"nodes": ",".join(NAMES[:3]), "output": "run"}
    own = {name: value for name, value in told.items() if name not in deployed.ASKED}
    config = deployed.submitted(own, SETTINGS | nodes | settings)
    return config.to_flat() | deployed.joined({"name": "fedavg-gan"} | told)


class Updates(Deployment):
    """A run folder of Fed-Avg GAN on the server, and three clients of two people."""

    def __init__(
        self, root: Path, told: dict[str, Any], limits: str, **settings: Any
    ) -> None:
        self.told = told
        self.equip(root, open_folder(submitted(told, **settings)))
        (root / "limits.toml").write_text(limits)

    def start(self, report: runs.Report = runs.ignore) -> None:
        self.folder = RunFolder.open(self.folder.path)
        strategy_of(self.folder, report, self.stop).start(self.grid)

    def attempts(self) -> list[tuple[int, int]]:
        return [(each.step, each.attempt) for each in open_run(self.path).releases]

    @property
    def path(self) -> Path:
        return self.folder.path


@pytest.fixture(name="updates")
def fixture_updates(tmp_path, monkeypatch):
    """Makes deployments, by settings of the method."""
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))

    def updates(limits: str = ALLOWED, **told: Any) -> Updates:
        settings = {n: told.pop(n) for n in ("noise_seed",) if n in told}
        return Updates(tmp_path, OWN | told, limits, **settings)

    return updates


def in_process(run: Updates) -> bytes:
    """The generator of the same settings, trained in one process with all data."""
    local = {"data": write_tiny_npz(run.root / "all.npz")}
    local |= {"output": str(run.root / "local"), "test_fraction": 0.0}  # as clients do
    made, data = frame.new_run("fedavg-gan", run.told, Asked(), SETTINGS | local)
    frame.train(made, data, runs.ignore, threading.Event())
    return runs.generator(made.folder.path)


def test_updates_that_no_server_reads_are_refused(monkeypatch):
    monkeypatch.setattr(preparation, "MOST_ANSWER_BYTES", 40_000)
    asked = []
    for width in (4, 16):
        told, own = deployed.split(submitted(OWN, discriminator_dim=width))
        asked.append((RunConfig.from_flat(told), own))
    deployed.planned(*asked[0])
    assert_refused("an answer of this run weighs", deployed.planned, *asked[1])


# ------------------------------------------------------------------ bits and faults

ONCE = [(1, 1), (2, 1), (3, 1)]
TWICE = [(1, 1), (2, 1), (2, 2), (3, 1)]


def slow(*case: object):
    return pytest.param(*case, marks=pytest.mark.slow)


def nothing(run: Updates, patch: pytest.MonkeyPatch) -> None:
    """A run that nothing disturbs."""


def killed_server(run: Updates, patch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(2))
    for client in run.clients:
        client.restart()


def killed_client(run: Updates, patch: pytest.MonkeyPatch) -> None:
    kill_after_count(patch, 3)
    run.restart_killed()


@pytest.mark.parametrize(
    ("told", "fault", "attempts", "counted"),
    [
        # What left before the server was killed leaves again, and counts again.
        ({}, killed_server, TWICE, [4, 4, 4]),
        slow({"clients_per_round": 4}, nothing, ONCE, ANY),
        slow({}, killed_client, ONCE, [3, 3, 4]),
    ],
)
def test_a_deployment_gives_the_bytes_of_one_process(
    updates, monkeypatch, told, fault, attempts, counted
):
    run = updates(**told)
    fault(run, monkeypatch)
    run.start()
    assert run.product() == in_process(run)
    assert run.attempts() == attempts
    assert sorted(len(run.counted(i)) for i in range(3)) == counted
    if fault is not killed_client:
        check_what_left(run)
    check_status(run)


def check_what_left(run: Updates) -> None:
    """Public words and noisy updates, all of them counted, and nothing else."""
    allowed = {"is_empty", "round", "node_id", "noise_std", "clip_bound", "request"}
    left: Counter[str] = Counter()
    for kind, name, reply in run.grid.replies:
        assert list(reply.content) == ["fedgs"]
        if kind == "train":
            assert {*reply.content["fedgs"]} == allowed | {"tensors"}
            left[name] += 1
    # One node's share of a sum with noise 2 C; nodes of a round are two or three.
    shares = {2.0 * 0.1 / nodes**0.5 for nodes in (2, 3)}
    for index, client in enumerate(run.clients):
        noise = [float(event.noise_std) for event in events(run, index)]
        assert len(noise) == left[client.name]
        assert all(min(abs(n - share) for share in shares) < 1e-9 for n in noise)


def check_status(run: Updates) -> None:
    """It shows the epsilons that `fedgs privacy` prints."""
    status = deploy_status.status_of(run.path)
    assert (status["round"], status["released"]) == (3, len(run.attempts()))
    shown = {row["relation"]: row["epsilon"] for row in status["epsilons"]}
    stated = [r for r in open_run(run.path).guarantees() if r.label == SEEDED]
    assert shown == {row.relation: row.epsilon for row in stated if row.unit == "user"}
    assert not any(row["guarantee"] for row in status["epsilons"])  # seeded noise


def test_a_client_restarted_after_a_lost_reply_sends_the_stored_bytes(updates):
    run = updates(noise_seed=None, steps=2)
    replies: list[bytes] = []

    def lose(request: Message, reply: Message) -> Message | None:
        replies.append(reply.content["fedgs"]["tensors"])
        run.clients[1].restart()
        return None if len(replies) == 1 else reply

    run.grid.spoil = spoil_at({(NAMES[1], 2): lose})
    run.start()
    assert replies[0] == replies[1]  # noise of the system's entropy, drawn once
    assert run.counted(1) == [1, 2]
    assert run.attempts() == ONCE[:2]


# ------------------------------------------------------------------ what a client sees


def events(run: Updates, index: int):
    """What a client has counted."""
    path = run.clients[index].state_dir / "releases" / "releases-00000.jsonl"
    return Ledger.read(path).events


def joining(run: Updates) -> tuple[dict[str, Any], DeployedClient]:
    """What a server tells a client that joins, and the client's place."""
    config = run_config(open_run(run.path).settings, run.folder.config)
    return public_settings(config), place_of(run)


def test_a_clients_log_names_the_method_its_settings_and_its_cost(updates, log):
    told, place = joining(updates(clients_per_round=3))
    place.join(told)
    (text,) = [line for line in log if "what is agreed" in line]
    assert "fedavg-gan, a round releases one update: steps = 3, clients_per_" in text
    # Three rounds; one of three nodes adds least to a client's cost.
    mu = 2 * 3**0.5 * 3**0.5 / OWN["noise_per_clip"]
    assert f"epsilon {epsilon_from_mu(mu, 1e-5):.4g} (replace-one" in text


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (LIMITS, "allow_updates"),
        (ALLOWED + "clip_bound = 1.0\n", "clip_bound"),
        # Of one of three nodes: 0.577 of 2 C.
        (ALLOWED + "min_noise_multiplier = 0.6\n", "min_noise_multiplier"),
        (ALLOWED + EPSILON % 0.5, "client_epsilon"),
    ],
)
def test_a_clients_limits_refuse_a_run_when_it_joins(updates, limits, limit):
    told, place = joining(updates(limits))
    assert limit in str(place.join(told).refusal)
    assert not (place.folder / "run.json").exists()


def test_a_client_stops_at_its_own_epsilon_whatever_the_server_asks(updates):
    """Each release costs mu = 2 C / (2 C / sqrt(3)); two of them are allowed."""
    cap = epsilon_from_mu(6**0.5 + 1e-6, 1e-5)
    run = updates(ALLOWED + EPSILON % cap)
    with pytest.raises(RunStopped, match="refused by its clients' limit: client_eps"):
        run.start()
    assert [run.counted(i) for i in range(3)] == [[1, 2]] * 3
    assert run.attempts() == ONCE


def test_a_hostile_servers_settings_are_refused_before_joining(updates):
    told, place = joining(updates())
    for change, problem in (
        ({"method.name": "dp-merf"}, "this client answers GS-WGAN and fedavg-gan"),
        ({"method.steps": "4"}, "steps = '4': must be of type int"),
        ({"method.clip_bound": 0.0}, "clip_bound = 0.0: give .* above 0"),
        ({"method.send": 1}, "send: fedavg-gan has steps"),
        ({"method.clients_per_round": 9}, "clients_per_round = 9: there are 6"),
        ({"spectral_norm": True}, "spectral_norm = True"),
    ):
        assert_refused(problem, place.join, told | change)
    assert not place.folder.exists()


# ------------------------------------------------------------------ the server's side


def test_resume_names_the_command_that_submits_again(updates, fedgs):
    refused(fedgs("resume", updates().path), "fedgs deploy submit")


CLI = ("deploy", "baseline")
LOCAL = ("--server", "127.0.0.1:1", "--insecure", "--client", "a", "--client", "b")
THREE = (*LOCAL, "--num-classes", 3)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("dp-merf", *LOCAL), "NAME = 'dp-merf': has no deployment; .* fedavg-gan"),
        (("fedavg-gan", *LOCAL), "num_classes is unset"),
        (("fedavg-gan", *THREE, "--steps", 0), "steps = 0"),
        (("fedavg-gan", *THREE, "--clients-per-round", 3), "= 3: there are 2 clients"),
    ],
)
def test_what_cannot_be_deployed_is_refused_with_code_2(fedgs, words, problem):
    refused(fedgs(*CLI, *words), problem)


def test_submit_tells_the_server_the_methods_settings(fedgs, monkeypatch):
    submissions = []
    monkeypatch.setattr(submit, "submit", submissions.append)
    own = ("--num-classes", 3, "--steps", 7, "--target-epsilon", 3)
    code, _, _ = fedgs(*CLI, "fedavg-gan", *LOCAL, *own)
    assert code == 0
    project = tomllib.loads(submit._project(submissions[0]))
    found = project["tool"]["flwr"]["app"]["config"]
    assert found["method"] == {"name": "fedavg-gan", "steps": 7, "target_epsilon": 3.0}
    assert (found["num_rounds"], found["nodes"]) == (7, "a,b")
