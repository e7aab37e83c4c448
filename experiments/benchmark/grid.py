"""The grid of the benchmark: which methods, at which epsilons, on which data.

A method of somebody else joins by its registration in `fedgs.baselines.METHODS`, or by
--method module:object; without an entry here it has its own defaults.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from experiments.benchmark.request import BenchmarkRequest
from experiments.paper.cell_list import NO_NOISE, Cells, Method, Settings, Source
from experiments.paper.pictures import METHODS as PICTURES
from experiments.paper.pictures import SHARDS, SHORT, SIZES, WRITERS
from fedgs.baselines import METHODS as REGISTERED
from fedgs.baselines import find
from fedgs.baselines.pate_accounting import confident_gnmax_mu, pure_per_query
from fedgs.baselines.run import BaselineRun, made_settings, unit_of
from fedgs.config.run_config import RunConfig
from fedgs.privacy.gaussian import mu_from_epsilon

EPSILONS = (10.0, 3.0, 1.0)
TITLE = "Benchmark"
DELTA = RunConfig().delta  # of all cells
# A shard of K = 1000 has 60 images; writers have 111 on average.
DATA = {
    "mnist-by-writer": Source({}, {}, 100),
    "mnist": Source(SHARDS, {}, 60),
    "fashion-mnist": Source(SHARDS, {}, 60),
}
PRIVATE: Mapping[float, Settings] = {epsilon: {} for epsilon in EPSILONS}
ALL: Mapping[float, Settings] = {**PRIVATE, NO_NOISE: {}}
NOT_PRIVATE: Mapping[float, Settings] = {NO_NOISE: {}}


def _own(name: str, of_epsilon: Mapping[float, Settings] = ALL) -> Method:
    """Returns a method of the table of pictures, with all epsilons and data."""
    return PICTURES[name]._replace(of_epsilon=of_epsilon, data=(), seeds=range(1000))


OWN = {
    "staged": _own("staged", {**SIZES, NO_NOISE: {}}),
    "staged-parts": PICTURES["staged-parts"],
    "staged-fonts": PICTURES["staged-fonts"],
    "gs-wgan": _own("gs-wgan"),
}
# Settings of fedgs' own rows that are below those of their recipes.
OWN_REDUCED: Mapping[str, Settings] = {"gs-wgan": SHORT}

# Methods whose settings were chosen with test accuracies on these data in view.
IN_VIEW = {"fashion-mnist": ["staged", "staged-parts"]}
IN_VIEW["mnist"] = IN_VIEW["mnist-by-writer"] = [*OWN, "wgan-gp", "fedavg-gan"]


@dataclass(frozen=True)
class Entry:
    """A row of somebody else's method.

    Attributes:
        baseline: its name.
        settings: that make it this row.
        reduced: settings that are below the published ones, for 15 minutes on 2 cores.
        noise_free: settings that switch its noise off; None where it cannot be.
        is_private: whether it can have a target.
        noise: at an epsilon of zero-out, which all user-level rows have, where the
            method's own target is about replace-one; (its settings, epsilon).
    """

    baseline: str
    settings: Settings = field(default_factory=Settings)
    reduced: Settings = field(default_factory=Settings)
    noise_free: Settings | None = None
    is_private: bool = True
    noise: Callable[[Any, float], Settings] | None = None


def _answer_noise(settings: Any, epsilon: float) -> Settings:
    """Returns G-PATE's noise where a teacher that casts no vote is hidden."""
    queries = settings.steps * settings.batch_size * settings.projection_dim
    mu = confident_gnmax_mu(queries, settings.threshold_ratio, 1.0, 1.0)
    return {"answer_noise": mu / mu_from_epsilon(epsilon, DELTA)}


def _inverse_noise(settings: Any, epsilon: float) -> Settings:
    """Returns PATE-GAN's noise where a teacher that casts no vote is hidden."""
    queries = settings.steps * settings.student_steps * settings.batch_size
    return {"inverse_noise": pure_per_query(epsilon, queries, DELTA)}


# BDP-GAN's noise by steps, reduced and published, and by epsilon: that of
# `fedgs.privacy.poisson.smallest_noise` for 52,000 records. With more of them, as in
# the benchmark's own data, the epsilon is smaller, and every row says its own.
CLASSICAL_NOISE: Mapping[int, Mapping[float, float]] = {
    700: {10.0: 0.361, 3.0: 0.516, 1.0: 0.653},
    23_437: {10.0: 1.663, 3.0: 4.263, 1.0: 11.29},
}


def _classical_noise(settings: Any, epsilon: float) -> Settings:
    """Returns BDP-GAN's noise, whose own epsilon is no target: at the classical one."""
    return {"noise_per_clip": CLASSICAL_NOISE[settings.steps][epsilon]}


NOISE_FREE: Settings = {"noise_per_clip": 0.0}
NO_SIGMA: Settings = {"noise_multiplier": 0.0}
SMALL: Settings = {"generator_dim": 8, "discriminator_dim": 8}
# As docs/baselines.md has trained it; 20,000 steps are published.
LIGHT: Settings = {
    "steps": 700,
    "batch_size": 32,
    "learning_rate": 1e-3,
    "ema_decay": 0.98,
    "generator": "upsample",
    "generator_dim": 16,
    "discriminator_dim": 16,
    "spectral_norm": False,
    "latent": "normal",
    "latent_dim": 30,
}
FEW_ROUNDS: Settings = {
    "steps": 60,
    "clients_per_round": 54,
    "discriminator_learning_rate": 0.003,
    "generator_learning_rate": 0.1,
    "generator": "upsample",
    "generator_dim": 16,
    "discriminator_dim": 8,
    "clip_bound": 0.5,
}
# Found on fonts: at 400 steps and batches of 256 every class is legible.
STRONG: Settings = {
    "steps": 800,
    "expected_batch": 512,
    "steps_per_generator_step": 2,
    "discriminator_learning_rate": 0.002,
    "generator_learning_rate": 0.005,
    "ema_decay": 0.98,
    "generator": "upsample",
    "generator_dim": 16,
    "discriminator_dim": 8,
}
VOTES: Settings = {"steps": 100, "batch_size": 16}
ENTRIES = {
    "wgan-gp": Entry("wgan-gp", {}, LIGHT, {}, is_private=False),
    "fedavg-gan": Entry("fedavg-gan", {"relation": "zero-out"}, FEW_ROUNDS, NOISE_FREE),
    "g-pate": Entry("g-pate", {}, VOTES, noise=_answer_noise),
    "pate-gan": Entry(
        "pate-gan",
        {},
        VOTES | {"teacher_steps": 2, "teacher_batch_size": 32},
        noise=_inverse_noise,
    ),
    "dp-merf-federated": Entry("dp-merf", {"federated": True}, {}, NO_SIGMA),
    "dp-merf": Entry("dp-merf", {}, {"generator_steps": 500}, NO_SIGMA),
    "dp-merf-ae": Entry(
        "dp-merf-ae",
        {},
        {"autoencoder_steps": 500, "generator_steps": 400},
        NO_SIGMA,
    ),
    "dp-sgd-gan": Entry(
        "dp-sgd-gan", {}, {"steps": 500, "expected_batch": 128} | SMALL, NOISE_FREE
    ),
    "dp-sgd-gan-strong": Entry(
        "dp-sgd-gan-strong",
        {},
        STRONG,
        NOISE_FREE,
    ),
    "bdp-gan": Entry(
        "bdp-gan",
        {},
        {"steps": 700, "expected_batch": 64} | SMALL,
        NOISE_FREE,
        noise=_classical_noise,
    ),
}


def grid(request: BenchmarkRequest, settings: Settings) -> Cells:
    """Returns all cells that a call knows.

    Args:
        request: of the call.
        settings: of `OF_DATA`; with `data` the user's data set takes the place of the
            benchmark's three.

    Raises:
        UserError: an unknown method, or a setting out of range.
    """
    if "data" in settings:
        source = Source(settings, {}, request.max_images_per_user)
        data = {re.sub(r"\W+", "-", settings["data"]).strip("-"): source}
    else:
        data = {
            name: source._replace(settings=source.settings | settings)
            for name, source in DATA.items()
        }
    methods = {name: _at_scale(name, request.full) for name in OWN}
    if WRITERS[0] not in data:
        methods = {name: how for name, how in methods.items() if not how.data}
    theirs = others(request)
    if settings.keys() - {"device"} and "bdp-gan" in theirs:
        # How many images there are is not known, and its noise depends on it.
        theirs["bdp-gan"] = theirs["bdp-gan"]._replace(
            of_epsilon={NO_NOISE: NOISE_FREE}
        )
    return Cells(TITLE, data, methods | theirs)


def _at_scale(name: str, is_full: bool) -> Method:
    method = OWN[name]
    if not is_full:
        return method
    small = OWN_REDUCED.get(name, {})
    kept = {key: value for key, value in method.settings.items() if key not in small}
    return method._replace(settings=kept)


def others(request: BenchmarkRequest) -> dict[str, Method]:
    """Returns the rows of methods that others published, by name.

    Raises:
        UserError: a method that cannot be found.
    """
    entries = {n: e for n, e in ENTRIES.items() if e.baseline in REGISTERED}
    listed = {entry.baseline for entry in entries.values()}
    for name in (*REGISTERED, *request.method):
        if name not in listed:
            unit = find(name, is_typed=True).unit
            private = unit != "none"
            free = None if private else Settings()
            entries[_short(name)] = Entry(name, {}, {}, free, private)
    return {name: _method(entry, request.full) for name, entry in entries.items()}


def _short(name: str) -> str:
    return re.sub(r"\W+", "-", find(name, is_typed=True).name)


def _method(entry: Entry, is_full: bool) -> Method:
    settings = entry.settings | ({} if is_full else entry.reduced)
    of_epsilon = dict(PRIVATE) if entry.is_private else {}
    if entry.noise is not None:
        own = _made(entry.baseline, settings)
        of_epsilon = {epsilon: entry.noise(own, epsilon) for epsilon in PRIVATE}
    if entry.noise_free is not None:
        of_epsilon[NO_NOISE] = entry.noise_free
    method = Method("", settings, of_epsilon, baseline=entry.baseline)
    return method._replace(is_capped=unit(method) == "record")


def reduced(name: str, run: BaselineRun | None, is_full: bool) -> Settings:
    """Returns the settings of a run that differ from the published ones.

    Args:
        name: of the row.
        run: of a baseline; None is fedgs' own.
        is_full: no setting of the model was reduced.
    """
    if run is None:
        return {} if is_full else dict(OWN_REDUCED.get(name, {}))
    entry, default = ENTRIES.get(name, Entry("")), asdict(run.method.Settings())
    changed = {n: v for n, v in asdict(run.settings).items() if v != default[n]}
    changed = {n: v for n, v in changed.items() if "noise" not in n}
    model = {n for n in entry.reduced if n not in default and not is_full}
    changed |= {n: getattr(run.config, n) for n in sorted(model)}
    return {n: v for n, v in changed.items() if n not in entry.settings}


def unit(method: Method) -> str:
    """Returns whom a row's guarantee is about: "user", "record" or "none".

    Raises:
        UserError: a setting out of range.
    """
    if not method.baseline:
        return "user"
    found = find(method.baseline, is_typed=True)
    return unit_of(found, _made(method.baseline, method.settings))


def _made(baseline: str, settings: Settings) -> Any:
    """Returns a method's own settings, without those of the run."""
    found = find(baseline, is_typed=True)
    known = {spec.name for spec in fields(found.Settings)}
    own = {name: value for name, value in settings.items() if name in known}
    return made_settings(found, own)
