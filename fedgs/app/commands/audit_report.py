"""The one reporter of audits, of a run and of a baseline: table, plot and JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgs.app.commands.drawing import new_figure, to_png
from fedgs.app.commands.progress import say
from fedgs.app.tables import Table
from fedgs.audit.finding import CONFIDENCE, REFUTED, Finding
from fedgs.files import write_atomically, write_json

HEAD = ("attack", "against", "rounds", "bound", "claimed", "by", "verdict")
LEAST_SHOWN = 1e-3  # lower bounds of the plot's logarithmic axis


def conclude(
    folder: Path,
    report: dict[str, Any],
    findings: Sequence[Finding],
    notes: Sequence[str],
    as_json: bool,
) -> bool:
    """Writes RUN/audit/, prints it and returns whether all claims hold.

    Args:
        folder: of the run.
        report: what its kind of audit has to say beside the findings.
        findings: at least one.
        notes: lines below the table.
        as_json: prints the report instead of the tables.
    """
    output = folder / "audit"
    output.mkdir(exist_ok=True)
    refuted = [finding for finding in findings if finding.verdict == REFUTED]
    rows = [finding.to_json() for finding in findings]
    report = {"run": str(folder), "confidence": CONFIDENCE, **report}
    report |= {"findings": rows, "holds": not refuted}
    tables = [_table(findings, notes)]
    if isinstance(report.get("membership"), dict):
        tables.append(_membership(report["membership"]))
    text = "\n".join(f"{t.caption}\n\n{t.markdown()}\n{t.note}\n" for t in tables)
    write_atomically(output / "table.txt", text.encode())
    try:
        write_atomically(output / "plot.png", _plot(findings))
        report["plot"] = "plot.png"
    except ImportError:
        report["plot"] = "skipped: needs matplotlib, pip install 'fedgs[report]'"
    write_json(output / "report.json", report)
    if as_json:
        print((output / "report.json").read_text(), end="")
    else:
        for table in tables:
            table.show()
        say(f"plot         {report['plot']}\naudit folder {output}")
    for finding in refuted:
        text = (
            f"REFUTED: {finding.attack}: {finding.adversary}, {finding.relation}, "
            f"rounds {finding.rounds}: epsilon is at least "
            f"{finding.lower_bound:.4g}, {finding.epsilon:.4g} is claimed"
        )
        say(text, is_error=True)
    return not refuted


def _table(findings: Sequence[Finding], notes: Sequence[str]) -> Table:
    theorems = list(dict.fromkeys(finding.theorem for finding in findings))
    rows = [
        (
            finding.attack,
            f"{finding.adversary}, {finding.relation}",
            str(finding.rounds),
            f"{finding.lower_bound:.3g}",
            "unbounded" if finding.epsilon is None else f"{finding.epsilon:.4g}",
            f"({theorems.index(finding.theorem) + 1})",
            finding.verdict,
        )
        for finding in findings
    ]
    numbered = [f"({place}) {text}" for place, text in enumerate(theorems, start=1)]
    caption = f"audit at delta {findings[0].delta:g}: lower bounds (95 %) and claims"
    note = "\n".join([*numbered, *notes])
    return Table(caption, HEAD, rows, note, numeric=False)


def _membership(membership: dict[str, Any]) -> Table:
    names = list(membership["nearest"])
    rows = [
        [attack, *(_interval(membership[attack][name]) for name in names)]
        for attack in ("nearest", "calibrated")
    ]
    note = (
        "nearest record of a sample is a member: "
        f"{_interval(membership['nearest_is_member'])} (chance: 0.5); "
        "median distance, member / other: "
        f"{membership['median_distance_ratio']:.3f}; "
        f"{membership['num_synthetic']} samples, {membership['num_members']} members, "
        f"{membership['num_others']} others\nC: {membership['warning']}."
    )
    head = ["attack", *(name.replace("_", " ") for name in names)]
    caption = "C: membership inference on samples (release adversary)"
    return Table(caption, head, rows, note)


def _interval(score: dict[str, float]) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def _plot(findings: Sequence[Finding]) -> bytes:
    """Returns a PNG: claimed epsilons and lower bounds, one line for each attack.

    Raises:
        ImportError: matplotlib is missing.
    """
    rows = [finding for finding in findings if finding.epsilon is not None]
    figure = new_figure(9, 1.2 + 0.35 * max(len(rows), 1))
    axes = figure.subplots()
    places = range(len(rows))[::-1]
    bounds = [max(row.lower_bound, LEAST_SHOWN) for row in rows]
    claims = [max(row.epsilon or 0.0, LEAST_SHOWN) for row in rows]
    axes.hlines(places, bounds, claims, color="0.8", zorder=1)
    axes.plot(claims, places, "|", color="black", markersize=14, label="claimed")
    colors = ["tab:red" if row.verdict == REFUTED else "tab:blue" for row in rows]
    label = "lower bound, 95 % (red: refutes the claim)"
    axes.scatter(bounds, places, c=colors, zorder=2, label=label)
    names = [f"{row.attack}: {row.adversary}, {row.relation}" for row in rows]
    axes.set_yticks(list(places), names, fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel(f"epsilon at delta {findings[0].delta:g}")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.3, 1.2), ncols=2)
    return to_png(figure)
