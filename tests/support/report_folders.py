"""Folders for the tests of `fedgs report`: tiny runs, and a debug folder of them."""

import json
from contextlib import closing
from pathlib import Path

import torch
from PIL import Image

from fedgs.config.run_config import RunConfig
from fedgs.federation.messages import FakeBatch
from fedgs.federation.round import select
from fedgs.federation.training import new_event
from fedgs.gan.models import build_generator
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import write_grid
from tiny import tiny_config

PRIVATE = {"noise_seed": None, "engine": "local"}
GROUPS = ("healthy-0", "healthy-1", "suspicious-0", "suspicious-1")


def tiny_run(path: Path, **settings: object) -> RunConfig:
    """Returns the configuration of a run with fresh noise, unless told otherwise."""
    return tiny_config(output=str(path), **PRIVATE | settings)


def make_run(path: Path, **settings: object) -> Path:
    """Writes what a finished run of three rounds leaves behind, without training it.

    The generator of a round is a new one, so grids differ; the norms are 3, 2 and 1.
    """
    config = tiny_run(path, **settings)
    folder = RunFolder.create(config)
    generator = build_generator(config, 0)
    with closing(folder.ledger()) as ledger:
        for round in (1, 2, 3):
            nothing, asked = torch.zeros(0), select(config, round)
            request = FakeBatch(round, nothing, nothing, asked, asked)
            ledger.append(new_event(config, request.round, request.participants, 1))
            metrics = {"round": round, "seconds": 0.1, "num_answers": 2}
            folder.append_metrics(metrics | {"release_norm": 4.0 - round})
            generator = build_generator(config, round).eval()
            grid = folder.path / "samples" / f"round-{round:07d}.png"
            write_grid(grid, config, generator)
        state = generator.state_dict()
        folder.save_generator(state, state, ledger)
    return path


def make_debug(path: Path, **diagnosis: object) -> Path:
    """Makes the folder of a finished `fedgs debug` and returns it."""
    path.mkdir()
    for group in GROUPS:
        make_run(path / group)
    runs = {
        cohort: [group for group in GROUPS if group.startswith(cohort)]
        for cohort in ("healthy", "suspicious")
    }
    debug = {
        "format": 1,
        "cohorts": ["healthy", "suspicious"],
        "groups": 2,
        "runs": runs,
        "clients_per_group": 3,
        "clients": {"healthy": 6, "suspicious": 6},
        "source": "the user's own files",
        "planted": {"corruption": "invert", "fraction": 0.5},
        "command": "fedgs debug --data-dir /home/ada/secret --output /tmp/x",
        "settings": {"alpha": 0.05, "min_effect": 0.25, "groups": 2},
        "request": {"runs": None},
        "config": {},
        "versions": {},
    }
    (path / "debug.json").write_text(json.dumps(debug))
    (path / "diagnosis.json").write_text(json.dumps(DIAGNOSIS | diagnosis))
    Image.new("L", (40, 20)).save(path / "diagnosis.png")
    return path


DIAGNOSIS = {
    "format": 1,
    "verdict": "invert",
    "sentence": "The suspicious images are inverted <b>& more</b>.",
    "bugs": ["invert"],
    "alpha": 0.05,
    "attainable_p": 0.3333,
    "false_positive_rate": 0.0,
    "num_splits": 3,
    "groups": 2,
    "min_effect": 0.25,
    "confidence": 0.95,
    "has_learned": True,
    "ranking": [
        {
            "bug": "invert",
            "title": "pixel inversion",
            "p": 0.0286,
            "adjusted_p": 0.0571,
            "statistic": 0.97,
            "effect": 0.96,
            "interval": [0.9, 1.0],
            "decision": "named",
            "words": "",
        },
        {
            "bug": "other",
            "title": "another difference",
            "p": None,
            "adjusted_p": None,
            "statistic": None,
            "effect": None,
            "interval": None,
            "decision": "no difference seen",
            "words": "",
        },
    ],
    "effects": [
        {
            "name": "pixel intensity",
            "unit": "mean of [0, 1]",
            "healthy": 0.13,
            "suspicious": 0.85,
            "difference": 0.72,
            "interval": [0.6, 0.8],
            "per_group": {"healthy": [0.12, 0.14], "suspicious": [0.84, 0.86]},
        }
    ],
    "two_sample": [{"name": "MMD", "value": 0.4, "p": 0.0286, "words": "of features"}],
    "conditions": ["Groups are disjoint."],
    "privacy": [
        {
            "adversary": "release",
            "relation": "replace-one",
            "unit": "client",
            "delta": 1e-5,
            "epsilon": 41.5,
            "asked": "epsilon",
            "theorem": "no amplification: participation count",
            "conditions": ["a client is in one group"],
            "guarantee": True,
            "client_selection": "uniform",
            "num_rounds": 3,
        }
    ],
    "planted": {"bug": "invert", "fraction": 0.5, "counts": {}},
    "outcome": "right",
    "runs": {},
    "picture": "diagnosis.png",
    "samples_per_group": 10,
    "versions": {},
}
