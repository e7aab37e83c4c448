"""The noise of the mechanism: a stream of its own, never shared with another purpose.

Without a seed, each release draws from a generator keyed with fresh operating-system
entropy; the key is used once and is never stored, forked or copied. With a seed, the
stream is a function of (noise_seed, node, round): reproducible, and therefore
"seeded: not private" in every output of the run.
"""

import secrets

import numpy as np
import numpy.typing as npt

from fedgs.stream import stream


class NoiseStream:
    """Draws the Gaussian noise of one release, once.

    Args:
        noise_seed: seed for reproduction, or None for the operating system's entropy.
        node_id: the node that adds the noise.
        round: the round of the release.
    """

    def __init__(self, noise_seed: int | None, node_id: int, round: int) -> None:
        """Keys the stream; see the class."""
        if noise_seed is None:
            key = int.from_bytes(secrets.token_bytes(16), "little")
            self._rng = np.random.Generator(np.random.Philox(key=key))
        else:
            self._rng = stream(noise_seed, "noise", node_id, round)
        self._is_used = False

    def normal(
        self, shape: tuple[int, ...], noise_std: float
    ) -> npt.NDArray[np.float64]:
        """Returns N(0, noise_std^2) draws of the given shape, float64.

        Privacy: public (independent of data); the sum with clipped gradients is DP.

        Raises:
            RuntimeError: the stream was used before. The same noise must never be
                added to two different gradients.
        """
        if self._is_used:
            raise RuntimeError("this noise was already used for a release")
        self._is_used = True
        return noise_std * self._rng.standard_normal(shape)
