"""Attack C: black-box membership inference on samples of the released generator.

A record is called a member if a synthetic image lies near it: minus the distance to the
nearest one, as it is, and divided by the distance to the nearest image of a reference
set, which tells near images from common ones. A generator that memorises is caught; one
that is not caught is not thereby private: such attacks are loose even where epsilon is
in the hundreds.

Source: Chen, Yu, Zhang, Fritz, "GAN-Leaks", CCS 2020 (full black box, calibration);
Carlini et al., "Membership inference attacks from first principles", S&P 2022 (report
the true positive rate at low false positive rates); Ganev et al., "The elusive pursuit
of replicating PATE-GAN", 2024 (how loose such attacks are).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import bootstrap, rankdata

from fedgs.evaluation.quality import nearest, nearest_index

WARNING = "passing this attack proves nothing: it is far weaker than the guarantee's"
FALSE_POSITIVE_RATES = (0.001, 0.01)
NUM_RESAMPLES = 200
Images = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]
Number = Callable[[Vector, Vector], float]


def audit_samples(
    synthetic: Images, members: Images, others: Images, reference: Images, seed: int = 0
) -> dict[str, Any]:
    """Attacks samples; returns AUC, TPR at low FPR and how much is memorised.

    Intervals are 95 % bootstrap percentiles over members and others: many samples may
    have one nearest record, and are then no independent evidence.

    Privacy: reads private data; output private (the members' distances).

    Args:
        synthetic: samples, shape (n, C, S, S).
        members: records that were trained on, shape (k, C, S, S).
        others: records of the same source that were not, shape (k, C, S, S).
        reference: further ones, to calibrate with, shape (r, C, S, S).
        seed: of the bootstrap.

    Returns:
        For the attacks "nearest" and "calibrated": "auc", "tpr_at_0.001_fpr" and
        "tpr_at_0.01_fpr", each {"value", "low", "high"}. And "nearest_is_member",
        as {"value", "low", "high"}: the share of synthetic images whose nearest record
        is a member, one half for a generator that learnt no record, with
        "median_distance_ratio", the median of the distances to the nearest member over
        those to the nearest other.

    Raises:
        ValueError: members and others differ in number.
    """
    if len(members) != len(others):
        raise ValueError("give as many members as others")
    near = [nearest_distances(images, synthetic) for images in (members, others)]
    usual = [nearest_distances(images, reference) for images in (members, others)]
    calibrated = [a / np.maximum(b, 1e-12) for a, b in zip(near, usual, strict=True)]
    to_member, to_other = (
        nearest_distances(synthetic, images) for images in (members, others)
    )
    ratio = to_member / np.maximum(to_other, 1e-12)
    # Equally near is half a hit.
    hits = (ratio < 1) + (ratio == 1) / 2
    rng = np.random.default_rng(seed)
    return {
        "warning": WARNING,
        "num_synthetic": len(synthetic),
        "num_members": len(members),
        "num_others": len(others),
        "num_reference": len(reference),
        "nearest": _rates(-near[0], -near[1], rng),
        "calibrated": _rates(-calibrated[0], -calibrated[1], rng),
        "nearest_is_member": _share(
            hits, _nearest_records(synthetic, np.concatenate([members, others])), rng
        ),
        "median_distance_ratio": float(np.median(ratio)),
    }


def nearest_distances(images: Images, among: Images) -> Vector:
    """Returns the Euclidean distance of each image to the nearest of another set.

    Privacy: reads private data; output private.

    Args:
        images: shape (n, C, S, S).
        among: shape (k, C, S, S), at least one.

    Returns:
        Shape (n,).
    """
    points, others = (torch.from_numpy(x).flatten(1).double() for x in (images, among))
    return nearest(points, others, 1)[:, 0].numpy()


def _nearest_records(images: Images, among: Images) -> npt.NDArray[np.int64]:
    points, others = (torch.from_numpy(x).flatten(1).double() for x in (images, among))
    return nearest_index(points, others).numpy()


def _share(
    hits: Vector, records: npt.NDArray[np.int64], rng: np.random.Generator
) -> dict[str, float]:
    """Returns the mean of the hits, with an interval over records, not samples.

    Args:
        hits: of each sample, shape (n,), in [0, 1].
        records: nearest to each sample, shape (n,).
        rng: of the bootstrap.
    """
    _, owner = np.unique(records, return_inverse=True)
    counts = np.bincount(owner).astype(np.float64)
    sums, low, high = np.bincount(owner, hits), 0.0, 1.0
    settings: dict[str, Any] = {"n_resamples": NUM_RESAMPLES, "random_state": rng}
    if len(counts) > 1:  # of one record nothing is known
        resampled = bootstrap(
            (sums, counts),
            lambda some, all: some.sum() / all.sum(),
            paired=True,
            vectorized=False,
            method="percentile",
            **settings,
        )
        low, high = map(float, resampled.confidence_interval)
    return {"value": float(hits.mean()), "low": low, "high": high}


def _rates(members: Vector, others: Vector, rng: np.random.Generator) -> dict[str, Any]:
    numbers: dict[str, Number] = {"auc": _auc}
    for rate in FALSE_POSITIVE_RATES:
        numbers[f"tpr_at_{rate:g}_fpr"] = partial(_true_positive_rate, rate)
    settings = {"n_resamples": NUM_RESAMPLES, "random_state": rng}
    rates: dict[str, Any] = {}
    for name, number in numbers.items():
        resampled = bootstrap(
            (members, others), number, vectorized=False, method="percentile", **settings
        )
        low, high = map(float, resampled.confidence_interval)
        rates[name] = {"value": number(members, others), "low": low, "high": high}
    return rates


def _auc(members: Vector, others: Vector) -> float:
    """Returns the chance that a member scores above another record."""
    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    below = ranks.sum() - len(members) * (len(members) + 1) / 2  # Mann and Whitney's U
    return float(below / (len(members) * len(others)))


def _true_positive_rate(rate: float, members: Vector, others: Vector) -> float:
    """Returns the share of members above the threshold of a false positive rate."""
    threshold = np.sort(others)[::-1][int(rate * len(others))]
    return float((members > threshold).mean())
