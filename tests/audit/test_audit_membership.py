"""Attack C on a generator that memorises and on one that does not."""

import numpy as np
import pytest

from fedgs.audit.membership import audit_samples

rng = np.random.default_rng(0)


def images(count: int) -> np.ndarray:
    return rng.random((count, 1, 6, 6)).astype(np.float32)


def test_memorising_generator_is_caught():
    members, others = images(200), images(200)
    copies = members + rng.normal(0, 0.02, members.shape).astype(np.float32)
    found = audit_samples(copies, members, others)["nearest"]
    assert found["auc"]["low"] > 0.95
    assert found["tpr_at_0.01_fpr"]["value"] > 0.9


def test_fresh_samples_tell_nothing():
    found = audit_samples(images(400), images(300), images(300))
    auc, rate = found["nearest"]["auc"], found["nearest"]["tpr_at_0.01_fpr"]
    assert auc["low"] < 0.5 < auc["high"]
    assert rate["value"] < 0.06
    assert "proves nothing" in found["warning"]


def test_true_positives_respect_the_false_positive_rate():
    # 100 others with scores -1 ... -100: at 1 %, one of them may be above.
    members = np.zeros((100, 1, 1, 1), np.float32)
    members[:30] = 1.5  # nearer than all others but one
    members[30:] = 1000.0
    others = np.arange(1, 101, dtype=np.float32).reshape(-1, 1, 1, 1)
    synthetic = np.zeros((1, 1, 1, 1), np.float32)
    found = audit_samples(synthetic, members, others)["nearest"]
    assert found["tpr_at_0.01_fpr"]["value"] == pytest.approx(0.3)
    assert found["tpr_at_0.001_fpr"]["value"] == 0.0
