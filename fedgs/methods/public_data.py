"""The model of public images that a run starts from, and which images those are.

Privacy: public, if the images are and nobody chose them by the private ones.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data.sources import load_records
from fedgs.errors import UserError
from fedgs.gan.moments import Model, start_of


@lru_cache(maxsize=1)
def public_start(config: ResolvedConfig) -> tuple[Model | None, frozenset[bytes]]:
    """Reads `public_data`; returns its model and `digests`, none where it is unset.

    Privacy: public, if the images are and nobody chose them by the private ones.

    Raises:
        UserError: missing or malformed data, or of other classes or channels.
    """
    public = config.public_data
    if public is None:
        return None, frozenset()
    # How the private data are read says nothing about these.
    own = {"data": public, "num_classes": "", "classes": "all"}
    try:
        records = load_records(
            RunConfig.from_flat(own | {"background": "auto"}, base=config)
        )
    except UserError as error:
        raise UserError(f"public_data = {public!r}: {error}") from error
    counts = np.bincount(records.labels, minlength=config.num_classes)
    if len(counts) > config.num_classes or not counts.all():
        raise UserError(
            f"public_data = {public!r}: has images of {np.count_nonzero(counts)} "
            f"classes, the run has {config.num_classes}; give public data with images "
            "of the same classes"
        )
    images, labels = torch.tensor(records.images), torch.tensor(records.labels)
    model = start_of(config, images, labels)
    return model, digests(records.images) | digests(255 - records.images)


def digests(images: NDArray[np.uint8]) -> frozenset[bytes]:
    """Returns a hash of each image that has more than one grey level.

    Privacy: as private as the images.

    Args:
        images: shape (N, channel, height, width).
    """
    shown = images[images.min(axis=(1, 2, 3)) < images.max(axis=(1, 2, 3))]
    return frozenset(blake2b(i.tobytes(), digest_size=16).digest() for i in shown)
