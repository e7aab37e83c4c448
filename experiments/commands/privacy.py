"""What `fedgs privacy` prints: every epsilon with all that it depends on."""

import dataclasses
import string
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedgs.cohorts.files import (
    INCLUDED,
    read_cohort,
    selection_condition,
    selection_costs,
)
from fedgs.config.recipes import configure
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.privacy.accounting import Run, Statement, statements, statements_of_runs
from fedgs.privacy.budget import calibrate_noise, largest_num_rounds
from fedgs.privacy.client_limits import why_limits_refuse
from fedgs.privacy.oracle import AutodpMissing, as_published
from fedgs.privacy.plan import Plan

# ------------------------------------------------------------------ a plan


def of_settings(
    recipe: str | None,
    config_file: Path | None,
    settings: dict[str, Any],
    at_epsilon: float | None = None,
) -> list[Statement]:
    """Returns the statements of a planned run, with the paper's figures beside.

    Without a selection among the settings or in a recipe, all selections are stated.
    With a target, the noise is calibrated; with noise and target, the statements are of
    the largest number of rounds within it, at most the given one. Without autodp, a
    note on standard error replaces the paper's figures.

    Privacy: public.

    Args:
        recipe: name of a recipe; None starts from the defaults.
        config_file: TOML file of settings over the recipe.
        settings: of the command line, over both.
        at_epsilon: state delta at this epsilon; the paper's figures are then left out.

    Raises:
        UserError: settings that decide an epsilon are missing or invalid.
    """
    is_open = recipe is None and config_file is None
    config = configure(recipe, config_file, settings, engine="flower")
    if reason := why_limits_refuse(config):
        raise UserError(
            f"amplification = True: refused: {reason}; leave out --amplification"
        )
    noise, target = config.noise_multiplier, config.target_epsilon
    is_limited = noise is not None and target is not None
    needed = ["num_clients", "num_rounds", "batch_size"] if is_open else ["num_clients"]
    for name in needed:
        if is_limited and name == "num_rounds":
            continue  # is what the two decide
        if name not in settings and (is_open or getattr(config, name) is None):
            raise UserError(f"{name} is unset: give --{name.replace('_', '-')}")
    if at_epsilon is not None and "delta" in settings and target is None:
        raise UserError("delta: --at-epsilon computes it; leave out one of the two")
    plan = Plan.from_config(dataclasses.replace(config, noise_multiplier=noise or 0.0))
    if is_limited:
        most = _largest(config, plan)
        is_given = not is_open or "num_rounds" in settings
        rounds = min(most, config.num_rounds) if is_given else most
        plan = dataclasses.replace(plan, num_rounds=rounds)
    elif target is not None:
        plan = dataclasses.replace(plan, noise_multiplier=_calibrated(config, plan))
    elif noise is None:
        raise UserError(
            "noise_multiplier is unset: give --noise-multiplier or --target-epsilon"
        )
    if is_open and "client_selection" not in settings and not is_limited:
        plan = dataclasses.replace(plan, client_selection=None)
    costs = selection_costs([config])
    stated = statements(plan, config.delta, config.colluding_nodes, at_epsilon, costs)
    stated = _with_cohort_condition(stated, [config])
    if at_epsilon is not None:
        return stated
    try:
        return [*stated, *as_published(plan, config.delta)]
    except AutodpMissing as error:
        print(f"Note: {error}", file=sys.stderr)
        return stated


def _calibrated(config: RunConfig, plan: Plan) -> float:
    """Returns the noise for the target and says so."""
    noise_multiplier = calibrate_noise(plan, *_target(config))
    _say(f"noise_multiplier {noise_multiplier:g} for {_target_text(config)}")
    return noise_multiplier


def _largest(config: RunConfig, plan: Plan) -> int:
    """Returns the largest number of rounds within the target and says so."""
    most = largest_num_rounds(plan, *_target(config))
    noise = f"noise_multiplier {config.noise_multiplier:g}"
    if most == 0:
        raise UserError(
            f"noise_multiplier = {config.noise_multiplier:g}: one round alone exceeds "
            f"{_target_text(config)}; give a larger --noise-multiplier"
        )
    _say(f"num_rounds {most} is the largest with {noise} for {_target_text(config)}")
    return most


def _target(config: RunConfig) -> Any:
    assert config.target_epsilon is not None
    asked = (config.target_epsilon, config.delta, config.adversary, config.relation)
    return (*asked, config.colluding_nodes, selection_costs([config]))


def _target_text(config: RunConfig) -> str:
    amplified = ", amplified" if config.amplification else ""
    return (
        f"target_epsilon {config.target_epsilon:g} ({config.adversary}, "
        f"{config.relation}, delta {config.delta:g}{amplified})"
    )


def _say(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True)


# ------------------------------------------------------------------ runs


def of_run(run: Path, delta: float | None = None) -> list[Statement]:
    """Returns the statements of what a run has released so far.

    Privacy: public.

    Raises:
        UserError: no run folder, or a broken ledger.
    """
    return of_runs([run], {} if delta is None else {"delta": delta})


def of_runs(
    paths: Sequence[Path],
    settings: dict[str, Any],
    at_epsilon: float | None = None,
    same_clients: bool = False,
) -> list[Statement]:
    """Returns the statements of what runs on the same clients released together.

    Privacy: public.

    Args:
        paths: run folders, each once.
        settings: delta or colluding_nodes, in place of the runs' own.
        at_epsilon: state delta at this epsilon.
        same_clients: the user's word that the clients are the same, where the folders
            do not show it.

    Raises:
        UserError: no run folder, a broken ledger, or runs that do not belong together.
    """
    from fedgs.runs.run_folder import RunFolder

    if at_epsilon is not None and "delta" in settings:
        raise UserError("delta: --at-epsilon computes it; leave out one of the two")
    folders = [RunFolder.open(path) for path in paths]
    names = [str(folder.path.resolve()) for folder in folders]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name}: given twice; every run counts once")
    runs = [
        Run(
            folder.config, folder.read_ledger().events, selection_costs([folder.config])
        )
        for folder in folders
    ]
    configs = {  # a run's budget is of its own delta, what is asked of the given one
        str(path): dataclasses.replace(run.config, **settings).validate()
        for path, run in zip(paths, runs, strict=True)
    }
    deltas = {config.delta for config in configs.values()}
    if len(deltas) > 1 and at_epsilon is None:
        raise UserError(f"delta = {' and '.join(map(str, deltas))}: give --delta")
    is_reshuffled = _is_reshuffled(configs)
    if not same_clients:
        _check_same_clients(configs, is_reshuffled)
    delta = configs[str(paths[0])].delta
    costs = selection_costs(configs.values())
    colluding = max(config.colluding_nodes for config in configs.values())
    found = statements_of_runs(runs, delta, at_epsilon, is_reshuffled, costs, colluding)
    return _with_cohort_condition(found, configs.values())


def _with_cohort_condition(
    found: Iterable[Statement], configs: Iterable[RunConfig]
) -> list[Statement]:
    """Adds how the cohorts were selected, where the statements do not say it yet."""
    texts = [selection_condition(config) for config in configs]
    more = tuple(dict.fromkeys(text for text in texts if text and text != INCLUDED))
    return [
        dataclasses.replace(row, conditions=(*row.conditions, *more)) for row in found
    ]


def _is_reshuffled(configs: dict[str, RunConfig]) -> bool:
    """Tells whether the unit is a record that sits in another shard in every run."""
    is_record = all(c.privacy_unit == "record" for c in configs.values())
    return is_record and len({config.seed for config in configs.values()}) > 1


# Sources whose clients are the owners, for every seed. Others may have owners too: then
# --same-clients is the user's word.
_WITH_OWNERS = ("mnist-by-writer", "femnist", "folder:")


def _check_same_clients(configs: dict[str, RunConfig], is_reshuffled: bool) -> None:
    names = ["data", "data_dir", "num_clients", "partition", "classes"]
    names += ["test_fraction", "hf_options", "partitioner", "partitioner_options"]
    (first, known), *others = configs.items()
    if known.partition == "dirichlet":
        names.append("dirichlet_alpha")
    has_owners = known.partition == "by-client" or (
        known.partition == "auto" and known.data.startswith(_WITH_OWNERS)
    )
    if not has_owners and not is_reshuffled:
        names.append("seed")  # decides which records make a client
    for path, config in others:
        different = [n for n in names if getattr(known, n) != getattr(config, n)]
        if _clients_of(known) != _clients_of(config):
            different.append("cohort")
        for name in different:
            one, other = getattr(known, name), getattr(config, name)
            raise UserError(
                f"{name} = {one} in {first}, {other} in {path}: other clients, as "
                "far as the folders show; account the runs apart, or give "
                "--same-clients if you know that they are the same"
            )


def _clients_of(config: RunConfig) -> frozenset[str] | None:
    """Returns the names in a run's cohort: every run has a copy of the file."""
    if config.cohort is None:
        return None
    return frozenset(read_cohort(Path(config.cohort)).names)


# ------------------------------------------------------------------ the table


def show(found: Sequence[Statement]) -> None:
    """Prints a table and below it the theorems and conditions of its rows."""
    console = Console()
    theorems = list(dict.fromkeys(row.theorem for row in found))
    letters = dict(zip(theorems, string.ascii_lowercase, strict=False))
    for title in dict.fromkeys(_title(row) for row in found):
        table = Table(title=title)
        for column in ("adversary", "relation", "selection"):
            table.add_column(column, no_wrap=True)
        asked = next(row.asked for row in found if _title(row) == title)
        table.add_column(asked, justify="right", no_wrap=True)
        table.add_column("guarantee", no_wrap=True)
        table.add_column("theorem", justify="center", no_wrap=True)
        for row in found:
            if _title(row) == title:
                table.add_row(
                    row.adversary,
                    row.relation,
                    row.client_selection,
                    _number(row),
                    "yes" if row.guarantee else "NO",
                    letters[row.theorem],
                )
        console.print(table)
    for theorem, letter in letters.items():
        console.print(f"theorem {letter}: {theorem}", highlight=False)
    console.print("No row holds without its conditions:")
    conditions: dict[str, list[str]] = {}
    for row in found:
        amplified = " amplified" if row.theorem.startswith("amplification") else ""
        for condition in row.conditions:
            where = conditions.setdefault(condition, [])
            if row.adversary + amplified not in where:
                where.append(row.adversary + amplified)
    for condition, where in conditions.items():
        console.print(f"- {condition} ({', '.join(where)})", highlight=False)


def _title(row: Statement) -> str:
    rounds = f"{row.num_rounds} round{'' if row.num_rounds == 1 else 's'}"
    at = f"epsilon at delta {row.delta:g}"
    if row.asked == "delta":
        at = f"delta at epsilon {row.epsilon:g}"
    return f"{at}, unit: one {row.unit}, {rounds}"


def _number(row: Statement) -> str:
    if row.asked == "delta":
        return f"{row.delta:.4g}"
    if row.epsilon is None:
        return "unbounded"
    digits = 2 if row.guarantee else 3
    return f"{row.epsilon:.{digits}f}" if row.epsilon >= 100 else f"{row.epsilon:.4g}"
