"""The clients of a run's cohort, picked from all that the data has."""

import dataclasses
import warnings
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgs.cohorts.client_groups import CohortOfClient, read_client_cohorts
from fedgs.cohorts.cohort_file import Cohort, read_cohort
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.partition import check_num_clients
from fedgs.errors import UserError, first_n


def asks_for_cohorts(config: RunConfig) -> bool:
    """Tells whether a run needs to know which cohort each client is in."""
    return bool(config.cohort_value or getattr(config, "healthy", None))


def for_all_clients(config: RunConfig) -> RunConfig:
    """Returns the configuration that loads every client for `keep_cohort` to choose.

    `num_clients` then counts clients of the cohort, so it must not cut the data before.
    """
    if config.cohort is None and config.cohorts is None:
        return config
    # A cohort names owners, so that only a partition by owner can have its clients.
    unset = {"num_clients": "", "node_sizes": "", "partition": "by-client"}
    return RunConfig.from_flat(unset, config)


def cohort_of_data(
    path: Path,
    data: FederatedImages,
    setting: str = "cohort",
) -> Cohort:
    """Reads a cohort file, all of whose clients the data has; without those held out.

    Privacy: public; of the data only the clients' names are read.

    Args:
        path: the file.
        data: the data of all clients.
        setting: that names the file, in errors.

    Raises:
        UserError: an unreadable file, or names that the data does not have.
    """
    cohort = read_cohort(path, setting)
    _check_known(setting, path, cohort.names, data)
    # An owner held out is no client, whoever has named it.
    names = [name for name in cohort.names if name not in data.test_owners]
    return dataclasses.replace(cohort, names=tuple(names))


def _check_known(
    setting: str,
    path: Path,
    names: Collection[str],
    data: FederatedImages,
) -> None:
    """Refuses a file with names that the data does not have."""
    unknown = sorted(_unknown(names, data))
    if unknown:
        raise UserError(
            f"{setting} = {path}: data = {data.name} has no client "
            f"{first_n(map(repr, unknown))} ({len(unknown)} of {len(names)} names); "
            f"give --{setting} a file of this data's clients"
        )


def _unknown(names: Collection[str], data: FederatedImages) -> set[str]:
    """Returns the names that the data do not have."""
    return {*names} - {*data.client_names, *data.test_owners}


def keep_cohort(
    config: RunConfig,
    data: FederatedImages,
    *,
    may_be_old: bool = False,
) -> FederatedImages:
    """Keeps the clients of the run's cohort, in the data's order.

    Privacy: reads private data; output private. Reads the names alone.

    Args:
        config: with `cohort`, and `num_clients` for the first of them; without
            `cohort` nothing changes.
        data: the data of all clients.
        may_be_old: whether owners that the file of `cohorts` names and the data do not
            have are passed over, as in one that a client wrote itself before they
            left. In a file that a user gives they are an error.

    Raises:
        UserError: an unreadable file, names that the data does not have, or fewer than
            num_clients.
    """
    settings = (config.cohort, config.cohorts, config.cohort_value)
    if settings == (None, None, None):
        return data
    if config.cohorts is not None:
        data = _with_cohorts(Path(config.cohorts), data, may_be_old)
        # A client may have the file and take part in a run of everybody; and files of
        # client names leave out others on purpose.
        if asks_for_cohorts(config) and config.cohort is None:
            _warn_of_owners_without_a_line(config.cohorts, data)
    elif config.cohort_value is not None:
        # Without the file nobody has the value, and not everybody.
        raise UserError(
            f"cohort_value = {config.cohort_value}: cohorts is unset; give --cohorts, "
            "the file that says who has it"
        )
    wanted = set(data.client_names)
    where = f"data = {data.name} has"
    if config.cohort is not None:
        cohort = cohort_of_data(Path(config.cohort), data)
        wanted = set(cohort.names)
        where = f"cohort = {config.cohort} has"
    if config.cohort_value is not None:
        wanted &= _names_with(config.cohort_value, data)
        where = f"cohort_value = {config.cohort_value} has"
    check_num_clients(
        config,
        most=len(wanted),
        who_has=where,
        what="clients",
    )
    # In the data's order, whatever the file's is: a run then depends on who is in it.
    kept = [i for i, name in enumerate(data.client_names) if name in wanted]
    kept = kept[: config.num_clients]
    # Either of the two may be empty: nothing is held out, or no file has cohorts.
    tests: tuple[NDArray[np.int64], ...] = ()
    if data.client_test_records:
        tests = tuple(data.client_test_records[i] for i in kept)
    cohorts: tuple[CohortOfClient | None, ...] = ()
    if data.client_cohorts:
        cohorts = tuple(data.client_cohorts[i] for i in kept)
    return dataclasses.replace(
        data,
        client_records=tuple(data.client_records[i] for i in kept),
        client_names=tuple(data.client_names[i] for i in kept),
        client_test_records=tests,
        client_cohorts=cohorts,
    )


def _with_cohorts(
    path: Path,
    data: FederatedImages,
    may_be_old: bool,
) -> FederatedImages:
    """Returns data that know the cohort of each client, by the owner's own file."""
    cohorts = read_client_cohorts(path)
    if may_be_old:
        _warn_of_owners_that_are_gone(path, cohorts, data)
    else:
        _check_known("cohorts", path, cohorts, data)
    of_clients = tuple(cohorts.get(name) for name in data.client_names)
    return dataclasses.replace(data, client_cohorts=of_clients)


def _warn_of_owners_that_are_gone(
    path: Path,
    names: Collection[str],
    data: FederatedImages,
) -> None:
    """Says how many owners of a file the data do not have any more.

    Privacy: reads private data; the warning is for whoever has the file.
    """
    gone = _unknown(names, data)
    if gone:
        warnings.warn(
            f"cohorts = {path}: {len(gone)} of {len(names)} owners in it are not in "
            f"data = {data.name} any more, so they are passed over",
            RuntimeWarning,
            stacklevel=1,
        )


def _warn_of_owners_without_a_line(path: str, data: FederatedImages) -> None:
    """Says how many owners are in no cohort, which a misspelt name may be the cause of.

    Privacy: reads private data; the warning is for whoever has the file.
    """
    without = data.client_cohorts.count(None)
    if without:
        warnings.warn(
            f"cohorts = {path}: {without} of {data.num_clients} owners have no line "
            "in it, so they are in no cohort",
            RuntimeWarning,
            stacklevel=1,
        )


def _names_with(value: str, data: FederatedImages) -> set[str]:
    """Returns the names of the clients whose cohort has a value."""
    names: set[str] = set()
    # Not strict: without a file of cohorts there is nothing to look through.
    for name, cohort in zip(data.client_names, data.client_cohorts, strict=False):
        if cohort is not None and cohort.value == value:
            names.add(name)
    if not names:
        raise UserError(
            f"cohort_value = {value}: no client has it; give one that the file of "
            "--cohorts has"
        )
    return names
