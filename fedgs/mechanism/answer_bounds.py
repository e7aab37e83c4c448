"""The server's check of an answer's size: what no honest node sends is refused.

One row of an answer is the gradient of one fake: the sum of n clients' gradients, each
of norm at most C, and noise of d independent coordinates N(0, noise_std^2). So

    ||row||  <=  n C + noise_std * q + r

where q^2 is the 1 - RATE / B quantile of a chi-squared variable with d degrees of
freedom, and r covers rounding. An honest answer of B rows exceeds this with probability
at most FALSE_REJECTIONS; without noise it never does.

What is left to a dishonest node: it moves the average gradient of a fake, over m
clients, by at most 2 * bound / m, and the generator's gradient by at most
||J|| sqrt(B) * 2 * bound / (m B), with J the Jacobian of the B images. With much noise
that is far more than C, for such an answer cannot be told from honest noise.

Source: P[chi2_d > q^2] of the squared norm of d standard normal draws; a union bound
over the B rows, the triangle inequality for the sum.
"""

import math
from functools import lru_cache

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.terms import Terms
from fedgs.errors import UserError
from fedgs.mechanism.quantization import release_step
from fedgs.shapes import Release

FALSE_REJECTIONS = 1e-12  # at most, of one honest answer
_FLOAT32 = 1e-6  # relative error of a row's norm


def largest_norm(
    config: ResolvedConfig,
    num_clients: int,
    rate: float = FALSE_REJECTIONS,
    terms: Terms | None = None,
) -> float:
    """Returns the norm that no row of an honest answer exceeds, but for chance.

    Args:
        config: the run's; its B, C, noise, gradient basis and precision count.
        num_clients: n, the participants whose gradients the node sums.
        rate: probability that any row of an honest answer is larger.
        terms: the terms of the round; None means those of the run's last round.
    """
    terms = terms or config.terms(config.num_rounds)
    size = math.prod(terms.shape[1:])
    # Each of B rows may be the one that is too long: the union bound.
    rate_of_row = rate / terms.batch_size
    noise = terms.noise_std * _chi_quantile(size, rate_of_row)
    # Rounding moves each coordinate by at most half a step.
    step = release_step(config, terms) or 0.0
    rounding = step * math.sqrt(size) / 2
    largest = num_clients * terms.clip_bound + noise + rounding
    return largest * (1 + _FLOAT32)


def check_norms(
    values: Release,
    config: ResolvedConfig,
    num_clients: int,
    terms: Terms | None = None,
) -> None:
    """Refuses an answer with a row that no honest node would send.

    Privacy: post-processing of DP output.

    Args:
        values: shape (B, C, k, k), finite.
        config: the run's.
        num_clients: as `largest_norm`.
        terms: as `largest_norm`.

    Raises:
        UserError: tells how many rows and the bound, no value of the answer.
    """
    terms = terms or config.terms(config.num_rounds)
    bound = largest_norm(config, num_clients, terms=terms)
    norms = values.double().flatten(1).norm(dim=1)
    large = int((norms > bound).sum())
    if large > 0:
        # Counts and settings only: the error is logged, and a value is an answer's.
        raise UserError(
            f"{large} of {len(norms)} {terms.release}s have a norm above {bound:.4g}, "
            f"which {num_clients} clients with clip_bound = {terms.clip_bound:g} and "
            "the run's noise cannot reach, so none of it is taken; ask whoever sent it "
            "which program computed it"
        )


@lru_cache
def _chi_quantile(size: int, probability: float) -> float:
    from scipy.stats import chi2  # slow to import; clients need it not

    return math.sqrt(chi2.isf(probability, size))
