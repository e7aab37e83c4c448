"""Runs of group means: two dozen clients of strokes, on two nodes or in two cohorts."""

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgs.cohorts.client_groups import HEADER, groups_of
from fedgs.config.run_config import GroupMeansConfig, ResolvedConfig
from fedgs.data.cohort import keep_cohort
from fedgs.data.federated import FederatedImages
from fedgs.runs.run_folder import RunFolder
from runs import Report, ignore, train
from tiny import MOMENTS, NUM_CLASSES, strokes, tiny_config

CLIENTS = 24
IMAGES = 6  # of every client, two of each class
# What every run of mean features is, without the settings of three releases.
ONCE: dict[str, Any] = MOMENTS | {"phases": "group-means", "num_rounds": 1}
ONCE |= {"num_clients": CLIENTS, "clients_per_node": CLIENTS // 2}
VALUES = ("v1", "v2", "other")  # the cohorts that a file of `write_cohorts` has


def people(clients: int = CLIENTS, channels: int = 1) -> FederatedImages:
    """Returns clients p00, p01, ... of strokes, whose pictures all differ."""
    images, labels = strokes(count=IMAGES * clients, seed=3)
    return FederatedImages(
        images=np.repeat(images, channels, axis=1),
        labels=labels,
        client_records=tuple(np.arange(IMAGES * clients).reshape(clients, IMAGES)),
        client_names=tuple(f"p{number:02}" for number in range(clients)),
        num_classes=NUM_CLASSES,
        name="tiny",
    )


def cohorts_of(data: FederatedImages) -> dict[str, str]:
    """Returns a cohort for each client but every eighth, which no file names."""
    named = enumerate(data.client_names)
    return {name: VALUES[i % len(VALUES)] for i, name in named if i % 8 != 7}


def write_people(path: Path) -> str:
    """Writes the same clients for `npz:PATH`; returns that value of `data`."""
    data = people()
    owners = np.repeat(data.client_names, IMAGES)
    np.savez(path, images=data.images, labels=data.labels, clients=owners)
    return f"npz:{path}"


def write_cohorts(path: Path, cohorts: Mapping[str, Sequence[object] | str]) -> str:
    """Writes a file of cohorts: of each owner its value, or a value and a part."""
    rows = [[o, v] if isinstance(v, str) else [o, *v] for o, v in cohorts.items()]
    header = [*HEADER, "part"][: len(rows[0])]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def of_nodes(**settings: object) -> ResolvedConfig:
    """Returns a run that compares two nodes of 12 clients, in groups of three."""
    return tiny_config(**ONCE | settings)


def of_cohorts(file: str, **settings: object) -> ResolvedConfig:
    """Returns a run that compares the cohorts v1 and v2, wherever clients live."""
    asked = {"cohorts": file, "healthy": "v1", "suspicious": "v2"}
    return tiny_config(**ONCE | asked | settings)


def finished(
    config: ResolvedConfig, data: FederatedImages, report: Report = ignore
) -> RunFolder:
    """Runs it to the end by the local engine, with the file of cohorts if it has one.

    Args:
        config: with an `output`.
        data: of all clients.
        report: as `runs.train`.
    """
    folder = RunFolder.create(config)
    train(folder, report, data=keep_cohort(config, data))
    return folder


def made(
    mode: str, place: Path, **settings: object
) -> tuple[ResolvedConfig, FederatedImages]:
    """Returns settings that compare "nodes" or "cohorts", and the data of their run.

    Args:
        mode: what is compared.
        place: a folder of the test, for the file of cohorts and the output.
        **settings: over those.
    """
    given = {"output": str(place / "run")} | settings
    data = people(channels=int(str(given.get("image_channels", 1))))
    if mode == "nodes":
        return of_nodes(**given), data
    file = write_cohorts(place / "own.csv", cohorts_of(data))
    config = of_cohorts(file, **given)
    return config, keep_cohort(config, data)


def members(
    config: ResolvedConfig, data: FederatedImages
) -> dict[tuple[str, int], list[int]]:
    """Returns the clients of every group, by the cohort or node and the part."""
    own = phase_of(config)
    found: dict[tuple[str, int], list[int]] = {}
    for node in range(config.num_nodes):
        hosted = config.hosting.hosted(node)
        names = [data.client_names[client] for client in hosted]
        cohorts = [data.client_cohorts[c] for c in hosted if data.client_cohorts]
        titles = (str(node),) if own.compares_nodes else ("v1", "v2")
        for client, group in zip(hosted, groups_of(own, names, cohorts), strict=True):
            if group is not None:
                key = titles[group // own.groups], group % own.groups
                found.setdefault(key, []).append(client)
    return found


def only(data: FederatedImages, clients: Sequence[int]) -> FederatedImages:
    """Returns the data of some clients, who are in no cohort."""
    return dataclasses.replace(
        data,
        client_records=tuple(data.client_records[client] for client in clients),
        client_names=tuple(data.client_names[client] for client in clients),
        client_cohorts=(),
    )


def phase_of(config: ResolvedConfig) -> GroupMeansConfig:
    """Returns the settings as the method sees them."""
    phase = config.at_phase(0)
    assert isinstance(phase, GroupMeansConfig)
    return phase
