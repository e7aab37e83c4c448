"""The round: who takes part, what is sent, trained, released, averaged and kept."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedgs.federation.round
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.federation.messages import EVERYONE, FakeBatch
from fedgs.federation.round import (
    client_round,
    draw_fakes,
    new_server,
    select,
    server_round,
)
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.models import ADAM_BETAS, advance_spectral_vectors, build_generator
from fedgs.mechanism import sanitizer
from fedgs.mechanism.noise import NoiseStream
from fedgs.randomness import derived_seed
from oracles import PLAIN, PLAIN_TOLERANCE, PlainGan, adam, latents
from tiny import (
    SIZES,
    client_digest,
    digest,
    record_calls,
    request_of,
    tiny_config,
    tiny_data,
)

# Neither a round nor the warm start moves a random state of the process.
pytestmark = pytest.mark.usefixtures("global_state_is_kept")
LARGE_BOUND = 1e6  # no gradient of a tiny discriminator is clipped
ALL = range(len(SIZES))


def _answer(
    config: RunConfig,
    request: FakeBatch | None = None,
    discriminators: Discriminators | None = None,
    data: FederatedImages | None = None,
    hosted: Sequence[int] = ALL,
    node_id: int = 0,
) -> tuple[sanitizer.SanitizedGradients | None, Discriminators]:
    if discriminators is None:
        discriminators = Discriminators(config, hosted)
    answer = client_round(
        config,
        discriminators,
        data or tiny_data(config),
        hosted,
        request or request_of(config),
        node_id,
    )
    return answer, discriminators


# ------------------------------------------------------------------------ selection

FEDERATIONS = st.integers(1, 13).flatmap(
    lambda num_clients: st.tuples(st.just(num_clients), st.integers(1, num_clients))
)


@given(federation=FEDERATIONS, num_rounds=st.integers(1, 40), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_balanced_selection_is_balanced_after_any_number_of_rounds(
    federation, num_rounds, seed
):
    num_clients, count = federation
    config = tiny_config(
        num_clients=num_clients,
        clients_per_round=count,
        client_selection="balanced",
        seed=seed,
    )
    visits = Counter(dict.fromkeys(range(num_clients), 0))
    for round in range(1, num_rounds + 1):
        chosen = select(config, round)
        assert len(chosen) == count
        assert list(chosen) == sorted(set(chosen))
        visits.update(chosen)
        assert set(visits) == set(range(num_clients))
        assert max(visits.values()) <= math.ceil(count * round / num_clients)
        assert min(visits.values()) >= count * round // num_clients


@pytest.mark.parametrize("selection", ["balanced", "uniform"])
def test_selection_is_a_function_of_seed_and_round(selection):
    config = tiny_config(clients_per_round=4, client_selection=selection)
    forwards = [select(config, round) for round in range(1, 31)]
    fedgs.federation.round._balanced_lap.cache_clear()  # a resumed run starts anywhere
    backwards = [select(config, round) for round in range(30, 0, -1)]
    assert forwards == backwards[::-1]
    other = dataclasses.replace(config, seed=6)
    assert forwards != [select(other, round) for round in range(1, 31)]
    assert select(tiny_config(client_selection="all"), 1) == EVERYONE


def test_balanced_selection_can_start_at_a_late_round():
    # 1999 of 2000: every lap up to the 1999th leans on the one before.
    config = tiny_config(
        num_clients=2000, clients_per_round=1999, client_selection="balanced"
    )
    fedgs.federation.round._balanced_lap.cache_clear()
    assert len(set(select(config, 1990))) == 1999


@pytest.mark.parametrize("count", [1, 4])
def test_uniform_selection_draws_every_client_equally_often(count):
    config = tiny_config(clients_per_round=count, client_selection="uniform")
    chosen = [select(config, round) for round in range(1, 6001)]
    assert all(list(each) == sorted(set(each)) for each in chosen)
    assert {len(each) for each in chosen} == {count}
    visits = Counter(client for each in chosen for client in each)
    # Binomial(6000, m / 6), six standard deviations.
    share = count / 6
    slack = 6 * (6000 * share * (1 - share)) ** 0.5
    assert all(abs(visits[client] - 6000 * share) < slack for client in ALL)
    balanced = dataclasses.replace(config, client_selection="balanced")
    laps = range(1, 6 * 40 + 1, 6)  # of its laps few repeat another one's order
    orders = [tuple(select(balanced, lap + i) for i in range(6)) for lap in laps]
    assert len(set(orders)) > 30


# ------------------------------------------------------------ limits: plain WGAN-GP


def test_one_client_without_noise_or_clipping_is_a_plain_wgan_gp():
    config = tiny_config(
        num_clients=1,
        client_selection="all",
        noise_multiplier=0.0,
        clip_bound=LARGE_BOUND,
        **PLAIN,
    )
    data = tiny_data(config)
    server, discriminators = new_server(config), Discriminators(config, [0])
    plain = PlainGan(config, data, 0)
    generator = build_generator(config, derived_seed(config.seed, "generator"))
    before = {n: v.detach().clone() for n, v in generator.named_parameters()}
    optimizer = adam(generator, config.generator_learning_rate, ADAM_BETAS)
    for round in (1, 2):
        request, answered = draw_fakes(config, server)
        answer, _ = _answer(config, request, discriminators, data, hosted=[0])
        server_round(config, server, answered, [answer])

        z, labels = latents(config, 8, "latent", round)
        fakes = generator(z, labels).detach()
        plain.discriminator_steps("data", round, fakes, labels)
        plain.generator_step(generator, optimizer, (z[-4:], labels[-4:]))
    for name, value in generator.named_parameters():
        ours = dict(server.generator.named_parameters())[name]
        torch.testing.assert_close(ours.data, value.data, **PLAIN_TOLERANCE, msg=name)
        assert (value - before[name]).abs().median() > 5e-4, name
    for name, value in plain.discriminator.named_parameters():
        ours = discriminators.params[name][0]
        torch.testing.assert_close(ours, value.data, **PLAIN_TOLERANCE, msg=name)


# -------------------------------------------------------------- requests and training


@pytest.mark.parametrize(("batch_size", "sent"), [(3, 8), (12, 12)])
def test_paper_mode_sends_every_steps_fakes_and_answers_the_last_batch(
    monkeypatch, batch_size, sent
):
    # n_dis = 2 steps of 4 fakes go down, the last B of them are answered.
    quiet = {"noise_multiplier": 0.0, "clip_bound": LARGE_BOUND}
    config = tiny_config(batch_size=batch_size, **quiet)
    request, answered = draw_fakes(config, new_server(config))
    assert request.images.shape == (sent, 1, 16, 16)
    assert request.labels.shape == (sent,)
    assert 0 <= request.images.min() <= request.images.max() <= 1
    assert 0 <= request.labels.min() <= request.labels.max() < 3
    assert not torch.equal(request.images, request_of(config, 2).images)
    assert torch.equal(answered.detach(), request.images[-batch_size:])
    assert answered.requires_grad

    trained = record_calls(monkeypatch, Discriminators, "train")
    answer, discriminators = _answer(config, request)
    used = torch.stack([args[4] for args in trained])  # (step, client, fake, ...)
    assert used.shape == (2, 2, 4, 1, 16, 16)
    for client in (0, 1):
        assert torch.equal(used[:, client].flatten(0, 1), request.images[:8])

    chosen = torch.tensor(request.participants)
    fakes = request.images[-batch_size:], request.labels[-batch_size:]
    expected = discriminators.query(chosen, *fakes).sum(0)
    torch.testing.assert_close(answer.values, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "chunk_size"),
    [
        ({"discriminator_steps": 1}, 64),
        ({"discriminator_steps": 7}, 64),
        ({}, 1),
        ({"client_selection": "all"}, 4),
    ],
)
def test_a_round_is_one_release_however_many_steps_and_chunks_it_takes(
    monkeypatch, settings, chunk_size
):
    config = tiny_config(**settings)
    released = record_calls(monkeypatch, fedgs.federation.round, "sanitize")
    drawn = record_calls(monkeypatch, NoiseStream, "normal")
    request = request_of(config)
    answer, discriminators = _answer(config, request)
    assert type(answer) is sanitizer.SanitizedGradients
    assert (len(released), len(drawn)) == (1, 1)
    steps, asked = config.discriminator_steps, request.participants
    taken = [steps if asked == EVERYONE or c in asked else 0 for c in ALL]
    assert discriminators.steps.tolist() == taken
    monkeypatch.setattr("fedgs.gan.discriminators.CHUNK_SIZE", 64)
    whole, _ = _answer(config)
    torch.testing.assert_close(answer.values, whole.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("training", "trainees", "trained"),
    [
        ("selected", (1, 4), (1, 4)),
        ("every_round", EVERYONE, ALL),
        ("frozen", None, ()),
    ],
)
def test_only_the_discriminators_that_should_train_do(training, trainees, trained):
    config = tiny_config(discriminator_training=training, noise_multiplier=0.0)
    request = request_of(config)
    expected = EVERYONE if training == "every_round" else request.participants
    assert request.trainees == expected
    request = dataclasses.replace(
        request, participants=(1, 4), trainees=trainees or (1, 4)
    )
    before = Discriminators(config, ALL)
    answer, after = _answer(config, request)
    assert after.steps.tolist() == [2 if client in trained else 0 for client in ALL]
    for client in ALL:
        states = [client_digest(stack, client) for stack in (before, after)]
        assert (states[0] != states[1]) == (client in trained)
    assert answer.values.any()  # also a frozen discriminator answers


# ---------------------------------------------------------------------- the mechanism


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.5])
def test_a_release_is_the_clipped_sum_and_one_draw_of_noise(noise_multiplier):
    config = tiny_config(
        clip_bound=1e-3,
        noise_multiplier=noise_multiplier,
        discriminator_training="frozen",
        client_selection="all",
    )
    request = request_of(config)
    answer, discriminators = _answer(config, request, node_id=3)
    fakes = request.images[-4:], request.labels[-4:]
    grads = discriminators.query(torch.arange(6), *fakes)
    assert grads.flatten(2).norm(dim=2).min() > 1e-3  # all are clipped
    clipped = sanitizer.clip(sanitizer.PerSampleGradients(grads), 1e-3)
    noise = NoiseStream(7, 3, 1)
    expected = sanitizer.sanitize([clipped], 2 * 1e-3 * noise_multiplier, noise, 1, 3)
    torch.testing.assert_close(answer.values, expected.values, rtol=1e-5, atol=1e-9)
    assert (answer.round, answer.node_id) == (1, 3)
    assert answer.noise_std == pytest.approx(2e-3 * noise_multiplier)


def test_a_broken_discriminator_answers_noise_alone():
    config = tiny_config()
    request = request_of(config, participants=(2,), trainees=(2,))
    discriminators = Discriminators(config, ALL)
    discriminators.params["linear.weight"][2] = torch.nan
    answer, _ = _answer(config, request, discriminators)
    noise = NoiseStream(7, 0, 1).normal((4, 1, 16, 16), 1.0)  # 2 * C * sigma = 1
    assert torch.equal(answer.values, torch.from_numpy(noise).float())


# ----------------------------------------------------------------------------- server


def _release(config: RunConfig, value: float | Tensor, node_id: int = 0):
    values = torch.zeros(config.release_shape) + value
    return sanitizer.received(values, 1, node_id, config.noise_std, config.clip_bound)


def _step(
    config: RunConfig, answers: Sequence[sanitizer.SanitizedGradients], monkeypatch
):
    """One server round: the state after it and the gradients of the answered images."""
    server = new_server(config)
    stepped = record_calls(monkeypatch, fedgs.federation.round, "jacobian_step")
    server_round(config, server, draw_fakes(config, server)[1], answers)
    return server, stepped[-1][2]


def test_the_average_is_over_planned_participants_and_the_batch(monkeypatch):
    config = tiny_config()  # m = 2, B = 4; a third of a release per pixel is sent
    one = _step(config, [_release(config, 3.0)], monkeypatch)[1]
    assert torch.equal(one, torch.full((4, 1, 16, 16), 0.375))  # 3 / (2 * 4)
    both = [_release(config, 3.0), _release(config, 5.0, node_id=1)]
    two = _step(config, both, monkeypatch)[1]
    assert torch.equal(two, torch.full((4, 1, 16, 16), 1.0))  # (3 + 5) / (2 * 4)


@pytest.mark.parametrize(("large", "mean"), [(1e20, 0.0), (1e8, 0.125)])
def test_the_order_of_answers_does_not_matter(monkeypatch, large, mean):
    """In float64 (1e20 + 1) - 1e20 is 0 and (1e20 - 1e20) + 1 is 1.

    In float32 (1e8 + 1) - 1e8 would be 0, too; 1 / (m B) = 1 / 8.
    """
    config = tiny_config()
    values = (large, 1.0, -large)
    answers = [_release(config, value, node) for node, value in enumerate(values)]
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        arrived = [answers[node] for node in order]
        assert (_step(config, arrived, monkeypatch)[1] == mean).all()


def test_the_generator_descends_along_the_released_gradients(monkeypatch):
    # Gradients of sum(x): one step must make the answered images darker.
    config = tiny_config(generator_learning_rate=1e-2)
    server, _ = _step(config, [_release(config, 1.0)], monkeypatch)
    z, labels = latents(config, 8, "latent", 1)
    with torch.no_grad():
        before = new_server(config).generator(z, labels)[-4:]
        assert server.generator(z, labels)[-4:].mean() < before.mean() - 1e-3


def test_the_average_of_generators_follows_the_schedule(monkeypatch):
    # update_ema after the first update has weight 0: the average is the generator.
    config = tiny_config()
    server, _ = _step(config, [_release(config, 1.0)], monkeypatch)
    first = {n: v.clone() for n, v in server.generator.state_dict().items()}
    assert server.round == 1
    assert digest(server.ema.state_dict()) == digest(first)
    asked = draw_fakes(config, server)
    server_round(config, server, asked[1], [_release(config, 1.0)])
    assert server.round == 2
    for name, value in server.generator.state_dict().items():  # weight 1 - 1/2
        mean = (value + first[name]) / 2
        torch.testing.assert_close(server.ema.state_dict()[name], mean)


def test_the_generators_spectral_vectors_advance_once_a_round():
    config = tiny_config(generator="resnet", generator_dim=2)
    server = new_server(config)
    before = {n: v.clone() for n, v in server.generator.named_buffers()}
    params = dict(server.generator.named_parameters())
    expected = advance_spectral_vectors(params, before)
    assert digest(expected) != digest({name: before[name] for name in expected})
    draw_fakes(config, server)
    for name, value in server.generator.named_buffers():
        assert torch.equal(value, expected[name]), name
    assert digest(dict(server.ema.named_buffers())) == digest(before)


@pytest.mark.parametrize("dct_size", [5, 16])
def test_a_release_in_the_dct_basis_is_mapped_back_to_images(monkeypatch, dct_size):
    config = tiny_config(dct_size=dct_size, noise_multiplier=0.0)
    answer, _ = _answer(config)
    assert answer.values.shape == (4, 1, dct_size, dct_size)
    image_grads = _step(config, [answer], monkeypatch)[1]
    assert image_grads.shape == (4, 1, 16, 16)
    expected = sanitizer.from_dct(answer.values, 16) / 8
    torch.testing.assert_close(image_grads, expected, rtol=1e-4, atol=1e-8)
    if dct_size == 16:  # the whole basis: the same gradients as in pixels
        pixels, _ = _answer(dataclasses.replace(config, dct_size=None))
        torch.testing.assert_close(image_grads, pixels.values / 8, rtol=1e-4, atol=1e-6)
