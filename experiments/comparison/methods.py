"""The grid of `fedgs compare`: which methods, at which epsilons, on which data.

A method of somebody else joins by its registration in `baselines.BASELINES`, or by
--method module:object; without an entry here it has its own defaults.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from experiments.baselines import BASELINES, find, g_pate, pate_gan
from experiments.baselines.baseline_run import made_settings
from experiments.comparison.options import CompareRequest
from experiments.grid.cells import (
    NO_NOISE,
    CellMethod,
    Cells,
    CellSettings,
    Source,
    unit,
)
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError

EPSILONS = (10.0, 3.0, 1.0)
GRID_DELTA = RunConfig().delta  # of all cells
CAP = 100  # images of a user, of a data set of one's own
KNOWN = Cells.read(Path(__file__).with_suffix(".toml"))
# Methods whose settings were chosen with test accuracies on these data in view; those
# of federated DP-MERF are as published.
_CHOSEN_BY_DIGITS = [
    name
    for name, how in KNOWN.methods.items()
    if how.recipe not in ("", "dp-merf-federated")
]
_CHOSEN_BY_DIGITS.append("wgan-gp")
IN_VIEW: Mapping[str, list[str]] = {
    "mnist": _CHOSEN_BY_DIGITS,
    "mnist-by-writer": _CHOSEN_BY_DIGITS,
    "fashion-mnist": [
        "moments",
        "moments-parts",
        "feature-means",
        "feature-means-gs-wgan",
    ],
}

# BDP-GAN's noise by steps, reduced and published, and by epsilon: that of
# `fedgs.privacy.poisson.smallest_noise` for 52,000 records. With more of them, as in
# the three data sets of the grid, the epsilon is smaller, and every row says its own.
CLASSICAL_NOISE: Mapping[int, Mapping[float, float]] = {
    700: {10.0: 0.361, 3.0: 0.516, 1.0: 0.653},
    23_437: {10.0: 1.663, 3.0: 4.263, 1.0: 11.29},
}


def _noise(baseline: str, settings: Any, epsilon: float) -> CellSettings:
    """Returns the noise of a method whose own target is not an epsilon of zero-out.

    All user-level rows have that. Of PATE methods it is the noise where a teacher that
    casts no vote is hidden; BDP-GAN's own epsilon is no target, it is at the classical.
    """
    if baseline == "g-pate":
        noise = g_pate.smallest_noise(settings, 1.0, epsilon, GRID_DELTA)
        return {"answer_noise": noise}
    if baseline == "pate-gan":
        inverse = pate_gan.largest_inverse_noise(settings, 1.0, epsilon, GRID_DELTA)
        return {"inverse_noise": inverse}
    if baseline == "bdp-gan":
        return {"noise_per_clip": CLASSICAL_NOISE[settings.steps][epsilon]}
    return {}


def grid(request: CompareRequest, settings: CellSettings) -> Cells:
    """Returns all cells that a call knows.

    Args:
        request: the request of the call.
        settings: of `OF_DATA`; with `data` the user's data set takes the place of the
            grid's three.

    Raises:
        UserError: an unknown method, or a setting out of range.
    """
    if "data" in settings:
        name = re.sub(r"\W+", "-", settings["data"]).strip("-")
        data = {name: Source(settings, cap=CAP)}
    else:
        data = KNOWN.with_settings(settings).data
    known = KNOWN
    if request.full:
        known = KNOWN.at_full_scale()
    methods: dict[str, CellMethod] = {}
    for name, how in known.methods.items():
        # A method may be of some data sets only, and a data set of one's own is none.
        is_of_data = set(how.data) <= set(data)
        if how.baseline in ("", *BASELINES) and is_of_data:
            methods[name] = how
    listed = {how.baseline for how in methods.values()}
    for name in (*BASELINES, *request.method):
        if name not in listed:
            found = find(name, is_typed=True, setting="method")
            row = re.sub(r"\W+", "-", found.name)
            if row in methods:  # both would lie in the same folders
                raise UserError(f"method = {name}: {row} is a row already; rename it")
            methods[row] = CellMethod(baseline=name)
    for name, how in methods.items():
        if how.baseline:
            methods[name] = _of_others(how)
    is_of_own_data = bool(settings.keys() - {"data_dir", "device"})
    if is_of_own_data and "bdp-gan" in methods:
        # How many images there are is not known, and its noise depends on it.
        bdp_gan = methods["bdp-gan"]
        free = {NO_NOISE: bdp_gan.epsilons[NO_NOISE]}
        methods["bdp-gan"] = bdp_gan._replace(epsilons=free)
    return Cells(data, methods)


def _of_others(method: CellMethod) -> CellMethod:
    """Returns a method of others with its noise by epsilon, and its cap."""
    whose = unit(method)
    # What guarantees nothing has one row, whatever epsilons the others have.
    epsilons: dict[float, Mapping[str, Any]] = {NO_NOISE: {}}
    if whose != "none":
        values = {**method.settings, **method.reduced}
        made = _made(method.baseline, values)
        epsilons = {each: _noise(method.baseline, made, each) for each in EPSILONS}
    epsilons |= method.epsilons
    return method._replace(epsilons=epsilons, is_capped=whose == "record")


def _made(baseline: str, settings: Mapping[str, Any]) -> Any:
    """Returns a method's own settings, without those of the run."""
    found = find(baseline, is_typed=True)
    # The rest are settings of the run, such as the generator's width.
    known = {spec.name for spec in fields(found.Settings)}
    own = {name: value for name, value in settings.items() if name in known}
    return made_settings(found, own)
