"""Methods that others published, each in one file, behind one contract.

`baselines.contract` says what a method has to have; `METHODS` names them all.
This module imports no tensor library: a method is loaded when it is asked for.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from fedgs.config.plugins import load

if TYPE_CHECKING:
    from experiments.baselines.contract import Baseline

# Name of a method -> "module:object", the object a `Baseline`. One line for each file.
METHODS: Mapping[str, str] = MappingProxyType(
    {
        "bdp-gan": "experiments.baselines.bdp_gan:METHOD",
        "dp-merf": "experiments.baselines.dp_merf:dp_merf",
        "dp-merf-ae": "experiments.baselines.dp_merf:dp_merf_ae",
        "dp-sgd-gan": "experiments.baselines.dp_sgd_gan:dp_sgd_gan",
        "dp-sgd-gan-strong": "experiments.baselines.dp_sgd_gan:dp_sgd_gan_strong",
        "g-pate": "experiments.baselines.g_pate:METHOD",
        "pate-gan": "experiments.baselines.pate_gan:METHOD",
        "wgan-gp": "experiments.baselines.wgan_gp:METHOD",
    }
)
PARTS = ("name", "title", "unit", "Settings", "recipe")
PARTS += ("calibrated", "guarantees", "trainer")  # of a `Baseline`


def find(name: str, is_typed: bool = False) -> "Baseline":
    """Returns a method by its name, or by its place; see `fedgs.config.plugins`.

    Args:
        name: of `METHODS`, or "module:object".
        is_typed: the user gave the name on the command line.

    Raises:
        UserError: there is no such method, or its place is not trusted.
    """
    return cast("Baseline", load("baseline", name, METHODS, PARTS, is_typed))
