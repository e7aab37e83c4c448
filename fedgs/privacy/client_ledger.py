"""A client's own count of its releases: durable, and ahead of every release.

    FOLDER/clients.json           which clients each ledger counts, by their names
    FOLDER/releases-00000.jsonl   a write-ahead ledger, one line per attempt; its first
                                  line binds the names of its clients
    FOLDER/.lock                  held while the count is read and charged

FOLDER is a node's own in the run's private folder, or the client's `state_dir`, where
the count goes on over runs. There is one ledger per group of clients that releases
together, so a release costs one fsync however many clients a node has. A client that
was packed differently before is in several ledgers, and its count is the sum of them:
what it spent follows its name. In a ledger here, `participants` are positions in the
ledger's list of clients, and the round is that of whichever run asked. A deployed
client writes into the same line who that was (`source_of`).

The name of a shard identifies nobody: a server's settings decide which records are in
which shard. So the shards of a deployed node are counted as one client,
`SHARDED_DATASET`: every release of any of them is charged to the data set, and counts
for each of its named clients as well.

Source: docs/privacy.md, "A client that limits itself".
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.files import inside, make_folder, read_json, remove_temporaries, write_json
from fedgs.privacy.client_limits import ClientRefused, Limits, release_cost
from fedgs.privacy.gaussian import Floats
from fedgs.privacy.ledger import Event, Ledger, agreed_values
from fedgs.privacy.rounding import upper

# The name of every client that is a shard: their data set as a whole.
SHARDED_DATASET = "*"
COUNT_REMEDY = "restore it from a copy: it is the record of the privacy spent"
# Start of the server, round, and the key that it was masked under: "" without masks, or
# where the answer came late. None: the server has nothing.
Received = tuple[str, int, str] | None
LOCK_POLL_SECONDS = 0.01  # other nodes hold the count for one fsync
INDEX = "clients.json"  # of a count
COUNT_FORMAT = 2  # of clients.json
_Places = npt.NDArray[np.int64]


class Spent(NamedTuple):
    """What the clients that a folder counts have released.

    Privacy: public; participation and noise, no data.

    Attributes:
        num_clients: how many have a name here; 0 where all runs cut the data.
        releases: how many, by the run's name at the clients.
        largest: mu^2 of the client that has spent most.
        is_sharded: whether a run cut the data, so that no owner's part is counted.
    """

    num_clients: int
    releases: dict[str, int]
    largest: float
    is_sharded: bool


def read_spent(folder: Path) -> Spent:
    """Returns what all clients of a folder have released; charges nothing.

    Args:
        folder: see the module.

    Raises:
        UserError: the count is broken.
    """
    return ClientLedger(folder, [SHARDED_DATASET]).spent()


class ClientLedger:
    """What some clients have released, and the one place that adds to it.

    Privacy: public; participation and noise, no data.

    Args:
        folder: see the module; made by the first charge if it is missing.
        clients: the stable names of the clients that release together;
            `SHARDED_DATASET` for shards.
    """

    def __init__(self, folder: Path, clients: Sequence[str]) -> None:
        """Touches no file yet.

        Raises:
            UserError: a name stands for two clients.
        """
        self.folder = folder
        self.clients = list(clients)
        if SHARDED_DATASET in clients:
            self.clients = [SHARDED_DATASET]
        self._position = {name: place for place, name in enumerate(self.clients)}
        num_clients = len(self.clients)
        if len(self._position) < num_clients:
            raise UserError("two clients have the same name; give each its own")
        self._by_name = np.zeros(num_clients)  # mu^2 by position
        self._of_all = 0.0  # mu^2 of the data set as a whole
        self._ledgers: dict[str, tuple[Ledger, _Places | None]] = {}
        self._added: Counter[str] = Counter()  # events of each ledger
        self._own: Ledger | None = None
        self._attempts: Counter[int] = Counter()
        self._contexts: set[str] = set()
        self._released: dict[str, dict[int, set[str]]] = {}  # source, round, contexts

    @property
    def is_whole(self) -> bool:
        """Whether the clients are shards, which are charged as one."""
        return self.clients == [SHARDED_DATASET]

    @property
    def mu_squared(self) -> Floats:
        """What each of `clients` has spent as of the last look, shape (clients,).

        A record of the data set is of one named client: the largest of them counts.
        """
        own = self._by_name
        if self.is_whole:
            own = own.max(keepdims=True)
        return own + self._of_all

    def largest(self) -> float:
        """Returns the mu^2 of the client that has spent most, as of now.

        Raises:
            UserError: the count is broken.
        """
        with self._held():
            return float(self.mu_squared.max())

    def spent(self) -> Spent:
        """Returns what the clients have released as of now.

        Raises:
            UserError: the count is broken.
        """
        releases: Counter[str] = Counter()
        with self._held():
            for ledger, _ in self._ledgers.values():
                for event in ledger.events:
                    run, _, _ = _parts_of(event.source)
                    releases[run] += 1
            return Spent(
                num_clients=len(self._position.keys() - {SHARDED_DATASET}),
                releases=dict(releases),
                largest=float(self.mu_squared.max()),
                is_sharded=self._of_all > 0,
            )

    def check(self, event: Event, limits: Limits) -> None:
        """Refuses a release that `charge` would refuse now; counts nothing.

        Raises:
            ClientRefused: a participant would exceed its client_epsilon.
            UserError: the count is broken.
        """
        if limits.client_epsilon is not None:
            with self._held():
                self._check(event, limits)

    def charge(self, event: Event, limits: Limits) -> None:
        """Counts a release; once this returns the count is on the disk.

        Args:
            event: its participants are positions in the clients given, shards too; its
                attempt is set here.
            limits: the limits of these clients.

        Raises:
            ClientRefused: a participant would exceed its client_epsilon; nothing is
                counted, and nothing may be released.
            UserError: the count is broken or cannot be written; or something was
                already masked under the event's context.
        """
        with self._held():
            self._check(event, limits)
            # Under the lock, so that no two processes mask with the same key. The
            # difference of two answers behind the same masks would be bare.
            if event.context in self._contexts:
                raise UserError(
                    f"round {event.round}: this node has masked a release under this "
                    "key before, so it refuses a second one; resume the run, which "
                    "makes new keys"
                )
            ledger = self._own
            if ledger is None:
                ledger = self._new_ledger()
            attempt = self._attempts[event.round] + 1
            own_event = self._own_event(event)
            ledger.append(replace(own_event, attempt=attempt))
            self._add_new()

    def is_masked_under(self, context: str) -> bool:
        """Tells whether something was already masked under this key.

        Raises:
            UserError: the count is broken.
        """
        with self._held():
            return context in self._contexts

    def released(self, run_id: str, node: str) -> Counter[tuple[str, int]]:
        """Returns what a node has released in a run, whichever clients it has.

        A start of the server asks for a round once. So an answer that was computed
        again, because its first bytes were lost before they left, is the same. With
        secure aggregation it may ask in several attempts, each under another key.

        Args:
            run_id: the run's name at the clients.
            node: name of the node.

        Returns:
            How often, by the server's start and the round. Lines of versions that named
            no source are of no run.

        Raises:
            UserError: the count is broken.
        """
        times: Counter[tuple[str, int]] = Counter()
        with self._held():
            for source, rounds in self._released.items():
                run, start, who = _parts_of(source)
                is_asked = run == run_id and who == node
                if not is_asked:
                    continue
                for round, contexts in rounds.items():
                    times[start, round] += len(contexts)
        return times

    def check_received(self, run_id: str, node: str, received: Received) -> None:
        """Refuses a count that lacks a release which the server has: it went back.

        What was released before is in the lines before. A count that is ahead is right:
        what it has left no client, or got lost.

        Args:
            run_id: the run's name at the clients.
            node: name of the node.
            received: the last release that the server has of the node.

        Raises:
            UserError: it is not in the count.
        """
        if received is None:
            return
        start, round, context = received
        source = source_of(run_id, start, node)
        with self._held():
            rounds = self._released.get(source, {})
        contexts = rounds.get(round, set())
        # Where the server names no key, any release of the round is the one it has.
        is_counted = bool(contexts)
        if context:
            is_counted = context in contexts
        if not is_counted:
            raise UserError(
                f"{self.folder}: this client's own count was rolled back or deleted, "
                f"because it lacks the release of round {round} of run {run_id} that "
                f"the server has. Nothing was computed; {COUNT_REMEDY}. Never put an "
                f"older count over it: of a client's backup, restore {run_id}/ only. "
                "If there is no copy, what these clients have spent is unknown, so "
                "they must not take part any more"
            )

    def _own_event(self, event: Event) -> Event:
        """Returns a release as these clients count it: shards are all of the data."""
        if not self.is_whole:
            return event
        return replace(event, participants="all", num_clients=1)

    def _check(self, event: Event, limits: Limits) -> None:
        if limits.client_epsilon is None:
            return
        is_sharded = self.is_whole or self._of_all > 0
        if is_sharded and limits.relation == "zero-out":
            raise ClientRefused(
                "relation",
                "relation = zero-out: the run cuts this client's data into shards, so "
                "no owner's part is counted, and leaving one owner out can move all "
                'that the shard answers; set relation = "replace-one" in the client\'s '
                "limits file",
            )
        positions = self._own_event(event).positions
        everybody = np.arange(len(self.clients))
        asked = everybody[positions]
        # All pay the same for this release, so the one that spent most decides.
        mu_squared = self.mu_squared[asked]
        place = mu_squared.argmax()
        largest = mu_squared[place]
        if largest + _cost(event) <= limits.most_mu_squared:
            return
        spent = limits.epsilon_of(largest)
        worst = asked[place]
        who = f"client {self.clients[worst]}"
        if self.is_whole:
            who = "the data set"
        raise ClientRefused(
            "client_epsilon",
            f"client_epsilon = {limits.client_epsilon:g} ({limits.relation}, delta "
            f"{limits.delta:g}, server adversary): {who} has released "
            f"{upper(spent)} so far, and the next release would exceed the limit; ask "
            "for less, or agree on a larger limit",
        )

    # -------------------------------------------------------------- files

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Holds the folder against other nodes and runs, with the count up to date."""
        make_folder(self.folder)
        with FileLock(self.folder / ".lock", poll_interval=LOCK_POLL_SECONDS):
            # Only what this lock is about: others may be writing other files here.
            remove_temporaries(self.folder, INDEX)
            try:
                self._catch_up()
                yield
            finally:
                # An open ledger is locked, and other nodes of the folder append to it
                # as well.
                for ledger, _ in self._ledgers.values():
                    ledger.close()

    def _read_index(self) -> dict[str, Any]:
        path = self.folder / INDEX
        if not path.exists():
            return {}
        index = read_json(path)
        file_format = index.pop("format", None)
        if file_format != COUNT_FORMAT:
            raise UserError(
                f"{path}: it has another format; use the version of fedgs that wrote it"
            )
        return index

    def _catch_up(self) -> None:
        """Adds what was released since the last look, by whichever process."""
        index = self._read_index()
        for path in self.folder.glob("releases-*.jsonl"):
            if path.name in index:
                continue
            # Its clients are not known, so its spending could be charged to nobody.
            nobodys = Ledger.read(path)
            if nobodys.length > 0:
                problem = "clients.json does not say whose releases these are"
                raise UserError(f"{path}: {problem}; {COUNT_REMEDY}")
        for name, clients in index.items():
            path = inside(self.folder, name, INDEX)
            if not path.exists():
                raise UserError(f"{path}: it is missing; {COUNT_REMEDY}")
            if name not in self._ledgers:
                self._add_ledger(path, clients)
            ledger, _ = self._ledgers[name]
            ledger.reopen()
            # Earlier versions bound nothing, so their ledgers with releases are taken.
            is_of_before = not ledger.bound and ledger.length > 0
            if ledger.bound != _bound(clients) and not is_of_before:
                problem = "it lost its first line, or clients.json names other clients"
                raise UserError(f"{ledger.path}: {problem}; {COUNT_REMEDY}")
        self._add_new()

    def _add_ledger(self, path: Path, clients: list[str]) -> None:
        """Takes a ledger in; of one of other clients only what was masked under."""
        places = None
        if clients != [SHARDED_DATASET]:
            if self.is_whole:
                # A shard may hold anybody's records, so all names are counted here.
                self._give_positions(clients)
            own_places = [self._position.get(client, -1) for client in clients]
            places = np.array(own_places)
        ledger = Ledger(path)
        self._ledgers[path.name] = ledger, places
        if clients == self.clients:
            self._own = ledger

    def _give_positions(self, clients: Sequence[str]) -> None:
        """Makes room for the spending of clients that are not among our own."""
        for client in clients:
            next_place = len(self._position)
            self._position.setdefault(client, next_place)
        missing = len(self._position) - len(self._by_name)
        self._by_name = np.pad(self._by_name, (0, missing))

    def _add_new(self) -> None:
        """Adds the events that are not in the count yet."""
        for name, (ledger, places) in self._ledgers.items():
            num_added = self._added[name]
            for event in ledger.events[num_added:]:
                self._add(event, places)
                if ledger is self._own:
                    self._attempts[event.round] += 1
            self._added[name] = ledger.length

    def _add(self, event: Event, places: _Places | None) -> None:
        """Counts an event of a ledger whose clients have these positions here."""
        cost = _cost(event)
        if places is None:
            self._of_all += cost
        else:
            asked = places[event.positions]
            # Clients of other groups have no position: their own count has them.
            own = asked[asked >= 0]
            self._by_name[own] += cost
        if event.context:
            self._contexts.add(event.context)
        rounds = self._released.setdefault(event.source, {})
        contexts = rounds.setdefault(event.round, set())
        contexts.add(event.context)

    def _new_ledger(self) -> Ledger:
        """Makes these clients' ledger, then names it in the index."""
        index = self._read_index()
        name = f"releases-{len(index):05d}.jsonl"
        path = self.folder / name
        # The file comes first: without releases after a crash here, it is made again.
        remove_temporaries(self.folder, name)
        Ledger.create(path, _bound(self.clients))
        index[name] = self.clients
        index["format"] = COUNT_FORMAT
        write_json(self.folder / INDEX, index)
        ledger = Ledger.open(path)
        places = None
        if not self.is_whole:
            places = np.arange(len(self.clients))
        self._ledgers[name] = ledger, places
        self._own = ledger
        return ledger


def _bound(clients: Sequence[str]) -> dict[str, str]:
    """Returns what the first line of a ledger binds: whose releases it counts."""
    names = json.dumps(list(clients))
    digest = hashlib.sha256(names.encode())
    return {"clients": digest.hexdigest()}


def _cost(event: Event) -> float:
    nodes = event.counted_nodes  # 1, or those that the client's limits trust
    return release_cost(event.proven_multiplier, event.batch_size, nodes)


def source_of(run_id: str, start: str, node: str) -> str:
    """Returns what a line says of who asked: run, start of its server, own name."""
    return f"{run_id}/{start}/{node}"


def _parts_of(source: str) -> tuple[str, str, str]:
    """Returns run, start and name of a `source_of`; empty where a line has none."""
    run, _, rest = source.partition("/")
    start, _, node = rest.partition("/")
    return run, start, node


def release_event(
    config: ResolvedConfig,
    round: int,
    positions: Sequence[int],
    num_clients: int,
    shares: int = 1,
) -> Event:
    """Returns what a node is about to release, as its clients count it.

    Only the node's own noise counts, for a server may drop or know that of all others,
    unless the clients trust a secure aggregation.

    Args:
        config: what the node computes with.
        round: the round that is answered.
        positions: the participants among the node's clients, increasing, not empty.
        num_clients: the node's clients.
        shares: what `Limits.shares` returns.
    """
    participants = tuple(positions)
    if len(positions) == num_clients:
        participants = "all"
    return Event(
        round=round,
        attempt=1,
        participants=participants,
        num_clients=num_clients,
        planned_nodes=shares,
        counted_nodes=shares,
        **agreed_values(config, round),
    )
