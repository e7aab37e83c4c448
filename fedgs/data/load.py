"""From settings to federated images: read, hold back, split, spoil, keep a cohort.

`sources` reads the data sets, `partition` decides which records belong to which
client and which are held back, and `corruption` spoils some for experiments.
"""

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import RunConfig
from fedgs.data import partition, sources
from fedgs.data.cohort import for_all_clients, keep_cohort
from fedgs.data.corruption import corrupt
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.records import LEFT_OUT, Records
from fedgs.errors import UserError


def load_data(config: RunConfig) -> FederatedImages:
    """Loads the data of a run, fits its images and splits it into clients.

    Images of another size are resized with antialiased bilinear interpolation, grey
    images become RGB by repetition, and RGB images are never turned into grey.

    Privacy: reads private data; output private. Without `num_classes` the largest label
    of an npz file becomes public; give the setting where that is not acceptable.

    Args:
        config: resolved, so with a seed; a `num_clients` of None takes all clients of
            the data, or 180 for `digits`.

    Raises:
        UserError: the data is missing or malformed, or does not suit the settings.
    """
    return federate(config, sources.load_records(config))


def federate(config: RunConfig, records: Records) -> FederatedImages:
    """Splits records into the clients of a run: all of them, or those of its cohort.

    Privacy: reads private data; output private.

    Args:
        config: as for `load_data`.
        records: fitted to the run.

    Raises:
        UserError: the records do not suit the settings, or nobody has an image.
    """
    data = keep_cohort(config, split_records(for_all_clients(config), records))
    if not data.sizes.any():
        raise UserError(
            f"data = {config.data!r}: none of its {data.num_clients} users has an "
            "image of these classes; give other data or --classes all"
        )
    return data


def split_records(config: RunConfig, records: Records) -> FederatedImages:
    """Splits records into clients, without those held out, and corrupts images.

    Privacy: reads private data; output private.

    Args:
        config: as for `load_data`.
        records: fitted to the run.

    Raises:
        UserError: the partition does not suit the data.
    """
    # First, by owner: the partition then deals only what may be trained on.
    is_held_out = partition.held_out(config, records)
    train = np.flatnonzero(~is_held_out)
    owners = records.clients
    groups, names = partition.split(
        config,
        labels=records.labels[train],
        num_classes=records.num_classes,
        clients=None if owners is None else owners[train],
        owners=records.owners,
    )
    groups = [train[group] for group in groups]  # numbers among all records
    tests: partition.Groups = []
    is_by_client = partition.rule(config, owners) == "by-client"
    if config.test_fraction and is_by_client and owners is not None:
        held = np.flatnonzero(is_held_out)
        of_all, _ = partition.by_client(owners[held], owners)
        # `num_clients` may take the first owners only.
        tests = [held[group] for group in of_all[: len(groups)]]
    # Only now, so that no label decides where another record is.
    groups = [group[records.labels[group] != LEFT_OUT] for group in groups]
    tests = [group[records.labels[group] != LEFT_OUT] for group in tests]
    # A bug of a client is in all its images, held out or not.
    all_of_clients = groups
    if tests:
        pairs = zip(groups, tests, strict=True)
        all_of_clients = [np.concatenate(pair) for pair in pairs]
    images, labels = corrupt(config, records, all_of_clients, names)
    whose = "kept" if is_by_client else "cut"
    if owners is None:
        whose = ""
    return FederatedImages(
        images=images,
        labels=labels,
        client_records=tuple(groups),
        client_names=names,
        num_classes=records.num_classes,
        name=config.data,
        client_test_records=tuple(tests),
        owners=whose,
    )


def load_test_data(config: RunConfig) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Loads the test images that belong to `config.data`, fitted like the data.

    It is the source's own test split where it has one (MNIST's for `mnist` and
    `mnist-by-writer`, Fashion-MNIST's, the split `test` of a Hugging Face data set,
    `..._test.h5` beside TFF's `..._train.h5`), else what all owners hold out by
    `test_fraction`. It is never corrupted.

    Privacy: a benchmark's own split is public; what owners hold out is private.

    Returns:
        Images, shape (n, channel, height, width), float32 in [0, 1], 0 = background,
        and labels, shape (n,), int64.

    Raises:
        UserError: the data has no test images, or it is missing or malformed.
    """
    records = sources.load_test_records(config)
    if records is None and not config.test_fraction:
        raise UserError(
            f"data = {config.data!r}: has no test split, and nothing was held out; "
            "give data that has one, such as mnist, or train and evaluate with "
            "--test-fraction"
        )
    if records is not None:
        is_test = np.ones(len(records.labels), bool)
    else:
        records = sources.load_records(config)
        is_test = partition.held_out(config, records)
    chosen = np.flatnonzero(is_test & (records.labels != LEFT_OUT))
    return to_float(records.images[chosen]), records.labels[chosen]
