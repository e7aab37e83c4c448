"""At which scale an experiment runs, what that says of its numbers, and its flags.

A scale is a set of settings over a recipe. `paper` changes nothing: the recipe's own
numbers, which need a GPU and days. `small` is for two CPU cores and about an hour:
its numbers say nothing about the published ones, and every label says so.
"""

import contextlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgs.app.evaluation.evaluate import FAST, FULL
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.config.fields import check_ranges, flag
from fedgs.config.recipes import overridden, recipe
from fedgs.config.run_config import RunConfig
from fedgs.config.settings import settings_of
from fedgs.data.sources import with_absolute_path
from fedgs.errors import UserError
from fedgs.evaluation.quality import NUM_SPLITS

Settings = Mapping[str, Any]
SAME_IMAGES = {"mnist-by-writer": "mnist"}  # one network for both
SMALL_PAPER_MODE = {
    "num_clients": 100,
    "num_rounds": 100,
    "warm_start_rounds": 2,
    "generator": "dcgan",
    "generator_dim": 16,
    "discriminator_dim": 16,
}
SCALES: dict[str, dict[str, Settings]] = {  # scale: recipe: settings
    "paper": {},
    "small": {
        "algorithm-1": SMALL_PAPER_MODE,
        "algorithm-2": SMALL_PAPER_MODE,
        "full-participation": {
            "num_clients": 100,
            "clients_per_node": 25,
            "num_rounds": 100,
        },
    },
}


def configured(recipe_name: str, scale: str, *overrides: Settings) -> RunConfig:
    """Returns a recipe's configuration at a scale, with settings over it.

    `""` is unset.

    Raises:
        UserError: an unknown scale, setting or value.
    """
    if scale not in SCALES:
        raise UserError(f"scale = {scale!r}: give --scale one of {', '.join(SCALES)}")
    config = recipe(recipe_name)
    for settings in (SCALES[scale].get(recipe_name, {}), *overrides):
        config = overridden(config, settings)
    return config.validate()


def differences(config: RunConfig, recipe_name: str) -> dict[str, tuple[Any, Any]]:
    """Returns the settings in which a run is not its recipe: (the run's, the recipe's).

    Data, seed and what changes no result are left out.
    """
    own, known = config.to_flat(), recipe(recipe_name).to_flat()
    specs = settings_of("Federation", "Privacy", "Training", "Model")
    names = [spec.name for spec in specs]
    if config.node_sizes is not None:
        names.remove("clients_per_node")  # has no effect
    return {n: (own[n], known[n]) for n in names if own[n] != known[n]}


def label(config: RunConfig, recipe_name: str) -> str:
    """Returns the scale of a run in words: where it is not its recipe.

    >>> label(configured("algorithm-2", "small"), "algorithm-2").split(", ")[0]
    'num_clients 100 (recipe: unset)'
    """
    found = differences(config, recipe_name)
    texts = [
        f"{name} {_word(ours)} (recipe: {_word(theirs)})"
        for name, (ours, theirs) in found.items()
    ]
    return ", ".join(texts) or "as the recipe"


def _word(value: Any) -> str:
    if value == "":
        return "unset"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Returns settings from texts SETTING=VALUE; a setting without a value is unset.

    >>> parse_settings(["num_rounds=3", "generator=dcgan", "num_clients="])
    {'num_rounds': 3, 'generator': 'dcgan', 'num_clients': ''}

    Raises:
        UserError: a text of another form.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"set = {text!r}: give --set SETTING=VALUE")
        settings[name] = value
        with contextlib.suppress(tomllib.TOMLDecodeError):  # else it is a text
            settings[name] = tomllib.loads(f"value = {value}")["value"]
    return settings


# ------------------------------------------------------------------ the command line


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What the commands of this room are asked for; each flag's help says what it is.

    Raises:
        UserError: a value out of range.
    """

    data: str = flag("mnist-by-writer", "As of fedgs train.")
    data_dir: str | None = flag(None, "As of fedgs train.")
    test_fraction: float = flag(0.0, "Of data without a test split.")
    scale: str = flag("small", "See docs/evaluation.md.", choices=tuple(SCALES))
    count: int | None = flag(
        None, "Synthetic images that are compared.", at_least=NUM_SPLITS
    )
    full_evaluation: bool = flag(False, "Not fedgs evaluate --fast.")
    changes: list[str] | None = flag(
        None, "SETTING=VALUE of all runs; again for more.", names=("--set",)
    )

    def __post_init__(self) -> None:
        """Checks every field by itself."""
        check_ranges(self)

    @property
    def reading(self) -> dict[str, Any]:
        """The settings that say how the data is read."""
        reading: dict[str, Any] = {"test_fraction": self.test_fraction}
        if self.data_dir is not None:
            reading["data_dir"] = str(Path(self.data_dir).expanduser().absolute())
        return reading

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of all runs over their recipe."""
        changes = parse_settings(self.changes or ())
        return {"data": with_absolute_path(self.data), **self.reading, **changes}

    @property
    def protocol(self) -> EvaluationRequest:
        """How images are compared with the real ones; the images are still missing."""
        data = with_absolute_path(self.data)
        sizes = FULL if self.full_evaluation else FAST
        return EvaluationRequest(
            source="",
            data=SAME_IMAGES.get(data, data),
            reading=self.reading,
            count=self.count or sizes.synthetic,
            metrics=("images", "cnn"),
            fast=not self.full_evaluation,
        )
