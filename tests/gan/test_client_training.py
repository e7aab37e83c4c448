"""What discriminators train on: their own records beside the round's fakes.

That the warm start is the published one is in tests/test_gs_wgan.py.
"""

import gc
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedgs.config.run_config import RunConfig
from fedgs.data.federated import to_float
from fedgs.gan.client_training import Draws, draw_matching
from fedgs.gan.discriminators import Discriminators
from fedgs.gan.warm_start import LocalGenerators, warm_start
from fedgs.mechanism.sanitizer import SanitizedGradients
from fedgs.methods import new_state
from fedgs.methods.base import Request
from tiny import (
    SIZES,
    changed,
    client_round,
    draw_fakes,
    public_fakes,
    record_calls,
    tiny_config,
    tiny_data,
)

ALL = range(len(SIZES))
FEW_LABELS = st.integers(0, 4)


def _request(config: RunConfig, **changes: object) -> Request:
    return changed(draw_fakes(config, new_state(config))[0], **changes)


def _answer(config: RunConfig, request: Request) -> SanitizedGradients:
    discriminators, data = Discriminators(config, ALL), tiny_data(config)
    answer = client_round(config, discriminators, data, ALL, request, 0)
    assert answer is not None
    return answer


def _draws(clients: Sequence[int], round: int = 1, **overrides: object) -> Draws:
    config = tiny_config(**overrides)
    owners = [tiny_data(config).of(client) for client in clients]
    return Draws(config, owners, "data", round, None)


# ---------------------------------------------------------------------------- records


def test_clients_see_their_own_images_and_labels_only(monkeypatch):
    config = tiny_config(client_selection="all", discriminator_steps=5)
    trained = record_calls(monkeypatch, Discriminators, "train")
    _answer(config, _request(config))
    for client in ALL:
        data = tiny_data(config).of(client)
        pairs = zip(to_float(data.images), data.labels.tolist(), strict=True)
        own = {(image.tobytes(), label) for image, label in pairs}
        used = [
            (image.numpy().tobytes(), int(label))
            for args in trained
            for image, label in zip(args[2][client], args[3][client], strict=True)
        ]
        assert len(used) == 20
        assert set(used) <= own


def test_records_are_drawn_uniformly_with_replacement():
    draws = _draws([4], discriminator_steps=3000)
    visits = Counter(draws.records.ravel().tolist())
    assert sorted(visits) == list(range(12))
    # Binomial(12000, 1/12): 1000 each, six standard deviations of 30.3.
    assert all(abs(count - 1000) < 182 for count in visits.values())


# ------------------------------------------------------------------------------ fakes


def test_a_round_can_reuse_one_set_of_fakes_by_the_labels_of_the_real_images(
    monkeypatch,
):
    config = tiny_config(fakes_per_round=6, client_selection="all")
    request = _request(config, labels=torch.arange(6) % 3)
    assert request.tensors["images"].shape == (6, 1, 16, 16)
    trained = record_calls(monkeypatch, Discriminators, "train")
    assert _answer(config, request).values.shape == (4, 1, 16, 16)
    sent = {image.numpy().tobytes() for image in request.tensors["images"]}
    assert len(trained) == 2
    for _, _, _, real_labels, fakes, fake_labels, *_ in trained:
        assert {fake.numpy().tobytes() for fake in fakes.flatten(0, 1)} <= sent
        assert torch.equal(real_labels, fake_labels)


@given(
    wanted=arrays(np.int64, (2, 3), elements=FEW_LABELS),
    labels=arrays(np.int64, st.integers(1, 6), elements=FEW_LABELS),
    seed=st.integers(0, 99),
)
def test_a_wanted_label_is_found_where_it_occurs(wanted, labels, seed):
    found = draw_matching(np.random.default_rng(seed), wanted, labels)
    assert found.shape == wanted.shape
    assert ((found >= 0) & (found < len(labels))).all()
    occurs = np.isin(wanted, labels)
    assert np.array_equal(labels[found][occurs], wanted[occurs])


@pytest.mark.parametrize(("label", "places"), [(1, [0, 2, 3]), (9, [0, 1, 2, 3, 4])])
def test_matching_fakes_are_drawn_uniformly(label, places):
    labels = np.array([1, 0, 1, 1, 2])  # 9 does not occur: any fake will do
    wanted = np.full(9000, label)
    visits = Counter(draw_matching(np.random.default_rng(0), wanted, labels).tolist())
    assert sorted(visits) == places
    share = 1 / len(places)
    slack = 6 * (9000 * share * (1 - share)) ** 0.5  # six standard deviations
    assert all(abs(count - 9000 * share) < slack for count in visits.values())


# ------------------------------------------------------------------------- warm start


@pytest.mark.parametrize("fakes", [None, 5])
def test_local_generators_vanish_or_are_not_made(monkeypatch, fakes):
    config = tiny_config(fakes_per_round=fakes)
    made = record_calls(monkeypatch, LocalGenerators, "__init__")
    request, discriminators = public_fakes(config), Discriminators(config, ALL)
    assert request.tensors["images"].any() == config.is_warm_start_public
    public = (request.tensors["images"], request.tensors["labels"]) if fakes else None
    warm_start(config, discriminators, tiny_data(config), ALL, public)
    assert bool(made) == (not config.is_warm_start_public)
    made.clear()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is LocalGenerators]
    assert set(discriminators.state()) == set(Discriminators(config, ALL).state())
    assert discriminators.steps.tolist() == [4] * 6  # T_w = 2 rounds of n_dis = 2


def test_a_warm_start_has_fakes_of_the_labels_of_the_real_images(monkeypatch):
    config = tiny_config()
    calls = record_calls(monkeypatch, Discriminators, "train")
    warm_start(config, Discriminators(config, ALL), tiny_data(config), ALL)
    assert calls
    for call in calls:
        _, _, real_labels, _, fake_labels, _ = call[-6:]
        assert torch.equal(fake_labels, real_labels)
