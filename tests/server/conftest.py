"""Deployments of real processes on this machine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from live import Live


@pytest.fixture
def deployment(tmp_path) -> "Iterator[Live]":
    """A server and two clients with certificates, of which nothing runs yet."""
    from live import Live, prepare

    live = Live(prepare(tmp_path))
    live.certify()
    yield live
    live.machines.close()
