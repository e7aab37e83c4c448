"""Label efficiency, and the CNN that all downstream numbers share."""

import numpy as np

from evaluation_data import labelled
from fedgs.evaluation import label_efficiency as module
from fedgs.evaluation.label_efficiency import label_efficiency
from tiny import NUM_CLASSES


def curves(annotated: np.ndarray, **settings: object) -> dict[str, dict[str, float]]:
    synthetic, test = labelled(150, 0), labelled(60, 1)
    given = {"num_labels": (6, 150, 151), "num_steps": 60} | settings
    report = given.pop("report", lambda done, total: None)
    return label_efficiency(synthetic, annotated, test, NUM_CLASSES, 0, report, **given)


def test_student_learns_more_from_more_labels_and_from_right_ones():
    labels = labelled(150, 0).labels
    found = curves((labels + 1) % NUM_CLASSES)
    assert list(found) == ["generator", "annotator"]
    assert list(found["generator"]) == ["6", "150"]  # 151 labels are not there
    assert found["generator"]["150"] > 0.9
    assert found["generator"]["150"] >= found["generator"]["6"]
    assert found["annotator"]["150"] < 0.1  # it was taught wrong labels


def test_images_sorted_by_class_are_shuffled_before_they_are_counted(monkeypatch):
    seen = []
    monkeypatch.setattr(
        module, "cnn_accuracy", lambda train, *a, **k: seen.append(train.labels) or 0
    )
    mixed = labelled(150, 0)
    order = np.argsort(mixed.labels, kind="stable")
    synthetic = type(mixed)(mixed.images[order], mixed.labels[order])
    test = labelled(3, 1)
    given = (synthetic, synthetic.labels, test, NUM_CLASSES)
    label_efficiency(*given, 0, lambda *steps: None, (30, 60))
    assert min(np.bincount(seen[0])) >= 4
    assert seen[1][:30].tolist() == seen[0].tolist()
