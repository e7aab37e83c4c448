"""Methods that others published, each in one file, behind one contract.

`fedgs.baselines.contract` says what a method has to have; `METHODS` names them all.
This module imports no tensor library: a method is loaded when it is asked for.
"""

import importlib
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from fedgs.errors import UserError, wrap_error

if TYPE_CHECKING:
    from fedgs.baselines.contract import Baseline

# Name of a method -> "module:object", the object a `Baseline`. One line for each file.
METHODS: Mapping[str, str] = MappingProxyType(
    {
        "bdp-gan": "fedgs.baselines.bdp_gan:METHOD",
        "dp-merf": "fedgs.baselines.dp_merf:dp_merf",
        "dp-merf-ae": "fedgs.baselines.dp_merf:dp_merf_ae",
        "dp-sgd-gan": "fedgs.baselines.dp_sgd_gan:dp_sgd_gan",
        "dp-sgd-gan-strong": "fedgs.baselines.dp_sgd_gan:dp_sgd_gan_strong",
        "fedavg-gan": "fedgs.baselines.fedavg_gan:METHOD",
        "g-pate": "fedgs.baselines.g_pate:METHOD",
        "pate-gan": "fedgs.baselines.pate_gan:METHOD",
        "wgan-gp": "fedgs.baselines.wgan_gp:METHOD",
    }
)
PARTS = ("name", "title", "unit", "central", "Settings", "recipe")
PARTS += ("calibrated", "guarantees", "trainer")  # of a `Baseline`
TRUSTED_VARIABLE = "FEDGS_BASELINES"  # "module:object", comma-separated


def find(name: str, is_typed: bool = False) -> "Baseline":
    """Returns a method by its name, or by the place of one that is not of fedgs.

    A place is imported, and so runs code. It is taken from the user alone: from the
    command line, or from the environment variable FEDGS_BASELINES. A name that only
    stands in a run folder is not enough, because folders are passed on.

    Args:
        name: of `METHODS`, or "module:object".
        is_typed: the user gave the name on the command line.

    Raises:
        UserError: there is no such method, or its place is not trusted.
    """
    place = METHODS.get(name, name)
    if ":" not in place:
        known = ", ".join(sorted(METHODS))
        raise UserError(f"NAME = {name!r}: give one of {known}, or module:object")
    trusted = os.environ.get(TRUSTED_VARIABLE, "").split(",")
    if name not in METHODS and not is_typed and name not in trusted:
        raise UserError(
            f"baseline = {name!r}: the run folder names code that is not of fedgs; if "
            f"you trust it, set {TRUSTED_VARIABLE}={name}"
        )
    module, _, attribute = place.partition(":")
    remedy = "give a method that can be imported (PYTHONPATH), module:object"
    problem = f"baseline = {name!r}: cannot be imported"
    with wrap_error((ImportError, AttributeError), problem, remedy):
        method = getattr(importlib.import_module(module), attribute)
    if missing := [part for part in PARTS if not hasattr(method, part)]:
        what = f"is no method, it has no {missing[0]} (docs/baselines.md)"
        raise UserError(f"baseline = {name!r}: {what}; {remedy}")
    return cast("Baseline", method)
