"""The cohorts of `fedgs debug`: their source, their groups, and their checks."""

import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.debug.plan import Groups
from experiments.debug.request import DebugRequest
from fedgs.app.commands import cohorts as selecting
from fedgs.cohorts.files import Cohort, read_cohort
from fedgs.cohorts.selection import ABOVE, SELECTED, Selection
from fedgs.config.run_config import RunConfig
from fedgs.config.settings import settings_of, settings_with
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError, first_n
from fedgs.files import read_json
from fedgs.randomness import derived_seed, stream
from fedgs.runs.run_folder import RunFolder

FEWEST_CLIENTS = 2  # of a group
FILES = {"healthy": f"{ABOVE}.txt", "suspicious": f"{SELECTED}.txt"}
# What runs that are compared may differ in: what is compared, and what changes nothing.
_MAY_DIFFER = {"cohort", "round_timeout", "nodes", "corruption", "corruption_unit"}
_MAY_DIFFER |= {"corruption_fraction", "corruption_seed"}
_MAY_DIFFER |= {"seed", "noise_seed", "selection_seed"}
_MAY_DIFFER |= {*settings_with("machine"), *settings_with("free")}


def shared_settings(config: RunConfig, request: DebugRequest) -> RunConfig:
    """Returns the settings with the bug that a folder of `fedgs cohorts` planted.

    Raises:
        UserError: no such folder, or one of other data or another bug.
    """
    folder = request.cohorts
    if folder is None:
        return config
    if not (folder / "cohorts.json").is_file():
        raise UserError(
            f"cohorts = {folder}: no folder of `fedgs cohorts` (cohorts.json is "
            "missing); give --cohorts its --output"
        )
    selected = RunConfig.from_flat(read_json(folder / "cohorts.json")["config"])
    for name in settings_with("owners"):
        one, other = getattr(selected, name), getattr(config, name)
        if one != other:
            raise UserError(
                f"{name} = {other}: the cohorts of {folder} are of {name} = {one}; "
                f"give --{name.replace('_', '-')} {one}"
            )
    if request.is_experiment and config.corruption != selected.corruption:
        raise UserError(
            f"bug: {config.corruption}, but {folder} was selected with corruption = "
            f"{selected.corruption}; leave out --bug"
        )
    seed = selected.corruption_seed
    return dataclasses.replace(
        config,
        corruption=selected.corruption,
        corruption_unit=selected.corruption_unit,
        corruption_fraction=selected.corruption_fraction,
        corruption_seed=selected.seed if seed is None else seed,
    )


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
    seed, noise_seed = config.corruption_seed, config.noise_seed
    if noise_seed is not None:
        noise_seed = derived_seed(noise_seed, "debug-noise", number) % 2**31
    return dataclasses.replace(
        config,
        num_clients=num_clients,
        clients_per_node=num_clients,
        node_sizes=None,
        clients_per_round=None if config.client_selection == "all" else num_clients,
        seed=derived_seed(config.seed, "debug-group", number) % 2**31,
        corruption_seed=config.seed if seed is None else seed,
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
    folder = request.cohorts or path / "cohorts"
    if request.cohorts is None and not (folder / "cohorts.json").exists():
        select(folder, config, request)
    files = {cohort: folder / name for cohort, name in FILES.items()}
    for cohort, file in files.items():
        if not file.exists():
            raise UserError(
                f"{cohort}: {file} is missing: the selection found no client for it; "
                "select again with other --percentile-below and --percentile-above"
            )
    return files


def select(folder: Path, config: RunConfig, request: DebugRequest) -> None:
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
    selecting.cohorts(
        RunConfig(output=str(folder), **settings), selection_of(request), as_json=False
    )


def selection_of(request: DebugRequest) -> Selection:
    """Returns the settings of the selection.

    Raises:
        UserError: percentiles out of range, or in the wrong order.
    """
    return Selection(
        percentile_below=request.percentile_below,
        percentile_above=request.percentile_above,
        num_rounds=request.selection_rounds,
    )


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
    cohorts = {name: read_cohort(file, name) for name, file in files.items()}
    known = set(everyone.client_names)
    for cohort, members in cohorts.items():
        if unknown := sorted(set(members.names) - known):
            raise UserError(
                f"{cohort} = {files[cohort]}: data = {config.data} has no client "
                f"{first_n(map(repr, unknown))} ({len(unknown)} of "
                f"{len(members.names)} names); give --{cohort} a file of this data's "
                "clients"
            )
    check_selection({f"{c} = {files[c]}": members for c, members in cohorts.items()})
    healthy, suspicious = cohorts["healthy"], cohorts["suspicious"]
    if both := sorted(set(healthy.names) & set(suspicious.names)):
        raise UserError(
            f"healthy = {files['healthy']}: {first_n(map(repr, both))} ({len(both)} "
            f"clients) is in suspicious = {files['suspicious']} too; a client belongs "
            "to one cohort"
        )
    smaller = min(cohorts, key=lambda cohort: len(cohorts[cohort].names))
    count = len(cohorts[smaller].names)
    size = request.clients_per_group or count // request.groups
    if size < FEWEST_CLIENTS or size * request.groups > count:
        again = ""
        if request.healthy is None and request.cohorts is None:
            folder = files[smaller].parent
            again = f"; the selection is made: start again with --cohorts {folder}"
        raise _too_few(f"{smaller} = {files[smaller]}", count, request, again=again)
    assert config.seed is not None
    groups = dict[str, Cohort]()
    for cohort, members in cohorts.items():
        rng = stream(config.seed, f"debug-groups/{cohort}")
        names = [members.names[i] for i in rng.permutation(len(members.names))]
        for number in range(request.groups):
            chosen = tuple(sorted(names[number * size : (number + 1) * size]))
            groups[f"{cohort}-{number}"] = dataclasses.replace(members, names=chosen)
    counts = {c: len(members.names) for c, members in cohorts.items()}
    return Groups(size, counts, groups, healthy.selection != "given")


def check_selection(cohorts: Mapping[str, Cohort]) -> None:
    """Refuses cohorts of different sources: no epsilon would hold for all of them.

    Args:
        cohorts: what it is, for the error, to the cohort.

    Raises:
        UserError: one is the user's own and another selected, or of two selections.
    """
    (title, first), *others = cohorts.items()
    for name, cohort in others:
        if (cohort.selection, cohort.cost, cohort.selection_id) != (
            first.selection,
            first.cost,
            first.selection_id,
        ):
            raise UserError(
                f"{name}: selection {cohort.selection}; {title}: selection "
                f"{first.selection}, or another one: their epsilons cannot be stated "
                "together; take all cohorts from one selection, or all from your own "
                "files"
            )


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
    shares = {
        "percentile_below": request.percentile_below,
        "percentile_above": 100 - request.percentile_above,
    }
    for name, share in shares.items():
        count = math.ceil(num_clients * share / 100)
        if size * request.groups > count:
            value = getattr(request, name)
            raise _too_few(f"{name} = {value:g}", count, request)


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


# ------------------------------------------------------------------ runs


def check_runs(folders: Mapping[str, list[RunFolder]]) -> None:
    """Refuses runs that cannot be compared as groups of two cohorts.

    Raises:
        UserError: of different data or settings, on the same clients, or of unequal
            number.
    """
    counts = {cohort: len(own) for cohort, own in folders.items()}
    if len(set(counts.values())) != 1:
        raise UserError(f"runs = {counts}: give each cohort the same number of runs")
    first, *others = [folder for own in folders.values() for folder in own]
    data = settings_with("images")
    names = [n for n in first.config.to_flat() if n not in {*data, *_MAY_DIFFER}]
    for folder in others:
        for name in (*data, *names):
            one, other = getattr(first.config, name), getattr(folder.config, name)
            if one != other:
                what = "data" if name in data else "settings"
                raise UserError(
                    f"{name} = {one} in {first.path}, {other} in {folder.path}: runs "
                    f"of different {what} cannot be compared; train both alike"
                )
    owners = dict[str, Path]()
    cohorts = dict[str, Cohort]()
    for folder in (first, *others):
        if folder.config.cohort is None:
            raise UserError(
                f"{folder.path}: is a run on all clients; train every group with "
                "--cohort, on clients of its own"
            )
        own = read_cohort(Path(folder.config.cohort))
        cohorts[str(folder.path)] = own
        for name in own.names:
            if other := owners.get(name):
                raise UserError(
                    f"{folder.path}: client {name!r} is in {other} too; a client "
                    "belongs to one group of one cohort"
                )
            owners[name] = folder.path
    check_selection(cohorts)


def check_independent(folders: Sequence[RunFolder]) -> None:
    """Refuses generators that were trained elsewhere and do not make a comparison.

    Raises:
        UserError: two of one seed, or after different rounds.
    """
    for name in ("seed", "noise_seed"):
        seen = dict[int, Path]()
        for folder in folders:
            value = getattr(folder.config, name)
            if value is None:
                continue
            if value in seen:
                raise UserError(
                    f"{name} = {value} in {seen[value]} and {folder.path}: generators "
                    "of one seed resemble each other, and the comparison rests on "
                    "their being independent; train every group with a "
                    f"--{name.replace('_', '-')} of its own"
                )
            seen[value] = folder.path
    first, *others = folders
    for folder in others:
        if folder.last_round != first.last_round:
            raise UserError(
                f"{folder.path}: ended after round {folder.last_round}, {first.path} "
                f"after round {first.last_round}: runs of different length cannot be "
                f"compared; continue with `fedgs resume {folder.path}`"
            )
