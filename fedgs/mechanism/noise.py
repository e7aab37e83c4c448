"""The noise of the mechanism: a source of its own, never shared with another purpose.

Without a seed, every draw is made from fresh bytes of the operating system by a sampler
that resists floating-point attacks. Each coordinate is

    (x_1 + x_2 + x_3 + x_4) / 2,   x_i = sqrt(-2 ln u_i) cos(2 pi v_i)     Box-Muller

with uniforms u_i, v_i of 64 bits in (0, 1] that nothing else is computed from. A sum of
normals is normal, so the mechanism is unchanged. Why a sum: the float64 values that one
normal can take have gaps, and whoever knows the sampler can list them and tell which of
two gradients an output cannot come from. Against a sum the list is infeasible: Opacus'
authors count 2^(53 (2n - 1)) = 2^159 candidates for 2n = 4 normals; meeting in the
middle would cost about 2^106 time and memory, by our own estimate. Only the cosine is
used, for the sine shares its uniforms. No draw is ever rejected, as a ziggurat does, so
the number of steps does not depend on the values.

This mitigates known attacks and proves nothing: the theorems are about real numbers.
Gradients and noise are summed in float64 and released as float32; that rounding is
post-processing. u_i >= 2^-64, so no coordinate exceeds 18.9 standard deviations.

With a seed, numpy's Philox generator is keyed with (noise_seed, node, round):
reproducible, so every output of the run says "seeded: not private". No stream is
stored, forked or copied.

Source:
    Mironov, "On significance of the least significant bits for differential privacy",
    CCS 2012 (the attack, on Laplace noise).
    Jin, McMurtry, Rubinstein, Ohrimenko, "Are we there yet? Timing and floating-point
    attacks on differential privacy systems", S&P 2022 (on Gaussian noise and DP-SGD).
    Holohan and Braghin, "Secure random sampling in differential privacy", ESORICS 2021,
    section 5.1 (the sum); `secure_mode` of Opacus sums 2n = 4 normals as well.
    Box and Muller, "A note on the generation of random normal deviates", 1958.
"""

import math
import os

import numpy as np
import numpy.typing as npt

from fedgs.mechanism.discrete import Bits, Integers, discrete_gaussian
from fedgs.randomness import stream

Floats = npt.NDArray[np.float64]
NUM_SUMMED = 4  # 2n of Holohan and Braghin, with n = 2


class NoiseStream:
    """Draws the Gaussian noise of one release, once.

    Args:
        noise_seed: seed for reproduction, or None for the operating system's entropy.
        node_id: the node that adds the noise.
        round: the round of the release.
    """

    def __init__(self, noise_seed: int | None, node_id: int, round: int) -> None:
        """Chooses the source."""
        self._rng: np.random.Generator | None = None
        if noise_seed is not None:
            self._rng = stream(noise_seed, "noise", node_id, round)
        self._is_used = False

    def normal(self, shape: tuple[int, ...], noise_std: float) -> Floats:
        """Returns N(0, noise_std^2) draws of the given shape, float64.

        Privacy: public (independent of data); the sum with clipped gradients is DP.

        Raises:
            RuntimeError: the stream was used before: the same noise must never be
                added to two different gradients. Or the operating system gave too few
                bytes.
        """
        self._use()
        if noise_std == 0:  # draws would take longer than a small update
            return np.zeros(shape)
        if self._rng is None:
            standard = _secure_normal(shape)
        else:
            standard = self._rng.standard_normal(shape)
        return noise_std * standard

    def discrete(self, shape: tuple[int, ...], std: int) -> Integers:
        """Returns exact draws of the discrete Gaussian N_Z(0, std^2), int64.

        Privacy: as `normal`.

        Args:
            shape: the shape of the draws.
            std: from 0 to 2^28; the variance is that of the continuous Gaussian.

        Raises:
            RuntimeError: as `normal`.

        Source: `fedgs.mechanism.discrete`.
        """
        self._use()
        count = math.prod(shape)
        draws = discrete_gaussian(self.words, count, std)
        return draws.reshape(shape)

    def _use(self) -> None:
        if self._is_used:
            raise RuntimeError("this noise was already used for a release")
        self._is_used = True

    def words(self, count: int) -> Bits:
        """Returns uniform words of 64 bits."""
        if self._rng is None:
            return _system_words(count)
        return self._rng.integers(2**64, size=count, dtype=np.uint64)


def _secure_normal(shape: tuple[int, ...]) -> Floats:
    total = np.zeros(shape)
    for _ in range(NUM_SUMMED):
        u = _uniform(shape)
        v = _uniform(shape)
        radius = np.sqrt(-2.0 * np.log(u))
        angle = 2.0 * math.pi * v
        total += radius * np.cos(angle)
    # The variance of a sum is the sum of the variances, so that this one is 1 again.
    return total / math.sqrt(NUM_SUMMED)


def _uniform(shape: tuple[int, ...]) -> Floats:
    """Returns fresh uniforms in (0, 1]: (k + 1) / 2^64 in float64, k of 64 bits."""
    count = math.prod(shape)
    words = _system_words(count)
    integers = words.reshape(shape).astype(np.float64)
    # One more than k, so that no logarithm is of 0.
    return (integers + 1.0) * 2.0**-64


def _system_words(count: int) -> Bits:
    size = 8 * count
    content = os.urandom(size)
    # Fewer bytes would be repeated or missing noise, which nobody would see.
    if len(content) != size:
        raise RuntimeError(f"os.urandom gave {len(content)} of {size} bytes of noise")
    return np.frombuffer(content, np.uint64)
