"""Flags that are made from dataclasses, those that commands share, and their errors.

`settings_flags` makes one flag for each setting of a run, `request_flags` one for each
field that `fedgs.config.fields.flag` declares of what a command is asked for.
`run_app` ends a command line: bad input is one line and exit code 2.
"""

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from fedgs.app.streams import BROKEN_PIPE, lost
from fedgs.app.tables import folded
from fedgs.config.method_settings import field_type, settings_of
from fedgs.config.recipes import DEFAULT, RECIPES, recipe
from fedgs.config.tree import assigned
from fedgs.errors import UserError, printable, reason_of, refused_by_system

RecipeOption = Annotated[
    str | None, typer.Option(help=f"Recipe to start from: {', '.join(RECIPES)}.")
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="TOML file with settings. Example: own.toml.")
]
OutputOption = Annotated[
    Path,
    typer.Option(
        help="Folder of the results. If it exists, the work in it is continued."
    ),
]
DataDirOption = Annotated[str, typer.Option(help="Folder that contains the data sets.")]
RunArgument = Annotated[
    Path, typer.Argument(help="Run folder: the --output of the training.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.")
]
Command = Callable[..., None]
# A flag in an error, and the word after it, which may be its value: errors say "give
# --device cpu", but also "give --device or ...".
_FLAG = re.compile(
    r"--(?P<no>no-)?(?P<name>[a-z][a-z-]+)(?P<value> ('[^']*'|[\w.:-]+(?!\w)))?"
)
_NO_VALUES = [
    "a",
    "an",
    "and",
    "at",
    "for",
    "in",
    "is",
    "of",
    "one",
    "or",
    "so",
    "the",
    "to",
    "which",
    "whose",
    "with",
]
# Names of the flags that the running command has.
_RUNNING: ContextVar[frozenset[str]] = ContextVar("running", default=frozenset())
INTERRUPTED = 130  # exit code of a shell after Ctrl-C
NAMES = tuple[str, ...]  # on the command line one text, comma-separated


def eager(name: str, text: str, callback: Callable[..., None]) -> Any:
    """Returns a flag whose callback is called before anything else is looked at."""
    return typer.Option(name, help=text, callback=callback, is_eager=True)


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting that `fedgs settings` lists; can be repeated. Example: "
        "privacy.delta=1e-6.",
        rich_help_panel="Options",
    ),
]
# The settings that have flags where a run is started; `--set` gives all others.
MOST_USED = (
    "data",
    "data_dir",
    "image_size",
    "test_fraction",
    "test_owners",
    "num_clients",
    "clients_per_node",
    "target_epsilon",
    "noise_multiplier",
    "relation",
    "num_rounds",
    "engine",
    "device",
    "output",
    "seed",
)


def run_app(app: typer.Typer, words: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    Args:
        app: its commands.
        words: the words of the command line; this process's own when None.
    """
    code = 2
    problem = ""
    _RUNNING.set(frozenset())
    try:
        # Not standalone: typer would print errors in its own form, and end the process.
        code = app(words, standalone_mode=False) or 0
        if code == INTERRUPTED:  # typer makes it of Ctrl-C
            print("Interrupted.", file=sys.stderr)
    except click.UsageError as error:
        problem = error.format_message()
        if problem:  # else the help was printed
            if error.ctx:
                where = error.ctx.command_path
            else:
                where = "fedgs"
            problem = f"{_without_flag(error) or problem} See `{where} --help`."
    except UserError as error:
        # Whatever names of files it quotes, it commands no terminal.
        problem = printable(_FLAG.sub(_as_set, str(error)))
    except OSError as error:  # what no command explains better
        reason = printable(refused_by_system(error))
        problem = f"{reason}; check its path, its permissions and the disk"
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise  # torch has no other word for a full memory
        problem = (
            f"memory is full ({reason_of(error)}); use fewer or smaller images or "
            "networks"
        )
    # What the command printed last may still wait in a buffer: only now is it known
    # whether all of it arrived.
    lost_output = lost()
    if isinstance(lost_output, BrokenPipeError):
        # `fedgs ... | head`: the reader has what it wanted, so nothing is said.
        code = code or BROKEN_PIPE
    elif lost_output is not None and not problem:
        problem = f"standard output cannot be written: {reason_of(lost_output)}"
        code = code or 2
    if problem:
        print(folded(f"Error: {problem}", sys.stderr), file=sys.stderr)
    return code


def _without_flag(error: click.UsageError) -> str:
    """Returns what to say of a flag that is a setting without one; "" of all others."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    flags = {parameter.name for parameter in error.ctx.command.params}
    name = error.option_name.lstrip("-").replace("-", "_")
    is_setting = any(spec.name == name for spec in settings_of(name))
    if "set" not in flags or not is_setting:
        return ""
    return f"The setting {name} has no flag here: give --set {name}=VALUE."


def _as_set(found: "re.Match[str]") -> str:
    """Returns what the running command takes in place of a flag that it lacks.

    Errors name a setting by its flag, whichever command it was given to.
    """
    name = found["name"].replace("-", "_")
    flags = _RUNNING.get()
    is_setting = any(spec.name == name for spec in settings_of(name))
    if "set" not in flags or name in flags or not is_setting:
        return found[0]
    value = found["value"]
    # A flag that is on or off has no word for its value.
    if found["no"]:
        return f"--set {name}=false{value or ''}"
    kind, _ = field_type(name)
    if kind is bool:
        return f"--set {name}=true{value or ''}"
    # A word of the sentence stays where it is; a value moves behind the "=".
    if value is None or value.strip() in _NO_VALUES:
        return f"--set {name}=...{value or ''}"
    return f"--set {name}={value.strip()}"


def defaults_of(name: str) -> dict[str, Any]:
    """Returns what the help of a command says is the default of each setting.

    Args:
        name: the recipe that the command takes if the user names none.
    """
    defaults = dict(vars(recipe(name)))
    if name == DEFAULT:
        defaults["num_rounds"] = None  # follows from the clients and the noise
    return defaults


def run_command(command: Command, words: Sequence[str] | None = None) -> int:
    """Runs a module's one command, with a flag for each parameter; see `run_app`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return run_app(app, words)


def settings_flags(
    *chosen: str,
    defaults: Mapping[str, Any] | None = None,
    has_set: bool = False,
) -> Callable[[Command], Command]:
    """Adds one flag per setting to a command, which gets those given as `settings`.

    Args:
        *chosen: groups and names of RunConfig's fields.
        defaults: that the help says in place of RunConfig's; None says none.
        has_set: whether `--set` gives all other settings.
    """
    known = defaults or {}
    flags: list[inspect.Parameter] = []
    if chosen:  # `settings_of` without names means all settings
        for spec in settings_of(*chosen):
            default = known.get(spec.name, spec.default)
            flags.append(_setting_flag(spec, default))
    if has_set:
        kind, option = typing.get_args(SetOption)
        flags.append(_parameter("set", kind, option))
    return lambda command: _with_flags(command, flags, "settings")


def request_flags(
    *requests: type[Any],
    has_defaults: bool = True,
) -> Callable[[Command], Command]:
    """Adds the flags of dataclasses to a command, which gets their values as `given`.

    Args:
        *requests: the dataclasses; of fields with the same name the first one counts.
        has_defaults: whether a flag that is not given has its field's default, and the
            help shows it; else it is missing in `given`.
    """
    flags: dict[str, inspect.Parameter] = {}
    for request in requests:
        hints = typing.get_type_hints(request)
        for spec in dataclasses.fields(request):
            if "help" in spec.metadata and spec.name not in flags:
                flags[spec.name] = _request_flag(spec, hints[spec.name], has_defaults)
    return lambda command: _with_flags(command, [*flags.values()], "given")


def refuse_empty(name: str, value: object) -> None:
    """Refuses a flag without a value, as of a variable that is unset in a script.

    It would count as a setting that nobody gave: a run of everybody and not of a
    cohort, for example.

    Raises:
        UserError: names it.
    """
    if value == "":
        raise UserError(f"{name} is empty: give it a value, or leave the flag out")


def _with_flags(
    command: Command,
    flags: Sequence[inspect.Parameter],
    receiver: str,
) -> Command:
    """Returns a command with more flags, which gets all that are set as one argument.

    Args:
        command: has a parameter `receiver`.
        flags: None means: not given.
        receiver: gets the flags' values by name, without those that are not given.
    """
    names = frozenset(flag.name for flag in flags)

    # typer makes a command line of a function's signature. So this function gets the
    # signature of the command with the flags in the place of `receiver`, and passes on
    # what typer calls it with.
    def run(**arguments: Any) -> None:
        # A command may be wrapped twice, for `given` and for `settings`: both count.
        _RUNNING.set(_RUNNING.get() | names)
        own: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in names:
                own[name] = value
            # A flag that may be repeated is an empty list if it is not given.
            elif value not in (None, []):
                # Not of a request, whose lists may be empty, as --only of compare.
                if receiver == "settings":
                    refuse_empty(name, value)
                given[name] = value
        others = assigned(given.pop("set", ()))
        for name in sorted(others):
            if name in given:
                raise UserError(
                    f"{name}: it is given twice; leave out --set {name}=..."
                )
        own[receiver] = given | others
        command(**own)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != receiver
    ]
    run.__signature__ = inspect.Signature([*flags, *own])  # type: ignore[attr-defined]
    return run


def _parameter(
    name: str,
    kind: Any,
    flag: Any,
    default: Any = None,
) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, flag],
    )


def _setting_flag(spec: "dataclasses.Field[Any]", default: Any) -> inspect.Parameter:
    """Returns one setting as a typer option; unset means: not given."""
    flag = f"--{spec.name.replace('_', '-')}"
    kind, _ = field_type(spec.name)
    # typer's own default has to be None, which means "not given": a default that a user
    # did not type must not override a TOML file. So the help's default is written here.
    if default in (None, "") or "Default:" in spec.metadata["help"]:
        shown = ""
    else:
        shown = f" \\[default: {default}]"
    if kind is bool:
        flag += f"/--no-{flag[2:]}"
    option = typer.Option(
        flag,
        help=_help_of(spec) + shown,
        rich_help_panel=spec.metadata["group"],
        show_default=False,
    )
    return _parameter(spec.name, kind | None, option)


def _help_of(spec: "dataclasses.Field[Any]") -> str:
    text = spec.metadata["help"]
    choices = spec.metadata.get("choices")
    if choices:
        text += f" \\[{'|'.join(choices)}]"  # escaped, for rich takes [...] for markup
    return text


def _request_flag(
    spec: "dataclasses.Field[Any]",
    kind: Any,
    has_default: bool,
) -> inspect.Parameter:
    """Returns one field of a request as a typer option, or argument."""
    text = _help_of(spec)
    metavar = spec.metadata["metavar"]
    default: Any = None
    if has_default:
        default = spec.default
    split = None
    if kind == NAMES:
        # One text with commas, where typer would have the flag repeated for each name.
        kind = str | None
        split = _split
        default = ",".join(default) or None
    elif not has_default:
        kind = kind | None
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty  # typer: required
    if metavar is not None:  # an argument, which "" leaves to typer to name
        argument = typer.Argument(help=text, metavar=metavar or None)
        return _parameter(spec.name, kind, argument, default)
    flag = f"--{spec.name.replace('_', '-')}"
    # A flag that is off by itself needs no second name to switch it off.
    if bool in (kind, *typing.get_args(kind)) and spec.default is not False:
        flag += f"/--no-{flag[2:]}"
    names = spec.metadata["names"] or (flag,)
    # What is not given is left out, and the field's default holds all the same.
    if not has_default and spec.default not in (None, (), False, dataclasses.MISSING):
        text += f" \\[default: {spec.default}]"
    option = typer.Option(*names, help=text, callback=split, show_default=has_default)
    return _parameter(spec.name, kind, option, default)


def _split(text: str | None) -> NAMES | None:
    if text is not None:
        return tuple(text.split(","))
    return None
