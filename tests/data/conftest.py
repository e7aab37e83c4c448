"""What tests of the data sources share."""

import pytest


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory):
    """Keeps the Hugging Face cache inside the tests' folder."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("flwr_datasets")
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()
