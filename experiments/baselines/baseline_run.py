"""A baseline's run folder: made of settings, read again, and what it guarantees."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from experiments.baselines import find, loop
from experiments.baselines.baseline import AuditScores, Baseline, Facts, StepEvent
from experiments.baselines.one_release import attack_releases
from experiments.baselines.target import BaselineRequest, settings_read
from fedgs.audit.finding import Finding
from fedgs.cohorts.cohort_file import selection_costs
from fedgs.config.fields import coerce_fields, flag_words
from fedgs.config.plugins import CENTRAL
from fedgs.config.recipes import overridden
from fedgs.config.run_config import NetworkConfig, RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.errors import UserError, wrap_error
from fedgs.files import RESTORE, read_json, read_json_lines
from fedgs.privacy.accountant import (
    AS_PUBLISHED,
    CHANGES,
    SEEDED,
    VALID,
    Statement,
    large_delta,
)
from fedgs.privacy.gaussian import check_numbers
from fedgs.round.checkpoint import Report
from fedgs.round.preparation import (
    check_device,
    free_output,
    resolve,
    with_absolute_paths,
    with_held_out,
)
from fedgs.round.run import Stop
from fedgs.runs.run_folder import BASELINE, RunFolder

# The noise is the method's own: of the settings that all runs share, none is added.
OF_CENTRAL = {
    "phases": CENTRAL,
    "noise_multiplier": 0.0,
    "target_epsilon": "",
    "client_selection": "all",
    "clients_per_round": "",
}
_RECORD_UNIT = "record: one record (an image that the cap leaves, whose owner is fixed)"
NUMBER = "the number of images is public"
CURATOR = "who runs it sees all images"


@dataclass(frozen=True, eq=False)
class BaselineRun:
    """A run of a baseline: its folder and what the folder says of the method.

    It is what `fedgs.runs.other_runs.OtherRun` asks for.

    Attributes:
        name: that the method was asked for by: its own, or module:object.
        folder: the run folder.
        method: the method of this name.
        settings: the settings of the method, with the noise set.
        facts: the public numbers of the data.
        target_epsilon: None where none was asked for.
    """

    name: str
    folder: RunFolder
    method: type[Baseline[Any]]
    settings: Any
    facts: Facts
    target_epsilon: float | None

    @property
    def config(self) -> NetworkConfig:
        """The run's resolved settings."""
        return cast(NetworkConfig, self.folder.config)

    @property
    def title(self) -> str:
        """The method's line for tables."""
        return self.method.title

    @property
    def unit(self) -> str:
        """The unit of the valid guarantee: "none", "record" or "user"."""
        return self.method.unit

    @property
    def num_records(self) -> int:
        """Images that it trains on, after the cap."""
        return self.facts.num_records

    @property
    def description(self) -> str:
        """What is trained on what, in a line."""
        noise = ""
        if self.unit == "none":
            noise = ", NOT PRIVATE"
        elif self.config.noise_seed is not None:
            noise = f", noise {SEEDED}"
        return (
            f"{self.method.title}: {self.facts.num_records} images, central, "
            f"{self.config.num_rounds} steps{noise}"
        )

    def shown_settings(self) -> dict[str, Any]:
        """Returns the method's own settings, by name."""
        return dataclasses.asdict(self.settings)

    def settings_read(self) -> Sequence[dataclasses.Field[Any]]:
        """Returns the fields of the run's settings that the method reads."""
        return settings_read(self.method)

    def command(self) -> list[str]:
        """Returns the words of the command that trains such a run again."""
        words = ["fedgs", "baseline", self.name]
        default = self.method.Settings()
        for spec in dataclasses.fields(self.settings):
            value = getattr(self.settings, spec.name)
            has_flag = "help" in spec.metadata
            if has_flag and value != getattr(default, spec.name):
                words += flag_words(spec.name, value)
        return words

    # -------------------------------------------------------------- the training

    def load_data(self) -> FederatedImages:
        """Loads the data that the run trains on, after its cap.

        Raises:
            UserError: it is missing, or other data than the run was started with.
        """
        cap = self.facts.max_images_per_user
        data = capped(load_data(self.config), cap, self.config.seed)
        # Noise and sampling rate were made for these numbers.
        if facts_of(data, cap) != self.facts:
            raise UserError(
                f"{self.folder.path}: its data has changed: {self.facts.num_records} "
                f"images of {self.facts.num_clients} clients were there; restore them"
            )
        return data

    def training(self, data: FederatedImages) -> Baseline[Any]:
        """Returns a training that has not begun.

        Privacy: reads private data; output private.
        """
        return self.method(self.settings, self.config, data)

    def train(self, data: FederatedImages, report: Report, stop: Stop) -> None:
        """Trains from the last checkpoint on, or from the start; see `loop.train`."""
        with self.folder.locked():
            training = self.training(data)
            loop.train(self.folder, training, self.target_epsilon, report, stop)

    # -------------------------------------------------------------- what it costs

    @property
    def events(self) -> Sequence[StepEvent]:
        """What was released so far, from the ledger.

        Raises:
            UserError: the ledger is broken.
        """
        ledger = self.folder.read_ledger(loop.BaselineLedger)
        return [release.event for release in ledger.events]

    def guarantees(
        self,
        delta: float | None = None,
        with_private: bool = False,
    ) -> list[Statement]:
        """Returns what the run guarantees for all that it released so far.

        Privacy: public; with the private folder as private as what the method keeps
        there, for the owner's eyes.

        Args:
            delta: at least 1e-300 and below 1; the run's own when None.
            with_private: state what is computed from the private folder as well.

        Raises:
            UserError: delta is out of range, or the ledger is broken.
        """
        if delta is None:
            delta = self.config.delta
        check_numbers(delta=delta)
        events = [dict(event) for event in self.events]
        if with_private:
            # Of a step that a crash lost before it was counted there may be two lines.
            lines = read_json_lines(self.folder.path / loop.PRIVATE_COSTS)
            costs = {line.pop("line"): line for line in lines}
            for number, event in enumerate(events, start=1):
                event.update(costs.get(number, {}))
        is_seeded = bool(events) and self.config.noise_seed is not None
        statements: list[Statement] = []
        for row in self.method.guarantees(self.settings, self.facts, events, delta):
            label = row.label
            # A published figure is no claim, seeded or not.
            if is_seeded and label != AS_PUBLISHED:
                label = SEEDED
            conditions = (*self._conditions(row, is_seeded), *row.conditions)
            statement = dataclasses.replace(
                row,
                label=label,
                conditions=conditions,
                num_rounds=len(events),
            )
            statements.append(statement)
        return statements

    def _conditions(self, row: Statement, is_seeded: bool) -> list[str]:
        """Returns what a statement supposes, whatever the method is."""
        conditions = [
            *large_delta(row.delta, self.num_units(row.unit)),
            f"adversary: sees what is published; {CURATOR} and is trusted",
            f"relation: one {row.unit} {CHANGES[row.relation]}",
        ]
        if is_seeded:
            conditions.append(f"noise: {SEEDED}")
        conditions.extend(self.config.public_conditions)
        conditions.append(NUMBER)  # in baseline.json, and in every sampling rate
        if row.unit == "record":
            conditions.append(_RECORD_UNIT)
        else:
            user = self.config.unit_condition.partition(": ")[2]
            conditions.append(f"{row.unit}: {user}")
        return conditions

    def num_units(self, unit: str) -> int:
        """Returns how many units a guarantee may be about; 0 of the unit "none"."""
        facts = self.facts
        if unit == "user":
            return facts.num_clients
        if unit == "record":
            return max(facts.num_records, facts.num_clients)  # each client has one
        return 0

    def attack(self, trials: int) -> list[Finding]:
        """Returns the findings of an attack on one release of each kind.

        There are none of a method without an attack, or without a guarantee.

        Args:
            trials: for each of the two neighbours.
        """

        def claim_of(event: StepEvent) -> Statement:
            delta = self.config.delta
            rows = self.method.guarantees(self.settings, self.facts, [event], delta)
            own = [row for row in rows if row.label == VALID and row.unit == self.unit]
            # The line that a target sets is the first one: the contract says so.
            return own[0]

        def scores_of(
            event: StepEvent,
            relation: str,
            trials: int,
        ) -> AuditScores | None:
            return self.method.audit_scores(
                self.settings, self.facts, event, relation, trials
            )

        events: Sequence[StepEvent] = []
        if self.unit != "none":
            events = self.events
        return attack_releases(events, claim_of, scores_of, trials)


# ------------------------------------------------------------------ a new run


def new_run(name: str, given: Mapping[str, Any]) -> tuple[BaselineRun, FederatedImages]:
    """Makes the folder of a run that can start, and loads its data.

    Args:
        name: the name of the method to train by, as the user typed it.
        given: settings of the method that are not its defaults, of `BaselineRequest`,
            and of `RunConfig` over the method's recipe; without `output` the folder is
            made in `runs/`.

    Raises:
        UserError: bad input, or a guarantee that the method cannot give; nothing was
            written.
    """
    method = find(name, is_typed=True)
    of_method = _given_of(method.Settings, given)
    asked = _given_of(BaselineRequest, given)
    own = made_settings(method, of_method)
    request = BaselineRequest(**asked)
    of_run: dict[str, Any] = {}
    for setting, value in given.items():
        if setting not in of_method and setting not in asked:
            of_run[setting] = value
    # What the user gave counts more than the recipe; that it is central, more than all.
    values = dict(method.recipe) | of_run | OF_CENTRAL
    config = overridden(RunConfig(), values)
    config = with_held_out(config, of_run)
    check_run(method, config)
    config = free_output(config, method.name.replace(":", "-"))
    found, data = resolve(with_absolute_paths(config))
    resolved = cast(NetworkConfig, found)  # as `CENTRAL` declares
    check_device(resolved)
    data = capped(data, request.max_images_per_user, resolved.seed)
    facts = facts_of(data, request.max_images_per_user)
    # The noise needs the number of records, so it is found after the data are loaded.
    if request.target_epsilon is not None:
        own = method.calibrated(own, facts, request.target_epsilon, resolved.delta)
    training = method(own, resolved, data)  # refuses what it cannot train
    resolved = dataclasses.replace(resolved, num_rounds=training.num_steps)
    # What `open_run` reads; the ledger binds it.
    content = {
        "name": name,
        "title": method.title,
        "settings": dataclasses.asdict(own),
        "facts": dataclasses.asdict(facts),
        "target_epsilon": request.target_epsilon,
    }
    folder = RunFolder.create(resolved, content)
    run = BaselineRun(
        name=name,
        folder=folder,
        method=method,
        settings=own,
        facts=facts,
        target_epsilon=request.target_epsilon,
    )
    return run, data


def _given_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those given values that are fields of a class of settings."""
    names = [spec.name for spec in dataclasses.fields(kind)]
    return {name: given[name] for name in names if name in given}


def made_settings(method: type[Baseline[Any]], values: dict[str, Any]) -> Any:
    """Returns a method's settings, each of its own type and within its range.

    Raises:
        UserError: an unknown setting, or a value outside its range.
    """
    known = [spec.name for spec in dataclasses.fields(method.Settings)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise UserError(f"{unknown[0]}: {method.name} has {', '.join(known)}")
    settings = method.Settings(**values)
    coerce_fields(settings)
    return settings


def check_run(method: type[Baseline[Any]], config: RunConfig) -> None:
    """Refuses settings of a run under which the method's guarantee would not hold.

    Raises:
        UserError: with the reason and what to use instead.
    """
    title = method.name
    if selection_costs([config]):
        raise UserError(
            f"cohort = {config.cohort}: its selection read private images, and "
            f"{title} does not count that; leave out --cohort, or use `fedgs train`"
        )
    central = {"secure_aggregation": False, "engine": "local", "adversary": "release"}
    for name, only in central.items():
        value = getattr(config, name)
        if value != only:
            raise UserError(
                f"{name} = {value}: {title} is central: whoever runs it sees all "
                "images; leave this setting out, or use `fedgs train`"
            )


def facts_of(data: FederatedImages, cap: int | None) -> Facts:
    """Returns the numbers of data, after its cap, that count as public.

    Privacy: publishes the number of records; it is kept in the run folder.
    """
    channels, side, _ = data.images.shape[1:]
    num_records = int(data.sizes.sum())  # of clients: some records may be nobody's
    return Facts(
        num_clients=data.num_clients,
        num_records=num_records,
        max_images_per_user=cap,
        num_classes=data.num_classes,
        image_shape=(channels, side, side),
    )


def capped(data: FederatedImages, cap: int | None, seed: int) -> FederatedImages:
    """Returns the data without the images of a client over a public cap.

    Those with the least hashes stay. So one image more or less changes at most one
    other that is kept, and no class is preferred.

    Privacy: reads private data; output private.

    Args:
        data: the data of all clients.
        cap: at least 1; None keeps all.
        seed: decides which images stay.
    """
    if cap is None:
        return data

    key = str(seed).encode()

    def hash_of(row: int) -> bytes:
        content = key + data.images[row].tobytes()
        return hashlib.sha256(content).digest()

    def kept(records: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(records) <= cap:
            return records
        hashes = [hash_of(row) for row in records]
        by_hash = sorted(range(len(records)), key=lambda place: hashes[place])
        # In their old order: which of them are first tells nothing of the hashes.
        places = np.sort(by_hash[:cap])
        return records[places]

    records = tuple(kept(own) for own in data.client_records)
    return dataclasses.replace(data, client_records=records)


def open_run(path: str | Path, typed: str = "") -> BaselineRun:
    """Opens the folder of a baseline's run.

    Args:
        path: where the folder lies.
        typed: a method that the user named on the command line, and so trusts.

    Raises:
        UserError: no such folder, an unreadable one, or a method that is not trusted.
    """
    folder = RunFolder.open(path)
    if not folder.is_baseline:
        raise UserError(
            f"{path}: it is no run of `fedgs baseline` ({BASELINE} is missing)"
        )
    content = read_json(folder.path / BASELINE)
    with wrap_error(Exception, f"{folder.path / BASELINE}: corrupted", RESTORE):
        name = content["name"]
        # A folder is passed on: by itself it may not say which code is run.
        method = find(name, is_typed=name == typed)
        settings = made_settings(method, content["settings"])
        numbers = dict(content["facts"])
        shape = tuple(numbers.pop("image_shape"))
        facts = Facts(**numbers, image_shape=shape)
        target = content["target_epsilon"]
    return BaselineRun(
        name=name,
        folder=folder,
        method=method,
        settings=settings,
        facts=facts,
        target_epsilon=target,
    )
