"""What a command of fedgs is given, and how it refuses."""

import re


def flags(**settings: object) -> list[str]:
    """Returns settings as flags; None leaves one out, True has no value."""
    given = {n.replace("_", "-"): v for n, v in settings.items() if v is not None}
    pairs = [(f"--{name}", str(value)) for name, value in given.items()]
    return [part for pair in pairs for part in pair if part != "True"]


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
