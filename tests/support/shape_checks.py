"""Checks the shapes that functions are annotated with; see `tests/conftest.py`."""

import typing
from collections.abc import Callable
from typing import Any

from beartype import beartype
from jaxtyping import AbstractArray


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Applies beartype to the annotations that name a shape, and to no other.

    Tests put other objects in the place of configurations, nodes and data; pyright
    checks those types.
    """
    hints = function.__annotations__
    function.__annotations__ = {n: hint for n, hint in hints.items() if _is_shape(hint)}
    return beartype(function) if function.__annotations__ else function


def _is_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(_is_shape, typing.get_args(hint)))
