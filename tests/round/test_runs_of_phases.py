"""Phases of mean features: one clipped embedding per client, and what all tell."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from fedgs.gan.features import KINDS, embedding, mean_features
from fedgs.mechanism.quantization import release_step
from fedgs.methods import dp_merf, new_state, phase_at
from fedgs.methods.base import Released, Request, State
from fedgs.methods.feature_means import EXPECTED, released_so_far
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.round import local
from fedgs.round.answer import most_signal_to_noise
from fedgs.round.messages import (
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from fedgs.round.node import Node
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import events, train
from simulated_grid import FakeGrid, product, start
from tiny import (
    FULL_PARTICIPATION,
    MOMENTS,
    WITH_RELEASES,
    draw_fakes,
    embedding_round,
    next_request,
    public_fakes,
    record_calls,
    server_round,
    tiny_config,
    tiny_data,
)

PARTS = MOMENTS | {"phases": "means,scatter,parts"}
WITH_MORE_ROUNDS = WITH_RELEASES | {"num_rounds": 4}


def quiet(**settings: object):
    """A configuration of one node, without noise."""
    one_node = {"noise_multiplier": 0.0, "clients_per_node": 6}
    return tiny_config(**WITH_RELEASES | one_node | settings)


def network_of(request: Request) -> dict[str, torch.Tensor]:
    """The feature network that a request sends."""
    return {n: tensor for n, tensor in request.tensors.items() if n != EXPECTED}


def embeddings(config, request, data) -> list[torch.Tensor]:
    """What each client computes before it is clipped."""
    return [
        embedding(
            config.at_round(request.round).method,
            network_of(request),
            request.tensors[EXPECTED],
            *map(torch.from_numpy, data.client(client)),
        )
        for client in range(data.num_clients)
    ]


# ------------------------------------------------------------------ the release


def test_a_release_is_the_sum_of_the_clients_clipped_embeddings():
    config = quiet()
    data, request = tiny_data(config), next_request(config, new_state(config))
    raw = embeddings(config, request, data)
    assert min(each.norm() for each in raw) > 1  # so that all are clipped
    expected = sum(each / each.norm() for each in raw)
    release = embedding_round(config, data, range(6), request, 0)
    assert release.values.shape == (1, 1, 3, 1 + 16)
    assert torch.allclose(release.values[0, 0].double(), expected, atol=1e-4)


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_no_client_moves_a_release_by_more_than_its_sensitivity(relation):
    config = quiet()
    data, request = tiny_data(config), next_request(config, new_state(config))
    bound = {"zero-out": 1.0, "replace-one": 2.0}[relation]
    others = {
        "white": np.full_like(data.images, 255),
        "inverted": 255 - data.images,
        "shuffled": np.random.default_rng(0).permutation(data.images),
    }
    whole = embedding_round(config, data, range(6), request, 0).values.double()
    moved = []
    for client, images in itertools.product(range(6), others.values()):
        if relation == "zero-out":
            hosted = [other for other in range(6) if other != client]
            other = embedding_round(config, data, hosted, request, 0)
        else:
            own = data.images.copy()
            own[data.client_records[client]] = images[data.client_records[client]]
            labels = data.labels.copy()
            labels[data.client_records[client]] = 0  # its classes may change, too
            changed = dataclasses.replace(data, images=own, labels=labels)
            other = embedding_round(config, changed, range(6), request, 0)
        moved.append(float((whole - other.values.double()).norm()))
    assert max(moved) <= bound * (1 + 1e-5)
    assert max(moved) > 0.7  # or the bound would never be tried


@pytest.mark.parametrize(
    ("settings", "round"), [(PARTS, 1), (PARTS, 2), (PARTS, 3), (WITH_RELEASES, 1)]
)
@pytest.mark.parametrize("value", [-1e10, 1e30])  # the products overflow
def test_hostile_models_cannot_leave_more_than_the_clip_bound(settings, round, value):
    config = tiny_config(**settings | {"noise_multiplier": 0.0})
    method, own = phase_at(config, round)
    declared = method.declared(own, 1).items()
    request = Request(round, {n: torch.full(d.shape, value) for n, d in declared})
    release = embedding_round(config, tiny_data(config), range(6), request, 0).values
    assert release.isfinite().all()
    assert release.double().norm() <= 6 * (1 + 1e-5)


def test_noise_is_that_of_the_phase_and_the_clip_bound_that_of_the_run():
    config = tiny_config(**WITH_MORE_ROUNDS, clip_bound=1.5)
    for round, weight in enumerate([0.5, 2.0], start=1):
        terms = config.terms(round)
        assert (terms.release, terms.clip_bound) == ("embedding", 1.5)
        assert terms.noise_std == pytest.approx(2 * 1.5 * 0.5 / math.sqrt(weight))
        assert terms.batch_size == 1
    assert config.terms(3).release == "gradient"
    assert config.terms(3).noise_std == config.noise_std


# ------------------------------------------------------------------ the server


def after_a_release(config) -> State:
    """A server after its first release."""
    server = new_state(config)
    request = next_request(config, server)
    answers = [
        embedding_round(config, tiny_data(config), hosted, request, node)
        for node, hosted in enumerate(map(config.hosting.hosted, range(3)))
    ]
    server_round(config, server, request, answers)
    return server


def test_a_target_is_the_mean_over_images_weighted_by_client():
    """An image of client u counts 1 / (n_u ||v_u||), as all are clipped to one C."""
    config = quiet(clients_per_node=2)
    data, server = tiny_data(config), after_a_release(config)
    request = next_request(config, new_state(config))
    norms = [float(each.norm()) for each in embeddings(config, request, data)]
    sums, weights = torch.zeros(3, 16), torch.zeros(3)
    for client, norm in enumerate(norms):
        images, labels = map(torch.from_numpy, data.client(client))
        features = KINDS["means"].features(network_of(request), images, labels)
        sums.index_add_(0, labels, features / (len(labels) * norm))
        weights += torch.bincount(labels, minlength=3) / (len(labels) * norm)
    (release,) = released_so_far(server)
    expected = sums / weights[:, None]
    assert torch.allclose(release.target, expected, atol=1e-4)
    assert (server.round, release.method) == (1, "means")


def test_the_noise_of_a_target_is_what_the_server_says():
    settings = WITH_RELEASES | {"noise_multiplier": 0.003, "moment_size": 16}
    config = tiny_config(**settings)
    silent = dataclasses.replace(config, noise_multiplier=0.0)
    (noisy,) = released_so_far(after_a_release(config))
    (exact,) = released_so_far(after_a_release(silent))
    found = (noisy.target - exact.target).std(dim=1)  # of 256 values
    assert torch.allclose(found, noisy.noise_std, rtol=0.15)
    assert not exact.noise_std.any()


def test_no_noise_gives_clients_more_weight_than_clipping_can_leave_them():
    config = quiet(clients_per_node=2)
    request, terms = next_request(config, new_state(config)), config.terms(1)
    asked = (config.at_round(1), network_of(request), request.tensors[EXPECTED])
    total = torch.zeros(terms.shape[2:], dtype=torch.float64)
    total[0, 0] = 1e9  # more images of one class than there can be of all
    groups = len(total)
    most = config.num_clients * config.clip_bound / (2 * math.sqrt(groups))
    noise = mean_features(*asked, total, 1.0).noise_std
    assert noise[1:].tolist() == pytest.approx([1 / (0.2 * most)] * (groups - 1))


# ------------------------------------------------------------------ the run


def test_discriminators_start_on_fakes_of_the_fitted_generator(tmp_path, monkeypatch):
    config = tiny_config(output=str(tmp_path / "run"), **WITH_RELEASES)
    prepared = record_calls(monkeypatch, local.LocalNodes, "prepare")
    folder = RunFolder.create(config)
    train(folder, data=tiny_data(config))
    ((_, request, *_),) = prepared
    assert request.round == 0
    untrained = public_fakes(tiny_config(**FULL_PARTICIPATION))
    assert not torch.equal(request.tensors["images"], untrained.tensors["images"])
    kinds = [event.release for event in events(folder)]
    assert kinds == ["embedding", "embedding", "gradient"]
    # No metrics tell how long a release of mean features took.
    shown = [("seconds" in line) for line in folder.metrics()]
    assert shown == [False, False, True]


# ------------------------------------------------------------------ the node


@pytest.mark.parametrize(
    ("agreed", "named"),
    [
        ({}, r"phases = means, .*allow_embeddings"),
        # 0.5, but 0.5 / sqrt(2) in the second phase
        (
            {"allow_embeddings": True, "min_noise_multiplier": 0.4},
            r"one has 0\.3536",
        ),
    ],
)
def test_a_client_refuses_embeddings_that_it_did_not_agree_to(agreed, named):
    limits = Limits(allow_seeded_noise=True, **agreed)
    with pytest.raises(ClientRefused, match=named):
        limits.check_run(tiny_config(**WITH_MORE_ROUNDS))


def test_a_clients_epsilon_counts_embeddings_and_gradients_alike(tmp_path):
    """mu^2 of a node with replace-one: w / sigma^2 of a release, B / sigma^2 else."""
    config = tiny_config(**WITH_MORE_ROUNDS)
    node, server = Node(config, 0, tiny_data(config), tmp_path), new_state(config)
    node.answer(next_request(config, server))
    assert node.limits.count.largest() == pytest.approx(0.5 / 0.5**2)
    server = after_a_release(config)
    node.answer(next_request(config, server))
    assert node.limits.count.largest() == pytest.approx(2.5 / 0.5**2)
    node.answer(public_fakes(config))
    server.round = 2
    node.answer(draw_fakes(config, server)[0])
    assert node.limits.count.largest() == pytest.approx((2.5 + 4) / 0.5**2)


# ------------------------------------------------------------------ settings


PUBLIC = MOMENTS | {"phases": "moments,moments", "public_data": "fonts"}
# What else a run may have beside phases of moments; its phases are refused before.
OTHERS = {"client_selection": "balanced", "clients_per_round": 2}


@pytest.mark.parametrize(
    ("base", "settings", "named"),
    [
        (WITH_RELEASES, {"phases": "means,magic"}, "phases = 'magic':"),
        (WITH_RELEASES, {"clip_bound": 2.5}, "clip_bound = 2.5:"),
        (WITH_RELEASES, {"num_rounds": 1}, "num_rounds = 1:"),
        (MOMENTS, {"num_rounds": 4}, "num_rounds = 4:"),
        (WITH_RELEASES, OTHERS, "phases = .*:"),
        (MOMENTS, {"phases": "scatter,means,moments"}, "in the order means, scatter"),
        (
            MOMENTS,
            {"phases": "means,scatter,parts,moments"},
            "phases = .* in the order",
        ),
        (MOMENTS, {"generator": "upsample"}, "= 'upsample': .*--generator gaussian"),
        (MOMENTS, {"latent": "bernoulli"}, "latent = 'bernoulli':"),
        (MOMENTS, {"moment_size": 17}, "moment_size = 17:"),
        (
            MOMENTS,
            {"moment_size": 60, "image_size": 64},
            "moment_size = 60:",
        ),
        (MOMENTS, {"latent_dim": 2000}, "latent_dim = 2000:"),
        (PUBLIC, {"phases": "means,scatter"}, "in the order any number"),
        (
            FULL_PARTICIPATION,
            {"public_data": "fonts"},
            "public_data = 'fonts':",
        ),
        (PUBLIC, {"data": "fonts"}, "= 'fonts': .* images of data = 'fonts'"),
        (PUBLIC, {"latent_dim": 17}, "latent_dim = 17:"),
    ],
)
def test_phases_that_cannot_be_are_refused_with_a_remedy(base, settings, named):
    assert_refused(named, tiny_config, **base | settings)


# ------------------------------------------------------------------ on the way


def test_a_compact_release_travels_and_comes_back_as_it_was():
    config = tiny_config(**MOMENTS, message_precision="compact")
    request = next_request(config, new_state(config))
    again = decode_request(encode_request(request, config), config)
    assert again.digest() == request.digest()
    release = embedding_round(config, tiny_data(config), range(2), request, 0)
    payload = encode_answer(release, config, request)
    values = decode_answer(payload, config, request, 0).values
    assert torch.equal(values, release.values)
    step = release_step(config, config.terms(1))  # an eighth of this phase's noise
    assert step == pytest.approx(config.terms(1).noise_std / 8, rel=0.01)
    whole = values.double() / step
    assert torch.allclose(whole, whole.round(), atol=1e-3)


# ------------------------------------------------------------------ signal and noise


def test_signal_to_noise_is_found_in_the_sum_and_is_none_without_noise():
    rng = torch.Generator().manual_seed(0)
    signal, noise = torch.randn(2, 8, 1, 50, 50, generator=rng, dtype=torch.float64)
    true = float((1.5 * signal).square().sum() / (8 * 50 * 50 * 2.0**2))
    assert Released(1.5 * signal + 2 * noise, 2.0).signal_to_noise == pytest.approx(
        true, 0.05
    )
    assert Released(2 * noise, 2.0).signal_to_noise <= 4 * (2 / noise.numel()) ** 0.5
    assert Released(signal, 0.0).signal_to_noise is None


@pytest.mark.parametrize("round", [1, 2, 3])
def test_most_signal_is_that_of_answers_which_agree(round):
    """Two releases and a gradient round; 6 clients on 3 nodes."""
    config = tiny_config(**WITH_RELEASES)
    terms = config.terms(round)
    total = torch.zeros(terms.shape, dtype=torch.float64)
    total[:, 0, 0, 0] = 6 * terms.clip_bound
    # As of a sum with noise, whose own part is taken off.
    loud = Released(total * 100, terms.noise_std * 3**0.5).signal_to_noise
    assert (loud + 1) / 100**2 == pytest.approx(most_signal_to_noise(config, round))


# ------------------------------------------------------------------ many phases


@pytest.mark.parametrize("last", ["fedavg-gan", "dp-merf", "gs-wgan"])
def test_every_method_may_follow_phases_of_moments_and_resumes_there(
    create, monkeypatch, last
):
    monkeypatch.setattr(dp_merf, "NUM_FEATURES", 64)
    monkeypatch.setattr(dp_merf, "STEPS", 4)
    own = {name: value for name, value in MOMENTS.items() if name != "phases"}
    if last == "gs-wgan":
        own |= FULL_PARTICIPATION
    own |= {"phases": f"means:0.5,scatter,{last}", "num_rounds": 4}
    own |= {"spectral_norm": False}
    whole = create("whole", **own, engine="local")
    train(whole)
    run = create("run", **own)
    for round in (1, 2, 3):  # a phase ends, or goes on

        def stop(metrics: dict, after: int = round) -> None:
            if metrics["round"] == after:
                raise RunStopped("here")

        with pytest.raises(RunStopped, match="here"):
            start(RunFolder.open(run.path), FakeGrid(3), stop)
    start(RunFolder.open(run.path), FakeGrid(3))
    assert product(run) == product(whole)
    assert events(run) == events(whole)
    assert len(events(run)) == 4
