"""The error for people: a mistake in the input, and names in its text."""

import contextlib
import importlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

OBJECT = re.compile(r" ?<\S+ object at 0x\w+>")  # in a library's reason
MOST_REASON = 300  # characters of a library's reason: some quote what they read
# Kinds of characters in Unicode that begin a line or command a terminal: controls, and
# the ends of lines and of paragraphs.
COMMANDS = {"Cc", "Zl", "Zp"}


class UserError(ValueError):
    """A mistake in the input: names the setting, its value and the remedy.

    The command line prints it in one line and exits with code 2.
    """


def malformed(problem: str) -> UserError:
    """Returns the refusal of a message that this version of fedgs never sends.

    Args:
        problem: what is wrong with it; quotes nothing of the message.
    """
    return UserError(
        f"{problem}, so it is refused; install the same version of fedgs on the server "
        "and on every client"
    )


def first_n(names: Iterable[object], most: int = 3) -> str:
    """Lists the first names of possibly many."""
    listed = [str(name) for name in names]
    shown = listed[:most]
    if len(listed) > most:
        shown.append("...")
    return ", ".join(shown)


def reject(given: Mapping[str, object], why: str) -> None:
    """Refuses settings that a command cannot take beside others."""
    for name, value in given.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            if name.isupper():  # an argument without a flag, such as RUN
                flag = name
            raise UserError(f"{name} = {value}: {why} {flag}")


def check_names(setting: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses names of a list that are not known.

    Raises:
        UserError: names the flag and what is known.
    """
    all_known = list(known)
    wrong = [name for name in names if name not in all_known]
    if wrong:
        given = ",".join(wrong)
        shown = ", ".join(all_known)
        raise UserError(f"{setting} = {given!r}: give --{setting} of {shown}")


def check_utf8(what: str, name: str) -> None:
    """Refuses a name in another encoding than UTF-8: no JSON or page can hold it.

    Raises:
        UserError: names what has it.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} = {name!r}: it is no UTF-8; rename it") from error


def check_printable(what: str, name: str) -> None:
    """Refuses a name that is no UTF-8, or that would break a line of a list.

    Raises:
        UserError: names what has it.
    """
    check_utf8(what, name)
    if printable(name) != name:
        raise UserError(
            f"{what} = {name!a:.80}: it contains a control character; rename it"
        )


def printable(text: str) -> str:
    r"""Returns a text in one line, with control characters as Python writes them.

    A name of a file may have any of them, and a terminal would obey them.

    >>> print(printable("a\nb\x1b[31m"))
    a\nb\x1b[31m
    """
    shown: list[str] = []
    for letter in text:
        if unicodedata.category(letter) in COMMANDS:
            letter = ascii(letter)[1:-1]
        shown.append(letter)
    return "".join(shown)


def raise_if_any(where: str, problems: Iterable[str]) -> None:
    """Refuses what a check found: its first problem, with the remedy; nothing else.

    A check is a generator: what follows the first problem is not computed any more.

    Args:
        where: the setting and its value, or what else has the problem.
        problems: a check's.

    Raises:
        UserError: there is a problem.
    """
    for problem in problems:
        raise UserError(f"{where}: {problem}")


@contextlib.contextmanager
def wrap_error(
    errors: type[Exception] | tuple[type[Exception], ...],
    problem: str,
    remedy: str,
) -> Iterator[None]:
    """Makes a library's errors in a `with` block one for people.

    Args:
        errors: the ones that the user's input can cause, all where it is a file of
            some format: of damaged ones parsers raise anything. A `UserError` stays as
            it is unless it is among them.
        problem: names the setting and its value; the library's reason follows.
        remedy: ends the message.

    Raises:
        UserError: in the place of any of the errors.
    """
    if not isinstance(errors, tuple):
        errors = (errors,)
    try:
        yield
    except errors as error:
        # A `UserError` is a ValueError, but says the problem and the remedy already.
        if isinstance(error, UserError) and UserError not in errors:
            raise
        raise UserError(f"{problem} ({reason_of(error)}); {remedy}") from error


def reason_of(error: BaseException) -> str:
    """Returns what a library or the system says, in one line, without a file's name."""
    # Of the system's errors the text alone: the whole has the file's name.
    text = str(getattr(error, "strerror", None) or error)
    one_line = " ".join(text.split())
    reason = OBJECT.sub("", one_line)[:MOST_REASON]
    return reason or type(error).__name__


def refused_by_system(error: OSError) -> str:
    """Returns what a system call failed for, with the file's name where it says one."""
    name = error.filename
    if name is None:
        name = "a file or a stream"
    return f"{name}: {reason_of(error)}"


def imported(module: str, setting: str, install: str) -> Any:
    """Imports a module of a package that is installed for some commands only.

    Args:
        module: its full name.
        setting: what needs it, as the user gave it.
        install: what pip calls the package.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"run `pip install {install}`"
        raise UserError(f"{setting}: it needs {error.name}; {remedy}") from error
