"""What `fedgs debug` shows: tables of a diagnosis, and what may decide an open one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedgs.app.commands.run_outcome import near
from fedgs.app.commands.terminal import say
from fedgs.app.tables import Table, cell
from fedgs.cohorts.cohort_file import OWN_COHORT, selection_condition
from fedgs.config.run_config import RunConfig
from fedgs.diagnosis.diagnosis import LEAST_FIT, UNDECIDED
from fedgs.runs.run_folder import RunFolder

MOST_SHOWN = 6  # of some twenty suspects


def show(folder: RunFolder, content: Mapping[str, Any]) -> None:
    """Prints the verdicts, and what they rest on.

    Args:
        folder: the run's folder.
        content: the content of diagnosis.json.
    """
    comparisons = content["comparisons"]
    if len(comparisons) > 1:
        sites_table(content).show()
    else:
        for table in diagnosis_tables(comparisons[0]):
            table.show()
    for comparison in comparisons:
        say(f"Verdict of {comparison['suspicious']}: {comparison['verdict']}")
        say(comparison["sentence"])
        step = next_step(folder.config, comparison, str(near(folder.path)))
        if step:
            say(step)
    planted = content["planted"]
    if planted is not None:
        say(f"Planted bug: {planted['bug']} in {planted['where']}")
    say(f"Picture: {near(folder.path)}/{content['picture']}")


def sites_table(content: Mapping[str, Any]) -> Table:
    """Returns a row for each site: its verdict, and how strongly the bug shows.

    Privacy: post-processing of DP output.

    Args:
        content: the content of diagnosis.json, of several comparisons.
    """
    rows: list[list[str]] = []
    for comparison in content["comparisons"]:
        best = comparison["ranking"][0]
        shown = ["", ""]
        if comparison["is_accused"] or comparison["rivals"]:
            shown = [best["title"], _with_interval(best["effect"], best["interval"])]
        name = comparison["suspicious"]
        rows.append([name, comparison["verdict"], *shown, cell(comparison["p"])])
    head = ["site", "verdict", "bug", "strength", "p"]
    note = "p is adjusted for the number of sites."
    return Table("Every site against all others", head, rows, note)


def next_step(config: RunConfig, comparison: Mapping[str, Any], output: str) -> str:
    """Returns what may decide an undecided verdict, with the command; "" of others.

    Args:
        config: the run's configuration.
        comparison: the comparison of diagnosis.json.
        output: what the command calls the run folder.
    """
    if comparison["verdict"] != UNDECIDED:
        return ""
    best = comparison["ranking"][0]
    least = comparison["min_effect"]
    low = 0.0
    if best["interval"]:
        low = best["interval"][0]
    is_significant = best["adjusted_p"] <= comparison["alpha"]
    is_seen = is_significant and (best["fit"] or 0) >= LEAST_FIT
    # A smaller share is not advised if accuracy selected the cohorts: a difference of
    # handwriting alone may then look like a bug in few images, and would be named.
    is_own = selection_condition(config) in (None, OWN_COHORT)
    if is_seen and 0 < low < least and is_own:
        # A round number below the interval, in steps of 0.05.
        less = math.floor(20 * low) / 20 or low / 2
        return (
            f"Next step: {best['title']} is significant, but perhaps in less than "
            f"{least:.0%} of the clients. Ask the same release for a smaller share, at "
            "no cost in privacy and at the same error rate: "
            f"fedgs debug --output {output} --min-effect {less:.2g}"
        )
    more = "--noise-multiplier LESS"
    if config.target_epsilon:
        more = f"--target-epsilon {2 * config.target_epsilon:g}"
    return (
        "Next step: use more clients, or give the same command less noise "
        f"({more} and another --output); its epsilon is added to this run's"
    )


# ------------------------------------------------------------------ tables


def diagnosis_tables(diagnosis: Mapping[str, Any]) -> list[Table]:
    """Returns the suspected bugs, and where the cohorts differ, as tables.

    Privacy: post-processing of DP output.

    Args:
        diagnosis: one comparison of diagnosis.json.
    """
    return [_suspects(diagnosis), _differences(diagnosis["differences"])]


def _suspects(diagnosis: Mapping[str, Any]) -> Table:
    # The last entry, any difference, is always shown: it says whether anything at all
    # differs, whatever the catalogue explains.
    ranking = diagnosis["ranking"]
    first = ranking[:MOST_SHOWN]
    others = ranking[MOST_SHOWN:]
    shown = [*first, *others[-1:]]
    hidden = others[:-1]
    rows = [
        [
            row["title"],
            row["decision"],
            cell(row["fit"]),
            _with_interval(row["effect"], row["interval"]),
            cell(row["adjusted_p"]),
        ]
        for row in shown
    ]
    note = ""
    if hidden:
        excluded = sum(row["decision"] == "excluded" for row in hidden)
        note = f"{len(hidden)} more bugs explain less; {excluded} of them are excluded."
    head = ["suspected", "decision", "explains", "measured strength", "adjusted p"]
    return Table("Suspected bugs, strongest first", head, rows, note)


def _differences(found: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the classes in which the cohorts differ most."""
    rows = [[str(row["label"]), cell(row["distance"])] for row in found[:5]]
    note = "Distance of the cohorts' means; 1 is that of a class from its group's mean."
    return Table("Where do they differ most?", ["class", "distance"], rows, note)


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    if interval is None:
        return cell(value)
    low, high = interval
    return f"{cell(value)} [{cell(low)}, {cell(high)}]"
