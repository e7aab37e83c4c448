"""Fed-Avg GAN in the frame: what a client can change, its costs, the same bits."""

import dataclasses
import itertools
import math
import secrets
import threading
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from deployed_grid import LIMITS, NAMES, Deployment, kill_after_count, place_of
from fedgs.audit.finding import HOLDS, REFUTED
from fedgs.audit.mechanism import audit_round, claims_of_one_round, weakest_rounds
from fedgs.config.recipes import configure, recipe
from fedgs.config.run_config import RunConfig
from fedgs.federation import answer as barrier
from fedgs.federation.messages import decode_request, encode_request
from fedgs.federation.training import RunStopped
from fedgs.gan.losses import discriminator_loss
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.sanitizer import PerSampleGradients
from fedgs.methods import fedavg_gan, new_state
from fedgs.methods.fedavg_gan import METHOD, client_updates
from fedgs.privacy.accounting import Run, statements, statements_of_runs
from fedgs.privacy.gaussian import epsilon_from_mu, mu_from_epsilon
from fedgs.privacy.plan import Plan
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import at_round, attempts, events, interrupt_at, train
from server.roll_call import public_settings
from server.strategy import FederatedGan
from simulated_grid import FakeGrid, product, spoil_at, start
from tiny import changed, embedding_round, server_round, tiny_config, tiny_data

DELTA = 1e-5
METHOD_ALONE = {"method": "fedavg-gan", "batch_size": 1, "spectral_norm": False}
SETTINGS = METHOD_ALONE | {"clip_bound": 0.1, "discriminator_steps": 1}
SETTINGS |= {"clients_per_node": 2, "ema_decay": 0.5}
EVERYONE: dict[str, Any] = SETTINGS | {"client_selection": "all"}
BALANCED: dict[str, Any] = SETTINGS | {"client_selection": "balanced"}
BALANCED |= {"clients_per_round": 4}


def quiet(**settings: object):
    """One node without noise: its configuration, its data and round 1's request."""
    one_node = {"noise_multiplier": 0.0, "clients_per_node": 6}
    config = tiny_config(**EVERYONE | one_node | settings)
    server = new_state(config)
    return config, tiny_data(config), server, METHOD.begin(config, server)[0]


def released(config, data, request, node: int = 0) -> torch.Tensor:
    hosted = config.hosting.hosted(node)
    return embedding_round(config, data, hosted, request, node).values.double()


# ------------------------------------------------------------------ the mechanism


@pytest.mark.parametrize("stacking", ["stacked", "loop"])
def test_one_client_moves_the_sum_by_its_sensitivity_and_no_more(stacking):
    bound = 1e-4  # binds: an unclipped update is larger
    config, data, _, request = quiet(clip_bound=bound)
    updates = torch.cat([*client_updates(config, data, request, range(6))]).double()
    assert updates.norm(dim=1).min() > bound
    whole = released(config, data, request)
    assert whole.shape == config.terms(1).shape == (1, 1, 1, updates.shape[1])
    # Each is clipped as a whole, and nothing else is in the sum.
    expected = (updates * bound / updates.norm(dim=1, keepdim=True)).sum(0)
    assert torch.allclose(whole.flatten(), expected, atol=1e-8)
    images = data.images.copy()
    images[data.client_records[1]] = 255 - images[data.client_records[1]]
    other = dataclasses.replace(data, images=images)
    moved = float((whole - released(config, other, request)).norm())
    assert 0.01 * bound < moved <= 2 * bound * (1 + 1e-5)


def test_hostile_networks_cannot_leave_more_than_the_clip_bound():
    config, data, _, request = quiet()
    for value in (-1e10, 1e30):  # an update that is not finite becomes zero
        huge = {n: torch.full_like(v, value) for n, v in request.tensors.items()}
        total = released(config, data, changed(request, **huge))
        assert total.isfinite().all()
        assert total.norm() <= 6 * config.clip_bound * (1 + 1e-5)


def test_the_noise_of_the_sum_is_that_of_the_nodes():
    config = tiny_config(**EVERYONE)
    request = METHOD.begin(config, new_state(config))[0]
    total = sum(released(config, tiny_data(config), request, n) for n in range(3))
    assert float(total.std()) == pytest.approx(2 * 0.1 * 0.5 * 3**0.5, rel=0.05)


@pytest.mark.parametrize("times", [0, 2])
def test_a_client_that_answers_other_than_once_is_refused(monkeypatch, times):
    answer = fedavg_gan.FedAvgGan.answer

    def again(*args: Any):
        (found,) = answer(*args)
        yield PerSampleGradients(found.values.repeat(times, 1, 1, 1, 1))

    config, data, _, request = quiet()
    monkeypatch.setattr(fedavg_gan.FedAvgGan, "answer", again)
    with pytest.raises(TypeError, match="answers other than once a client"):
        released(config, data, request)


# ------------------------------------------------------------------ learning


def test_local_steps_lower_the_clients_loss_and_the_server_raises_the_score():
    fast = {"discriminator_learning_rate": 0.05, "generator_learning_rate": 0.05}
    fast |= {"discriminator_steps": 6, "discriminator_batch_size": 16}
    config, data, server, request = quiet(**fast, clip_bound=100.0)
    discriminator = server.parts["discriminator"]
    drawn = fedavg_gan._draw(config, data, server.generator, 0, 99)
    real, labels, fakes, mix = (part[0] for part in drawn)

    def loss() -> float:
        seen = (real, labels, fakes, labels, mix)
        return float(discriminator_loss(discriminator, *seen, 0.0).detach())

    def weights() -> torch.Tensor:
        return parameters_to_vector(discriminator.parameters()).detach()

    def score() -> float:
        z = torch.linspace(-1, 1, 64)[:, None].expand(64, config.latent_dim)
        of = torch.arange(64) % 3
        return float(discriminator(server.generator(z, of), of).mean().detach())

    at_first, begun = loss(), weights()
    answer = embedding_round(config, data, range(6), request, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedavg_gan, "_train_generator", lambda *of: None)
        server_round(config, server, None, [answer])
    assert loss() < at_first
    assert torch.allclose(weights() - begun, answer.values.flatten() / 6, atol=1e-6)
    at_first = score()
    fedavg_gan._train_generator(config, server)
    assert score() > at_first


# ------------------------------------------------------------------ accounting


@pytest.mark.parametrize(("mode", "times"), [(EVERYONE, 5), (BALANCED, 4)])
def test_epsilon_is_that_of_the_gaussian_releases_of_the_busiest_client(
    create, mode, times
):
    """Of three nodes or, for four of six clients, of two; zero-out moves it by C."""
    folder = create("run", **mode | {"num_rounds": 5})
    start(folder, FakeGrid(3))
    config, sent = folder.config, events(folder)
    assert {event.release for event in sent} == {"update"}
    assert {(event.batch_size, event.clip_bound) for event in sent} == {(1, 0.1)}
    nodes = 3 if mode is EVERYONE else 2
    planned = statements(Plan.from_config(config), DELTA)
    for row in (*planned, *statements_of_runs([Run(config, sent)], DELTA)):
        sensitivity = {"replace-one": 2.0, "zero-out": 1.0}[row.relation]
        noise = 2 * 0.5 * (1 if row.adversary == "server" else nodes) ** 0.5
        mu = sensitivity / noise * times**0.5
        assert row.epsilon == pytest.approx(epsilon_from_mu(mu, DELTA))


def test_a_target_is_met_by_the_recipe():
    given = {"num_clients": 12, "num_classes": 10, "data": "digits", "seed": 1}
    config = configure("fedavg-gan", None, given | {"clients_per_node": 4})
    assert (config.target_epsilon, config.relation) == (10.0, "zero-out")
    mu = mu_from_epsilon(10.0, config.delta)
    noise = 1000**0.5 / (2 * mu * 3**0.5)
    found = statements(
        Plan.from_config(dataclasses.replace(config, noise_multiplier=noise)), DELTA
    )
    epsilons = {row.relation: row.epsilon for row in found}
    assert epsilons["zero-out"] == pytest.approx(10.0, rel=1e-6)


def test_an_audit_refutes_nothing_unless_there_is_less_noise(monkeypatch):
    seeds = itertools.count()  # no test fails by chance

    def seeded(noise_seed: None, *place: int) -> NoiseStream:
        return NoiseStream(next(seeds), *place)

    monkeypatch.setattr(barrier, "NoiseStream", seeded)
    monkeypatch.setattr(secrets, "randbelow", lambda bound: 5)
    config = tiny_config(**EVERYONE, engine="flower", noise_seed=None)
    (round,) = weakest_rounds(config, []).values()
    claims = claims_of_one_round(Plan.from_config(config), DELTA)
    for noise, verdict in ((0.5, HOLDS), (0.25, REFUTED)):
        true = dataclasses.replace(config, noise_multiplier=noise)
        found = audit_round(true, claims, DELTA, 20_000, round=round)
        assert {finding.verdict for finding in found} == {verdict}
        assert {finding.attack for finding in found} == {"A takes part, update"}


# ------------------------------------------------------------------ engines


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        (BALANCED, {}),
        (EVERYONE, {"message_precision": "compact"}),
        (EVERYONE, {"secure_aggregation": True, "num_rounds": 2}),
    ],
)
def test_flower_gives_the_local_engines_bytes(create, mode, more):
    local = create("local", **mode | more | {"engine": "local"})
    train(local)
    flower = create("flower", **mode | more)
    start(flower, FakeGrid(3, num_workers=2))
    assert product(flower) == product(local)
    assert events(flower) == events(local)


def test_a_run_that_is_stopped_and_killed_ends_with_the_same_bytes(create):
    whole, run = create("whole", **BALANCED), create("run", **BALANCED)
    start(whole, FakeGrid(3))
    stop = threading.Event()
    with pytest.raises(RunStopped, match="stopped after round 1"):
        FederatedGan(run, at_round(1, stop.set), stop).start(FakeGrid(3))
    with pytest.raises(KeyboardInterrupt):
        start(RunFolder.open(run.path), FakeGrid(3), interrupt_at(3))
    start(RunFolder.open(run.path), FakeGrid(3))
    assert product(run) == product(whole)
    assert attempts(run) == [(1, 1), (2, 1), (3, 1), (3, 2)]  # counted again


def test_an_answer_larger_than_an_honest_one_is_refused(create, monkeypatch):
    folder = create("run", **EVERYONE | {"noise_multiplier": 0.0, "num_rounds": 1})
    sanitize = barrier.sanitize

    def large(*args: Any):
        found = sanitize(*args)
        found.values = found.values + 1
        return found

    monkeypatch.setattr(barrier, "sanitize", large)
    with pytest.raises(RunStopped, match="1 of 1 updates with a norm above"):
        start(folder, FakeGrid(3))


def test_a_request_crosses_the_network_whole_and_a_wrong_one_is_refused():
    config = tiny_config(**BALANCED, engine="flower")
    server = new_state(config)
    server.round = 1
    request = METHOD.begin(config, server)[0]
    payload: dict[str, Any] = encode_request(request, config)
    assert decode_request(payload, config).digest() == request.digest()
    name, value = next(iter(request.tensors.items()))
    for change, problem in (
        ({"round": 9}, "round is no integer from 0 to 3"),
        ({"round": 0, "participants": ""}, "round 0, which the run's method has not"),
        ({"tensors": payload["tensors"][:-4]}, "cannot be decoded|at most"),
        ({"participants": "all"}, "more than 4 participants"),
        ({"trainees": ""}, "no round of Fed-Avg GAN"),
        ({"more": 1}, "other fields"),
    ):
        assert_refused(problem, decode_request, payload | change, config)
    for wrong in (value[None], value.half(), value * math.nan):
        broken = encode_request(changed(request, **{name: wrong}), config)
        assert_refused("request's", decode_request, broken, config)


# ------------------------------------------------------------------ deployed


def deployed(deploy, limits: str = "allow_updates = true\n", **settings: Any):
    run = deploy("run", mode="selected", **EVERYONE | {"num_rounds": 3} | settings)
    (run.root / "limits.toml").write_text(LIMITS + limits)
    return run


@pytest.mark.parametrize("settings", [{}, BALANCED])
def test_a_deployment_gives_the_bytes_of_one_process(
    deploy, undisturbed, monkeypatch, settings
):
    run: Deployment = deployed(deploy, **settings | {"checkpoint_every": 1})
    kill_after_count(monkeypatch, 2)
    run.restart_killed()
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(3))
    for client in run.clients:
        client.restart()
    run.start()
    assert run.product() == undisturbed(run)
    # What left before the server was killed leaves again, and counts again.
    assert run.attempts() == [(1, 1), (2, 1), (3, 1), (3, 2)]
    if not settings:
        assert sorted(len(run.counted(i)) for i in range(3)) == [4, 4, 5]
    allowed = {"is_empty", "round", "node_id", "noise_std", "clip_bound", "request"}
    answers = [reply for kind, _, reply in run.grid.replies if kind == "train"]
    assert {frozenset(r.content["fedgs"]) for r in answers if r.has_content()} == {
        frozenset(allowed | {"tensors"})
    }


def test_a_client_restarted_after_a_lost_reply_sends_the_stored_bytes(deploy):
    run, replies = deployed(deploy, noise_seed=None), list[bytes]()

    def lose(request, reply):
        replies.append(reply.content["fedgs"]["tensors"])
        run.clients[1].restart()
        return None if len(replies) == 1 else reply

    run.grid.spoil = spoil_at({(NAMES[1], 2): lose})
    run.start()
    assert replies[0] == replies[1]  # noise of the system's entropy, drawn once
    assert run.counted(1) == [1, 2, 3]


COSTS = 'client_epsilon = %s\ndelta = 1e-5\nrelation = "replace-one"\n'


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ("", "allow_updates"),
        ("clip_bound = 1.0\n", "clip_bound"),
        ("min_noise_multiplier = 0.6\n", "min_noise_multiplier"),
        (COSTS % 0.5, "client_epsilon"),
    ],
)
def test_a_clients_limits_refuse_a_run_when_it_joins(deploy, limits, limit):
    run = deployed(deploy, "allow_updates = true\n" * bool(limits) + limits)
    place = place_of(run)
    refusal = place.join(public_settings(run.folder.config)).refusal
    assert refusal is not None
    assert refusal.setting == limit
    assert not (place.folder / "run.json").exists()


def test_a_client_stops_at_its_own_epsilon_whatever_the_server_asks(deploy):
    """Each release costs mu = 1 / 0.5; two of them are allowed."""
    cap = epsilon_from_mu(8**0.5 + 1e-6, DELTA)
    run = deployed(deploy, "allow_updates = true\n" + COSTS % cap)
    with pytest.raises(RunStopped, match="refused by its clients' limit: client_eps"):
        run.start()
    assert [run.counted(i) for i in range(3)] == [[1, 2]] * 3


def test_a_hostile_servers_settings_are_refused_before_joining(deploy):
    run = deployed(deploy)
    told, place = public_settings(run.folder.config), place_of(run)
    for change, problem in (
        ({"method": "os:path"}, "names code that is not of fedgs"),
        ({"method": "fed-avg"}, "method = 'fed-avg': give one of"),
        ({"num_rounds": "4"}, "num_rounds = '4': must be of type int"),
        ({"batch_size": 2}, "batch_size = 2: .*one answer a client"),
    ):
        assert_refused(problem, place.join, told | change)
    assert not place.folder.exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spectral_norm": True}, "spectral_norm = True: .* give --no-spectral-norm"),
        ({"batch_size": 4}, "batch_size = 4: .*one answer a client; give --batch-size"),
        ({"stages": "means"}, "stages = .* is of method = gs-wgan"),
        ({"dct_size": 8}, "dct_size = 8: is of method = gs-wgan"),
        ({"fakes_per_round": 8}, "fakes_per_round = 8: is of method = gs-wgan"),
    ],
)
def test_settings_that_contradict_the_method_are_refused(change, problem):
    assert isinstance(recipe("fedavg-gan").validate(), RunConfig)
    assert_refused(problem, tiny_config, **EVERYONE | change)
