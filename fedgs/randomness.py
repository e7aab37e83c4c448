"""Random streams: every draw of a run is a function of (seed, purpose, indices).

No generator state is stored anywhere: a stream is made where it is used, so an
interrupted run resumes, a node answers the same request twice, and two engines agree,
without carrying state along. The streams of different purposes never overlap: the key
of the counter-based Philox generator is a hash of all of them.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import hashlib

import numpy as np


def stream(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Returns the generator of one purpose, for example one client in one round.

    Privacy: public. Noise uses `fedgs.mechanism.noise`, which adds a source of its own.

    Args:
        seed: the run's seed, at least 0.
        purpose: what is drawn, for example "latent"; separates the streams.
        *indices: client, node or round numbers.

    >>> stream(0, "latent", 3).integers(100) == stream(0, "latent", 3).integers(100)
    np.True_
    """
    words = "/".join([str(seed), purpose, *(str(index) for index in indices)])
    # A key of Philox has 128 bits.
    key = hashlib.sha256(words.encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def derived_seed(seed: int, purpose: str, *indices: int) -> int:
    """Returns an integer below 2**63 for libraries that take a seed.

    Privacy: public.
    """
    return int(stream(seed, purpose, *indices).integers(2**63))
