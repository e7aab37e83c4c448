"""The Bayesian accountant: an epsilon about records drawn at random, and its repairs.

A noisy sum of a batch is released; a record x, drawn from the data's distribution,
moves it by d(x) while the noise has std s. At order l, with k ~ Binomial(l + 1, rate):

    (1)  c(x) = log E_k e^(k (k - 1) d(x)^2 / (2 s^2))         one step, one record
    (2)  cost = log(mean_j e^(T c(x_j)) + t std_j e^(T c(x_j)) / sqrt(n - 1)) / T
    (3)  epsilon = min_l (sum of costs - log(delta - f)) / l

(2) bounds log(E_x e^(T c(x))) / T from n sampled records; t is Student's quantile with
n - 1 degrees of freedom, T the number of steps (Hoelder's inequality), f the chance
that some estimate fails.

**No differential privacy.** delta averages over x: for a record unlike the others,
d(x) may be as large as clipping allows, and nothing is promised. (2) supposes that the
e^(T c) are normal, which they are not, and the distances are read from private data
without noise.

Differs from the reference, whose figure is `published_epsilon` here:
    - f is the chance that one of all estimates fails, of all steps and all orders,
      because the minimum of (3) looks at all of them. The reference's confidence grows
      once a call, however many steps the call stands for, and not with the orders.
    - The distances are norms of gradients of independent records, added to the batch;
      the reference's demo takes all 28 pairs of 8, which depend on each other.
    - It runs with NumPy 2 (the reference uses names that NumPy removed).

Source: Triastcyn and Faltings, "Bayesian differential privacy for machine learning",
ICML 2020; "Generating higher-fidelity synthetic datasets with privacy guarantees",
Algorithms 15, 2022, Eq. 5 to 9; reference
https://github.com/AlekseiTriastcyn/bayesian-differential-privacy.
(1) is the exact moment of a Poisson-sampled Gaussian: Mironov, Talwar and Zhang, "Renyi
differential privacy of the sampled Gaussian mechanism", 2019, section 3.3.
"""

# scipy has no type stubs:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp
from scipy.stats import binom, t

Floats = npt.NDArray[np.float64]

ORDERS: Floats = np.array([2, 4, 8, 16, 32], np.float64)  # of the reference's notebooks
FAILURE = 1e-16  # chance that one estimate of (2) is too low


def log_moments(distances: Floats, rate: float, orders: Floats = ORDERS) -> Floats:
    """Returns c of Eq. 1 for each order and record.

    Privacy: reads private data (through the distances); output private.

    Args:
        distances: d(x) / s, how far each record moves the sum, in stds of the noise,
            shape (records,).
        rate: chance of a record to be in the batch.
        orders: l, whole numbers, shape (orders,).

    Returns:
        Shape (orders, records).
    """
    rows: list[Floats] = []
    for order in orders:
        k = np.arange(order + 2)  # how often a record is in the batch, of l + 1 draws
        binomial: Any = binom
        log_chances = binomial.logpmf(k, order + 1, rate)
        growth = k * (k - 1) / 2
        squares = distances**2
        exponents = np.outer(squares, growth)
        # In logarithms, because e^(k^2 d^2 / 2) overflows for a small noise.
        log_mean = logsumexp(log_chances + exponents, axis=1)
        rows.append(np.asarray(log_mean))
    return np.stack(rows)


def step_cost(moments: Floats, total_steps: int) -> Floats:
    """Returns the cost of one step, Eq. 2.

    Privacy: reads private data; output private.

    Args:
        moments: of `log_moments`, shape (orders, records), at least three records.
        total_steps: T, the number of steps of the whole training, fixed in advance.

    Returns:
        Shape (orders,).
    """
    count = moments.shape[1]
    scaled = total_steps * moments
    top = scaled.max(axis=1, keepdims=True)
    shares = np.exp(scaled - top)  # at most 1: no overflow
    # An upper bound of their mean, by Student's t.
    degrees = count - 1
    students_t: Any = t
    quantile = float(students_t.isf(FAILURE, degrees))
    error = shares.std(axis=1) / math.sqrt(degrees)
    bound = shares.mean(axis=1) + quantile * error
    log_bound = top[:, 0] + np.log(bound)
    return log_bound / total_steps


def bayesian_epsilon(costs: Floats, num_steps: int, delta: float) -> float:
    """Returns the Bayesian epsilon of steps, Eq. 3; inf if delta is not above f.

    Privacy: reads private data (through the costs); output private.

    Args:
        costs: summed over the steps, for each of `ORDERS`.
        num_steps: how many there were, an estimate in each.
        delta: the delta of the outcomes and the records together.
    """
    # The minimum looks at every estimate, so each may be the one that fails.
    num_estimates = num_steps * len(ORDERS)
    room = delta - num_estimates * FAILURE
    if room <= 0:
        return math.inf
    by_order = (costs - math.log(room)) / ORDERS
    return max(0.0, float(by_order.min()))


def published_epsilon(costs: Floats, num_calls: int, delta: float) -> float:
    """Returns the reference's `get_privacy(target_delta=delta)`: no bound.

    Source: `BayesianPrivacyAccountant.get_privacy`; log-confidence once a call.
    """
    confidence = math.exp(num_calls * math.log(1 - FAILURE))
    room = delta - (1 - confidence)
    if room <= 0:
        return math.inf
    by_order = (costs - math.log(room)) / ORDERS
    return float(by_order.min())
