"""Whether the noise of releases is what the ledger says: independent and Gaussian.

The clients of these releases cancel, so what is left is noise. It is divided by the
standard deviation that the ledger records and laid out by round, node, sample, channel,
row and column. If the ledger is right, all numbers are independent draws of N(0, 1), so
that each of these has a known law:

    squares   the sum over any of the axes, of every cell that remains: chi-squared
    sums      the same of the numbers themselves: over all axes but those of rounds and
              nodes it is the all-ones direction, over these it is a coordinate's mean
    cosines   between two releases, or two samples, as vectors of d numbers: their
              square is Beta(1/2, (d - 1)/2), whatever direction noise may prefer
    repeats   pairs of equal sizes |x|, wherever they stand: reused noise has more
    shape     Kolmogorov and Smirnov's distance from the normal law

The least likely one is reported, corrected for their number (Bonferroni).

Source: Chen, Zhang, Zhong, "Tests for high-dimensional covariance matrices", JASA 2010
(inner products of independent draws).
"""

# scipy has no type stubs:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import chi2, kstest, norm

from fedgs.audit.crafted_releases import FAR, released
from fedgs.audit.finding import Check
from fedgs.config.integers import noise_units
from fedgs.config.rounds import terms_at
from fedgs.config.run_config import ResolvedConfig
from fedgs.privacy.ledger import Event

Noise = npt.NDArray[np.float64]
AXES = ("rounds", "nodes", "samples", "channels", "rows", "columns")
NUM_DRAWS = 4_000_000  # of noise; more where the fewest rounds have more
FEWEST_ROUNDS = 3
MOST_RELEASES = 2000
MOST_NODES = 2
_MOST_VECTORS = 500  # of which cosines are taken
_WIDTH = 2.0**-16  # of a bin of sizes: below it float32 has steps
_MOST_OF_SHAPE = 1_000_000


def check_noise(config: ResolvedConfig, event: Event, alpha: float) -> Check:
    """Tests the noise of releases like that of an event.

    Privacy: public; reads no data.

    Args:
        config: the run's configuration, as audited.
        event: an event of its ledger.
        alpha: the chance that noise as recorded is refuted.
    """
    noise = standardised_noise(config, event)
    found = p_values(noise)
    num_tests = len(found)
    # Of equal ones the first by name, so that a report does not change.
    p_value, least = min((value, name) for name, value in found.items())
    rounds, nodes, *shape = noise.shape
    each = " x ".join(map(str, shape))
    return Check(
        check=f"noise, {event.release}",
        tested=f"{rounds} rounds of {nodes} nodes, each {each}: "
        f"mean, variance, independence and shape by {num_tests} tests; the least "
        f"likely result, in standard errors, is that of {least}",
        found=_standard_errors(p_value),
        allowed=_standard_errors(alpha / num_tests),
    )


def _standard_errors(p_value: float) -> float:
    """Returns how many standard deviations a normal number is as unlikely as this."""
    one_sided = max(p_value, 1e-300) / 2
    return float(norm.isf(one_sided))


def standardised_noise(config: ResolvedConfig, event: Event) -> Noise:
    """Returns the noise of releases over what it should be, of shape by `AXES`.

    They are of rounds and nodes with the run's own source of noise, seeded or not.

    Privacy: public; reads no data.
    """
    terms = terms_at(config, event.round)
    rng = np.random.default_rng()
    nodes = min(config.num_nodes, MOST_NODES)
    draws_of_each = math.prod(terms.shape)
    most = min(NUM_DRAWS // draws_of_each, MOST_RELEASES)
    rounds = max(FEWEST_ROUNDS, most // nodes)
    # Two clients, far too long, that cancel once they are clipped.
    direction = torch.from_numpy(rng.standard_normal(terms.shape))
    one = direction * FAR * terms.clip_bound
    answers = torch.stack([one, -one])

    def noise_of(place: tuple[int, int]) -> torch.Tensor:
        round, node = place
        return released(
            config,
            terms,
            [answers],
            asked=len(answers),
            round=round,
            node_id=node,
        )

    places = itertools.product(range(1, rounds + 1), range(nodes))
    with ThreadPoolExecutor(config.num_workers) as pool:
        found = list(pool.map(noise_of, places))
    # In the order of the places: by round, then by node.
    releases = torch.stack(found).numpy()
    noise = releases.reshape(rounds, nodes, *terms.shape)
    std = event.noise_std
    units = config.units(terms)
    if units:
        step = terms.clip_bound / units
        std = noise_units(event.noise_multiplier, units) * step
        # Integers become real numbers, as the tests' laws are of these.
        half = step / 2
        noise += rng.uniform(-half, half, noise.shape)
    noise /= std
    return noise


def p_values(noise: Noise) -> dict[str, float]:
    """Returns how likely noise of N(0, 1) is as far off as this, by what was tested."""
    if not np.isfinite(noise).all():
        return {"numbers that are finite": 0.0}
    found: dict[str, float] = {}
    squares = np.square(noise)
    for axes in _sets_of_axes(noise):
        lengths = [noise.shape[axis] for axis in axes]
        size = math.prod(lengths)
        over = "nothing"
        sums = squares
        if axes:
            over = ", ".join(AXES[axis] for axis in axes)
            # Divided by their number, sums are of variance 1 again.
            total = noise.sum(axes)
            sums = np.square(total) / size
        cells = squares.sum(axes)
        found[f"squares over {over}"] = _of_cells(cells, size)
        found[f"sums over {over}"] = _two_sided(sums.sum(), sums.size)
    size_of_release = noise[0, 0].size
    size_of_sample = noise[0, 0, 0].size
    releases = noise.reshape(-1, size_of_release)
    samples = noise.reshape(-1, size_of_sample)
    found["cosines of releases"] = _cosines(releases)
    found["cosines of samples"] = _cosines(samples)
    # Some numbers of every release: noise may be reused by any of them.
    numbers_of_each = NUM_DRAWS // len(releases)
    found["repeats"] = _repeats(releases[:, :numbers_of_each])
    numbers = noise.ravel()
    shape = kstest(numbers[:_MOST_OF_SHAPE], "norm")
    found["shape"] = float(shape.pvalue)
    return found


def _sets_of_axes(noise: Noise) -> Iterator[tuple[int, ...]]:
    """Yields every set of axes that can be summed over, the empty one too."""
    # Over an axis of length 1 nothing is summed: that would be the same test again.
    long = [axis for axis, length in enumerate(noise.shape) if length > 1]
    for count in range(len(long) + 1):
        yield from itertools.combinations(long, count)


def _two_sided(value: float, freedom: int) -> float:
    """Returns how likely a chi-square is as small or as large as this one."""
    below = chi2.cdf(value, freedom)
    above = chi2.sf(value, freedom)
    one_sided = min(below, above, 0.5)
    return 2 * float(one_sided)


def _of_cells(squares: Noise, freedom: int) -> float:
    """Returns how likely the smallest and the largest of many chi-squares are."""
    cells = squares.size
    least = squares.min()
    most = squares.max()
    # The union bound over the cells, for either end.
    too_small = cells * chi2.cdf(least, freedom)
    too_large = cells * chi2.sf(most, freedom)
    # A largest one that is too small is as odd: noise that is cut off.
    log_below = float(chi2.logcdf(most, freedom))
    cut_off = math.exp(cells * log_below)
    oddest = float(min(too_small, too_large, cut_off))
    # Bonferroni: three questions were asked.
    return min(1.0, 3 * oddest)


def _cosines(vectors: Noise) -> float:
    """Returns how likely vectors point so far into common directions, shape (n, d)."""
    vectors = vectors[:_MOST_VECTORS]
    count, size = vectors.shape
    if size == 1:
        return 1.0  # all cosines are 1 or -1, whatever the noise
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    lengths = np.maximum(lengths, 1e-300)
    vectors = vectors / lengths
    cosines = vectors @ vectors.T
    squares = np.square(cosines)
    # Each pair stands there twice, and each vector once with itself.
    twice = squares.sum() - np.trace(squares)
    of_pairs = twice / 2
    num_pairs = count * (count - 1) // 2
    # d times a squared cosine is about a chi-square with one degree of freedom.
    p_value = chi2.sf(size * of_pairs, num_pairs)
    return float(p_value)


def _repeats(noise: Noise) -> float:
    """Returns how likely so many pairs of equal sizes are, in bins of `_WIDTH`."""
    sizes = np.abs(noise).ravel()
    bins = np.floor(sizes / _WIDTH)
    _, counts = np.unique(bins, return_counts=True)
    counts = counts.astype(np.float64)
    twice = counts * (counts - 1)
    pairs = float(twice.sum()) / 2
    n = float(noise.size)
    all_pairs = n * (n - 1) / 2
    # Of the law 2 phi(x), x > 0: that two sizes are equal, and that three are.
    two = _WIDTH / math.sqrt(math.pi)
    three = _WIDTH**2 * 2 / (math.pi * math.sqrt(3))
    expected = all_pairs * two
    # Two pairs are independent unless they share a number.
    of_pairs = expected * (1 - two)
    ordered_triples = n * (n - 1) * (n - 2)
    of_shared = ordered_triples * (three - two**2)
    variance = of_pairs + of_shared
    # As a multiple of a Poisson variable, which it is where equal sizes are rare.
    multiple = variance / expected
    freedom = 2 * pairs / multiple
    if freedom == 0:
        freedom = 1e-300  # a chi-square has more than 0
    p_value = chi2.cdf(2 * expected / multiple, freedom)
    return float(p_value)
