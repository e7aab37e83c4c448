"""The table and the plot of an audit, from its report."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from experiments.commands.drawing import new_figure, to_png
from fedgs.audit.finding import REFUTED

COLUMNS = ("adversary", "relation", "rounds")
THEIRS = "refuted"  # a figure that fedgs does not claim
LEAST_SHOWN = 1e-3  # lower bounds of the plot's logarithmic axis


def show(console: Console, report: dict[str, Any]) -> None:
    """Prints the audit: what was attacked, what held, and what was not run."""
    rows = _rows(report)
    table = Table(title=f"audit at delta {rows[0]['delta']:g}", box=SIMPLE, padding=0)
    table.add_column("attack")  # the one that may be broken between words
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    table.add_column("lower\nbound\n(95 %)", justify="right", no_wrap=True)
    table.add_column("epsilon\nclaimed", justify="right", no_wrap=True)
    table.add_column("theorem", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    theorems = list(dict.fromkeys(row["theorem"] for row in rows))
    for row in rows:
        table.add_row(
            row["attack"],
            *(str(row[column]) for column in COLUMNS),
            _number(row["lower_bound"]),
            _number(row["epsilon"]),
            f"({theorems.index(row['theorem']) + 1})",
            _verdict(row),
        )
    console.print(table)
    for number, theorem in enumerate(theorems, start=1):
        console.print(f"({number}) {theorem}", highlight=False)
    if any(_verdict(row) == THEIRS for row in rows):
        console.print("refuted: the paper's accounting, not a claim of fedgs")
    console.print(f"B, one run with canaries: {report['one_run']}", highlight=False)
    console.print(f"masks: {_of_masks(report['masks'])}", highlight=False)
    membership = report["membership"]
    if isinstance(membership, str):
        console.print(f"C, membership inference: {membership}", highlight=False)
    else:
        _show_membership(console, membership)


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [*report["findings"], report["published"]]


def _of_masks(found: dict[str, Any] | str) -> str:
    if isinstance(found, str):
        return found
    uniform = f"one node's message is uniform with p = {found['p_uniform']:.3g}"
    exact = "exact" if found["is_exact"] else "WRONG"
    noticed = "noticed" if found["is_noticed"] else "NOT NOTICED"
    verdict = "holds" if found["holds"] else "FAILED"
    return (
        f"{verdict}: {uniform}, the sum of {found['nodes']} nodes is {exact}, "
        f"a mask left out is {noticed}"
    )


def _number(epsilon: float | None) -> str:
    if epsilon is None:
        return "unbounded"
    return f"{epsilon:.1f}" if epsilon >= 100 else f"{epsilon:.3g}"


def _verdict(row: dict[str, Any]) -> str:
    if row["verdict"] == REFUTED and not row["is_guarantee"]:
        return THEIRS
    return row["verdict"]


def _show_membership(console: Console, membership: dict[str, Any]) -> None:
    title = "C: membership inference on samples (release adversary)"
    table = Table(title=title, box=SIMPLE)
    table.add_column("attack")
    names = list(membership["nearest"])
    for name in names:
        table.add_column(name.replace("_", " "))
    for attack in ("nearest", "calibrated"):
        cells = (membership[attack][name] for name in names)
        table.add_row(
            attack,
            *(f"{c['value']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" for c in cells),
        )
    console.print(table)
    share = membership["nearest_is_member"]
    console.print(
        "nearest record of a sample is a member: "
        f"{share['value']:.3f} [{share['low']:.3f}, {share['high']:.3f}] "
        f"(chance: 0.5); median distance, member / other: "
        f"{membership['median_distance_ratio']:.3f}; "
        f"{membership['num_synthetic']} samples, "
        f"{membership['num_members']} members, {membership['num_others']} others",
        highlight=False,
    )
    console.print(f"C: {membership['warning']}.", highlight=False)


def plot(report: dict[str, Any]) -> bytes:
    """Returns a PNG: claimed epsilons and lower bounds, one line for each attack.

    Raises:
        ImportError: matplotlib is missing.
    """
    rows = [row for row in _rows(report) if row["epsilon"] is not None]
    figure = new_figure(9, 1.2 + 0.35 * max(len(rows), 1))
    axes = figure.subplots()
    _draw(axes, rows)
    return to_png(figure)


def _draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    places = range(len(rows))[::-1]
    bounds = [max(row["lower_bound"], LEAST_SHOWN) for row in rows]
    claims = [max(row["epsilon"], LEAST_SHOWN) for row in rows]
    axes.hlines(places, bounds, claims, color="0.8", zorder=1)
    axes.plot(claims, places, "|", color="black", markersize=14, label="claimed")
    colors = ["tab:red" if row["verdict"] == REFUTED else "tab:blue" for row in rows]
    label = "lower bound, 95 % (red: refutes the claim)"
    axes.scatter(bounds, places, c=colors, zorder=2, label=label)
    names = [f"{r['attack']}: {r['adversary']}, {r['relation']}" for r in rows]
    axes.set_yticks(list(places), names, fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel(f"epsilon at delta {rows[0]['delta']:g}" if rows else "epsilon")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.3, 1.2), ncols=2)
