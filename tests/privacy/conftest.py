"""What tests of accounting share."""

import pytest

from fedgs.privacy import amplification


@pytest.fixture
def coarse_grid(monkeypatch):
    """A grid that searches are quick on; amplified figures are a little larger."""
    amplification._composed.cache_clear()
    monkeypatch.setattr(amplification, "_RESOLUTION", 3e-3)
    yield
    amplification._composed.cache_clear()
