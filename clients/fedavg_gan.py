"""The Flower ClientApp of Fed-Avg GAN in a simulation: one message, one release.

    query         the roll call: the node says which one it is
    train         trains copies of the discriminator, returns their sanitized update

A deployed node is refused: its clients have no way yet to permit this release.
"""

import json
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app import Error as FlowerError
from flwr.clientapp import ClientApp

from clients import CLIENT_APP_RAISED
from clients.failures import log_privately, reason_of
from clients.flower_1_41 import hasten_simulation
from fedgs.baselines.fedavg_gan import Settings, node_update, run_config, terms_of
from fedgs.baselines.fedavg_messages import UpdateRequest, decode_request
from fedgs.baselines.run import load_run_data, open_run
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.records import DataWarning
from fedgs.federation.messages import RECORD, Payload, encode_answer
from fedgs.files import read_tensors, write_tensors
from fedgs.runs.run_folder import node_folder

PARTITION = "partition-id"  # only simulated nodes have one

hasten_simulation()
app = ClientApp()


@app.query()
def roll_call(message: Message, context: Context) -> Message:
    """Tells the server the node's stable index.

    Privacy: public.
    """
    return _reply({"node_id": int(context.node_config[PARTITION])}, message)


@app.train()
def answer(message: Message, context: Context) -> Message:
    """Returns the node's sanitized update; a repeated request gets the same bytes.

    Privacy: releases (epsilon, delta)-DP output; event: as
    `fedgs.baselines.fedavg_gan.node_update`.
    """
    title, private = "a node", None
    try:
        node_id = int(context.node_config[PARTITION])
        payload = message.content.config_records[RECORD]
        place = str(payload["run_folder"])
        title = f"node {node_id}"
        private = node_folder(Path(place) / "private", node_id)
        settings, config, data = _run(place)
        request = decode_request(payload, config)
        kept = private / "answer.safetensors"
        reply = _kept(kept, request)
        if reply is None:
            release = node_update(settings, config, data, request, node_id)
            terms = terms_of(settings, config, request)
            reply = encode_answer(release, config, request, terms)
            # Before it leaves: noise drawn again would be a second release.
            _keep(kept, request, reply)
        return _reply(reply, message)
    except Exception as error:
        if private is not None:
            log_privately(private, error, is_deployed=False)
        failure = FlowerError(CLIENT_APP_RAISED, reason_of(title, error))
        return Message(failure, reply_to=message)


@lru_cache(maxsize=1)
def _run(folder: str) -> tuple[Settings, ResolvedConfig, FederatedImages]:
    """Returns settings and data of a run, read on this process's first message.

    Privacy: reads private data; output private.
    """
    run = open_run(folder)
    torch.set_num_threads(run.config.num_threads)
    # Ray prints what a worker prints at the server.
    with warnings.catch_warnings(action="ignore", category=DataWarning):
        data = load_run_data(run)
    return run.settings, run_config(run.settings, run.config), data


def _kept(path: Path, request: UpdateRequest) -> Payload | None:
    """Returns the reply to this very request, if it was made before."""
    if not path.exists():
        return None
    tensors, metadata = read_tensors(path)
    if metadata["digest"] != request.digest():
        return None
    fields: Payload = json.loads(metadata["fields"])
    of_request = bytes.fromhex(metadata["digest"])
    release = tensors["release"].numpy().tobytes()
    return fields | {"request": of_request, "tensors": release}


def _keep(path: Path, request: UpdateRequest, reply: Payload) -> None:
    """Writes a reply before it leaves; it has only what is sanitized."""
    content = reply["tensors"]
    assert isinstance(content, bytes)  # noqa: S101 - of encode_answer
    fields = {n: v for n, v in reply.items() if not isinstance(v, bytes)}
    release = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    metadata = {"digest": request.digest(), "fields": json.dumps(fields)}
    write_tensors(path, {"release": release}, metadata)


def _reply(content: dict[str, Any], message: Message) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord(content)}), reply_to=message)
