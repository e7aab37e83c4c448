"""Sums of clipped gradients as integers with exact discrete noise.

What secure aggregation adds up, and what every node of such a run releases:

    q_u = trunc(g_u * U / C)            towards zero; integer norm at most U
    sum = sum_u q_u + N_Z(0, s^2)       s = ceil(noise_std * U / C), each coordinate

N_Z(0, s^2) is the discrete Gaussian: P(x) proportional to exp(-x^2 / (2 s^2)), x in Z.
Noise is added *after* rounding, so the theorem is about the integers themselves and no
floating-point number is released. docs/privacy.md, "Integers", has the proof.

Source: Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism for
federated learning with secure aggregation", ICML 2021.
"""

from collections.abc import Iterable
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from fedgs.config.integers import LEAST_NOISE, MODULUS, noise_units
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.sanitizer import ClippedGradients, SanitizedGradients, take

_MADE_HERE = object()
# float64 rounds norms up by less than this; what it costs is a part in 10^12 of C.
_INWARDS = 1 - 2.0**-40


@dataclass(eq=False, repr=False)  # no message or log shows its numbers
class IntegerSum:
    """One node's noisy sum in integers: DP by the node's own noise alone.

    Attributes:
        values: shape (B, C, k, k), int64, not reduced modulo 2^32.
        round: the round that was answered.
        node_id: the node that answered.
        units: U, of one clip bound.
        noise_std: standard deviation of the noise in `values` / `scale`, at least.
        clip_bound: C.
    """

    values: Tensor
    round: int
    node_id: int
    units: int
    noise_std: float
    clip_bound: float
    made_by: InitVar[object]

    def __post_init__(self, made_by: object) -> None:
        """Is called by `sanitize_integers` only."""
        if made_by is not _MADE_HERE:
            raise TypeError("IntegerSum is made by sanitize_integers only")

    @property
    def scale(self) -> float:
        """Units of 1.0."""
        return self.units / self.clip_bound


def sanitize_integers(
    parts: Iterable[ClippedGradients],
    units: int,
    noise_std: float,
    noise: NoiseStream,
    round: int,
    node_id: int,
) -> IntegerSum:
    """Rounds each client's clipped gradients, sums them and adds discrete noise once.

    Privacy: releases (epsilon, delta)-DP output; event: one discrete Gaussian release,
    whose integer sensitivity is that of `fedgs.mechanism.sanitizer.sanitize` in units.

    Args:
        parts: the node's participating clients, in order; not empty. One part at a
            time is in memory where they are an iterator.
        units: U, of `Settings.units`.
        noise_std: 2 * clip_bound * noise_multiplier, at least 0.
        noise: a fresh noise stream.
        round: the round that is answered.
        node_id: the node that answers.

    Raises:
        RuntimeError: a part or the noise was already used for a release.
        ValueError: no parts, different clip bounds, or too few units of noise.

    Source: docs/privacy.md, "Integers".
    """
    first, taken = take(parts)
    clip_bound = first.clip_bound
    # Rounded up to whole units: never less noise than was accounted.
    std = noise_units(noise_std / (2 * clip_bound), units)
    if 0 < std < LEAST_NOISE:
        raise ValueError(f"{std} units of noise: the proof needs {LEAST_NOISE}")
    shape = tuple(first.values.shape[1:])
    total = torch.zeros(shape, dtype=torch.int64)
    for part in taken:
        integers = to_integers(part.values.cpu(), units, clip_bound)
        total += integers.sum(dim=0)
    # After rounding, so that the theorem is about the integers themselves.
    draws = noise.discrete(shape, std)
    total += torch.from_numpy(draws)
    return IntegerSum(
        values=total,
        round=round,
        node_id=node_id,
        units=units,
        noise_std=noise_std,
        clip_bound=clip_bound,
        made_by=_MADE_HERE,
    )


def to_integers(values: Tensor, units: int, clip_bound: float) -> Tensor:
    """Rounds towards zero; the squared integer norm is at most U^2, by a check.

    Privacy: reads private data; output private with bounded sensitivity.

    Args:
        values: shape (n, B, C, k, k), float64; each (client, fake) of norm at most C.
        units: U, at most 2^28.
        clip_bound: C.

    Returns:
        int64 of the same shape.
    """
    scaled = values * (units / clip_bound * _INWARDS)
    integers = scaled.trunc().to(torch.int64)
    squares = (integers * integers).flatten(2).sum(dim=2)
    # Where float64 says less than 2 U^2, which NaN never is, int64 cannot have wrapped.
    squares_of_reals = scaled.square().flatten(2).sum(dim=2)
    is_exact = squares_of_reals < 2.0 * units * units
    # Never seen: a row that is too long all the same becomes zero, so that it is no
    # signal, as one that is not finite does.
    is_short = is_exact & (squares <= units * units)
    return integers * is_short[:, :, None, None, None]


def real_values(release: SanitizedGradients | IntegerSum) -> Tensor:
    """Returns what a node's release stands for, float64.

    Privacy: post-processing of DP output.
    """
    values = release.values.double()
    if isinstance(release, IntegerSum):
        return values / release.scale
    return values


def from_integers(total: Tensor, scale: float) -> Tensor:
    """Returns what a sum modulo 2^32 stands for, float64.

    Privacy: post-processing of DP output.

    Args:
        total: the total of all nodes' `values`, any integers of the same remainders.
        scale: units of 1.0, U / C.
    """
    # Remainders from 2^31 on are negative sums: U leaves each sign half the range.
    half = MODULUS // 2
    shifted = total.to(torch.int64) + half
    signed = shifted % MODULUS - half
    return signed.double() / scale
