"""How a user's mistake is refused."""

from collections.abc import Callable

import pytest

from fedgs.errors import UserError


def assert_refused(named: str, call: Callable, *arguments, **more: object) -> None:
    """Checks that a call is refused with a message in which a pattern is found."""
    with pytest.raises(UserError, match=named):
        call(*arguments, **more)
