"""What `fedgs debug` does: groups of two cohorts, a generator each, and a diagnosis.

The folder that it writes, OUT:

    debug.json          what is asked for; written first, completed with the groups
    cohorts/            of `fedgs select-clients`, unless the user gave cohorts
    groups/*.txt        the cohort file of every group
    healthy-0/ ... suspicious-0/ ...   a run folder per group
    samples/*.npz       images and labels drawn from each generator
    diagnosis.json diagnosis.png

A client is in one group of one cohort. So the generators compose in parallel: all of
them together tell about a client what that of its group tells.
"""

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedgs.app.commands import privacy as privacy_report
from fedgs.app.commands.run_outcome import (
    exit_if_stopped,
    make_output,
    new_output,
    stopping_on_failure,
)
from fedgs.app.commands.select_clients import planted_counts, split_selectable
from fedgs.app.commands.terminal import say
from fedgs.app.commands.train import go_back, train_from_checkpoint
from fedgs.app.debug import cohorts as debug_cohorts
from fedgs.app.debug import power
from fedgs.app.debug import verdict as verdicts
from fedgs.app.debug.debug_folder import (
    DEBUG_FORMAT,
    config_of,
    read_debug,
    request_of,
    write_plan,
)
from fedgs.app.debug.debug_request import COHORTS, DebugRequest, planted
from fedgs.app.debug.suspects import load_suspect
from fedgs.cohorts.cohort_file import read_cohort
from fedgs.config.recipes import CLASS_MEANS, configure, described
from fedgs.config.run_config import MomentConfig, ResolvedConfig, RunConfig
from fedgs.data import sources
from fedgs.data.cohort import keep_cohort
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.data.transformations import TRANSFORMATIONS, Transformation
from fedgs.diagnosis.diagnosis import ONE_OF, OTHER, diagnose
from fedgs.diagnosis.permutation import attainable_p
from fedgs.errors import UserError, reject, wrap_error
from fedgs.evaluation.images import LabelledImages
from fedgs.files import RESTORE, replacing, write_json
from fedgs.privacy.accountant import Statement
from fedgs.round.preparation import check_capacity, resolve, with_absolute_paths
from fedgs.round.run import RunStopped
from fedgs.runs import epsilons, sample
from fedgs.runs.run_folder import RunFolder, versions
from server.launch import flower_engine

PARALLEL = (
    "cohorts: a client is in one group of one cohort, and beyond the selection of "
    "cohorts the groups do not depend on data; so this is the largest epsilon of a "
    "group and holds for all generators together"
)


def from_flags(
    given: dict[str, Any],
    recipe: str | None,
    config: Path | None,
    settings: dict[str, Any],
    dry_run: bool = False,
) -> dict[str, Any]:
    """Starts a folder, or continues one where only --output and a rule are given.

    Args:
        given: the command's own flags, without those that are not given.
        recipe: of the runs; class-means when None.
        config: TOML file of settings over the recipe.
        settings: of the command line, over both.
        dry_run: only say what the plan can find.

    Returns:
        As `debug`.

    Raises:
        UserError: bad input; nothing was trained.
    """
    given = dict(given)
    # Suspects run code, so they are no part of a folder and are allowed in both cases.
    suspects = [load_suspect(text) for text in given.pop("suspect", [])]
    output = Path(settings.get("output", "")).expanduser()
    # What a folder that goes on cannot take, because its runs have it already.
    of_runs = {"recipe": recipe, "config": config, **settings}
    of_runs.pop("output", None)
    if dry_run:
        of_runs["dry_run"] = True
    is_alone = {*settings} == {"output"} and not (given or recipe or config)
    has_plan = bool(settings.get("output")) and (output / "debug.json").is_file()
    # If only a folder is given, it is one to continue, so `resume` refuses the command
    # if the folder does not exist.
    if is_alone or has_plan:
        why = f"{output} exists and goes on as it was started; choose another --output"
        # The rule alone may change: it judges samples that are released already.
        rule = {n: given.pop(n) for n in ("alpha", "min_effect") if n in given}
        reject({**given, **of_runs}, f"{why}, or leave out")
        return resume(output, suspects, rule)
    values = settings | planted(given)
    configured = configure(recipe or CLASS_MEANS, config, values, engine="flower")
    why = "fedgs debug sets it by --healthy and --suspicious; leave out"
    reject({"cohort": configured.cohort}, why)
    return debug(configured, request_given(given), suspects, dry_run)


def request_given(given: Mapping[str, Any]) -> DebugRequest:
    """Returns the request of the command's own flags.

    Raises:
        UserError: one cohort without the other, or values out of range.
    """
    names = {spec.name for spec in dataclasses.fields(DebugRequest)}
    own = {name: value for name, value in given.items() if name in names}
    return DebugRequest(**own, is_experiment="bug" in given)


def debug(
    config: RunConfig,
    request: DebugRequest,
    suspects: Sequence[Transformation] = (),
    dry_run: bool = False,
) -> dict[str, Any]:
    """Makes the cohorts, trains a generator per group, and prints the diagnosis.

    Privacy: releases (epsilon, delta)-DP output; events: in the runs' ledgers, in
    parallel over the groups. A selection of cohorts made here is not private.

    Args:
        config: settings of all runs, with `output` and the planted corruption.
        request: everything else.
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
    flower_engine.check(config)
    config = with_absolute_paths(config)
    if config.seed is None:
        # The seed chooses the clients whose images are spoilt. Another seed than that
        # of the selection would spoil other clients than the cohorts were made for.
        if request.healthy is not None and config.corruption != "none":
            raise UserError(
                "seed is unset: a bug in cohorts of your own is in the clients that "
                "--seed draws; give the --seed that they were selected with"
            )
        # Drawn here and not by each run: debug.json keeps it, so that the folder can be
        # continued and all groups derive their seeds from one.
        config = dataclasses.replace(config, seed=secrets.randbelow(2**31))
    if request.healthy is None:
        everyone = split_selectable(config, sources.load_records(config))
    else:
        everyone = load_data(config)
    group = _checked_group(path, config, request, everyone)
    shape = (4, group.image_channels, group.image_size, group.image_size)
    # A suspect that fails is reported before hours of training, not after them.
    for suspect in suspects:
        suspect.apply(np.zeros(shape, np.float32), np.zeros(4, np.int64), 1)
    power.show(group)
    if dry_run:
        say("no run: --dry-run writes nothing and spends no epsilon")
        return {}
    make_output(path)
    write_plan(path, config, request)
    return _continue(path, everyone, suspects)


def resume(
    path: Path,
    suspects: Sequence[Transformation] = (),
    rule: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Continues a folder of `debug` where it was left.

    Args:
        path: the folder.
        suspects: see `debug`.
        rule: fields of `Rule` from now on: the samples stay, and no epsilon is spent.

    Raises:
        UserError: no such folder, or another process trains in it.
        Exit: a run stopped early or failed (code 1).
    """
    path = path.expanduser().absolute()
    plan, _ = read_debug(path)
    with wrap_error(Exception, f"{path / 'debug.json'}: cannot be read", RESTORE):
        plan["request"] |= rule or {}
        # Both are read only to refuse what is wrong before debug.json is overwritten.
        request_of(plan)
        config_of(plan)
    write_json(path / "debug.json", plan)
    return _continue(path, load_data(config_of(plan)), suspects)


def _checked_group(
    path: Path, config: RunConfig, request: DebugRequest, everyone: FederatedImages
) -> ResolvedConfig:
    """Returns the settings of one group's run, as far as they are known by now.

    Raises:
        UserError: where the runs would raise it, settings and calibration included; or
            with this alpha nothing could be named.
    """
    # An exact test of so few groups has few possible p-values. Below the least of them
    # no difference could be significant, however large it is.
    least = attainable_p(request.groups)
    if request.alpha < least:
        raise UserError(
            f"alpha = {request.alpha:g}: below {least:.4g}, the least p of "
            f"{request.groups} groups, so no bug could be named; give --groups more or "
            "a larger --alpha"
        )
    if request.healthy is not None:
        files = debug_cohorts.cohort_files(path, config, request)
        groups = debug_cohorts.make_groups(files, everyone, config, request)
        count = len(groups["healthy-0"].names)
    else:
        most = everyone.num_clients // (2 * request.groups)
        count = request.clients_per_group or most
        debug_cohorts.check_size(count, everyone, config.data, request)
    # The groups are not known before the selection, and the checks of a run depend only
    # on how many clients it has. So any clients will do here.
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
    path: Path, everyone: FederatedImages, suspects: Sequence[Transformation]
) -> dict[str, Any]:
    """Does what is left: the selection, the groups, the runs, the diagnosis."""
    plan, _ = read_debug(path)
    config = config_of(plan)
    request = request_of(plan)
    go_on = f"continue with: fedgs debug --output {path}"
    with exit_if_stopped(go_on), stopping_on_failure():
        # The sizes are written last. While they are missing, an earlier process stopped
        # before all group files were there; making them again gives the same groups.
        if plan["clients_per_group"] is None:
            files = debug_cohorts.cohort_files(path, config, request)
            groups = debug_cohorts.make_groups(files, everyone, config, request)
            debug_cohorts.write_groups(path / "groups", groups)
            counts = {c: len(read_cohort(file).names) for c, file in files.items()}
            plan["clients_per_group"] = len(groups["healthy-0"].names)
            plan["clients"] = counts
            write_json(path / "debug.json", plan)
        _train_all(path, plan, everyone)
        return _diagnose(path, suspects)


def _train_all(path: Path, plan: dict[str, Any], everyone: FederatedImages) -> None:
    # The cohorts alternate, so that an unfinished folder already shows both of them.
    runs = plan["runs"]
    pairs = zip(runs["healthy"], runs["suspicious"], strict=True)
    names = [*chain.from_iterable(pairs)]
    config = config_of(plan)
    # A run writes its generator last, so the file says that the run is complete.
    left = [n for n in names if not (path / n / "generator.safetensors").exists()]
    if left:
        say(described(config))
    # The number counts complete groups too, because each group's seeds derive from it.
    for number, name in enumerate(names):
        if name not in left:
            continue
        print(f"{name}: generator {number + 1} of {len(names)}", flush=True)
        own = debug_cohorts.group_settings(config, plan["clients_per_group"], number)
        cohort = path / "groups" / f"{name}.txt"
        group = dataclasses.replace(own, output=str(path / name), cohort=str(cohort))
        if train_group(group, everyone):
            raise RunStopped(f"stopped after generator {number + 1} of {len(names)}")


def train_group(config: RunConfig, everyone: FederatedImages) -> bool:
    """Trains one group from the start, or its last checkpoint; tells of a stop."""
    config, data = resolve(config, keep_cohort(config, everyone))
    path = Path(config.output)
    if path.exists():
        folder = RunFolder.open(path)
        # Rounds after the last checkpoint are trained again. Their first attempts stay
        # in the ledger and count towards the epsilon.
        go_back(folder)
    else:
        check_capacity(config, path.parent)
        folder = RunFolder.create(config)
    return train_from_checkpoint(folder, data)


# ------------------------------------------------------------------ the diagnosis


def _diagnose(path: Path, suspects: Sequence[Transformation]) -> dict[str, Any]:
    """Draws samples, writes diagnosis.json and diagnosis.png, and prints the tables."""
    plan, _ = read_debug(path)
    request = request_of(plan)
    folders = {c: [RunFolder.open(path / n) for n in plan["runs"][c]] for c in COHORTS}
    members = _members(path, folders)
    samples = _samples(path, folders, request)
    # All runs have the same settings but for their seeds and clients.
    config = folders["healthy"][0].config
    diagnosis = diagnose(
        samples["healthy"],
        samples["suspicious"],
        num_classes=config.num_classes,
        rule=request.rule,
        entries=(*TRANSFORMATIONS, *suspects),
        frequencies=_frequencies(config),
        has_shared_start=config.public_data is not None,
    )
    verdicts.draw(path / "diagnosis.png", samples, config.num_classes)
    every_run = [*folders["healthy"], *folders["suspicious"]]
    rows = worst_case([epsilons.of_run(folder.path) for folder in every_run])
    content = {
        "format": DEBUG_FORMAT,
        "sentence": verdicts.sentence(diagnosis),
        **verdicts.with_titles(diagnosis),
        "groups": request.groups,
        "samples_per_group": request.samples_per_group,
        "conditions": verdicts.conditions(plan),
        "privacy": [row.to_json() for row in rows],
        "next_step": verdicts.next_step(diagnosis, path, plan),
        **_planted(plan, members, diagnosis.verdict),
        "runs": plan["runs"],
        "picture": "diagnosis.png",
        "versions": versions(),
    }
    # Last, because its existence says that the picture and the samples are there.
    write_json(path / "diagnosis.json", content)
    verdicts.show(path, content)
    privacy_report.show(rows)
    say(f"debug folder {path}; the picture is {path / 'diagnosis.png'}")
    return content


def _members(
    path: Path, folders: Mapping[str, Sequence[RunFolder]]
) -> dict[str, list[str]]:
    """Returns the clients of each cohort, by the files that its runs were trained with.

    Raises:
        UserError: a client is in two groups.
    """
    members: dict[str, list[str]] = {}
    for cohort, runs in folders.items():
        members[cohort] = []
        for folder in runs:
            file = Path(str(folder.config.cohort))
            members[cohort] += read_cohort(file).names
    # The epsilons compose in parallel only if the groups are disjoint. Somebody may
    # have changed the files since they were made.
    everyone = [*members["healthy"], *members["suspicious"]]
    if len({*everyone}) < len(everyone):
        raise UserError(
            f"{path}: a client is in two groups, so no epsilon holds for all of them; "
            "restore the folder from a copy"
        )
    return members


def _samples(
    path: Path, folders: Mapping[str, Sequence[RunFolder]], request: DebugRequest
) -> dict[str, list[LabelledImages]]:
    """Draws and writes the samples of every generator."""
    (path / "samples").mkdir(exist_ok=True)
    samples: dict[str, list[LabelledImages]] = {}
    for cohort, runs in folders.items():
        samples[cohort] = []
        for number, folder in enumerate(runs):
            file = path / "samples" / f"{cohort}-{number}.npz"
            samples[cohort].append(_draw(folder, file, request))
    return samples


def _draw(folder: RunFolder, path: Path, request: DebugRequest) -> LabelledImages:
    """Draws balanced classes; from every generator with the same latents.

    So two generators' samples differ by what the generators learned, and not by how
    often a class or a latent was drawn.
    """
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
    known: dict[tuple[str, ...], list[Statement]] = {}
    for row in chain.from_iterable(groups):
        known.setdefault((row.adversary, row.relation, row.theorem), []).append(row)
    found: list[Statement] = []
    for rows in known.values():
        largest = max(rows, key=_size)
        conditions = (*largest.conditions, PARALLEL)
        found.append(dataclasses.replace(largest, conditions=conditions))
    return found


def _size(row: Statement) -> float:
    """Returns the epsilon to compare; without a guarantee it is infinite."""
    if row.epsilon is None:
        return math.inf
    return row.epsilon


def _planted(
    plan: dict[str, Any], members: Mapping[str, Sequence[str]], verdict: str
) -> dict[str, Any]:
    """Returns what was planted, in whom, and whether the verdict says so."""
    config = config_of(plan)
    # A user may name --bug none on purpose. Without --bug nobody knows the truth, so no
    # verdict can be called right.
    if not plan["request"]["is_experiment"]:
        return {"planted": None, "outcome": None}
    bug = config.corruption
    fraction = config.corruption_fraction
    counts = planted_counts(config, members)
    planted = {"bug": bug, "fraction": fraction, "counts": counts}
    return {"planted": planted, "outcome": outcome(verdict, bug)}


def outcome(verdict: str, bug: str) -> str:
    """Returns right, undecided or wrong; more than one bug for one planted is wrong.

    `other` names no bug and clears none. It is undecided without a planted bug too:
    cohorts that accuracy selected do differ. "One of" is undecided if the bug is there.
    """
    if verdict in ("undecided", OTHER):
        return "undecided"
    if verdict.startswith(ONE_OF):
        possible = verdict.removeprefix(ONE_OF).split(", ")
        if bug in possible:
            return "undecided"
        return "wrong"
    if verdict == bug:
        return "right"
    return "wrong"


def _frequencies(config: ResolvedConfig) -> int | None:
    """Returns the low frequencies beside which a generator draws nothing; or None."""
    if isinstance(config, MomentConfig) and config.generator == "gaussian":
        return config.moment_size
    return None
