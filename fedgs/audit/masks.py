"""Attack on the masks of a secure aggregation, with sums of the run's own size.

Some nodes answer one round as those of the run do, the first with a client whose every
gradient is as long as C allows. Three things are tried:

- The first node's masked messages are taken for a clue: their bytes are compared with
  the uniform distribution, by a chi-squared test. Without a mask they are far from it.
- The opened sum is compared, bit for bit, with that of the integers that were masked.
- One mask of one pair is left out of a message: the opened sum must be refused.

Privacy: public; reads no data.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.federation.messages import EVERYONE, FakeBatch, Request, sum_of
from fedgs.federation.round import release
from fedgs.mechanism.integers import IntegerSum
from fedgs.mechanism.masks import (
    Announced,
    Asked,
    Attempt,
    MaskedSum,
    MaskingKey,
    mask,
    received_masked,
    unmask,
)
from fedgs.mechanism.sanitizer import PerSampleGradients, clip

MOST_NODES = 5  # that answer; masks of more pairs are no others
LEAST_NUMBERS = 1 << 14  # of messages of the first node that are tested together
LEAST_P = 1e-9  # below: not uniform; an honest audit in a billion ends there


class Masks(NamedTuple):
    """What came of the attack.

    Attributes:
        nodes: that answered.
        p_uniform: of the masked message of one node, if it were uniform.
        is_exact: whether the opened sum was that of the integers, in every bit.
        is_noticed: whether a sum that lacks one mask of a pair was refused.
    """

    nodes: int
    p_uniform: float
    is_exact: bool
    is_noticed: bool

    @property
    def holds(self) -> bool:
        """Whether nothing was learned, and nothing went wrong."""
        return self.p_uniform >= LEAST_P and self.is_exact and self.is_noticed

    def to_json(self) -> dict[str, Any]:
        """Returns the fields and whether the masks hold."""
        return {**self._asdict(), "holds": self.holds}


def audit_masks(config: ResolvedConfig, round: int) -> Masks:
    """Attacks the masks of one round.

    Args:
        config: resolved, with secure aggregation; decides sizes, noise and scale.
        round: of the kind of release that is attacked.
    """
    nodes = range(min(config.num_nodes, MOST_NODES))
    images, labels = torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.int64)
    request = FakeBatch(round, images, labels, EVERYONE, EVERYONE)
    sums = [_node_sum(config, request, node) for node in nodes]
    asked = Asked("", round, request.common_digest(), config.node_title)
    messages: list[MaskedSum] = []  # of the first node, each under other keys
    while True:
        keys = {node: MaskingKey.generate() for node in nodes}
        listed = {node: Announced(key.public, b"") for node, key in keys.items()}
        attempt = Attempt(1, listed)
        messages.append(mask(sums[0], keys[0], attempt, asked, b""))
        if len(messages) * messages[0].values.numel() >= LEAST_NUMBERS:
            break
    masked = [mask(sums[n], keys[n], attempt, asked, b"") for n in nodes]

    plain = torch.stack([each.values for each in sums]).sum(0) % 2**32
    info = asked.info(attempt, 0, 1)
    pair = keys[0].pair_mask(keys[1].public, info, masked[0].values.numel())
    # Modulo 2^32 in either type: the bits are those of the uint32.
    lacking = masked[0].values - torch.from_numpy(pair.astype(np.int32)).view_as(plain)
    spoilt = [received_masked(lacking, round, 0, b""), *masked[1:]]
    return Masks(
        nodes=len(nodes),
        p_uniform=_p_uniform(messages),
        is_exact=torch.equal(unmask(masked), plain),
        is_noticed=_is_refused(config, request, spoilt),
    )


def _node_sum(config: ResolvedConfig, request: Request, node: int) -> IntegerSum:
    """Returns a node's noisy sum: of the longest gradients in the first, else of 0."""
    terms = config.terms(request.round)
    value = terms.clip_bound / math.sqrt(math.prod(terms.shape[1:]))
    grads = torch.full((1, *terms.shape), value if node == 0 else 0.0)
    parts = [clip(PerSampleGradients(grads), terms.clip_bound)]
    found = release(config, terms, parts, request.round, node)
    if not isinstance(found, IntegerSum):
        raise TypeError("a run without secure aggregation has no masks")
    return found


def _p_uniform(messages: list[MaskedSum]) -> float:
    from scipy.stats import chisquare  # slow to import

    content = np.concatenate([m.values.numpy().ravel() for m in messages])
    content = np.frombuffer(content.tobytes(), np.uint8)
    return float(chisquare(np.bincount(content, minlength=256)).pvalue)


def _is_refused(
    config: ResolvedConfig, request: Request, answers: list[MaskedSum]
) -> bool:
    try:
        sum_of(config, request, answers)
    except UserError:
        return True
    return False
