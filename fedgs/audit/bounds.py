"""From counted errors to lower bounds of epsilon and mu, each with a confidence.

An attack guesses which of two neighbouring data sets a release came from. FPR and FNR
are its two error rates. Of every test against an (epsilon, delta)-DP mechanism

    (1)  1 - FNR <= e^epsilon FPR + delta    and    1 - FPR <= e^epsilon FNR + delta
    (2)  mu >= Phi^-1(1 - FPR) - Phi^-1(FNR)            where the mechanism is mu-GDP

so upper bounds of FPR and FNR give lower bounds of epsilon and mu. One training run
with m canaries, each in or out by a fair coin, and r guesses of which v are right has,
for an (epsilon, delta)-DP mechanism and W ~ Binomial(r, 1 / (1 + e^-epsilon)),

    (3)  P(at least v right) <= P(W >= v) + 2 m delta max_i P(v - i <= W < v) / i

Source:
    (1): Kairouz, Oh, Viswanath, "The composition theorem for differential privacy",
    ICML 2015, Theorem 2.1.
    (2): Dong, Roth, Su, "Gaussian differential privacy", 2022, Definition 2.6.
    (3): Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", NeurIPS
    2023, Theorem 5.2.
"""

# scipy has no type stubs:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, ndtri
from scipy.stats import binom

Scores = npt.NDArray[np.float64]
_BISECTIONS = 40


class ErrorRates(NamedTuple):
    """Upper bounds of the two error rates of a test, each in [0, 1].

    Of many tests at once they are arrays, and so is what follows from them.
    """

    false_positive: Any
    false_negative: Any


def rate_at_most(count: Any, trials: int, alpha: float) -> Any:
    """Returns the one-sided Clopper-Pearson upper bound of a probability.

    Args:
        count: how often the event happened, from 0 to `trials`; a number or an array.
        trials: independent trials, at least 1.
        alpha: the chance that the bound is wrong, in (0, 1).

    Source: Clopper, Pearson, Biometrika 26, 1934.

    >>> float(rate_at_most(0, 100, 0.05).round(4))  # the rule of three
    0.0295
    """
    bound = betaincinv(count + 1, trials - count, 1 - alpha)
    return np.where(count == trials, 1.0, bound)[()]


def error_rates(
    outside: Scores,
    inside: Scores,
    threshold: Any,
    alpha: float,
) -> ErrorRates:
    """Returns bounds of both error rates of the test `score > threshold`.

    Both hold together with probability 1 - alpha, if the threshold was chosen on
    other trials. The two arrays need not be independent of each other.

    Args:
        outside: scores of trials without the client's data, shape (n,).
        inside: scores of trials with it, shape (k,).
        threshold: above it the test says "inside"; a number or an array.
        alpha: in (0, 1).
    """
    # How many scores are at most the threshold.
    low_outside = np.searchsorted(np.sort(outside), threshold, side="right")
    low_inside = np.searchsorted(np.sort(inside), threshold, side="right")
    high_outside = len(outside) - low_outside
    # Half of alpha for each: both bounds hold at once by the union bound.
    return ErrorRates(
        false_positive=rate_at_most(high_outside, len(outside), alpha / 2),
        false_negative=rate_at_most(low_inside, len(inside), alpha / 2),
    )


def epsilon_at_least(rates: ErrorRates, delta: float) -> Any:
    """Returns the least epsilon that Eq. 1 allows, at least 0.

    Args:
        rates: the error rates of any test.
        delta: at least 0 and below 1.
    """
    positive = rates.false_positive
    negative = rates.false_negative
    by_positive = (1 - negative - delta) / positive
    by_negative = (1 - positive - delta) / negative
    # Both inequalities hold, so that the larger one of their bounds does.
    ratio = np.maximum(by_positive, by_negative)
    return np.log(np.maximum(1.0, ratio))


def mu_at_least(rates: ErrorRates) -> Any:
    """Returns the least mu that Eq. 2 allows, at least 0."""
    # Phi^-1(1 - x) is -Phi^-1(x), and exact for small x.
    of_positive = -ndtri(rates.false_positive)
    of_negative = -ndtri(rates.false_negative)
    return np.maximum(0.0, of_positive + of_negative)


def mu_of_means(outside: Scores, inside: Scores, std: float, alpha: float) -> float:
    """Returns the least mu that the means of scores with Gaussian noise allow.

    Their difference has the standard deviation std sqrt(2 / n), however few they are.

    Args:
        outside: scores without the client's data, shape (n,).
        inside: scores with it, shape (n,).
        std: standard deviation of the noise in each score, as it is claimed; above 0.
        alpha: the chance that the bound is wrong, in (0, 1).
    """
    std_of_difference = math.sqrt(2 / len(inside))  # in units of std
    error = ndtri(1 - alpha) * std_of_difference
    found = (inside.mean() - outside.mean()) / std
    return max(0.0, float(found - error))


def best_threshold(
    outside: Scores,
    inside: Scores,
    value: Callable[[ErrorRates], Any],
    alpha: float,
    slack: float = 0.0,
) -> float:
    """Returns the threshold with the largest value among about 300.

    The candidates are ranks of both arrays, dense at their ends, and a grid between
    the two largest scores.

    Args:
        outside: scores without the client's data, shape (n,); may hold -inf.
        inside: scores with it.
        value: what to make large, `epsilon_at_least` or `mu_at_least`.
        alpha: as for `error_rates`.
        slack: the share of the value to give up for a larger threshold. A test that
            lives on rare false positives needs it: more trials will show more of them.
    """
    outside = np.sort(outside)
    inside = np.sort(inside)
    candidates = [np.linspace(outside[-1], inside[-1], 30)]
    for scores in (outside, inside):
        spread = np.geomspace(1, len(scores), 70)
        ranks = np.unique(spread.astype(int))
        lowest = scores[ranks - 1]
        highest = scores[-ranks]
        candidates += [lowest, highest]
    thresholds = np.unique(np.concatenate(candidates))
    is_finite = np.isfinite(thresholds)
    thresholds = thresholds[is_finite]
    rates = error_rates(outside, inside, thresholds, alpha)
    values = value(rates)
    least = (1 - slack) * values.max()
    good = thresholds[values >= least]
    return float(good[-1])


def one_run_p_value(
    num_canaries: int,
    guesses: int,
    correct: int,
    epsilon: float,
    delta: float,
) -> float:
    """Returns the bound of Eq. 3: how surprising so many right guesses would be.

    Args:
        num_canaries: m, each in or out by an own fair coin.
        guesses: r, from 1 to m; the others are abstentions.
        correct: v, from 0 to r.
        epsilon: the epsilon of the claim, at least 0.
        delta: the delta of the claim, at least 0 and below 1.

    Raises:
        ValueError: not 0 <= v <= r <= m.

    Source: Steinke, Nasr, Jagielski, Theorem 5.2.
    """
    if not 0 <= correct <= guesses <= num_canaries:
        raise ValueError(f"{correct} of {guesses} guesses on {num_canaries} canaries")
    chance = 1 / (1 + math.exp(-epsilon))
    p_value = float(binom.sf(correct - 1, guesses, chance))
    if correct:
        below = np.arange(correct - 1, -1, -1)  # v - 1, v - 2, ..., 0
        probability = np.cumsum(binom.pmf(below, guesses, chance))
        spread = probability / (correct - below)
        p_value += 2 * num_canaries * delta * float(spread.max())
    return min(1.0, p_value)


def one_run_epsilon(
    num_canaries: int,
    guesses: int,
    correct: int,
    delta: float,
    alpha: float,
) -> float:
    """Returns the largest epsilon that Eq. 3 rejects, 0 if it rejects none.

    The mechanism is not (epsilon, delta)-DP for any smaller epsilon, with confidence
    1 - alpha, if the number of guesses was fixed before looking at their results.

    Args:
        num_canaries: m.
        guesses: r.
        correct: v.
        delta: at least 0 and below 1.
        alpha: the chance that the bound is wrong, in (0, 1).

    >>> round(one_run_epsilon(100, 100, 100, 1e-5, 0.05), 2)
    3.49
    """

    def is_rejected(epsilon: float) -> bool:
        p_value = one_run_p_value(
            num_canaries,
            guesses=guesses,
            correct=correct,
            epsilon=epsilon,
            delta=delta,
        )
        return p_value < alpha

    low = 0.0
    high = 1.0
    if not is_rejected(low):
        return 0.0
    while is_rejected(high):
        low = high
        high = 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if is_rejected(middle):
            low = middle
        else:
            high = middle
    # The lower end was rejected for certain: a lower bound is rounded down.
    return low
