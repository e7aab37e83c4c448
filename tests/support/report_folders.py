"""Folders for the tests of `fedgs report`: tiny runs, with a diagnosis or without."""

from contextlib import closing
from math import nan
from pathlib import Path

from PIL import Image

from fedgs.diagnosis.conclusion import DIAGNOSIS, FORMAT, PICTURE
from fedgs.diagnosis.diagnosis import Diagnosis, Rule, Suspect
from fedgs.diagnosis.sentences import with_titles
from fedgs.files import write_json
from fedgs.gan.models import build_generator
from fedgs.methods.schedule import select
from fedgs.round.run import new_event
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import write_grid
from tiny import tiny_config

PRIVATE = {"noise_seed": None, "engine": "local"}


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


def make_diagnosed(path: Path, **changes: object) -> Path:
    """Makes a run whose diagnosis says that images of v2 are inverted; returns it.

    Args:
        path: of the folder.
        changes: of the content of diagnosis.json.
    """
    make_run(path)
    content = {
        "format": FORMAT,
        "comparisons": [compared()],
        "conditions": ["Groups are disjoint."],
        "planted": {"bug": "invert", "where": "0.5 of the clients"},
        "rows": ["v1", "v2"],
    }
    write_json(path / DIAGNOSIS, content | changes)
    Image.new("L", (40, 20)).save(path / PICTURE)
    return path


def compared(**changes: object) -> dict[str, object]:
    """What diagnosis.json says of two cohorts one of which is inverted."""
    named = Suspect("invert", 0.0571, 0.97, 0.96, (0.9, 1.0), "named", 0.97)
    other = Suspect("other", nan, None, None, None, "no difference seen")
    found = Diagnosis("invert", (named, other), True, 3, Rule())
    return with_titles(found) | {
        "suspicious": "v2",
        "healthy": "v1",
        "sentence": "The images of v2 are inverted <b>& more</b>.",
        **changes,
    }


def compared_site(name: str, **changes: object) -> dict[str, object]:
    """What diagnosis.json says of one of several sites."""
    of_site = {"healthy": "all others", "p": 0.03, "is_accused": True, "rivals": []}
    return compared(suspicious=name) | of_site | changes
