"""What the stages of a run have released, as a table."""

import math
from collections.abc import Sequence
from typing import Any

from fedgs.app.report.run import RunFacts
from fedgs.app.tables import Table


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
