"""The masks of a run's own round: what a server may try with them comes to nothing."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedgs.errors import UserError
from fedgs.federation.messages import EVERYONE, FakeBatch, sum_of
from fedgs.federation.round import release
from fedgs.mechanism.integers import IntegerSum
from fedgs.mechanism.masks import (
    Announced,
    Asked,
    Attempt,
    MaskingKey,
    mask,
    received_masked,
    unmask,
)
from fedgs.mechanism.sanitizer import PerSampleGradients, clip
from tiny import FULL_PARTICIPATION, MOMENTS, tiny_config

MASKED = {"engine": "flower", "secure_aggregation": True, "noise_multiplier": 0.5}
NODES = range(3)
IMAGES, LABELS = torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.int64)
REQUEST = FakeBatch(1, IMAGES, LABELS, EVERYONE, EVERYONE)


def node_sum(config, node: int) -> IntegerSum:
    """A node's noisy sum: of the longest gradients in the first node, else of 0."""
    terms = config.terms(1)
    value = terms.clip_bound / math.sqrt(math.prod(terms.shape[1:]))
    grads = torch.full((1, *terms.shape), value if node == 0 else 0.0)
    parts = [clip(PerSampleGradients(grads), terms.clip_bound)]
    return release(config, terms, parts, 1, node)


@pytest.mark.parametrize("mode", [FULL_PARTICIPATION, MOMENTS])
def test_masks_hide_the_worst_case_sum_of_a_node_and_open_with_all_of_them(mode):
    config = tiny_config(**mode | MASKED)
    sums = [node_sum(config, node) for node in NODES]
    asked = Asked("", 1, REQUEST.common_digest(), config.node_title)
    first = []  # messages of the first node, each under other keys
    while sum(message.values.numel() for message in first) < 1 << 14:
        keys = {node: MaskingKey.generate() for node in NODES}
        listed = {node: Announced(key.public, b"") for node, key in keys.items()}
        attempt = Attempt(1, listed)
        masked = [mask(sums[node], keys[node], attempt, asked, b"") for node in NODES]
        first.append(masked[0])
    content = np.concatenate([message.values.numpy().ravel() for message in first])
    counts = np.bincount(content.view(np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-9
    plain = torch.stack([each.values for each in sums]).sum(0) % 2**32
    assert torch.equal(unmask(masked), plain)

    info, size = asked.info(attempt, 0, 1), masked[0].values.numel()
    pair = keys[0].pair_mask(keys[1].public, info, size).astype(np.int32)
    lacking = masked[0].values - torch.from_numpy(pair).view_as(plain)
    with pytest.raises(UserError):
        sum_of(config, REQUEST, [received_masked(lacking, 1, 0, b""), *masked[1:]])
