"""Who is there: Flower's address of each node of a run.

A simulated node says its index. A deployed node says its name and joins the run: it
gets the run's settings, checks them, and says which round its state has seen and what
it has released in the run: where that is more than the ledger has, this server was
restored from an older backup, and the run ends. With SuperNode authentication the name
is the one that its key was registered under.
"""

import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedgs.config.method_settings import settings_with
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError, first_n
from fedgs.event_log import log_event
from fedgs.mechanism.masks import Announced
from fedgs.mechanism.peers import is_signed
from fedgs.methods.schedule import nodes_of
from fedgs.privacy.ledger import Event
from fedgs.process import PROTOCOL, check_protocol
from fedgs.round.checkpoint import indispensable
from fedgs.round.messages import (
    PAYLOAD_RECORD,
    MaskedRequest,
    SentRequest,
    content_of,
    one_line,
)
from fedgs.round.run import RunStopped, Stop, last_rounds
from fedgs.runs.run_folder import RunFolder
from server.deployment_record import keep, kept_of
from server.progress import RunProgress

ROLL_CALL_POLL_SECONDS = 0.1
ROLL_CALL_SECONDS = 600.0
LOG_SECONDS = 30.0  # between lines that say which nodes are waited for
STEP_SECONDS = 1.0  # between looks for nodes of a deployment
ASK_AGAIN_SECONDS = 10.0  # until a node that failed or was refused is asked again


def roll_call(grid: Grid, expected: int, stop: Stop | None = None) -> dict[int, int]:
    """Returns Flower's address of each simulated node; those are random per run.

    Args:
        grid: of the run.
        expected: the number of nodes.
        stop: when set, the roll call ends.

    Raises:
        UserError: another number of nodes, or nodes that did not answer.
        RunStopped: `stop` was set.
    """
    deadline = time.monotonic() + ROLL_CALL_SECONDS
    while len(node_ids := list(grid.get_node_ids())) < expected:
        _check_stop(stop, f"{expected - len(node_ids)} of {expected} nodes")
        if time.monotonic() > deadline:
            break
        time.sleep(ROLL_CALL_POLL_SECONDS)
    if len(node_ids) != expected:
        raise UserError(
            f"num-supernodes = {len(node_ids)}: this run has {expected} nodes; "
            f"give --federation-config 'num-supernodes={expected}' or another "
            "clients_per_node or node_sizes"
        )
    empty = RecordDict({PAYLOAD_RECORD: ConfigRecord({})})
    ids = set(grid.push_messages([Message(empty, n, "query") for n in node_ids]))
    addresses: dict[int, int] = {}
    while ids and time.monotonic() < deadline:
        _check_stop(stop, f"{expected - len(addresses)} of {expected} nodes")
        for reply in grid.pull_messages(list(ids)):
            ids.discard(reply.metadata.reply_to_message_id)
            if not reply.has_error():
                index = int(
                    str(reply.content.config_records[PAYLOAD_RECORD]["node_id"])
                )
                addresses[index] = reply.metadata.src_node_id
        time.sleep(ROLL_CALL_POLL_SECONDS)
    if sorted(addresses) != list(range(expected)):
        missing = sorted(set(range(expected)) - set(addresses))
        raise UserError(
            f"roll call: {len(addresses)} of {expected} nodes answered; missing: "
            f"{first_n(missing, most=10)}"
        )
    return addresses


def _check_stop(stop: Stop | None, missing: str) -> None:
    if stop is not None and stop.is_set():
        raise RunStopped(f"stopped during the roll call, before a round; no {missing}")


class RollCall:
    """The nodes of a deployment: who they are, who joined, under which address.

    Args:
        grid: of the Flower run.
        folder: of the run.
        config: of the run, as its nodes are to compute with it.
        events: of the run's ledger.
        progress: is told who is there.

    Attributes:
        run_id: under which clients keep their state of the run.
        start: name of this start of the server.
        since: the committed round that this start goes on from.
        addresses: node -> Flower's address, of the nodes that have joined.
        active_since: address -> when it was last activated, by Flower's clock.
        round: the last round that was asked for, or that the run goes on from.
        counted: node -> round -> its events in the ledger, without those of this start;
            a masked attempt asks some of a round's nodes.
        answered: name -> start, round and masking key of the last release that came, in
            time or late, valid or not; "" for a key that is not known.
    """

    def __init__(
        self,
        grid: Grid,
        folder: RunFolder,
        config: ResolvedConfig,
        events: Sequence[Event],
        progress: RunProgress,
    ) -> None:
        """Asks nobody yet."""
        self.grid, self.folder, self.config = grid, folder, config
        self.progress, kept = progress, kept_of(folder)
        self.run_id = str(kept["run_id"])
        self.answered: dict[str, tuple[str, int, str]] = {}
        for name, (start, round, *key) in kept.get("answered", {}).items():
            self.answered[name] = start, round, "".join(key)
        self.start = secrets.token_hex(8)
        self.round = self.since = folder.last_round
        self.seen = last_rounds(self.config, events, self.round)
        self.counted = [Counter[int]() for _ in config.node_names]
        for event in events:
            for node in nodes_of(config, event.participants):
                self.counted[node][event.round] += 1
        self.addresses: dict[int, int] = {}
        self.active_since: Mapping[int, str] = {}
        self._registered: dict[int, str] = {}  # address -> name of its key
        self._public: dict[int, bytes] = {}  # address -> its registered key, in PEM
        # Message -> address, node (None: not known yet), when that was activated.
        self._queries: dict[str, tuple[int, int | None, str]] = {}
        self._retry_at: dict[int, float] = {}  # address -> when to ask it again
        self._next_step = 0.0

    def wait(self, stop: Stop) -> None:
        """Waits until all nodes have joined, or enough of them when resuming.

        Raises:
            RunStopped: `stop` was set, or a node is missing after the time limit.
        """
        started = logged = time.monotonic()
        patience = max(ROLL_CALL_SECONDS, self.config.round_timeout)
        while self.missing:
            waited = time.monotonic() - started
            if stop.is_set():
                raise RunStopped(
                    f"stopped during the roll call; missing: {self._absent}"
                )
            if waited > self.config.round_timeout and self._is_enough():
                log(WARNING, "roll call: going on without %s", self._absent)
                break
            if waited > patience:
                raise RunStopped(
                    f"roll call: {self._absent} did not join within {patience:g} s"
                )
            if time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                log(INFO, "roll call: waiting for %s", self._absent)
            self.step()
            time.sleep(ROLL_CALL_POLL_SECONDS)

    @property
    def missing(self) -> list[str]:
        """The names of the nodes that have not joined."""
        names = self.config.node_names
        return [n for i, n in enumerate(names) if i not in self.addresses]

    @property
    def _absent(self) -> str:
        reasons = self.progress.reasons
        return ", ".join(
            f"{name} ({reasons[name]})" if reasons.get(name) else name
            for name in self.missing
        )

    def _is_enough(self) -> bool:
        """A run that has begun goes on with `min_answers`; its start needs all."""
        least = self.config.min_answers or self.config.num_nodes
        return self.round > 0 and len(self.addresses) >= least

    def step(self) -> None:
        """Looks for new nodes and for answers of those that were asked; never waits."""
        if self._queries:
            for reply in self.grid.pull_messages(list(self._queries)):
                address, node, _ = self._queries.pop(reply.metadata.reply_to_message_id)
                self._handle(reply, address, node)
        now = time.monotonic()
        if now < self._next_step:
            return
        self._next_step = now + STEP_SECONDS
        infos = list(self.grid.get_nodes())
        self.active_since = {i.node_id: i.last_activated_at for i in infos}
        self._registered = {i.node_id: i.name for i in infos}
        self._public = {i.node_id: i.public_key for i in infos if i.name}
        for name, (address, _, since) in list(self._queries.items()):
            if self.active_since.get(address, since) != since:
                del self._queries[name]  # lost with the process that was asked
                self._retry_at.pop(address, None)
        known = set(self.addresses.values()) | {a for a, *_ in self._queries.values()}
        new = [
            address
            for address in self.active_since
            if address not in known and self._retry_at.get(address, 0.0) <= now
        ]
        if new and self.missing_or_gone:
            self._push(dict.fromkeys(new), "query", {})
        online = [i for i, a in self.addresses.items() if a in self.active_since]
        self.progress.set_online(online)

    @property
    def missing_or_gone(self) -> bool:
        """Whether a new node may be one of the run's."""
        gone = set(self.addresses.values()) - self.active_since.keys()
        return bool(self.missing or gone)

    def add_answer(self, node: int, round: int, seconds: float) -> None:
        """Notes a node's valid answer; round 0 is its preparation."""
        name = self.config.node_names[node]
        log_event("answered", node=name, round=round, outcome="ok", seconds=seconds)
        if round:
            self.seen[node] = round
            self.progress.add_answer(node, round)

    def add_release(self, node: int, sent: SentRequest) -> None:
        """Notes that a node has released, whether its answer is valid or not."""
        name = self.config.node_names[node]
        key = ""
        # A node that is not in the list has nothing to release, whatever it answers.
        if isinstance(sent, MaskedRequest) and node in sent.attempt.keys:
            key = sent.attempt.keys[node].public.hex()
        self.answered[name] = self.start, content_of(sent).round, key

    def add_late(self, node: int | None, reply: Message) -> None:
        """Notes a release that nobody waits for any more: it has left its client.

        What the reply claims is told to nobody but this node.
        """
        if node is None or reply.has_error():
            return
        record = reply.content.config_records.get(PAYLOAD_RECORD) or ConfigRecord()
        name, round = self.config.node_names[node], record.get("round")
        start, last, _ = self.answered.get(name, ("", 0, ""))
        if type(round) is int and (start != self.start or round > last):
            self.answered[name] = self.start, round, ""

    def told(self, node: int) -> dict[str, Any]:
        """Returns what a node is told with every request: which answer it must know."""
        answered = self.answered.get(self.config.node_names[node], ())
        place = {"start": self.start, "since": self.since}
        return place | {"answered": "/".join(map(str, answered))}

    def save(self) -> None:
        """Keeps who has answered, before anything follows from it."""
        with indispensable(self.folder, "who has answered"):
            keep(self.folder, answered=self.answered)

    def has_signed(self, node: int, announced: Announced) -> bool:
        """Tells whether a node's registered key, if any, has signed this one."""
        public = self._public.get(self.addresses.get(node, -1))
        key: Any = public and load_pem_public_key(public)
        run, name = self.run_id, self.config.node_names[node]
        return not key or is_signed(key, run, name, announced)

    def _push(self, to: dict[int, int | None], kind: str, payload: Any) -> None:
        record = RecordDict({PAYLOAD_RECORD: ConfigRecord(payload)})
        messages = [Message(record, address, kind) for address in to]
        names = self.grid.push_messages(messages)
        for name, (address, node) in zip(names, to.items()):  # noqa: B905
            if name:  # else Flower does not know this address any more
                since = self.active_since.get(address, "")
                self._queries[name] = address, node, since

    def _handle(self, reply: Message, address: int, node: int | None) -> None:
        """Handles the answer of a node that said its name, or that joined."""
        self._retry_at[address] = time.monotonic() + ASK_AGAIN_SECONDS
        title = self.config.node_names[node] if node is not None else f"node {address}"
        try:
            if reply.has_error():
                raise UserError(one_line(reply.error.reason))
            record = reply.content.config_records.get(PAYLOAD_RECORD) or ConfigRecord()
            if node is None:
                self._invite(address, record.get("name"), record.get("protocol", 1))
            else:
                self._admit(address, node, record)
        except UserError as error:
            log(WARNING, "roll call: %s: refused: %s", title, error)
            log_event("refused", node=title, outcome=str(error))
            if node is not None:
                self.progress.add_failure(node, str(error))

    def _invite(self, address: int, claimed: object, protocol: object) -> None:
        """Sends the run's settings to a node that may bear its name."""
        name = str(claimed)[:64]
        registered = self._registered.get(address, "")
        # The key that signed the messages decides who it is, not what they say.
        if registered and name != registered:
            raise UserError(
                f"claims the name {one_line(name)!r}, is registered as {registered!r}"
            )
        if name not in self.config.node_names:
            raise UserError(f"its name {one_line(name)!r} is not in this run")
        if not registered and name in self._registered.values():
            raise UserError(f"{name!r} is registered with another key")
        node = self.config.node_names.index(name)
        held = self.addresses.get(node)
        # Two processes with one name would release the same round twice.
        if held is not None and held in self.active_since:
            raise UserError(f"another node that is online has joined as {name!r}")
        check_protocol(name, protocol, "this server")
        if not registered:
            log(
                WARNING, "roll call: %s has no registered name: taken at its word", name
            )
        payload = {
            "protocol": PROTOCOL,
            "run_id": self.run_id,
            **self.told(node),
            "settings": json.dumps(public_settings(self.config), sort_keys=True),
        }
        self._push({address: node}, "query.join", payload)

    def _admit(self, address: int, node: int, record: Mapping[str, Any]) -> None:
        """Takes a node in, if its state is that of its last answered round."""
        seen, name = record.get("round"), self.config.node_names[node]
        if type(seen) is not int:
            raise UserError("joined without saying which round it has seen")
        # What it has released counts, also where it is refused.
        self._check_ledger(node, record.get("released"))
        if limit := record.get("refused"):
            raise UserError(f"refused by its clients' limit: {one_line(limit)}")
        # An older state would answer with discriminators that have missed rounds.
        expected = self.seen.get(node, 0)
        if expected > 0 and seen < expected:
            text = f"its state is of round {seen}, it took part until round {expected}"
            if seen < 0:
                text = f"its state is lost; it took part until round {expected}"
            needs_all = self.config.min_answers in (None, self.config.num_nodes)
            if needs_all or seen < 0:
                remedy = f"restore its {self.run_id}/ only, never an older releases/"
                raise UserError(f"{text}; {remedy}")
            log(WARNING, "roll call: %s: %s", name, text)
        self.addresses[node] = address
        self.progress.set_joined(node)
        log(INFO, "roll call: %s has joined", name)
        log_event("joined", node=name, round=seen)

    def _check_ledger(self, node: int, released: object) -> None:
        """Ends the run where a node has released more than the ledger has.

        Args:
            node: who says so.
            released: how often it released round 1, 2, ..., asked by earlier starts of
                the server; anything may come.

        Raises:
            RunStopped: it has, and no epsilon of this folder is stated any more.
            UserError: malformed.
        """
        if (
            not isinstance(released, list)
            or len(released) > self.config.num_rounds
            or not all(type(times) is int for times in released)
        ):
            raise UserError("joined without saying what it has released")
        counted = self.counted[node]
        lost = [r for r, times in enumerate(released, start=1) if times > counted[r]]
        if lost:
            text = (
                f"{self.config.node_names[node]} has released more than this run's "
                f"ledger says (rounds {first_n(lost, 10)}): this server was restored "
                "from an older backup. The run has ended; put the newest copy of the "
                "whole run folder back, or start a new run"
            )
            self.folder.mark_behind(text)
            raise RunStopped(text)


def public_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that a client needs: no path of the server, no selection."""
    kept = config.to_flat()
    if config.public_data is not None:  # its kind, which tells that there is a start
        kept["public_data"] = config.public_data.split(":")[0]
    defaults = RunConfig().to_flat()
    return kept | {name: defaults[name] for name in settings_with("stays")}
