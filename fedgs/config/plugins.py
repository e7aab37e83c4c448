"""Methods by their names, or by the place of one that is not of fedgs.

A place, "module:object", is imported, and so runs code. It is taken from the user
alone: from the command line, or from the environment variable FEDGS_METHODS. A name
that only stands in a run folder or in a message is not enough, because folders are
passed on, and a server may be hostile.

This module imports no tensor library: a method is loaded when it is asked for.
"""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any

from fedgs.config.fields import shortened
from fedgs.errors import UserError, reason_of

TRUSTED_VARIABLE = "FEDGS_METHODS"  # "module:object", comma-separated
GS_WGAN = "gs-wgan"
GROUP_MEANS = "group-means"
COHORT_CLASSIFIER = "cohort-classifier"
COHORT_COUNTS = "cohort-counts"
CENTRAL = "central"  # the method of runs of central baselines
# Of a run's setting `method`: each an object of `fedgs.methods.base.Method`.
METHODS: Mapping[str, str] = MappingProxyType(
    {
        GS_WGAN: "fedgs.methods.gs_wgan:METHOD",
        "means": "fedgs.methods.feature_means:MEANS",
        "scatter": "fedgs.methods.feature_means:SCATTER",
        "moments": "fedgs.methods.feature_means:MOMENTS",
        "parts": "fedgs.methods.feature_means:PARTS",
        "features": "fedgs.methods.feature_means:FEATURES",
        "pretrained-features": "fedgs.methods.feature_means:PRETRAINED_FEATURES",
        GROUP_MEANS: "fedgs.methods.group_means:METHOD",
        "fedavg-gan": "fedgs.methods.fedavg_gan:METHOD",
        "dp-merf": "fedgs.methods.dp_merf:METHOD",
        COHORT_CLASSIFIER: "fedgs.methods.cohort_classifier:METHOD",
        COHORT_COUNTS: "fedgs.methods.cohort_counts:METHOD",
    }
)
# Settings of methods of fedgs that need no tensor library to be read. All others, and
# those of methods that are not of fedgs, are found at the method: `Method.Settings`.
_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        GS_WGAN: "fedgs.config.method_settings:GsWganSettings",
        CENTRAL: "fedgs.config.method_settings:NetworkSettings",
        "means": "fedgs.config.feature_settings:MomentSettings",
        "scatter": "fedgs.config.feature_settings:MomentSettings",
        "moments": "fedgs.config.feature_settings:MomentSettings",
        "parts": "fedgs.config.feature_settings:MomentSettings",
        "features": "fedgs.config.feature_settings:TrunkSettings",
        "pretrained-features": "fedgs.config.feature_settings:PretrainedSettings",
        GROUP_MEANS: "fedgs.config.feature_settings:GroupMeansSettings",
    }
)
# Of a `Method`.
PARTS = ("Settings", "recipe", "terms", "state", "begin", "answer", "finish")


def settings_of_method(method: str) -> Any:
    """Returns the class that declares a method's settings and terms.

    Raises:
        UserError: there is no such method, or its place is not trusted.
    """
    # Settings are read at every start of the command line, where torch would take
    # seconds.
    if method not in _SETTINGS:
        return load("phases", method).Settings
    module, _, attribute = _SETTINGS[method].partition(":")
    return getattr(importlib.import_module(module), attribute)


def load(
    what: str,
    name: str,
    places: Mapping[str, str] = METHODS,
    parts: Sequence[str] = PARTS,
    is_typed: bool = False,
) -> Any:
    """Returns a method by its name, or by the place of one that is not of fedgs.

    Args:
        what: the name is of, for errors.
        name: a key of `places`, or "module:object".
        places: name -> "module:object".
        parts: that a method has to have.
        is_typed: the user gave the name on the command line.

    Raises:
        UserError: there is no such method, its place is not trusted, or it cannot be
            imported.
    """
    place = places.get(name, name)
    shown = shortened(name)
    if ":" not in place:
        known = ", ".join(sorted(places))
        raise UserError(f"{what} = {shown!r}: give one of {known}, or module:object")
    # Before the import, which would already run the code of a stranger.
    trusted = os.environ.get(TRUSTED_VARIABLE, "").split(",")
    if name not in places and not is_typed and name not in trusted:
        raise UserError(
            f"{what} = {shown!r}: this is code that is not part of fedgs; if you "
            f"trust it, set {TRUSTED_VARIABLE}={shown}"
        )
    module, _, attribute = place.partition(":")
    remedy = "give a method that can be imported (PYTHONPATH), module:object"
    where = f"{what} = {name!r}"
    with of_user_code(where, remedy):
        method = getattr(importlib.import_module(module), attribute)
        # Any object can be imported: one that is no method would fail in the middle of
        # a run.
        for part in parts:
            if not hasattr(method, part):
                problem = f"it is no method, it has no {part} (docs/baselines.md)"
                raise UserError(f"{where}: {problem}; {remedy}")
        if "Settings" in parts and not is_dataclass(method.Settings):
            raise UserError(f"{where}: its Settings is no dataclass; make it one")
    return method


@contextmanager
def of_user_code(where: str, remedy: str) -> Iterator[None]:
    """Turns whatever the user's code raises, an exit too, into a UserError.

    A script that ends with sys.exit() at import would otherwise end fedgs in silence.

    Args:
        where: the setting that names the code, and its value.
        remedy: ends the message.

    Raises:
        UserError: in the place of any other error.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        problem = f"{kind}: {reason_of(error)}".removesuffix(f": {kind}")
        raise UserError(f"{where}: {problem}; {remedy}") from error
