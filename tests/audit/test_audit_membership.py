"""Attack C on a generator that memorises and on one that does not."""

import numpy as np
import pytest

from fedgs.audit.membership import audit_samples

rng = np.random.default_rng(0)


def images(count: int) -> np.ndarray:
    return rng.random((count, 1, 6, 6)).astype(np.float32)


def test_memorising_generator_is_caught():
    members, others, reference = images(200), images(200), images(300)
    copies = members + rng.normal(0, 0.02, members.shape).astype(np.float32)
    found = audit_samples(copies, members, others, reference)
    for attack in ("nearest", "calibrated"):
        assert found[attack]["auc"]["low"] > 0.95
        assert found[attack]["tpr_at_0.01_fpr"]["value"] > 0.9
    assert found["nearest_is_member"]["value"] > 0.99
    assert found["median_distance_ratio"] < 0.2


def test_fresh_samples_tell_nothing():
    found = audit_samples(images(400), images(300), images(300), images(300))
    for attack in ("nearest", "calibrated"):
        assert found[attack]["auc"]["low"] < 0.5 < found[attack]["auc"]["high"]
        assert found[attack]["tpr_at_0.01_fpr"]["value"] < 0.06
    assert found["nearest_is_member"]["value"] == pytest.approx(0.5, abs=0.1)
    assert found["median_distance_ratio"] == pytest.approx(1.0, abs=0.05)
    assert "proves nothing" in found["warning"]


def test_true_positives_respect_the_false_positive_rate():
    # 100 others with scores -1 ... -100: at 1 %, one of them may be above.
    members = np.zeros((100, 1, 1, 1), np.float32)
    members[:30] = 1.5  # nearer than all others but one
    members[30:] = 1000.0
    others = np.arange(1, 101, dtype=np.float32).reshape(-1, 1, 1, 1)
    synthetic, reference = np.zeros((1, 1, 1, 1), np.float32), others + 0.5
    found = audit_samples(synthetic, members, others, reference)["nearest"]
    assert found["tpr_at_0.01_fpr"]["value"] == pytest.approx(0.3)
    assert found["tpr_at_0.001_fpr"]["value"] == 0.0


def test_unequal_groups_are_refused():
    with pytest.raises(ValueError, match="as many members"):
        audit_samples(images(5), images(5), images(6), images(5))


def test_samples_of_few_neighbours_prove_little():
    rng = np.random.default_rng(3)
    shape = (1, 4, 4)
    members, others, more = (
        rng.random((20, *shape), dtype=np.float32) for _ in range(3)
    )
    # 200 samples, but 3 records that they lie at, 2 of them members.
    at = np.concatenate(
        [np.repeat(members[:2], 80, axis=0), np.tile(others[:1], (40, 1, 1, 1))]
    )
    samples = at + rng.normal(0, 1e-3, at.shape).astype(np.float32)
    share = audit_samples(samples, members, others, more)["nearest_is_member"]
    assert share["value"] == pytest.approx(0.8)
    assert share["low"] < 0.5 < 0.99 < share["high"]
