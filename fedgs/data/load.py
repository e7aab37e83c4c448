"""From settings to federated images: read, hold back, split, spoil, keep a cohort.

`sources` reads the data sets, `partition` decides which records belong to which
client and which are held back, and `corruption` spoils some for experiments.
"""

from typing import NamedTuple

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
    everybody = split_records(for_all_clients(config), records)
    data = keep_cohort(config, everybody)
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
    config = partition.with_test_owners(config, records)
    # First, by owner: the partition then deals only what may be trained on.
    is_held_out = partition.held_out(config, records)
    train = np.flatnonzero(~is_held_out)
    held = np.flatnonzero(is_held_out)
    split = _split_of(config, records, train)
    groups = [train[group] for group in split.groups]  # numbers among all records
    tests: partition.Groups = []
    is_by_client = partition.rule(config, records.clients) == "by-client"
    if config.test_fraction and is_by_client and records.clients is not None:
        owners_of_held = records.clients[held]
        of_owners, _ = partition.by_client(owners_of_held, records.clients)
        # `num_clients` may take the first owners only.
        of_clients = of_owners[: len(groups)]
        tests = [held[group] for group in of_clients]
    # Only now, so that no label decides where another record is.
    groups = [_kept(records, group) for group in groups]
    tests = [_kept(records, group) for group in tests]
    # A bug of a client is in all its images, held out or not.
    all_of_clients = groups
    if tests:
        pairs = zip(groups, tests, strict=True)
        all_of_clients = [np.concatenate(pair) for pair in pairs]
    images, labels = corrupt(
        config,
        records,
        client_records=all_of_clients,
        names=split.names,
    )
    held_out_records = None
    if config.test_owners or config.test_fraction:
        held_out_records = _kept(records, held)
    return FederatedImages(
        images=images,
        labels=labels,
        client_records=tuple(groups),
        client_names=split.names,
        num_classes=records.num_classes,
        name=config.data,
        client_test_records=tuple(tests),
        owners=_what_became_of_owners(records, is_by_client),
        test_owners=split.test_owners,
        holds_out_owners=bool(config.test_owners),
        held_out_records=held_out_records,
    )


def _what_became_of_owners(records: Records, is_by_client: bool) -> str:
    """Returns "kept" or "cut", as of `FederatedImages.owners`; "" without any."""
    if records.clients is None:
        return ""
    if is_by_client:
        return "kept"
    return "cut"


class _Split(NamedTuple):
    """The clients of a run.

    Attributes:
        groups: the record numbers of each client, among those that are trained on.
        names: the clients', in the same order.
        test_owners: names of the owners of whom nothing is trained on.
    """

    groups: partition.Groups
    names: tuple[str, ...]
    test_owners: tuple[str, ...]


def _split_of(config: RunConfig, records: Records, train: NDArray[np.int64]) -> _Split:
    """Splits the records that are trained on into clients.

    Args:
        config: as for `load_data`.
        records: all of them.
        train: the numbers of those that are trained on.
    """
    clients = records.clients
    owners = records.owners
    test_owners: tuple[str, ...] = ()
    if clients is not None and config.test_owners:
        if owners is None:
            owners = np.unique(clients)
        is_of_test = partition.owners_held_out(config, owners)
        held_out = owners[is_of_test]
        test_owners = tuple(str(owner) for owner in held_out)
        owners = owners[~is_of_test]
    if clients is not None:
        clients = clients[train]
    groups, names = partition.split(
        config,
        labels=records.labels[train],
        num_classes=records.num_classes,
        clients=clients,
        owners=owners,
    )
    return _Split(groups=groups, names=names, test_owners=test_owners)


def _kept(records: Records, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the numbers of those records that are of the run's classes."""
    is_kept = records.labels[numbers] != LEFT_OUT
    return numbers[is_kept]


def load_test_data(
    config: RunConfig,
    records: Records | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Loads the test images that belong to `config.data`, fitted like the data.

    It is what all owners hold out by `test_fraction`, or all that the owners of
    `test_owners` have. If nothing is held out, it is the source's own test split, if it
    has one (MNIST's for `mnist` and `mnist-by-writer`, Fashion-MNIST's, the split
    `test` of a Hugging Face data set, `..._test.h5` beside TFF's `..._train.h5`). It is
    never corrupted.

    Privacy: a benchmark's own split is public; what owners hold out is private.

    Args:
        config: as for `load_data`.
        records: what `load_records` returns of the same settings, where the caller has
            read them already.

    Returns:
        Images, shape (n, channel, height, width), float32 in [0, 1], 0 = background,
        and labels, shape (n,), int64.

    Raises:
        UserError: the data has no test images, or it is missing or malformed.
    """
    if config.test_fraction or config.test_owners:
        if records is None:
            records = sources.load_records(config)
        is_held_out = partition.held_out(config, records)
        numbers = np.flatnonzero(is_held_out)
    elif (found := sources.load_test_records(config)) is not None:
        records = found
        numbers = np.arange(len(records.labels))
    else:
        raise UserError(
            f"data = {config.data!r}: it has no test split, and nothing was held out; "
            "give `fedgs evaluate` test images of your own by --test npz:FILE, or give "
            "data that has a test split, such as mnist, or train and evaluate with "
            "--test-fraction or --test-owners"
        )
    chosen = _kept(records, numbers)
    images = to_float(records.images[chosen])
    labels = records.labels[chosen]
    return images, labels
