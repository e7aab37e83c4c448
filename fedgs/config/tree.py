"""Settings as a tree: what a TOML file, `--set` and `fedgs settings` have in common.

    num_clients = 500              a plain name, before the first table

    [privacy]                      a table for each group of settings
    delta = 1e-6

    [[phases]]                     one for each phase, with settings of its method
    method = "gs-wgan"
    rounds = 40
    batch_size = 16

On the command line that is `--set num_clients=500 --set privacy.delta=1e-6`. This
module imports no tensor library.
"""

import dataclasses
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fedgs.config.fields import shortened
from fedgs.config.method_settings import settings_of
from fedgs.config.run_config import RunConfig
from fedgs.config.settings import GROUPS
from fedgs.errors import UserError

TABLES = {group.lower(): group for group in GROUPS}
WIDTH = 88


def table_of(name: str) -> str | None:
    """Returns the table that a setting is in; None of a setting that fedgs lacks."""
    for spec in settings_of(name):
        if spec.name == name:
            return spec.metadata["group"].lower()
    return None


def flattened(
    tree: Mapping[str, Any],
    where: str,
    methods: Sequence[str],
) -> dict[str, Any]:
    """Returns the settings of a tree by their plain names.

    Args:
        tree: settings, and tables of them.
        where: names the source, for errors.
        methods: those of the run; the own settings of a method that is not of fedgs may
            stand in a table of its name.

    Raises:
        UserError: an unknown table, or a setting in the wrong one.
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            found[key] = value
            continue
        if key not in TABLES and key not in methods:
            known = ", ".join(f"[{name}]" for name in (*TABLES, *methods))
            raise UserError(
                f"{where}: [{shortened(key)}] is no table of settings; give {known}"
            )
        for name, setting in value.items():
            own = table_of(name)
            # A setting in the wrong table is refused, not moved: the file would say
            # something else than what holds.
            if own is None and key in TABLES:
                raise UserError(
                    f"{name}: it is no setting of [{key}], in {where}; `fedgs "
                    "settings` lists all settings, and a method of your own has a "
                    "table of its name"
                )
            if own is not None and own != key:
                raise UserError(
                    f"{name}: it is in [{shortened(key)}] of {where}; give it in "
                    f"[{own}]"
                )
            found[name] = setting
    return found


def assigned(words: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of `--set`: each KEY=VALUE, or TABLE.KEY=VALUE.

    A value is read as in a TOML file, and is a text if it is nothing else there.

    >>> assigned(["privacy.delta=1e-6", "partition=iid", "download=true"])
    {'delta': 1e-06, 'partition': 'iid', 'download': True}

    Raises:
        UserError: a malformed word, or a setting in the wrong table.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        # The table is optional, because names of settings are unique without it.
        table, dot, name = key.strip().rpartition(".")
        if not equals or not name:
            raise UserError(f"set = {shortened(word)!r}: give --set KEY=VALUE")
        own = table_of(name)
        if dot and own is not None and table != own:
            raise UserError(f"set = {shortened(word)!r}: give --set {own}.{name}=...")
        found[name] = _value_of(value.strip())
    return found


def _value_of(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a word without quotes, which a shell takes away
    # A date or a table is not meant: no setting is one, but a path may look like it.
    if isinstance(value, str | int | float | bool | list):
        return value
    return text


def as_toml(config: RunConfig, undecided: Collection[str] = ()) -> Iterator[str]:
    """Yields the lines of a TOML file with all settings, each below its help.

    Settings that are unset are comments. `fedgs train --config` reads the file, with
    the name of the recipe.

    Privacy: public, as settings are; paths and seeds are among them.

    Args:
        config: the configuration of a recipe or a run.
        undecided: names of settings that follow from the data unless they are given.
    """
    if config.recipe:
        yield "# Recipe to which these settings belong."
        yield f"recipe = {_written(config.recipe)}"
        yield ""
    # Settings of methods that the run does not have are left out: they are refused.
    known = {spec.name for spec in dataclasses.fields(config)}
    for table, group in TABLES.items():
        specs = [
            spec
            for spec in settings_of(group)
            if spec.name in known and spec.name != "phases"  # has tables of its own
        ]
        if not specs:
            continue
        yield f"[{table}]"
        for spec in specs:
            value = None
            if spec.name not in undecided:
                value = getattr(config, spec.name)
            yield from _setting_lines(spec, value)
        yield ""
    if "phases" in undecided:
        return
    for phase in config.phases:
        yield "[[phases]]"
        yield f"method = {_written(phase.method)}"
        if phase.rounds is not None:
            yield f"rounds = {phase.rounds}"
        if phase.share is not None:
            yield f"share = {phase.share!r}  # of the privacy, relative to other phases"
        for name, value in phase.settings:
            yield f"{name} = {_written(value)}"
        yield ""


def _setting_lines(spec: "dataclasses.Field[Any]", value: Any) -> Iterator[str]:
    text = spec.metadata["help"]
    choices = spec.metadata.get("choices")
    if choices:
        text += f" One of {', '.join(choices)}."
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,  # names such as chest-xray stay whole
    )
    if value is None:
        yield f"# {spec.name} = unset"
    else:
        yield f"{spec.name} = {_written(value)}"


def _written(value: Any) -> str:
    """Returns a scalar as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
