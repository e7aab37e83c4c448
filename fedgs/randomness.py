"""Random streams: every draw of a run is a function of (seed, purpose, indices).

No generator state is stored anywhere: a stream is made where it is used, so an
interrupted run resumes, a node answers the same request twice, and two engines agree,
without carrying state along. The streams of different purposes never overlap: the key
of the counter-based Philox generator is a hash of all of them.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import hashlib
import secrets

import numpy as np

SECRET_BYTES = 32


def secret() -> str:
    """Returns 256 bits of the system's entropy, as hexadecimal digits.

    Privacy: private, for whatever a guarantee needs nobody to know in advance.
    """
    return secrets.token_hex(SECRET_BYTES)


def public_hash(secret: str) -> str:
    """Returns what tells a `secret` from others and nothing else, 64 hex digits.

    Privacy: public.
    """
    return hashlib.sha256(f"{secret}/public".encode()).hexdigest()


def stream(seed: int | str, purpose: str, *indices: int) -> np.random.Generator:
    """Returns the generator of one purpose, for example one client in one round.

    Privacy: public, with a `secret` as its seed private. Noise uses
    `fedgs.mechanism.noise`, which adds a source of its own.

    Args:
        seed: the run's seed, at least 0, or a `secret`.
        purpose: what is drawn, for example "latent"; separates the streams.
        *indices: client, node or round numbers.

    >>> stream(0, "latent", 3).integers(100) == stream(0, "latent", 3).integers(100)
    np.True_
    """
    words = [str(seed), purpose]
    for index in indices:
        words.append(str(index))
    name = "/".join(words)
    digest = hashlib.sha256(name.encode()).digest()
    # A key of Philox has 128 bits.
    key = int.from_bytes(digest[:16], "little")
    philox = np.random.Philox(key=key)
    return np.random.Generator(philox)


def derived_seed(seed: int, purpose: str, *indices: int) -> int:
    """Returns an integer below 2**63 for libraries that take a seed.

    Privacy: public.
    """
    rng = stream(seed, purpose, *indices)
    return int(rng.integers(2**63))
