"""A run's settings as the report shows them, and the command that trains it again.

Paths are shown without their folders.
"""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgs.app.report.run import RunFacts
from fedgs.app.tables import Table
from fedgs.config.fields import flag_words
from fedgs.config.method_settings import settings_of, settings_with
from fedgs.config.plugins import GS_WGAN
from fedgs.config.recipes import recipe
from fedgs.config.run_config import ResolvedConfig


def settings_tables(runs: Sequence[RunFacts]) -> list[Table]:
    """Returns settings of one value in all runs that have them, then the others."""
    shown = [shown_settings(facts) for facts in runs]
    names = dict.fromkeys(name for settings in shown for name in settings)
    values = {n: list(dict.fromkeys(s[n] for s in shown if n in s)) for n in names}
    shared = [[n, *found] for n, found in values.items() if len(found) == 1]
    differing = [
        [name, *(settings.get(name, "–") for settings in shown)]
        for name, found in values.items()
        if len(found) > 1
    ]
    head = ["setting", *(facts.name for facts in runs)]
    return [
        Table("All settings", ["setting", "value"], shared, numeric=False),
        Table("What differs", head, differing, numeric=False),
    ]


def versions_table(runs: Sequence[RunFacts]) -> Table:
    """Returns the versions of every run's software, and its machine."""
    names = dict.fromkeys(name for facts in runs for name in facts.versions)
    rows = [[n, *(str(f.versions.get(n, "–")) for f in runs)] for n in names]
    head = ["package", *(facts.name for facts in runs)]
    return Table("Versions", head, rows, numeric=False)


def shown_settings(facts: RunFacts) -> dict[str, str]:
    """Returns all settings; of a baseline its own, and those that it changed."""
    config = facts.config
    names = [*config.to_flat(), "counted"]  # no field that is secret
    shown: dict[str, str] = {}
    if facts.baseline is not None:
        names = [*_changed(facts)]
        own = facts.baseline.shown_settings()
        shown = {name: str(value) for name, value in own.items()}
    return shown | {name: _shown(config, name, getattr(config, name)) for name in names}


def shown_data(data: str) -> str:
    """Returns the name of a source of data, without that of a file or folder.

    >>> shown_data("npz:/home/ada/ward-3.npz"), shown_data("hf:ylecun/mnist")
    ('npz:FILE', 'hf:ylecun/mnist')
    """
    kind, colon, place = data.partition(":")
    if kind == "hf" and place.startswith("/"):
        return f"{kind}:FILE{place[len(place.partition('?')[0]) :]}"
    if colon and kind != "hf":
        return f"{kind}:FILE"
    return data


def _shown(config: ResolvedConfig, name: str, value: Any) -> str:
    if value is None or value == "":
        return "unset"
    if name == "data_dir":
        return "DATA"
    if name == "nodes":  # may tell who takes part
        return f"{len(config.node_names)} names"
    if name in settings_with("path"):
        return Path(str(value)).name
    if name in ("data", "public_data"):
        return shown_data(str(value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _changed(facts: RunFacts) -> dict[str, Any]:
    """Returns the settings that are not the defaults or its recipe's, if it reads them.

    A method of its own starts from its recipe, in the command too.
    """
    config = facts.config
    baseline = facts.baseline
    base = None
    specs = [s for s in dataclasses.fields(config) if "group" in s.metadata]
    if baseline is not None:
        specs = [*baseline.settings_read(), *settings_of("node_sizes")]
    else:
        base = dataclasses.replace(recipe(_recipe_name(config)), target_epsilon=None)
    values = {spec.name: getattr(config, spec.name) for spec in specs}
    defaults = {s.name: (getattr(base, s.name, s.default), None) for s in specs}
    return {name: v for name, v in values.items() if v not in defaults[name]}


def _recipe_name(config: ResolvedConfig) -> str:
    """Returns the recipe that a run's command starts from."""
    if config.recipe:
        return config.recipe
    # A program may have made the settings itself.
    if config.method == GS_WGAN:
        return "algorithm-2"
    return config.method


def train_command(facts: RunFacts) -> str:
    """Returns the command that trains this run again.

    An own method's settings have no flags; a comment says what goes into a file.
    """
    config = facts.config
    if facts.baseline is None:
        words = ["fedgs", "train", "--recipe", _recipe_name(config)]
    else:
        words = [*facts.baseline.command()]
    changed = _changed(facts)
    for name, value in changed.items():
        if isinstance(value, str):
            changed[name] = _shown(config, name, value)
    typed = {spec.name for spec in settings_of()}
    own = [f"{n} = {json.dumps(changed.pop(n))}" for n in [*changed] if n not in typed]
    if own:
        table = f"  # in a TOML file: [{config.method!r}] {', '.join(own)}"
    else:
        table = ""
    for name, value in changed.items():
        words += flag_words(name, value)
    return shlex.join(words) + table
