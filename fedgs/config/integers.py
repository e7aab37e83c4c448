"""How finely clipped gradients become integers, to be summed modulo 2^32.

One clip bound is U units, a power of two: the largest for which a sum over m clients
and the noise of as many nodes does not wrap,

    m U + 16 sqrt(m) s < 2^31,    s = ceil(2 * noise_multiplier * U)     units

s is the standard deviation of one node's discrete noise; m bounds the nodes, for each
has a participant. A coordinate of the noise's sum is beyond 16 sqrt(m) s with a
probability of at most 2 exp(-128) < 1e-55 (it is subgaussian). A sum that wrapped would
be a useless one, but not less private.

Source: docs/privacy.md, "Integers"; Canonne, Kamath, Steinke, "The discrete Gaussian
for differential privacy", NeurIPS 2020 (subgaussian: E exp(t X) <= exp(t^2 s^2 / 2)).
"""

import math

MODULUS = 2**32
MOST_UNITS = 2**28  # of a clip bound and of s: their squares fit into 64 bits
LEAST_NOISE = 2**12  # s, in units
LEAST_UNITS = 16  # U, for each unit by which rounding may shorten a client's vector
PROVEN = math.sqrt(1 - (2 / LEAST_NOISE) ** 2)  # sqrt(s^2 - r^2) / s, r = 2 units
_TAIL = 16.0  # standard deviations


def clip_units(noise_multiplier: float, clients: int) -> int:
    """Returns U, the units of one clip bound: a power of two, at least 1.

    Args:
        noise_multiplier: the noise multiplier of one node's release, at least 0.
        clients: m, the participants of a round.
    """
    # From above: the more units, the less does rounding to integers change.
    units = MOST_UNITS
    while units > 1:
        noise = noise_units(noise_multiplier, units)
        largest_noise = _TAIL * math.sqrt(clients) * noise
        largest = clients * units + largest_noise
        if noise <= MOST_UNITS and largest < MODULUS // 2:
            break
        units //= 2
    return units


def noise_units(noise_multiplier: float, units: int) -> int:
    """Returns s, the standard deviation of one node's noise in units."""
    return math.ceil(2 * noise_multiplier * units)


def proven_multiplier(noise_multiplier: float, is_discrete: bool) -> float:
    """Returns the multiplier of Gaussian noise that protects at most as well.

    Args:
        noise_multiplier: noise_std / (2 C) of one node, at least 0.
        is_discrete: whether its noise is discrete, of at least `LEAST_NOISE` units.

    Source: docs/privacy.md, "Integers", Theorem.
    """
    if is_discrete:
        return noise_multiplier * PROVEN
    return noise_multiplier


def why_too_coarse(noise_multiplier: float, units: int, dimension: int) -> str:
    """Returns why integers are too coarse, and a remedy; "" if they are not.

    Args:
        noise_multiplier: the noise multiplier of one node's release, at least 0.
        units: U.
        dimension: coordinates of one sample.
    """
    if units < LEAST_UNITS * math.sqrt(dimension):
        return (
            f"{units} units of a clip bound are too coarse for {dimension} "
            "coordinates; give fewer --clients-per-round, or less noise"
        )
    # The theorem needs noise of many units. Without any noise there is nothing to
    # prove.
    if 0 < noise_units(noise_multiplier, units) < LEAST_NOISE:
        return (
            f"noise_multiplier = {noise_multiplier:g} is too little noise for integers "
            "of 32 bits; give a larger --noise-multiplier"
        )
    return ""
