"""The one reporter of audits, of a run and of a baseline: table and JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgs.app.commands.terminal import say
from fedgs.app.tables import Table
from fedgs.audit.finding import CONFIDENCE, REFUTED, Check, Finding
from fedgs.files import write_json
from fedgs.privacy.rounding import lower, upper

HEAD_OF_CHECKS = ("check", "found", "at most", "verdict", "what was tested")
HEAD = ("attack", "against", "rounds", "bound", "claimed", "by", "verdict")


def conclude(
    folder: Path,
    report: dict[str, Any],
    findings: Sequence[Finding],
    checks: Sequence[Check],
    notes: Sequence[str],
    as_json: bool,
) -> bool:
    """Writes RUN/audit/report.json, prints it and returns whether all claims hold.

    Args:
        folder: the run's folder.
        report: what its kind of audit has to say beside the findings.
        findings: at least one.
        checks: the checks of what all claims rest on; none of a baseline.
        notes: lines below the table.
        as_json: prints the report instead of the tables.
    """
    output = folder / "audit"
    output.mkdir(exist_ok=True)
    refuted = [finding for finding in findings if finding.verdict == REFUTED]
    broken = [check for check in checks if check.verdict == REFUTED]
    holds = not refuted and not broken
    report = {"run": str(folder), "confidence": CONFIDENCE, **report}
    report["findings"] = [finding.to_json() for finding in findings]
    report["checks"] = [check.to_json() for check in checks]
    report["holds"] = holds
    path = output / "report.json"
    write_json(path, report)
    if as_json:
        # The file itself, so that what is printed and what is kept cannot differ.
        text = path.read_text()
        print(text, end="")
    else:
        if checks:
            _table_of_checks(checks).show()
        _table(findings, notes).show()
        membership = report.get("membership")
        if isinstance(membership, dict):
            _membership(membership).show()
        if holds:
            say("No attack proved a larger epsilon than is claimed.")
        say(f"Audit folder: {output}")
    # On standard error, so that a reader of the JSON or of a log cannot miss them.
    for finding in refuted:
        found = lower(finding.lower_bound)
        claimed = upper(finding.epsilon)
        text = (
            f"REFUTED: {finding.attack}: {finding.adversary}, {finding.relation}, "
            f"rounds {finding.rounds}: epsilon is at least "
            f"{found}, {claimed} is claimed"
        )
        say(text, is_error=True)
    for check in broken:
        numbers = f"{check.found:.4g} is found, at most {check.allowed:.4g} may be"
        say(f"REFUTED: {check.check}: {numbers}; {check.tested}", is_error=True)
    return holds


def _table_of_checks(checks: Sequence[Check]) -> Table:
    rows: list[tuple[str, ...]] = []
    for check in checks:
        found = f"{check.found:.4g}"
        allowed = f"{check.allowed:.4g}"
        row = (check.check, found, allowed, check.verdict, check.tested)
        rows.append(row)
    caption = "checks that every claim rests on, made with invented clients"
    return Table(caption, HEAD_OF_CHECKS, rows, numeric=False)


def _table(findings: Sequence[Finding], notes: Sequence[str]) -> Table:
    # Names of theorems are long and repeat, so a cell has a number and the note the
    # name.
    theorems = list(dict.fromkeys(finding.theorem for finding in findings))
    rows: list[tuple[str, ...]] = []
    for finding in findings:
        number = theorems.index(finding.theorem) + 1
        row = (
            finding.attack,
            f"{finding.adversary}, {finding.relation}",
            str(finding.rounds),
            # The bound is rounded down and the claim up, so that rounding alone never
            # looks like a refutation.
            lower(finding.lower_bound, 3),
            upper(finding.epsilon),
            f"({number})",
            finding.verdict,
        )
        rows.append(row)
    numbered: list[str] = []
    for place, text in enumerate(theorems, start=1):
        numbered.append(f"({place}) {text}")
    delta = upper(findings[0].delta, 6)
    caption = (
        f"audit at delta {delta}: lower bounds (95 %) and claims, of so many rounds"
    )
    note = "\n".join([*numbered, *notes])
    return Table(caption, HEAD, rows, note, numeric=False)


def _membership(membership: dict[str, Any]) -> Table:
    rates = membership["nearest"]
    note = (
        f"{membership['num_synthetic']} samples, {membership['num_members']} members, "
        f"{membership['num_others']} others\nC: {membership['warning']}."
    )
    head = [name.replace("_", " ") for name in rates]
    caption = "C: membership inference by the nearest sample (release adversary)"
    row = ["{value:.3f} [{low:.3f}, {high:.3f}]".format(**r) for r in rates.values()]
    return Table(caption, head, [row], note)
