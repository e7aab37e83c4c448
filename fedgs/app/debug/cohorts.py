"""The cohorts of `fedgs debug`: their source, their groups, and their checks."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

from fedgs.app.commands.select_clients import select_clients
from fedgs.app.debug.debug_request import DebugRequest
from fedgs.cohorts.cohort_file import Cohort, write_cohort
from fedgs.cohorts.selection import ABOVE, SELECTED, Selection
from fedgs.config.method_settings import settings_of
from fedgs.config.run_config import RunConfig
from fedgs.data.cohort import cohort_of_data
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError, first_n
from fedgs.randomness import derived_seed, stream

FEWEST_CLIENTS = 2  # of a group
# Half of the clients on either side of the median, so that every client can be used.
SELECTION = Selection(below=50, above=50, are_percentiles=True)
FILES = {"healthy": f"{ABOVE}.txt", "suspicious": f"{SELECTED}.txt"}

Groups = dict[str, Cohort]  # by their names, such as healthy-0; all of one size


def write_groups(folder: Path, groups: Groups) -> None:
    """Writes one cohort file per group."""
    folder.mkdir(exist_ok=True)
    for name, cohort in groups.items():
        title = f"{name}: {len(cohort.names)} clients, a random group of its cohort"
        write_cohort(folder / f"{name}.txt", cohort, title)


def group_settings(config: RunConfig, num_clients: int, number: int) -> RunConfig:
    """Returns the settings of one group's run.

    One node hosts all clients of the group, so that it adds noise once: the server
    then sees no more than who gets the generator, and for a target_epsilon against
    either the noise is the least. The node is part of the mechanism.

    Every group has seeds of its own: what its generator has in common with others
    comes from the data.

    Args:
        config: shared by all groups, with a seed.
        num_clients: of every group.
        number: of the group, among all of both cohorts.
    """
    assert config.seed is not None
    # The planted bug is the one setting that no group may draw anew: the clients that
    # are spoilt must be the same in every run and in the selection.
    corruption_seed = config.corruption_seed
    if corruption_seed is None:
        corruption_seed = config.seed
    noise_seed = config.noise_seed
    if noise_seed is not None:
        # Groups with the same noise would let a reader subtract it.
        noise_seed = derived_seed(noise_seed, "debug-noise", number) % 2**31
    clients_per_round = num_clients
    if config.client_selection == "all":
        clients_per_round = None
    return dataclasses.replace(
        config,
        num_clients=num_clients,
        clients_per_node=num_clients,
        node_sizes=None,
        clients_per_round=clients_per_round,
        seed=derived_seed(config.seed, "debug-group", number) % 2**31,
        corruption_seed=corruption_seed,
        noise_seed=noise_seed,
    )


# ------------------------------------------------------------------ cohorts


def cohort_files(
    path: Path, config: RunConfig, request: DebugRequest
) -> dict[str, Path]:
    """Returns the cohort files; selects the cohorts by accuracy where none is given.

    Privacy: a selection made here is not private; the cohorts are published.

    Raises:
        UserError: the selection left a cohort empty.
    """
    if request.healthy is not None and request.suspicious is not None:
        return {"healthy": request.healthy, "suspicious": request.suspicious}
    folder = path / "cohorts"
    # A complete selection is used again: another one could choose other clients, and it
    # would tell more about everybody's data.
    if not (folder / "cohorts.json").exists():
        select(folder, config)
    files = {cohort: folder / name for cohort, name in FILES.items()}
    for cohort, file in files.items():
        if not file.exists():
            raise UserError(
                f"{cohort}: {file} is missing: all clients have one accuracy; give "
                "--healthy and --suspicious"
            )
    return files


def select(folder: Path, config: RunConfig) -> None:
    """Selects cohorts by accuracy into a folder, and prints what is public.

    What an interrupted selection left in the folder is removed.

    Privacy: not private; the cohorts are published.

    Raises:
        UserError: bad input.
        Exit: the selection stopped early or failed (code 1).
    """
    names = [spec.name for spec in settings_of("Data", "seed", "engine", "num_workers")]
    names += [name for name in config.to_flat() if name.startswith("corruption")]
    settings = {name: getattr(config, name) for name in names}
    shutil.rmtree(folder, ignore_errors=True)
    config = RunConfig(output=str(folder), **settings)
    select_clients(config, SELECTION)


def make_groups(
    files: Mapping[str, Path],
    everyone: FederatedImages,
    config: RunConfig,
    request: DebugRequest,
) -> Groups:
    """Splits each cohort into groups of equal size, at random by the seed.

    All groups have the same number of clients, also of different cohorts: otherwise
    their generators would differ for that reason. Who is left over is not used.

    Raises:
        UserError: unknown clients, clients in both cohorts, or too few of them.
    """
    cohorts = {n: cohort_of_data(file, everyone, n) for n, file in files.items()}
    healthy = cohorts["healthy"]
    suspicious = cohorts["suspicious"]
    # How the clients were selected is a condition of every epsilon, and one table
    # states the epsilons of both cohorts.
    of_healthy = dataclasses.replace(healthy, names=())
    of_suspicious = dataclasses.replace(suspicious, names=())
    if of_healthy != of_suspicious:
        raise UserError(
            f"suspicious = {files['suspicious']}: selection {suspicious.selection}; "
            f"healthy = {files['healthy']}: selection {healthy.selection}, or another "
            "one: their epsilons cannot be stated together; take both cohorts from one "
            "selection, or both from your own files"
        )
    # With a client in both, the groups would not compose in parallel.
    both = sorted(set(healthy.names) & set(suspicious.names))
    if both:
        shown = first_n(map(repr, both))
        raise UserError(
            f"healthy = {files['healthy']}: {shown} ({len(both)} "
            f"clients) is in suspicious = {files['suspicious']} too; a client belongs "
            "to one cohort"
        )
    smaller = min(cohorts, key=lambda cohort: len(cohorts[cohort].names))
    count = len(cohorts[smaller].names)
    size = request.clients_per_group or count // request.groups
    if size < FEWEST_CLIENTS or size * request.groups > count:
        again = ""
        # The selection is public already, so the user should not make another one.
        if request.healthy is None:
            given = " ".join(f"--{cohort} {file}" for cohort, file in files.items())
            again = f"; the selection is made: start again with {given}"
        raise _too_few(f"{smaller} = {files[smaller]}", count, request, again=again)
    assert config.seed is not None
    groups = Groups()
    for cohort, members in cohorts.items():
        # Random groups are what makes groups exchangeable in the permutation test.
        rng = stream(config.seed, f"debug-groups/{cohort}")
        names = [members.names[i] for i in rng.permutation(len(members.names))]
        for number in range(request.groups):
            chosen = names[number * size : (number + 1) * size]
            group = dataclasses.replace(members, names=tuple(sorted(chosen)))
            groups[f"{cohort}-{number}"] = group
    return groups


def check_size(
    size: int, everyone: FederatedImages, data: str, request: DebugRequest
) -> None:
    """Refuses data with too few clients for the cohorts that will be selected.

    Args:
        size: clients of a group.
        everyone: who can be selected.
        data: the setting, for errors.
        request: of the user.

    Raises:
        UserError: names the source that is too small.
    """
    num_clients = everyone.num_clients
    if size < FEWEST_CLIENTS or 2 * size * request.groups > num_clients:
        raise _too_few(f"data = {data}", num_clients, request, cohorts=2)


def _too_few(
    source: str, count: int, request: DebugRequest, cohorts: int = 1, again: str = ""
) -> UserError:
    size = request.clients_per_group or FEWEST_CLIENTS
    least = cohorts * request.groups * size
    return UserError(
        f"{source}: {count} clients are too few for {cohorts * request.groups} groups "
        f"of at least {size}, that is {least}; give larger cohorts or a smaller "
        f"--clients-per-group or --groups{again}"
    )
