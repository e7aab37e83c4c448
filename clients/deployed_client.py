"""A deployed node: its own settings, its state directory, and joining a run.

    STATE_DIR/                   mode 0700
      .client.lock               held by the one process that answers for this node
      error.log                  texts of failures; they never leave
      releases/                  the clients' own count, over all runs
      cohorts.csv                who is in which cohort, by the last selection, until
                                 another one is joined; counts in runs of cohorts
                                 where the client names no other file
      RUN_ID/run.json            the run's settings as the server sent them
      RUN_ID/start.json          which start of the server was joined last
      RUN_ID/node-*/             discriminators, their moments, the stored answer

The data, the folder, the limits and the device are the client's own, from its
`--node-config`; a server can set none of them. Everything else is the run's, sent once
when the node joins, checked, and never changed afterwards.
"""

import contextlib
import dataclasses
import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from logging import INFO
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from filelock import AcquireReturnProxy
from flwr.common.logger import log

from clients.agreement import agreement
from clients.node_cache import NodeCache, cached_worker, drop_worker, forget
from fedgs.cohorts.cohort_file import write_memberships
from fedgs.config.checks import same_source_problems
from fedgs.config.fields import refuse
from fedgs.config.method_settings import settings_with
from fedgs.config.plugins import COHORT_COUNTS
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data import partition, sources
from fedgs.data.cohort import asks_for_cohorts, for_all_clients, keep_cohort
from fedgs.data.federated import FederatedImages
from fedgs.data.load import split_records
from fedgs.data.records import DataWarning
from fedgs.errors import UserError, malformed, wrap_error
from fedgs.files import make_folder, read_json, remove_temporaries, write_json
from fedgs.gan.torchvision_network import chosen_network
from fedgs.mechanism.peers import Peers
from fedgs.methods import phase_at
from fedgs.methods.base import Request
from fedgs.methods.cohort_counts import cohorts_of
from fedgs.privacy.client_ledger import (
    SHARDED_DATASET,
    ClientLedger,
    Received,
    release_event,
    source_of,
)
from fedgs.privacy.client_limits import ClientRefused, Limits
from fedgs.process import check_protocol, hold_lock, make_private
from fedgs.round.node import Node
from fedgs.round.preparation import check_capacity
from fedgs.runs.run_folder import node_folder, remove_states_after, state_rounds

OWN_SETTINGS = frozenset(settings_with("of_client"))
# What a server may not choose for a client beyond these: see `agreed`.
NEUTRAL: dict[str, Any] = {"corruption": "none", "output": "", "num_workers": 1}
DRAWN_NAME = re.compile(r"[0-9a-f]{16}")  # of a run, or of a start of its server
RELEASE = re.compile(r"([0-9a-f]{16})/([0-9]{1,9})/([0-9a-f]{64}|)")  # see `Received`
# By a server that has nothing of this node yet.
NOTHING_TOLD = {"start": "0" * 16, "since": 0, "answered": ""}
COHORTS = "cohorts.csv"  # in the state directory
MOST_SETTINGS = 200_000  # characters of all settings of a run
MOST_OF_SETTING = 50_000  # of one, such as the names of a thousand clients
CLIENT_LOCK_SECONDS = 10.0  # for the client process before, which may be ending


@dataclass(frozen=True)
class DeploymentConfig:
    """What a node knows of itself: the values of its `--node-config`.

    Attributes:
        name: by which the server knows the node.
        state_dir: absolute.
        settings: the node's own of the run's settings (`OWN_SETTINGS`).
        limits: path of its limits file, None without one.
        peers: its key and those of the nodes that it knows; None without `peers`.
    """

    name: str
    state_dir: Path
    settings: Mapping[str, Any]
    limits: Path | None = None
    peers: Peers | None = None

    @classmethod
    def read(cls, node_config: Mapping[str, Any]) -> "DeploymentConfig":
        """Reads Flower's node configuration; `-` and `_` in a key are the same.

        Raises:
            UserError: a key is missing, unknown or has a wrong value.
        """
        values = {key.replace("-", "_"): value for key, value in node_config.items()}
        for key in ("name", "data", "state_dir"):
            if not isinstance(values.get(key), str) or not values[key]:
                raise UserError(
                    f"{key} is unset: every node needs name, data and state-dir; give "
                    f"--node-config '{key.replace('_', '-')}=\"...\" ...'"
                )
        name = values.pop("name")
        state_dir = Path(values.pop("state_dir")).expanduser().absolute()
        limits = values.pop("limits", None)
        if limits is not None:
            limits = Path(str(limits)).expanduser().absolute()
        peers = _peers(name, values)
        unknown = sorted(values.keys() - OWN_SETTINGS)
        if unknown:
            others = {"name", "state_dir", "limits", "key", "peers", "min_peers"}
            known = ", ".join(sorted(OWN_SETTINGS | others))
            raise UserError(
                f"{unknown[0]}: --node-config has no such key; give {known}"
            )
        # This process may be started from any folder.
        values["data"] = sources.with_absolute_path(values["data"])
        if "cohorts" in values:
            values["cohorts"] = str(Path(values["cohorts"]).expanduser().absolute())
        RunConfig.from_flat(values)  # checks each value
        site = cls(name, state_dir, values, limits, peers)
        site.own_limits()  # refuses a file that cannot be read
        return site

    @property
    def selected(self) -> Path:
        """The file of cohorts that this client writes in a selection."""
        return self.state_dir / COHORTS

    def uses_selected(self, config: RunConfig) -> bool:
        """Tells whether a run's cohorts are those of the last selection.

        Of a run that asks for no cohorts they are not, so that a file which nobody has
        given keeps the client from nothing.
        """
        is_given = "cohorts" in self.settings
        return asks_for_cohorts(config) and not is_given and self.selected.is_file()

    def own_limits(self) -> Limits:
        """Returns what the hosted clients agree to, with a count over all runs.

        Raises:
            UserError: the file cannot be read.
        """
        limits = Limits()
        if self.limits is not None:
            limits = Limits.read(self.limits)
        # Beside the runs' own folders, for it goes on over all of them.
        if limits.state_dir is None:
            limits = dataclasses.replace(limits, state_dir=self.state_dir / "releases")
        return limits

    def check_peers(self, config: RunConfig) -> None:
        """Refuses masks without pinned peers, and peers without masks.

        Raises:
            ClientRefused: names the setting and the remedy.
        """
        if config.secure_aggregation and self.peers is None:
            raise ClientRefused(
                "peers",
                "secure_aggregation = true: the run masks its answers, and this client "
                "has no public keys of the other ones; start it with --peers, a folder "
                "of their NAME.pub, and --key",
            )
        if self.peers is None:
            return
        if not config.secure_aggregation:
            raise ClientRefused(
                "peers",
                "secure_aggregation = false: this client was started with --peers, so "
                "it takes part in masked runs only; start it without --peers, or have "
                "the run set secure_aggregation",
            )
        self.peers.check_names(config.node_names)

    def check_cohorts(self, config: RunConfig) -> None:
        """Refuses a run of cohorts where nothing says which one a client is in.

        Raises:
            ClientRefused: names the setting and the remedy.
        """
        if config.cohorts is None and asks_for_cohorts(config):
            raise ClientRefused(
                "cohorts",
                "cohorts is unset: the run is of cohorts of owners, and this client "
                "does not know who is in which; start it with --cohorts, a CSV file "
                "with the columns owner and cohort",
            )

    def check_features(self, config: ResolvedConfig) -> None:
        """Refuses features of a network that is another one here, or is not here.

        Raises:
            ClientRefused: names the setting and the remedy.
        """
        try:
            chosen_network(config)
        except UserError as error:
            raise ClientRefused("features", str(error)) from error

    def open(self) -> None:
        """Makes the state directory, and holds it as long as this process lives.

        Raises:
            UserError: it cannot be made, others can read it, or another process holds
                it.
        """
        make_private("state-dir", self.state_dir)
        problem = f"state-dir = {self.state_dir}: it cannot be locked"
        with wrap_error(OSError, problem, "give one that this user can write to"):
            _hold(self.state_dir / ".client.lock")


def _peers(name: str, values: dict[str, Any]) -> Peers | None:
    """Takes what a node knows of its peers out of its configuration.

    Raises:
        UserError: something is missing or wrong.
    """
    key = values.pop("key", None)
    folder = values.pop("peers", None)
    least = values.pop("min_peers", None)
    if folder is None:
        if least is not None:
            raise UserError(
                f"min_peers = {least}: it counts the clients in the folder of peers, "
                "which is unset; give peers, a folder of NAME.pub"
            )
        return None  # a key alone is Flower's
    if not isinstance(key, str) or not isinstance(folder, str):
        raise UserError(
            f"peers = {folder}: the peers know this client by its key, which is unset; "
            "give key, the file NAME.key, as well"
        )
    if least is not None and type(least) is not int:
        raise UserError(
            f"min_peers = {least!r}: it is a number of clients; give a whole number"
        )
    key_file = Path(key).expanduser().absolute()
    peers_folder = Path(folder).expanduser().absolute()
    return Peers.read(name, key_file, peers_folder, least)


@lru_cache  # keeps the lock until this process ends
def _hold(path: Path) -> AcquireReturnProxy:
    """Locks a file, and removes what a killed process before this one was writing."""
    refusal = f"{path.parent}: another client process uses it; give each client its own"
    lock = hold_lock(path, f"state-dir = {refusal}", CLIENT_LOCK_SECONDS)
    remove_temporaries(path.parent, COHORTS)
    for pattern in ("*", "*/node-*"):  # the count and the runs; their nodes
        for folder in path.parent.glob(pattern):
            if folder.is_dir():
                remove_temporaries(folder)
    return lock


@dataclass(frozen=True)
class Joined:
    """What a node says when it joins.

    Attributes:
        released: how often it has released each round, from round 1 on, asked by
            earlier starts of the server.
        round: of its newest state that the server has committed, or that this start
            of it has made; -1 without one.
        refusal: why it does not take part after all; None if it does.
    """

    released: list[int]
    round: int = -1
    refusal: ClientRefused | None = None


@dataclass(frozen=True)
class DeployedClient:
    """A deployed node in one run.

    Attributes:
        site: the node's own settings.
        run_id: of the server, 16 hexadecimal digits: it becomes a folder's name.
        told: what the server tells this node with every request; see `told_of`.
    """

    site: DeploymentConfig
    run_id: str
    told: Mapping[str, object] = field(default_factory=lambda: NOTHING_TOLD)
    is_durable: bool = True

    def __post_init__(self) -> None:
        """Checks the name that comes from the server."""
        if not DRAWN_NAME.fullmatch(self.run_id):
            raise malformed("run_id of the server is not of 16 hexadecimal digits")

    @property
    def title(self) -> str:
        """The node's public name."""
        return self.site.name

    @cached_property
    def node_id(self) -> int:
        """The node's index, by the names in the run's settings."""
        return _position(self.site, agreed(self.site, self._settings()))

    @property
    def private(self) -> Path:
        """The state directory."""
        return self.site.state_dir

    @property
    def folder(self) -> Path:
        """This run's folder."""
        return self.site.state_dir / self.run_id

    def worker(self) -> NodeCache:
        """Returns this process's worker, made on the first message.

        The count is looked at for every message: a client that was started again gets
        the request that is waited for, and does not join.

        Privacy: reads private data; output private.

        Raises:
            UserError: also where the server has a release that the count does not have.
        """
        told = told_of(self.told)
        worker = cached_worker(str(self.folder), lambda: self._make(told.start))
        count = worker.node(self.node_id).limits.count
        count.check_received(self.run_id, self.title, told.received)
        self._enter(told)
        return worker

    def keep_cohorts(self, node: Node, request: Request) -> None:
        """Writes who is in which cohort after the last question of a selection.

        Before it there are no cohorts: those of another selection would be taken for
        those of this one by whoever looks after it.

        Privacy: reads private data; the file is private, and nothing is sent.

        Args:
            node: that has answered.
            request: what it has answered; of other runs nothing is written.
        """
        if node.config.method != COHORT_COUNTS:
            return
        if request.round != node.config.num_rounds:
            self._forget_cohorts()
            return
        config = phase_at(node.config, request.round).config
        cohorts = cohorts_of(config, node.data, node.hosted, request)
        write_memberships(self.site.selected, cohorts)

    def _forget_cohorts(self) -> None:
        self.site.selected.unlink(missing_ok=True)

    def _has_answered(self, round: int) -> bool:
        """Tells whether the clients' count has a release of a round of this run."""
        limits = self.site.own_limits()
        count = ClientLedger(limits.state_dir or self.folder, [])
        released = count.released(self.run_id, self.title)
        return any(number == round for _, number in released)

    def forget(self) -> None:
        """Drops the node from memory; its last whole state is on disk."""
        forget(str(self.folder), self.node_id)

    @property
    def _start(self) -> dict[str, Any]:
        """The start of the server that was joined last, and whether it has asked."""
        path = self.folder / "start.json"
        if not path.exists():
            return {}
        return read_json(path)

    def _keep_start(self, start: str, has_asked: bool) -> None:
        write_json(self.folder / "start.json", {"start": start, "has_asked": has_asked})

    def _enter(self, told: "Told") -> None:
        """Deletes states of rounds that the starts before did not commit; once.

        Not at joining: a server asks nothing before its ledger has what was released in
        these rounds. One that was restored from an older backup ends the run instead.
        """
        # A request of a start before, which arrives late, changes nothing.
        if self._start == {"start": told.start, "has_asked": False}:
            remove_states_after(self.folder, told.since)
            self.forget()
            self._keep_start(told.start, has_asked=True)

    def join(self, settings: Mapping[str, Any]) -> Joined:
        """Takes part in a run from now on, or again after the server's restart.

        No state is deleted. From now on the limits file counts as it is now. What is
        agreed is in this client's own log.

        Privacy: reads private data; the result is public: rounds and participation,
            which the server knows.

        Args:
            settings: the run's, flat.

        Returns:
            What the node has released, also where its clients' limits refuse the run.

        Raises:
            UserError: other settings than before, unsuitable data, no room, or a count
                that lacks what the server has.
        """
        self.site.open()
        agreed(self.site, settings)
        self._check_same(settings)
        drop_worker(str(self.folder))  # its limits may be older than the file
        told = told_of(self.told)
        released = self._released(told)
        try:
            worker = self._make_from(settings, told.start)
        except ClientRefused as refusal:
            return Joined(released, refusal=refusal)
        worker.node(_position(self.site, worker.config)).state.check_clients()
        # Only now: a run that was refused leaves nothing behind.
        if not self._settings_file.exists():
            make_folder(self.folder, 0o700)
            write_json(self._settings_file, dict(settings))
        config = worker.config
        is_selection = config.method == COHORT_COUNTS
        # A node that misses the last question has no cohorts, and not those of another
        # selection, be it before this one or between two starts of it.
        if is_selection and not self._has_answered(config.num_rounds):
            self._forget_cohorts()
        cached_worker(str(self.folder), lambda: worker)
        log(INFO, "%s", agreement(self.title, worker.node(self.node_id)))
        if self._start.get("start") != told.start:
            self._keep_start(told.start, has_asked=False)
        rounds = state_rounds(node_folder(self.folder, self.node_id))
        if not self._start["has_asked"]:
            rounds = [round for round in rounds if round <= told.since]
        return Joined(released, max(rounds, default=-1))

    def _check_same(self, settings: Mapping[str, Any]) -> None:
        """Refuses other settings than the run had when this node joined it first."""
        if not self._settings_file.exists():
            return
        known = read_json(self._settings_file)
        # Settings that are left out have their default.
        if ResolvedConfig.from_flat(known) != ResolvedConfig.from_flat(settings):
            raise UserError(
                f"{self._settings_file}: the server now sends other settings for the "
                "same run, so this client refuses; start a new run for other settings"
            )

    def _released(self, told: "Told") -> list[int]:
        """Returns `Joined.released`, from the clients' count, wherever that lies.

        Raises:
            UserError: the server has an answer that the count does not have.
        """
        limits = self.site.own_limits()
        count = ClientLedger(limits.state_dir or self.folder, [])
        count.check_received(self.run_id, self.title, told.received)
        times: Counter[int] = Counter()
        for (start, round), number in count.released(self.run_id, self.title).items():
            # The server's ledger has what this start of it asked.
            if start != told.start:
                times[round] += number
        return [times[round] for round in range(1, max(times, default=0) + 1)]

    def _make(self, start: str) -> NodeCache:
        self.site.open()
        return self._make_from(self._settings(), start)

    def _make_from(self, settings: Mapping[str, Any], start: str) -> NodeCache:
        config = agreed(self.site, settings)
        limits = self.site.own_limits()
        limits.check_run(config)
        self.site.check_peers(config)
        self.site.check_cohorts(config)
        self.site.check_features(config)
        hosted = config.hosting.hosted(_position(self.site, config))
        # Before the data are read: whether they fit would tell of them.
        limits.check_num_clients(len(hosted), config.cohort_value)
        is_selected = self.site.uses_selected(config)
        data = own_images(config, hosted, may_be_old=is_selected)
        names = [data.client_names[client] for client in hosted]
        if config.method == COHORT_COUNTS and len(set(names)) < len(names):
            raise UserError(
                f"data = {config.data}: the run selects people, and these clients are "
                "shards of data without names; give data that name their owners"
            )
        count = ClientLedger(limits.state_dir or self.folder, names)
        first_release = release_event(
            config=config,
            round=1,
            positions=range(len(hosted)),
            num_clients=len(hosted),
            shares=limits.shares(config),
        )
        count.check(first_release, limits)
        # As a run of this node alone: who is not asked yet is asked in a later round.
        own = dataclasses.replace(
            config,
            num_clients=len(hosted),
            clients_per_node=len(hosted),
            node_sizes=None,
        )
        check_capacity(own, self.site.state_dir)

        def make(node_id: int) -> Node:
            return Node(
                config=config,
                node_id=node_id,
                data=data,
                private=self.folder,
                limits=limits,
                source=source_of(self.run_id, start, self.title),
                peers=self.site.peers,
            )

        return NodeCache(config, make)

    @property
    def _settings_file(self) -> Path:
        return self.folder / "run.json"

    def _settings(self) -> dict[str, Any]:
        if not self._settings_file.exists():
            raise UserError(
                f"{self.folder}: this client has not joined the run, or what it keeps "
                "of the run is lost; restore the folder from a copy"
            )
        return read_json(self._settings_file)


def agreed(site: DeploymentConfig, settings: Mapping[str, Any]) -> ResolvedConfig:
    """Returns a run's configuration as a node computes with it.

    Raises:
        UserError: unknown or contradictory settings, or the node is not in the run.
    """
    # The later one counts: what is the client's own is never the server's to set.
    imposed = {**settings, **NEUTRAL, **_own(site)}
    config = ResolvedConfig.from_flat(imposed)
    if site.uses_selected(config):
        config = dataclasses.replace(config, cohorts=str(site.selected))
    config.validate()
    refuse(config, same_source_problems(config))
    _position(site, config)
    return config


def _own(site: DeploymentConfig) -> dict[str, Any]:
    defaults = RunConfig().to_flat()
    return {name: defaults[name] for name in OWN_SETTINGS} | dict(site.settings)


def _position(site: DeploymentConfig, config: RunConfig) -> int:
    names = config.node_names
    if site.name not in names:
        raise UserError(
            f"name = {site.name}: the run asks {', '.join(names)} only; give one of "
            "these names, or have the run name this client"
        )
    return names.index(site.name)


class HostedImages:
    """A node's own images under the run's numbers of its clients.

    It has the part of `FederatedImages` that training reads, and no other clients.
    The names are those by which releases are counted: `SHARDED_DATASET` of every shard.

    Privacy: reads private data; output private.
    """

    def __init__(self, data: FederatedImages, names: list[str], hosted: range) -> None:
        """Takes the data of the clients, their names and their numbers."""
        self.images = data.images
        self.labels = data.labels
        self.client_records = dict(zip(hosted, data.client_records, strict=True))
        self.client_names = dict(zip(hosted, names, strict=True))
        self.client_cohorts = dict(zip(hosted, data.client_cohorts, strict=False))

    of = FederatedImages.of  # reads these four attributes and no others


def own_images(
    config: ResolvedConfig,
    hosted: range,
    *,
    may_be_old: bool = False,
) -> FederatedImages:
    """Loads a node's data: exactly the clients that it hosts, in the data's order.

    Data that names no clients is one client, unless `partition` says how to cut it.

    Privacy: reads private data; output private.

    Args:
        config: the configuration that `agreed` returned.
        hosted: the run's numbers of this node's clients.
        may_be_old: whether the file of cohorts may name owners that are gone.

    Raises:
        UserError: the data is missing, malformed or of another number of clients.
    """
    unset = {"num_clients": "", "node_sizes": "", "clients_per_round": ""}
    own = RunConfig.from_flat(unset, config)
    with warnings.catch_warnings(action="ignore", category=DataWarning):
        records = sources.load_records(own)
    # Other partitioners cut by the run's seed, as iid and dirichlet do.
    are_named = not own.is_dealt
    if own.partition == "auto" and records.clients is None:
        if own.test_owners:
            raise UserError(
                f"test_owners = {own.test_owners:g}: data = {own.data} has no names of "
                "owners, so it is one client; give --test-fraction, or data with names"
            )
        owner = np.zeros(len(records.labels), np.int64)
        records = dataclasses.replace(records, clients=owner)
        are_named = False
    if partition.rule(own, records.clients) != "by-client":
        own = dataclasses.replace(own, num_clients=len(hosted))
        are_named = False
    data = split_records(for_all_clients(own), records)
    data = keep_cohort(own, data, may_be_old=may_be_old)
    if data.num_clients != len(hosted):
        raise UserError(
            f"data = {own.data}: it has {data.num_clients} clients, and the run "
            f"expects {len(hosted)} of this node; give data of that many, or have the "
            "run set num_clients and clients_per_node, or node_sizes"
        )
    names = [SHARDED_DATASET] * len(hosted)
    if are_named:
        names = list(data.client_names)
    # Training reads client_records and client_names by the run's numbers only.
    return cast(FederatedImages, HostedImages(data, names, hosted))


def settings_of(payload: Mapping[str, object]) -> dict[str, Any]:
    """Decodes a request to join: the run's settings.

    Raises:
        UserError: malformed, or of another protocol.
    """
    check_protocol("the server", payload.get("protocol"), "this client")
    text = payload.get("settings")
    settings: Any = None
    # Whatever came, the text of the refusal quotes nothing of it.
    if isinstance(text, str) and len(text) <= MOST_SETTINGS:
        with contextlib.suppress(ValueError, RecursionError):
            settings = json.loads(text)
    if not isinstance(settings, dict):
        raise malformed("the request to join cannot be decoded")
    # Settings are quoted where one is refused: in a line of the client's own journal,
    # in which no server writes lines of its own.
    for name, value in settings.items():
        if not is_quotable(name) or not is_quotable(value):
            raise malformed("the request to join has a setting that is no short line")
    return settings


def is_quotable(value: object) -> bool:
    r"""Tells whether a foreign value is a number, or a short line to be printed.

    >>> is_quotable("iid"), is_quotable(3), is_quotable("a\nb"), is_quotable([1])
    (True, True, False, False)
    """
    if isinstance(value, str):
        return value.isprintable() and len(value) <= MOST_OF_SETTING
    return value is None or isinstance(value, bool | int | float)


class Told(NamedTuple):
    """What a server tells a node with every request.

    Attributes:
        start: name of the server's start.
        since: the round that this start goes on from.
        received: this node's last release that the server has.
    """

    start: str
    since: int
    received: Received


def told_of(payload: Mapping[str, object]) -> Told:
    """Decodes what a server tells a node with every request.

    Raises:
        UserError: malformed.
    """
    start = str(payload.get("start"))
    since = payload.get("since")
    answered = payload.get("answered")
    last = RELEASE.fullmatch(str(answered))
    is_valid = DRAWN_NAME.fullmatch(start) and (last or answered == "")
    if type(since) is not int or since < 0 or not is_valid:
        raise malformed("the request does not say what the server has of this client")
    received = None
    if last:
        received = (last[1], int(last[2]), last[3])
    return Told(start, since, received)
