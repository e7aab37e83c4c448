"""The clients of a run's cohort, picked from all that the data has."""

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgs.cohorts.cohort_file import Cohort, read_cohort
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.partition import check_num_clients
from fedgs.errors import UserError, first_n


def for_all_clients(config: RunConfig) -> RunConfig:
    """Returns the configuration that loads every client for `keep_cohort` to choose.

    `num_clients` then counts clients of the cohort, so it must not cut the data before.
    """
    if config.cohort is None:
        return config
    # A cohort names owners, so that only a partition by owner can have its clients.
    unset = {"num_clients": "", "node_sizes": "", "partition": "by-client"}
    return RunConfig.from_flat(unset, config)


def cohort_of_data(
    path: Path, data: FederatedImages, setting: str = "cohort"
) -> Cohort:
    """Reads a cohort file, all of whose clients the data has.

    Privacy: public; of the data only the clients' names are read.

    Args:
        path: the file.
        data: of all clients.
        setting: that names the file, in errors.

    Raises:
        UserError: an unreadable file, or names that the data does not have.
    """
    cohort = read_cohort(path, setting)
    if unknown := sorted(set(cohort.names) - set(data.client_names)):
        raise UserError(
            f"{setting} = {path}: data = {data.name} has no client "
            f"{first_n(map(repr, unknown))} ({len(unknown)} of {len(cohort.names)} "
            f"names); give --{setting} a file of this data's clients"
        )
    return cohort


def keep_cohort(config: RunConfig, data: FederatedImages) -> FederatedImages:
    """Keeps the clients of the run's cohort, in the data's order.

    Privacy: reads private data; output private. Reads the names alone.

    Args:
        config: with `cohort`, and `num_clients` for the first of them; without
            `cohort` nothing changes.
        data: of all clients.

    Raises:
        UserError: an unreadable file, names that the data does not have, or fewer than
            num_clients.
    """
    if config.cohort is None:
        return data
    wanted = set(cohort_of_data(Path(config.cohort), data).names)
    check_num_clients(config, len(wanted), f"cohort = {config.cohort} has", "clients")
    # In the data's order, whatever the file's is: a run then depends on who is in it.
    kept = [i for i, name in enumerate(data.client_names) if name in wanted]
    kept = kept[: config.num_clients]
    tests: tuple[NDArray[np.int64], ...] = ()
    if data.client_test_records:
        tests = tuple(data.client_test_records[i] for i in kept)
    return dataclasses.replace(
        data,
        client_records=tuple(data.client_records[i] for i in kept),
        client_names=tuple(data.client_names[i] for i in kept),
        client_test_records=tests,
    )
