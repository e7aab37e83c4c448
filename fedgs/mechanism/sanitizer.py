"""The mechanism: per-sample gradients -> clipped -> sanitized.

For every fake image j and client u, with g = d L_G / d x_j in the gradient basis:

    clipped    g * min(1, C / ||g||)                          sensitivity C or 2C
               and shorter where its group of clients is small
    sanitized  sum over a node's clients + N(0, noise_std^2)  noise_std = 2*C*sigma

The three types stand in this order and each is made only from the one before, so that
nothing unsanitized can be encoded as a message
(`fedgs.round.messages.encode_answer` takes the last one only). One release is the
concatenation of B such sums; its sensitivity is sqrt(B) times that of one fake.

An embedding of mean features is one sample as well: B is 1, and one vector by class and
feature stands in the place of a gradient. All that is said here of gradients holds for
it.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Eq. 7-9 and Definition 3.3;
reference `source/main.py`, `dp_conv_hook`. Sensitivities: docs/privacy.md.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.quantization import to_grid
from fedgs.shapes import ImageGrads, PerSampleGrads

# Only who holds this can make the types below, so a step that is left out is an error.
_MADE_BY_SANITIZER = object()


@dataclass(frozen=True)
class PerSampleGradients:
    """Raw gradients of a node's clients: private, must not leave the node.

    Attributes:
        values: shape (n, B, C, k, k), float: client, fake, and gradient in its basis.
            Embeddings have the shape (n, 1, networks, classes, features).
    """

    values: PerSampleGrads


class ClippedGradients:
    """Gradients of bounded norm: still private, with a known sensitivity.

    Attributes:
        values: shape (n, B, C, k, k), float64; each (client, fake) has L2 norm at
            most `clip_bound`.
        clip_bound: C.
    """

    def __init__(self, values: PerSampleGrads, clip_bound: float, made_by: Any) -> None:
        """Is called by `clip` only."""
        if made_by is not _MADE_BY_SANITIZER:
            raise TypeError(
                "ClippedGradients are made by fedgs.mechanism.sanitizer.clip only"
            )
        self.values = values
        self.clip_bound = clip_bound
        self.is_released = False


@dataclass(eq=False, repr=False)  # no message or log shows its numbers
class SanitizedGradients:
    """One node's release of one round: the only type that may leave a node.

    Attributes:
        values: shape (B, C, k, k), float32; the noisy sum over the node's clients.
        round: the round that was answered.
        node_id: the node that answered.
        noise_std: standard deviation of the noise in `values`.
        clip_bound: C.
    """

    values: Tensor
    round: int
    node_id: int
    noise_std: float
    clip_bound: float
    made_by: InitVar[object]

    def __post_init__(self, made_by: object) -> None:
        """Is called by `sanitize` and by the decoder of a received message only."""
        if made_by is not _MADE_BY_SANITIZER:
            raise TypeError(
                "SanitizedGradients are made by fedgs.mechanism.sanitizer only"
            )


def clip(grads: PerSampleGradients, clip_bound: float) -> ClippedGradients:
    """Scales each sample's gradient to L2 norm at most `clip_bound`.

    Computes g * min(1, C / ||g||): directions are kept, small gradients untouched. A
    gradient with a non-finite entry or norm becomes zero, so that it is no signal.

    Privacy: reads private data; output private with bounded sensitivity.

    Args:
        grads: raw gradients, values of shape (n, B, C, k, k).
        clip_bound: C > 0 in units of the gradient norm.

    Raises:
        ValueError: clip_bound is not positive and finite, or there are not 5 axes.

    Source: GS-WGAN, Definition 3.3 (clipping per fake).

    >>> grads = PerSampleGradients(torch.ones(1, 2, 1, 2, 2))
    >>> clip(grads, clip_bound=1.0).values.flatten(2).norm(dim=2).tolist()
    [[1.0, 1.0]]
    """
    if not (clip_bound > 0 and math.isfinite(clip_bound)):
        raise ValueError(f"clip_bound = {clip_bound}: give a positive finite number")
    # With another number of axes, norms would be of other things than samples.
    if grads.values.dim() != 5:
        raise ValueError(f"{grads.values.dim()} axes: gradients have 5 axes")
    # float64: a float32 norm overflows for finite gradients beyond 1e19.
    values = grads.values.double()
    norms = values.flatten(2).norm(dim=2)
    # C / max(C, norm) is min(1, C / norm) without a division by 0.
    factors = clip_bound / norms.clamp_min(clip_bound)
    scaled = values * factors[:, :, None, None, None]
    is_finite = norms.isfinite()[:, :, None, None, None]
    # Not a product with 0: it would leave infinite entries as NaN.
    clipped = torch.where(is_finite, scaled, torch.zeros_like(values))
    return ClippedGradients(clipped, clip_bound, _MADE_BY_SANITIZER)


def shorten(clipped: ClippedGradients, weights: Sequence[float]) -> ClippedGradients:
    """Multiplies what clipping left of each client by a weight, in [0, 1].

    No norm grows, so the sensitivity of one client with a fixed weight is not larger.
    Where the weights of other clients depend on it, they have to be such that the sum
    moves no further all the same (`fedgs.cohorts.client_groups.weight_of`).

    Privacy: reads private data; output private with bounded sensitivity.

    Args:
        clipped: the gradients of n clients; must not be released any more.
        weights: one for each client, in their order, at most n: more clients than are
            asked for are refused later.

    Raises:
        ValueError: a weight outside [0, 1].

    Source: docs/privacy.md, "One release for all groups".
    """
    if not all(0 <= weight <= 1 for weight in weights):
        raise ValueError("weights outside [0, 1]: a client would count for several")
    if all(weight == 1 for weight in weights):
        return clipped
    by_client = torch.ones(len(clipped.values), dtype=torch.float64)
    by_client[: len(weights)] = torch.tensor(weights, dtype=torch.float64)
    factors = by_client.to(clipped.values.device)[:, None, None, None, None]
    clipped.is_released = True
    return ClippedGradients(
        clipped.values * factors, clipped.clip_bound, _MADE_BY_SANITIZER
    )


def sanitize(
    parts: Iterable[ClippedGradients],
    noise_std: float,
    noise: NoiseStream,
    round: int,
    node_id: int,
    step: float | None = None,
) -> SanitizedGradients:
    """Sums the clipped gradients over a node's clients and adds noise once.

    The sum is taken in float64 in client order, so that it does not depend on how
    the clients were batched over workers.

    Privacy: releases (epsilon, delta)-DP output; event: one Gaussian release with
    standard deviation `noise_std` and sensitivity sqrt(B) times that of one fake.

    Args:
        parts: the gradients of the node's participating clients, in order; not empty.
            If they come from an iterator, one part at a time is in memory.
        noise_std: 2 * clip_bound * noise_multiplier, at least 0.
        noise: a fresh noise stream.
        round: the round that is answered.
        node_id: the node that answers.
        step: what the noisy sum is rounded to multiples of
            (`fedgs.mechanism.quantization`). None means that it is not rounded.

    Raises:
        RuntimeError: a part or the noise was already used for a release.
        ValueError: no parts, or different clip bounds.

    Source: GS-WGAN, Eq. 9; docs/privacy.md, "The mechanism".
    """
    first, taken = take(parts)
    shape = tuple(first.values.shape[1:])
    total = torch.zeros(shape, dtype=torch.float64)
    for part in taken:
        for client_grads in part.values.cpu():
            total += client_grads
    draws = noise.normal(shape, noise_std)
    total += torch.from_numpy(draws)
    # From here on everything is post-processing, which costs no privacy.
    if step is not None:
        total = to_grid(total, step)
    return SanitizedGradients(
        values=total.float(),
        round=round,
        node_id=node_id,
        noise_std=noise_std,
        clip_bound=first.clip_bound,
        made_by=_MADE_BY_SANITIZER,
    )


def take(
    parts: Iterable[ClippedGradients],
) -> tuple[ClippedGradients, Iterator[ClippedGradients]]:
    """Takes parts for a release: each is marked before anything is computed from it.

    A node may host more clients than fit into memory, so parts come one by one.

    Returns:
        The first part, whose shape and clip bound C all have; and all parts, the first
        one too, as an iterator.

    Raises:
        RuntimeError: a part was already used for a release.
        ValueError: no parts, or different clip bounds.
    """
    coming = iter(parts)
    first = next(coming, None)
    if first is None:
        raise ValueError("a release needs clipped gradients of at least one client")
    return first, _marked(first, coming)


def _marked(
    first: ClippedGradients,
    others: Iterator[ClippedGradients],
) -> Iterator[ClippedGradients]:
    """Yields parts of one clip bound, each marked as released."""
    for part in itertools.chain([first], others):
        # The sensitivity of a sum is known only if all its parts have the same bound.
        if part.clip_bound != first.clip_bound:
            raise ValueError("a release needs clipped gradients of one clip bound")
        if part.is_released:  # before, or twice in this release
            raise RuntimeError(
                "these gradients were already released; they must not be "
                "released again with other noise"
            )
        part.is_released = True
        yield part


def received(
    values: Tensor,
    round: int,
    node_id: int,
    noise_std: float,
    clip_bound: float,
) -> SanitizedGradients:
    """Wraps a release that arrived in a message, or that was stored.

    Privacy: post-processing of DP output. Raw gradients must never be passed here;
    `fedgs.round.messages` and `fedgs.round.node_state` are the only callers (a
    test).
    """
    return SanitizedGradients(
        values=values,
        round=round,
        node_id=node_id,
        noise_std=noise_std,
        clip_bound=clip_bound,
        made_by=_MADE_BY_SANITIZER,
    )


@lru_cache
def _dct_rows(size: int, count: int) -> Tensor:
    """Returns the first `count` rows of the orthonormal DCT-II matrix, float64."""
    index = torch.arange(size, dtype=torch.float64)
    rows = torch.arange(count, dtype=torch.float64).unsqueeze(1)
    angles = math.pi / size * (index + 0.5) * rows
    matrix = torch.cos(angles) * math.sqrt(2 / size)
    # The row of ones would be longer than 1: norms could grow beyond the clip bound.
    matrix[0] /= math.sqrt(2)
    return matrix


def to_dct(image_grads: ImageGrads, dct_size: int) -> Tensor:
    """Projects gradients to the k x k low-frequency block of an orthonormal DCT.

    The projection is fixed and public, so it needs no privacy of its own; norms never
    grow, and noise on k*k coefficients has a smaller norm than on all pixels.

    Privacy: reads private data; output private.

    Args:
        image_grads: shape (..., S, S).
        dct_size: k, at most S.

    Returns:
        Shape (..., k, k).

    Source: Ahmed, Natarajan, Rao, "Discrete cosine transform", 1974 (DCT-II).
    """
    size = image_grads.shape[-1]
    rows = _dct_rows(size, dct_size).to(image_grads)
    return rows @ image_grads @ rows.T


def from_dct(coefficients: Tensor, image_size: int) -> ImageGrads:
    """Maps DCT coefficients (..., k, k) back to images (..., S, S).

    Privacy: post-processing of DP output.
    """
    dct_size = coefficients.shape[-1]
    rows = _dct_rows(image_size, dct_size).to(coefficients)
    return rows.T @ coefficients @ rows
