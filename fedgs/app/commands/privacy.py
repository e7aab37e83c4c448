"""What `fedgs privacy` prints: every epsilon with all that it depends on."""

import csv
import dataclasses
import math
import string
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgs.app.commands.privacy_words import ABSURD_EPSILON, explained, legend
from fedgs.app.commands.terminal import say
from fedgs.app.tables import Table
from fedgs.cohorts.cohort_file import selection_costs
from fedgs.config.fields import LARGEST_NOISE, SMALLEST_NOISE
from fedgs.config.recipes import configure, is_fitted, moments_for, settings_in
from fedgs.config.rounds import MOST_ROUNDS
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, reject
from fedgs.privacy.accountant import (
    AS_PUBLISHED,
    HYPOTHETICAL,
    VALID,
    Statement,
    statements,
)
from fedgs.privacy.budget import calibrate_noise, largest_num_rounds
from fedgs.privacy.gaussian import LEAST_DELTA, check_numbers
from fedgs.privacy.oracle import as_published
from fedgs.privacy.plan import Plan
from fedgs.privacy.rounding import upper
from fedgs.privacy.selection_cost import Target
from fedgs.runs.epsilons import by_round, with_cohort_condition
from fedgs.runs.run_folder import RunFolder, is_baseline

LAST_COLUMNS = ("guarantee", "theorem")

# ------------------------------------------------------------------ a plan


def of_settings(
    recipe: str | None,
    config_file: Path | None,
    settings: dict[str, Any],
    at_epsilon: float | None = None,
    colluding: int = 0,
    is_limited: bool = False,
) -> list[Statement]:
    """Returns the statements of a planned run, with the paper's figures beside.

    With a target, the noise is calibrated. If `is_limited`, noise and target are both
    given, and the statements are of the largest number of rounds within the target, at
    most the planned one.

    Args:
        recipe: name of a recipe; None is the default one.
        config_file: TOML file of settings over the recipe.
        settings: the settings of the command line, over both.
        at_epsilon: state delta at this epsilon; the paper's figures are then left out.
        colluding: nodes of a round whose noise the secagg adversary knows.
        is_limited: whether noise and target limit the rounds.

    Raises:
        UserError: settings that decide an epsilon are missing or invalid.
    """
    config = configure(recipe, config_file, settings, engine="flower")
    noise = config.noise_multiplier
    target = config.target_epsilon
    if not is_limited and noise is not None and target is not None:
        raise UserError(
            f"noise_multiplier = {noise:g}: target_epsilon = {target:g} decides the "
            "noise; leave one of the two out, or ask `fedgs privacy rounds` how many "
            "rounds fit"
        )
    if at_epsilon is not None and "delta" in settings and target is None:
        raise UserError(
            "delta: --at-epsilon asks for the delta; leave out one of the two"
        )
    plan = _planned(config, noise)
    if is_fitted(config):
        chosen = settings_in(config_file, config.phases) | settings
        config = _fitted(config, chosen, plan, colluding)
        plan = _planned(config, noise)
    if is_limited:
        most = _largest(config, plan, colluding)
        plan = plan.ended_after(min(most, config.num_rounds))
    elif target is not None:
        calibrated = _calibrated(config, plan, colluding)
        plan = dataclasses.replace(plan, noise_multiplier=calibrated)
    elif noise is None:
        raise UserError(
            "noise_multiplier is unset: epsilon depends on it; give --noise-multiplier "
            "or --target-epsilon"
        )
    costs = selection_costs([config])
    stated = statements(plan, config.delta, colluding, at_epsilon, costs)
    stated = with_cohort_condition(stated, [config])
    # The paper states epsilons only, so beside a delta it has nothing to show.
    if at_epsilon is not None:
        return stated
    return [*stated, *as_published(plan, config.delta)]


def _planned(config: RunConfig, noise: float | None) -> Plan:
    """Returns the plan of settings; 0 stands for noise that is unset.

    Such noise is calibrated, or refused.
    """
    return Plan.from_config(dataclasses.replace(config, noise_multiplier=noise or 0.0))


def _fitted(
    config: RunConfig,
    chosen: Collection[str],
    plan: Plan,
    colluding: int,
) -> RunConfig:
    """Returns the default recipe as a run of so many clients would have it.

    Args:
        config: the configuration of the recipe.
        chosen: names of settings that stay.
        plan: of these settings.
        colluding: nodes of a round whose noise the secagg adversary knows.
    """
    noise = config.noise_multiplier
    if noise is None and config.target_epsilon is None:
        return config  # without either, a plan is refused
    if noise is None:
        noise = _noise_for_target(config, plan, colluding)
    known = dataclasses.replace(config, noise_multiplier=noise)
    own = moments_for(known, chosen)
    return dataclasses.replace(config, **own).validate()


def _calibrated(config: RunConfig, plan: Plan, colluding: int) -> float:
    """Returns the noise for the target and says so."""
    noise_multiplier = _noise_for_target(config, plan, colluding)
    # On standard error, because --json owns standard output.
    text = f"noise_multiplier {noise_multiplier:g} for {_target_text(config)}"
    say(text, is_error=True)
    return noise_multiplier


def _noise_for_target(config: RunConfig, plan: Plan, colluding: int) -> float:
    asked = Target.of(config, selection_costs([config]))
    return calibrate_noise(
        plan,
        target_epsilon=asked.epsilon,
        delta=asked.delta,
        adversary=asked.adversary,
        relation=asked.relation,
        colluding=colluding,
        selections=asked.selections,
    )


def _largest(config: RunConfig, plan: Plan, colluding: int) -> int:
    """Returns the largest number of rounds within the target and says so."""
    asked = Target.of(config, selection_costs([config]))
    most = largest_num_rounds(plan, asked, colluding)
    noise = f"{config.noise_multiplier:g}"
    target = _target_text(config)
    if most == 0:
        raise UserError(
            f"noise_multiplier = {noise}: a single round exceeds {target}; give a "
            "larger --noise-multiplier"
        )
    largest = min(most, MOST_ROUNDS)
    rounds = f"num_rounds {largest} is the largest number"
    try:
        dataclasses.replace(config, num_rounds=largest)
    except UserError:  # the recipe's phases have as many rounds as they have
        if most >= config.num_rounds:
            rounds = f"all {config.num_rounds} rounds of {config.recipe} fit"
    say(f"{rounds} with noise_multiplier {noise} for {target}", is_error=True)
    return most


def _target_text(config: RunConfig) -> str:
    if config.amplification:
        amplified = ", amplified"
    else:
        amplified = ""
    return (
        f"target_epsilon {upper(config.target_epsilon, 6)} ({config.adversary}, "
        f"{config.relation}, delta {upper(config.delta, 6)}{amplified})"
    )


# ------------------------------------------------------------------ other platforms


def of_noise_std(
    noise_std: float,
    settings: dict[str, Any],
    at_epsilon: float | None = None,
) -> list[Statement]:
    """Returns what "local" noise of another platform is worth: one round, and all.

    A client clips its answer to the norm `clip_bound` and adds Gaussian noise to it
    before it sends it, in each of `num_rounds`. That is a release of one node with one
    client, and the server sees it.

    Args:
        noise_std: standard deviation of the noise in every coordinate, at least 0.
        settings: those of the command line: `clip_bound`, `num_rounds`, and maybe
            `delta`.
        at_epsilon: state delta at this epsilon.

    Raises:
        UserError: a setting is missing, out of range, or says nothing of such a noise.

    Source: docs/privacy.md, "Settings of other platforms".
    """
    check_numbers(noise_std=noise_std)
    asked = dict(settings)
    numbers: dict[str, Any] = {}
    for name in ("clip_bound", "num_rounds"):
        if name not in asked:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{name} is unset: give {flag} beside --noise-std")
        numbers[name] = asked.pop(name)
    if at_epsilon is not None and "delta" in asked:
        raise UserError("delta: --at-epsilon computes it; leave out one of the two")
    delta = asked.pop("delta", RunConfig.delta)
    reject(asked, "--noise-std asks about another platform; leave out")
    plan = Plan(
        num_clients=1,
        clients_per_round=1,
        client_selection="all",
        public_conditions=(_of_other_platform(noise_std, numbers["clip_bound"]),),
        **numbers,
    )
    multiplier = noise_std / (2 * plan.clip_bound)
    # The plan's own check would name a setting that nobody gave.
    if multiplier and not SMALLEST_NOISE <= multiplier <= LARGEST_NOISE:
        raise UserError(
            f"noise_std = {noise_std:g}: it is out of all proportion to clip_bound = "
            f"{plan.clip_bound:g}; give --noise-std 0, or {2 * SMALLEST_NOISE:g} to "
            f"{2 * LARGEST_NOISE:g} times --clip-bound"
        )
    plan = dataclasses.replace(plan, noise_multiplier=multiplier)
    stated: list[Statement] = []
    for num_rounds in sorted({1, plan.num_rounds}):
        rows = statements(plan.ended_after(num_rounds), delta, at_epsilon=at_epsilon)
        # Of one client alone, whoever looks sees the same.
        stated += [row for row in rows if row.adversary == "server"]
    return stated


def _of_other_platform(noise_std: float, clip_bound: float) -> str:
    """Returns the condition of such rows: what the settings were taken to mean."""
    return (
        "settings of another platform: before it is sent, a client's answer is clipped "
        f"to the L2 norm {clip_bound:g} and gets Gaussian noise of standard deviation "
        f"{noise_std:g} in each coordinate"
    )


# ------------------------------------------------------------------ a baseline


def of_baseline(runs: Sequence[Path], delta: float | None) -> list[Statement]:
    """Returns what one run of a baseline guarantees, for its owner's eyes.

    Args:
        runs: run folders; of a baseline only one at a time.
        delta: in place of the run's own.

    Raises:
        UserError: several runs, or a broken folder.
    """
    if len(runs) > 1:
        raise UserError(
            f"RUN = {', '.join(map(str, runs))}: a run of `fedgs baseline` cannot be "
            "counted with others here; give one RUN at a time, and add up the epsilons "
            "and deltas of the same unit and relation"
        )
    from fedgs.runs.other_runs import open_other  # loads torch

    return open_other(runs[0]).guarantees(delta, with_private=True)


# ------------------------------------------------------------------ by round


def show_by_round(runs: Sequence[Path]) -> None:
    """Prints a run's epsilons after each round as CSV; inf where nothing bounds them.

    Privacy: public; of the ledger.

    Raises:
        UserError: not one run of `fedgs train`, or a broken one.
    """
    if len(runs) != 1 or is_baseline(runs[0]):
        given = ", ".join(map(str, runs)) or "unset"
        raise UserError(
            f"RUN = {given}: --csv needs exactly one run of `fedgs train`; give one"
        )
    folder = RunFolder.open(runs[0])
    events = folder.read_ledger().events
    lines: list[dict[str, float]] = []
    for round, rows in by_round(folder.config, events, len(events)):
        line: dict[str, float] = {"round": round}
        for row in rows:
            # A column is quoted alone, so its name tells all that its numbers depend
            # on.
            at = f"at delta {upper(row.delta, 6)}, unit: {row.unit_in_words}"
            name = f"{row.adversary} {row.relation} {at}{_caveat(row)}"
            if row.epsilon is None:
                line[name] = math.inf
            else:
                line[name] = row.epsilon
        lines.append(line)
    # Standard output is the CSV alone; what it holds under is said beside it.
    if folder.config.amplification:
        text = "These epsilons do not count amplification by sampling."
        say(text, is_error=True)
    for condition in folder.config.public_conditions:
        say(condition, is_error=True)
    # Later rounds may have rows that earlier ones lack, but not the other way round.
    if lines:
        columns = list(lines[-1])
    else:
        columns = ["round"]
    table = csv.DictWriter(sys.stdout, columns)
    table.writeheader()
    table.writerows(lines)


# ------------------------------------------------------------------ the table


def explain(label: Mapping[str, Any]) -> None:
    """Prints what the one epsilon of a run means, in sentences.

    Args:
        label: the label of the run; see `fedgs.privacy_label`.
    """
    for line in explained(label):
        say(line)


def show(statements: Sequence[Statement]) -> None:
    """Prints tables, and below them the conditions of their rows."""
    if not statements:
        say("There is no epsilon: this method guarantees nothing.")
        return
    for table in tables(statements):
        table.show()
    kinds = [row.adversary for row in statements]
    for line in legend(kinds, [row.relation for row in statements]):
        say(line)
    say("A row holds only under these conditions; brackets name the adversaries:")
    for condition in conditions_of(statements):
        say(f"- {condition}")
    absurd = [row for row in statements if _protects_nobody(row)]
    if absurd:
        names = [f"{row.adversary}, {row.relation}" for row in absurd]
        which = "; ".join(dict.fromkeys(names))
        say(
            f"An epsilon above {ABSURD_EPSILON:g} protects nobody ({which}): what is "
            "released may tell for certain whether somebody's data are in it."
        )


def _protects_nobody(row: Statement) -> bool:
    """Tells whether a guarantee holds, and is worth nothing."""
    return row.guarantee and (row.epsilon or 0.0) > ABSURD_EPSILON


def _caveat(row: Statement) -> str:
    """Returns why a row is no guarantee, to be appended; "" if it may be one."""
    if row.label == VALID:
        return ""
    return f", {row.label}"


def _holds(row: Statement) -> str:
    if row.guarantee and row.is_hypothetical:
        return HYPOTHETICAL
    if row.guarantee:
        return "yes"
    return f"NO{_caveat(row)}"


def tables(
    statements: Sequence[Statement],
    worth: Callable[[Statement], str] = _holds,
) -> list[Table]:
    """Returns a table for each unit and number of rounds: never one column.

    Args:
        statements: at least one.
        worth: says whether a row is a guarantee.
    """
    titles: dict[str, list[Statement]] = {}
    for row in statements:
        titles.setdefault(_title(row), []).append(row)
    return [_table(title, rows, worth) for title, rows in titles.items()]


def _table(
    title: str,
    rows: Sequence[Statement],
    worth: Callable[[Statement], str],
) -> Table:
    # Names of theorems are long and repeat: a cell has a letter, and the note the name.
    theorems = dict.fromkeys(row.theorem for row in rows)
    letters = dict(zip(theorems, string.ascii_lowercase, strict=False))
    cells: list[list[str]] = []
    for row in rows:
        cells.append(
            [
                row.adversary,
                row.relation,
                row.client_selection,
                _number(row),
                worth(row),
                letters[row.theorem],
            ]
        )
    head = ["adversary", "relation", "selection", rows[0].asked, *LAST_COLUMNS]
    notes = [f"theorem {letter}: {name}" for name, letter in letters.items()]
    note = "\n".join(notes)
    return Table(title, head, cells, note, numeric=False)


def conditions_of(statements: Sequence[Statement]) -> list[str]:
    """Returns each condition once, with the adversaries against whom it is one."""
    # Dicts in the place of sets: the order of the rows stays.
    found: dict[str, dict[str, None]] = {}
    for row in statements:
        adversary = row.adversary
        if row.theorem.startswith("amplification"):
            # The same adversary has rows with and without it, on other conditions.
            adversary += " amplified"
        for condition in row.conditions:
            found.setdefault(condition, {})[adversary] = None
    lines: list[str] = []
    for condition, adversaries in found.items():
        lines.append(f"{condition} ({', '.join(adversaries)})")
    return lines


def _title(row: Statement) -> str:
    if row.num_rounds == 1:
        rounds = "1 round"
    else:
        rounds = f"{row.num_rounds} rounds"
    if row.asked == "delta":
        at = f"delta at epsilon {upper(row.epsilon, 6)}"
    else:
        at = f"epsilon at delta {upper(row.delta, 6)}"
    return f"{at}, unit: {row.unit_in_words}, {rounds}"


def _number(row: Statement) -> str:
    if row.asked == "delta":
        value = upper(row.delta)
        # No smaller delta is computed.
        if row.delta <= LEAST_DELTA:
            return f"< {value}"
        return value
    if row.epsilon is not None and row.label == AS_PUBLISHED:
        # A figure of the paper bounds nothing, so it is rounded to the nearest digit.
        if row.epsilon >= 100:
            return f"{row.epsilon:.3f}"
        return f"{row.epsilon:.4g}"
    return upper(row.epsilon)
