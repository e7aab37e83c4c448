"""What the phases of a run have released that release once, as a table."""

import math
from collections.abc import Sequence
from typing import Any

from fedgs.app.report.run import RunFacts
from fedgs.app.tables import Table, cell
from fedgs.round.answer import most_signal_to_noise


def phase_tables(runs: Sequence[RunFacts]) -> list[Table]:
    """Returns what each run has released once; no table where there is nothing."""
    head = ["phase", "features", "clip bound C", "noise / C", "signal / noise", "most"]
    note = (
        "Each of these phases releases once: the sum of the clients' embeddings, which "
        "tell how many images of each class they have and how far their features lie "
        "from what the server expects. Signal: power of the sum, without the part that "
        "the known noise explains; most: if all embeddings agreed and had the norm C."
    )
    tables: list[Table] = []
    for facts in runs:
        rows = [
            _phase_row(facts, line)
            for line in facts.metrics
            if facts.config.at_round(line["round"]).releases_once
        ]
        if rows:
            tables.append(Table(f"Phases of {facts.name}", head, rows, note))
    return tables


def _phase_row(facts: RunFacts, metrics: dict[str, Any]) -> list[str]:
    config = facts.config
    round = metrics["round"]
    terms = config.terms(round)
    name = f"{round} ({config.at_round(round).method})"
    return [
        name,
        str(math.prod(terms.shape)),
        cell(terms.clip_bound),
        # The multiplier is relative to 2 C, by which one client's replacement by
        # another can change the sum; the column is relative to C.
        cell(2 * terms.noise_multiplier),
        cell(metrics.get("signal_to_noise")),
        cell(most_signal_to_noise(config, round)),
    ]
