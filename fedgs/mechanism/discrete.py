"""Exact draws of the discrete Gaussian, many at once.

N_Z(0, s^2) has P(x) proportional to exp(-x^2 / (2 s^2)) on the integers. Rejection from
a proposal that is made of bits alone:

    x = +-(k s + j),   P(k) = 2^-(k+1),   j uniform on 0 .. s - 1
    accepted with probability p = 4/5 * 2^k * exp(-x^2 / (2 s^2)),   -0 never

p <= 1, because x >= k s, and 4/5 * 2^k exp(-k^2 / 2) <= 1 for every k. P(k) 2^k is the
same for all k, so that what is accepted has exactly the law above. About half of the
proposals with j < s are accepted.

The coin of probability p is exact as well: a uniform number of 64 bits decides where it
differs from p, computed in float64, by more than that computation's error (2^-49). In
the other cases, one of 2^43, further bits are drawn and p is computed with as many
digits as it takes. How many proposals it took says nothing about the values.

No size beyond a bound of at least 35 s is drawn: N_Z has less than e^-612 there.

Source:
    Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS
    2020, section 5 (rejection with exact coins).
    Karney, "Sampling exactly from the normal distribution", ACM TOMS 2016 (k, j).
"""

from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Words = Callable[[int], Bits]
MOST_STD = 2**28
# Well above the error of p in float64, 2^-49.
_DOUBT = 2.0**-44


def discrete_gaussian(words: Words, count: int, std: int) -> Integers:
    """Returns `count` draws.

    Args:
        words: gives so many fresh uniform words of 64 bits.
        count: at least 0.
        std: s, from 0 to 2^28; 0 gives zeros.

    Raises:
        ValueError: std is out of its range.
    """
    if not 0 <= std <= MOST_STD:
        raise ValueError(f"std = {std}: give 0 to 2^28")
    if std == 0:
        return np.zeros(count, np.int64)
    found = [np.zeros(0, np.int64)]
    missing = count
    while missing > 0:
        # A quarter to a half of the tries are accepted, so a few passes end it.
        tries = 3 * missing + 16
        draws = accepted(words, tries, std)
        found.append(draws)
        missing -= len(draws)
    all_draws = np.concatenate(found)
    return all_draws[:count]


def accepted(words: Words, tries: int, std: int) -> Integers:
    """Returns the draws that so many tries give, at most one of each.

    Args:
        words: as for `discrete_gaussian`.
        tries: at least 1.
        std: s, from 1 to 2^28.
    """
    block, size, is_negative = proposed(words(tries), std)
    coins = words(tries)
    # Where p underflows to 0, a coin near 0 is in doubt and is decided exactly.
    with np.errstate(under="ignore"):
        square = (size / std) ** 2
        density = np.exp(-square / 2)
        power = np.exp2(block)
        chance = 0.8 * power * density
    uniform = coins * 2.0**-64
    gap = uniform - chance
    is_taken = gap < 0
    # Zero is proposed with either sign. One of the two is no try, because it would be
    # drawn twice as often otherwise.
    is_zero = size == 0
    is_second_zero = is_negative & is_zero
    is_proposed = block >= 0
    is_valid = is_proposed & ~is_second_zero
    is_in_doubt = np.abs(gap) <= _DOUBT
    for index in np.flatnonzero(is_in_doubt & is_valid):
        is_taken[index] = is_below(
            coin=int(coins[index]),
            block=int(block[index]),
            size=int(size[index]),
            std=std,
            words=words,
        )
    values = np.where(is_negative, -size, size)
    return values[is_taken & is_valid]


class Proposals(NamedTuple):
    """What the bits of words propose, each array of shape (words,).

    Attributes:
        block: k; -1 where a word proposes nothing.
        size: k s + j, the absolute value.
        is_negative: the sign.
    """

    block: Integers
    size: Integers
    is_negative: npt.NDArray[np.bool_]


def proposed(bits: Bits, std: int) -> Proposals:
    """Returns k, k s + j and the sign of one word each; k = -1 where there is none."""
    width = (std - 1).bit_length()  # of j; then the sign, then at least 35 bits of k
    largest_place = (1 << width) - 1
    place = bits & np.uint64(largest_place)
    place = place.astype(np.int64)
    sign = bits >> np.uint64(width)
    sign = sign & np.uint64(1)
    rest = bits >> np.uint64(width + 1)
    rest = rest.astype(np.int64)
    # k zeros stand below the lowest one of fair bits with chance 2^-(k+1). A power of
    # two is exact in float64, and its exponent is 1 + k, or 0 if all bits are 0.
    lowest_one = rest & -rest
    power_of_two = lowest_one.astype(np.float64)
    _, exponent = np.frexp(power_of_two)
    zeros = exponent.astype(np.int64) - 1
    # With j of s and more the try is lost, which leaves the others uniform below s.
    is_place = place < std
    block = np.where(is_place, zeros, -1)
    start = np.maximum(block, 0) * std
    size = start + place
    return Proposals(block, size, is_negative=sign == 1)


def is_below(coin: int, block: int, size: int, std: int, words: Words) -> bool:
    """Tells whether a uniform number that begins with the bits of a coin is below p."""
    bits = 64
    while True:
        with localcontext() as context:
            # More digits than the coin has (0.3 a bit): only its bits decide.
            context.prec = bits // 2
            square = Decimal(-size * size)
            exponent = square / Decimal(2 * std * std)
            density = exponent.exp()
            chance = Decimal(2**block) * density * 4 / 5
            # p <= 1 comes of few operations: ten digits are left for their error.
            digits = 10 - context.prec
            error = Decimal(10) ** digits
            low = Decimal(coin) / 2**bits
            high = Decimal(coin + 1) / 2**bits
            if high < chance - error:
                return True
            if low > chance + error:
                return False
        # The bits so far leave it open, so that 64 more are drawn.
        (word,) = words(1)
        coin = (coin << 64) | int(word)
        bits += 64
