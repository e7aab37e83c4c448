"""A run's settings as the report shows them, and the command that trains it again.

Paths are shown without their folders.
"""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgs.app.debug.debug_request import BUGS, OF_DEBUG
from fedgs.app.flags import MOST_USED
from fedgs.app.report.run import RunFacts
from fedgs.app.tables import Table
from fedgs.config.fields import flag_words
from fedgs.config.method_settings import settings_of, settings_with
from fedgs.config.phases import written
from fedgs.config.plugins import GS_WGAN
from fedgs.config.recipes import recipe
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.tree import assigned

OF_CLIENTS = "of each client's own"  # what a deployed run does not know of its data


def settings_tables(runs: Sequence[RunFacts]) -> list[Table]:
    """Returns settings of one value in all runs that have them, then the others."""
    shown = [shown_settings(facts) for facts in runs]
    # A dictionary keeps the order in which the settings are declared.
    names: dict[str, None] = {}
    for settings in shown:
        names |= dict.fromkeys(settings)
    shared: list[list[str]] = []
    differing: list[list[str]] = []
    for name in names:
        # A baseline lacks most settings of a federated run. That it lacks one does not
        # make the others differ.
        values = {settings[name] for settings in shown if name in settings}
        if len(values) == 1:
            shared.append([name, *values])
            continue
        row = [name]
        for settings in shown:
            row.append(settings.get(name, "–"))
        differing.append(row)
    head = ["setting"]
    head += [facts.name for facts in runs]
    alike = Table("All settings", ["setting", "value"], shared, numeric=False)
    different = Table("What differs", head, differing, numeric=False)
    return [alike, different]


def versions_table(runs: Sequence[RunFacts]) -> Table:
    """Returns the versions of every run's software, and its machine."""
    names: dict[str, None] = {}
    for facts in runs:
        names |= dict.fromkeys(facts.versions)
    rows: list[list[str]] = []
    for name in names:
        row = [name]
        for facts in runs:
            version = facts.versions.get(name, "–")
            row.append(str(version))
        rows.append(row)
    head = ["package"]
    head += [facts.name for facts in runs]
    return Table("Versions", head, rows, numeric=False)


def shown_settings(facts: RunFacts) -> dict[str, str]:
    """Returns all settings; of a baseline its own, and those that it changed."""
    config = facts.config
    shown: dict[str, str] = {}
    if facts.baseline is None:
        # Not by the fields: one of them is the key that decides who takes part, which
        # to_flat leaves out.
        names = [*config.to_flat(), "counted"]
    else:
        names = [*_changed(facts)]
        own = facts.baseline.shown_settings()
        for name, value in own.items():
            shown[name] = str(value)
    for name in names:
        value = getattr(config, name)
        shown[name] = _shown(config, name, value)
    return shown


def shown_data(data: str) -> str:
    """Returns the name of a source of data, without that of a file or folder.

    >>> shown_data("npz:/home/ada/ward-3.npz"), shown_data("hf:ylecun/mnist")
    ('npz:FILE', 'hf:ylecun/mnist')
    """
    kind, colon, place = data.partition(":")
    # A data set of the hub has a public name. A folder in its place has none, and only
    # the options after ? are shown.
    if kind == "hf" and place.startswith("/"):
        _, mark, options = place.partition("?")
        return f"{kind}:FILE{mark}{options}"
    if colon and kind != "hf":
        return f"{kind}:FILE"
    return data


def _shown(config: ResolvedConfig, name: str, value: Any) -> str:
    if config.nodes is not None and name in settings_with("of_client"):
        return OF_CLIENTS
    if value is None or value == "":
        return "unset"
    if name == "data_dir":
        return "DATA"
    # Names of nodes may tell who takes part, so the page has only their number.
    if name == "nodes":
        return f"{len(config.node_names)} names"
    if name in settings_with("path"):
        return Path(str(value)).name
    if name in ("data", "public_data"):
        return shown_data(str(value))
    # As --set reads them.
    if name == "phases":
        return written(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _changed(facts: RunFacts) -> dict[str, Any]:
    """Returns the settings that are not the defaults or its recipe's, if it reads them.

    A method of its own starts from its recipe, in the command too.
    """
    config = facts.config
    baseline = facts.baseline
    if baseline is not None:
        base = None
        specs = [*baseline.settings_read(), *settings_of("node_sizes")]
    else:
        # The command gives the noise multiplier, and that unsets a recipe's target
        # epsilon. So a run's own target is written even if it is the recipe's.
        begun_with = recipe(_recipe_name(config))
        base = dataclasses.replace(begun_with, target_epsilon=None)
        # Fields without a group are the code's own, and no setting.
        every = dataclasses.fields(config)
        specs = [spec for spec in every if "group" in spec.metadata]
    changed: dict[str, Any] = {}
    for spec in specs:
        value = getattr(config, spec.name)
        default = getattr(base, spec.name, spec.default)
        # What is unset now cannot be set by a flag.
        if value is not None and value != default:
            changed[spec.name] = value
    return changed


def _recipe_name(config: ResolvedConfig) -> str:
    """Returns the recipe that a run's command starts from."""
    # `fedgs debug` starts from no other.
    if config.compares_groups:
        return config.method
    if config.recipe:
        return config.recipe
    # A program may have made the settings itself.
    if config.method == GS_WGAN:
        return "algorithm-2"
    return config.method


def train_command(facts: RunFacts) -> str:
    """Returns the command that trains this run again.

    A comment says what no command has: settings of an own method, which go into a file,
    a planted bug, and the keys of a deployment's clients.
    """
    config = facts.config
    changed = _changed(facts)
    known = {spec.name for spec in settings_of()}
    with_flags = {*MOST_USED}
    if facts.baseline is not None:
        words = [*facts.baseline.command()]
        with_flags = known
    elif config.compares_groups:
        words = _words_of_debug(config, changed)
        with_flags |= {*OF_DEBUG}
    elif config.nodes is None:
        words = ["fedgs", "train", "--recipe", _recipe_name(config)]
        if not {"test_fraction", "test_owners"} & changed.keys():
            changed["test_fraction"] = 0.0  # else the data decide what is held out
    else:
        words = ["fedgs", "deploy", "submit", "--server", "HOST:PORT"]
        words += ["--recipe", _recipe_name(config)]
    if config.nodes is not None:
        # What the clients' keys and their own commands decide.
        for name in ("nodes", "engine", *settings_with("of_client")):
            changed.pop(name, None)
    own: list[str] = []
    for name, value in changed.items():
        # Numbers keep all of their digits; `_shown` would round them.
        if isinstance(value, str):
            value = _shown(config, name, value)
        if name in with_flags:
            words += flag_words(name, value)
        elif name in known:
            words += ["--set", _assignment(name, value)]
        else:
            own.append(f"{name} = {json.dumps(value)}")
    command = shlex.join(words)
    if own:
        lines = ", ".join(own)
        command += f"  # in a TOML file: [{config.method!r}] {lines}"
    if config.corruption != "none" and "--bug" not in words:
        command += f"  # without the bug that was planted, {config.corruption}"
    if config.nodes is not None:
        command += "  # with --ca, and with a --client for each node"
    elif config.compares_groups and config.cohort is not None:
        command += "  # with your own two files of client names"
    return command


def _words_of_debug(config: ResolvedConfig, changed: dict[str, Any]) -> list[str]:
    """Returns the command of a comparison of groups: who is compared, and the bug.

    Args:
        config: the run's settings.
        changed: those that the command will give. Those that `fedgs debug` decides by
            itself are taken out.
    """
    own: Any = config.at_phase(0)
    healthy = changed.pop("healthy", None)
    suspicious = changed.pop("suspicious", None)
    if config.nodes is not None:
        words = ["fedgs", "deploy", "debug", "--server", "HOST:PORT"]
    else:
        words = ["fedgs", "debug"]
        if config.corruption != "none":
            # Each corruption has one name here.
            names = {corruption: bug for bug, corruption in BUGS.items()}
            bug = names[config.corruption]
            fraction = str(config.corruption_fraction)
            words += ["--bug", bug, "--fraction", fraction]
    if suspicious is None:
        return [*words, "--each"]
    if config.cohort is not None and config.nodes is None:
        # Two files of names, whose clients the command has dealt to groups of one size.
        for name in ("cohort", "cohorts", "num_clients"):
            changed.pop(name, None)
        changed["clients_per_group"] = config.num_clients // (2 * own.groups)
        healthy = "healthy.txt"
        suspicious = "suspicious.txt"
    if healthy is not None:
        words += ["--healthy", healthy]
    return [*words, "--suspicious", suspicious]


def _assignment(name: str, value: Any) -> str:
    """Returns what `--set` reads as this setting and value.

    >>> _assignment("partition", "iid"), _assignment("healthy", "1")
    ('partition=iid', 'healthy="1"')
    """
    if name == "phases":
        value = written(value)
    if isinstance(value, str):
        text = f"{name}={value}"
        if assigned([text])[name] == value:
            return text
    return f"{name}={json.dumps(value)}"
