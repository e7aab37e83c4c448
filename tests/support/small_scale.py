"""A scale of table 2 and the figures: 6 clients, 16 x 16 pixels, 4 rounds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients import node_cache
from experiments.paper import scales
from fedgs.app.evaluation import evaluate as evaluation
from fedgs.app.evaluation.request import EvaluationRequest
from server import roll_call
from tiny import write_tiny_npz

SETTINGS = {
    "image_size": 16,
    "num_rounds": 4,
    "batch_size": 4,
    "discriminator_steps": 2,
    "discriminator_batch_size": 4,
    "warm_start_rounds": 1,
    "generator": "upsample",
    "generator_dim": 4,
    "discriminator_dim": 4,
    "latent_dim": 4,
    "num_workers": 1,
    "checkpoint_every": 2,
}
FULL_PARTICIPATION = {"clients_per_node": 3, "fakes_per_round": 8, "dct_size": 8}
SMALL = {
    "algorithm-1": SETTINGS,
    "algorithm-2": SETTINGS,
    "full-participation": SETTINGS | FULL_PARTICIPATION,
}


def data_flags(folder: Path) -> list[str]:
    """Returns flags of the tiny data, a third of it held out for evaluation."""
    path = folder / "tiny.npz"
    data = f"npz:{path}" if path.exists() else write_tiny_npz(path)
    return [f"--data={data}", "--test-fraction=0.34", "--count=40"]


def quick_evaluate(request: EvaluationRequest, as_json: bool) -> dict[str, Any]:
    """In the place of `fedgs evaluate`: scores that depend on the images alone."""
    with np.load(request.source) as file:
        images, labels = file["images"], file["labels"]
    assert len(images) == len(labels) == request.count
    assert as_json
    return {
        "source": request.source,
        "seconds": 1.5,
        "is_lenet_npz_fast_10_splits": 1 + float(images.mean()),
        "is_lenet_npz_fast_10_splits_std": 0.1,
        "fid_lenet_npz_fast": float(images.std()) * 100,
        "downstream_cnn_accuracy": float(images.max()),
    }


def prepare(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A cache of its own, no other test's data, a tiny scale, quick scores."""
    monkeypatch.setitem(scales.SCALES, "small", SMALL)
    monkeypatch.setenv("FEDGS_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(roll_call, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(evaluation, "evaluate", quick_evaluate)
    node_cache._workers.clear()


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("trained or computed again")
