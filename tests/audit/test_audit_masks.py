"""The attack on masks: ours hold, and what is not as it should be is found."""

import pytest
import torch

from fedgs.audit import masks
from fedgs.audit.masks import audit_masks
from fedgs.mechanism.masks import MaskedSum, MaskingKey, received_masked
from tiny import FULL_PARTICIPATION, MOMENTS, tiny_config

MASKED = {"engine": "flower", "secure_aggregation": True, "noise_multiplier": 0.5}


@pytest.mark.parametrize("mode", [FULL_PARTICIPATION, MOMENTS])
def test_masks_of_a_run_hold(mode):
    found = audit_masks(tiny_config(**mode | MASKED), 1)
    assert found.holds
    assert found.nodes == 3


def spoil(monkeypatch, change) -> None:
    original = masks.mask

    def spoilt(node_sum, *rest) -> MaskedSum:
        good = original(node_sum, *rest)
        values = change(node_sum, good.values)
        return received_masked(values, good.round, good.node_id, b"")

    monkeypatch.setattr(masks, "mask", spoilt)


def test_a_message_without_masks_is_found(monkeypatch):
    spoil(monkeypatch, lambda node_sum, values: node_sum.values.to(torch.int32))
    found = audit_masks(tiny_config(**MOMENTS | MASKED), 1)
    assert (found.holds, found.is_exact) == (False, True)
    assert found.p_uniform < 1e-100


def test_a_sum_that_is_off_by_one_unit_is_found(monkeypatch):
    spoil(monkeypatch, lambda node_sum, values: values + (node_sum.node_id == 1))
    found = audit_masks(tiny_config(**MOMENTS | MASKED), 1)
    assert (found.holds, found.is_exact) == (False, False)


def test_masks_that_hide_nothing_when_one_is_left_out_are_found(monkeypatch):
    """As if every pair's secret were zero: leaving it out changes nothing."""
    monkeypatch.setattr(
        MaskingKey, "pair_mask", lambda own, public, info, size: _zeros(size)
    )
    found = audit_masks(tiny_config(**MOMENTS | MASKED), 1)
    assert (found.holds, found.is_noticed) == (False, False)


def _zeros(size: int):
    return torch.zeros(size, dtype=torch.int32).numpy().view("u4")
