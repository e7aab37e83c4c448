"""The privacy label of a run: what is guaranteed to whom, and what is not covered.

Its fields are what NIST SP 800-226 has a reader examine, from epsilon and the unit of
privacy over mechanism and composition down to the trust model, and what the experts
behind the published label want disclosed.

Source: Near, Darais, Lefkovitz, Howarth, "Guidelines for evaluating differential
privacy guarantees", NIST SP 800-226, 2025, https://doi.org/10.6028/NIST.SP.800-226;
Dibia, Lu, Bhattacharjee, Near, Feng, "'We need a standard': toward an expert-informed
privacy label for differential privacy", 2025, arXiv:2507.15997.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedgs.cohorts.cohort_file import EXCLUDED
from fedgs.errors import wrap_error
from fedgs.files import read_json
from fedgs.privacy import accountant
from fedgs.privacy.accountant import FIGURE_LABELS, SEEDED, Statement
from fedgs.runs import epsilons
from fedgs.runs.data_card import NO_GUARANTEE
from fedgs.runs.run_folder import RunFolder

HOLDS = "holds, under the conditions of this label"
UNFINISHED = "so far, for the run is not finished: each further release costs more"
NOT_COVERED = [
    "tuning: choosing one of k runs by results on private data costs about sqrt(k)",
    "other runs and releases on the same data, and scores from real images",
]
CENTRAL = "who runs it sees all images and is trusted"  # a simulation is one place, too
FEDERATED = "a node sees the images of its clients and is trusted with them"
# Begin conditions that stand beside an epsilon.
CAVEATS = (EXCLUDED, *accountant.CAVEATS)
# What describes a release: an event of a baseline may hold more than is public.
_TERMS = ("kind", "what", "release", "noise_std", "noise_multiplier", "clip_bound")
_TERMS += ("batch_size", "sampling_rate")
_OF_AUDIT = ("attack", "rounds", "lower_bound", "epsilon", "delta", "confidence")
_NO_ROW = Statement("none", "nothing", "none", None, 1.0, "none", adversary="none")


def privacy_label(path: Path, typed: str = "") -> dict[str, Any]:
    """Returns the label of what a run has released so far, as JSON values.

    Privacy: public, as the run's statements are: no seed, no path, nothing of who was
    selected. Of an audit it has the attack that reads no images.

    Args:
        path: a run folder, of any method.
        typed: a method that the user named on the command line, and so trusts.

    Returns:
        `guarantee` first: `HOLDS`, or `NO_GUARANTEE` and why. Every epsilon that is not
        guaranteed is None.

    Raises:
        UserError: no run folder, a broken ledger or a broken audit.
    """
    folder = RunFolder.open(path)
    config, side = folder.config, folder.config.image_size
    rows, events, method, trust = _claims(folder, typed)
    first = rows[0] if rows else _NO_ROW
    conditions = list(dict.fromkeys(text for row in rows for text in row.conditions))
    bound, holds = _audited(folder.path, first)
    flaws = {
        "the method claims none": not rows,
        "nothing was released yet": not events,
        f"noise {SEEDED}": any(row.label == SEEDED for row in rows),
        "epsilon is unbounded": not first.guarantee,
        "`fedgs audit` refuted it": not holds,
    }
    flaw = next((text for text, is_there in flaws.items() if is_there), None)
    limits = _caveats(first)
    if not folder.is_finished:
        limits += [UNFINISHED]
    kinds = Counter(", ".join(f"{n} {e[n]}" for n in _TERMS if n in e) for e in events)
    public = [f"{config.num_clients} clients, {config.num_classes} classes"]
    public += [f"images of {config.image_channels} x {side} x {side}"]
    return {
        "guarantee": "; ".join([NO_GUARANTEE, flaw] if flaw else [HOLDS, *limits]),
        "epsilon": None if flaw else first.epsilon,
        "delta": config.delta,
        "unit_of_privacy": first.unit_in_words,
        "relation": first.relation,
        "adversary": first.adversary,
        "mechanism": [method, *(f"{count} x {text}" for text, count in kinds.items())],
        "composition": first.theorem,
        "trust_model": trust,
        "who_sees_what": _who_sees_what(rows, is_void=bool(flaw)),
        "public": [*public, *(text for text in conditions if "public" in text)],
        "not_covered": [*NOT_COVERED],
        "audit": "one release attacked" if bound else "not audited",
        "audited_bound": bound,
        "conditions": conditions,
        "versions": read_json(folder.path / "versions.json"),
    }


def _claims(
    folder: RunFolder, typed: str
) -> tuple[Sequence[Statement], Sequence[dict[str, Any]], str, str]:
    """Returns the bounds, the one the run is for first; releases; method; trust."""
    if folder.is_baseline:
        from fedgs.runs.other_runs import open_other  # loads torch

        run = open_other(folder.path, typed)
        bounds = [row for row in run.guarantees() if row.label not in FIGURE_LABELS]
        return bounds, [dict(event) for event in run.events], run.title, CENTRAL
    config, best = folder.config, dict[tuple[str, str], Statement]()
    for row in epsilons.ranked(config, epsilons.of_run(folder.path)):
        best.setdefault((row.adversary, row.relation), row)
    events = [asdict(event) for event in folder.read_ledger().events]
    method = "noise on sums of gradients or embeddings that the clients clip"
    return [*best.values()], events, method, FEDERATED if config.node_names else CENTRAL


def _who_sees_what(rows: Sequence[Statement], is_void: bool) -> list[dict[str, Any]]:
    """Returns an entry for each adversary and unit, with epsilon by relation."""
    who: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        new = {"adversary": row.adversary, "unit": row.unit, "epsilon": {}}
        entry = who.setdefault((row.adversary, row.unit), new)
        number = None if is_void or not row.guarantee else row.epsilon
        entry["epsilon"][row.relation] = number
        seen = said(row.conditions, "adversary", "")
        entry["capability"] = "; ".join([seen, *_caveats(row)])
    return [*who.values()]


def _caveats(row: Statement) -> list[str]:
    return [text for text in row.conditions if text.startswith(CAVEATS)]


def said(conditions: Sequence[str], word: str, otherwise: str) -> str:
    """Returns what a condition "word: ..." says."""
    found = (c for c in conditions if c.startswith(f"{word}: "))
    return next(found, otherwise).removeprefix(f"{word}: ")


def _audited(path: Path, first: Statement) -> tuple[dict[str, Any] | None, bool]:
    """Returns the largest lower bound of a row, and whether all claims hold."""
    wanted = first.adversary, first.relation
    report = path / "audit" / "report.json"
    content = read_json(report) if report.exists() else {"findings": (), "holds": True}
    with wrap_error(Exception, f"{report}: cannot be read", "audit the run again"):
        # The attacks B and C read images: what A found alone is public.
        found = [row for row in content["findings"] if row["attack"].startswith("A ")]
        found = [row for row in found if (row["adversary"], row["relation"]) == wanted]
        best = max(found, key=lambda row: row["lower_bound"], default=None)
        return best and {name: best[name] for name in _OF_AUDIT}, content["holds"]
