"""The Flower ClientApp: decodes a request, asks the node, encodes the answer.

    query         the roll call: the node says which one it is
    query.join    a deployed node takes part in a run (`clients.site`)
    train         trains, and returns a sanitized release

A reply carries sanitized gradients and public identifiers, nothing else: an exception
is reported without its text, which could quote data, and without its type, which could
depend on data. A refusal names the client's limit, which depends on no data. The full
text stays on the client, in the run's private folder or the state directory.
"""

import contextlib
import sys
import time
import traceback
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app import Error as FlowerError
from flwr.clientapp import ClientApp

from clients import CLIENT_APP_RAISED, fast_simulation
from clients.site import DeployedPlace, Site, settings_of
from clients.workers import Place, SimulatedPlace
from fedgs.errors import UserError
from fedgs.event_log import log_event
from fedgs.federation.messages import RECORD, decode_batch, encode_answer
from fedgs.privacy.client_limits import ClientRefused
from fedgs.process import PROTOCOL
from fedgs.runs.run_folder import node_folder

PARTITION = "partition-id"  # only simulated nodes have one

app = ClientApp()
if fast_simulation.is_wanted():
    fast_simulation.install()


@app.query()
def roll_call(message: Message, context: Context) -> Message:
    """Tells the server the node's stable index, or a deployed node's name.

    Privacy: public.
    """
    if PARTITION in context.node_config:
        return _reply({"node_id": int(context.node_config[PARTITION])}, message)
    try:
        name = Site.read(context.node_config).name
        return _reply({"name": name, "protocol": PROTOCOL}, message)
    except Exception:
        return _failed("a node with a wrong --node-config", message)


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Takes part in a run of a deployment; says what the node has seen and released.

    Privacy: public.
    """
    site = None
    try:
        site = Site.read(context.node_config)
        payload = message.content.config_records[RECORD]
        place = DeployedPlace(site, str(payload["run_id"]))
        joined = place.join(*settings_of(payload))
        content: dict[str, object] = {
            "released": joined.released,
            "round": joined.round,
            "newest": joined.newest,
            "refused": "",
        }
        if joined.refusal is not None:
            content["refused"] = joined.refusal.setting
            _log_privately(site.state_dir, joined.refusal, is_own=True)
        outcome = _outcome(joined.refusal)
        log_event("joined", node=site.name, round=joined.round, outcome=outcome)
        return _reply(content, message)
    except Exception as error:
        title = site.name if site else "a node"
        log_event("joined", node=title, outcome=_outcome(error))
        if site:
            _log_privately(site.state_dir, error, is_own=True)
        return _failed(title, message, error)


@app.train()
def answer(message: Message, context: Context) -> Message:
    """Trains the node's discriminators and returns its sanitized release.

    Privacy: releases (epsilon, delta)-DP output; event: as
    `fedgs.federation.round.client_round`.
    """
    place: Place | None = None
    started = time.monotonic()
    try:
        request = message.content.config_records[RECORD]
        place = _place(request, context)
        worker = place.worker()
        batch = decode_batch(request, worker.config)
        node = worker.node(place.node_id)
        release = node.answer(batch)
        node.save(batch.keep_round, place.is_durable)
        reply = _reply(encode_answer(release, worker.config, batch), message)
        _log_answer(place, started, "ok", round=batch.round)
        return reply
    except Exception as error:
        if place is None:
            return _failed("a node", message, error)
        with contextlib.suppress(Exception):
            place.forget()
        _log_privately(_private(place), error, isinstance(place, DeployedPlace))
        _log_answer(place, started, _outcome(error))
        return _failed(place.title, message, error)


def _place(request: ConfigRecord, context: Context) -> Place:
    """Returns where to answer; the client's own configuration decides, no message."""
    if PARTITION in context.node_config:
        node_id = int(context.node_config[PARTITION])
        return SimulatedPlace(str(request["run_folder"]), node_id)
    return DeployedPlace(Site.read(context.node_config), str(request["run_id"]))


def _private(place: Place) -> Path:
    if isinstance(place, SimulatedPlace):
        return node_folder(place.private, place.node_id)
    return place.private


def _failed(title: str, message: Message, error: Exception | None = None) -> Message:
    """Replies that something failed, in words that depend on no data."""
    reason = f"{title} failed; its own error.log says why"
    if isinstance(error, ClientRefused):
        reason = f"{title} refused by its clients' limit: {error.setting}"
    return _timed(
        Message(FlowerError(CLIENT_APP_RAISED, reason), reply_to=message), message
    )


def _reply(content: dict, message: Message) -> Message:  # type: ignore[type-arg]
    record = RecordDict({RECORD: ConfigRecord(content)})
    return _timed(Message(record, reply_to=message), message)


def _timed(reply: Message, message: Message) -> Message:
    """Dates a reply by the server's clock, so that a wrong one here does no harm.

    Flower takes a reply whose lifetime has run out for lost.
    """
    reply.metadata.created_at = message.metadata.created_at
    reply.metadata.ttl = message.metadata.ttl
    return reply


def _outcome(error: Exception | None) -> str:
    if isinstance(error, ClientRefused):
        return f"refused: {error.setting}"
    return "failed" if error else "ok"


def _log_answer(place: Place, started: float, outcome: str, **values: int) -> None:
    """Tells the client's own event log, if it has one."""
    seconds = round(time.monotonic() - started, 3)
    log_event("answer", node=place.title, outcome=outcome, seconds=seconds, **values)


def _log_privately(folder: Path, error: Exception, is_own: bool) -> None:
    """Writes an exception's text; raises nothing, for Flower sends it on.

    Args:
        folder: where to, private.
        error: the exception.
        is_own: this process writes on its client's own stderr; a simulation does not.
    """
    try:
        if folder.parent.is_dir():
            folder.mkdir(exist_ok=True)
            with open(folder / "error.log", "a", errors="backslashreplace") as log:
                log.write("".join(traceback.format_exception(error)))
    except OSError as problem:
        if is_own:  # other texts than these are not for people, and may quote data
            is_shown = isinstance(error, OSError | UserError)
            reason = error if is_shown else type(error).__name__
            place = folder / "error.log"
            print(f"{place}: {problem.strerror}, after: {reason}", file=sys.stderr)
