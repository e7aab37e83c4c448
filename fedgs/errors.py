"""The error for people: a mistake in the input, and names in its text."""

from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the input: names the setting, its value and the remedy.

    The command line prints it in one or two lines and exits with code 2.
    """


def some(names: Iterable[object], most: int = 3) -> str:
    """Lists the first names of possibly many."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:most] + ["..."] * (len(listed) > most))
