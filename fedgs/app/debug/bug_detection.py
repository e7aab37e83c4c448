"""What `fedgs debug` does: one run of group means, and the diagnosis of what it says.

The folder that it writes is a run folder, with what `fedgs.diagnosis.conclusion` adds:
`fedgs privacy`, `report`, `audit`, `resume` take it as any other.
"""

import dataclasses
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgs.app.commands import train
from fedgs.app.commands.run_outcome import new_output
from fedgs.app.debug import power, verdict
from fedgs.app.debug.cohorts import as_settings, smallest_group
from fedgs.app.debug.debug_request import Compared, planted
from fedgs.app.debug.suspects import load_suspect
from fedgs.config.plugins import GROUP_MEANS
from fedgs.config.recipes import configure, recipe, settings_in
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.load import federate, load_data
from fedgs.data.sources import load_kept_records
from fedgs.data.transformations import Transformation
from fedgs.diagnosis.conclusion import DIAGNOSIS, conclude, is_written
from fedgs.diagnosis.rule import Rule
from fedgs.errors import UserError, reject
from fedgs.files import read_json
from fedgs.round.preparation import with_absolute_paths
from fedgs.runs.run_folder import RunFolder

RULE = ("alpha", "min_effect")
PLACES = ("clients_per_node", "node_sizes")
# Clients of a node, more than there are: one node adds its noise once, the least
# against who sees the results.
ONE_NODE = 1_000_000


def from_flags(
    given: dict[str, Any],
    config: Path | None,
    settings: dict[str, Any],
    dry_run: bool = False,
) -> dict[str, Any] | None:
    """Starts a run, or goes on with one where only --output and a rule are given.

    Args:
        given: the command's own flags, without those that are not given.
        config: TOML file of settings over the recipe.
        settings: the settings of the command line, over both.
        dry_run: only say what the plan can find.

    Returns:
        The content of diagnosis.json; None of a dry run.

    Raises:
        UserError: bad input; nothing was trained.
        typer.Exit: the run stopped early or failed (code 1).
    """
    given = dict(given)
    # Suspects run code, so they are no part of a folder and are allowed in both cases.
    suspects = [load_suspect(text) for text in given.pop("suspect", [])]
    output = settings.get("output", "")
    path = Path(output).expanduser()
    rule = {name: settings[name] for name in RULE if name in settings}
    others = {name: value for name, value in settings.items() if name not in rule}
    is_alone = set(others) == {"output"} and not (given or config or dry_run)
    if is_alone or (output and (path / "config.json").is_file()):
        of_run = {**given, **others, "config": config, "dry_run": dry_run or None}
        del of_run["output"]
        why = (
            f"{output} exists, and is continued as it was started; choose another "
            "--output"
        )
        reject(of_run, f"{why}, or leave out")
        return resume(path, suspects, rule)
    names = [spec.name for spec in dataclasses.fields(Compared)]
    compared = Compared(**{name: given[name] for name in names if name in given})
    values = settings | planted(given)
    if "corruption" in values and compared.healthy is None:
        values["corruption_unit"] = "node"
    # A setting of the file is the user's as well, and stays.
    told = {*settings, *settings_in(config, recipe(GROUP_MEANS).phases)}
    if compared.healthy is None or "cohorts" in told:
        values |= compared.settings
    if compared.healthy is not None and not {*PLACES} & told:
        values["clients_per_node"] = ONE_NODE
    configured = configure(GROUP_MEANS, config, values)
    why = "--healthy and --suspicious decide who takes part; leave out"
    reject({"cohort": configured.cohort}, why)
    return debug(configured, compared, suspects, dry_run)


def debug(
    config: RunConfig,
    compared: Compared,
    suspects: Sequence[Transformation] = (),
    dry_run: bool = False,
) -> dict[str, Any] | None:
    """Releases the means of all groups, and prints the diagnosis.

    Privacy: releases (epsilon, delta)-DP output; event: in the run's ledger, one
    Gaussian release of each node.

    Args:
        config: settings of the recipe group-means, with the planted corruption.
        compared: which clients, if it names files of them.
        suspects: the user's own, beside the catalogue.
        dry_run: only say what the plan can find, and write nothing.

    Returns:
        The content of diagnosis.json; None of a dry run.

    Raises:
        UserError: bad input, or no bug can be found; nothing was trained.
        typer.Exit: the run stopped early or failed (code 1).
    """
    if config.output or not dry_run:
        new_output(config.output)
    config = with_absolute_paths(config)
    if config.seed is None:
        # It chooses the groups, and the clients whose images are spoilt: another seed
        # than that of a selection would spoil others than its cohorts were made for.
        if compared.healthy is not None and config.corruption != "none":
            raise UserError(
                "seed is unset: it decides which clients get the bug of --bug; give "
                "the --seed that your cohorts were selected with"
            )
        config = dataclasses.replace(config, seed=secrets.randbelow(2**31))

    def precheck(resolved: ResolvedConfig, data: FederatedImages) -> None:
        # A suspect that fails is reported before the release, not after it.
        shape = (4, *data.images.shape[1:])
        for suspect in suspects:
            suspect.apply(np.zeros(shape, np.float32), np.zeros(4, np.int64), 1)
        phase: Any = resolved.at_phase(0)
        power.show(resolved, smallest_group(phase, data))

    load = load_data
    with tempfile.TemporaryDirectory() as folder:
        if compared.healthy is not None and config.cohorts is None:
            # Read once: the files choose clients of the same records.
            records = load_kept_records(config)
            load = lambda config: federate(config, records)  # noqa: E731
            everyone = load(config)
            # Copied into the run folder, as any cohort of a run.
            own: Any = config.at_phase(0)
            config = as_settings(Path(folder), compared, config, own, everyone)
        train.train(config, {}, dry_run, precheck, load)
    if dry_run:
        return None
    return _shown(RunFolder.open(config.output), suspects, {})


def resume(
    path: Path,
    suspects: Sequence[Transformation] = (),
    changed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Continues a run, or judges what it has released by another rule.

    Args:
        path: the folder.
        suspects: see `debug`.
        changed: fields of `Rule` from now on: the release stays, at no epsilon.

    Raises:
        UserError: no such folder, or another process trains in it.
        typer.Exit: the run stopped early or failed (code 1).
    """
    folder = RunFolder.open(path)
    if not folder.is_finished:
        train.resume(path)
    return _shown(folder, suspects, changed or {})


def _shown(
    folder: RunFolder,
    suspects: Sequence[Transformation],
    changed: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes the diagnosis of a finished run, and prints it."""
    content = None
    if folder.config.method == GROUP_MEANS:
        if suspects or changed or not is_written(folder.path):
            settings = folder.config.to_flat()
            values: dict[str, Any] = {name: settings[name] for name in RULE}
            content = conclude(folder, Rule(**values | {**changed}), suspects)
        else:  # the run has just written it
            content = read_json(folder.path / DIAGNOSIS)
    if content is None:
        raise UserError(
            f"{folder.path}: it is not a finished run of `fedgs debug`; give the "
            "--output of one"
        )
    verdict.show(folder, content)
    return content
