"""A user's own suspect: `--suspect MODULE:FUNCTION`, a transformation of images.

It runs code. So it is read from the command line only: a run folder, a TOML file and a
server cannot name one.
"""

import importlib
import runpy
from collections.abc import Callable
from typing import Any

import numpy as np

from fedgs.config.plugins import of_user_code
from fedgs.data.transformations import Degree, Images, Transformation
from fedgs.errors import UserError


def load_suspect(text: str) -> Transformation:
    """Returns the transformation of a Python function.

    Args:
        text: MODULE:NAME, or FILE.py:NAME. NAME is a function of images, shape
            (n, C, S, S), float32 in [0, 1], that returns such an array.

    Raises:
        UserError: it is not there, or cannot be called.
    """
    # From the right, because the path of a file may contain a colon (C:\\suspects.py).
    source, _, name = text.rpartition(":")
    remedy = "give --suspect MODULE:FUNCTION, or FILE.py:FUNCTION"
    if not source:
        raise UserError(f"suspect = {text!r}: {remedy}")
    with of_user_code(f"suspect = {text!r}", remedy):
        found = _function(source, name)
    if not callable(found):
        raise UserError(f"suspect = {text!r}: {name} cannot be called; {remedy}")
    return Transformation(text, f"changed as by {text}", images=_checked(text, found))


def _function(source: str, name: str) -> Any:
    if source.endswith(".py"):
        return runpy.run_path(source)[name]
    return getattr(importlib.import_module(source), name)


def _checked(
    text: str,
    function: Callable[[Any], Any],
) -> Callable[[Images, Degree], Images]:
    """Returns the function on arrays; what it returns is checked."""

    def changed(images: Images, degree: Degree) -> Images:
        with of_user_code(f"suspect = {text!r}", "return images of the same shape"):
            # A copy, because the samples are used again.
            found = np.asarray(function(images.copy()), np.float32)
        if found.shape != images.shape or not np.isfinite(found).all():
            raise UserError(
                f"suspect = {text!r}: made {found.shape} of images {images.shape}, or "
                "values that are not finite; return images of the same shape"
            )
        if found.min() < 0 or found.max() > 1:
            raise UserError(
                f"suspect = {text!r}: pixels from {found.min():.3g} to "
                f"{found.max():.3g}; return pixels in [0, 1]"
            )
        return found

    return changed
