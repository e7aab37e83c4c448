"""`fedgs privacy`: what runs cost, and what planned ones would."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgs.app.commands.terminal import say
from fedgs.app.flags import (
    ConfigOption,
    JsonOption,
    RecipeOption,
    defaults_of,
    settings_flags,
)
from fedgs.config.recipes import DEFAULT
from fedgs.errors import UserError, reject
from fedgs.privacy.accountant import Statement
from fedgs.privacy_label import privacy_label
from fedgs.runs.run_folder import is_baseline

app = typer.Typer(
    no_args_is_help=True,
    help="Tell what privacy a run costs: one that was trained, or a planned one.",
)

# The settings that a plan needs most.
PLANNED = (
    "num_clients",
    "clients_per_node",
    "num_rounds",
    "noise_multiplier",
    "target_epsilon",
    "relation",
    "delta",
    "adversary",
)
# What the help says of `rounds`, to which the user has to give the target.
OF_ROUNDS = defaults_of(DEFAULT) | {"target_epsilon": None}
OF_COUNT = "a client's own count has no such question; leave out"
OF_BASELINE = "RUN is a run of `fedgs baseline`, which has no such question; leave out"
AtEpsilonOption = Annotated[
    float | None,
    typer.Option(
        help="Print the delta at this epsilon, such as 5, instead of epsilon at delta."
    ),
]
ColludingOption = Annotated[
    int,
    typer.Option(
        help="Number of nodes that conspire with the server under secure aggregation: "
        "it knows their noise.",
        min=0,
    ),
]
NoiseStdOption = Annotated[
    float | None,
    typer.Option(
        help="Of another platform's settings: standard deviation of the noise that a "
        "client adds to its answer. Give --clip-bound and --num-rounds beside it.",
        show_default=False,
    ),
]


def _print(stated: Sequence[Statement], as_json: bool) -> None:
    from fedgs.app.commands import privacy as report

    if as_json:
        print(json.dumps([row.to_json() for row in stated], indent=2))
    else:
        report.show(stated)


@app.command("of")
def of_runs(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders; several must be on the same clients. Or one client's "
            "state-dir, for its own count.",
            metavar="RUNS...",
        ),
    ],
    delta: Annotated[
        float | None,
        typer.Option(
            help="Delta of the epsilons, such as 1e-6. Default: the run's own.",
            show_default=False,
        ),
    ] = None,
    at_epsilon: AtEpsilonOption = None,
    colluding_nodes: ColludingOption = 0,
    same_clients: Annotated[
        bool,
        typer.Option(
            "--same-clients",
            help="Count these runs as runs on the same clients even if their settings "
            "differ.",
        ),
    ] = False,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Print the run's epsilons after each round, as CSV."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain what a run guarantees, and print its epsilon against each adversary.

    Several runs are counted together: what they cost the same clients in sum.

    Example: fedgs privacy of runs/mine
    """
    from fedgs.app.commands import client_count
    from fedgs.app.commands import privacy as report
    from fedgs.runs import epsilons

    # `reject` refuses what is not None, so a flag's default has to become None.
    others = {"at_epsilon": at_epsilon, "colluding_nodes": colluding_nodes or None}
    settings: dict[str, Any] = {}
    if delta is not None:
        settings["delta"] = delta
    for run in runs:
        count = client_count.counted_in(run)
        if count is None:
            continue
        flags = {"csv": as_csv or None, "same_clients": same_clients or None}
        reject(others | flags, OF_COUNT)
        if len(runs) > 1:
            raise UserError(f"RUNS: {run} is a client's own count; give it alone")
        client_count.show(count, delta, as_json)
        return
    if as_csv:
        more = {"json": as_json or None, "same_clients": same_clients or None}
        # Its columns are the run's own epsilons; the flags ask for something else.
        why = "--csv prints the run's own epsilons only; leave out"
        reject(others | settings | more, why)
        report.show_by_round(runs)
        return
    if any(map(is_baseline, runs)):
        reject(others, OF_BASELINE)
        stated = report.of_baseline(runs, delta)
    else:
        stated = epsilons.of_runs(
            runs, settings, at_epsilon, same_clients, colluding_nodes
        )
    # In words only the one epsilon that a run is for, not what the flags ask instead.
    is_own = at_epsilon is None and delta is None and not colluding_nodes
    if len(runs) == 1 and is_own and not as_json:
        report.explain(privacy_label(runs[0]))
    _print(stated, as_json)


@app.command()
@settings_flags(*PLANNED, "clip_bound", defaults=defaults_of(DEFAULT), has_set=True)
def plan(
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    at_epsilon: AtEpsilonOption = None,
    colluding_nodes: ColludingOption = 0,
    noise_std: NoiseStdOption = None,
    as_json: JsonOption = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Print the epsilons of a planned run, or the noise that a target epsilon needs.

    Example: fedgs privacy plan --num-clients 500 --target-epsilon 3

    With --noise-std it states what another platform's "local DP" is worth:
    fedgs privacy plan --noise-std 4.8e-5 --clip-bound 1 --num-rounds 100
    """
    from fedgs.app.commands import privacy as report

    if noise_std is not None:
        ours = {
            "recipe": recipe,
            "config": config,
            "colluding_nodes": colluding_nodes or None,
        }
        reject(ours, "--noise-std asks about another platform; leave out")
        found = report.of_noise_std(noise_std, settings, at_epsilon)
        if not as_json and settings["num_rounds"] > 1:
            say("What one round costs a client, and what all rounds cost together.")
        _print(found, as_json)
        return
    stated = report.of_settings(
        recipe,
        config,
        settings,
        at_epsilon=at_epsilon,
        colluding=colluding_nodes,
    )
    _print(stated, as_json)


@app.command()
@settings_flags(*PLANNED, defaults=OF_ROUNDS, has_set=True)
def rounds(
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    colluding_nodes: ColludingOption = 0,
    as_json: JsonOption = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Print how many rounds fit into a target epsilon with a given noise.

    Example: fedgs privacy rounds --recipe gs-wgan --num-clients 500
    --noise-multiplier 2 --target-epsilon 10
    """
    from fedgs.app.commands import privacy as report

    # The user has to give both, even if the recipe has one: they are the question.
    for name in ("noise_multiplier", "target_epsilon"):
        if name not in settings:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{name} is unset: the rounds follow from it; give {flag}")
    stated = report.of_settings(
        recipe,
        config,
        settings,
        colluding=colluding_nodes,
        is_limited=True,
    )
    _print(stated, as_json)
