"""Stages: one clipped embedding per client, sensitivity, and interruptions."""

import dataclasses
import itertools
import math
import threading

import numpy as np
import pytest
import torch

from fedgs import gs_wgan
from fedgs.config.recipes import recipe
from fedgs.data.federated import FederatedImages
from fedgs.federation import local, training
from fedgs.federation.messages import (
    StageRequest,
    decode_answer,
    decode_batch,
    encode_answer,
    encode_batch,
)
from fedgs.federation.node import Node
from fedgs.federation.preparation import new_run, resolve
from fedgs.federation.round import (
    ServerState,
    embedding_round,
    new_server,
    stage_request,
    stage_round,
)
from fedgs.federation.training import RunStopped
from fedgs.gan.features import KINDS, embedding
from fedgs.gan.stages import released
from fedgs.mechanism.quantization import release_step
from fedgs.mechanism.sanitizer import PerSampleGradients, clip
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.runs.run_folder import RunFolder, state_rounds
from refusals import assert_refused
from runs import events, generator, ignore
from tiny import MOMENTS, STAGED, tiny_config, tiny_data, write_tiny_npz

ONLY_STAGES = STAGED | {"num_rounds": 2}
PARTS = MOMENTS | {"stages": "means,scatter,parts"}
STAGED_AND_MORE = STAGED | {"num_rounds": 4}


def test_no_metrics_tell_how_long_a_stage_took(tmp_path):
    config = tiny_config(output=str(tmp_path / "run"), **STAGED_AND_MORE)
    reported: list[dict] = []
    folder = RunFolder.create(config)
    local.train(folder, tiny_data(config), reported.append, threading.Event())
    for lines in (folder.metrics(), reported):
        assert [("seconds" in line) for line in lines] == [False, False, True, True]


def quiet(**settings: object):
    """A configuration of one node, without noise."""
    one_node = {"noise_multiplier": 0.0, "clients_per_node": 6}
    return tiny_config(**STAGED | one_node | settings)


def embeddings(config, request, data) -> list[torch.Tensor]:
    """What each client computes before it is clipped."""
    kind = config.stage_list[request.round - 1].kind
    return [
        embedding(
            kind,
            request.networks,
            request.centre,
            *map(torch.from_numpy, data.client(client)),
        )
        for client in range(data.num_clients)
    ]


def create(path, **settings: object) -> RunFolder:
    return RunFolder.create(tiny_config(output=str(path), **settings))


def train(folder: RunFolder, stop: threading.Event | None = None) -> None:
    folder = RunFolder.open(folder.path)
    stop = stop or threading.Event()
    local.train(folder, tiny_data(folder.config), ignore, stop)


# ------------------------------------------------------------------ the release


def test_a_release_is_the_sum_of_the_clients_clipped_embeddings():
    config = quiet()
    data, request = tiny_data(config), stage_request(config, new_server(config))
    raw = embeddings(config, request, data)
    assert min(each.norm() for each in raw) > 1  # so that all are clipped
    expected = sum(each / each.norm() for each in raw)
    release = embedding_round(config, data, range(6), request, 0)
    assert release.values.shape == (1, 1, 3, 1 + 16)
    assert torch.allclose(release.values[0].double(), expected, atol=1e-4)


def test_a_clients_networks_and_classes_are_clipped_together():
    values = torch.ones(1, 1, 2, 3, 8) * torch.tensor([1.0, 9.0]).view(1, 1, 2, 1, 1)
    clipped = clip(PerSampleGradients(values), 5.0).values
    assert float(clipped.norm()) == pytest.approx(5.0)
    assert torch.allclose(clipped[0, 0, 1], 9 * clipped[0, 0, 0])  # one factor for all
    assert clip(PerSampleGradients(values), 5.0).round_sensitivity("zero-out") == 5.0


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_no_client_moves_a_release_by_more_than_its_sensitivity(relation):
    config = quiet()
    data, request = tiny_data(config), stage_request(config, new_server(config))
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


def test_hostile_features_cannot_leave_more_than_the_clip_bound():
    config = quiet()
    data, request = tiny_data(config), stage_request(config, new_server(config))
    large = tuple(
        {name: value * 1e15 for name, value in net.items()} for net in request.networks
    )
    request = dataclasses.replace(request, networks=large)
    release = embedding_round(config, data, range(6), request, 0).values
    assert release.isfinite().all()
    assert release.double().norm() <= 6 * (1 + 1e-5)


@pytest.mark.parametrize("round", [1, 2, 3])
@pytest.mark.parametrize("value", [-1e10, 1e30])  # the products overflow
def test_hostile_models_cannot_leave_more_than_the_clip_bound(round, value):
    config = tiny_config(**PARTS | {"noise_multiplier": 0.0})
    _, networks, groups, columns = config.terms(round).shape
    shapes = KINDS[config.stage_list[round - 1].kind].shapes(config)
    net = {name: torch.full(shape, value) for name, shape in shapes.items()}
    centre = torch.full((networks, groups, columns - 1), value)
    request = StageRequest(round, (net,), centre)
    release = embedding_round(config, tiny_data(config), range(6), request, 0).values
    assert release.isfinite().all()
    assert release.double().norm() <= 6 * (1 + 1e-5)


def test_noise_is_that_of_the_stage_and_the_clip_bound_that_of_the_run():
    config = tiny_config(**STAGED_AND_MORE, clip_bound=1.5)
    for round, weight in enumerate([0.5, 2.0], start=1):
        terms = config.terms(round)
        assert (terms.release, terms.clip_bound) == ("embedding", 1.5)
        assert terms.noise_std == pytest.approx(2 * 1.5 * 0.5 / math.sqrt(weight))
        assert terms.batch_size == 1
    assert config.terms(3).release == "gradient"
    assert config.terms(3).noise_std == config.noise_std


def test_the_noise_of_a_release_has_the_agreed_size():
    config = tiny_config(**STAGED | {"clients_per_node": 6, "moment_size": 16})
    silent = dataclasses.replace(config, noise_multiplier=0.0)
    data, request = tiny_data(config), stage_request(config, new_server(config))
    noisy, exact = (
        embedding_round(c, data, range(6), request, 0).values for c in (config, silent)
    )
    noise = (noisy - exact).double()
    terms = config.terms(1)
    assert noise.std() == pytest.approx(terms.noise_std, rel=0.1)  # of 771 values


# ------------------------------------------------------------------ the server


def staged_server(config) -> ServerState:
    """A server after its first release."""
    server = new_server(config)
    request = stage_request(config, server)
    answers = [
        embedding_round(config, tiny_data(config), hosted, request, node)
        for node, hosted in enumerate(map(config.hosting.hosted, range(3)))
    ]
    stage_round(config, server, request, answers)
    return server


def test_a_target_is_the_mean_over_images_weighted_by_client():
    """An image of client u counts 1 / (n_u ||v_u||), as all are clipped to one C."""
    config = quiet(clients_per_node=2)
    data, server = tiny_data(config), staged_server(config)
    request = stage_request(config, new_server(config))
    norms = [float(each.norm()) for each in embeddings(config, request, data)]
    sums, weights = torch.zeros(1, 3, 16), torch.zeros(3)
    for client, norm in enumerate(norms):
        images, labels = map(torch.from_numpy, data.client(client))
        for at, net in enumerate(request.networks):
            features = KINDS["means"].features(net, images, labels)
            sums[at].index_add_(0, labels, features / (len(labels) * norm))
        weights += torch.bincount(labels, minlength=3) / (len(labels) * norm)
    (release,) = server.stages
    expected = sums / weights[:, None]
    assert torch.allclose(release.target, expected, atol=1e-4)
    assert (server.round, release.kind) == (1, "means")


def test_a_target_does_not_depend_on_the_clip_bound_without_noise():
    small, large = (
        staged_server(quiet(clients_per_node=2, clip_bound=bound)).stages[0].target
        for bound in (1e-3, 2.0)
    )
    assert torch.allclose(small, large, atol=1e-4)


def test_the_noise_of_a_target_is_what_the_server_says():
    config = tiny_config(**STAGED | {"noise_multiplier": 0.003, "moment_size": 16})
    silent = dataclasses.replace(config, noise_multiplier=0.0)
    (noisy,), (exact,) = staged_server(config).stages, staged_server(silent).stages
    found = (noisy.target - exact.target).std(dim=(0, 2))  # of 256 values
    assert torch.allclose(found, noisy.noise_std, rtol=0.15)
    assert not exact.noise_std.any()


def test_only_noise_and_no_images_leave_finite_targets():
    config = quiet(clients_per_node=2)
    request, shape = (
        stage_request(config, new_server(config)),
        config.terms(1).shape[1:],
    )
    asked = (config, 1, request.networks, request.centre)
    for total, noise_std in (
        (torch.zeros(shape), 0.0),
        (torch.full(shape, -1e3), 1e3),  # a negative number of images
        (torch.full(shape, 1e12), 1e12),
    ):
        release = released(*asked, total.double(), noise_std)
        assert release.target.isfinite().all()
        assert release.noise_std.isfinite().all()


def test_no_noise_gives_clients_more_weight_than_clipping_can_leave_them():
    config = quiet(clients_per_node=2)
    request, terms = stage_request(config, new_server(config)), config.terms(1)
    asked = (config, 1, request.networks, request.centre)
    total = torch.zeros(terms.shape[1:], dtype=torch.float64)
    total[:, 0, 0] = 1e9  # more images of one class than there can be of all
    networks, groups = total.shape[:2]
    most = config.num_clients * config.clip_bound / (2 * math.sqrt(networks * groups))
    noise = released(*asked, total, 1.0).noise_std
    assert noise[1:].tolist() == pytest.approx([1 / (0.2 * most)] * (groups - 1))


def test_later_networks_depend_on_what_was_released():
    config = tiny_config(**STAGED)
    server, changed = staged_server(config), staged_server(config)
    (release,) = changed.stages
    changed.stages = [dataclasses.replace(release, target=2 * release.target)]
    request, other = (stage_request(config, each) for each in (server, changed))
    assert request.round == 2
    assert request.digest() != other.digest()


# ------------------------------------------------------------------ the run


def test_a_run_of_stages_only_makes_no_discriminators(tmp_path, monkeypatch):
    folder = create(tmp_path / "run", **ONLY_STAGES)
    monkeypatch.setattr("fedgs.federation.node.Discriminators", None)
    train(folder)
    assert [event.release for event in events(folder)] == ["embedding"] * 2
    assert {event.batch_size for event in events(folder)} == {1}


def test_discriminators_start_on_fakes_of_the_staged_generator(tmp_path):
    folder = create(tmp_path / "run", **STAGED | {"num_rounds": 3})
    stop = threading.Event()
    nodes = local.LocalNodes(folder.config, tiny_data(folder.config), folder.private)
    seen = []
    prepare = nodes.prepare
    nodes.prepare = lambda request, ids: (seen.append(request), prepare(request, ids))
    with folder.locked(), nodes:
        local.train_nodes(folder, nodes, ignore, stop)
    (request,) = seen
    public = training.public_fakes(folder.config)
    assert request.round == 0
    assert not torch.equal(request.images, public.images)
    assert [event.release for event in events(folder)][2] == "gradient"


# ------------------------------------------------------------------ the node


def a_node(path, limits: Limits | None = None, **settings: object) -> Node:
    config = tiny_config(**STAGED_AND_MORE | settings)
    return Node(config, 0, tiny_data(config), path, limits)


def test_a_repeated_request_for_a_stage_gets_the_same_bytes_after_a_restart(tmp_path):
    node = a_node(tmp_path, noise_seed=None)
    request = stage_request(node.config, new_server(node.config))
    first = node.answer(request)
    node.save(0)
    again = a_node(tmp_path, noise_seed=None)
    assert torch.equal(again.answer(request).values, first.values)
    assert len(list(tmp_path.glob("node-*/releases-*.jsonl"))) == 1
    other = dataclasses.replace(request, centre=request.centre + 1)
    assert_refused("has already answered round 1", again.answer, other)


def test_discriminators_that_another_process_made_after_the_stages_are_found(tmp_path):
    config = tiny_config(**STAGED_AND_MORE)
    server = new_server(config)
    requests = [stage_request(config, server)]
    requests.append(dataclasses.replace(requests[0], round=2))
    requests[1] = dataclasses.replace(
        stage_request(config, staged_server(config)), round=2
    )
    mine, other = a_node(tmp_path), a_node(tmp_path)
    for request in requests:
        mine.answer(request)
        mine.save(0)
    other.answer(training.public_fakes(config, server.ema))
    other.save(2)
    assert state_rounds(mine.folder)[-1] == 2
    server.round = 2
    request, _ = training.draw_fakes(config, server)
    found = mine.answer(request)
    assert torch.equal(found.values, other.answer(request).values)


def test_a_client_that_agreed_to_no_embeddings_refuses_them(tmp_path):
    node = a_node(tmp_path, Limits(allow_seeded_noise=True))
    request = stage_request(node.config, new_server(node.config))
    with pytest.raises(ClientRefused, match=r"stages = means:0.5,.*allow_embeddings"):
        node.answer(request)
    assert not list(tmp_path.rglob("releases-*"))


def test_a_client_refuses_a_stage_with_less_noise_than_it_agreed_to(tmp_path):
    agreed = Limits(
        allow_seeded_noise=True, allow_embeddings=True, min_noise_multiplier=0.4
    )
    node = a_node(tmp_path, agreed)  # 0.5, but 0.5 / sqrt(2) in stage 2
    request = stage_request(node.config, new_server(node.config))
    with pytest.raises(ClientRefused, match=r"a stage has 0\.3536"):
        node.answer(request)


def test_a_clients_epsilon_counts_embeddings_and_gradients_alike(tmp_path):
    """mu^2 of a node with replace-one: w / sigma^2 of a stage, B / sigma^2 else."""
    node = a_node(tmp_path)
    server = new_server(node.config)
    node.answer(stage_request(node.config, server))
    assert node.count.largest() == pytest.approx(0.5 / 0.5**2)
    stage = staged_server(node.config)
    node.answer(stage_request(node.config, stage))
    assert node.count.largest() == pytest.approx(2.5 / 0.5**2)
    node.answer(training.public_fakes(node.config))
    stage.round = 2
    node.answer(training.draw_fakes(node.config, stage)[0])
    assert node.count.largest() == pytest.approx((2.5 + 4) / 0.5**2)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"stages": "means,magic"}, "stages = 'means,magic': give --stages at most"),
        (
            {"stages": "means:1,scatter"},
            "stages = .*: give --stages a positive number|",
        ),
        ({"stages": "means:20,scatter:-4"}, "stages = .* give --stages a positive"),
        ({"stages": "means:20,scatter:nan"}, "stages = .* give --stages a positive"),
        ({"clip_bound": 2.5}, "clip_bound = 2.5: .*; give --clip-bound at most 2"),
        ({"num_rounds": 1}, "num_rounds = 1: give --num-rounds at least one for each"),
        (
            {"client_selection": "balanced", "clients_per_round": 2},
            "stages = 'means:0.5,scatter:2': every client takes part in a stage",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused_with_a_remedy(settings, named):
    assert_refused(named, tiny_config, **STAGED | settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"stages": "scatter,means,moments"}, "moments come in the order means, scat"),
        ({"stages": "means,moments,moments"}, "moments come in the order"),
        ({"stages": "means,scatter,parts,moments"}, "moments come in the order"),
        ({"stages": "means,scatter,means"}, "moments come in the order"),
        ({"generator": "upsample"}, "generator = 'upsample': .*--generator gaussian"),
        ({"latent": "bernoulli"}, "latent = 'bernoulli': .* give --latent normal"),
        ({"moment_size": 17}, "moment_size = 17: give --moment-size at most 16"),
        (
            {"moment_size": 60, "image_size": 64},
            "moment_size = 60: more than 1000000 products .* smaller --moment-size",
        ),
        ({"latent_dim": 2000}, "latent_dim = 2000: .* give a smaller --latent-dim"),
    ],
)
def test_moments_that_cannot_be_are_refused_with_a_remedy(settings, named):
    more = {"num_rounds": 4}
    assert_refused(named, tiny_config, **MOMENTS | more | settings)


@pytest.mark.parametrize(
    "stages", ["means", "means,scatter", "means,scatter,moments,parts"]
)
def test_moments_may_end_early(stages):
    settings = {"stages": stages, "num_rounds": 4}
    tiny_config(**MOMENTS | settings)


# ------------------------------------------------------------------ public data

PUBLIC = MOMENTS | {"stages": "moments,moments"}
PUBLIC |= {"num_rounds": 2, "public_data": "fonts"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"public_data": None}, "moments come in the order means, scatter, any number"),
        ({"stages": "means,scatter"}, "moments come in the order any number of"),
        ({"stages": None}, "public_data = 'fonts': there are no stages; give --stages"),
        ({"data": "fonts"}, "public_data = 'fonts': has images of data = 'fonts'"),
        ({"latent_dim": 17}, "latent_dim = 17: give --latent-dim at most the 16 low"),
    ],
)
def test_public_data_that_cannot_be_a_start_are_refused(settings, named):
    assert_refused(named, tiny_config, **PUBLIC | settings)


@pytest.mark.parametrize(
    ("labels", "channels", "named"),
    [
        ([0, 1, 2, 3], 1, "has images of 4 classes, the run has 3; give"),
        ([0, 2, 2, 0], 1, "has images of 2 classes, the run has 3; give"),
        ([0, 1, 2, 1], 3, "image_channels = 1: .* has RGB images"),
    ],
)
def test_public_images_of_other_classes_or_channels_are_refused(
    tmp_path, labels, channels, named
):
    images = np.zeros((4, channels, 16, 16), np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    config = tiny_config(**PUBLIC | {"public_data": f"npz:{tmp_path / 'x.npz'}"})
    assert_refused(f"public_data = 'npz:.*{named}", new_server, config)


def test_a_run_is_refused_for_its_public_data_before_its_folder_is_made(tmp_path):
    settings = {"output": str(tmp_path / "run"), "public_data": "cifar"}
    config = dataclasses.replace(recipe("staged-fonts"), data="digits", **settings)
    assert_refused("public_data = 'cifar': .* --data one of digits", new_run, config)
    assert not (tmp_path / "run").exists()


def test_clients_do_not_read_the_public_data(tmp_path):
    there = {"public_data": write_tiny_npz(tmp_path / "public.npz")}
    request = stage_request(*with_server(tiny_config(**PUBLIC | there)))
    elsewhere = tiny_config(**PUBLIC | {"public_data": "npz:/nowhere.npz"})
    assert embedding_round(elsewhere, tiny_data(elsewhere), range(6), request, 0)


def with_server(config):
    return config, new_server(config)


def test_an_interrupted_run_with_public_data_goes_on_with_the_same_bits(tmp_path):
    places = {"public_data": write_tiny_npz(tmp_path / "public.npz"), "noise_seed": 1}
    once, twice = (
        RunFolder.create(tiny_config(**PUBLIC | places, output=str(tmp_path / name)))
        for name in ("once", "twice")
    )
    local.train(once, tiny_data(once.config), ignore, threading.Event())
    stop = threading.Event()
    with pytest.raises(RunStopped):
        local.train(twice, tiny_data(twice.config), lambda row: stop.set(), stop)
    local.train(twice, tiny_data(twice.config), ignore, threading.Event())
    assert len(events(twice)) == 2
    assert generator(once.path) == generator(twice.path)


@pytest.mark.parametrize("settings", [STAGED, MOMENTS, PARTS])
def test_a_stage_request_travels_and_comes_back_as_it_was(settings):
    for transport in ("exact", "compact"):
        config = tiny_config(**settings, transport=transport)
        request = stage_request(config, new_server(config))
        again = decode_batch(encode_batch(request, config), config)
        assert again.digest() == request.digest()


@pytest.mark.parametrize("transport", ["exact", "compact"])
def test_a_release_of_a_stage_travels_and_comes_back_as_it_was(transport):
    config = tiny_config(**STAGED, transport=transport)
    request = stage_request(config, new_server(config))
    release = embedding_round(config, tiny_data(config), range(2), request, 0)
    payload = encode_answer(release, config, request)
    again = decode_answer(payload, config, request, 0)
    assert torch.equal(again.values, release.values)
    step = release_step(config, config.terms(1))
    if transport == "compact":  # an eighth of the noise, of this stage
        assert step == pytest.approx(config.terms(1).noise_std / 8, rel=0.01)
        whole = again.values.double() / step
        assert torch.allclose(whole, whole.round(), atol=1e-3)


def test_the_recipe_trains_on_the_embedded_digits_and_keeps_its_target(tmp_path):
    changes = {
        "output": str(tmp_path / "run"),
        "data": "digits",
        "image_size": 16,
    }
    config, data = resolve(dataclasses.replace(recipe("staged"), **changes))
    folder = RunFolder.create(config)
    local.train(folder, data, ignore, threading.Event())
    assert len(events(folder)) == 3
    total = sum((e.clip_bound / e.noise_std) ** 2 for e in events(folder))
    nodes = events(folder)[0].counted_nodes
    # One Gaussian release of mu = 2.000446 has epsilon 10 at delta 1e-5.
    assert 0.999 * 2.000446 < math.sqrt(total / nodes) <= 2.000446


def test_data_of_one_class_has_an_embedding_of_bounded_norm():
    config = quiet()
    data = tiny_data(config)
    ones = FederatedImages(
        data.images,
        np.zeros_like(data.labels),
        data.client_records,
        data.client_names,
        3,
        "tiny",
    )
    request = stage_request(config, new_server(config))
    release = embedding_round(config, ones, range(6), request, 0).values.double()
    assert release.norm() <= 6 * (1 + 1e-5)
    assert not release[:, :, 1:].any()


def test_gs_wgan_on_one_page_has_no_stages():
    config = tiny_config(**STAGED)
    with pytest.raises(ValueError, match="stages"):
        gs_wgan.train(config, tiny_data(config))
