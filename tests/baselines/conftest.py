"""What the tests of accounting by Poisson batches share."""

import pytest

from fedgs.privacy import poisson


@pytest.fixture
def coarse_poisson(monkeypatch):
    """A grid and a search that are quick; epsilons are a little larger."""
    poisson._composed_epsilon.cache_clear()
    monkeypatch.setattr(poisson, "_RESOLUTION", 3e-2)
    monkeypatch.setattr(poisson, "_TOLERANCE", 1e-2)
    yield
    poisson._composed_epsilon.cache_clear()
