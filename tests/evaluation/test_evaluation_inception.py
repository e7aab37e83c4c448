"""FID on Inception-v3: only the known weights file, and what is done with it."""

import hashlib

import numpy as np
import pytest
import torch

from fedgs.evaluation import inception, quality
from refusals import assert_refused


def images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((count, 1, 16, 16), dtype=np.float32)


def test_only_the_known_download_of_torch_hub_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert inception.find_weights() is None
    path = tmp_path / "hub" / "checkpoints" / inception.WEIGHTS_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a pickle that nobody should open")
    words = (
        rf"{path}: it is not weights-.*remove it, or replace it by that of https://git"
    )
    assert_refused(words, inception.find_weights)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(inception, "WEIGHTS_SHA256", digest)
    assert inception.find_weights() == path


def test_weights_are_downloaded_by_their_hash_or_not_at_all(monkeypatch, tmp_path):
    """A file of another hash is not kept, and one that is there is not fetched."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    served = tmp_path / inception.WEIGHTS_NAME
    served.write_bytes(b"what somebody else put there")
    monkeypatch.setattr(inception, "WEIGHTS_URL", served.as_uri())
    wanted = r"download = True: file:.* cannot be fetched.*leave out --download"
    assert_refused(wanted, inception.download_weights)
    assert not any(path.is_file() for path in (tmp_path / "home").rglob("*"))
    digest = hashlib.sha256(served.read_bytes()).hexdigest()
    monkeypatch.setattr(inception, "WEIGHTS_SHA256", digest)
    inception.download_weights()
    assert inception.find_weights() == inception.weights_path()
    served.unlink()
    inception.download_weights()  # it is there
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "other"))
    assert_refused(wanted, inception.download_weights)  # as without a network


class Means(torch.nn.Module):
    """Stands in for the network: four numbers of each image."""

    num_features = 4

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert (images.dtype, images.shape[1]) == (torch.uint8, 3)
        assert (images[:, 0] == images[:, 2]).all()  # grey
        rows = images.float()[:, 0]
        return rows.unflatten(1, (4, -1)).mean((2, 3))


def test_all_images_of_both_sides_are_compared_in_parts(monkeypatch, tmp_path):
    from torchmetrics.image import fid

    original = fid.FrechetInceptionDistance
    asked: dict[str, object] = {}

    def stand_in(**settings: object) -> torch.nn.Module:
        asked.update(settings)
        return original(feature=Means())

    path = tmp_path / inception.WEIGHTS_NAME
    monkeypatch.setattr(fid, "FrechetInceptionDistance", stand_in)
    reports: list[tuple[int, ...]] = []
    real, synthetic = images(70, 0), images(60, 1)
    found = inception.fid_inception_v3_pool3(
        real, synthetic, path, "cpu", lambda *steps: reports.append(steps)
    )
    assert asked["feature_extractor_weights_path"] == str(path)
    assert (asked["feature"], asked["antialias"]) == (2048, False)
    assert reports == [(50, 130), (70, 130), (120, 130), (130, 130)]
    monkeypatch.setattr(fid, "FrechetInceptionDistance", original)
    features = [
        Means()(inception.to_rgb_bytes(torch.from_numpy(part))).numpy()
        for part in (real, synthetic)
    ]
    assert found == pytest.approx(quality.fid(*features), rel=1e-4)
