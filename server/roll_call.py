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
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedgs.config.method_settings import settings_with
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.errors import UserError, first_n, malformed
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
PATIENT_SECONDS = 5.0  # before a simulation says that it waits for its nodes
LOG_SECONDS = 30.0  # between lines that say which nodes are waited for
STEP_SECONDS = 1.0  # between looks for nodes of a deployment
ASK_AGAIN_SECONDS = 10.0  # until a node that failed or was refused is asked again


def roll_call(
    grid: Grid,
    expected: int,
    run_folder: Path,
    stop: Stop | None = None,
) -> dict[int, int]:
    """Returns Flower's address of each simulated node; those are random per run.

    Args:
        grid: the grid of the run.
        expected: the number of nodes.
        run_folder: absolute path, under which every node must see the server's folder.
        stop: when set, the roll call ends.

    Raises:
        UserError: another number of nodes, nodes that did not answer, or one on a
            machine without the run folder.
        RunStopped: `stop` was set.
    """
    started = time.monotonic()
    deadline = started + ROLL_CALL_SECONDS
    is_told = False
    node_ids = list(grid.get_node_ids())
    while len(node_ids) < expected and time.monotonic() <= deadline:
        _check_stop(stop, f"{expected - len(node_ids)} of {expected} nodes")
        # Said long before the end: Flower adds no nodes to a federation that is small.
        if not is_told and time.monotonic() > started + PATIENT_SECONDS:
            is_told = True
            log(WARNING, "roll call: waiting. %s", _wrong_number(node_ids, expected))
        time.sleep(ROLL_CALL_POLL_SECONDS)
        node_ids = list(grid.get_node_ids())
    if len(node_ids) != expected:
        raise UserError(_wrong_number(node_ids, expected))
    # Flower's addresses are random: each node says which one of the run it is.
    asked = RecordDict({PAYLOAD_RECORD: ConfigRecord({"run_folder": str(run_folder)})})
    questions = [Message(asked, node_id, "query") for node_id in node_ids]
    open_questions = set(grid.push_messages(questions))
    addresses: dict[int, int] = {}
    while open_questions and time.monotonic() < deadline:
        _check_stop(stop, f"{expected - len(addresses)} of {expected} nodes")
        for reply in grid.pull_messages(list(open_questions)):
            open_questions.discard(reply.metadata.reply_to_message_id)
            if not reply.has_error():
                record = reply.content.config_records[PAYLOAD_RECORD]
                node = int(str(record["node_id"]))
                _check_simulated(node, record, expected, run_folder)
                addresses[node] = reply.metadata.src_node_id
        time.sleep(ROLL_CALL_POLL_SECONDS)
    if sorted(addresses) != list(range(expected)):
        missing = sorted(set(range(expected)) - set(addresses))
        raise UserError(
            f"roll call: only {len(addresses)} of {expected} nodes answered in time; "
            f"look at the log of node {first_n(missing, most=10)}, and start again"
        )
    return addresses


def _wrong_number(node_ids: Sequence[int], expected: int) -> str:
    return (
        f"num-supernodes = {len(node_ids)}: this run has {expected} nodes; give "
        f"--federation-config 'num-supernodes={expected}', or another clients_per_node "
        "or node_sizes"
    )


def _check_simulated(
    node: int,
    record: ConfigRecord,
    expected: int,
    run_folder: Path,
) -> None:
    """Refuses a node that cannot take part; raises `UserError` with the remedy."""
    num_partitions = record.get("num_partitions", expected)
    if num_partitions != expected:
        raise UserError(
            f"num-partitions = {num_partitions} of node {node}: this run has "
            f"{expected} nodes; give num-partitions={expected} in every --node-config"
        )
    if not record["has_run_folder"]:
        raise UserError(
            f"run folder {run_folder}: node {node} runs on a machine that does not "
            "have it; a simulation over several machines of Ray shares the run folder "
            "and the data, so mount them on all machines under the same paths, or "
            "run a deployment"
        )


def _check_stop(stop: Stop | None, missing: str) -> None:
    if stop is not None and stop.is_set():
        raise RunStopped(
            "The run was told to stop during the roll call, before its first round, "
            f"when {missing} were missing"
        )


class _Query(NamedTuple):
    """A question to a node that has not joined yet.

    Attributes:
        address: Flower's, of the node.
        node: which one of the run it says it is; None if it has not said so yet.
        active_since: when this address had been activated, as the question was sent.
    """

    address: int
    node: int | None
    active_since: str


class _LastRelease(NamedTuple):
    """What the server has of a node, which the node's own count must have as well.

    Attributes:
        start: name of the server's start that asked for it.
        round: that it answers.
        key: masking key; empty without masks, or where it is not known.
    """

    start: str
    round: int
    key: str = ""


class RollCall:
    """The nodes of a deployment: who they are, who joined, under which address.

    Args:
        grid: the grid of the Flower run.
        folder: the run's folder.
        config: the configuration of the run, as its nodes are to compute with it.
        events: the events of the run's ledger.
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
        answered: name -> the last release that came, in time or late, valid or not.
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
        self.grid = grid
        self.folder = folder
        self.config = config
        self.progress = progress
        kept = kept_of(folder)
        self.run_id = str(kept["run_id"])
        self.answered: dict[str, _LastRelease] = {}
        for name, release in kept.get("answered", {}).items():
            self.answered[name] = _LastRelease(*release)
            progress.set_answered(name, self.answered[name].round)
        self.start = secrets.token_hex(8)
        self.round = folder.last_round
        self.since = folder.last_round
        self.seen = last_rounds(self.config, events, self.round)
        self.counted = [Counter[int]() for _ in config.node_names]
        for event in events:
            for node in nodes_of(config, event.participants):
                self.counted[node][event.round] += 1
        self.addresses: dict[int, int] = {}
        self.active_since: Mapping[int, str] = {}
        self._registered: dict[int, str] = {}  # address -> name of its key
        self._public: dict[int, bytes] = {}  # address -> its registered key, in PEM
        self._queries: dict[str, _Query] = {}  # by message
        self._retry_at: dict[int, float] = {}  # address -> when to ask it again
        self._refusals: dict[str, str] = {}  # the last of each node
        self._next_step = 0.0

    def wait(self, stop: Stop) -> None:
        """Waits until all nodes have joined, or enough of them when resuming.

        Raises:
            RunStopped: `stop` was set, or a node is missing after the time limit.
        """
        started = time.monotonic()
        logged = started
        # With enough nodes it waits as for a round; without, longer than that.
        patience = max(ROLL_CALL_SECONDS, self.config.round_timeout)
        while self.missing:
            waited = time.monotonic() - started
            if stop.is_set():
                raise RunStopped(
                    "The run was told to stop during the roll call, when these clients "
                    f"were missing: {self._absent}"
                )
            if waited > self.config.round_timeout and self._is_enough():
                log(WARNING, "roll call: the run goes on without %s", self._absent)
                break
            if waited > patience:
                raise RunStopped(
                    f"The run stopped, because {self._absent} did not join within "
                    f"{patience:g} s. Start every client, then resume the run"
                )
            if time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                log(INFO, "roll call: the run waits for %s", self._absent)
            self.step()
            time.sleep(ROLL_CALL_POLL_SECONDS)

    @property
    def missing(self) -> list[str]:
        """The names of the nodes that have not joined."""
        names: list[str] = []
        for node, name in enumerate(self.config.node_names):
            if node not in self.addresses:
                names.append(name)
        return names

    @property
    def _absent(self) -> str:
        reasons = self.progress.reasons
        titles: list[str] = []
        for name in self.missing:
            reason = reasons.get(name)
            title = name
            if reason:
                title = f"{name} ({reason})"
            titles.append(title)
        return ", ".join(titles)

    def _is_enough(self) -> bool:
        """A run that has begun goes on with `min_answers`; its start needs all."""
        has_begun = self.round > 0
        least = self.config.min_answers or self.config.num_nodes
        return has_begun and len(self.addresses) >= least

    def step(self) -> None:
        """Looks for new nodes and for answers of those that were asked; never waits."""
        if self._queries:
            for reply in self.grid.pull_messages(list(self._queries)):
                query = self._queries.pop(reply.metadata.reply_to_message_id)
                self._handle(reply, query.address, query.node)
        now = time.monotonic()
        if now < self._next_step:
            return
        self._next_step = now + STEP_SECONDS
        self._look()
        known = set(self.addresses.values())
        known |= {query.address for query in self._queries.values()}
        new: list[int] = []
        for address in self.active_since:
            is_due = self._retry_at.get(address, 0.0) <= now
            if address not in known and is_due:
                new.append(address)
        # Once all are there, a stranger is asked nothing.
        if new and self.missing_or_gone:
            self._push(dict.fromkeys(new), "query", {})
        joined = self.addresses.items()
        online = [node for node, address in joined if address in self.active_since]
        self.progress.set_online(online)

    def _look(self) -> None:
        """Asks Flower who is connected; forgets questions that were lost."""
        infos = list(self.grid.get_nodes())
        self.active_since = {info.node_id: info.last_activated_at for info in infos}
        self._registered = {info.node_id: info.name for info in infos}
        # Without a name the key was not registered, and anybody may have made it.
        named = [info for info in infos if info.name]
        self._public = {info.node_id: info.public_key for info in named}
        for message, query in list(self._queries.items()):
            since = self.active_since.get(query.address, query.active_since)
            # Activated anew: the process that was asked is gone, and so is its answer.
            if since != query.active_since:
                del self._queries[message]
                self._retry_at.pop(query.address, None)

    @property
    def missing_or_gone(self) -> bool:
        """Whether a new node may be one of the run's."""
        joined = set(self.addresses.values())
        gone = joined - self.active_since.keys()
        return bool(self.missing or gone)

    def add_answer(self, node: int, round: int, seconds: float) -> None:
        """Notes a node's valid answer; round 0 is its preparation."""
        name = self._name(node)
        log_event("answered", node=name, round=round, outcome="ok", seconds=seconds)
        if round:
            self.seen[node] = round
            self.progress.add_answer(node, round)

    def add_release(self, node: int, sent: SentRequest) -> None:
        """Notes that a node has released, whether its answer is valid or not."""
        name = self._name(node)
        key = ""
        # A node that is not in the list has nothing to release, whatever it answers.
        if isinstance(sent, MaskedRequest) and node in sent.attempt.keys:
            key = sent.attempt.keys[node].public.hex()
        self.answered[name] = _LastRelease(
            start=self.start,
            round=content_of(sent).round,
            key=key,
        )

    def add_late(self, node: int | None, reply: Message) -> None:
        """Notes a release that nobody waits for any more: it has left its client.

        What the reply claims is told to nobody but this node.
        """
        if node is None or reply.has_error():
            return
        # Not decoded: the round may be over, but the node's count has this release.
        record = _record_of(reply)
        round = record.get("round")
        if type(round) is not int:
            return
        name = self._name(node)
        last = self.answered.get(name)
        is_newer = True
        # Rounds of another start are no measure: it may have gone back to a checkpoint.
        if last is not None and last.start == self.start:
            is_newer = round > last.round
        if is_newer:
            self.answered[name] = _LastRelease(self.start, round)

    def told(self, node: int) -> dict[str, Any]:
        """Returns what a node is told with every request: which answer it must know."""
        answered = self.answered.get(self._name(node), ())
        return {
            "start": self.start,
            "since": self.since,
            "answered": "/".join(map(str, answered)),
        }

    def save(self) -> None:
        """Keeps who has answered, before anything follows from it."""
        with indispensable(self.folder, "who has answered"):
            keep(self.folder, answered=self.answered)

    def has_signed(self, node: int, announced: Announced) -> bool:
        """Tells whether a node's registered key, if any, has signed this one."""
        address = self.addresses.get(node, -1)  # no node has this one
        public = self._public.get(address)
        if not public:  # a server without authentication cannot tell
            return True
        key: Any = load_pem_public_key(public)
        return is_signed(key, self.run_id, self._name(node), announced)

    def _name(self, node: int) -> str:
        return self.config.node_names[node]

    def _push(self, to: dict[int, int | None], kind: str, payload: Any) -> None:
        record = RecordDict({PAYLOAD_RECORD: ConfigRecord(payload)})
        messages = [Message(record, address, kind) for address in to]
        sent = self.grid.push_messages(messages)
        for message, (address, node) in zip(sent, to.items()):  # noqa: B905
            if message:  # else Flower does not know this address any more
                since = self.active_since.get(address, "")
                self._queries[message] = _Query(address, node, since)

    def _handle(self, reply: Message, address: int, node: int | None) -> None:
        """Handles the answer of a node that said its name, or that joined."""
        self._retry_at[address] = time.monotonic() + ASK_AGAIN_SECONDS
        title = f"node {address}"
        if node is not None:
            title = self._name(node)
        try:
            if reply.has_error():
                raise UserError(one_line(reply.error.reason))
            record = _record_of(reply)
            if node is None:
                self._invite(address, record.get("name"), record.get("protocol", 1))
            else:
                self._admit(address, node, record)
        except UserError as error:
            # It is asked again and again, and told of once.
            if self._refusals.get(title) != str(error):
                self._refusals[title] = str(error)
                log(WARNING, "roll call: %s is refused: %s", title, error)
                log_event("refused", node=title, outcome=str(error))
            if node is not None:
                self.progress.add_failure(node, str(error))

    def _invite(self, address: int, claimed: object, protocol: object) -> None:
        """Sends the run's settings to a node that may bear its name."""
        name = str(claimed)[:64]  # it comes from outside and may be of any size
        registered = self._registered.get(address, "")
        # The key that signed the messages decides who it is, not what they say.
        if registered and name != registered:
            raise UserError(
                f"it says that its name is {one_line(name)!r}, and its key is "
                f"registered for {registered!r}; start it under that name"
            )
        if name not in self.config.node_names:
            raise UserError(
                f"its name {one_line(name)!r} is not in this run; name it by --client, "
                "or stop it"
            )
        if not registered and name in self._registered.values():
            raise UserError(
                f"its name {name!r} is registered with another key; start it with that "
                "key, or register its own"
            )
        node = self.config.node_names.index(name)
        held = self.addresses.get(node)
        # Two processes with one name would release the same round twice.
        if held is not None and held in self.active_since:
            raise UserError(
                f"another client is online as {name!r}; stop one of the two"
            )
        check_protocol(name, protocol, "this server")
        if not registered:
            log(
                WARNING,
                "roll call: %s has no registered key, so nothing proves its name",
                name,
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
        name = self._name(node)
        seen = record.get("round")
        if type(seen) is not int:
            raise malformed("it does not say which round it has seen")
        # What it has released counts, also where it is refused.
        self.check_ledger(node, record.get("released"))
        limit = record.get("refused")
        if limit:
            reason = (
                f"its own limit {one_line(limit)} forbids this run; submit another "
                "one, or ask for another limit"
            )
            if self._is_enough():
                raise UserError(reason)
            # Asking again mends nothing, and the run cannot go on without this node.
            self.progress.add_failure(node, reason)
            raise RunStopped(f"The run stopped, because {name} refused: {reason}")
        self._check_state(node, seen)
        self.addresses[node] = address
        self.progress.set_joined(node)
        log(INFO, "roll call: %s has joined", name)
        log_event("joined", node=name, round=seen)

    def _check_state(self, node: int, seen: int) -> None:
        """Refuses a state that lacks rounds which the node took part in.

        It would answer with discriminators that have missed rounds. Where a round
        counts without this node, an older state is only reported.

        Raises:
            UserError: says what is missing, and the remedy.
        """
        expected = self.seen.get(node, 0)
        if expected == 0 or seen >= expected:
            return
        text = f"it keeps round {seen}, although it took part until round {expected}"
        if seen < 0:
            text = f"what it kept is lost; it took part until round {expected}"
        needs_all = self.config.min_answers in (None, self.config.num_nodes)
        if needs_all or seen < 0:
            remedy = f"restore its folder {self.run_id}/, never an older releases/"
            raise UserError(f"{text}; {remedy}")
        log(WARNING, "roll call: %s: %s", self._name(node), text)

    def check_ledger(self, node: int, released: object) -> None:
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
            raise malformed("it does not say what it has released")
        counted = self.counted[node]
        lost = [
            round
            for round, times in enumerate(released, start=1)
            if times > counted[round]
        ]
        if lost:
            text = (
                f"{self._name(node)} has released more than this run's "
                f"ledger says (rounds {first_n(lost, 10)}): this server was restored "
                "from an older backup. The run has ended; put the newest copy of the "
                "whole run folder back, or start a new run"
            )
            self.folder.mark_behind(text)
            raise RunStopped(text)


def _record_of(reply: Message) -> ConfigRecord:
    """Returns what a reply carries; an empty record where it carries none."""
    return reply.content.config_records.get(PAYLOAD_RECORD) or ConfigRecord()


def public_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that a client needs: no path of the server, no selection."""
    kept = config.to_flat()
    if config.public_data is not None:  # its kind, which tells that there is a start
        kept["public_data"] = config.public_data.split(":")[0]
    defaults = RunConfig().to_flat()
    return kept | {name: defaults[name] for name in settings_with("stays")}
