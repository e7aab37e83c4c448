"""The mechanism: clipping, sensitivity, one noisy sum, types that keep the order."""

import math
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy import fft, stats
from torch import Tensor

from fedgs.mechanism.integer_sums import IntegerSum, sanitize_integers
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.sanitizer import (
    ClippedGradients,
    PerSampleGradients,
    SanitizedGradients,
    clip,
    from_dct,
    sanitize,
    shorten,
    to_dct,
)
from fedgs.privacy.plan import SENSITIVITIES
from tiny import tiny_config

ROUNDING = 1e-12  # of norms of at most 1e4 float64 entries, relative
LARGEST_FLOAT32 = 3.4028234663852886e38
CLIP_BOUNDS = st.sampled_from([1e-6, 1e-3, 1.0, 7.5, 1e6])
ANY_GRADS = arrays(
    np.float32,
    array_shapes(min_dims=5, max_dims=5, max_side=3),
    elements=st.floats(width=32),  # zeros, subnormals, huge, infinite and NaN
)


def _random(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _clipped(values: Tensor, clip_bound: float = 1.0) -> ClippedGradients:
    return clip(PerSampleGradients(values), clip_bound)


def _norms(values: Tensor) -> Tensor:
    return values.flatten(2).norm(dim=2)


def _release(*parts: ClippedGradients, noise_std: float = 0.0, round: int = 1):
    return sanitize(parts, noise_std, NoiseStream(7, 0, round), round, 0)


# ------------------------------------------------------------------------ clipping


@given(grads=ANY_GRADS, clip_bound=CLIP_BOUNDS)
@settings(max_examples=200)
def test_no_input_has_a_norm_above_the_bound(grads, clip_bound):
    clipped = _clipped(torch.from_numpy(grads), clip_bound).values
    assert clipped.isfinite().all()
    assert (_norms(clipped) <= clip_bound * (1 + ROUNDING)).all()


@pytest.mark.parametrize("value", [1e19, 1e30, LARGEST_FLOAT32, -LARGEST_FLOAT32])
def test_finite_gradients_whose_float32_norm_overflows_are_clipped_not_dropped(value):
    clipped = _clipped(torch.full((1, 1, 1, 2, 2), value), clip_bound=3.0).values
    expected = torch.full_like(clipped, math.copysign(1.5, value))  # 3 / sqrt(4)
    torch.testing.assert_close(clipped, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_not_finite_becomes_zero_and_no_other_one_changes(value):
    grads = _random(3, 4, 1, 2, 2)
    broken = grads.clone()
    broken[1, 2, 0, 0, 1] = value
    clipped, untouched = _clipped(broken).values, _clipped(grads).values
    assert not clipped[1, 2].any()
    untouched[1, 2] = 0
    assert torch.equal(clipped, untouched)


@given(grads=ANY_GRADS)
def test_gradients_within_the_bound_keep_every_bit(grads):
    grads = torch.from_numpy(grads).nan_to_num(0, 1, -1).clamp(-1, 1)
    # At most 27 entries of at most 1: norms of at most sqrt(27) = 5.2.
    assert torch.equal(_clipped(grads, clip_bound=5.2).values, grads.double())


@pytest.mark.parametrize("clip_bound", [0.0, -1.0, math.nan, math.inf])
def test_a_clip_bound_that_bounds_nothing_is_refused(clip_bound):
    with pytest.raises(ValueError, match="clip_bound"):
        _clipped(torch.ones(1, 1, 1, 2, 2), clip_bound)


# --------------------------------------------------------------------- sensitivity


@given(grads=ANY_GRADS, other=st.data(), clip_bound=CLIP_BOUNDS)
@settings(max_examples=100)
def test_one_client_moves_the_sum_by_at_most_the_sensitivity(grads, other, clip_bound):
    mine = arrays(np.float32, grads.shape[1:], elements=st.floats(width=32))
    for relation, new in (
        ("replace-one", other.draw(mine)),
        ("zero-out", np.zeros(grads.shape[1:], np.float32)),
    ):
        neighbour = grads.copy()
        neighbour[0] = new
        ours = _clipped(torch.from_numpy(grads), clip_bound)
        theirs = _clipped(torch.from_numpy(neighbour), clip_bound)
        # The release is float32: one rounding of each sum of at most 3 gradients.
        slack = 1 + 1e-5
        moved = _release(ours).values.double() - _release(theirs).values.double()
        per_fake = moved.flatten(1).norm(dim=1)
        most = (
            SENSITIVITIES[relation] * clip_bound
        )  # of one fake, as the accountant has it
        assert (per_fake <= slack * most).all()


@pytest.mark.parametrize(
    ("relation", "factor"), [("replace-one", -1.0), ("zero-out", 0.0)]
)
def test_the_sensitivity_of_a_round_is_attained(relation, factor):
    grads = _random(3, 8, 1, 4, 4, scale=100.0)
    neighbour = grads.clone()
    neighbour[1] *= factor
    ours, theirs = _clipped(grads, 2.0), _clipped(neighbour, 2.0)
    moved = _release(ours).values.double() - _release(theirs).values.double()
    expected = SENSITIVITIES[relation] * 2.0 * math.sqrt(8)  # C = 2, B = 8
    assert moved.norm().item() == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------------- release


@pytest.mark.parametrize("num_clients", [1, 5])
def test_a_release_of_nothing_is_noise_of_the_stated_size_whoever_is_summed(
    num_clients,
):
    # 2 * C * sigma = 2 * 0.8 * 1.07, added once and not once per client.
    noise_std = tiny_config(clip_bound=0.8, noise_multiplier=1.07).noise_std
    assert noise_std == pytest.approx(1.712)
    zeros = torch.zeros(num_clients, 32, 1, 64, 64)
    release = _release(_clipped(zeros, 0.8), noise_std=noise_std, round=9)
    assert (release.round, release.node_id) == (9, 0)
    assert (release.noise_std, release.clip_bound) == (noise_std, 0.8)
    assert release.values.dtype == torch.float32
    values = release.values.double()
    num = values.numel()
    assert num == 131_072
    # Six standard errors of n normal draws, and 3.5 / sqrt(n) of Massart's inequality.
    assert abs(values.mean()) < 6 * noise_std / num**0.5
    assert abs(values.std() - noise_std) < 6 * noise_std / (2 * num) ** 0.5
    distance = stats.kstest(values.flatten().numpy() / noise_std, "norm").statistic
    assert distance < 3.5 / num**0.5


def test_noise_does_not_depend_on_the_gradients():
    grads = _random(2, 3, 1, 4, 4)
    noisy, plain = (_release(_clipped(grads), noise_std=s).values for s in (2.0, 0.0))
    expected = NoiseStream(7, 0, 1).normal((3, 1, 4, 4), 2.0)
    torch.testing.assert_close(noisy - plain, torch.from_numpy(expected).float())


@pytest.mark.parametrize("cuts", [(7,), (1, 6), (3, 4), (1, 1, 1, 1, 1, 1, 1)])
def test_the_sum_has_the_same_bits_however_clients_are_split_over_parts(cuts):
    grads = _random(7, 3, 1, 4, 4)
    parts = [_clipped(part) for part in grads.split(list(cuts))]
    assert torch.equal(_release(*parts).values, _release(_clipped(grads)).values)


def test_the_same_gradients_are_released_once():
    clipped = _clipped(_random(2, 3, 1, 4, 4))
    _release(clipped)
    twice = _clipped(_random(2, 3, 1, 4, 4))
    for parts in ((clipped,), (twice, twice)):
        with pytest.raises(RuntimeError, match="already released"):
            _release(*parts, round=2)


def test_a_release_needs_little_memory_however_many_clients_a_node_hosts():
    made: list[weakref.ref[ClippedGradients]] = []

    def coming():
        for _ in range(8):
            part = _clipped(_random(1, 1, 1, 4, 4))
            made.append(weakref.ref(part))
            yield part
            del part  # from here on only the release may hold it
            # The first, whose shape all have, and the one that was added last.
            assert sum(ref() is not None for ref in made) <= 2

    sanitize(coming(), 0.0, NoiseStream(7, 0, 1), 1, 0)
    assert len(made) == 8
    made.clear()
    sanitize_integers(coming(), 2**16, 0.0, NoiseStream(7, 0, 2), 2, 0)
    assert len(made) == 8


@pytest.mark.parametrize("bounds", [(), (1.0, 2.0)])
def test_a_release_needs_gradients_of_one_clip_bound(bounds):
    parts = [_clipped(torch.ones(1, 1, 1, 2, 2), bound) for bound in bounds]
    with pytest.raises(ValueError, match="a release needs clipped gradients"):
        _release(*parts)


@pytest.mark.parametrize("weights", [[0.0, 0.25, 1.0], [1.0, 1.0, 1.0]])
def test_shortened_gradients_keep_their_directions_and_are_as_long_as_weights_say(
    weights,
):
    clipped = _clipped(_random(3, 2, 1, 4, 4), clip_bound=0.5)
    found = shorten(clipped, weights)
    for own, before, weight in zip(found.values, clipped.values, weights, strict=True):
        assert torch.equal(own, weight * before)
    assert found.clip_bound == 0.5


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan, math.inf])
def test_a_weight_by_which_a_client_counts_more_is_refused(weight):
    with pytest.raises(ValueError, match="weights outside"):
        shorten(_clipped(_random(1, 1, 1, 2, 2)), [weight])


def test_gradients_are_not_released_beside_what_is_left_of_them():
    clipped = _clipped(_random(1, 1, 1, 2, 2))
    shorten(clipped, [0.5])
    with pytest.raises(RuntimeError, match="already released"):
        sanitize([clipped], 0.0, NoiseStream(0, 0, 1), 1, 0)


def test_the_types_cannot_be_made_by_hand():
    values = torch.zeros(1, 1, 1, 2, 2)
    for made_by in (None, object(), True, "sanitizer"):
        with pytest.raises(TypeError, match="made by"):
            ClippedGradients(values, 1.0, made_by)
        with pytest.raises(TypeError, match="made by"):
            SanitizedGradients(values[0], 1, 0, 1.0, 1.0, made_by)
        with pytest.raises(TypeError, match="sanitize_integers only"):
            IntegerSum(values, 1, 0, 1, 1.0, 1.0, made_by)


def test_releases_are_made_in_three_places_only():
    root = Path(__file__).resolve().parents[2]
    packages = ("fedgs", "clients", "server", "experiments")
    sources = {
        path.relative_to(root).as_posix(): path.read_text()
        for package in packages
        for path in (root / package).rglob("*.py")
    }
    sanitizer = "mechanism/sanitizer"
    for name, places in (
        (r"\breceived\(", {sanitizer, "round/messages", "round/node_state"}),
        (r"\b_MADE_BY_SANITIZER\b", {sanitizer}),
        (r"\b(Clipped|Sanitized)Gradients\(", {sanitizer}),
        (r"\b__new__\(", set()),  # would skip the check of the maker
    ):
        found = {path for path, text in sources.items() if re.search(name, text)}
        assert found == {f"fedgs/{place}.py" for place in places}


# ----------------------------------------------------------------------------- DCT


@pytest.mark.parametrize("size", [16, 28, 64])
@pytest.mark.parametrize("dct_size", [1, 7, 16])
def test_the_basis_is_scipys_orthonormal_dct(size, dct_size):
    images = _random(2, 3, 1, size, size).double()
    expected = fft.dctn(images.numpy(), axes=(-2, -1), norm="ortho")
    expected = torch.from_numpy(expected[..., :dct_size, :dct_size].copy())
    torch.testing.assert_close(to_dct(images, dct_size), expected)


@given(seed=st.integers(0, 2**32), dct_size=st.integers(1, 28))
def test_the_projection_is_one_and_never_makes_a_norm_larger(seed, dct_size):
    images = torch.from_numpy(np.random.default_rng(seed).normal(size=(4, 1, 28, 28)))
    before, after = (_norms(x[None]) for x in (images, to_dct(images, dct_size)))
    assert (after <= before * (1 + ROUNDING)).all()
    if dct_size == 28:
        torch.testing.assert_close(after, before)
    coefficients = to_dct(images, dct_size)
    torch.testing.assert_close(
        to_dct(from_dct(coefficients, 28), dct_size), coefficients
    )
