"""Moments: a Gaussian for each class, against numpy's means and covariances."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dctn, idctn

from fedgs.gan import moments
from fedgs.gan.features import (
    QUADRATIC_WEIGHT,
    MeanFeatures,
    embedding,
    mean_features,
    products,
)
from fedgs.gan.models import build_generator
from fedgs.gan.moments import expected, model_of, set_generator, start_of, symmetric
from fedgs.methods import new_state, phase_at
from fedgs.methods.feature_means import EXPECTED
from tiny import MOMENTS, tiny_config

CLASSES, FREQUENCIES, AXES = 3, 16, 4  # 4 x 4 low frequencies, latent_dim
SILENT = {"noise_multiplier": 0.0}
ALL_AXES = MOMENTS | SILENT | {"latent_dim": FREQUENCIES}
TWICE = ALL_AXES | {"phases": "means,scatter,moments,moments", "num_rounds": 4}


def images_of(seed: int = 0, count: int = 60):
    """Draws blobs in [0, 1], another distribution for each class, classes unequal."""
    rng = np.random.default_rng(seed)
    labels = np.sort(rng.choice(CLASSES, size=count, p=[0.5, 0.3, 0.2]))
    labels[:CLASSES] = range(CLASSES)
    blocks = rng.normal(size=(count, 1, 4, 4)) * (1 + labels.reshape(-1, 1, 1, 1)) / 8
    blocks[:, :, 0, 0] += 4 + labels[:, None]
    blocks[:, 0, 1, 2] += blocks[:, 0, 2, 1] * labels  # a covariance of the class
    whole = np.zeros((count, 1, 16, 16))
    whole[:, :, :4, :4] = blocks
    images = idctn(whole, axes=(2, 3), norm="ortho")
    return torch.from_numpy(images).float(), torch.from_numpy(labels)


PUBLIC = ALL_AXES | {"phases": "moments", "num_rounds": 1, "public_data": "fonts"}


def in_bytes(images):
    """Returns images of `images_of` as a source has them, which has no fractions."""
    return (images * 255).round().clamp(0, 255).byte()


def low(images) -> np.ndarray:
    """Low frequencies by scipy, (n, 16)."""
    block = dctn(images.numpy(), axes=(2, 3), norm="ortho")[:, :, :4, :4]
    return block.reshape(len(images), -1).astype(np.float64)


def assert_moments(model, images, labels, mean_atol, covariance_atol):
    """A model's means and covariances, in frequencies, are numpy's of the images."""
    for label in range(CLASSES):
        own = low(images[labels == label])
        assert np.allclose(model.mean[label], own.mean(0), atol=mean_atol)
        covariance = model.back.T @ model.covariance[label] @ model.back
        expected = np.cov(own.T, bias=True)
        assert np.allclose(covariance, expected, atol=covariance_atol)


def all_released(config, clients, answer=None):
    """Returns what all phases release, and a server that has learned it.

    There is no noise unless `answer` adds it. Every client is a pair of images and
    labels; no clipping, so all of them weigh the same: this is what a release is where
    all embeddings are equally long.
    """
    server, releases = new_state(config), []
    for round in range(1, config.num_rounds + 1):
        method, own = phase_at(config, round)
        request, _ = method.begin(own, server)
        network = dict(request.tensors)
        centre = network.pop(EXPECTED)
        kind = own.method
        total = sum(embedding(kind, network, centre, *client) for client in clients)
        total, noise_std = (total, 0.0) if answer is None else answer(total)
        wide = unclipped(own, len(clients))
        found = mean_features(wide, network, centre, total, noise_std)
        releases.append(found)
        server.released.append((kind, found.tensors()))
        server.round += 1
    return releases, server


def unclipped(config, num_clients):
    """With a clip bound that nobody reaches: the most weight is 1 for each client."""
    bound = 2 * CLASSES**0.5
    return dataclasses.replace(config, num_clients=num_clients, clip_bound=bound)


# ------------------------------------------------------------------ without noise


@pytest.mark.parametrize("settings", [ALL_AXES, TWICE])
def test_without_noise_the_model_is_numpys_means_and_covariances(settings):
    """Of all images pooled: the clients have as many images and weigh the same."""
    config, (images, labels) = tiny_config(**settings), images_of()
    clients = [(images[first::2], labels[first::2]) for first in (0, 1)]
    model = model_of(config, all_released(config, clients)[0])
    assert_moments(model, images, labels, 1e-4, 2e-3)


def test_the_generator_draws_the_models_means_and_covariances():
    config, (images, labels) = tiny_config(**ALL_AXES), images_of()
    releases, server = all_released(config, [(images, labels)])
    model = model_of(config, releases)
    set_generator(config, model, server.generator, server.ema)
    own = low(images[labels == 1])
    mean, spread = server.ema.mean[1:2].detach(), low(server.ema.factor[1].detach())
    assert np.allclose(low(mean), own.mean(0), atol=1e-3)
    assert np.allclose(spread.T @ spread, np.cov(own.T, bias=True), atol=5e-3)
    picture = server.ema(torch.zeros(1, FREQUENCIES), torch.tensor([1]))
    assert torch.equal(picture, mean.clamp(0, 1))


@pytest.mark.parametrize("is_public", [False, True])
def test_a_phase_of_moments_adds_what_the_model_does_not_explain(is_public):
    """Of other images, three releases or a public start: the next one corrects all."""
    config = tiny_config(**(PUBLIC if is_public else TWICE))
    (images, labels), (others, their_labels) = images_of(1), images_of(0)
    if is_public:
        releases, start = [], start_of(config, in_bytes(others), their_labels)
    else:
        releases = all_released(config, [(others, their_labels)])[0][:3]
        start = None
    before = start or model_of(config, releases)
    asked = before.network, expected(before, "moments", CLASSES, 152)
    total = embedding("moments", *asked, images, labels)
    own = unclipped(config.at_round(len(releases) + 1), 1)
    last = mean_features(own, *asked, total, 0.0)
    after = model_of(config, [*releases, last], start)
    assert_moments(after, images, labels, 1e-3, 5e-3)
    for label in range(CLASSES):
        own = low(images[labels == label])
        assert not np.allclose(before.mean[label], own.mean(0), atol=0.02)


PARTED = TWICE | {"phases": "means,scatter,moments,parts"}


def test_without_noise_the_parts_are_numpys_shares_means_and_covariances():
    """Each class is cut at its mean, across the two longest axes of its pixels."""
    config, (images, labels) = tiny_config(**PARTED), images_of(count=400)
    releases, _ = all_released(config, [(images, labels)])
    model = model_of(config, releases)
    frequencies = low(images)
    for label in range(CLASSES):
        own = frequencies[labels.numpy() == label]
        centred = own - own.mean(0)
        axes = np.linalg.eigh(np.cov(own.T, bias=True))[1][:, -2:]
        # To which end an axis points is convention.
        pixels = model.axes @ model.split[label]
        along = centred @ pixels.numpy()
        overlap = np.abs(axes.T @ (pixels / pixels.norm(dim=0)).numpy())
        assert np.allclose(overlap, np.eye(2), atol=0.01)
        side = (along > 0) @ [1, 2]
        for part in range(4):
            row, inside = 4 * label + part, own[side == part]
            share = len(inside) / len(own)
            assert model.shares[label, part] == pytest.approx(share, abs=0.01)
            assert np.allclose(model.mean[row], inside.mean(0), atol=1e-2)
            covariance = model.back.T @ model.covariance[row] @ model.back
            assert np.allclose(covariance, np.cov(inside.T, bias=True), atol=1e-2)


def test_a_gaussian_cut_in_parts_has_the_moments_of_its_quarters():
    config = tiny_config(**ALL_AXES)
    model = model_of(config, all_released(config, [images_of()])[0])
    parts = moments.in_parts(model)
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        spread = model.covariance[label].numpy()
        drawn = rng.multivariate_normal(np.zeros(16), spread, 200_000, "ignore")
        side = (drawn @ parts.split[label].numpy() > 0) @ [1, 2]
        for part in range(4):
            inside, row = drawn[side == part], 4 * label + part
            assert len(inside) / len(drawn) == pytest.approx(0.25, abs=0.01)
            shift = (parts.centre[row] - model.centre[label]).numpy()
            assert np.allclose(inside.mean(0), shift, atol=0.02)
            assert np.allclose(np.cov(inside.T), parts.covariance[row], atol=0.03)


def test_the_generator_draws_a_part_as_often_as_its_share():
    config = tiny_config(**PARTED)
    generator = build_generator(config, 0)
    shares = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1, 0, 0, 0], [0, 0, 0.5, 0.5]])
    with torch.no_grad():
        generator.shares.copy_(shares)
        generator.factor.zero_()
        brightness = torch.arange(12) / 12
        generator.mean.copy_(brightness.view(12, 1, 1, 1).expand_as(generator.mean))
    labels = torch.arange(CLASSES).repeat(4000)
    z = torch.randn(len(labels), FREQUENCIES, generator=torch.manual_seed(0))
    drawn = (generator(z, labels)[:, 0, 0, 0] * 12).round().long()
    assert torch.equal(drawn // 4, labels)
    found = torch.bincount(drawn, minlength=12).view(3, 4) / 4000
    assert torch.allclose(found, shares, atol=0.03)


def assert_longest_axes(model, covariance, added=0.0):
    """A model's axes are numpy's longest ones, of these lengths and `added` means."""
    lengths, axes = np.linalg.eigh(covariance)
    lengths, axes = lengths[::-1][:AXES], axes[:, ::-1][:, :AXES]
    overlap = np.abs(axes.T @ (model.axes / model.axes.norm(dim=0)).numpy())
    assert np.allclose(overlap, np.eye(AXES), atol=1e-2)
    longer = lengths + added * lengths.mean()
    assert np.allclose(model.back.square().sum(1), longer, rtol=1e-3)
    assert np.allclose((model.back @ model.axes).numpy(), np.eye(AXES), atol=1e-6)


def test_fewer_axes_are_the_longest_ones():
    config, (images, labels) = tiny_config(**MOMENTS | SILENT), images_of()
    releases, _ = all_released(config, [(images, labels)])
    model = model_of(config, releases[:2])
    mean = np.stack([low(images)[labels.numpy() == c].mean(0) for c in range(CLASSES)])
    within = np.cov((low(images) - mean[labels.numpy()]).T, bias=True)
    apart = mean - mean.mean(0)
    assert_longest_axes(model, within + apart.T @ apart / CLASSES)


# ------------------------------------------------------------------ public images


def test_a_public_start_has_numpys_moments_and_the_longest_axes_lengthened():
    images, labels = images_of()
    public = in_bytes(images)
    whole = start_of(tiny_config(**PUBLIC), public, labels)
    assert_moments(whole, public / 255, labels, 1e-5, 1e-5)
    start = start_of(tiny_config(**PUBLIC | {"latent_dim": AXES}), public, labels)
    assert_longest_axes(start, np.cov(low(public / 255).T, bias=True), added=1.0)


def test_a_release_that_is_all_noise_leaves_what_makes_the_public_classes_differ():
    config = tiny_config(**PUBLIC)
    start = start_of(config, in_bytes(images_of()[0]), images_of()[1])
    blank = expected(start, "moments", CLASSES, 152)
    all_noise = blank + torch.randn(blank.shape, generator=torch.manual_seed(0))
    release = MeanFeatures("moments", {}, all_noise, torch.full((CLASSES,), 3.0))
    after = model_of(config, [release], start)
    assert torch.equal(after.mean, start.mean)
    moved = after.covariance - start.covariance
    assert torch.allclose(moved, moved.mean(0).expand_as(moved))  # alike in all classes


# ------------------------------------------------------------------ with noise


def noisy(noise_std: float, seed: int = 0):
    rng = np.random.default_rng(seed)

    def answer(total):
        noise = torch.from_numpy(rng.normal(0, noise_std, total.shape))
        return total + noise, noise_std

    return answer


def test_axes_beyond_the_noise_are_zero():
    """The scatter's noise has eigenvalues up to s sqrt(2 d); few stand above it."""
    config = tiny_config(**ALL_AXES)
    means, scatter, last = all_released(config, [images_of()])[0]
    rng, counts = np.random.default_rng(0), []
    for noise_std in (1e-9, 0.05, 100.0):
        noise = torch.from_numpy(rng.normal(0, noise_std, scatter.target.shape))
        target, std = scatter.target + noise.float(), torch.tensor([noise_std])
        found = dataclasses.replace(scatter, target=target, noise_std=std)
        model = model_of(config, [means, found, last])
        used = (model.axes != 0).any(0)
        counts.append(int(used.sum()))
        assert used.tolist() == [True] * counts[-1] + [False] * (16 - counts[-1])
        assert not model.back[~used].any()
        assert not model.centre[:, ~used].any()
        assert not model.covariance[:, ~used].any()
    assert counts[0] == 16 > counts[1] > counts[2] == 1


def test_an_eigenvalue_is_corrected_for_what_noise_adds_to_it():
    """A single true axis of length 1 in 16 frequencies, of many draws the mean."""
    config = tiny_config(**ALL_AXES)
    truth = torch.zeros(1, FREQUENCIES, dtype=torch.float64)
    truth[0, 3] = 1.0
    noise_std = 0.05  # radius 0.28
    rng, found = np.random.default_rng(0), []
    for _ in range(50):
        target = products(truth) + torch.from_numpy(rng.normal(0, noise_std, (1, 136)))
        means = MeanFeatures("means", {}, torch.zeros(3, 16), torch.zeros(3))
        scatter = MeanFeatures("scatter", {}, target, torch.tensor([noise_std]))
        found.append(float(model_of(config, [means, scatter]).back[0].norm()) ** 2)
    assert np.mean(found) == pytest.approx(1, abs=0.02)  # uncorrected: 1.02


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([1.0, 1e3, 1e9]), st.booleans())
def test_noise_of_any_size_leaves_finite_pictures(seed, noise_std, is_parted):
    """Also where the released number of images is negative."""
    last = "parts" if is_parted else "moments"
    config = tiny_config(**MOMENTS | {"phases": f"means,scatter,{last}"})
    releases, server = all_released(config, [images_of()], noisy(noise_std, seed))
    assert all(release.target.isfinite().all() for release in releases)
    model = model_of(config, releases)
    set_generator(config, model, server.generator, server.ema)
    pictures = server.ema(torch.randn(9, AXES), torch.arange(9) % CLASSES)
    assert pictures.isfinite().all()
    assert 0 <= pictures.min() <= pictures.max() <= 1


# ------------------------------------------------------------------ the run


def test_the_expected_features_of_a_model_are_those_of_its_samples():
    root = torch.from_numpy(np.random.default_rng(0).random((CLASSES, AXES, AXES)))
    own, any_model = root @ root.mT, model_of(tiny_config(**MOMENTS), [])
    model = dataclasses.replace(any_model, covariance=own, centre=root[:, 0])
    found = expected(model, "moments", CLASSES, AXES + 10)
    second = symmetric(found[:, AXES:].double(), AXES) / QUADRATIC_WEIGHT
    assert not found[:, :AXES].any()  # features are measured from the centre
    assert torch.allclose(second, model.covariance, atol=1e-6)
    for kind, features in (("means", 16), ("scatter", 136)):
        assert not expected(model, kind, CLASSES, features).any()
