"""The write-ahead ledger: what was released, on disk before it is released.

One JSON line per release, in the order append and fsync, send, step, checkpoint:

    {canonical JSON of the event, "hash": sha256(hash of the line before + that JSON)}

Canonical JSON has sorted keys, no spaces and only ASCII; the first line chains from
`GENESIS`. Nothing is rewritten: a repeated round is a new line and counts again. A
last line without its line feed was torn by a crash before anything was sent, and is
dropped; anything else that is broken is an error. The chain cannot show lines cut off
at the end, so other files of a run hold `length` and `head` and ask `verify_prefix`.
Before the events, the ledger of a run has one line more (number 0), which binds the
files that say what the events mean: {"bound": {name: sha256 of the file}, "hash": ...}.

Source: docs/privacy.md, "Noise, crashes and the ledger".
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Generic, Literal, Self, TypeVar, cast

from filelock import lock_descriptor

from fedgs.config.fields import coerce_fields, entry
from fedgs.config.integers import proven_multiplier
from fedgs.config.rounds import terms_at
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.config.terms import Terms
from fedgs.errors import UserError, wrap_error
from fedgs.files import read_bytes, sync, write_atomically

GENESIS = hashlib.sha256(b"fedgs ledger, version 1").hexdigest()

_HASH_KEY = b',"hash":"'
_END = b'"}'
_BOUND = b'{"bound":'  # begins the line that is no event
_HASH_LENGTH = 64  # hexadecimal digits of SHA-256
_SEAL_LENGTH = len(_HASH_KEY) + _HASH_LENGTH + len(_END)
LEDGER_REMEDY = "restore the file from a copy: it is the record of the privacy spent"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One attempted round: the nodes' releases, public facts only.

    Attributes:
        kind: of the noise: "gaussian", or "discrete" on the integers of a secure
            aggregation.
        round: the generator update, from 1.
        attempt: 1 for the first try of the round, then 2, 3, ...
        participants: the clients asked, as increasing indices 0..K-1, or "all".
        num_clients: K.
        planned_nodes: nodes asked to answer.
        counted_nodes: nodes whose noise a guarantee may count; below this number,
            planned before the participants were known, the round is discarded.
        noise_std: standard deviation of one node's noise, per coordinate, at least 0.
        clip_bound: C > 0, the largest L2 norm of one client's gradient for one fake,
            or of its embedding or update.
        batch_size: B, fakes answered; 1 for an embedding or an update.
        client_selection, discriminator_training: as in `RunConfig`.
        noise_source: "os" (operating system's entropy) or "seeded" (not private).
        source: in the count of a deployed client, who asked for it; else "", and
            then not in the line.
        context: in a client's own count, what a masked release was masked under, once:
            the node's public key of the attempt; else "", and then not in the line.
        release: "gradient", then not in the line; or "embedding", "update" of a network
            that all share, or "count" of clients: one sample, B = 1.

    Raises:
        UserError: a value of the wrong type or outside its range.
    """

    kind: str = entry("gaussian", choices=("gaussian", "discrete"))
    round: int = entry(at_least=1)
    attempt: int = entry(at_least=1)
    participants: tuple[int, ...] | Literal["all"]
    num_clients: int = entry(at_least=1)
    planned_nodes: int
    counted_nodes: int = entry(at_least=1)
    noise_std: float = entry(at_least=0)
    clip_bound: float = entry(above=0)
    batch_size: int = entry(at_least=1)
    client_selection: str = entry(choices=("uniform", "balanced", "all"))
    discriminator_training: str = entry(choices=("selected", "every_round", "frozen"))
    noise_source: str = entry(choices=("os", "seeded"))
    source: str = ""
    context: str = ""
    release: str = entry(
        "gradient", choices=("gradient", "embedding", "update", "count")
    )

    def __post_init__(self) -> None:
        """Checks every field."""
        try:
            coerce_fields(self)
        except UserError as error:
            raise UserError(f"event: {error}") from error
        if self.release != "gradient" and self.batch_size != 1:
            raise UserError(
                f"event: batch_size = {self.batch_size}: an event of the kind "
                f"{self.release} has batch_size 1; give 1"
            )
        if self.planned_nodes < self.counted_nodes:
            raise UserError(
                f"event: planned_nodes = {self.planned_nodes}: give at least "
                f"counted_nodes = {self.counted_nodes}"
            )
        clients = self.participants
        if clients == "all":
            return
        if not _are_indices(clients, self.num_clients):
            raise UserError(
                f"event: participants = {clients!r}: give 'all' or increasing indices "
                "below K"
            )

    @property
    def num_participants(self) -> int:
        """m, the number of clients asked."""
        if self.participants == "all":
            return self.num_clients
        return len(self.participants)

    @property
    def positions(self) -> slice | list[int]:
        """Index of the participants in an array that has an entry for each client."""
        if self.participants == "all":
            return slice(None)
        return list(self.participants)

    @property
    def noise_multiplier(self) -> float:
        """One node's noise_std / (2 * clip_bound); Opacus divides by clip_bound."""
        sensitivity = 2.0 * self.clip_bound  # of one fake, with replace-one
        return self.noise_std / sensitivity

    @property
    def is_discrete(self) -> bool:
        """Whether the release was of a secure aggregation: integers, behind masks."""
        return self.kind == "discrete"

    @property
    def proven_multiplier(self) -> float:
        """Noise multiplier of the Gaussian noise that protects at most as well."""
        return proven_multiplier(self.noise_multiplier, self.is_discrete)


def agreed_values(config: RunConfig, round: int) -> dict[str, Any]:
    """Returns those fields of `Event` that settings decide for a round, from 1."""
    terms = terms_at(config, round)
    kind = "gaussian"
    if config.secure_aggregation:
        kind = "discrete"
    noise_source = "seeded"
    if config.noise_seed is None:
        noise_source = "os"
    return {
        "kind": kind,
        "noise_std": terms.noise_std,
        "clip_bound": terms.clip_bound,
        "batch_size": terms.batch_size,
        "release": terms.release,
        "client_selection": config.client_selection,
        "discriminator_training": config.discriminator_training,
        "noise_source": noise_source,
    }


def _are_indices(clients: tuple[Any, ...], below: int) -> bool:
    if type(clients) is not tuple or not clients:
        return False
    for client in clients:
        # Of type int, not an instance: True is an int, too, and names no client.
        if type(client) is not int:
            return False
        if not 0 <= client < below:
            return False
    # One form for one set: else equal sets would differ where they are compared.
    in_order = sorted(set(clients))
    return in_order == list(clients)


def _chain(previous: str, text: bytes) -> str:
    content = previous.encode() + text
    return hashlib.sha256(content).hexdigest()


def _sealed(previous: str, values: Mapping[str, Any]) -> tuple[bytes, str]:
    """Returns the line that follows the line of a hash, and its own hash."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    text = canonical.encode()
    digest = _chain(previous, text)
    # The hash becomes the last key of the same JSON object.
    still_open = text.removesuffix(b"}")
    line = still_open + _seal(digest) + b"\n"
    return line, digest


def _seal(digest: str) -> bytes:
    """Returns the end of a line that has this hash, from the comma on."""
    return _HASH_KEY + digest.encode() + _END


EventT = TypeVar("EventT")


class Chain(Generic[EventT]):
    """An append-only JSON lines file of events with a hash chain.

    `Ledger` has the events of federated runs, central baselines have those of their
    methods. Each refuses the other's lines. Made by `open` (to append, one opener at a
    time) or `read`.

    Privacy: public; it tells who took part and how much noise was added, no data.
    """

    event_type: type[Any]
    # Not in a line that has the default: lines of earlier versions keep their hashes.
    optional: Mapping[str, str] = MappingProxyType({})

    def _parse(self, text: bytes) -> EventT:
        """Returns the event of a line; a ValueError or TypeError refuses it."""
        values: dict[str, Any] = json.loads(text)
        known = {spec.name for spec in fields(self.event_type)}
        unknown_or_missing = values.keys() ^ known
        wrong = unknown_or_missing - self.optional.keys()
        if wrong:
            names = ", ".join(sorted(wrong))
            raise UserError(f"unknown or missing field {names}")
        clients = values.get("participants")
        if isinstance(clients, list):
            # JSON has no tuples, and an event is compared and hashed.
            values["participants"] = tuple(cast(list[Any], clients))
        return self.event_type(**values)

    def _values(self, event: Any) -> dict[str, Any]:
        """Returns what a line says of an event."""
        values = asdict(event)
        for name, default in self.optional.items():
            if values[name] == default:
                del values[name]
        return values

    def __init__(self, path: Path, data: bytes = b"") -> None:
        """Is called by `open` and `read` only."""
        self.path = path
        self.bound: dict[str, str] = {}  # files of the run, by the first line
        self._file: BinaryIO | None = None
        self._events: list[EventT] = []
        self._hashes = [GENESIS]
        self._size = 0  # of the whole lines
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Checks and adds the whole lines of what follows the lines known so far."""
        end = data.rfind(b"\n") + 1
        whole = data[:end]
        lines = whole.split(b"\n")[:-1]  # no line follows the last line feed
        first = self.length + 1
        if self._size == 0 and data.startswith(_BOUND):
            first = 0  # the line that binds is none of the events, which count from 1
        for number, line in enumerate(lines, start=first):
            where = f"{self.path}: line {number}"
            text, digest = self._opened(line, where)
            if number == 0:
                content = json.loads(text)
                self.bound = content["bound"]
                # `head` before the first event is then the hash of this line.
                self._hashes = [digest]
                continue
            kinds = (UserError, ValueError, TypeError, AttributeError)
            remedy = "use the version of fedgs that wrote it"
            with wrap_error(kinds, f"{where}: it is no event", remedy):
                event = self._parse(text)
            self._events.append(event)
            self._hashes.append(digest)
        self._size += end

    def _opened(self, line: bytes, where: str) -> tuple[bytes, str]:
        """Returns the JSON of a line that follows the last one, and the line's hash."""
        # The bytes as they stand: JSON written anew could hide a change.
        still_open = line[:-_SEAL_LENGTH]
        seal = line[-_SEAL_LENGTH:]
        text = still_open + b"}"
        digest = _chain(self.head, text)
        if seal != _seal(digest):
            problem = "it, or a line before it, was altered, deleted or moved"
            raise UserError(f"{where}: {problem}; {LEDGER_REMEDY}")
        return text, digest

    @classmethod
    def create(cls, path: Path, bound: Mapping[str, str]) -> None:
        """Writes a ledger without events.

        Args:
            path: where the new file is to lie.
            bound: names of the files that say what its events mean, with their SHA-256.

        Raises:
            OSError: it cannot be written.
        """
        values = {"bound": dict(bound)}
        line, _ = _sealed(GENESIS, values)
        write_atomically(path, line)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens a ledger to append to it, and creates it if it is missing.

        A torn last line is cut off. The file is locked until `close`.

        Raises:
            UserError: the file is broken, in use, or cannot be opened.
        """
        ledger = cls(Path(path))
        ledger.reopen()
        return ledger

    def reopen(self) -> None:
        """Opens a closed ledger again; reads only the lines that others added since.

        Raises:
            UserError: as `open`; or the file is shorter than it was.
        """
        with wrap_error(OSError, f"{self.path}: it cannot be opened", "check --output"):
            # Unbuffered: one write is one call, and tells how much the disk took.
            file = cast(BinaryIO, open(self.path, "a+b", buffering=0))  # noqa: SIM115
        is_first = self._size == 0
        try:
            # The kernel's lock: it is free again when its holder dies, however it does.
            descriptor = file.fileno()
            if not lock_descriptor(descriptor, blocking=False):
                raise UserError(
                    f"{self.path}: another run uses it; wait until that run has ended"
                )
            status = os.fstat(descriptor)
            if status.st_size < self._size:
                problem = f"it lost lines, because it had {self.length}"
                raise UserError(f"{self.path}: {problem}; {LEDGER_REMEDY}")
            file.seek(self._size)
            added = file.read()
            self._take(added)
            # What follows the last line feed was torn before anything was sent.
            file.truncate(self._size)
            # A new file's name has to survive a power cut before its first line counts.
            if is_first:
                os.fsync(descriptor)
                sync(self.path.parent)
        except BaseException:
            file.close()
            raise
        self._file = file

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Opens a ledger to look at it; the file stays as it is.

        Raises:
            UserError: the file is broken (a torn last line is ignored) or missing.
        """
        path = Path(path)
        with wrap_error(OSError, f"{path}: it cannot be read", "give a run folder"):
            return cls(path, read_bytes(path))

    @property
    def events(self) -> Sequence[EventT]:
        """All events, oldest first."""
        return tuple(self._events)

    @property
    def length(self) -> int:
        """Number of events."""
        return len(self._events)

    @property
    def head(self) -> str:
        """Hash of the last line, 64 hexadecimal digits; `GENESIS` without one."""
        return self._hashes[-1]

    def append(self, *events: EventT) -> None:
        """Writes events; once this returns they are on the disk, and may be sent.

        If writing fails, the lines are cut off again as far as the system lets us, the
        ledger is closed, and nothing may be sent for these events.

        Raises:
            UserError: the ledger is closed or only for reading, or writing failed.
        """
        if self._file is None:
            raise UserError(f"{self.path}: not open for appending; use Ledger.open")
        lines = b""
        head = self.head
        hashes: list[str] = []
        for event in events:
            values = self._values(event)
            line, head = _sealed(head, values)
            hashes.append(head)
            lines += line
        try:
            written = self._file.write(lines)
            if written != len(lines):
                raise OSError("the disk took a part of the line only")
            # The operating system may hold bytes back; after this call it cannot.
            os.fsync(self._file.fileno())
        except BaseException as error:
            # Also for Ctrl-C: nothing is sent for lines that may not be on the disk.
            with suppress(OSError):
                self._file.truncate(self._size)
            self.close()
            if not isinstance(error, OSError):
                raise
            problem = f"line {self.length + 1} could not be written ({error})"
            raise UserError(
                f"{self.path}: {problem}; free the disk, then resume the run"
            ) from error
        # Only now: what is not on the disk is not counted either.
        self._size += len(lines)
        self._events += events
        self._hashes += hashes

    def verify_prefix(
        self,
        length: int,
        head: str | None,
        witness: str = "the checkpoint",
    ) -> None:
        """Checks that the ledger begins with a history that another file has seen.

        Args:
            length: number of events at that time.
            head: the ledger's `head` at that time; None where it is not known.
            witness: the file that recorded it, for the error.

        Raises:
            UserError: the ledger is shorter, or another history leads up to there.
        """
        problem = ""
        if not 0 <= length <= self.length:
            problem = f"line {self.length} is the last, {witness} saw {length}"
        elif head is not None and self._hashes[length] != head:
            problem = f"line {length} is not the one that {witness} saw"
        if problem:
            raise UserError(f"{self.path}: {problem}; {LEDGER_REMEDY}")

    def close(self) -> None:
        """Closes the file and gives up the lock; the events can still be read."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Ledger(Chain[Event]):
    """The ledger of a run of GS-WGAN, or a client's count of what it released."""

    event_type = Event
    optional = MappingProxyType({"source": "", "context": "", "release": "gradient"})

    def verify_terms(self, config: ResolvedConfig) -> None:
        """Checks that every event is one that the run's settings agree to.

        Raises:
            UserError: names the event, and what the settings say.
        """
        # Rounds of the same terms agree to the same values, and there are thousands.
        agreed: dict[Terms, dict[str, Any]] = {}
        for number, event in enumerate(self._events, 1):
            terms = terms_at(config, event.round)
            values = agreed.get(terms)
            if values is None:
                values = agreed_values(config, event.round)
                values["num_clients"] = config.num_clients
                agreed[terms] = values
            for name, value in values.items():
                said = getattr(event, name)
                if said == value:
                    continue
                raise UserError(
                    f"{self.path}: line {number}: {name} = {said}, the run's "
                    f"settings say {value}; restore ledger and config.json from a "
                    "copy"
                )

    def verify_rounds(self, last: int, witness: str) -> None:
        """Checks that there is an event of every round up to one that was finished.

        Args:
            last: the finished round; 0 asks for nothing.
            witness: the file that says that it was finished, for the error.

        Raises:
            UserError: a round has no event.
        """
        recorded = {event.round for event in self._events}
        # One by one: a damaged witness may name a round beyond all that fits in memory.
        first = 1
        while first in recorded:
            first += 1
        if first <= last:
            problem = f"round {first} has no event, {witness} saw round {last}"
            raise UserError(f"{self.path}: {problem}; {LEDGER_REMEDY}")
