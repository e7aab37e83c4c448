"""The recipes: the paper's published numbers, and what a recipe leaves to the user."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from fedgs.config.phases import read_phases
from fedgs.config.recipes import RECIPES, configure, described, is_fitted, recipe
from fedgs.config.run_config import RunConfig, check_names
from fedgs.data.partition import DIGITS_NUM_CLIENTS
from fedgs.gan import losses, models
from refusals import assert_refused
from tiny import run_config

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
LEFT_TO_THE_USER = ("data", "data_dir", "download", "output", "engine")
FLOWER_DEFAULT_NODES = 2  # supernodes of a simulation that is not told otherwise

# GS-WGAN, NeurIPS 2020, Algorithms 1 and 2, appendix C.1; source/config.py.
PAPER = {
    "clients_per_round": 1,
    "client_selection": "uniform",
    "discriminator_training": "selected",
    "noise_multiplier": 1.07,
    "target_epsilon": None,
    "clip_bound": 1.0,
    "batch_size": 32,
    "discriminator_batch_size": 32,
    "discriminator_steps": 5,
    "fakes_per_round": None,
    "warm_start_rounds": 2000,
    "generator_learning_rate": 1e-4,
    "discriminator_learning_rate": 1e-4,
    "ema_decay": 0.999,
    "generator": "resnet",
    "generator_dim": 64,
    "discriminator_dim": 64,
    "spectral_norm": True,
    "latent": "bernoulli",
    "latent_dim": 10,
    "dct_size": None,
    "image_size": None,  # MNIST and Federated EMNIST have 28 x 28 grey pixels
    "image_channels": None,
}


def test_constants_are_the_published_ones():
    assert models.ADAM_BETAS == (0.5, 0.9)
    assert (losses.PENALTY_WEIGHT, losses.DRIFT_WEIGHT) == (10.0, 1e-3)


def chosen(name: str, settings: dict[str, object]) -> dict[str, object]:
    return {key: getattr(recipe(name), key) for key in settings}


def test_algorithm_1_has_the_published_numbers():
    published = PAPER | {"num_clients": 1000, "num_rounds": 20_000, "partition": "iid"}
    assert chosen("algorithm-1", published) == published


def test_algorithm_2_has_the_published_numbers_and_the_clients_of_the_data():
    published = PAPER | {"num_rounds": 30_000, "partition": "by-client"}
    published |= {"num_clients": None, "clients_per_node": 1}
    assert chosen("algorithm-2", published) == published


def test_full_participation_asks_everybody_every_round():
    stated = {
        "client_selection": "all",
        "clients_per_round": None,
        "discriminator_training": "every_round",
        "clients_per_node": 49,
        "num_clients": None,
        "target_epsilon": 10.0,
        "relation": "zero-out",
        "delta": 1e-5,
        "noise_multiplier": None,
    }
    assert chosen("gs-wgan", stated) == stated


def test_the_demo_is_the_default_at_another_size():
    sizes = {"clients_per_node", "moment_size", "seed", "recipe"}
    names = {spec.name for spec in dataclasses.fields(RunConfig)} - sizes
    same = {name: getattr(recipe("feature-means"), name) for name in names}
    assert chosen("demo", same) == same


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_and_carries_no_data_output_or_engine(name):
    config = recipe(name).validate()
    assert {key: getattr(config, key) for key in LEFT_TO_THE_USER} == {
        key: getattr(run_config(), key) for key in LEFT_TO_THE_USER
    }


def test_unknown_recipe_names_the_known_ones():
    assert_refused(r"recipe = 'nope':", recipe, "nope")


def test_plain_flwr_run_is_the_demo_on_flowers_default_nodes():
    """Every key is unset but for the recipe: `server_app` reads them as a command."""
    app = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]
    own = {"recipe", "config", "run_folder", "nodes"}
    assert {name: value for name, value in app.items() if value != ""} == {
        "recipe": "demo"
    }
    phases = read_phases("gs-wgan,group-means")
    check_names({name.replace("-", "_") for name in app} - own, phases=phases)
    assert len(app) <= 24
    demo = recipe("demo")
    assert demo.data == "digits"
    assert FLOWER_DEFAULT_NODES * demo.clients_per_node == DIGITS_NUM_CLIENTS


@pytest.mark.parametrize("phases", ["gs-wgan", "dp-merf", "cohort-classifier"])
def test_default_with_other_phases_in_its_place_is_not_fitted(phases):
    """They have no moments whose number could be chosen."""
    config = configure("feature-means", None, {"phases": phases, "num_rounds": 3})
    assert not is_fitted(config)
    assert is_fitted(configure("feature-means", None, {}))
    assert described(config).startswith("Recipe feature-means with other phases: ")
