"""The model of public images that a run starts from, and which images those are.

Privacy: public, if the images are and nobody chose them by the private ones.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgs.config.method_settings import settings_with
from fedgs.config.run_config import MomentConfig, ResolvedConfig, RunConfig
from fedgs.data.sources import load_records
from fedgs.errors import UserError
from fedgs.gan.moments import Model, start_of


def public_start(config: ResolvedConfig) -> tuple[Model | None, frozenset[bytes]]:
    """Reads `public_data`; returns its model and `digests`, none where it is unset.

    Privacy: public, if the images are and nobody chose them by the private ones.

    Args:
        config: the configuration of a run with phases of moments, or of such a phase.

    Raises:
        UserError: missing or malformed data, or of other classes or channels.
    """
    public = config.public_data
    if public is None:
        return None, frozenset()
    values: dict[str, Any] = {}
    for name in (*settings_with("images"), *settings_with("reading")):
        values[name] = getattr(config, name)
    # How the private data are read says nothing about these.
    defaults = RunConfig().to_flat()
    for name in ("num_classes", "classes", "background", "fit", "window", "normalize"):
        values[name] = defaults[name]
    values["data"] = public
    images, labels, found = _read(RunConfig.from_flat(values))
    # A class without public images would have no Gaussian to start from.
    counts = np.bincount(labels, minlength=config.num_classes)
    if len(counts) > config.num_classes or not counts.all():
        num_found = np.count_nonzero(counts)
        raise UserError(
            f"public_data = {public!r}: it has images of {num_found} classes, but the "
            f"run has {config.num_classes}; give public data with images of the same "
            "classes"
        )
    model = start_of(cast(MomentConfig, config), images, torch.tensor(labels))
    return model, found


# All phases of a run start from the same images.
@lru_cache(maxsize=1)
def _read(
    config: RunConfig,
) -> tuple[Tensor, NDArray[np.int64], frozenset[bytes]]:
    """Returns the images and labels of public data, and `digests` of the images."""
    try:
        records = load_records(config)
    except UserError as error:
        raise UserError(f"public_data = {config.data!r}: {error}") from error
    # The negatives, too: a private source may have the same images on a light
    # background.
    images = records.images
    found = digests(images) | digests(255 - images)
    return torch.tensor(images), records.labels, found


def digests(images: NDArray[np.uint8]) -> frozenset[bytes]:
    """Returns a hash of each image that has more than one grey level.

    Privacy: as private as the images.

    Args:
        images: shape (N, channel, height, width).
    """
    # An image of one grey level shows nobody, and may well be in both data sets.
    darkest = images.min(axis=(1, 2, 3))
    lightest = images.max(axis=(1, 2, 3))
    shown = images[darkest < lightest]
    found: set[bytes] = set()
    for image in shown:
        content = blake2b(image.tobytes(), digest_size=16)
        found.add(content.digest())
    return frozenset(found)
