"""The command `fedgs debug`; `experiments.debug.request` reads what is given."""

from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.flags import ConfigOption, JsonOption, RecipeOption, settings_flags


@settings_flags("Data", "Privacy", "Training", "Model", "Runtime")
def debug(
    bug: Annotated[
        str | None,
        typer.Option(help="An experiment: plant flip or rotate in clients, or none."),
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(help="Of the clients; 0.5 when unset.")
    ] = None,
    healthy: Annotated[
        Path | None, typer.Option(help="Your cohort: a file of client names.")
    ] = None,
    suspicious: Annotated[
        Path | None, typer.Option(help="The cohort to compare with it.")
    ] = None,
    cohorts: Annotated[
        Path | None, typer.Option(help="A folder of `fedgs cohorts` instead.")
    ] = None,
    healthy_run: Annotated[
        list[Path] | None, typer.Option(help="A run that exists; 4 to 6 times.")
    ] = None,
    suspicious_run: Annotated[
        list[Path] | None, typer.Option(help="Likewise, of the other cohort.")
    ] = None,
    percentile_below: Annotated[
        float | None, typer.Option(help="Suspicious: accuracy; 50 when unset.")
    ] = None,
    percentile_above: Annotated[
        float | None, typer.Option(help="Healthy: accuracy above; 50 when unset.")
    ] = None,
    selection_rounds: Annotated[
        int | None, typer.Option(help="Of the classifier; 40 when unset.")
    ] = None,
    groups: Annotated[
        int | None, typer.Option(help="Generators of each cohort, 4 to 6; 4.")
    ] = None,
    clients_per_group: Annotated[
        int | None, typer.Option(help="As many as there are when unset.")
    ] = None,
    samples_per_group: Annotated[
        int | None, typer.Option(help="Images drawn from each generator; 500.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="False-positive rate; 0.05 when unset.")
    ] = None,
    min_effect: Annotated[
        float | None, typer.Option(help="Share of images that is a bug; 0.5.")
    ] = None,
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Compare two cohorts' generators: is one cohort inverted or rotated?

    With --output of an earlier call alone: go on. The recipe is full-participation and
    the engine Flower, unless given.
    """
    given = {
        "bug": bug,
        "fraction": fraction,
        "healthy": healthy,
        "suspicious": suspicious,
        "cohorts": cohorts,
        "healthy_run": healthy_run,
        "suspicious_run": suspicious_run,
        "percentile_below": percentile_below,
        "percentile_above": percentile_above,
        "selection_rounds": selection_rounds,
        "groups": groups,
        "clients_per_group": clients_per_group,
        "samples_per_group": samples_per_group,
        "alpha": alpha,
        "min_effect": min_effect,
    }
    from experiments.debug import request as debug_flags

    debug_flags.debug(given, recipe, config, settings, as_json)
