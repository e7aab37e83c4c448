"""The cohorts of `fedgs debug`, given as two files of client names."""

import csv
import dataclasses
import io
from collections import Counter
from pathlib import Path

from fedgs.app.debug.debug_request import Compared
from fedgs.cohorts.client_groups import HEADER, PART
from fedgs.cohorts.cohort_file import Cohort, write_cohort
from fedgs.config.feature_settings import FEWEST_CLIENTS, GroupMeansSettings
from fedgs.config.run_config import GroupMeansConfig, RunConfig
from fedgs.data.cohort import cohort_of_data
from fedgs.data.federated import FederatedImages
from fedgs.diagnosis.catalogue import HEALTHY, SUSPICIOUS
from fedgs.errors import UserError, first_n
from fedgs.files import write_atomically
from fedgs.randomness import stream


def as_settings(
    folder: Path,
    compared: Compared,
    config: RunConfig,
    own: GroupMeansSettings,
    everyone: FederatedImages,
) -> RunConfig:
    """Returns settings that compare two files of client names, in groups of one size.

    Args:
        folder: where the files are written that the settings name.
        compared: the two files.
        config: with a seed.
        own: the same settings, as the method sees them.
        everyone: the images of all clients.

    Raises:
        UserError: unknown clients, clients in both cohorts, or too few of them.
    """
    files = {
        HEALTHY: Path(str(compared.healthy)).expanduser(),
        SUSPICIOUS: Path(str(compared.suspicious)).expanduser(),
    }
    cohorts = {n: cohort_of_data(file, everyone, n) for n, file in files.items()}
    _check_apart(files, cohorts)
    groups = own.groups
    count = min(len(cohort.names) for cohort in cohorts.values())
    size = own.clients_per_group or count // groups
    if size < FEWEST_CLIENTS or size * groups > count:
        smaller = min(cohorts, key=lambda name: len(cohorts[name].names))
        raise UserError(
            f"{smaller} = {files[smaller]}: {count} clients are too few for {groups} "
            f"groups of {max(size, FEWEST_CLIENTS)}; give a larger cohort, or a "
            "smaller --clients-per-group"
        )
    table = io.StringIO()
    rows = csv.writer(table)
    rows.writerow([*HEADER, PART])
    names: list[str] = []
    for value, cohort in cohorts.items():
        # Random groups are what makes groups exchangeable in the permutation test.
        rng = stream(config.seed or 0, f"debug-groups/{value}")
        order = rng.permutation(len(cohort.names))[: size * groups]
        for place, index in enumerate(order):
            rows.writerow([cohort.names[index], value, place // size])
            names.append(cohort.names[index])
    write_atomically(folder / "cohorts.csv", table.getvalue().encode())
    both = dataclasses.replace(cohorts[HEALTHY], names=tuple(names))
    write_cohort(folder / "cohort.txt", both, "the clients of both cohorts")
    settings = {
        "cohort": str(folder / "cohort.txt"),
        "cohorts": str(folder / "cohorts.csv"),
        "healthy": HEALTHY,
        "suspicious": SUSPICIOUS,
        "clients_per_group": "",
    }
    return RunConfig.from_flat(settings, config).validate()


def smallest_group(own: GroupMeansConfig, data: FederatedImages) -> int:
    """Returns how many clients a group of the smaller cohort, or of a node, has.

    Only where this process has all data: in a deployment, nobody knows of cohorts.

    Raises:
        UserError: too few for the groups; names the cohort and its number of clients.
    """
    if own.compares_nodes:
        return own.group_size
    cohorts = [cohort for cohort in data.client_cohorts if cohort]
    sizes = Counter(cohort.value for cohort in cohorts)
    parts = Counter(
        (cohort.value, cohort.part % own.groups)
        for cohort in cohorts
        if cohort.part is not None
    )
    counts: list[int] = []
    for name in (HEALTHY, SUSPICIOUS):
        value = getattr(own, name)
        count = sizes[value]
        if count < own.groups * FEWEST_CLIENTS:
            raise UserError(
                f"{name} = {value}: {count} clients have it, too few for "
                f"{own.groups} groups of {FEWEST_CLIENTS}; give a value that more "
                "clients have in the file of --cohorts"
            )
        counts.append(count // own.groups)
        # A file that says who is in which group may make groups of any size.
        if parts:
            least = min(parts[value, part] for part in range(own.groups))
            if least < FEWEST_CLIENTS:
                raise UserError(
                    f"{name} = {value}: by the parts in the file of --cohorts one of "
                    f"its groups has {least} clients, fewer than {FEWEST_CLIENTS}; "
                    "deal its owners evenly, or leave the column out"
                )
            counts.append(least)
    return min(counts)


def _check_apart(files: dict[str, Path], cohorts: dict[str, Cohort]) -> None:
    """Refuses cohorts that share clients, or whose epsilons cannot be stated together.

    Raises:
        UserError: names both files.
    """
    healthy = cohorts[HEALTHY]
    suspicious = cohorts[SUSPICIOUS]
    # How the clients were selected is a condition of every epsilon, and one table
    # states the epsilons of both cohorts.
    of_healthy = dataclasses.replace(healthy, names=())
    of_suspicious = dataclasses.replace(suspicious, names=())
    if of_healthy != of_suspicious:
        raise UserError(
            f"suspicious = {files[SUSPICIOUS]}: selection {suspicious.selection}; "
            f"healthy = {files[HEALTHY]}: selection {healthy.selection}, or another "
            "one: the epsilons of two selections cannot be added; take both cohorts "
            "from one selection, or both from your own files"
        )
    both = sorted(set(healthy.names) & set(suspicious.names))
    if both:
        shown = first_n(map(repr, both))
        raise UserError(
            f"healthy = {files[HEALTHY]}: {shown} ({len(both)} clients) is in "
            f"suspicious = {files[SUSPICIOUS]} too; a client belongs to one cohort"
        )
