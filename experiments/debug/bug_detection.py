"""What `fedgs debug` does: groups of two cohorts, a generator each, and a diagnosis.

The folder that it writes, OUT:

    debug.json          what is asked for; written first, completed with the groups
    cohorts/            of `fedgs cohorts`, unless the user gave cohorts or runs
    groups/*.txt        the cohort file of every group
    healthy-0/ ... suspicious-0/ ...   a run folder per group
    samples/*.npz       images and labels drawn from each generator
    diagnosis.json diagnosis.png

A client is in one group of one cohort. So the generators compose in parallel: all of
them together tell about a client what that of its group tells.
"""

import dataclasses
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.debug import cohorts as debug_cohorts
from experiments.debug import power
from experiments.debug import report as debug_report
from experiments.debug.plan import FORMAT, config_of, read_debug, request_of, write_plan
from experiments.debug.request import COHORTS, DebugRequest
from fedgs.app.commands import privacy as privacy_report
from fedgs.app.commands.cohorts import planted_counts, refuse_cohort, split_selectable
from fedgs.app.commands.progress import say
from fedgs.app.commands.run_outcome import exit_if_stopped, make_output, new_output
from fedgs.app.commands.train import go_back, train_from_checkpoint
from fedgs.cohorts.files import read_cohort
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data import sources
from fedgs.data.cohort import keep_cohort
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.data.transformations import TRANSFORMATIONS, Transformation
from fedgs.diagnosis.diagnosis import ONE_OF, OTHER, diagnose
from fedgs.diagnosis.permutation import attainable_p
from fedgs.errors import UserError
from fedgs.evaluation.images import LabelledImages
from fedgs.federation.preparation import check_capacity, resolve, with_absolute_paths
from fedgs.federation.training import RunStopped
from fedgs.files import read_json, replacing, write_json
from fedgs.privacy.accounting import Statement
from fedgs.runs import epsilons, sample
from fedgs.runs.run_folder import RunFolder, versions

PARALLEL = (
    "cohorts: a client is in one group of one cohort, and beyond the selection of "
    "cohorts the groups do not depend on data; so this is the largest epsilon of a "
    "group and holds for all generators together"
)


def debug(
    config: RunConfig,
    request: DebugRequest,
    as_json: bool,
    suspects: Sequence[Transformation] = (),
    dry_run: bool = False,
) -> dict[str, Any]:
    """Makes the cohorts, trains a generator per group, and prints the diagnosis.

    Privacy: releases (epsilon, delta)-DP output; events: in the runs' ledgers, in
    parallel over the groups. A selection of cohorts made here is not private.

    Args:
        config: settings of all runs, with `output` and the planted corruption.
        request: everything else.
        as_json: print diagnosis.json instead of tables.
        suspects: the user's own, beside the catalogue.
        dry_run: only say what the plan can find, and write nothing.

    Returns:
        The content of diagnosis.json; nothing of a dry run.

    Raises:
        UserError: bad input, or no bug can be found; nothing was trained.
        Exit: a run stopped early or failed (code 1); the same command with
            --output alone continues.
    """
    path = new_output(config.output)
    config = with_absolute_paths(config)
    if config.seed is None:
        config = dataclasses.replace(config, seed=secrets.randbelow(2**31))
    debug_cohorts.selection_of(request)  # raises where it would later
    if request.runs is not None:
        _warn_if_hopeless(request)
        return _debug_runs(config, request, path, as_json, suspects)
    config = debug_cohorts.shared_settings(config, request)
    if request.healthy is None and request.cohorts is None:
        refuse_cohort(config)
        everyone = split_selectable(config, sources.load_records(config))
    else:
        everyone = load_data(config)
    group = _checked_group(path, config, request, everyone)
    shape = (4, group.image_channels, group.image_size, group.image_size)
    for suspect in suspects:  # that one fails is said before hours of training
        suspect.apply(np.zeros(shape, np.float32), np.zeros(4, np.int64), 1)
    power.show(group, as_error=as_json)
    if dry_run:
        say("no run: --dry-run writes nothing and spends no epsilon", is_error=as_json)
        return {}
    make_output(path)
    write_plan(path, config, request, is_selected=request.healthy is None)
    return _continue(path, everyone, as_json, suspects)


def resume(
    path: Path, as_json: bool, suspects: Sequence[Transformation] = ()
) -> dict[str, Any]:
    """Continues a folder of `debug` where it was left.

    Raises:
        UserError: no such folder, or another process trains in it.
        Exit: a run stopped early or failed (code 1).
    """
    path = path.expanduser().absolute()
    plan, _ = read_debug(path)
    if missing := {"request", "config", "runs", "clients_per_group"} - plan.keys():
        raise UserError(
            f"{path / 'debug.json'}: lacks {', '.join(sorted(missing))}; restore it "
            "from a copy, or start anew with another --output"
        )
    if plan["request"]["runs"] is not None:
        return _diagnose(path, as_json, suspects)
    return _continue(path, load_data(config_of(plan)), as_json, suspects)


def _warn_if_hopeless(request: DebugRequest) -> None:
    least = attainable_p(request.groups)
    if request.rule.alpha < least:
        text = (
            f"Note: alpha = {request.rule.alpha:g} is below {least:.4g}, the least p "
            f"of {request.groups} groups: no bug can be named; give --groups more"
        )
        say(text, is_error=True)


def _checked_group(
    path: Path, config: RunConfig, request: DebugRequest, everyone: FederatedImages
) -> ResolvedConfig:
    """Returns the settings of one group's run, as far as they are known by now.

    Raises:
        UserError: where the runs would raise it, settings and calibration included; or
            with this alpha nothing could be named.
    """
    least = attainable_p(request.groups)
    if request.rule.alpha < least:
        raise UserError(
            f"alpha = {request.rule.alpha:g}: below {least:.4g}, the least p of "
            f"{request.groups} groups, so no bug could be named; give --groups more or "
            "a larger --alpha"
        )
    if request.healthy is not None or request.cohorts is not None:
        files = debug_cohorts.cohort_files(path, config, request)
        count = debug_cohorts.make_groups(files, everyone, config, request).size
    else:
        most = everyone.num_clients // (2 * request.groups)
        count = request.clients_per_group or most
        debug_cohorts.check_size(count, everyone, config.data, request)
    few = dataclasses.replace(
        everyone,
        client_records=everyone.client_records[:count],
        client_names=everyone.client_names[:count],
        client_test_records=everyone.client_test_records[:count],
    )
    resolved, _ = resolve(debug_cohorts.group_settings(config, count, 0), few)
    check_capacity(resolved, path.parent)
    return resolved


# ------------------------------------------------------------------ training


def _continue(
    path: Path,
    everyone: FederatedImages,
    as_json: bool,
    suspects: Sequence[Transformation],
) -> dict[str, Any]:
    """Does what is left: the selection, the groups, the runs, the diagnosis."""
    plan = read_json(path / "debug.json")
    config, request = config_of(plan), request_of(plan)
    with exit_if_stopped(f"continue with: fedgs debug --output {path}"):
        if plan["clients_per_group"] is None:
            files = debug_cohorts.cohort_files(path, config, request)
            groups = debug_cohorts.make_groups(files, everyone, config, request)
            groups.write(path / "groups")
            write_plan(path, config, request, groups, groups.is_selected)
        _train_all(path, config, everyone)
    return _diagnose(path, as_json, suspects)


def _train_all(path: Path, config: RunConfig, everyone: FederatedImages) -> None:
    plan = read_json(path / "debug.json")
    # Alternating, so that a look at an unfinished folder sees both cohorts.
    names = [n for pair in zip(*plan["runs"].values(), strict=True) for n in pair]
    for number, name in enumerate(names):
        if (path / name / "generator.safetensors").exists():
            continue
        print(f"{name}: generator {number + 1} of {len(names)}", flush=True)
        group = dataclasses.replace(
            debug_cohorts.group_settings(config, plan["clients_per_group"], number),
            output=str(path / name),
            cohort=str(path / "groups" / f"{name}.txt"),
        )
        if _train(group, everyone):
            raise RunStopped(f"stopped after generator {number + 1} of {len(names)}")


def _train(config: RunConfig, everyone: FederatedImages) -> bool:
    """Trains one group from the start, or its last checkpoint; tells of a stop."""
    config, data = resolve(config, keep_cohort(config, everyone))
    path = Path(config.output)
    if path.exists():
        folder = RunFolder.open(path)
        go_back(folder)
    else:
        check_capacity(config, path.parent)
        folder = RunFolder.create(config)
    return train_from_checkpoint(folder, data)


# ------------------------------------------------------------------ the diagnosis


def _debug_runs(
    config: RunConfig,
    request: DebugRequest,
    path: Path,
    as_json: bool,
    suspects: Sequence[Transformation],
) -> dict[str, Any]:
    """Diagnoses runs that exist already."""
    assert request.runs is not None
    folders = {c: [RunFolder.open(p) for p in request.runs[c]] for c in COHORTS}
    debug_cohorts.check_runs(folders)
    groups = [*folders["healthy"], *folders["suspicious"]]
    for group in groups:
        sample.load_generator(group)  # raises where there is none
    debug_cohorts.check_independent(groups)
    config = dataclasses.replace(
        folders["healthy"][0].config, output=config.output, seed=config.seed
    )
    make_output(path)
    cohort = read_cohort(Path(folders["healthy"][0].config.cohort or ""))
    is_selected = cohort.selection != "given"
    write_plan(path, config, request, is_selected=is_selected)
    return _diagnose(path, as_json, suspects)


def _diagnose(
    path: Path, as_json: bool, suspects: Sequence[Transformation]
) -> dict[str, Any]:
    """Draws samples, writes diagnosis.json and diagnosis.png, and prints the tables."""
    plan = read_json(path / "debug.json")
    request = request_of(plan)
    folders = {c: [RunFolder.open(path / n) for n in plan["runs"][c]] for c in COHORTS}
    debug_cohorts.check_runs(folders)
    (path / "samples").mkdir(exist_ok=True)
    samples = {
        cohort: [
            _draw(folder, path / "samples" / f"{cohort}-{i}.npz", request)
            for i, folder in enumerate(folders[cohort])
        ]
        for cohort in COHORTS
    }
    config = folders["healthy"][0].config
    num_classes = config.num_classes
    diagnosis = diagnose(
        samples["healthy"],
        samples["suspicious"],
        num_classes,
        request.rule,
        (*TRANSFORMATIONS, *suspects),
        config.moment_size if config.generator == "gaussian" else None,
        has_shared_start=config.public_data is not None,
    )
    debug_report.draw(path / "diagnosis.png", samples, num_classes)
    rows = worst_case(
        [epsilons.of_run(f.path) for runs in folders.values() for f in runs]
    )
    content = {
        "format": FORMAT,
        "sentence": debug_report.sentence(diagnosis),
        **debug_report.with_words(diagnosis),
        "groups": request.groups,
        "samples_per_group": request.samples_per_group,
        "conditions": debug_report.conditions(plan),
        "privacy": [row.to_json() for row in rows],
        **_planted(path, plan, diagnosis.verdict),
        "runs": plan["runs"],
        "picture": "diagnosis.png",
        "versions": versions(),
    }
    write_json(path / "diagnosis.json", content)
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        debug_report.show(path, content)
        privacy_report.show(rows)
        say(f"debug folder {path}; the picture is {path / 'diagnosis.png'}")
    return content


def _draw(folder: RunFolder, path: Path, request: DebugRequest) -> LabelledImages:
    """Draws balanced classes; from every generator with the same latents."""
    config = folder.config
    generator = sample.load_generator(folder)
    labels = np.arange(request.samples_per_group, dtype=np.int64) % config.num_classes
    images = sample.draw(config, generator, labels, seed=0)
    with replacing(path) as file:
        np.savez_compressed(file, images=images, labels=labels)
    return LabelledImages(images, labels)


def worst_case(groups: Sequence[Sequence[Statement]]) -> list[Statement]:
    """Returns for every adversary and relation the statement of the largest epsilon.

    Parallel composition: a client's data are in one group only.

    Args:
        groups: the statements of each group, of the same settings.
    """
    largest = dict[tuple[str, ...], Statement]()
    for row in (row for rows in groups for row in rows):
        key = (row.adversary, row.relation, row.theorem)
        other = largest.get(key)
        if other is None or _size(row) > _size(other):
            largest[key] = row
    return [
        dataclasses.replace(row, conditions=(*row.conditions, PARALLEL))
        for row in largest.values()
    ]


def _size(row: Statement) -> float:
    return float("inf") if row.epsilon is None else row.epsilon


def _planted(path: Path, plan: dict[str, Any], verdict: str) -> dict[str, Any]:
    """Returns what was planted, in whom, and whether the verdict says so."""
    if plan["planted"] is None:
        return {"planted": None, "outcome": None}
    config = config_of(plan)
    bug = plan["planted"]["corruption"]
    members = {
        cohort: [
            name
            for run in plan["runs"][cohort]
            for name in read_cohort(path / "groups" / f"{run}.txt").names
        ]
        for cohort in COHORTS
    }
    counts = planted_counts(config, members)
    planted = {"bug": bug, "fraction": plan["planted"]["fraction"], "counts": counts}
    return {"planted": planted, "outcome": outcome(verdict, bug)}


def outcome(verdict: str, bug: str) -> str:
    """Returns right, undecided or wrong; more than one bug for one planted is wrong.

    `other` names no bug and clears none. It is undecided without a planted bug too:
    cohorts that accuracy selected do differ. "One of" is undecided if the bug is there.
    """
    if verdict in ("undecided", OTHER):
        return "undecided"
    if verdict.startswith(ONE_OF):
        is_among = bug in verdict.removeprefix(ONE_OF).split(", ")
        return "undecided" if is_among else "wrong"
    return "right" if verdict == bug else "wrong"
