"""Central methods that others published, each one class in one file.

`baselines.baseline` says what a method is; `BASELINES` names them all.
This module imports no tensor library: a method is loaded when it is asked for.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from fedgs.config.plugins import load, of_user_code
from fedgs.errors import raise_if_any

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
METHOD_UNITS = ("user", "record", "none")
# What a class must have to be one.
_PARTS = ("name", "title", "unit", "Settings", "recipe", "guarantees", "step")


def find(
    name: str,
    is_typed: bool = False,
    setting: str = "baseline",
) -> "type[Baseline[Any]]":
    """Returns a method by its name, or by its place; see `fedgs.config.plugins`.

    Args:
        name: a key of `BASELINES`, or "module:object".
        is_typed: the user gave the name on the command line.
        setting: what the user gave the name as, for errors.

    Raises:
        UserError: there is no such method, its place is not trusted, or it is not as
            `Baseline` says.
    """
    found = load(setting, name, BASELINES, _PARTS, is_typed)
    where = f"{setting} = {name!r}"
    raise_if_any(where, _problems(found))
    with of_user_code(where, "give every setting of the class a default"):
        found.Settings()
    return cast("type[Baseline[Any]]", found)


def _problems(method: Any) -> Iterator[str]:
    for part in ("name", "title"):
        value = getattr(method, part)
        if not isinstance(value, str) or not value:
            yield f"{part} = {value!r}; give the class a text as its {part}"
    if method.unit not in METHOD_UNITS:
        yield f"unit = {method.unit!r}; give the class one of {', '.join(METHOD_UNITS)}"
    if not isinstance(method.recipe, Mapping):
        yield f"recipe = {method.recipe!r}; give the class a table of settings"
