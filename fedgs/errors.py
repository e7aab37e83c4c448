"""The error for people: a mistake in the input, and names in its text."""

from collections.abc import Iterable, Mapping


class UserError(ValueError):
    """A mistake in the input: names the setting, its value and the remedy.

    The command line prints it in one or two lines and exits with code 2.
    """


def some(names: Iterable[object], most: int = 3) -> str:
    """Lists the first names of possibly many."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:most] + ["..."] * (len(listed) > most))


def refuse(given: Mapping[str, object], why: str) -> None:
    """Refuses settings that a command cannot take beside others."""
    for name, value in given.items():
        if value is not None:
            flag = name if name.isupper() else f"--{name.replace('_', '-')}"
            raise UserError(f"{name} = {value}: {why} {flag}")
