"""What tests of audits share."""

import pytest

import planted
from fedgs.config.run_config import ResolvedConfig
from fedgs.methods.base import Method


@pytest.fixture
def given(monkeypatch):
    """Makes an object of a class the method of a run, as a user does."""

    def given(kind: type[Method], **settings) -> ResolvedConfig:
        planted.MEMORY.clear()
        name = f"own_{kind.__name__}"
        monkeypatch.setattr(planted, name, kind(), raising=False)
        monkeypatch.setenv("FEDGS_METHODS", f"planted:{name}")
        return planted.of_method(f"planted:{name}", **settings)

    return given
