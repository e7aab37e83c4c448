"""Fed-Avg GAN: what a client can change, its costs; with DP-MERF, the frame's rest."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from command_line import flags, printed
from deployed_grid import LIMITS, kill_after_count, place_of
from fedgs.audit.finding import HOLDS, REFUTED
from fedgs.audit.mechanism import audit_round, claims_of_one_round, weakest_rounds
from fedgs.gan.losses import discriminator_loss
from fedgs.methods import dp_merf, fedavg_gan, new_state
from fedgs.methods.base import Hosted
from fedgs.methods.fedavg_gan import METHOD, client_updates
from fedgs.privacy.accountant import statements, statements_of_runs
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.privacy.plan import Plan
from fedgs.privacy.same_clients import Run
from fedgs.round.messages import decode_request, encode_request
from fedgs.round.preparation import state_bytes
from fedgs.round.run import RunStopped
from refusals import assert_refused
from runs import at_round, events, interrupt_at, train
from server.roll_call import public_settings
from simulated_grid import FakeGrid, product, start
from tiny import (
    changed,
    embedding_round,
    next_request,
    server_round,
    tiny_config,
    tiny_data,
)

DELTA = 1e-5
SETTINGS: dict[str, Any] = {"phases": "fedavg-gan", "clip_bound": 0.1}
SETTINGS |= {"spectral_norm": False, "discriminator_steps": 1, "clients_per_node": 2}
EVERYONE = SETTINGS | {"client_selection": "all"}
BALANCED = SETTINGS | {"client_selection": "balanced", "clients_per_round": 4}
MERF = EVERYONE | {"phases": "dp-merf", "clip_bound": 1.0, "num_rounds": 1}
MASKED = {"secure_aggregation": True, "num_rounds": 1}


@pytest.fixture(autouse=True)
def _small_and_short(monkeypatch) -> None:
    """Few features of DP-MERF, and ten steps of its fit."""
    monkeypatch.setattr(dp_merf, "NUM_FEATURES", 64)
    monkeypatch.setattr(dp_merf, "STEPS", 10)


def quiet(**settings: object):
    """One node without noise: its configuration, data, server and first request."""
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
    everyone = [Hosted(data, range(6), 0).only(k, is_alone=False) for k in range(6)]
    updates = client_updates(config, everyone, request).double()
    assert updates.norm(dim=1).min() > bound
    whole = released(config, data, request)
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
    answer = fedavg_gan.FedAvgGan.answer_stacked

    def again(*args: Any):
        return answer(*args).repeat(times, 1, 1, 1, 1)

    config, data, _, request = quiet()
    monkeypatch.setattr(fedavg_gan.FedAvgGan, "answer_stacked", again)
    with pytest.raises(TypeError, match="must answer exactly once"):
        released(config, data, request)


def test_local_steps_lower_the_clients_loss_and_the_server_raises_the_score():
    fast = {"discriminator_learning_rate": 0.05, "generator_learning_rate": 0.05}
    fast |= {"discriminator_steps": 6, "discriminator_batch_size": 16}
    config, data, server, request = quiet(**fast, clip_bound=100.0)
    discriminator = server.parts["discriminator"]
    drawn = fedavg_gan._draw(config, server.generator, data.of(0), 99)
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
        patch.setattr(fedavg_gan, "train_generator", lambda *of: None)
        server_round(config, server, None, [answer])
    assert loss() < at_first
    assert torch.allclose(weights() - begun, answer.values.flatten() / 6, atol=1e-6)
    at_first = score()
    fedavg_gan.train_generator(config, server)
    assert score() > at_first


# ------------------------------------------------------------------ accounting


@pytest.mark.parametrize(
    ("mode", "nodes", "times"), [(EVERYONE, 3, 5), (BALANCED, 2, 4)]
)
def test_epsilon_is_that_of_the_gaussian_releases_of_the_busiest_client(
    create, mode, nodes, times
):
    """Of three nodes; of two, where four of six clients take part."""
    folder = create("run", **mode | {"num_rounds": 5})
    start(folder, FakeGrid(3))
    config, sent = folder.config, events(folder)
    terms = {(event.release, event.batch_size, event.clip_bound) for event in sent}
    assert terms == {("update", 1, 0.1)}
    planned = statements(Plan.from_config(config), DELTA)
    for row in (*planned, *statements_of_runs([Run(config, sent)], DELTA)):
        sensitivity = {"replace-one": 2.0, "zero-out": 1.0}[row.relation]
        noise = 2 * 0.5 * (1 if row.adversary == "server" else nodes) ** 0.5
        mu = sensitivity / noise * times**0.5
        assert row.epsilon == pytest.approx(epsilon_from_mu(mu, DELTA))


@pytest.mark.parametrize(("mode", "what"), [(EVERYONE, "update"), (MERF, "embedding")])
def test_an_audit_refutes_nothing_unless_there_is_less_noise(mode, what):
    config = tiny_config(**mode, engine="flower", noise_seed=None)
    (round,) = weakest_rounds(config, []).values()
    claims = claims_of_one_round(Plan.from_config(config), DELTA)
    for noise, verdict in ((0.5, HOLDS), (0.25, REFUTED)):
        true = dataclasses.replace(config, noise_multiplier=noise)
        # As one of so many audits: a bound fails by chance once in 20 million times.
        of_many = {"round": round, "num_audits": 10**6, "max_draws": 2e8}
        found = audit_round(true, claims, DELTA, 20_000, **of_many)
        assert {finding.verdict for finding in found} == {verdict}
        assert {finding.attack for finding in found} == {f"A takes part, {what}"}


@pytest.mark.parametrize("recipe", ["fedavg-gan", "dp-merf-federated"])
def test_a_recipe_trains_and_spends_its_target(fedgs, tmp_path, recipe):
    short = {"data": "digits", "num_clients": 6, "image_size": 16, "seed": 1}
    short |= {"num_rounds": 1, "generator_dim": 4, "discriminator_dim": 4}
    short |= {"clients_per_node": 2, "test_fraction": 0, "output": tmp_path / "run"}
    printed(fedgs("train", "--recipe", recipe, *flags(**short)))
    found = json.loads(printed(fedgs("privacy", "of", tmp_path / "run", "--json")))
    rows = {row["relation"]: row for row in found}
    assert rows["zero-out"]["guarantee"]
    assert rows["zero-out"]["epsilon"] == pytest.approx(10.0, rel=0.01)


# ------------------------------------------------------------------ engines


MODES = [BALANCED, EVERYONE | MASKED, MERF, MERF | MASKED]


@pytest.mark.parametrize("mode", [*MODES, EVERYONE | {"message_precision": "compact"}])
def test_flower_gives_the_local_engines_bytes(create, mode):
    local = create("local", **mode | {"engine": "local"})
    train(local)
    flower = create("flower", **mode)
    start(flower, FakeGrid(3, num_workers=2))
    assert product(flower) == product(local)
    assert events(flower) == events(local)


@pytest.mark.parametrize("mode", [EVERYONE, BALANCED])
def test_a_deployment_that_is_stopped_and_killed_gives_the_bytes_of_one_process(
    deploy, undisturbed, monkeypatch, mode
):
    run = deploy("run", mode="selected", **mode, num_rounds=3, checkpoint_every=1)
    (run.root / "limits.toml").write_text(LIMITS + "allow_updates = true\n")
    with pytest.raises(RunStopped, match="after round 1"):
        run.start(at_round(1, run.stop.set))
    run.stop.clear()
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
    if mode is EVERYONE:
        assert sorted(len(run.counted(i)) for i in range(3)) == [4, 4, 5]


@pytest.mark.parametrize("mode", [BALANCED, MERF])
def test_a_request_crosses_the_network_whole_and_a_wrong_one_is_refused(mode):
    config = tiny_config(**mode, engine="flower")
    request = next_request(config, new_state(config))
    payload: dict[str, Any] = encode_request(request, config)
    assert decode_request(payload, config).digest() == request.digest()
    wrong = [
        ({"round": 0, "participants": ""}, "of round 0"),
        ({"tensors": payload["tensors"][:-4]}, "cannot be decoded"),
    ]
    if mode is BALANCED:
        wrong += [({"participants": "all"}, "more than 4 participants")]
        wrong += [({"trainees": ""}, "no round of Fed-Avg GAN")]
    for change, problem in wrong:
        assert_refused(problem, decode_request, payload | change, config)
    others = [{"more": torch.zeros(2)}]
    for name, value in [*request.tensors.items()][:1]:
        others += [{name: value[None]}, {name: value.half()}, {name: value * math.nan}]
    for tensors in others:
        told = dataclasses.replace(request, tensors=request.tensors | tensors)
        problem = "other tensors than|of the request|request's"
        assert_refused(problem, decode_request, encode_request(told, config), config)


# ------------------------------------------------------------------ refusals


LIMITED = [(EVERYONE, "updates"), (MERF, "embeddings")]


@pytest.mark.parametrize(("mode", "limit"), LIMITED)
def test_a_client_that_does_not_allow_it_refuses_when_it_joins(deploy, mode, limit):
    run = deploy("run", mode="selected", **mode)
    (run.root / "limits.toml").write_text("allow_seeded_noise = true\n")
    refusal = place_of(run).join(public_settings(run.folder.config)).refusal
    assert getattr(refusal, "setting", None) == f"allow_{limit}"


def test_a_hostile_servers_settings_are_refused_before_joining(deploy):
    run = deploy("run", mode="selected", **EVERYONE)
    told, place = public_settings(run.folder.config), place_of(run)
    for change, problem in (
        ({"phases": "os:path"}, "phases = .* code that is not part of fedgs"),
        ({"batch_size": 2}, "batch_size: no phase of the run"),
    ):
        assert_refused(problem, place.join, told | change)
    assert not place.folder.exists()


@pytest.mark.parametrize(
    ("mode", "change", "problem"),
    [
        (EVERYONE, {"spectral_norm": True}, "= True: .* give --no-spectral-norm"),
        (EVERYONE, {"batch_size": 4}, "batch_size:"),
        (EVERYONE, {"moment_size": 4}, "moment_size:"),
        (MERF, {"fakes_per_round": 8}, "fakes_per_round:"),
    ],
)
def test_settings_that_contradict_the_method_are_refused(mode, change, problem):
    assert_refused(problem, tiny_config, **mode | change)


@pytest.mark.parametrize("settings", [EVERYONE, MERF])
def test_no_memory_is_asked_for_discriminators_that_a_method_has_not(settings):
    assert state_bytes(tiny_config(**settings)) == 0
