"""The report's tables: privacy, communication, settings, versions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.report import words
from experiments.report.communication import Communication, communication
from experiments.report.run import RunFacts, shown_settings
from experiments.tables import Table
from fedgs.config.run_config import RunConfig
from fedgs.privacy.accounting import Statement
from fedgs.privacy_label import unit_in_words

# ------------------------------------------------------------------ privacy


@dataclass(frozen=True)
class PrivacyTable:
    """The statements of a run, or of several together.

    Attributes:
        caption: of which runs.
        theorems: for each theorem its statements by adversary and relation.
        unit: what one unit of privacy is, in words.
        conditions: condition to the rows that it belongs to.
        headline: the statement that the page begins with, to be marked.
    """

    caption: str
    theorems: Sequence[Mapping[tuple[str, str], Statement]]
    unit: str
    conditions: Mapping[str, str]
    headline: Statement | None


def privacy_table(
    caption: str,
    statements: Sequence[Statement],
    config: RunConfig,
    headline: Statement | None = None,
) -> PrivacyTable:
    """Returns statements by their theorems, and every condition with its rows.

    Args:
        caption: of which runs.
        statements: at least one.
        config: of the first of these runs.
        headline: the statement that the page begins with, to be marked.
    """
    theorems: dict[tuple[str, str], dict[tuple[str, str], Statement]] = {}
    conditions: dict[str, list[str]] = {}
    for row in statements:
        cells = theorems.setdefault((row.theorem, row.client_selection), {})
        cells[row.adversary, row.relation] = row
        for condition in row.conditions:
            where = conditions.setdefault(condition, [])
            where.append(f"{row.adversary}, {row.relation}")
    everyone = {f"{row.adversary}, {row.relation}" for row in statements}
    return PrivacyTable(
        caption,
        list(theorems.values()),
        unit_in_words(config, statements[0].unit),
        {
            condition: "all"
            if {*where} == everyone
            else "; ".join(dict.fromkeys(where))
            for condition, where in conditions.items()
        },
        headline,
    )


# ------------------------------------------------------------------ communication


def communication_table(runs: Sequence[RunFacts]) -> Table:
    """Returns the bytes of one round and of the run."""
    columns: dict[Communication, list[str]] = {}
    for facts in runs:
        columns.setdefault(communication(facts), []).append(facts.name)
    rows = {
        "request to a node": [words.num_bytes(run.request) for run in columns],
        "reply of a node": [words.num_bytes(run.reply) for run in columns],
        "requests + replies in a round": [
            f"{run.requests} + {run.replies}" for run in columns
        ],
        "one round, all nodes": [words.num_bytes(run.per_round) for run in columns],
        **(
            {"all stages, all nodes": [words.num_bytes(c.stages) for c in columns]}
            if any(run.stages for run in columns)
            else {}
        ),
        "whole run": [
            words.num_bytes(run.total)
            if run.is_remote
            else f"0: one process (else {words.num_bytes(run.total)})"
            for run in columns
        ],
        "how it was found": [run.how for run in columns],
    }
    note = (
        "A request holds the fakes, or the feature networks of a stage; a reply the "
        "node's release. Measured: Flower's "
        "serialised messages; a compact release counts as one of noise, for its own "
        "size would tell of this one release. Computed: the tensors in the run's own "
        "encoding, without the frames of Flower and gRPC. Estimated: the same for a "
        "transport that compresses. The whole run counts repeated rounds, not the warm "
        "start."
    )
    head = ["", *(", ".join(names) for names in columns.values())]
    return Table("Bytes", head, [[name, *cells] for name, cells in rows.items()], note)


# ------------------------------------------------------------------ stages


def stages_tables(runs: Sequence[RunFacts]) -> list[Table]:
    """Returns what the stages of each run have released; none without stages."""
    head = ["stage", "features", "clip bound C", "noise / C", "signal", "noise"]
    note = (
        "One release of a stage is the sum of the clients' embeddings, which tell how "
        "many images of each class they have and how far their features lie from what "
        "the server expects. Signal: norm of the average over all clients, without the "
        "part that the known noise explains; embeddings that all agree have C. Noise: "
        "the norm that it adds to that average."
    )
    return [
        Table(f"Stages of {facts.name}", head, rows, note)
        for facts in runs
        if (rows := [_stage_row(facts, row) for row in _of_stages(facts)])
    ]


def _of_stages(facts: RunFacts) -> list[dict[str, Any]]:
    stages = facts.config.num_stages
    return [row for row in facts.metrics if row["round"] <= stages]


def _stage_row(facts: RunFacts, metrics: dict[str, Any]) -> list[str]:
    """Returns the cells of one stage; E ||R||^2 = ||S||^2 + n d s^2 for n answers."""
    config, round = facts.config, metrics["round"]
    terms, stage = config.terms(round), config.stage_list[round - 1]
    size = math.prod(terms.shape)
    noise = metrics["num_answers"] * size * terms.noise_std**2
    signal = math.sqrt(max(metrics["release_norm"] ** 2 - noise, 0.0))
    clients = config.clients_per_round
    numbers = (terms.clip_bound, 2 * terms.noise_multiplier, signal / clients)
    numbers = (*numbers, math.sqrt(noise) / clients)
    return [f"{round} ({stage.kind})", str(size), *(f"{n:.4g}" for n in numbers)]


# ------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Settings:
    """All settings of runs.

    Attributes:
        differing: those that are not equal in all runs; None for a single run.
        groups: group to the settings that are equal in all of them.
    """

    differing: Table | None
    groups: Sequence[Table] = field(default_factory=list)


def settings_tables(runs: Sequence[RunFacts]) -> Settings:
    """Returns what differs between runs, and what they share."""
    shown = [shown_settings(facts.config) for facts in runs]
    differing, groups = [], []
    for group in shown[0]:
        shared = []
        for name in shown[0][group]:
            values = [run[group][name] for run in shown]
            if len(set(values)) == 1:
                shared.append([name, values[0]])
            else:
                differing.append([name, *values])
        if shared:
            groups.append(Table(group, ["setting", "value"], shared, numeric=False))
    head = ["setting", *(facts.name for facts in runs)]
    table = Table("What differs", head, differing, numeric=False)
    return Settings(table if len(runs) > 1 else None, groups)


def versions_table(runs: Sequence[RunFacts]) -> Table:
    """Returns the versions of every run's software, and its machine."""
    names: dict[str, None] = {}
    for facts in runs:
        names |= dict.fromkeys(facts.versions)
    rows = [[n, *(str(f.versions.get(n, "–")) for f in runs)] for n in names]
    head = ["package", *(facts.name for facts in runs)]
    return Table("Versions", head, rows, numeric=False)
