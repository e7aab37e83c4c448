"""What `fedgs privacy` prints: every epsilon with all that it depends on."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedgs.accounting import (
    Plan,
    Statement,
    as_published,
    statements,
    statements_from_ledger,
)
from fedgs.budget import calibrate_noise
from fedgs.config import RunConfig, UserError
from fedgs.ledger import Ledger
from fedgs.oracle import AutodpMissing


def of_settings(
    recipe: str | None, config_file: Path | None, settings: dict[str, Any]
) -> list[Statement]:
    """Returns the statements of a planned run, with the paper's figures beside.

    Without a selection among the settings or in a recipe, all selections are stated.
    Without autodp, a note on standard error replaces the paper's figures.

    Privacy: public.

    Raises:
        UserError: settings that decide an epsilon are missing or invalid.
    """
    from experiments.cli import configure

    is_open = recipe is None and config_file is None
    config = configure(recipe, config_file, {"engine": "flower", **settings})
    needed = ["num_clients", "num_rounds", "batch_size"] if is_open else ["num_clients"]
    for name in needed:
        if name not in settings and (is_open or getattr(config, name) is None):
            raise UserError(f"{name} is unset: give --{name.replace('_', '-')}")
    values = {
        name: getattr(config, name)
        for name in Plan.__dataclass_fields__
        if name != "noise_source"
    }
    if is_open and "client_selection" not in settings:
        values["client_selection"] = None
    if config.client_selection == "all":
        values["clients_per_round"] = config.num_clients
    seeded = "os" if config.noise_seed is None else "seeded"
    if config.noise_multiplier is None:
        if config.target_epsilon is None:
            raise UserError(
                "noise_multiplier is unset: give --noise-multiplier or --target-epsilon"
            )
        values["noise_multiplier"] = _calibrated(config, values)
    plan = Plan(**values, noise_source=seeded)
    guaranteed = statements(plan, config.delta)
    try:
        return [*guaranteed, *as_published(plan, config.delta)]
    except AutodpMissing as error:
        print(f"Note: {error}", file=sys.stderr)
        return list(guaranteed)


def _calibrated(config: RunConfig, values: dict[str, Any]) -> float:
    assert config.target_epsilon is not None
    noise_multiplier = calibrate_noise(
        Plan(**{**values, "client_selection": config.client_selection}),
        config.target_epsilon,
        config.delta,
        config.adversary,
        config.relation,
    )
    Console(stderr=True).print(
        f"noise_multiplier {noise_multiplier:g} for target_epsilon "
        f"{config.target_epsilon:g} ({config.adversary}, {config.relation}, delta "
        f"{config.delta:g})"
    )
    return noise_multiplier


def of_run(run: Path, delta: float | None = None) -> list[Statement]:
    """Returns the statements of what a run has released so far.

    Privacy: public.

    Raises:
        UserError: no run folder, or a broken ledger.
    """
    from fedgs.run_folder import RunFolder

    folder = RunFolder.open(run)
    config = folder.config
    events = Ledger.read(folder.path / "ledger.jsonl").events
    found = statements_from_ledger(
        events,
        delta or config.delta,
        engine=config.engine,
        privacy_unit=config.privacy_unit,
    )
    return list(found)


def show(found: Sequence[Statement]) -> None:
    """Prints a table and below it the conditions under which its rows hold."""
    console = Console()
    for unit, delta in dict.fromkeys((row.unit, row.delta) for row in found):
        table = Table(title=f"epsilon at delta {delta:g}, unit: one {unit}")
        for column in ("adversary", "relation", "selection"):
            table.add_column(column, no_wrap=True)
        table.add_column("epsilon", justify="right", no_wrap=True)
        table.add_column("guarantee", no_wrap=True)
        table.add_column("theorem")
        for row in found:
            if (row.unit, row.delta) == (unit, delta):
                table.add_row(
                    row.adversary,
                    row.relation,
                    row.client_selection,
                    _number(row.epsilon, 2 if row.guarantee else 3),
                    "yes" if row.guarantee else "NO",
                    row.theorem,
                )
        console.print(table)
    console.print("No row holds without its conditions:")
    conditions: dict[str, list[str]] = {}
    for row in found:
        for condition in row.conditions:
            where = conditions.setdefault(condition, [])
            if row.adversary not in where:
                where.append(row.adversary)
    for condition, where in conditions.items():
        console.print(f"- {condition} ({', '.join(where)})", highlight=False)


def _number(epsilon: float | None, digits: int) -> str:
    if epsilon is None:
        return "unbounded"
    return f"{epsilon:.{digits}f}" if epsilon >= 100 else f"{epsilon:.4g}"
