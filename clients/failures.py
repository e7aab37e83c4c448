"""What a client tells of a failure: everything to itself, nothing private to others.

The server gets neither an exception's text, which could quote data, nor its type, which
could depend on data. A refusal names the client's limit, which depends on no data.
"""

import sys
import traceback
from pathlib import Path

from fedgs.errors import UserError
from fedgs.privacy.client_limits import ClientRefused


def outcome_of(error: Exception | None) -> str:
    """Returns what came of a request, in a word or two."""
    if isinstance(error, ClientRefused):
        return f"refused: {error.setting}"
    if error is not None:
        return "failed"
    return "ok"


def reason_of(title: str, error: Exception | None) -> str:
    """Returns what the server is told of a failure.

    Args:
        title: public name of the node.
        error: what was raised.
    """
    if isinstance(error, ClientRefused):
        return f"{title} refused the request: its own limit {error.setting} forbids it"
    return f"{title} failed; its own error.log says why"


def log_privately(folder: Path, error: Exception, is_deployed: bool) -> None:
    """Writes an exception's text to error.log; raises nothing, for Flower sends it on.

    A deployed client says the cause in its own journal too, in a line of stderr.

    Privacy: reads private data; output private.

    Args:
        folder: where to, private.
        error: what was raised.
        is_deployed: stderr is the client's own; that of a simulation is not.
    """
    place = folder / "error.log"
    problem = ""
    try:
        # A run folder that is gone is not made again for its errors.
        if folder.parent.is_dir():
            folder.mkdir(exist_ok=True)
            with open(place, "a", errors="backslashreplace") as log:
                log.write("".join(traceback.format_exception(error)))
    except OSError as other:
        problem = f"it cannot be written ({other.strerror}); it would say: "
    if is_deployed:
        # Other texts than these are not for people, and may quote data.
        reason = type(error).__name__
        if isinstance(error, OSError | UserError):
            reason = str(error)
        print(f"{place}: {problem}{reason}", file=sys.stderr)
