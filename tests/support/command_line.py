"""What a command of fedgs is given, and how it refuses."""

import re

from fedgs.app.flags import MOST_USED
from fedgs.config.method_settings import settings_of


def flags(**settings: object) -> list[str]:
    """Returns settings as words of a command line; None leaves one out.

    Settings without a flag become --set. A flag that is True has no value.
    """
    others = {spec.name for spec in settings_of()} - {*MOST_USED, "num_classes"}
    words: list[str] = []
    for name, value in settings.items():
        if value is not None and name in others:
            shown = str(value).lower() if isinstance(value, bool) else value
            words += ["--set", f"{name}={shown}"]
        else:
            words += plain_flags(**{name: value})
    return words


def plain_flags(**settings: object) -> list[str]:
    """Returns the same for a command that has no --set, but a flag for each setting."""
    words: list[str] = []
    for name, value in settings.items():
        if value is None:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def printed(done: tuple[int, str, str], errors: str | None = None) -> str:
    """Checks that a command succeeded, and its errors; returns what it printed."""
    code, out, err = done
    assert code == 0, err
    assert errors is None or err == errors
    return out


def refused(done: tuple[int, str, str], *named: str) -> str:
    """Checks exit code 2 and one or two lines that name setting, value and remedy.

    Args:
        done: code, standard output and error of a command.
        named: patterns of the message; the first one begins it.
    """
    code, out, err = done
    assert (code, out) == (2, "")
    assert re.match(f"Error: (.*{named[0]})" if named else "Error: ", err), err
    assert all(re.search(words, err) for words in named), err
    assert err.count("\n") <= 2
    assert "Traceback" not in err
    return err
