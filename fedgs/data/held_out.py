"""Which records are held out of training: the same ones in every run.

Every owner keeps `test_fraction` of its own images, drawn by its name alone: neither
the run's seed, nor its partition, nor other owners change the choice. An evaluation
therefore never meets an image that a run with the same setting trained on.
"""

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data.partition import by_client
from fedgs.data.records import Records
from fedgs.errors import UserError
from fedgs.randomness import stream

SEED = 0  # one for all runs
NOBODY = ""  # the owner of all records of a source that names none


def held_out(config: RunConfig, records: Records) -> NDArray[np.bool_]:
    """Tells for every record whether it is held out.

    Of n records of an owner, test_fraction * n are, rounded, and at most n - 1.

    Privacy: reads private data; output private.

    Args:
        config: uses `test_fraction`, `privacy_unit` and the names of both in errors.
        records: the source's.

    Returns:
        Shape (N,).

    Raises:
        UserError: privacy_unit = record with data that names owners.
    """
    is_held_out = np.zeros(len(records.labels), bool)
    if not config.test_fraction:
        return is_held_out
    if records.clients is None:
        groups, names = [np.arange(len(records.labels))], [NOBODY]
    elif config.privacy_unit == "record":
        raise UserError(
            f"test_fraction = {config.test_fraction}: privacy_unit = record, and by "
            "the owners of the data one record would decide on others; leave out "
            "--test-fraction"
        )
    else:
        groups, names = by_client(records.clients)
    for own, name in zip(groups, names, strict=True):
        count = min(round(config.test_fraction * len(own)), len(own) - 1)
        order = stream(SEED, f"held-out/{name}").permutation(len(own))
        is_held_out[own[order[:count]]] = True
    return is_held_out
