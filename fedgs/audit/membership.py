"""Attack C: black-box membership inference on samples of the released generator.

A record is called a member if a synthetic image lies near it: the score is minus the
distance to the nearest one. A generator that memorises is caught; one that is not
caught is not thereby private: such attacks are loose even where epsilon is in the
hundreds.

Source: Chen, Yu, Zhang, Fritz, "GAN-Leaks", CCS 2020 (full black box);
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

from fedgs.evaluation.quality import nearest

_WARNING = "passing this attack proves nothing: it is far weaker than the guarantee's"
FALSE_POSITIVE_RATES = (0.001, 0.01)
NUM_RESAMPLES = 200
Images = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]
Number = Callable[[Vector, Vector], float]


def audit_samples(
    synthetic: Images,
    members: Images,
    others: Images,
    seed: int = 0,
) -> dict[str, Any]:
    """Attacks samples; returns AUC and TPR at low FPR.

    Intervals are 95 % bootstrap percentiles over members and others: many samples may
    have one nearest record, and are then no independent evidence.

    Privacy: reads private data; output private (the members' distances).

    Args:
        synthetic: samples, shape (n, C, S, S).
        members: records that were trained on, shape (k, C, S, S).
        others: as many records of the same source that were not.
        seed: the seed of the bootstrap.

    Returns:
        In "nearest" "auc", "tpr_at_0.001_fpr" and "tpr_at_0.01_fpr", each {"value",
        "low", "high"}.
    """
    of_members = -_nearest_distances(members, synthetic)
    of_others = -_nearest_distances(others, synthetic)
    numbers: dict[str, Number] = {"auc": _auc}
    for rate in FALSE_POSITIVE_RATES:
        numbers[f"tpr_at_{rate:g}_fpr"] = partial(_true_positive_rate, rate)
    settings: dict[str, Any] = {
        "vectorized": False,
        "method": "percentile",
        "n_resamples": NUM_RESAMPLES,
        "random_state": np.random.default_rng(seed),
    }
    rates: dict[str, Any] = {}
    for name, number in numbers.items():
        resampled = bootstrap((of_members, of_others), number, **settings)
        interval = resampled.confidence_interval
        rates[name] = {
            "value": number(of_members, of_others),
            "low": float(interval.low),
            "high": float(interval.high),
        }
    return {
        "warning": _WARNING,
        "num_synthetic": len(synthetic),
        "num_members": len(members),
        "num_others": len(others),
        "nearest": rates,
    }


def _nearest_distances(images: Images, among: Images) -> Vector:
    """Returns the Euclidean distance of each image to the nearest of another set."""
    points = torch.from_numpy(images).flatten(1).double()
    others = torch.from_numpy(among).flatten(1).double()
    distances = nearest(points, others, 1)
    return distances[:, 0].numpy()


def _auc(members: Vector, others: Vector) -> float:
    """Returns the chance that a member scores above another record."""
    ranks = rankdata(np.concatenate([members, others]))
    own = ranks[: len(members)].sum()
    # Mann and Whitney's U: of all ranks, those among members themselves are taken off.
    count = len(members)
    below = own - count * (count + 1) / 2
    num_pairs = count * len(others)
    return float(below / num_pairs)


def _true_positive_rate(rate: float, members: Vector, others: Vector) -> float:
    """Returns the share of members above the threshold of a false positive rate."""
    from_largest = np.sort(others)[::-1]
    num_above = int(rate * len(others))
    threshold = from_largest[num_above]
    is_called_member = members > threshold
    return float(is_called_member.mean())
