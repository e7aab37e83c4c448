"""The frame around every baseline: settings to a run folder, and the loop that trains.

Nothing that depends on private data leaves the process before the event that pays for
it is on the disk: a commit appends the events of the steps since the last one, then
metrics, checkpoint and pictures. A crash in between loses the steps, not their price.
"""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgs.baselines import find
from fedgs.baselines.contract import SECRET, Baseline, Facts, Trainer
from fedgs.baselines.releases import Release, ReleaseLedger
from fedgs.baselines.target import Asked
from fedgs.cohorts.cohort_file import selection_costs
from fedgs.config.fields import coerce_fields
from fedgs.config.plugins import CENTRAL
from fedgs.config.recipes import overridden
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.errors import UserError, wrap_error
from fedgs.files import REMEDY, read_json, read_json_lines, write_tensors
from fedgs.gan.models import Generator
from fedgs.privacy.accountant import (
    AS_PUBLISHED,
    CHANGES,
    SEEDED,
    Statement,
    large_delta,
)
from fedgs.privacy.gaussian import check_numbers
from fedgs.round.checkpoint import Report, Session, under
from fedgs.round.preparation import (
    check_device,
    free_output,
    resolve,
    with_absolute_paths,
    with_held_out,
)
from fedgs.round.run import RunStopped, Stop
from fedgs.runs.run_folder import (
    BASELINE,
    RunFolder,
    read_state,
    sealed,
    state_path,
    state_rounds,
)
from fedgs.shapes import TensorDict

# The noise is the method's own: of the settings that all runs share, none is added.
OF_CENTRAL = {
    "method": CENTRAL,
    "noise_multiplier": 0.0,
    "target_epsilon": "",
    "client_selection": "all",
    "clients_per_round": "",
}
RECORD = "record: one record (an image that the cap leaves, whose owner is fixed)"
COSTS = "private/costs.jsonl"  # what the ledger must not tell of each release
NUMBER = "the number of images is public"
CURATOR = "who runs it sees all images"


@dataclass(frozen=True, eq=False)
class BaselineRun:
    """A run of a baseline: its folder and what the folder says of the method.

    Attributes:
        name: that the method was asked for by: its own, or module:object.
        folder: the run folder.
        method: of this name.
        settings: of the method, with the noise set.
        facts: the public numbers of the data.
        target_epsilon: None where none was asked for.
    """

    name: str
    folder: RunFolder
    method: Baseline
    settings: Any
    facts: Facts
    target_epsilon: float | None

    @property
    def config(self) -> ResolvedConfig:
        """The run's resolved settings."""
        return self.folder.config

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

    @property
    def unit(self) -> str:
        """The unit of the valid guarantee: "none", "record" or "user"."""
        return unit_of(self.method, self.settings)

    @property
    def releases(self) -> Sequence[Release]:
        """What was released so far, from the ledger.

        Raises:
            UserError: the ledger is broken.
        """
        return self.folder.read_ledger(ReleaseLedger).events

    def num_units(self, unit: str) -> int:
        """Returns how many units a guarantee may be about; 0 of the unit "none"."""
        facts = self.facts
        records = max(facts.num_records, facts.num_clients)  # each client has one
        return {"user": facts.num_clients, "record": records}.get(unit, 0)

    def guarantees(
        self, delta: float | None = None, with_private: bool = False
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
        delta = self.config.delta if delta is None else delta
        check_numbers(delta=delta)
        releases = self.releases
        lines = read_json_lines(self.folder.path / COSTS) if with_private else []
        kept = {(line["step"], line["attempt"]): line for line in lines}
        events = [r.event | kept.get((r.step, r.attempt), {}) for r in releases]
        rows = self.method.guarantees(self.settings, self.facts, events, delta)
        is_seeded = any(release.noise_source == "seeded" for release in releases)
        shared = (*[f"noise: {SEEDED}"] * is_seeded, *self.config.public_conditions)
        if self.facts.num_records:  # in baseline.json, and in every sampling rate
            shared += (NUMBER,)
        return [
            dataclasses.replace(
                row,
                # A published figure is no claim, seeded or not.
                label=SEEDED if is_seeded and row.label != AS_PUBLISHED else row.label,
                conditions=(
                    *large_delta(row.delta, self.num_units(row.unit)),
                    f"adversary: sees what is published; {CURATOR} and is trusted",
                    f"relation: one {row.unit} {CHANGES[row.relation]}",
                    *(*shared, self._unit_condition(row.unit), *row.conditions),
                ),
                num_rounds=len(releases),
            )
            for row in rows
        ]

    def _unit_condition(self, unit: str) -> str:
        user = self.config.unit_condition.partition(": ")[2]
        return RECORD if unit == "record" else f"{unit}: {user}"


def unit_of(method: Baseline, settings: Any) -> str:
    """Returns the unit of what a method guarantees by these settings."""
    return getattr(settings, "unit", method.unit)


# ------------------------------------------------------------------ a new run


def new_run(
    name: str, settings: dict[str, Any], asked: Asked, given: dict[str, Any]
) -> tuple[BaselineRun, FederatedImages]:
    """Makes the folder of a run that can start, and loads its data.

    Args:
        name: of the method to train by, as the user typed it.
        settings: of the method, those that are not its defaults.
        asked: of the run.
        given: settings of `RunConfig` over the method's recipe; without `output` the
            folder is made in `runs/`.

    Raises:
        UserError: bad input, or a guarantee that the method cannot give; nothing was
            written.
    """
    method = find(name, is_typed=True)
    own = made_settings(method, settings)
    config = overridden(RunConfig(), dict(method.recipe) | given | OF_CENTRAL)
    config = with_held_out(config, given)
    check_run(method, config)
    config = free_output(config, method.name.replace(":", "-"))
    resolved, data = resolve(with_absolute_paths(config))
    check_device(resolved)
    data = capped(data, asked.max_images_per_user, resolved.seed)
    facts = facts_of(data, asked.max_images_per_user)
    if asked.target_epsilon is not None:
        own = method.calibrated(own, facts, asked.target_epsilon, resolved.delta)
    trainer = method.trainer(own, resolved, data, resolved.seed)  # may refuse
    resolved = dataclasses.replace(resolved, num_rounds=trainer.num_steps)
    content = {  # for `open_run`
        "name": name,
        "title": method.title,
        "settings": dataclasses.asdict(own),
        "facts": dataclasses.asdict(facts),
        "target_epsilon": asked.target_epsilon,
    }
    folder = RunFolder.create(resolved, content)
    return BaselineRun(name, folder, method, own, facts, asked.target_epsilon), data


def made_settings(method: Baseline, values: dict[str, Any]) -> Any:
    """Returns a method's settings, each of its own type and within its range.

    Raises:
        UserError: an unknown setting, or a value outside its range.
    """
    known = [spec.name for spec in dataclasses.fields(method.Settings)]
    if unknown := [name for name in values if name not in known]:
        raise UserError(f"{unknown[0]}: {method.name} has {', '.join(known)}")
    settings = method.Settings(**values)
    coerce_fields(settings)
    return settings


def check_run(method: Baseline, config: RunConfig) -> None:
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
        if (value := getattr(config, name)) != only:
            raise UserError(
                f"{name} = {value}: {title} is central, who runs it sees all images "
                "and is trusted; leave it out, or use `fedgs train`"
            )


def facts_of(data: FederatedImages, cap: int | None) -> Facts:
    """Returns the numbers of data, after its cap, that count as public.

    Privacy: publishes the number of records; it is kept in the run folder.
    """
    channels, side, _ = data.images.shape[1:]
    return Facts(
        num_clients=data.num_clients,
        num_records=int(data.sizes.sum()),
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
        data: of all clients.
        cap: at least 1; None keeps all.
        seed: decides which images stay.
    """
    if cap is None:
        return data

    def kept(records: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(records) <= cap:
            return records
        key = str(seed).encode()
        hashes = [
            hashlib.sha256(key + data.images[row].tobytes()).digest() for row in records
        ]
        order = sorted(range(len(records)), key=hashes.__getitem__)
        return records[np.sort(order[:cap])]

    records = tuple(kept(own) for own in data.client_records)
    return dataclasses.replace(data, client_records=records)


def open_run(path: str | Path, typed: str = "") -> BaselineRun:
    """Opens the folder of a baseline's run.

    Args:
        path: of the folder.
        typed: a method that the user named on the command line, and so trusts.

    Raises:
        UserError: no such folder, an unreadable one, or a method that is not trusted.
    """
    folder = RunFolder.open(path)
    if not folder.is_baseline:
        raise UserError(
            f"{path}: is no run of `fedgs baseline` ({BASELINE} is missing)"
        )
    content = read_json(folder.path / BASELINE)
    with wrap_error(Exception, f"{folder.path / BASELINE}: corrupted", REMEDY):
        method = find(content["name"], is_typed=content["name"] == typed)
        settings = made_settings(method, content["settings"])
        shape = tuple(content["facts"].pop("image_shape"))
        facts = Facts(**content["facts"], image_shape=shape)
        target = content["target_epsilon"]
    return BaselineRun(content["name"], folder, method, settings, facts, target)


def load_run_data(run: BaselineRun) -> FederatedImages:
    """Loads the data that a run trains on, after its cap.

    Raises:
        UserError: it is missing, or other data than the run was started with.
    """
    data = capped(load_data(run.config), run.facts.max_images_per_user, run.config.seed)
    if facts_of(data, run.facts.max_images_per_user) != run.facts:
        raise UserError(
            f"{run.folder.path}: its data has changed: {run.facts.num_records} images "
            f"of {run.facts.num_clients} clients were there; restore them"
        )
    return data


# ------------------------------------------------------------------ the training


def train(run: BaselineRun, data: FederatedImages, report: Report, stop: Stop) -> None:
    """Trains from the last checkpoint on, or from the start.

    Privacy: releases what the method's `guarantees` say; events: in the ledger.

    Args:
        run: with its folder.
        data: of the run, after the cap.
        report: called with the public metrics of each step.
        stop: when set, the run checkpoints after the current step and stops.

    Raises:
        RunStopped: the run ended early with a checkpoint.
        UserError: another process trains in this folder, or it is corrupted.
    """
    torch.set_num_threads(1)
    with run.folder.locked():
        trainer = run.method.trainer(run.settings, run.config, data, run.config.seed)
        with closing(run.folder.ledger(ReleaseLedger)) as ledger:
            BaselineSession(run, trainer, ledger, report).train(stop)


class BaselineSession(Session):
    """A training of a baseline under way: its steps are rounds.

    Attributes:
        done: steps that are taken.
    """

    def __init__(
        self, run: BaselineRun, trainer: Trainer, ledger: ReleaseLedger, report: Report
    ) -> None:
        """Goes on from the last checkpoint, if there is one.

        Args:
            run: with its folder.
            trainer: made, and at its start.
            ledger: of the folder, open.
            report: called with the public metrics of each step.
        """
        self.run, self.trainer, self.done = run, trainer, 0
        self.states = run.folder.private / "node-00000"
        super().__init__(run.folder, ledger, report)
        self._refuse_repeats()
        self._releases: list[Release] = []  # since the last commit
        self._costs: list[dict[str, Any]] = []
        self._metrics: list[dict[str, Any]] = []

    def train(self, stop: Stop) -> None:
        """Takes the steps that are left, and writes the product.

        Raises:
            RunStopped: as `train`.
        """
        last = self.trainer.num_steps
        for index in range(self.done, last):
            self.report(self.step(index))
            is_stopped = stop.is_set() and self.done < last
            if is_stopped or self.is_due or self.is_picture_due:
                self.commit()
            if is_stopped:
                raise RunStopped(f"stopped after step {self.done}")
        self.commit()
        self.save_generator()

    @property
    def round(self) -> int:
        """The steps that are taken."""
        return self.done

    @property
    def networks(self) -> tuple[Generator, Generator]:
        """What images are drawn from, twice."""
        return self.trainer.generator, self.trainer.generator

    def restore(self, round: int, tensors: TensorDict) -> None:
        """Puts the trainer into the state of a checkpoint and its private part."""
        state, path = under("trainer.", tensors), state_path(self.states, round)
        if path.exists():
            state |= read_state(path)[0]
        self.trainer.load(state)
        self.done = round

    def _refuse_repeats(self) -> None:
        """Refuses to spend twice where a target was promised.

        Raises:
            RunStopped: the generator of the last checkpoint is the product.
            UserError: there is none.
        """
        is_repeated = max(self.attempts, default=0) > self.done
        is_bounded = self.run.target_epsilon is not None
        if not (is_repeated and is_bounded):
            return
        problem = (
            f"{self.folder.path}: a crash lost step {self.done + 1} after its release "
            "was counted; repeating it would exceed target_epsilon = "
            f"{self.run.target_epsilon:g}"
        )
        if self.done == 0:
            raise UserError(f"{problem}; start anew with another --output")
        self.save_generator()
        raise RunStopped(f"{problem}; the generator of step {self.done} is written")

    def step(self, index: int) -> dict[str, Any]:
        """Takes a step and returns its public metrics; writes nothing."""
        started = time.monotonic()
        event = self.trainer.step(index)
        self.done = index + 1
        if event is not None:
            self._releases.append(self._release(self.done, event))
        metrics = {
            "round": self.done,
            "seconds": round(time.monotonic() - started, 4),
            "events": self.ledger.length + len(self._releases),
        }
        # A larger batch takes longer, and nobody may learn who was in it.
        if (event or {}).get("sampling_rate", 1) < 1:
            del metrics["seconds"]
        self._metrics.append(metrics)
        return metrics

    def _release(self, step: int, event: dict[str, Any]) -> Release:
        self.attempts[step] += 1
        attempt = self.attempts[step]
        if secret := {n: v for n, v in event.items() if n.startswith(SECRET)}:
            self._costs.append({"step": step, "attempt": attempt} | secret)
        return Release(
            method=self.run.method.name,
            step=step,
            attempt=attempt,
            noise_source="os" if self.config.noise_seed is None else "seeded",
            event={n: v for n, v in event.items() if n not in secret},
        )

    def tensors(self) -> TensorDict:
        """Writes the events since the last commit; returns what they paid for.

        What no release made public is written to the private folder.
        """
        for costs in self._costs:  # first: no line of the ledger is without its own
            self.folder.append_metrics(costs, COSTS)
        self.ledger.append(*self._releases)
        for metrics in self._metrics:
            self.folder.append_metrics(metrics)
        self._costs, self._releases, self._metrics = [], [], []
        state, average = self.trainer.state(), self.trainer.generator.state_dict()
        if secret := {n: v for n, v in state.items() if n.startswith(SECRET)}:
            write_tensors(state_path(self.states, self.done), sealed(secret, {}))
        tensors = {f"trainer.{n}": v for n, v in state.items() if n not in secret}
        # Copies: a file of tensors has none twice.
        return tensors | {f"ema.{n}": v.clone() for n, v in average.items()}

    def commit(self) -> None:
        """Commits, removes what the checkpoint before needed, draws what is due."""
        is_new = self.done > self.committed
        super().commit()
        for round in state_rounds(self.states):
            if round < self.done:
                state_path(self.states, round).unlink()
        if is_new and self.is_picture_due:
            self.write_picture()
