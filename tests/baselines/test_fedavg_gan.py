"""Fed-Avg GAN: what one client can change, what it costs, and both engines' bits."""

import dataclasses
import math
import threading
from typing import Any

import pytest
import torch
from fedgs.baselines.fedavg_gan import METHOD, Settings, client_updates, node_update
from fedgs.baselines.fedavg_messages import decode_request, pack_networks, weights_of
from flwr.app import Message
from server.fedavg_gan import FedAvgGanStrategy

from baselines import small_run, train
from fedgs.baselines import deployed, fedavg_gan
from fedgs.baselines.contract import Facts
from fedgs.baselines.frame import Asked, open_run
from fedgs.baselines.releases import ReleaseLedger
from fedgs.gan.losses import discriminator_loss
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.round.messages import encode_request
from fedgs.round.run import RunStopped
from refusals import assert_refused
from simulated_grid import FakeGrid, product, round_of

DELTA = 1e-5
MODES = {
    "all": {},
    "sampled": {"clients_per_round": 7},
    "server": {"clients_per_round": 5, "adversary": "server"},
}


def new_run(folder, **given: Any):
    """A small run on three nodes of four clients."""
    asked = Asked(given.pop("target_epsilon", None), max_images_per_user=40)
    return small_run("fedavg-gan", folder, asked, clients_per_node=4, **given)


def made(folder, **given: Any):
    """A training under way with its configuration, data and request."""
    run, data = new_run(folder, **given)
    training = METHOD.trainer(run.settings, run.config, data, 3)
    return training, training.config, data, training.request(0)


# ------------------------------------------------------------------ the mechanism


@pytest.mark.parametrize("stacking", ["stacked", "loop"])
def test_one_client_moves_the_sum_by_its_sensitivity_and_no_more(tmp_path, stacking):
    bound = 1e-3  # binds: an unclipped update is larger
    given = {"noise_per_clip": 0.0, "clip_bound": bound}
    _, config, data, request = made(tmp_path / "r", **given)
    images = data.images.copy()
    images[data.client_records[1]] = 255 - images[data.client_records[1]]
    other = dataclasses.replace(data, images=images)
    sums = [node_update(config, own, request, 0).values for own in (data, other)]
    (alone,) = client_updates(config, data, request, [1])
    assert float(alone.norm()) > bound
    assert 0.01 * bound < float((sums[0] - sums[1]).norm()) <= 2 * bound * (1 + 1e-5)
    # Each update is clipped as a whole: zeroed, the others' sum is as without it.
    zeroed = sums[0].flatten() - alone[0] * (bound / alone.norm())
    for client in (0, 2, 3):
        (update,) = client_updates(config, data, request, [client])
        zeroed -= update[0] * (bound / update.norm())
    assert zeroed.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("adversary", "std"), [("release", 2.0), ("server", 2.0 * 3**0.5)]
)
def test_nodes_add_their_share_of_the_noise_or_all_of_it(tmp_path, adversary, std):
    """Of the sum over three nodes, C = 2 and a multiplier of 1."""
    given = {"clip_bound": 2.0, "noise_per_clip": 1.0, "clients_per_round": 7}
    given |= {"adversary": adversary, "discriminator_steps": 1}
    _, config, data, request = made(tmp_path / "r", **given)
    releases = [node_update(config, data, request, n) for n in range(3)]
    total = torch.stack([r.values.flatten().double() for r in releases]).sum(0)
    assert float(total.std()) == pytest.approx(std, rel=0.05)


def test_a_client_refuses_to_answer_outside_the_public_schedule(tmp_path):
    _, config, data, request = made(tmp_path / "r", clients_per_round=5)
    absent = min({*range(12)} - {*map(int, request.participants)})
    asked = dataclasses.replace(request, participants=(absent,), trainees=(absent,))
    problem = "other clients are asked than the public"
    assert_refused(problem, node_update, config, data, asked, absent // 4)
    # A deployed node refuses before anything is counted against its clients.
    node = deployed.UpdateNode(config, absent // 4, data, tmp_path / "private")
    for asks in (node.check, node.answer):
        assert_refused(problem, asks, asked)
    assert node.count.largest() == 0
    due = int(request.participants[0]) // 4
    scheduled = deployed.UpdateNode(config, due, data, tmp_path / "private")
    scheduled.answer(request)
    assert scheduled.count.largest() > 0


# ------------------------------------------------------------------ learning


RATES = ("discriminator_learning_rate", "generator_learning_rate")


def test_local_steps_lower_the_clients_loss_and_the_server_raises_the_score(tmp_path):
    rates = dict.fromkeys(RATES, 0.05)
    settings = {"noise_per_clip": 0.0, "clip_bound": 100.0, "batch_size": 16}
    training, config, data, request = made(tmp_path / "r", **rates, **settings)

    def loss():
        module = training._discriminator
        drawn = fedavg_gan._draw(config, data, training.generator, 0, 99)
        real, labels, fakes, mix = (part[0] for part in drawn)
        seen = (real, labels, fakes, labels, mix)
        return float(discriminator_loss(module, *seen, 0.0).detach())

    before, start = loss(), weights_of(training._discriminator)
    answers = training.ask(request)
    training._average(answers)
    assert loss() < before
    total = torch.stack([a.values.flatten().double() for a in answers]).sum(0)
    moved = weights_of(training._discriminator) - start
    assert torch.allclose(moved, (total / 12).float(), atol=1e-6)

    def score():
        z = torch.linspace(-1, 1, 64)[:, None].expand(64, 128)
        labels = torch.arange(64) % 10
        with torch.no_grad():
            fakes = training.generator(z, labels)
            return float(training._discriminator(fakes, labels).mean())

    before = score()
    training._train_generator(0)
    assert score() > before


# ------------------------------------------------------------------ accounting


def facts(num_clients):
    return Facts(num_clients, 10**6, None, 10, (1, 28, 28))


def events(count, participants: object = "all", noise_std=1.0, **more):
    event = {"participants": participants, "clip_bound": 1.0, "noise_std": noise_std}
    return [event | {"nodes": 1, "adversary": "release"} | more] * count


def test_epsilon_is_that_of_the_gaussian_releases_of_the_busiest_client():
    released = events(15, "all") + events(1, [3]) + events(1, [4])
    rows = METHOD.guarantees(Settings(), facts(6), released, DELTA)
    replaced, zeroed, published = rows
    assert [row.unit for row in (replaced, zeroed, published)] == ["user"] * 3
    assert (replaced.label, replaced.relation) == ("valid", "replace-one")
    assert replaced.epsilon == pytest.approx(epsilon_from_mu(8.0, DELTA))
    assert (zeroed.label, zeroed.relation) == ("valid", "zero-out")
    # mu = 4: Phi(-4.0954) - e^24.3816 Phi(-8.0954) = 1e-5.
    assert zeroed.epsilon == pytest.approx(24.3816, abs=1e-4)


def test_the_noise_that_counts_is_that_of_all_nodes_or_of_one():
    for adversary, mu in (("release", 0.5), ("server", 1.0)):
        released = events(1, nodes=4, adversary=adversary)
        zero = Settings(relation="zero-out")
        zero_out = METHOD.guarantees(zero, facts(4), released, DELTA)[0]
        assert zero_out.epsilon == pytest.approx(epsilon_from_mu(mu, DELTA))
        assert "node" in zero_out.conditions[1]


@pytest.mark.parametrize(
    ("relation", "adversary"), [("zero-out", "release"), ("replace-one", "server")]
)
def test_a_target_is_met_by_what_the_ledger_then_says(tmp_path, relation, adversary):
    settings = {"relation": relation, "clients_per_round": 5}
    settings |= {"adversary": adversary, "target_epsilon": 4.0, "steps": 2}
    run, data = new_run(tmp_path / "run", **settings)
    training = METHOD.trainer(run.settings, run.config, data, 3)
    released = [training.event(round) for round in (1, 2)]
    first, *_ = METHOD.guarantees(run.settings, run.facts, released, DELTA)
    assert (first.unit, first.relation) == ("user", relation)
    assert first.epsilon == pytest.approx(4.0, rel=1e-6)


def test_the_published_epsilon_of_table_2():
    """Z .01, 10 of 866 users, 1000 rounds, delta 1.15e-3: 9.99e6 (GS-WGAN, Table 2)."""
    released = events(1000, list(range(10)), noise_std=0.01)
    found = fedavg_gan.published_epsilon(facts(866), released, 1.15e-3)
    assert found == pytest.approx(9.991e6, rel=1e-4)


# ------------------------------------------------------------------ Flower


@pytest.fixture(autouse=True)
def _process(server_process):
    pass


def on_flower(run, spoil=None, stop=None, report=lambda metrics: None):
    network = FakeGrid(run.config.num_nodes, spoil)
    with run.folder.locked():
        FedAvgGanStrategy(run, report, stop or threading.Event()).start(network)
    return network


def ledger(folder):
    return ReleaseLedger.read(folder / "ledger.jsonl").events


def stopped_and_killed(folder) -> None:
    stop, lengths = threading.Event(), {}
    with pytest.raises(RunStopped, match="stopped after step 1"):
        on_flower(open_run(folder), stop=stop, report=lambda metrics: stop.set())

    def lose(who, request: Message, reply: Message):
        if (number := round_of(request)) is not None:
            lengths.setdefault(number, len(ledger(folder)))
        if number == 3 and who == 1:
            raise KeyboardInterrupt  # the server is killed
        return reply

    with pytest.raises(KeyboardInterrupt):
        on_flower(open_run(folder), lose)
    assert lengths == {2: 2, 3: 3}  # on the disk before it is sent


@pytest.mark.parametrize(
    ("mode", "fault", "attempts"),
    [
        ("sampled", None, [1, 1, 1]),
        pytest.param("server", None, [1, 1, 1], marks=pytest.mark.slow),
        ("all", stopped_and_killed, [1, 1, 1, 2]),  # the lost round is counted again
    ],
)
def test_flower_gives_the_local_engines_bytes(tmp_path, mode, fault, attempts):
    local, data = new_run(tmp_path / "local", **MODES[mode])
    train(local, data)
    given = {"engine": "flower", "checkpoint_every": 1, **MODES[mode]}
    flower, _ = new_run(tmp_path / "flower", **given)
    if fault is not None:
        fault(tmp_path / "flower")
    on_flower(open_run(tmp_path / "flower"))
    assert product(flower.folder) == product(local.folder)
    found = ledger(tmp_path / "flower")
    assert [release.attempt for release in found] == attempts
    assert fault or found == ledger(tmp_path / "local")


def test_a_request_crosses_the_network_whole_and_a_wrong_one_is_refused(tmp_path):
    training, *_ = made(tmp_path / "r", clients_per_round=5)
    config, request = training.config, training.request(2)
    payload: dict[str, Any] = encode_request(request, config, pack_networks(request))
    got = decode_request(payload, config)
    assert got.digest() == request.digest()
    assert got.participants == request.participants
    for change, message in (
        ({"round": 9}, "round is no integer from 0 to"),
        ({"round": 0}, "more than 0 participants"),
        ({"tensors": payload["tensors"][:-4]}, "cannot be decoded|at most"),
        ({"participants": "all"}, "more than 5 participants"),
        ({"trainees": ""}, "no round of Fed-Avg GAN"),
        ({"more": 1}, "other fields"),
    ):
        assert_refused(message, decode_request, payload | change, config)
    broken = {n: v * math.nan for n, v in request.discriminator.items()}
    bad = dataclasses.replace(request, discriminator=broken)
    payload = encode_request(bad, config, pack_networks(bad))
    assert_refused("non-finite values in a round's", decode_request, payload, config)


def test_an_answer_larger_than_an_honest_one_is_refused(tmp_path, monkeypatch):
    run, _ = new_run(tmp_path / "run", engine="flower", noise_per_clip=0.0, steps=1)
    honest = node_update

    def large(*args):
        release = honest(*args)
        release.values = release.values + 1
        return release

    monkeypatch.setattr(deployed, "node_update", large)
    with pytest.raises(RunStopped, match="1 updates with a norm above"):
        on_flower(run)


def test_a_client_receives_both_networks_and_sends_one_discriminator(tmp_path):
    run, data = new_run(tmp_path / "run")
    training = METHOD.trainer(run.settings, run.config, data, 3)
    generator = sum(p.numel() for p in training.generator.parameters())
    update = len(weights_of(training._discriminator))
    sent = METHOD.bytes_per_client(run.settings, run.config, run.facts)
    assert sent == 4 * run.settings.steps * (generator + 2 * update)


@pytest.mark.slow
@pytest.mark.flower
def test_flowers_simulation_gives_the_local_engines_bytes(tmp_path):
    from fedgs.app.baselines import command

    local, data = new_run(tmp_path / "local", clients_per_round=7)
    train(local, data)
    flower, data = new_run(tmp_path / "flower", engine="flower", clients_per_round=7)
    command._train(flower, data)
    assert product(flower.folder) == product(local.folder)
    assert ledger(tmp_path / "flower") == ledger(tmp_path / "local")
