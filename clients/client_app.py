"""The Flower ClientApp: decodes a request, asks the node, encodes the answer.

    query         the roll call: the node says which one it is
    query.join    a deployed node takes part in a run (`clients.deployed_client`)
    query.key     the node announces a masking key, where no answer has brought one
    train         trains, and returns a sanitized release

A reply carries sanitized gradients and public identifiers, nothing else; what is told
of a failure is in `clients.failures`. The full text stays on the client, in the run's
private folder or the state directory.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from logging import INFO
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app import Error as FlowerError
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from clients import CLIENT_APP_RAISED
from clients.deployed_client import DeployedClient, DeploymentConfig, settings_of
from clients.failures import log_privately, outcome_of, reason_of
from clients.flower_speed import hasten_simulation, silence_ray
from clients.node_cache import SimulatedClient
from fedgs.errors import malformed
from fedgs.event_log import log_event
from fedgs.gan.warm_start import OnStep
from fedgs.process import PROTOCOL
from fedgs.round.messages import (
    NEXT_KEY,
    PAYLOAD_RECORD,
    TOLD,
    content_of,
    decode_key_request,
    encode_answer,
)

WARM_START_SECONDS = 60.0  # between two lines of a warm start
# Flower's node configuration of a simulation, which no other node has.
PARTITION = "partition-id"
NUM_PARTITIONS = "num-partitions"
ENDING = b"""
The client ends after the answer in progress, which is kept and sent after a restart.
To end it now, send SIGTERM (or press Ctrl-C) again; the release stays counted.
"""

# Before Flower starts its threads and Ray its processes.
hasten_simulation()
silence_ray()
app = ClientApp()


@app.query()
def roll_call(message: Message, context: Context) -> Message:
    """Tells the server the node's stable index, or a deployed node's name."""
    if PARTITION in context.node_config:
        return _reply(_simulated(message, context), message)
    try:
        name = DeploymentConfig.read(context.node_config).name
        return _reply({"name": name, "protocol": PROTOCOL}, message)
    except Exception:
        return _failed("a node with a wrong --node-config", message)


def _simulated(message: Message, context: Context) -> dict[str, Any]:
    """Returns what a simulated node says of itself; none of it depends on data."""
    told: dict[str, Any] = {"node_id": int(context.node_config[PARTITION])}
    if NUM_PARTITIONS in context.node_config:
        told["num_partitions"] = int(context.node_config[NUM_PARTITIONS])
    run_folder = message.content.config_records[PAYLOAD_RECORD].get("run_folder")
    # Ray may have started this process on another machine than the server's.
    if run_folder is not None:
        told["has_run_folder"] = int(Path(str(run_folder)).is_dir())
    return told


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Takes part in a run of a deployment; says what the node has seen and released."""
    site = None
    try:
        site = DeploymentConfig.read(context.node_config)
        payload = message.content.config_records[PAYLOAD_RECORD]
        place = DeployedClient(site, str(payload["run_id"]), payload)
        joined = place.join(settings_of(payload))
        refused = ""
        # It has joined all the same: what it has released must reach the server.
        if joined.refusal is not None:
            refused = joined.refusal.setting
            log_privately(site.state_dir, joined.refusal, is_deployed=True)
        outcome = outcome_of(joined.refusal)
        log_event("joined", node=site.name, round=joined.round, outcome=outcome)
        content = {"released": joined.released, "refused": refused}
        return _reply(content | {"round": joined.round}, message)
    except Exception as error:
        title = "a node"
        if site is not None:
            title = site.name
            log_privately(site.state_dir, error, is_deployed=True)
        log_event("joined", node=title, outcome=outcome_of(error))
        return _failed(title, message, error)


@app.query("key")
def announce(message: Message, context: Context) -> Message:
    """Announces the public key of the node's next attempt; it releases nothing."""
    place = None
    try:
        request = message.content.config_records[PAYLOAD_RECORD]
        place = _place(message, context)
        worker = place.worker()
        if not worker.config.is_masked:
            raise malformed(
                "the request is for a masking key, and the run has no masks"
            )
        round = decode_key_request(request, worker.config)
        key = worker.node(place.node_id).announce(round)
        return _reply({NEXT_KEY: key}, message)
    except Exception as error:
        # Not even its name is known: its own configuration cannot be read.
        if place is None:
            return _failed("a node", message, error)
        log_privately(place.private, error, isinstance(place, DeployedClient))
        return _failed(place.title, message, error)


@app.train()
def answer(message: Message, context: Context) -> Message:
    """Trains the node's discriminators and returns its sanitized release.

    Privacy: releases (epsilon, delta)-DP output; event: as
    `fedgs.round.answer.answer_of`.
    """
    place = None
    started = time.monotonic()
    try:
        request = message.content.config_records[PAYLOAD_RECORD]
        place = _place(message, context)
        worker = place.worker()
        node = worker.node(place.node_id)
        if isinstance(place, DeployedClient):
            node.on_step = _telling(place.title)
        sent = node.decode(request)
        asked = content_of(sent)
        is_counted = place.is_durable and asked.round > 0  # no warm start is waited for
        with _finished(is_counted):
            release = node.answer(sent)
            # Before the answer leaves: if it gets lost, these bytes are sent again.
            node.save(asked.keep_round, place.is_durable)
        if isinstance(place, DeployedClient):
            place.keep_cohorts(node, asked)
        reply = _reply(encode_answer(release, worker.config, sent), message)
        _log_answer(place.title, started, "ok", round=asked.round)
        return reply
    except Exception as error:
        if place is None:
            return _failed("a node", message, error)
        with contextlib.suppress(Exception):
            # It may have trained without an answer: the state on disk is whole.
            place.forget()
        log_privately(place.private, error, isinstance(place, DeployedClient))
        _log_answer(place.title, started, outcome_of(error))
        return _failed(place.title, message, error)


@contextlib.contextmanager
def _finished(is_counted: bool) -> Iterator[None]:
    """Puts off the first SIGTERM or Ctrl-C, so that no count is without its answer.

    Args:
        is_counted: whether the answer is counted; signals end any other one at once.
    """
    if not is_counted:
        yield
        return
    heard: list[int] = []

    def put_off(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        restore()  # the second one ends at once
        os.write(2, ENDING)  # no print: the signal may have interrupted one

    def restore() -> None:
        for number, handler in stock.items():
            signal.signal(number, handler)

    numbers = (signal.SIGTERM, signal.SIGINT)
    stock = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, put_off)
    try:
        yield
    finally:
        restore()
        if heard:
            signal.raise_signal(heard[0])


def _place(message: Message, context: Context) -> SimulatedClient | DeployedClient:
    """Returns where to answer; the client's own configuration decides, no message."""
    records = message.content.config_records
    request = records[PAYLOAD_RECORD]
    if PARTITION in context.node_config:
        node_id = int(context.node_config[PARTITION])
        return SimulatedClient(str(request["run_folder"]), node_id)
    told = records.get(TOLD) or {}
    return DeployedClient(
        DeploymentConfig.read(context.node_config), str(request["run_id"]), told
    )


def _telling(title: str) -> OnStep:
    """Returns what logs the steps of a long warm start, now and then."""
    last = time.monotonic()

    def on_step(step: int, steps: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > WARM_START_SECONDS:
            last = now
            log(INFO, "%s: warm start: step %d of %d", title, step, steps)

    return on_step


def _log_answer(title: str, started: float, outcome: str, **values: int) -> None:
    """Tells the client's own event log, if it has one."""
    seconds = round(time.monotonic() - started, 3)
    log_event("answer", node=title, outcome=outcome, seconds=seconds, **values)


def _failed(title: str, message: Message, error: Exception | None = None) -> Message:
    """Replies that something failed, in words that depend on no data."""
    failure = FlowerError(CLIENT_APP_RAISED, reason_of(title, error))
    return _dated(Message(failure, reply_to=message), message)


def _reply(content: dict[str, Any], message: Message) -> Message:
    record = RecordDict({PAYLOAD_RECORD: ConfigRecord(content)})
    return _dated(Message(record, reply_to=message), message)


def _dated(reply: Message, message: Message) -> Message:
    """Dates a reply by the server's clock, so that a wrong one here does no harm.

    Flower takes a reply whose lifetime has run out for lost.
    """
    reply.metadata.created_at = message.metadata.created_at
    reply.metadata.ttl = message.metadata.ttl
    return reply
