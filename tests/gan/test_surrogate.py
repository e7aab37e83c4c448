"""The surrogate critic: what it learns, what it reads, what it leaves alone."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import fedgs.federation.round
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.federation import checkpoint
from fedgs.federation.round import (
    ServerState,
    client_round,
    draw_fakes,
    new_server,
    server_round,
)
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.models import advance_in_place, ema_weight
from fedgs.gan.surrogate import FIRST_FIT, FIT_BATCH, Surrogate
from fedgs.mechanism.sanitizer import SanitizedGradients, from_dct, received, to_dct
from fedgs.randomness import stream
from fedgs.runs.run_folder import RunFolder
from oracles import adam, latents
from refusals import assert_refused
from runs import generator, interrupt_at, train
from tiny import FULL_PARTICIPATION, SIZES, digest, record_calls, tiny_config, tiny_data

pytestmark = pytest.mark.usefixtures("global_state_is_kept")
BASES = {
    "pixels": {"gradient_basis": "pixels"},
    "dct": {"gradient_basis": "dct", "dct_size": 8},
}
bases = pytest.mark.parametrize("basis", BASES.values(), ids=BASES)


def _config(**settings: object) -> ResolvedConfig:
    return tiny_config(**{"surrogate_steps": 2, "surrogate_memory": 2} | settings)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _triples(
    config: ResolvedConfig, count: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Fakes, labels and an average of releases."""
    fakes = _randn(count, config.image_channels, 16, 16, seed=seed).sigmoid()
    average = _randn(count, *config.release_shape[1:], seed=seed + 1)
    return fakes, torch.arange(count) % 3, average


def _releases(config: ResolvedConfig, round: int) -> list[SanitizedGradients]:
    noise = config.noise_std, config.clip_bound
    shape = config.release_shape
    return [
        received(_randn(*shape, seed=10 * round + node), round, node, *noise)
        for node in range(2)
    ]


def _trained(config: ResolvedConfig, num_rounds: int = 3) -> ServerState:
    """The server after rounds with releases that no data made."""
    server = new_server(config)
    for round in range(1, num_rounds + 1):
        asked = draw_fakes(config, server)
        server_round(config, server, *asked, _releases(config, round))
    return server


# ------------------------------------------------------------------ what it computes


@bases
@pytest.mark.parametrize("conditional", [True, False])
def test_the_fit_is_adam_on_the_distance_of_gradients(basis, conditional):
    """In plain autograd: the gradient of -S in the basis against average / C."""
    config = _config(**basis, conditional=conditional, clip_bound=0.5, batch_size=6)
    ours, other = Surrogate(config), Surrogate(config)
    fakes, labels, average = _triples(config, 6)
    ours.remember(fakes, labels, average)
    ours.fit(2)
    plain = adam(other.network, 2e-3, (0.9, 0.99))
    rng = stream(config.seed, "surrogate-fit", 2)
    for _ in range(config.surrogate_fit_steps):
        chosen = torch.from_numpy(rng.integers(6, size=6))
        x = fakes[chosen].requires_grad_()
        score = -other.network(x, labels[chosen]).sum()
        found = torch.autograd.grad(score, x, create_graph=True)[0]
        if config.gradient_basis == "dct":
            found = to_dct(found, 8)
        distance = found - average[chosen] / 0.5
        plain.zero_grad()
        (distance**2).sum().div(6).backward()
        plain.step()
    pairs = zip(ours.network.parameters(), other.network.parameters(), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_it_finds_the_gradients_that_noise_hides():
    """The truth is the gradient of one smooth score; noise has twice its norm."""
    config = _config(batch_size=32, surrogate_memory=6, **BASES["dct"])
    surrogate, weight = Surrogate(config), from_dct(_randn(3, 1, 8, 8), 16)

    def truth(labels: Tensor) -> Tensor:
        return weight[labels] / 8

    for round in range(1, 13):
        fakes, labels, noise = _triples(config, 32, seed=10 * round)
        surrogate.remember(fakes, labels, to_dct(truth(labels), 8) + noise / 4)
        surrogate.fit(round)
    fakes, labels, _ = _triples(config, 32, seed=999)  # seen in no round
    found = surrogate.image_grads(fakes, labels)
    cosine = torch.cosine_similarity(found.flatten(1), truth(labels).flatten(1))
    assert cosine.mean() > 0.8  # of a release: 1 / sqrt(1 + 2**2) = 0.45


@pytest.mark.parametrize("round", [1, 2])
def test_the_first_fit_is_longer_and_no_batch_exceeds_the_memory(monkeypatch, round):
    config = _config(batch_size=100)
    surrogate = Surrogate(config)
    fitted = record_calls(monkeypatch, Surrogate, "_gradient")
    for expected in (100, FIT_BATCH):  # 100 remembered, then 200
        fitted.clear()
        surrogate.remember(*_triples(config, 100))
        surrogate.fit(round)
        sizes = [len(images) for _, images, _ in fitted]
        assert sizes == [expected] * (12 * FIRST_FIT if round == 1 else 12)


def test_it_remembers_the_newest_rounds_alone():
    config = _config()  # two rounds of B = 4
    surrogate = Surrogate(config)
    rounds = [_triples(config, 4, seed=10 * round) for round in range(4)]
    for number, triples in enumerate(rounds, start=1):
        surrogate.remember(*triples)
        kept = rounds[max(0, number - 2) : number]
        for index, name in enumerate(("fakes", "labels", "gradients")):
            expected = torch.cat([triples[index] for triples in kept])
            assert torch.equal(surrogate.memory[name], expected), name


@bases
@pytest.mark.parametrize(("side", "channels"), [(16, 1), (28, 3), (32, 1), (64, 3)])
def test_its_gradients_lie_in_the_basis_for_every_image(basis, side, channels):
    config = _config(image_size=side, image_channels=channels, **basis)
    images, labels = _randn(4, channels, side, side), torch.tensor([0, 1, 2, 0])
    found = Surrogate(config).image_grads(images, labels)
    assert found.shape == images.shape
    assert found.abs().sum() > 0
    if config.gradient_basis == "dct":
        inside = from_dct(to_dct(found, config.dct_size), side)
        torch.testing.assert_close(found, inside, rtol=0, atol=1e-6)
    alone = Surrogate(config).image_grads(images[1:2], labels[1:2])
    torch.testing.assert_close(found[1:2], alone, rtol=0, atol=1e-6)


# ------------------------------------------------------------------ what a round does


def test_the_generator_steps_on_fresh_latents_along_its_gradients():
    config = _config(surrogate_steps=3, generator="resnet", generator_dim=2)
    server, other = _trained(config, num_rounds=1), new_server(config)
    assert server.surrogate is not None
    advance_in_place(other.generator)  # as `draw_fakes` does
    for step in range(3):
        z, labels = latents(config, 8, "surrogate-latent", step)  # 2 B
        advance_in_place(other.generator)
        images = other.generator(z, labels)
        grads = server.surrogate.image_grads(images.detach(), labels)  # fitted before
        other.optimizer.zero_grad()
        images.backward(grads / 8)
        other.optimizer.step()
    for name, value in other.generator.state_dict().items():
        found = server.generator.state_dict()[name]
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6, msg=name)


def test_a_rounds_average_forgets_as_much_as_one_step_would(monkeypatch):
    config = _config(surrogate_steps=4, ema_decay=0.5)
    updates = record_calls(monkeypatch, fedgs.federation.round, "update_ema")
    _trained(config, num_rounds=3)
    assert [step for *_, step, _ in updates] == list(range(12))
    kept = math.prod(ema_weight(step, decay) for *_, step, decay in updates[8:])
    assert kept == pytest.approx(0.5)


@pytest.mark.parametrize(
    "settings",
    [
        {"image_channels": 3, "image_size": 32, "generator": "dcgan"},
        {"conditional": False, "generator": "resnet"},
        {"latent": "normal", "transport": "compact", "gradient_basis": "dct"},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_generators_learn_to_draw_brighter_images_of_every_kind(settings):
    config = _config(generator_dim=4, surrogate_steps=4, dct_size=8, **settings)
    server = new_server(config)
    z, labels = latents(config, 50, "test")
    brighter = torch.zeros(config.release_shape)
    if config.gradient_basis == "dct":
        brighter[..., 0, 0] = -1.0
    else:
        brighter -= 0.1
    noise = config.noise_std, config.clip_bound
    means = []
    for round in range(1, 6):
        with torch.no_grad():
            means.append(float(server.generator(z, labels).mean()))
        asked = draw_fakes(config, server)
        answer = received(brighter, round, 0, *noise)
        server_round(config, server, *asked, [answer])
    assert means == sorted(means)
    assert means[-1] > means[0] + 1e-3


def test_where_the_setting_is_0_there_is_no_surrogate_and_no_bit_moves():
    config = tiny_config()
    other = dataclasses.replace(config, surrogate_fit_steps=1, surrogate_memory=1)
    one, two = (checkpoint.server_tensors(_trained(c)) for c in (config, other))
    assert digest(one) == digest(two)
    assert {name.split(".")[0] for name in one} == {"generator", "ema", "adam"}


# ------------------------------------------------------------------ what it reads


def test_equal_releases_of_other_data_give_the_same_bytes():
    """Everything after the privacy barrier is a function of the releases."""
    config = _config(**FULL_PARTICIPATION)
    data = tiny_data(config)
    inverted = dataclasses.replace(data, images=255 - data.images)
    states = []
    for private in (data, inverted):
        server, kept = new_server(config), []
        for round in (1, 2, 3):
            request, answered = draw_fakes(config, server)
            discriminators = Discriminators(config, range(len(SIZES)))
            hosted = range(len(SIZES))
            answer = client_round(config, discriminators, private, hosted, request, 0)
            kept.append(answer.values)  # private images were read, and differ
            server_round(config, server, request, answered, _releases(config, round))
        states.append((kept, digest(checkpoint.server_tensors(server))))
    (one, first), (two, second) = states
    assert first == second
    assert not any(torch.equal(*pair) for pair in zip(one, two, strict=True))


def test_another_release_gives_other_bytes():
    config = _config()
    server, other = new_server(config), new_server(config)
    for state, round in ((server, 1), (other, 2)):
        asked = draw_fakes(config, state)
        server_round(config, state, *asked, _releases(config, round))
    assert digest(checkpoint.server_tensors(server)) != digest(
        checkpoint.server_tensors(other)
    )


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("num_rounds", [0, 3])
def test_a_checkpoint_has_the_network_its_moments_and_the_memory(tmp_path, num_rounds):
    config = _config(output=str(tmp_path / "run"))
    folder, server = RunFolder.create(config), _trained(config, num_rounds)
    other = new_server(config)
    ledger = folder.ledger()
    folder.save_checkpoint(num_rounds, checkpoint.server_tensors(server), ledger)
    ledger.close()
    checkpoint.restore(folder, other)
    saved, found = map(checkpoint.server_tensors, (server, other))
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], found[name]) for name in saved)
    parts = {name.split(".")[1] for name in saved if name.startswith("surrogate.")}
    assert parts == {"network", "memory"} | ({"adam"} if num_rounds else set())


def test_a_run_with_stages_before_it_resumes_to_the_same_bytes(tmp_path):
    stages = {"stages": "random", "stage_weights": "1"}
    settings = FULL_PARTICIPATION | stages | {"stage_steps": "3", "stage_networks": 1}
    settings |= {"num_rounds": 4, "surrogate_fit_steps": 2, "checkpoint_every": 1}
    folders = [
        RunFolder.create(_config(output=str(tmp_path / name), **settings))
        for name in ("whole", "run")
    ]
    data = tiny_data(folders[0].config)
    train(folders[0], data=data)
    for round in (1, 2, 3):  # the stage, the first fit, one with a memory
        with pytest.raises(KeyboardInterrupt):
            train(folders[1], interrupt_at(round), data)
    train(folders[1], data=data)
    whole, resumed = (generator(folder.path) for folder in folders)
    assert whole == resumed


def test_a_checkpoint_without_a_surrogate_is_refused_where_there_is_one(tmp_path):
    plain = tiny_config(output=str(tmp_path / "run"))
    folder, server = RunFolder.create(plain), _trained(plain)
    ledger = folder.ledger()
    folder.save_checkpoint(3, checkpoint.server_tensors(server), ledger)
    ledger.close()
    words = "surrogate_steps = 2, but the checkpoint has no such .*; restore config"
    assert_refused(words, checkpoint.restore, folder, new_server(_config()))


def test_fewer_steps_than_none_are_refused():
    with pytest.raises(UserError, match="surrogate_steps = -1: give --surrogate-steps"):
        _config(surrogate_steps=-1)
