"""Whatever a method of others answers, a node's release is bounded by its terms."""

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.gan.discriminators import Discriminators
from fedgs.mechanism.sanitizer import PerSampleGradients, clip
from fedgs.methods import PhaseAt, new_state
from fedgs.methods.base import Hosted, Method, Request
from fedgs.methods.fedavg_gan import FedAvgGan
from fedgs.methods.gs_wgan import GsWgan
from fedgs.round import answer as barrier
from fedgs.round.answer import answer_of, raw_answers
from tiny import request_of, tiny_config, tiny_data

ALL = range(6)
SHAPE = (4, 1, 16, 16)


class Given(Method):
    """Answers with what it was given; `__module__` is not one of fedgs."""

    def __init__(self, answer) -> None:
        self.own = answer

    def answer(self, config, client, request):
        return self.own(client)

    terms = state = declared = begin = finish = None


Given.__abstractmethods__ = frozenset()


def released(monkeypatch, answer, data=None, terms=None):
    """The sum that one node without noise releases."""
    config = tiny_config(noise_multiplier=0.0, clients_per_node=6)
    method = answer if isinstance(answer, Method) else Given(answer)
    monkeypatch.setattr(barrier, "phase_at", lambda *of: PhaseAt(method, config))
    hosted = Hosted(data or tiny_data(config), ALL, 0)
    return answer_of(config, hosted, Request(1, {})).values.double()


@pytest.mark.parametrize(
    "shape",
    [(), (4,), (4, 1, 16), (1, 4, 1, 16, 16), (4, 1, 16, 15), (256,), (4, 256), (0,)],
    ids=str,
)
def test_another_shape_than_the_terms_promise_is_refused(monkeypatch, shape):
    with pytest.raises(TypeError, match="the terms promise"):
        released(monkeypatch, lambda client: torch.full(shape, 1000.0))


@pytest.mark.parametrize(
    "answer",
    [None, 1.0, np.zeros(SHAPE), [torch.zeros(SHAPE)]],
    ids=["nothing", "a number", "numpy", "a list"],
)
def test_what_is_no_tensor_is_refused(monkeypatch, answer):
    with pytest.raises(TypeError):
        released(monkeypatch, lambda client: answer)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_what_is_no_real_number_is_refused(monkeypatch, dtype):
    with pytest.raises(TypeError, match="no tensor of real numbers"):
        released(monkeypatch, lambda client: torch.ones(SHAPE, dtype=dtype))


@pytest.mark.parametrize("value", [1e30, -1e300, torch.inf, torch.nan], ids=str)
def test_an_answer_of_any_size_adds_at_most_the_clip_bound(monkeypatch, value):
    def answer(client):
        numbers = torch.zeros(SHAPE, dtype=torch.float64)
        if client.number == 2:
            numbers[...] = value
        return numbers

    norms = released(monkeypatch, answer).flatten(1).norm(dim=1)
    assert (norms <= 1 + 1e-6).all()


def test_a_method_sees_one_client_at_a_time_each_once_with_its_own_data(monkeypatch):
    data = tiny_data(tiny_config())
    seen = []

    def answer(client):
        seen.append(client)
        return torch.zeros(SHAPE)

    released(monkeypatch, answer)
    assert [client.number for client in seen] == list(ALL)
    for client in seen:
        own = data.client_records[client.number]
        assert np.array_equal(client.images, data.images[own])
        assert np.array_equal(client.labels, data.labels[own])
        assert client.name == data.client_names[client.number]
        # Copies: nothing of another client is behind them.
        assert not np.shares_memory(client.images, data.images)
        assert client.images.base is None
        held = {f.name for f in dataclasses.fields(client)}
        assert held == {
            *("number", "name", "images", "labels"),
            *("discriminators", "position", "group"),
        }


class Normalised(Given):
    """Divides by the sum of what it has seen, which it keeps in itself."""

    def __init__(self) -> None:
        self.total = 0.0
        self.seen = []

    def answer(self, config, client, request):
        self.total += float(client.images.sum())
        self.seen.append(client.number)
        return torch.full(SHAPE, 1e-3 * float(client.images.sum()) / self.total)


def test_a_method_that_remembers_in_itself_has_nothing_of_the_client_before(
    monkeypatch,
):
    config = tiny_config()
    data = tiny_data(config)
    images = data.images.copy()
    images[data.client_records[0]] = 255
    other = dataclasses.replace(data, images=images)
    method = Normalised()
    before = released(monkeypatch, method, data)
    after = released(monkeypatch, method, other)
    moved = (before - after).flatten(1).norm(dim=1)
    assert (moved <= 2 * config.clip_bound).all()
    assert torch.equal(before, after)  # each client is divided by itself alone
    assert method.seen == []


def test_only_methods_of_fedgs_answer_for_several_clients_in_one_call(monkeypatch):
    class Stacked(Given):
        def stack_size(self, config):
            return 6

        def answer_stacked(self, config, clients, request):
            raise AssertionError("asked for several clients")

        def train(self, config, clients, request):
            assert len(clients) == 1

    assert not barrier.is_of_fedgs(Stacked(None))
    assert barrier.is_of_fedgs(FedAvgGan())
    one = torch.full(SHAPE, 1e-3)
    total = released(monkeypatch, Stacked(lambda client: one))
    assert torch.allclose(total, 6 * one.double())


def test_a_stacked_method_that_leaves_out_a_client_is_refused(monkeypatch):
    config = tiny_config(clients_per_node=6)
    nets = Discriminators(config, ALL)

    def fewer(self, config, clients, request):
        return torch.zeros(len(clients) - 1, *SHAPE)

    monkeypatch.setattr(GsWgan, "answer_stacked", fewer)
    request = request_of(config, participants="all", trainees=())
    with pytest.raises(TypeError, match="must answer exactly once"):
        answer_of(config, Hosted(tiny_data(config), ALL, 0, nets), request)


def test_a_gan_of_others_gets_one_discriminator_at_a_time_and_trains_the_nodes(
    monkeypatch,
):
    """To the bits of the loop that trains one after the other."""

    class Own(GsWgan):
        def train(self, config, clients, request):
            (client,) = clients
            assert len(client.discriminators) == 1
            super().train(config, clients, request)

    config = tiny_config(discriminator_training="every_round", clients_per_node=6)
    request = request_of(config, participants=(1, 4), trainees="all")
    found = []
    for method in (GsWgan(), Own()):
        monkeypatch.setattr(
            barrier, "phase_at", lambda *of, own=method: PhaseAt(own, config)
        )
        nets = Discriminators(config, ALL, is_stacked=False)
        hosted = Hosted(tiny_data(config), ALL, 0, nets)
        monkeypatch.setattr("fedgs.config.method_settings.STACKED_UP_TO", 0)
        answers = torch.cat([*raw_answers(config, hosted, request)])
        state = {name: value.clone() for name, value in nets.state().items()}
        found.append((answers, state))
    (ours, our_state), (theirs, their_state) = found
    assert torch.equal(ours, theirs)
    assert nets.steps.tolist() == [config.discriminator_steps] * 6
    for name, value in our_state.items():
        assert torch.equal(value, their_state[name])


# ------------------------------------------------------------------ the types


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 1, 16), (3, 4, 1, 1, 16, 16)])
def test_clip_takes_five_axes_and_no_others(shape):
    values = SimpleNamespace(values=torch.full(shape, 1000.0))
    with pytest.raises(ValueError, match="5 axes"):
        clip(values, 1.0)
    good = PerSampleGradients(torch.ones(1, 2, 1, 2, 2))
    assert clip(good, 1.0).clip_bound == 1.0


GOOD = {"release": "gradient", "noise_multiplier": 1.0, "clip_bound": 1.0}
GOOD |= {"shape": (4, 1, 16, 16)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("release", value) for value in ("", "rows", None)],
        *[("noise_multiplier", value) for value in (-1.0, torch.nan, torch.inf, "1")],
        *[("clip_bound", value) for value in (0.0, -1.0, torch.nan, torch.inf)],
        *[("shape", value) for value in ((4,), (4, 1, 16), [4, 1, 16, 16])],
        *[("shape", value) for value in ((0, 1, 1, 1), (4, 1, 1, 1.0), (4, 1, 1, -1))],
        ("shape", (4, 1, 1, True)),
    ],
    ids=str,
)
def test_terms_that_bound_nothing_are_refused(name, value):
    terms = Terms(**GOOD)
    assert copy.deepcopy(terms) == terms
    with pytest.raises(UserError, match=name):
        Terms(**GOOD | {name: value})


# ------------------------------------------------------------------ methods of fedgs


def _alone_and_together(config, method, request, nets):
    """What each client answers alone, and the rows of one call for all of them."""
    hosted = Hosted(tiny_data(config), ALL, 0, nets)
    clients = [hosted.only(number, is_alone=False) for number in ALL]
    alone = [method.answer(config, client, request) for client in clients]
    return torch.stack(alone), method.answer_stacked(config, clients, request)


def test_each_row_of_gs_wgan_is_the_answer_of_its_client_alone():
    config = tiny_config(clients_per_node=6)
    nets = Discriminators(config, ALL, is_stacked=True)
    request = request_of(config, participants="all", trainees=())
    alone, together = _alone_and_together(config, GsWgan(), request, nets)
    assert together.shape == (6, *SHAPE)
    assert torch.allclose(alone, together, rtol=1e-4, atol=1e-7)
    # The rows differ, so a row in another's place would be seen.
    assert min((together[0] - row).abs().max() for row in together[1:]) > 1e-4


def test_each_row_of_fedavg_gan_is_the_answer_of_its_client_alone():
    settings = {"phases": "fedavg-gan", "spectral_norm": False}
    config = tiny_config(client_selection="all", clients_per_node=6, **settings)
    method = FedAvgGan()
    request = method.begin(config, new_state(config))[0]
    alone, together = _alone_and_together(config, method, request, None)
    assert torch.allclose(alone, together, rtol=1e-3, atol=1e-7)
    assert min((together[0] - row).abs().max() for row in together[1:]) > 1e-6
