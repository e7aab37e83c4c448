"""The line of a cell: what its run folder says, and nothing that needs it again."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.baselines.baseline_run import CURATOR, BaselineRun, open_run
from experiments.grid.cells import Cell
from experiments.store import Line
from fedgs.app.report.communication import communication
from fedgs.app.report.run import read_run
from fedgs.audit.finding import REFUTED, Finding
from fedgs.audit.mechanism import Claim, audit_rounds
from fedgs.config.method_settings import settings_with
from fedgs.config.recipes import overridden
from fedgs.config.run_config import RunConfig
from fedgs.files import read_json
from fedgs.privacy.accountant import VALID, Statement
from fedgs.round.preparation import with_absolute_paths
from fedgs.runs.run_folder import RunFolder, is_baseline, versions

NUM_SAMPLES = 10_000
COST_FILE = "cpu-seconds.json"  # in the run folder: of training, all threads
_COST_NAMES = ("cpu_seconds", "wall_seconds", "peak_memory_bytes")
TRIALS = 50_000  # of the audit: seconds
_MOST_DRAWS = 1e7
NODES = "no curator: nodes add noise; adversary = server covers the server as well"
KEPT = ("label", "relation", "epsilon", "delta", "theorem")
OTHER_CLAIMS = ("amplification", "as published")  # theorems of rows that are not shown


def asked_data(cell: Cell) -> dict[str, Any]:
    """Returns which data a cell is asked for: the settings that its run keeps of them.

    Where the data lie on this machine, and what computes, is not among them.
    """
    values = {"data": cell.data, **cell.source.settings}
    config = with_absolute_paths(overridden(RunConfig(), values))
    left_out = settings_with("machine")
    return {name: getattr(config, name) for name in values if name not in left_out}


def asked_of(cell: Cell) -> Line:
    """Returns what a cell is asked for, as far as its line tells it.

    The line is published, so that it names no file of the data's owner.
    """
    data = asked_data(cell)
    left_out = settings_with("stays")
    return {
        **cell.identity,
        "reduced": dict(cell.how.reduced),
        "settings": {name: data[name] for name in data if name not in left_out},
    }


def line_of(cell: Cell, run: Path, scores: Line) -> Line:
    """Returns what is kept of a finished run.

    Privacy: epsilons, counts and costs are public; the scores were computed from real
    data, and no epsilon covers them.

    Args:
        cell: the cell of the run.
        run: its folder.
        scores: the scores of `fedgs evaluate`.

    Raises:
        UserError: a broken run folder.
    """
    # Read from the folder and not from memory: a run may have ended days ago.
    if is_baseline(run):
        facts = _of_baseline(open_run(run, cell.how.baseline))
    else:
        facts = _of_own(run)
    cost: Line = {}
    if (run / COST_FILE).exists():
        cost = read_json(run / COST_FILE)
    return {
        **asked_of(cell),
        **facts,
        "accuracy_cnn": scores.get("downstream_cnn_accuracy"),
        "accuracy_mean_of_13": scores.get("classifiers", {}).get("average"),
        "accuracy_by_classifier": scores.get("classifiers", {}).get("accuracy"),
        "inception_score": _score(scores, "is_lenet"),
        "fid": _score(scores, "fid_lenet"),
        "coverage": _score(scores, "coverage_lenet"),
        "fid_network": scores.get("network"),
        "num_synthetic": scores.get("num_synthetic"),
        **{name: cost.get(name) for name in _COST_NAMES},
        "versions": versions(),
    }


def _score(scores: Line, start: str) -> float | None:
    """Returns the first score whose name begins so; it goes on with the data's."""
    for name, value in scores.items():
        if name.startswith(start):
            return value
    return None


def _of_baseline(run: BaselineRun) -> Line:
    rows = run.guarantees()
    # Other figures may be computed from what is not to be published.
    valid = [row for row in rows if row.label == VALID]
    if valid:
        rows = valid
    of_unit = {row.relation: row.epsilon for row in rows if row.unit == run.unit}
    unit = "none"  # of a run that has released nothing yet
    if run.events:
        unit = run.unit
    facts = run.facts
    return {
        "unit": unit,
        "own": False,
        "trust": CURATOR,
        "guarantees": _stated(rows),
        "epsilons": {run.config.adversary: of_unit},
        "num_clients": facts.num_clients,
        "num_records": facts.num_records,
        "cap": facts.max_images_per_user,
        "releases": len(run.events),
        "rounds": run.config.num_rounds,
        "bytes_per_client": None,
        "audit": _strongest(run.attack(TRIALS)),
    }


def _of_own(run: Path) -> Line:
    facts = read_run(run)
    config = facts.config
    weight = communication(facts)
    rows: list[Statement] = []
    for row in facts.statements:
        is_shown = not row.theorem.startswith(OTHER_CLAIMS)
        # Every method has this adversary, so that their rows can be compared.
        if row.adversary == "release" and row.epsilon is not None and is_shown:
            rows.append(row)
    unit = "none"
    audit: Line | None = None
    if rows:
        unit = "user"
        audit = _audit_of_own(RunFolder.open(run))
    # Of a client that is a node of its own, asked as often as the others.
    share = config.clients_per_round / config.num_clients
    times_asked = math.ceil(share * weight.rounds)
    sent = (weight.request + weight.reply) * times_asked
    sent += weight.releases // config.num_nodes
    epsilons: Line = {}
    for known in facts.label["who_sees_what"]:
        epsilons[known["adversary"]] = known["epsilon"]
    return {
        "unit": unit,
        "own": True,
        "trust": NODES,
        "guarantees": _stated(rows),
        "epsilons": epsilons,
        "num_clients": config.num_clients,
        "num_records": None,
        "cap": None,
        "releases": len(facts.events),
        "rounds": facts.round,
        "bytes_per_client": sent,
        "audit": audit,
    }


def _stated(rows: Sequence[Statement]) -> list[Line]:
    """Returns what is kept of statements; a client is a user."""
    lines: list[Line] = []
    for row in rows:
        line: Line = {name: getattr(row, name) for name in KEPT}
        line["unit"] = row.unit
        if row.unit == "client":
            line["unit"] = "user"
        lines.append(line)
    return lines


# ------------------------------------------------------------------ audit


def _audit_of_own(folder: RunFolder) -> Line | None:
    config = folder.config

    def is_wanted(claim: Claim) -> bool:
        about = (claim.adversary, claim.view, claim.relation)
        return about == ("release", "asked", config.relation)

    ledger = folder.read_ledger()
    found = audit_rounds(
        config,
        ledger.events,
        trials=TRIALS,
        max_draws=_MOST_DRAWS,
        is_wanted=is_wanted,
    )
    return _strongest(found)


def _strongest(found: Sequence[Finding]) -> Line | None:
    if not found:
        return None
    # The largest bound says most of how much of the claim is really spent.
    best = max(found, key=lambda finding: finding.lower_bound)
    return {
        "lower_bound": best.lower_bound,
        "claimed": best.epsilon,
        "relation": best.relation,
        "refuted": any(finding.verdict == REFUTED for finding in found),
    }
