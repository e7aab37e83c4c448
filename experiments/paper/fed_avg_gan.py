"""Table 2's row of Fed-Avg GAN, from runs of `fedgs baseline fedavg-gan`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from experiments.paper.scores import KEPT, score
from experiments.paper.stored_runs import last_round
from experiments.paper.table2_report import about
from experiments.store import Line, Store
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.baselines.fedavg_gan import FedAvgGan, FedAvgGanMethod, run_config
from fedgs.baselines.fedavg_messages import encode_request, new_networks, weights_of
from fedgs.baselines.run import BaselineRun, is_finished, open_run
from fedgs.errors import UserError
from fedgs.federation.messages import RECORD, encode_answer
from fedgs.federation.training import nodes_of
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, sanitize
from server.launch.local_grid import SERVER
from server.launch.measuring_grid import message_bytes


def fed_avg_gan_lines(
    paths: Sequence[Path], protocol: EvaluationRequest, store: Store
) -> list[Line]:
    """Returns the lines of the runs; one without numbers where there are none.

    Raises:
        UserError: no finished run of the method.
    """
    lines: list[Line] = []
    for path in paths:
        run = open_run(path)
        if run.method.name != "fedavg-gan" or not is_finished(run):
            raise UserError(
                f"fed_avg_gan = {path}: give a finished run of `fedgs baseline "
                "fedavg-gan`"
            )
        stated = user_epsilons(run)
        line = score(run.folder, last_round(run.folder), protocol, store, stated)
        settings, known = map(dataclasses.asdict, (run.settings, type(run.settings)()))
        scale = [
            f"{name} {value} (default: {known[name]})"
            for name, value in settings.items()
            if value != known[name]
        ]
        line = line | about(run.folder)
        line["is_private"] &= settings["noise_per_clip"] > 0
        sent = {"communication": update_communication(run)}
        lines.append(line | sent | {"scale": ", ".join(scale)})
    return lines or [{"missing": "fedgs baseline"}]


def user_epsilons(run: BaselineRun) -> list[dict[str, Any]]:
    """Returns the epsilons of a user of all that a run of Fed-Avg GAN released."""
    rows: list[dict[str, Any]] = []
    for adversary in FedAvgGanMethod.adversaries:
        events = [{**release.event, "adversary": adversary} for release in run.releases]
        asked = run.settings, run.facts, events, run.config.delta
        for row in run.method.guarantees(*asked):
            if (row.label, row.unit) == ("valid", "user"):
                known = dataclasses.asdict(row) | {"adversary": adversary}
                known |= {"unit": "client", "guarantee": True}
                rows.append({name: known[name] for name in KEPT})
    return rows


def update_bytes(run: BaselineRun) -> tuple[int, int]:
    """Returns the bytes down and up of a round of Fed-Avg GAN, one client on a node.

    Both networks go down, one noisy update of the discriminator comes back. Sizes do
    not depend on what they hold: the update is noise alone, drawn here.

    Args:
        run: of the method fedavg-gan.
    """
    config = dataclasses.replace(run.config, clients_per_node=1, node_sizes=None)
    training = FedAvgGan(run.settings, config, ask=lambda request: [])
    config, request = training.config, training.request(0)
    node = nodes_of(config, request.participants)[0]
    request = request.per_node(config.hosting, [node])[node]
    terms = config.terms(request.round)
    noise = NoiseStream(None, node, round=1)
    parts = [clip(PerSampleGradients(torch.zeros(1, *terms.shape)), terms.clip_bound)]
    release = sanitize(parts, terms.noise_std, noise, 1, node)
    down = encode_request(request, config) | {"run_folder": str(run.folder.path)}
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = SERVER
    contents = (down, encode_answer(release, config, request))
    records = [RecordDict({RECORD: ConfigRecord(dict(c))}) for c in contents]
    sizes = [message_bytes(Message(r, SERVER + 1, "train")) for r in records]
    return sizes[0], sizes[1]


def update_communication(run: BaselineRun) -> dict[str, Any]:
    """Returns what `communication` does, of a run of Fed-Avg GAN.

    Every message of a round weighs the same, so the run's settings tell it all.
    """
    down, up = update_bytes(run)
    config = run_config(run.settings, run.config)
    sizes = {
        name: weights_of(net).numel() for name, net in new_networks(config).items()
    }
    return {
        "bytes_down": down,
        "bytes_up": up,
        "bytes_per_client": down + up,
        "bytes_per_client_max": down + up,
        "messages_per_round": config.clients_per_round,
        "values_per_node": sum(sizes.values()) + sizes["discriminator"],
    }
