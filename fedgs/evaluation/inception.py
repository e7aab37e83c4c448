"""FID on the pool3 layer of Inception-v3, as the paper computes it.

The network and its preprocessing (TensorFlow's resizing to 299 x 299) are those of
torchmetrics and torch-fidelity; the weights are downloaded where the user asks for it.

Source: Heusel et al., "GANs trained by a two time-scale update rule", NeurIPS 2017.
    GS-WGAN's code: values times 255, grey repeated to RGB, 20,000 generated images
    against 60,000 training images.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedgs.errors import UserError, wrap_error
from fedgs.evaluation.downstream import Report

# The 2015 Inception network of TensorFlow, as torch-fidelity and pytorch-fid host it.
WEIGHTS_NAME = "weights-inception-2015-12-05-6726825d.pth"
WEIGHTS_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
WEIGHTS_URL = (
    f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS_NAME}"
)
FID_IMAGES = 20_000  # synthetic ones, as in GS-WGAN's code
_NUM_FEATURES = 2048
_IMAGES_AT_ONCE = 50


def weights_path() -> Path:
    """Returns where torch hub keeps the weights."""
    return Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS_NAME


def find_weights() -> Path | None:
    """Returns the weights in torch hub's folder; None: there are none.

    Raises:
        UserError: the file is another.
    """
    weights = weights_path()
    if not weights.is_file():
        return None
    content = hashlib.sha256(weights.read_bytes()).hexdigest()
    if content != WEIGHTS_SHA256:
        raise UserError(
            f"{weights}: it is not {WEIGHTS_NAME} (SHA-256 {content[:8]}..., not "
            f"{WEIGHTS_SHA256[:8]}...); remove it, or replace it by that of "
            f"{WEIGHTS_URL}"
        )
    return weights


def download_weights() -> None:
    """Downloads the weights into torch hub's folder, unless a file is there.

    A file with another hash is not kept, and an interrupted download leaves nothing.

    Raises:
        UserError: they cannot be fetched, or those fetched are others.
    """
    weights = weights_path()
    if weights.is_file():
        return
    what = f"download = True: {WEIGHTS_URL} cannot be fetched to {weights}"
    remedy = "put the file there yourself, or leave out --download"
    # A wrong hash is a RuntimeError, no network and a full disk are OSErrors.
    with wrap_error((OSError, RuntimeError), what, remedy):
        weights.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            url=WEIGHTS_URL,
            dst=str(weights),
            hash_prefix=WEIGHTS_SHA256,
            progress=False,
        )


def fid_inception_v3_pool3(
    real: NDArray[np.float32],
    synthetic: NDArray[np.float32],
    weights: Path,
    device: str,
    report: Report,
) -> float:
    """Returns the Frechet distance of 2048 Inception-v3 features.

    The file is a pickle: it is one that `find_weights` knows by its hash.

    Privacy: reads private data; output private.

    Args:
        real: shape (n, C, S, S), float32 in [0, 1], n at least 2.
        synthetic: shape (m, C, S, S), m at least 2.
        weights: the weights that `find_weights` returned.
        device: cpu (about ten images per second and core) or cuda.
        report: is called with the images done and all images.

    Raises:
        UserError: torch-fidelity is not installed.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    remedy = "run `pip install torch-fidelity`"
    with wrap_error(ModuleNotFoundError, f"{weights}: it needs torch-fidelity", remedy):
        metric = FrechetInceptionDistance(
            feature=_NUM_FEATURES,
            feature_extractor_weights_path=str(weights),
            antialias=False,  # resizes as TensorFlow 1 did
        ).to(device)
    done = 0
    total = len(real) + len(synthetic)
    for images, is_real in ((real, True), (synthetic, False)):
        for part in torch.from_numpy(images).split(_IMAGES_AT_ONCE):
            metric.update(to_rgb_bytes(part).to(device), real=is_real)
            done += len(part)
            report(done, total)
    return float(metric.compute())


def to_rgb_bytes(images: torch.Tensor) -> torch.Tensor:
    """Returns images (n, 1 or 3, S, S) in [0, 1] as RGB uint8, rounded.

    Privacy: as private as the images.
    """
    return (images * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
