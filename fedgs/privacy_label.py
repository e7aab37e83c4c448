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
from collections.abc import Mapping, Sequence
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
from fedgs.runs.run_folder import RunFolder, versions_of

LABEL_HOLDS = "holds, under the conditions of this label"
UNFINISHED = "the run is not finished, and each further release raises epsilon"
ALL_RELEASED = "the run is not finished, but all of its releases are counted"
NOT_COVERED = [
    "tuning: choosing one of k runs by results on private data costs as much as all "
    "of them, about sqrt(k) times mu",
    "other runs and releases on the same data, and scores from real images",
]
# Trust models; a simulation is one place, too.
_TRUST_IN_CURATOR = "who runs it sees all images and is trusted"
_TRUST_IN_NODES = "a node sees the images of its clients and is trusted with them"
# Begin conditions that stand beside an epsilon.
_CAVEATS = (EXCLUDED, *accountant.CAVEATS)
# What describes a release: an event of a baseline may hold more than is public.
_TERMS = (
    "kind",
    "what",
    "release",
    "noise_std",
    "noise_multiplier",
    "clip_bound",
    "batch_size",
    "sampling_rate",
)
_OF_AUDIT = ("attack", "rounds", "lower_bound", "epsilon", "delta", "confidence")
# Stands for a row where there is none; it guarantees nothing.
_NO_ROW = Statement(
    label="none",
    unit="nothing",
    relation="none",
    epsilon=None,
    delta=1.0,
    theorem="none",
    adversary="none",
)


def privacy_label(path: Path, typed: str = "") -> dict[str, Any]:
    """Returns the label of what a run has released so far, as JSON values.

    Privacy: public, as the run's statements are: no seed, no path, nothing of who was
    selected. Of an audit it has the attack that reads no images.

    Args:
        path: a run folder, of any method.
        typed: a method that the user named on the command line, and so trusts.

    Returns:
        `guarantee` first: `LABEL_HOLDS`, or `NO_GUARANTEE` and why. Every epsilon that
        is not guaranteed is None.

    Raises:
        UserError: no run folder, a broken ledger or a broken audit.
    """
    folder = RunFolder.open(path)
    config = folder.config
    rows, events, method, trust = _claims(folder, typed)
    first = next(iter(rows), _NO_ROW)
    conditions: dict[str, None] = {}  # each once, in their order
    for row in rows:
        conditions |= dict.fromkeys(row.conditions)
    bound, holds = _audited(folder.path, first)
    # The first one that is there is told: each of them alone voids the guarantee.
    flaws = {
        "the method claims none": not rows,
        "nothing was released yet": not events,
        f"noise {SEEDED}": any(row.label == SEEDED for row in rows),
        "epsilon is unbounded": not first.guarantee,
        "`fedgs audit` refuted it": not holds,
    }
    found = [text for text, is_there in flaws.items() if is_there]
    if found:
        epsilon = None
        guarantee = [NO_GUARANTEE, found[0]]
    else:
        epsilon = first.epsilon
        guarantee = [LABEL_HOLDS, *_caveats(first)]
        if not folder.is_finished:
            guarantee.append(_of_unfinished(folder))
    side = config.image_size
    public = [
        f"{config.num_clients} clients, {config.num_classes} classes",
        f"images of {config.image_channels} x {side} x {side}",
    ]
    public += [text for text in conditions if "public" in text]
    return {
        "guarantee": "; ".join(guarantee),
        "epsilon": epsilon,
        "delta": config.delta,
        "unit_of_privacy": first.unit_in_words,
        "relation": first.relation,
        "adversary": first.adversary,
        "mechanism": [method, *_releases(events)],
        "composition": first.theorem,
        "trust_model": trust,
        "who_sees_what": _who_sees_what(rows, is_void=bool(found)),
        "public": public,
        "not_covered": [*NOT_COVERED],
        "audit": "one release attacked" if bound else "not audited",
        "audited_bound": bound,
        "conditions": list(conditions),
        "versions": versions_of(folder.path),
    }


def _claims(
    folder: RunFolder,
    typed: str,
) -> tuple[Sequence[Statement], Sequence[dict[str, Any]], str, str]:
    """Returns the bounds, the one the run is for first; releases; method; trust."""
    if folder.is_baseline:
        from fedgs.runs.other_runs import open_other  # loads torch

        run = open_other(folder.path, typed)
        bounds = [row for row in run.guarantees() if row.label not in FIGURE_LABELS]
        events = [dict(event) for event in run.events]
        return bounds, events, run.title, _TRUST_IN_CURATOR
    config = folder.config
    # Of several valid bounds for the same adversary and relation the best one.
    best: dict[tuple[str, str], Statement] = {}
    for row in epsilons.ranked(config, epsilons.of_run(folder.path)):
        best.setdefault((row.adversary, row.relation), row)
    events = [asdict(event) for event in folder.read_ledger().events]
    method = "noise on sums of gradients or embeddings that the clients clip"
    trust = _TRUST_IN_CURATOR
    if config.node_names:
        trust = _TRUST_IN_NODES
    return list(best.values()), events, method, trust


def _of_unfinished(folder: RunFolder) -> str:
    """Returns whether a run that is not finished will release more, in words."""
    if folder.last_round >= folder.config.num_rounds:
        return ALL_RELEASED
    return UNFINISHED


def _releases(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns how often what was released."""
    kinds = Counter(_terms_in_words(event) for event in events)
    return [f"{count} x {text}" for text, count in kinds.items()]


def _terms_in_words(event: Mapping[str, Any]) -> str:
    terms: list[str] = []
    for name in _TERMS:
        if name in event:
            terms.append(f"{name} {event[name]}")
    return ", ".join(terms)


def _who_sees_what(rows: Sequence[Statement], is_void: bool) -> list[dict[str, Any]]:
    """Returns an entry for each adversary and unit, with epsilon by relation."""
    who: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        new = {"adversary": row.adversary, "unit": row.unit, "epsilon": {}}
        entry = who.setdefault((row.adversary, row.unit), new)
        epsilon = None
        if row.guarantee and not is_void:
            epsilon = row.epsilon
        entry["epsilon"][row.relation] = epsilon
        seen = said(row.conditions, "adversary", "")
        entry["capability"] = "; ".join([seen, *_caveats(row)])
    return [*who.values()]


def _caveats(row: Statement) -> list[str]:
    return [text for text in row.conditions if text.startswith(_CAVEATS)]


def said(conditions: Sequence[str], word: str, otherwise: str) -> str:
    """Returns what a condition "word: ..." says."""
    prefix = f"{word}: "
    for condition in conditions:
        if condition.startswith(prefix):
            return condition.removeprefix(prefix)
    return otherwise


def _audited(path: Path, first: Statement) -> tuple[dict[str, Any] | None, bool]:
    """Returns the largest lower bound of a row, and whether all claims hold."""
    report = path / "audit" / "report.json"
    if not report.exists():
        return None, True
    content = read_json(report)
    with wrap_error(Exception, f"{report}: it cannot be read", "audit the run again"):
        # The attacks B and C read images: what A found alone is public.
        found = [
            row
            for row in content["findings"]
            if row["attack"].startswith("A ")
            and row["adversary"] == first.adversary
            and row["relation"] == first.relation
        ]
        best = max(found, key=lambda row: row["lower_bound"], default=None)
        bound = None
        if best is not None:
            bound = {name: best[name] for name in _OF_AUDIT}
        return bound, content["holds"]
