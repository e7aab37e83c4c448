"""The round: who takes part, who trains, and how answers are averaged.

What is sent, released and stepped, bit by bit, is in tests/test_gs_wgan.py.
"""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgs.methods.gs_wgan
import fedgs.methods.schedule
import fedgs.round.answer
from fedgs.config.run_config import RunConfig
from fedgs.gan import discriminators
from fedgs.gan.discriminators import Discriminators
from fedgs.mechanism import sanitizer
from fedgs.mechanism.noise import NoiseStream
from fedgs.methods import new_state
from fedgs.methods.base import Request
from fedgs.methods.schedule import EVERYONE, select
from tiny import (
    SIZES,
    client_digest,
    client_round,
    draw_fakes,
    record_calls,
    request_of,
    server_round,
    tiny_config,
    tiny_data,
)

# Neither a round nor the warm start moves a random state of the process.
pytestmark = pytest.mark.usefixtures("global_state_is_kept")
ALL = range(len(SIZES))


def _answer(
    config: RunConfig, request: Request, discriminators: Discriminators | None = None
) -> tuple[sanitizer.SanitizedGradients | None, Discriminators]:
    nets = discriminators or Discriminators(config, ALL)
    return client_round(config, nets, tiny_data(config), ALL, request, 0), nets


# ------------------------------------------------------------------------ selection

FEDERATIONS = st.integers(1, 13).flatmap(
    lambda num_clients: st.tuples(st.just(num_clients), st.integers(1, num_clients))
)


@given(federation=FEDERATIONS, num_rounds=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=60)
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
    fedgs.methods.schedule._balanced_lap.cache_clear()  # a resumed run starts anywhere
    backwards = [select(config, round) for round in range(30, 0, -1)]
    assert forwards == backwards[::-1]
    other = dataclasses.replace(config, seed=6)
    assert forwards != [select(other, round) for round in range(1, 31)]
    assert select(tiny_config(client_selection="all"), 1) == EVERYONE


def test_uniform_selection_draws_every_client_equally_often():
    count = 4
    config = tiny_config(clients_per_round=count, client_selection="uniform")
    chosen = [select(config, round) for round in range(1, 1501)]
    assert all(list(each) == sorted(set(each)) for each in chosen)
    assert {len(each) for each in chosen} == {count}
    visits = Counter(client for each in chosen for client in each)
    # Binomial(1500, m / 6), six standard deviations.
    share = count / 6
    slack = 6 * (1500 * share * (1 - share)) ** 0.5
    assert all(abs(visits[client] - 1500 * share) < slack for client in ALL)
    balanced = dataclasses.replace(config, client_selection="balanced")
    laps = range(1, 6 * 40 + 1, 6)  # of its laps few repeat another one's order
    orders = [tuple(select(balanced, lap + i) for i in range(6)) for lap in laps]
    assert len(set(orders)) > 30


# -------------------------------------------------------------- requests and training


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"discriminator_steps": 3}, 64),
        ({"discriminator_steps": 1, "client_selection": "all"}, 4),
    ],
)
def test_a_round_is_one_release_however_many_steps_and_chunks_it_takes(
    monkeypatch, settings, size
):
    config = tiny_config(**settings)
    request = request_of(config)
    whole, _ = _answer(config, request)
    monkeypatch.setattr(discriminators, "CHUNK_SIZE", size)
    released = record_calls(monkeypatch, fedgs.round.answer, "sanitize")
    drawn = record_calls(monkeypatch, NoiseStream, "normal")
    answer, made = _answer(config, request)
    assert type(answer) is sanitizer.SanitizedGradients
    assert (len(released), len(drawn)) == (1, 1)
    steps, asked = config.discriminator_steps, request.participants
    taken = [steps if asked == EVERYONE or c in asked else 0 for c in ALL]
    assert made.steps.tolist() == taken
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


# ----------------------------------------------------------------------------- server


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ((3.0,), 0.375),  # 3 / (2 * 4): over the planned participants, m = 2, and B = 4
        ((3.0, 5.0), 1.0),
        ((1e20, 1.0, -1e20), 0.0),  # in float64 (1e20 + 1) - 1e20 is 0
        ((1e8, 1.0, -1e8), 0.125),  # in float32 it would be 0, too
    ],
)
def test_the_average_is_over_planned_participants_whatever_the_order_of_answers(
    monkeypatch, values, mean
):
    config = tiny_config()
    stepped = record_calls(monkeypatch, fedgs.methods.gs_wgan, "jacobian_step")
    answers = [
        sanitizer.received(
            torch.full(config.release_shape, value),
            1,
            node,
            config.noise_std,
            config.clip_bound,
        )
        for node, value in enumerate(values)
    ]
    for arrived in itertools.permutations(answers):
        server = new_state(config)
        server_round(config, server, draw_fakes(config, server)[1], arrived)
        assert (stepped[-1][2] == mean).all()
