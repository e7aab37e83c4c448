"""Recipes: functions that return a configuration without data, output and engine.

The paper's two are kept exact for reproduction. `feature_means` is the default: means
and covariances, and a network that is fitted to private means of features. `gs_wgan` is
the paper's method with every client in every round: no amplification argument is
needed, the noise on the average falls as 1/K, and some hundred rounds do instead of
tens of thousands.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedgs.config.feature_settings import (
    OF_FEATURES,
    OF_TRUNKS,
    MomentSettings,
    PretrainedSettings,
)
from fedgs.config.phases import Phase, read_phases
from fedgs.config.plugins import GROUP_MEANS, GS_WGAN, METHODS, load, settings_of_method
from fedgs.config.rounds import with_open_settings
from fedgs.config.run_config import RunConfig, check_names, methods_of
from fedgs.config.settings import (
    REFERENCE_NOISE_MULTIPLIER,
    REFERENCE_NUM_CLIENTS,
    REFERENCE_NUM_ROUNDS,
)
from fedgs.config.tree import flattened
from fedgs.errors import UserError
from fedgs.files import read_toml

# Every client in every round.
ALL: dict[str, Any] = {"client_selection": "all", "clients_per_round": None}
ALL |= {"clients_per_node": 49, "target_epsilon": 10.0, "relation": "zero-out"}


def _recipe(base: RunConfig | None = None, **settings: Any) -> RunConfig:
    return RunConfig.from_flat(settings, base)


def algorithm_1() -> RunConfig:
    """GS-WGAN's centralised setting: 1000 shards of one data set, one per round.

    Source: Chen, Orekondy, Fritz, NeurIPS 2020, Algorithm 1 and appendix C.1.
    """
    return _recipe(
        partition="iid",
        num_clients=REFERENCE_NUM_CLIENTS,
        num_rounds=REFERENCE_NUM_ROUNDS,
        noise_multiplier=REFERENCE_NOISE_MULTIPLIER,
    )


def algorithm_2() -> RunConfig:
    """GS-WGAN's federated setting: one user per round, 30,000 rounds.

    Source: Chen, Orekondy, Fritz, NeurIPS 2020, Algorithm 2 and appendix C.1. The
    paper has 866 users of Federated EMNIST; here the data decides.
    """
    return _recipe(
        partition="by-client",
        num_rounds=30_000,
        noise_multiplier=REFERENCE_NOISE_MULTIPLIER,
    )


def gs_wgan() -> RunConfig:
    """Every client in every round, small models, low-frequency gradients."""
    return _recipe(
        **ALL,
        discriminator_training="every_round",
        dct_size=14,
        num_rounds=640,
        discriminator_steps=2,
        discriminator_batch_size=16,
        fakes_per_round=256,
        warm_start_rounds=5,
        generator="upsample",
        generator_dim=16,
        generator_learning_rate=2e-3,
        discriminator_dim=8,
        discriminator_learning_rate=4e-3,
        spectral_norm=False,
        latent="normal",
        latent_dim=100,
        ema_decay=0.99,
    )


# Of every recipe that releases mean features of all clients, once each.
OF_FEATURE_MEANS: dict[str, Any] = {**ALL, "latent": "normal", "generator_dim": 16}


def moments() -> RunConfig:
    """Means and covariances of every class in three releases: a Gaussian generator.

    The pictures are blurred, and they are there in seconds.

    No discriminator is made, and a round is one message each way. The shares were
    chosen on Fashion-MNIST and on digits drawn from fonts; the form of the recipe was
    found on MNIST, with test accuracies in view (docs/benchmark.md).
    """
    return _recipe(
        **OF_FEATURE_MEANS,
        phases="means:0.25,scatter:0.25,moments:0.5",
        num_rounds=3,
        generator="gaussian",
        latent_dim=30,
    )


def moments_parts() -> RunConfig:
    """`moments`, and a fourth release of four parts of every class.

    It is meant for many clients or a large epsilon, because a part has only a quarter
    of the images.
    """
    return _recipe(
        base=moments(),
        phases="means:0.1,scatter:0.2,moments:0.2,parts:0.5",
        num_rounds=4,
        moment_size=12,
        latent_dim=40,
    )


def feature_means() -> RunConfig:
    """Moments, and a refiner that is fitted to one release of feature means.

    Those means hold all that discriminators say which are linear over fixed features.
    The shares, steps and rates were chosen on MNIST's writers, with scores in view.
    """
    return _recipe(
        base=moments(),
        phases="means:0.25,scatter:0.25,moments:0.5,pretrained-features:1.0",
        num_rounds=4,
        generator="refined",
    )


def feature_means_fonts() -> RunConfig:
    """Feature means whose moments start from those of fonts: for digits."""
    return _recipe(
        base=feature_means(),
        phases="moments:0.2,pretrained-features:0.8",
        num_rounds=2,
        public_data="fonts",
    )


def feature_means_gs_wgan() -> RunConfig:
    """Feature means with four fifths of mu^2, then 40 rounds of GS-WGAN."""
    return _recipe(
        base=feature_means(),
        phases="means:640,scatter:640,moments:1280,pretrained-features:2560,gs-wgan",
        num_rounds=44,
        discriminator_training="every_round",
        dct_size=14,
        discriminator_steps=1,
        discriminator_batch_size=16,
        fakes_per_round=256,
        warm_start_rounds=20,
        generator_learning_rate=1e-4,
        discriminator_dim=8,
        discriminator_learning_rate=2e-3,
        spectral_norm=False,
        ema_decay=0.98,
    )


def of_method(name: str) -> RunConfig:
    """A federated method by its own recipe, every client in every round.

    Args:
        name: a key of `METHODS`, or the place of another method, module:object.

    Raises:
        UserError: there is no such method, or its place is not trusted.
    """
    return _recipe(**{**ALL, **load("recipe", name).recipe, "phases": [name]})


def group_means() -> RunConfig:
    """The class means of every group of clients in one release: `fedgs debug`."""
    return _recipe(base=moments(), phases=GROUP_MEANS, num_rounds=1)


def demo() -> RunConfig:
    """The default's phases at the size of scikit-learn's digits."""
    smaller = {"clients_per_node": 90, "moment_size": 6, "seed": 0}
    return dataclasses.replace(feature_means(), **smaller)


DEFAULT = "feature-means"
OF_FILE = "recipe"  # key of a TOML file: the recipe that its settings belong to
HELD_OUT = 0.1  # of every owner's images, where the data have no test split
OWNERS_HELD_OUT = 0.2  # of owners, of a source most of whose owners have few images
# Least `signal_of`, and what it pays for: the side of the low frequencies, and the axes
# along which parts of classes are measured; 0: no parts, whose moments would have more
# noise than they differ. Those of docs/benchmark.md have 2156 and more with side 12,
# 1438 with 10, 775 with 8 and 289 to 536 with 6; the borders lie between, and 4 is what
# follows from the order.
MOMENTS = ((1761, 12, 40), (1056, 10, 30), (645, 8, 0), (200, 6, 0), (0, 4, 0))
# Below it moments have all of mu^2: features still help the 539 writers at epsilon 1
# (204), and less was not tried.
LEAST_FOR_FEATURES = 200
# All settings that follow from it, unless they are given.
FITTED = ("moment_size", "latent_dim", "num_rounds", "phases", "generator")
# From the first on at least the second: a refiner takes off noise that Gaussians draw.
REFINED_SIDE = (500, 10)


def is_fitted(config: RunConfig) -> bool:
    """Tells whether a run's moments are to be fitted to its clients and its noise.

    Those of the default recipe are, whether the user has named it or not; other phases
    in their place may have no moments.
    """
    return config.recipe == DEFAULT and isinstance(config, MomentSettings)


def moments_for(config: RunConfig, chosen: Collection[str] = ()) -> dict[str, Any]:
    """Returns the settings of the moments, and features or not, that a budget pays for.

    Privacy: public. It depends on clients, nodes and noise, and on no image.

    Args:
        config: resolved, so with noise.
        chosen: names of settings that stay, because somebody has chosen them.

    Raises:
        UserError: the budget pays for no features, and somebody chose their network.

    >>> config = dataclasses.replace(moments(), num_clients=539, noise_multiplier=0.63)
    >>> moments_for(config)  # epsilon 1
    {'moment_size': 6}
    """
    signal = signal_of(config)
    # Sorted by `least`, downwards, and the last row has 0: one always fits.
    side, axes = next(paid for least, *paid in MOMENTS if signal >= least)
    found: dict[str, Any] = {}
    if axes:
        found["latent_dim"] = axes
    keeps_phases = "phases" in chosen
    last = [phase for phase in config.phases if phase.method in OF_TRUNKS]
    if last and signal < LEAST_FOR_FEATURES and not keeps_phases:
        refuse_features(config)
        names = "num_rounds", "phases", "generator"
        found |= {name: getattr(moments(), name) for name in names}
    elif last and signal >= REFINED_SIDE[0]:
        side = max(side, REFINED_SIDE[1])
    if axes and not keeps_phases:
        phases = (*moments_parts().phases, *last)
        found |= {"num_rounds": len(phases), "phases": phases}
    # As many coordinates with every number of channels.
    found["moment_size"] = max(2, round(side / (config.image_channels or 1) ** 0.5))
    return {name: value for name, value in found.items() if name not in chosen}


def refuse_features(config: RunConfig) -> None:
    """Refuses a network that somebody chose where the budget pays for no features.

    Raises:
        UserError: a network was chosen.
    """
    if isinstance(config, PretrainedSettings) and config.features is not None:
        raise UserError(
            f"features = {config.features!r}: so few clients, or so much noise, pay "
            "for moments alone; leave out --features, or give a larger "
            "--target-epsilon, or --phases"
        )


def signal_of(config: RunConfig) -> float:
    """Returns K / (noise_multiplier * sqrt(nodes)): what noise leaves of an average.

    Privacy: public.

    Args:
        config: resolved, so with clients and noise; infinite without noise.
    """
    if config.num_clients is None or not config.noise_multiplier:
        return math.inf
    return config.num_clients / (config.noise_multiplier * config.num_nodes**0.5)


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "demo": demo,
    "algorithm-1": algorithm_1,
    "algorithm-2": algorithm_2,
    "gs-wgan": gs_wgan,
    "feature-means": feature_means,
    "feature-means-fonts": feature_means_fonts,
    "feature-means-gs-wgan": feature_means_gs_wgan,
    "moments": moments,
    "moments-parts": moments_parts,
    "fedavg-gan": partial(of_method, "fedavg-gan"),
    "dp-merf-federated": partial(of_method, "dp-merf"),
    GROUP_MEANS: group_means,
}


def recipe(name: str) -> RunConfig:
    """Returns a recipe's configuration by name, or by the place of a method.

    Raises:
        UserError: unknown name, or a place that is not trusted.
    """
    # A method that has no recipe of its own here, of fedgs or of others, brings one.
    if ":" in name or name in METHODS.keys() - {*RECIPES, *OF_FEATURES}:
        return dataclasses.replace(of_method(name), recipe=name)
    if name not in RECIPES:
        raise UserError(f"recipe = {name!r}: give --recipe one of {', '.join(RECIPES)}")
    return dataclasses.replace(RECIPES[name](), recipe=name)


def described(config: RunConfig) -> str:
    """Returns the recipe of a run and its phases, in words: its first line.

    Example: Recipe moments: means (25 % of the privacy), scatter (25 %), moments
    (50 %). Each round asks all of 539 clients.
    """
    starts = config.first_rounds
    shares = shares_of(config)
    texts: list[str] = []
    for index, phase in enumerate(config.phases):
        count = starts[index + 1] - starts[index]
        if settings_of_method(phase.method).releases_once:
            text = phase.method
        elif count == 1:
            text = f"1 round of {phase.method}"
        else:
            text = f"{count} rounds of {phase.method}"
        if len(config.phases) > 1:
            text += f" ({100 * shares[index]:.3g} %)"
        texts.append(text)
    texts[0] = texts[0].replace(" %)", " % of the privacy)")
    num_clients = config.num_clients or "the data's"
    who = config.clients_per_round
    if config.client_selection == "all":
        who = "all"
    name = config.recipe or config.methods
    if _has_other_phases(config):
        name += " with other phases"
    phases = ", ".join(texts)
    if phases == name:  # a recipe of one release is called like its only phase
        title = name
    else:
        title = f"{name}: {phases}"
    return f"Recipe {title}. Each round asks {who} of {num_clients} clients."


def _has_other_phases(config: RunConfig) -> bool:
    """Tells whether somebody has put other phases in the place of the recipe's."""
    if config.recipe not in RECIPES:
        return False
    known = [RECIPES[config.recipe]()]
    if config.recipe == DEFAULT:
        known.append(moments_parts())  # which it may be fitted to
    own = {phase.method for phase in config.phases}
    return not own <= {phase.method for made in known for phase in made.phases}


def shares_of(config: RunConfig) -> list[float]:
    """Returns which share of the privacy that a run spends (mu^2) each phase spends.

    Privacy: public.
    """
    # Noise that is not known yet, or 0, is as large in all phases.
    known = with_open_settings(config)
    starts = known.first_rounds
    costs: list[float] = []
    for index in range(len(known.phases)):
        own = known.at_phase(index)
        num_rounds = starts[index + 1] - starts[index]
        terms = own.phase_terms(1)
        noise_multiplier = terms.noise_multiplier or 1.0
        costs.append(num_rounds * terms.batch_size / noise_multiplier**2)
    return [cost / sum(costs) for cost in costs]


def overridden(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Returns a configuration with the settings of a later source over it.

    A setting also unsets what earlier sources say about the same thing: the noise by
    its multiplier or its target, the nodes by one size or by all sizes, the relation
    by a unit that has one only.

    Raises:
        UserError: an unknown setting, or a value outside its range.
    """
    unset: dict[str, Any] = {}
    for one, other in itertools.permutations(("noise_multiplier", "target_epsilon")):
        if one in settings:
            unset[other] = ""
    if "clients_per_node" in settings:
        unset["node_sizes"] = ""
    if settings.get("node_sizes"):
        unset["num_clients"] = ""
    if settings.get("client_selection") == "all":
        unset["clients_per_round"] = ""
    if settings.get("privacy_unit") == "record":
        unset["relation"] = "replace-one"  # a recipe's may be zero-out
    return RunConfig.from_flat(unset | dict(settings), config)


def configure(
    recipe_name: str | None,
    config_file: Path | None,
    given: dict[str, Any],
    engine: str = "local",
) -> RunConfig:
    """Builds a configuration: the recipe, then the TOML file, then the flags.

    Args:
        recipe_name: the recipe's name. None means that of the file, or else the default
            recipe, whatever else is given.
        config_file: a TOML file of settings that override the recipe's.
        given: the settings that override both.
        engine: the engine, unless the file or `given` name another one.

    Raises:
        UserError: an unknown recipe, setting or value, an unreadable file, or one of
            another recipe.
    """
    config = recipe(_recipe_of(recipe_name, config_file))
    config = dataclasses.replace(config, engine=engine)
    of_file = settings_in(config_file, config.phases)
    # A relation that the file names stays, whatever unit the flags give.
    relation = {n: of_file[n] for n in ("relation",) if n in of_file}
    for source in (of_file, relation | given):
        config = overridden(config, source)
    return config.validate()


def _recipe_of(name: str | None, config_file: Path | None) -> str:
    """Returns the recipe that is given, that of a file, or the default one."""
    of_file = None
    if config_file is not None:
        of_file = read_toml("config", config_file).get(OF_FILE)
    if of_file is None:
        return name or DEFAULT
    if not isinstance(of_file, str) or name not in (None, of_file):
        raise UserError(
            f"{OF_FILE} = {of_file!r}: {config_file} is a file of this recipe, and not "
            f"of {name or DEFAULT}; leave out --recipe, or give a file without "
            f"{OF_FILE}"
        )
    return of_file


def settings_in(
    config_file: Path | None,
    phases: Sequence[Phase] = (Phase(GS_WGAN),),
) -> dict[str, Any]:
    """Returns the settings that a TOML file names; none without a file.

    Args:
        config_file: plain settings, and tables of them; see `fedgs.config.tree`. The
            name of its recipe is none of them.
        phases: the run's phases, unless the file has its own.

    Raises:
        UserError: an unreadable file, or another table.
    """
    if config_file is None:
        return {}
    settings = read_toml("config", config_file)
    settings.pop(OF_FILE, None)
    if "phases" in settings:
        phases = read_phases(settings["phases"])
    found = flattened(settings, f"config = {config_file}", methods_of(phases))
    check_names(found, phases=phases)
    return found
