"""Central methods that others published, each one class in one file.

`baselines.baseline` says what a method is; `BASELINES` names them all.
This module imports no tensor library: a method is loaded when it is asked for.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from fedgs.config.plugins import load

if TYPE_CHECKING:
    from experiments.baselines.baseline import Baseline

# Name of a method -> "module:object", a subclass of `Baseline`.
BASELINES: Mapping[str, str] = MappingProxyType(
    {
        "bdp-gan": "experiments.baselines.bdp_gan:BdpGan",
        "dp-merf": "experiments.baselines.central_dp_merf:CentralDPMerf",
        "dp-merf-ae": "experiments.baselines.central_dp_merf:AutoencoderDPMerf",
        "dp-sgd-gan": "experiments.baselines.dp_sgd_gan:DPSGDGan",
        "dp-sgd-gan-strong": "experiments.baselines.dp_sgd_gan:StrongDPSGDGan",
        "g-pate": "experiments.baselines.g_pate:GPate",
        "pate-gan": "experiments.baselines.pate_gan:PateGan",
        "wgan-gp": "experiments.baselines.wgan_gp:WganGp",
    }
)
# What a class must have to be one.
_PARTS = ("name", "title", "unit", "Settings", "recipe", "guarantees", "step")


def find(name: str, is_typed: bool = False) -> "type[Baseline[Any]]":
    """Returns a method by its name, or by its place; see `fedgs.config.plugins`.

    Args:
        name: a key of `BASELINES`, or "module:object".
        is_typed: the user gave the name on the command line.

    Raises:
        UserError: there is no such method, or its place is not trusted.
    """
    found = load("baseline", name, BASELINES, _PARTS, is_typed)
    return cast("type[Baseline[Any]]", found)
