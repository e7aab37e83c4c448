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

from fedgs.cohorts.files import EXCLUDED
from fedgs.config.run_config import RunConfig
from fedgs.files import read_json
from fedgs.privacy.accounting import SEEDED
from fedgs.runs import epsilons
from fedgs.runs.data_card import NO_GUARANTEE
from fedgs.runs.run_folder import GENERATOR, RunFolder

HOLDS = "holds, under the conditions of this label"
UNFINISHED = "so far, for the run is not finished: each further release costs more"
NOT_COVERED = [
    "tuning: choosing one of k runs by results on private data costs about sqrt(k)",
    "other runs and releases on the same data, and scores from real images",
]
CENTRAL = "who runs it sees all images and is trusted"  # a simulation is one place, too
FEDERATED = "a node sees the images of its clients and is trusted with them"
# What describes a release: an event of a baseline may hold more than is public.
_TERMS = ("kind", "what", "release", "noise_std", "noise_multiplier", "clip_bound")
_TERMS += ("batch_size", "sampling_rate")
_OF_AUDIT = ("lower_bound", "epsilon", "delta", "rounds", "confidence")
Row = Mapping[str, Any]  # a `Statement`, or a valid `Guarantee` of a baseline
_NO_ROW: Row = dict.fromkeys(("adversary", "relation", "unit", "theorem"), "none")


def privacy_label(path: Path) -> dict[str, Any]:
    """Returns the label of what a run has released so far, as JSON values.

    Privacy: public, as the run's statements are: no seed, no path, nothing of who was
    selected. Of an audit it has the attack that reads no images.

    Args:
        path: a run folder, of any method.

    Returns:
        `guarantee` first: `HOLDS`, or `NO_GUARANTEE` and why. Every epsilon that is not
        guaranteed is None.

    Raises:
        UserError: no run folder, a broken ledger or a broken audit.
    """
    folder = RunFolder.open(path)
    config, side = folder.config, folder.config.image_size
    claims = _of_baseline if folder.is_baseline else _of_run
    rows, events, method, trust = claims(folder)
    first = rows[0] if rows else _NO_ROW
    conditions = list(dict.fromkeys(text for row in rows for text in row["conditions"]))
    attack, bound, holds = _audited(folder.path, first)
    flaws = {
        "the method claims none": not rows,
        "nothing was released yet": not events,
        f"noise {SEEDED}": any(text.endswith(SEEDED) for text in conditions),
        "epsilon is unbounded": not first.get("guarantee"),
        "`fedgs audit` refuted it": not holds,
    }
    flaw = next((text for text, is_there in flaws.items() if is_there), None)
    unit = _said(first, first["unit"], unit_in_words(config, first["unit"]))
    is_finished = (folder.path / GENERATOR).exists()
    limits = [EXCLUDED] * (EXCLUDED in conditions) + [UNFINISHED] * (not is_finished)
    who: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        new = {name: row[name] for name in ("adversary", "unit")} | {"epsilon": {}}
        entry = who.setdefault((row["adversary"], row["unit"]), new)
        number = row["epsilon"] if row["guarantee"] and not flaw else None
        entry["epsilon"][row["relation"]] = number
        entry["capability"] = _said(row, "adversary", "sees what is published")
    kinds = Counter(", ".join(f"{n} {e[n]}" for n in _TERMS if n in e) for e in events)
    public = [f"{config.num_clients} clients, {config.num_classes} classes"]
    public += [f"images of {config.image_channels} x {side} x {side}"]
    public += [f"public images: {Path(config.public_data or 'none').name}"]
    return {
        "guarantee": "; ".join([NO_GUARANTEE, flaw] if flaw else [HOLDS, *limits]),
        "epsilon": None if flaw else first["epsilon"],
        "delta": config.delta,
        "unit_of_privacy": unit,
        "relation": first["relation"],
        "adversary": first["adversary"],
        "mechanism": [method, *(f"{count} x {text}" for text, count in kinds.items())],
        "composition": first["theorem"],
        "trust_model": trust,
        "who_sees_what": [*who.values()],
        "public": [*public, *(text for text in conditions if "public" in text)],
        "not_covered": [*NOT_COVERED],
        "audit": attack,
        "audited_bound": bound,
        "conditions": conditions,
        "versions": read_json(folder.path / "versions.json"),
    }


def _of_run(folder: RunFolder) -> tuple[Sequence[Row], Sequence[Row], str, str]:
    """Returns the bounds, the one the run is for first; releases; method; trust."""
    config, best = folder.config, dict[tuple[str, str], Row]()
    wanted = config.adversary, config.relation
    rows = [row.to_json() for row in epsilons.of_run(folder.path)]
    # With amplification a guarantee has several bounds, of which the least counts.
    for row in sorted(rows, key=lambda r: (not r["guarantee"], r["epsilon"] or 0)):
        best.setdefault((row["adversary"], row["relation"]), row)
    rows = [best[names] for names in sorted(best, key=lambda names: names != wanted)]
    events = [asdict(event) for event in folder.read_ledger().events]
    method = "noise on sums of gradients or embeddings that the clients clip"
    return rows, events, method, FEDERATED if config.node_names else CENTRAL


def _of_baseline(folder: RunFolder) -> tuple[Sequence[Row], Sequence[Row], str, str]:
    """Returns the same of a run of `fedgs.baselines`."""
    from fedgs.baselines.run import open_run  # loads torch

    run = open_run(folder.path)
    valid = [row for row in run.guarantees() if row.label == "valid"]
    more = {"adversary": run.config.adversary}
    rows = [asdict(r) | more | {"guarantee": r.epsilon is not None} for r in valid]
    events = [release.event for release in run.releases]
    return rows, events, run.method.title, run.trust


def _said(row: Row, word: str, otherwise: str) -> str:
    """Returns what a condition "word: ..." of a row says."""
    found = (c for c in row.get("conditions", ()) if c.startswith(f"{word}: "))
    return next(found, otherwise).removeprefix(f"{word}: ")


def _audited(path: Path, first: Row) -> tuple[str, dict[str, Any] | None, bool]:
    """Returns attack and largest lower bound of a row, and whether all claims hold."""
    wanted = first["adversary"], first["relation"]
    report = path / "audit" / "report.json"
    content = read_json(report) if report.exists() else {"findings": (), "holds": True}
    # The attacks B and C read images: what A found alone is public.
    found = [row for row in content["findings"] if row["attack"].startswith("A ")]
    found = [row for row in found if (row["adversary"], row["relation"]) == wanted]
    if not found:
        return "not audited", None, content["holds"]
    best = max(found, key=lambda row: row["lower_bound"])
    return best["attack"], {name: best[name] for name in _OF_AUDIT}, content["holds"]


def unit_in_words(config: RunConfig, unit: str) -> str:
    """Returns what one unit of privacy is."""
    shard = " (a shard, not a person)" * (config.partition in ("iid", "dirichlet"))
    if config.partition == "auto":
        shard = " (a shard, not a person, where the data names no owners)"
    units = {"client": f"one client with all its data{shard}", "record": "one record"}
    return units.get(unit, unit)
