"""Folders for the tests of `fedgs report`: tiny runs, and a debug folder of them."""

from contextlib import closing
from dataclasses import replace
from math import nan
from pathlib import Path

from PIL import Image

from fedgs.app.debug.debug_folder import DEBUG_FORMAT
from fedgs.app.debug.verdict import with_titles
from fedgs.diagnosis.diagnosis import Diagnosis, Rule, Suspect
from fedgs.files import write_json
from fedgs.gan.models import build_generator
from fedgs.methods.schedule import select
from fedgs.privacy.accountant import statements
from fedgs.privacy.plan import Plan
from fedgs.round.run import new_event
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import write_grid
from tiny import tiny_config

PRIVATE = {"noise_seed": None, "engine": "local"}
GROUPS = ("healthy-0", "healthy-1", "suspicious-0", "suspicious-1")


def make_run(path: Path, **settings: object) -> Path:
    """Writes what a finished run of three rounds leaves behind, without training it.

    The generator of a round is a new one, so grids differ; signal/noise is 3, 2, 1.
    """
    config = tiny_config(output=str(path), **PRIVATE | settings)
    folder = RunFolder.create(config)
    config = folder.config
    with closing(folder.ledger()) as ledger:
        for round in (1, 2, 3):
            ledger.append(new_event(config, round, select(config, round), 1))
            metrics = {"round": round, "seconds": 0.1, "num_answers": 2}
            folder.append_metrics(metrics | {"signal_to_noise": 4.0 - round})
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
    debug = {
        "format": DEBUG_FORMAT,
        "groups": 2,
        "runs": {"healthy": GROUPS[:2], "suspicious": GROUPS[2:]},
        "clients_per_group": 3,
        "clients": {"healthy": 6, "suspicious": 6},
        "source": "the user's own files",
        "command": "fedgs debug --data-dir /home/ada/secret --output /tmp/x",
    }
    write_json(path / "debug.json", debug)
    write_json(path / "diagnosis.json", diagnosed() | diagnosis)
    Image.new("L", (40, 20)).save(path / "diagnosis.png")
    return path


def diagnosed() -> dict[str, object]:
    """What `fedgs debug` says of cohorts one of which is inverted."""
    named = Suspect("invert", 0.0571, 0.97, 0.96, (0.9, 1.0), "named")
    other = Suspect("other", nan, nan, None, None, "no difference seen")
    found = Diagnosis("invert", (named, other), True, 3, Rule())
    row = statements(Plan.from_config(tiny_config(**PRIVATE)), 1e-5)[0]
    return with_titles(found) | {
        "format": DEBUG_FORMAT,
        "sentence": "The suspicious images are inverted <b>& more</b>.",
        "conditions": ["Groups are disjoint."],
        "privacy": [replace(row, epsilon=41.5).to_json()],
        "planted": {"bug": "invert", "fraction": 0.5, "counts": {}},
        "outcome": "right",
    }
