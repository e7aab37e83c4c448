"""What the stages of a run have released, as a table."""

import math
from collections.abc import Sequence
from typing import Any

from fedgs.app.report.run import RunFacts
from fedgs.app.tables import Table, cell
from fedgs.round.answer import most_signal_to_noise


def stages_tables(runs: Sequence[RunFacts]) -> list[Table]:
    """Returns what the stages of each run have released; none without stages."""
    head = ["stage", "features", "clip bound C", "noise / C", "signal / noise", "most"]
    note = (
        "One release of a stage is the sum of the clients' embeddings, which tell how "
        "many images of each class they have and how far their features lie from what "
        "the server expects. Signal: power of the sum, without the part that the known "
        "noise explains; most: if all embeddings agreed and had the norm C."
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
    config, round = facts.config, metrics["round"]
    terms, stage = config.terms(round), config.stage_list[round - 1]
    found, most = metrics.get("signal_to_noise"), most_signal_to_noise(config, round)
    numbers = (terms.clip_bound, 2 * terms.noise_multiplier, found, most)
    return [f"{round} ({stage.kind})", str(math.prod(terms.shape)), *map(cell, numbers)]
