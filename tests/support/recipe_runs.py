"""Small runs of the recipes: their own settings, at the sizes of a test.

These functions alone know how a recipe becomes a run. Wherever settings move to, they
follow, while the golden numbers of the runs that they make stay as they are.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedgs.config.plugins import GROUP_MEANS
from fedgs.config.recipes import RECIPES, recipe
from fedgs.config.run_config import RunConfig
from fedgs.gan import refinement
from fedgs.methods import dp_merf
from fedgs.privacy.plan import Plan
from fedgs.round.preparation import resolve, with_noise
from fedgs.runs.run_folder import RunFolder
from groups import CLIENTS, write_people
from runs import train
from simulated_grid import FakeGrid, start
from tiny import SIDE, strokes, write_tiny_npz

RECIPE_NAMES = tuple(RECIPES)
# The largest sizes of a small run; a recipe keeps what is smaller.
SIZES = {
    "num_clients": 6,
    "clients_per_node": 2,
    "batch_size": 4,
    "fakes_per_round": 8,
    "discriminator_steps": 2,
    "discriminator_batch_size": 4,
    "warm_start_rounds": 2,
    "generator_dim": 4,
    "discriminator_dim": 4,
    "latent_dim": 4,
    "dct_size": 8,
    "moment_size": 8,
}
ROUNDS = 3  # after those that a recipe has one of for each release of mean features
# Six clients have little signal. With so much less noise, both are seen in the norms.
MORE_EPSILON, LESS_NOISE = 1000.0, 0.001
# Of the plans: the recipes' own sizes, for data of so many writers.
WRITERS = {"num_clients": 539, "num_classes": 10, "engine": "flower", "seed": 5}
WRITERS |= {"image_size": 28, "image_channels": 1}


def run_of_recipe(name: str, output: Path, engine: str) -> RunFolder:
    """Trains a small run of a recipe; both of its seeds are fixed, so it repeats.

    With a seed of the noise, who is selected follows from the run's seed, too.

    Args:
        name: of the recipe.
        output: the run folder; the data are written beside it.
        engine: "local", or "flower" for a simulation in this process.
    """
    config = recipe(name)
    small = _sizes(config) | _noise(config) | _data(config, output.parent)
    small |= {"engine": engine, "output": str(output), "num_workers": 1}
    small |= {"seed": 5 if config.seed is None else config.seed, "noise_seed": 7}
    resolved, _ = resolve(RunConfig.from_flat(small, config))
    folder = RunFolder.create(resolved)
    if engine == "local":
        train(folder)
    else:
        start(folder, FakeGrid(resolved.num_nodes))
    return folder


def plan_of_recipe(name: str) -> Plan:
    """Returns what a recipe plans to release at its own size; nothing is trained."""
    config = recipe(name)
    own: dict[str, Any] = dict(WRITERS)
    if config.num_clients is not None:
        own["num_clients"] = config.num_clients
    if config.client_selection == "all":
        own["clients_per_round"] = own["num_clients"]
    return Plan.from_config(with_noise(RunConfig.from_flat(own, config).validate()))


def shorten_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has generators be fitted to releases in few steps, and with few features."""
    monkeypatch.setattr(refinement, "STEPS", 52)
    monkeypatch.setattr(refinement, "REFERENCE_STEPS", 12)
    monkeypatch.setattr(dp_merf, "STEPS", 4)
    monkeypatch.setattr(dp_merf, "NUM_FEATURES", 64)


def _sizes(config: RunConfig) -> dict[str, Any]:
    """Returns the sizes of a small run; settings that a recipe leaves open stay so."""
    flat = config.to_flat()
    known = {name: flat[name] for name in SIZES if flat.get(name, "") != ""}
    small = {name: min(value, SIZES[name]) for name, value in known.items()}
    once = sum(
        config.at_phase(index).releases_once for index in range(len(config.phases))
    )
    small["num_rounds"] = min(config.num_rounds, once + ROUNDS)
    return small


def _noise(config: RunConfig) -> dict[str, Any]:
    """Returns the noise of a small run, which follows the recipe's."""
    if config.target_epsilon is not None:
        return {"target_epsilon": config.target_epsilon * MORE_EPSILON}
    return {"noise_multiplier": config.known_noise * LESS_NOISE}


def _data(config: RunConfig, place: Path) -> dict[str, Any]:
    """Writes the tiny data into a folder; returns the settings that name them."""
    own: dict[str, Any] = {"image_size": SIDE}
    if config.method == GROUP_MEANS:  # groups of a node need some clients
        own |= {"data": write_people(place / "people.npz"), "num_clients": CLIENTS}
        own["clients_per_node"] = CLIENTS // 2
    elif config.partition == "iid":  # is of shards of images that have no owners
        own["data"] = _unowned(place / "tiny.npz", seed=0)
    else:
        own["data"] = write_tiny_npz(place / "tiny.npz")
    if config.public_data is not None:  # a recipe's has ten classes, these have three
        own["public_data"] = _unowned(place / "public.npz", seed=1)
    return own


def _unowned(path: Path, seed: int) -> str:
    """Writes images without owners, others for each seed; those of 0 are private."""
    images, labels = strokes(seed=seed)
    np.savez(path, images=images, labels=labels)
    return f"npz:{path}"
