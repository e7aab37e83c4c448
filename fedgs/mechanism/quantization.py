"""The grid that `message_precision = compact` rounds releases to, after the noise.

The step is computed from the run's settings alone:

    step = max(sqrt(noise_std^2 + C^2 / d) / 8, (n C + 19 noise_std) / 32767)

with d the values of one sample (a fake's gradient, or an embedding) and n the clients
of the largest node: an eighth of a coordinate's size, and never so small that an
integer could exceed 16 bits.
`fedgs.round.codec` sends the integers.

Privacy: rounding is a function of what is already sanitized, so it changes no
guarantee. It adds at most step^2 / 12 per coordinate, 0.13 % of the noise's variance.
"""

import math

from torch import Tensor

from fedgs.config.run_config import ResolvedConfig
from fedgs.config.terms import Terms

STEPS_PER_COORDINATE = 8
LARGEST = 32767  # of the integers that a release is sent as
# In standard deviations; `fedgs.mechanism.noise` draws at most 18.9.
_FARTHEST_NOISE = 19.0


def release_step(config: ResolvedConfig, terms: Terms | None = None) -> float | None:
    """Returns what releases are rounded to multiples of; None: they are not rounded.

    Privacy: public; a function of the run's settings.

    Args:
        config: the run's.
        terms: the terms of the round; None means its last round's.
    """
    if config.message_precision == "exact":
        return None
    terms = terms or config.terms(config.num_rounds)
    bound = terms.clip_bound
    noise_std = terms.noise_std
    size = math.prod(terms.shape[1:])
    # A coordinate's size if the bound is spread over all of them, with its noise.
    share = bound / math.sqrt(size)
    coordinate = math.hypot(noise_std, share)
    fine = coordinate / STEPS_PER_COORDINATE
    # No integer may exceed 16 bits: a clamp would move the sum, not only round it.
    largest_sum = config.largest_node * bound
    largest = largest_sum + _FARTHEST_NOISE * noise_std
    coarse = largest / LARGEST
    return max(fine, coarse)


def to_grid(values: Tensor, step: float) -> Tensor:
    """Rounds to the nearest whole multiple of the step, float64.

    Privacy: post-processing of DP output.
    """
    integers = (values.double() / step).round()
    limited = integers.clamp(-LARGEST, LARGEST)
    return limited * step
