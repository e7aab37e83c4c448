"""The run folder: everything a run writes, readable, atomic and without pickle.

    config.json  versions.json  ledger.jsonl  metrics.jsonl
    cohort.txt    copy of the run's cohort, if it has one
    generator.safetensors  generator_ema.safetensors  samples/
    checkpoint/   server state by round; checkpoint.json commits last;
                  fit.safetensors, where an interrupted fit goes on
    ledger.json   how long the ledger is, and its head; see `RunFolder.record`
    ledger-behind.txt  of a deployed run whose ledger lacks what its clients released
    private/      mode 0700: selection.key, which decides who takes part in a round,
                  cohorts.csv, which cohort each client is in, and the simulated
                  clients' discriminators, by node and round
    baseline.json    of a run of a method outside fedgs: the method and its settings

A checkpoint is whole or absent: node states are written first, then the server's
tensors, and the rename of `checkpoint.json` commits. Files of rounds after the last
commit are leftovers of an interrupted run and are removed when it resumes.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from filelock import AcquireReturnProxy

from fedgs import files
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.settings import GIVEN
from fedgs.errors import UserError, wrap_error
from fedgs.privacy.ledger import LEDGER_REMEDY, Chain, Ledger
from fedgs.process import hold_lock
from fedgs.randomness import public_hash, secret
from fedgs.runs.data_card import LABEL

if TYPE_CHECKING:  # torch is imported where tensors are: `fedgs privacy` needs none
    from fedgs.shapes import TensorDict

FORMAT_VERSION = 3
COHORT = "cohort.txt"
COHORTS = "private/cohorts.csv"
CHECKPOINT = "checkpoint/checkpoint.json"
KEPT_FIT = "checkpoint/fit.safetensors"
LEDGER_RECORD = "ledger.json"
BASELINE = "baseline.json"
BEHIND = "ledger-behind.txt"
GENERATOR = "generator.safetensors"
AVERAGE = "generator_ema.safetensors"
METRICS_FILE = "metrics.jsonl"
SELECTION_KEY = "private/selection.key"
# What the ledger's events mean stands in these; its first line binds those there are.
BOUND = ("config.json", BASELINE, COHORT)
# A published folder has no settings of its training. To draw samples any will do.
# It does not say what it was trained on: no data that a user names is taken for that.
UNPUBLISHED = {
    "data": GIVEN,
    "num_clients": 1,
    "clients_per_round": 1,
    "noise_multiplier": 0.0,
    "seed": 0,
}
STATE_HASH = "sha256"  # in a node's state: of all else in it
# What a training process alone writes, in folders where others write too.
OWN_FILES = (
    LEDGER_RECORD,
    BEHIND,
    GENERATOR,
    AVERAGE,
    METRICS_FILE,
    "deployment.json",
    "nodes.json",
    "result.json",
)
ChainT = TypeVar("ChainT", bound=Chain[Any])
PACKAGES = ("torch", "torchvision", "flwr", "ray", "numpy", "autodp", "safetensors")


class Witness(NamedTuple):
    """What a file of a run folder says of the releases that its ledger must hold.

    Attributes:
        name: the file's name.
        round: the last round that was finished.
        length, head: of the ledger at that time; None where the file does not say.
    """

    name: str
    round: int
    length: int | None = None
    head: str | None = None


def is_baseline(path: Path) -> bool:
    """Tells whether a folder is that of a run of a method outside fedgs."""
    return (path / BASELINE).exists()


def check_free(output: str) -> None:
    """Refuses an output that exists or cannot be made.

    It is called first, because the work before anything is written may take hours.

    Raises:
        UserError: there is something, which can be continued where it is a run; or the
            folder above cannot hold it.
    """
    path = Path(output).expanduser().absolute()
    if path.exists():
        remedy = "choose another --output"
        if (path / "config.json").exists():
            remedy += f", or continue it with `fedgs resume {output}`"
        raise UserError(f"output = {output}: it exists already; {remedy}")
    check_place(output)


def check_place(output: str) -> None:
    """Refuses an output in which no file can be made, whether it exists or not.

    Raises:
        UserError: it or the folder above is a file, or cannot be written; or it lies in
            a published folder.
    """
    path = Path(output).expanduser().absolute()
    published = published_folder(path)
    if published is not None:
        raise UserError(
            f"output = {output}: {published} is a published folder, and this would add "
            "to it what may be private; choose another --output"
        )
    # The nearest folder that exists; the ones between are made with the output.
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir():
        raise UserError(
            f"output = {output}: {nearest} is a file; choose another --output"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"output = {output}: {nearest} cannot be written; choose another --output"
        )


def published_folder(path: Path) -> Path | None:
    """Returns the published folder that a path is or lies in; None if there is none.

    Whoever writes something private asks here first: others read such a folder.

    Args:
        path: of a file or folder, which need not exist.
    """
    # A link may lead into a published folder under another name.
    path = path.expanduser().resolve()
    for folder in (path, *path.parents):
        # A label alone is a file that anybody may have written anywhere.
        is_run = (folder / "config.json").is_file()
        if is_run and _is_published(folder):
            return folder
    return None


class RunFolder:
    """One run's folder; see the module for what lies where.

    Attributes:
        path: the folder, absolute.
        config: the run's resolved configuration.
    """

    def __init__(self, path: Path, config: ResolvedConfig) -> None:
        """Is called by `create` and `open`."""
        self.path = path
        self.config = config

    @classmethod
    def create(
        cls,
        config: ResolvedConfig,
        baseline: dict[str, Any] | None = None,
        selection_key: str = "",
    ) -> "RunFolder":
        """Makes the folder `config.output` and writes configuration and versions.

        A cohort file is copied: the run never reads the user's again.

        Args:
            config: the run's configuration.
            baseline: the method and its settings, where it is not GS-WGAN.
            selection_key: the secret that decides who takes part, of an audit; drawn
                for every other run.

        Raises:
            UserError: the folder exists or cannot be made, or the cohort is unreadable.
        """
        check_free(config.output)
        path = Path(config.output).absolute()
        staging = files.temporary_path(path)
        problem = f"output = {config.output}: it cannot be made"
        with contextlib.ExitStack() as stack:
            stack.enter_context(wrap_error(OSError, problem, "choose another --output"))
            # After the rename there is nothing to remove.
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
            for name in ("samples", "checkpoint", "private"):
                files.make_folder(staging / name)
            # An evaluation will leave real images here, beside what is private anyway.
            for own in (staging, staging / "private"):
                own.chmod(0o700)
            if config.cohort is not None:
                files.write_atomically(staging / COHORT, _cohort_file(config.cohort))
                config = dataclasses.replace(config, cohort=str(path / COHORT))
            if config.cohorts is not None:
                # Private: it says of each client in which cohort it is.
                table = files.read_bytes(Path(config.cohorts))
                files.write_atomically(staging / COHORTS, table)
                config = dataclasses.replace(config, cohorts=str(path / COHORTS))
            config = _with_selection_key(config, selection_key, staging)
            flat = {**config.to_flat(), "counted": config.counted}
            files.write_json(staging / "config.json", flat)
            files.write_json(staging / "versions.json", versions())
            if baseline is not None:
                files.write_json(staging / BASELINE, baseline)
            Ledger.create(staging / "ledger.jsonl", _salted(_hashes(staging)))
            # Last, so that whatever has the run's name is whole.
            staging.rename(path)
            # Else a power cut could take the name away, with a ledger in it.
            files.sync(path.parent)
        return cls(path, config)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Opens an existing run folder.

        Raises:
            UserError: no run folder, of another format version, unreadable, or with a
                link that leads out of it.
        """
        path = Path(path).absolute()
        if not (path / "config.json").is_file():
            raise UserError(
                f"{path}: this is no run folder (config.json is missing); give the "
                "--output of a `fedgs train`"
            )
        files.check_entries(path)
        found = files.read_json(path / "versions.json").get("format")
        if found != FORMAT_VERSION:
            raise UserError(
                f"{path}: run folder of format {found}, this fedgs reads "
                f"{FORMAT_VERSION}; use the version in its versions.json"
            )
        flat = files.read_json(path / "config.json")
        if _is_published(path):
            flat = {**UNPUBLISHED, **flat}
        flat.pop("selection_seed", None)  # of earlier versions, where all could read it
        remedy = "use the version in its versions.json"
        with wrap_error(
            UserError, f"{path / 'config.json'}: it cannot be read", remedy
        ):
            config = ResolvedConfig.from_flat(flat)
        # Versions before stated zero-out of records, for which it does not hold.
        if config.privacy_unit == "record":
            config = dataclasses.replace(config, relation="replace-one")
        # The folder may have been moved since it was written.
        if config.cohort is not None:
            config = dataclasses.replace(config, cohort=str(path / COHORT))
        if config.cohorts is not None:
            config = dataclasses.replace(config, cohorts=str(path / COHORTS))
        key = _read_selection_key(path, config.selection_hash)
        return cls(path, dataclasses.replace(config, selection_key=key))

    @property
    def private(self) -> Path:
        """The folder of the simulated clients' states."""
        return self.path / "private"

    @property
    def last_round(self) -> int:
        """The round of the last checkpoint, a finished run's last; 0 before it.

        Raises:
            UserError: a malformed checkpoint.
        """
        seen = self._seen_by(CHECKPOINT)
        if seen is None:
            return 0
        return seen.round

    @property
    def is_finished(self) -> bool:
        """Whether the generator is written."""
        return (self.path / GENERATOR).exists()

    @property
    def has_average(self) -> bool:
        """Whether the averaged generator is written, also in a published folder."""
        return (self.path / AVERAGE).exists()

    @property
    def is_deployed(self) -> bool:
        """Whether the run's data lie with clients on other machines."""
        return bool(self.config.node_names)

    @property
    def go_on(self) -> str:
        """The command that continues the run."""
        if self.is_deployed:
            return (
                f"fedgs deploy submit ... --resume {self.path.name} "
                "--client NAME=KEY.pub ..."
            )
        return f"fedgs resume {self.path}"

    @property
    def is_baseline(self) -> bool:
        """Whether the method is outside fedgs, and the ledger another one."""
        return is_baseline(self.path)

    def ledger(self, kind: type[ChainT] = Ledger) -> ChainT:
        """Opens the ledger for appending, checked as by `read_ledger`, and records it.

        Raises:
            UserError: as `read_ledger`, the ledger is in use, the disk is full, or what
                decides who takes part is lost.
        """
        self._check_kind(kind)
        if self.config.is_drawn_in_secret and not self.config.selection_key:
            raise UserError(
                f"{self.path / SELECTION_KEY}: it is missing, or is not this run's: "
                "it decides who takes part; restore it from a copy, or start again "
                "with another --output (`fedgs privacy of` states what was released)"
            )
        witnesses = self._witnesses()
        ledger = kind.open(self._ledger_path())
        problem = f"{self.path / LEDGER_RECORD}: it cannot be written"
        remedy = "free the disk, then resume the run"
        try:
            self._verify(ledger, witnesses)
            with wrap_error(OSError, problem, remedy):
                # metrics.jsonl, another witness, loses the rounds that are repeated.
                self.record(ledger)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def record(self, ledger: Chain[Any]) -> None:
        """Writes how long the ledger is, durably: lines that it loses are then missed.

        Raises:
            OSError: it cannot be written.
        """
        content = {
            "length": ledger.length,
            "head": ledger.head,
            "round": self.last_round,
        }
        files.write_json(self.path / LEDGER_RECORD, content)

    def mark_behind(self, reason: str) -> None:
        """Has nobody go on with the run or state an epsilon: its ledger lacks releases.

        Args:
            reason: says what is known of them, and what to do.
        """
        files.write_atomically(self.path / BEHIND, reason.encode())

    def read_ledger(self, kind: type[ChainT] = Ledger) -> ChainT:
        """Opens the ledger to look at it, checked against the rest of the folder.

        Whoever states what a run released takes its events from here: a ledger that
        lost lines would state too little.

        Args:
            kind: the class of the run's ledger.

        Raises:
            UserError: it is missing, a line is broken, another file of the folder
                tells of releases that it does not hold, it is of another kind, or of
                other settings than the folder's.
        """
        self._check_kind(kind)
        witnesses = self._witnesses()  # before the ledger, to which a run may append
        ledger = kind.read(self._ledger_path())
        self._verify(ledger, witnesses)
        return ledger

    def check_history(self) -> None:
        """Checks the ledger, if there is one that `read_ledger` reads.

        A published folder has none, and a baseline has one of its own kind.

        Raises:
            UserError: as `read_ledger`.
        """
        if not self.is_published and not self.is_baseline:
            self.read_ledger()

    @property
    def is_published(self) -> bool:
        """Tells whether `fedgs publish` made the folder: it has no ledger."""
        return _is_published(self.path)

    def check_unpublished(self) -> None:
        """Refuses a published folder where a run is needed.

        Raises:
            UserError: it is published.
        """
        if self.is_published:
            raise UserError(
                f"{self.path}: it is published, so it has no ledger; read its "
                f"{LABEL}, or give the run folder"
            )

    def _check_kind(self, kind: type[Chain[Any]]) -> None:
        """Refuses what is published, and a baseline as a run of another method."""
        self.check_unpublished()
        if issubclass(kind, Ledger) and self.is_baseline:
            raise UserError(
                f"{self.path}: it is a run of `fedgs baseline`, which this command "
                "cannot use; use `fedgs privacy of`, `audit`, `report`, `sample` or "
                "`evaluate`, with this run alone"
            )

    def _ledger_path(self) -> Path:
        path = self.path / "ledger.jsonl"
        if not path.is_file():
            raise UserError(f"{path}: it is missing; {LEDGER_REMEDY}")
        return path

    def _witnesses(self) -> list[Witness]:
        """Reads what the other files say of the releases.

        Raises:
            UserError: one of them is malformed, or `mark_behind` was called.
        """
        path = self.path / BEHIND
        if path.exists():
            raise UserError(f"{path}: {path.read_text(errors='replace')}")
        witnesses = (
            self._seen_by(CHECKPOINT),
            self._seen_by(LEDGER_RECORD),
            self._bound_to(GENERATOR),
            self._bound_to(AVERAGE),
            self._seen_by_metrics(),
        )
        return [witness for witness in witnesses if witness is not None]

    def _seen_by_metrics(self) -> Witness:
        lines = self.metrics()
        rounds = [line["round"] for line in lines]
        lengths = [line["events"] for line in lines if type(line.get("events")) is int]
        # A line has the length of the ledger, and not its head.
        return Witness(
            name=METRICS_FILE,
            round=max(rounds, default=0),
            length=max(lengths, default=None),
        )

    def _seen_by(self, name: str) -> Witness | None:
        """Reads one of the files that hold length and head of the ledger."""
        path = self.path / name
        if not path.exists():
            return None
        content = files.read_json(path)
        prefix = "ledger_" if name == CHECKPOINT else ""
        round = content.get("round", -1)
        length = content.get(f"{prefix}length", -1)
        for number in (round, length):
            if type(number) is not int or number < 0:
                raise UserError(f"{path}: corrupted; {files.RESTORE}")
        # Without a head, "" is none that a ledger has: the check fails, as it should.
        head = content.get(f"{prefix}head", "")
        if not isinstance(head, str):
            raise UserError(f"{path}: corrupted; {files.RESTORE}")
        return Witness(name, round, length, head)

    def _bound_to(self, name: str) -> Witness | None:
        """Reads which ledger a generator was made under."""
        path = self.path / name
        if not path.exists():
            return None
        files.check_tensors(path)
        words = files.read_metadata(path).get("ledger", "").split()
        if len(words) < 2 or not words[0].isdecimal():
            problem = "it does not say under which ledger it was made"
            raise UserError(f"{path}: {problem}; {files.RESTORE}")
        length, head = words[:2]
        # Of which round it is, the file does not say; length and head are more.
        return Witness(name, round=0, length=int(length), head=head)

    def _verify(self, ledger: Chain[Any], witnesses: Iterable[Witness]) -> None:
        hashes = _hashes(self.path)
        if not ledger.bound:
            problem = "lost its first line, which binds the run's settings"
            raise UserError(f"{ledger.path}: {problem}; {LEDGER_REMEDY}")
        # Other settings would give the same events another meaning, and other epsilons.
        for name in BOUND:
            if ledger.bound.get(name) != hashes.get(name):
                raise UserError(
                    f"{self.path / name}: it is not what the run began with, by the "
                    "first line of its ledger; restore both from a copy"
                )
        for witness in witnesses:
            if witness.length is not None:
                ledger.verify_prefix(witness.length, witness.head, witness.name)
            if witness.head is None and isinstance(ledger, Ledger):
                # Not every step of a baseline releases something.
                ledger.verify_rounds(witness.round, witness.name)
        if isinstance(ledger, Ledger):
            ledger.verify_terms(self.config)

    def locked(self, name: str = ".lock", patience: float = 0.0) -> AcquireReturnProxy:
        """Holds the folder for one training process, until the `with` block ends.

        Args:
            name: the lock's name: that of the process that trains, or of its launcher.
            patience: seconds to wait for it.

        Raises:
            UserError: another process trains in this folder, or it is published.
        """
        # Before the file of the lock is made: nothing is written into such a folder.
        self.check_unpublished()
        return hold_lock(
            self.path / name,
            f"{self.path}: another process trains in this folder; wait for it to end, "
            "or stop it",
            patience,
        )

    def append_metrics(self, metrics: dict[str, Any], name: str = METRICS_FILE) -> None:
        """Appends one line to metrics.jsonl, or nothing: public numbers of one round.

        Privacy: post-processing of DP output.

        Args:
            metrics: the metrics of the round.
            name: the name of another file. What is not public goes below private/.

        Raises:
            OSError: it cannot be written.
        """
        line = (json.dumps(metrics) + "\n").encode()
        with open(self.path / name, "ab", buffering=0) as lines:
            files.append_whole(lines, line)

    def truncate_metrics(self, round: int) -> None:
        """Drops the metrics of rounds after `round`, which a resumed run repeats."""
        path = self.path / METRICS_FILE
        if not path.exists():
            return
        kept = [line for line in self.metrics() if line["round"] <= round]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        files.write_atomically(path, text.encode())

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the whole lines of metrics.jsonl; the last one may be torn.

        Raises:
            UserError: another line is no JSON object.
        """
        lines = files.read_json_lines(self.path / METRICS_FILE)
        return [line for line in lines if type(line.get("round")) is int]

    def save_checkpoint(
        self,
        round: int,
        tensors: "TensorDict",
        ledger: Chain[Any],
    ) -> None:
        """Commits the server's state of a round; the nodes' states are on disk.

        Privacy: post-processing of DP output.

        Args:
            round: the finished round.
            tensors: name -> tensor, everything the server needs to go on.
            ledger: the ledger whose length and head the checkpoint records.
        """
        # First the nodes' states: a committed checkpoint must not miss one of them.
        for state in self.private.glob("*/*.safetensors"):
            # A node may replace its older states meanwhile.
            with contextlib.suppress(FileNotFoundError):
                files.sync(state)
        for folder in self.private.glob("node-*"):
            files.sync(folder)
        files.sync(self.private)
        name = f"round-{round:07d}.safetensors"
        path = self.path / "checkpoint" / name
        # Durably before the commit, which would otherwise name a file that got lost.
        files.write_tensors(path, tensors, is_durable=True)
        commit = {
            "round": round,
            "file": name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "ledger_length": ledger.length,
            "ledger_head": ledger.head,
        }
        # The commit: until this name is on the disk, the last checkpoint counts.
        files.write_json(self.path / CHECKPOINT, commit)
        self.record(ledger)
        for other in (self.path / "checkpoint").glob("round-*.safetensors"):
            if other != path:  # older, or a leftover of a crash before its commit
                other.unlink()
        (self.path / KEPT_FIT).unlink(missing_ok=True)  # of the checkpoint before

    def load_checkpoint(self) -> "tuple[int, TensorDict] | None":
        """Returns the last committed round and its tensors, None before the first.

        Removes what later, uncommitted rounds and killed saves left behind; the caller
        holds the folder. That the ledger has what was released up to this round,
        `ledger` has checked.

        Raises:
            UserError: a corrupted checkpoint, or a lost one.
        """
        folder = self.path / "checkpoint"
        for owned in (folder, self.path / "samples", *self.private.glob("node-*")):
            files.remove_temporaries(owned)
        for owned in (self.path, self.path / ".flower"):
            files.remove_temporaries(owned, *OWN_FILES)
        found = self.committed()
        round = 0
        if found is not None:
            round, _ = found
        else:
            self._check_none_was_committed()
        remove_states_after(self.private, round)
        return found

    def _check_none_was_committed(self) -> None:
        """Refuses to begin anew where a checkpoint got lost: rounds would cost twice.

        Raises:
            UserError: a round was committed.
        """
        recorded = self._seen_by(LEDGER_RECORD)
        if recorded is not None and recorded.round > 0:
            raise UserError(
                f"{self.path / CHECKPOINT}: it is missing, and round {recorded.round} "
                f"was committed; {files.RESTORE}"
            )

    def committed(self) -> "tuple[int, TensorDict] | None":
        """Returns what `load_checkpoint` does, and removes nothing.

        Privacy: post-processing of DP output.

        Raises:
            UserError: a corrupted checkpoint.
        """
        if not (self.path / CHECKPOINT).exists():
            return None
        folder = self.path / "checkpoint"
        commit = files.read_json(self.path / CHECKPOINT)
        path = files.inside(folder, commit.get("file"), f"{CHECKPOINT}: file")
        broken = f"{path}: corrupted checkpoint"
        kinds = (OSError, KeyError, TypeError, ValueError)
        with wrap_error(kinds, broken, files.RESTORE):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest != commit["sha256"]:
                raise ValueError("of another hash")
            tensors, _ = files.read_tensors(path)
            round = int(commit["round"])
            if path != state_path(folder, round):
                raise ValueError("of another round")
        return round, tensors

    def save_fit(self, tensors: "TensorDict") -> None:
        """Writes where the fit to the last checkpoint is.

        Privacy: post-processing of DP output.
        """
        # A fit goes on from this checkpoint and no other.
        start = {"fit": files.read_json(self.path / CHECKPOINT)["sha256"]}
        path = self.path / KEPT_FIT
        files.write_tensors(path, tensors, start, is_durable=True, is_sealed=True)

    def load_fit(self) -> "TensorDict | None":
        """Returns what `save_fit` wrote of the last checkpoint, None if nothing.

        Raises:
            UserError: the file is corrupted.
        """
        path = self.path / KEPT_FIT
        if not path.exists():
            return None
        files.check_tensors(path)
        tensors, metadata = files.read_tensors(path)
        words = metadata.get("fit", "").split()
        if len(words) != 2:  # the checkpoint, and the seal
            raise UserError(f"{path}: it does not say which fit it is of")
        if words[0] != files.read_json(self.path / CHECKPOINT)["sha256"]:
            return None
        return tensors

    def average(self) -> "TensorDict | None":
        """Returns the tensors of the averaged generator, None where it is not written.

        Privacy: post-processing of DP output.

        Raises:
            UserError: corrupted, exchanged, or of another ledger than the folder's.
        """
        if not self.has_average:
            return None
        path = self.path / AVERAGE
        files.check_tensors(path)
        record = self._seen_by(LEDGER_RECORD)  # nothing of a published folder
        if record is not None:
            made = self._bound_to(AVERAGE)
            if made is not None and made.head != record.head:
                raise UserError(f"{path}: it is of another ledger; {files.RESTORE}")
        tensors, _ = files.read_tensors(path)
        return tensors

    def save_generator(
        self,
        generator: "TensorDict",
        ema: "TensorDict",
        ledger: Chain[Any],
    ) -> None:
        """Writes the generator and its average, the run's product.

        `generator.safetensors` is written last: it says that the run is complete.

        Privacy: post-processing of DP output.

        Args:
            generator: name -> tensor.
            ema: name -> tensor, of the averaged generator.
            ledger: the run's, which both files name: a folder may be published without
                its checkpoint.
        """
        # One key: safetensors writes several in no fixed order.
        seen = {"ledger": f"{ledger.length} {ledger.head}"}

        def write(name: str, tensors: "TensorDict") -> None:
            path = self.path / name
            files.write_tensors(path, tensors, seen, is_durable=True, is_sealed=True)

        write(AVERAGE, ema)
        self.record(ledger)
        write(GENERATOR, generator)
        (self.path / KEPT_FIT).unlink(missing_ok=True)


def _cohort_file(path: str) -> bytes:
    """Returns what the user's file of a cohort contains."""
    remedy = "give --cohort a file that can be read"
    with wrap_error(OSError, f"cohort = {path}: unreadable", remedy):
        return Path(path).read_bytes()


def _with_selection_key(config: ResolvedConfig, key: str, path: Path) -> ResolvedConfig:
    """Returns settings with the secret that decides who takes part, if one does.

    It is written into the run folder `path`, and drawn where `key` is empty.
    """
    told = ""
    if config.is_drawn_in_secret:
        key = key or secret()
        told = public_hash(key)
        files.write_atomically(path / SELECTION_KEY, key.encode())
    return dataclasses.replace(config, selection_key=key, selection_hash=told)


def _read_selection_key(path: Path, told: str) -> str:
    """Returns the secret whose hash config.json tells; "" if it is lost."""
    # Without it a run can be looked at, but not go on: `ledger` refuses that.
    with contextlib.suppress(OSError, UnicodeError):
        key = (path / SELECTION_KEY).read_text()
        if public_hash(key) == told:
            return key
    return ""


def _salted(hashes: Mapping[str, str]) -> dict[str, str]:
    """Returns what a ledger's first line binds, and a secret that nobody guesses.

    The ledger's head stands in generators: without the salt it would tell who took part
    in a few rounds to whoever tries all possible ledgers.
    """
    return {**hashes, "salt": secret()}


def _hashes(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of those files of `BOUND` that a folder has."""
    found: dict[str, str] = {}
    for name in BOUND:
        path = folder / name
        if path.exists():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


# ------------------------------------------------------------------ node states


def node_folder(private: Path, node_id: int) -> Path:
    """Returns the folder of one simulated node's states."""
    return private / f"node-{node_id:05d}"


def state_rounds(folder: Path) -> list[int]:
    """Returns the rounds whose states are on disk, increasing."""
    paths = folder.glob("round-*.safetensors")
    found: list[int] = []
    for path in paths:
        number = path.stem.removeprefix("round-")
        if number.isdecimal():
            found.append(int(number))
    return sorted(found)


def state_path(folder: Path, round: int) -> Path:
    """Returns the file of a node's state after a round."""
    return folder / f"round-{round:07d}.safetensors"


def warm_start_path(folder: Path) -> Path:
    """Returns the file of a node's interrupted warm start, beside its states."""
    return folder / "warm-start.safetensors"


def sealed(tensors: "TensorDict", metadata: dict[str, str]) -> "TensorDict":
    """Returns a node's state with a hash of all of it, which `read_state` compares.

    Privacy: as private as the tensors.

    Args:
        tensors: name -> tensor, on any device.
        metadata: what will be written with them.
    """
    import torch

    # As a tensor: safetensors writes several entries of metadata in a random order.
    content = _state_hash(tensors, metadata)
    return {**tensors, STATE_HASH: torch.frombuffer(content, dtype=torch.uint8)}


def read_state(path: Path) -> "tuple[TensorDict, dict[str, str]]":
    """Reads a node's state and its metadata.

    Privacy: output as private as the file.

    Raises:
        UserError: missing or corrupted, if only by one bit.
    """
    tensors, metadata = files.read_tensors(path)
    written = tensors.pop(STATE_HASH, None)
    expected = [*_state_hash(tensors, metadata)]
    if written is None or written.tolist() != expected:
        raise UserError(f"{path}: corrupted state, of another hash; {files.RESTORE}")
    return tensors, metadata


def _state_hash(tensors: "TensorDict", metadata: dict[str, str]) -> bytearray:
    pairs = sorted(metadata.items())
    content = hashlib.sha256(repr(pairs).encode())
    for name, value in sorted(tensors.items()):
        # Type and shape as well: the same bytes may stand for other numbers.
        shape = tuple(value.shape)
        header = f"{name} {value.dtype} {shape}"
        content.update(header.encode())
        numbers = value.detach().cpu().reshape(-1).numpy()
        content.update(numbers.data)
    return bytearray(content.digest())


def remove_states_after(private: Path, round: int) -> None:
    """Deletes node states of rounds that no checkpoint committed."""
    for folder in private.glob("node-*"):
        for later in state_rounds(folder):
            if later > round:
                state_path(folder, later).unlink()


def old_states(folder: Path, keep_round: int) -> list[Path]:
    """Returns the states that are neither the newest nor of the committed round."""
    rounds = state_rounds(folder)
    older = rounds[:-1]
    # The commit of a round that a node took no part in means its last state before it.
    up_to_commit = [round for round in rounds if round <= keep_round]
    committed = up_to_commit[-1:]
    found: list[Path] = []
    for round in older:
        if round not in committed:
            found.append(state_path(folder, round))
    return found


def _is_published(folder: Path) -> bool:
    has_record = (folder / LEDGER_RECORD).exists()
    return (folder / LABEL).exists() and not has_record


# What `versions` may find beside the packages.
ABOUT = ("format", "fedgs", "python", "machine", "gpu", "git_commit", "git_clean")


def versions_of(run: Path) -> dict[str, Any]:
    """Reads what a run folder says of its software, to be shown or published.

    No ledger binds the file. So only what fedgs writes into it is taken, each in one
    line.

    Raises:
        UserError: the file cannot be read.
    """
    found: dict[str, Any] = {}
    for name, value in files.read_json(run / "versions.json").items():
        is_plain = isinstance(value, bool | int | None) or (
            isinstance(value, str) and value.isprintable() and len(value) < 100
        )
        if name in (*ABOUT, *PACKAGES) and is_plain:
            found[name] = value
    return found


def versions() -> dict[str, Any]:
    """Returns the format, the package versions and the git commit, where known."""
    import torch

    found: dict[str, Any] = {"format": FORMAT_VERSION}
    for package in ("fedgs", *PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["python"] = platform.python_version()
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs"
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    source = Path(__file__).parents[2]
    if (source / ".git").exists():
        found["git_commit"] = _git(source, "rev-parse", "HEAD")
        found["git_clean"] = _git(source, "status", "--porcelain") == ""
    return found


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        silent = subprocess.DEVNULL
        output = subprocess.check_output(command, stderr=silent, text=True, timeout=10)
        return output.strip()
    return None
