"""Training from a Python program: `train`, `load`, and the run that both return.

They use the same settings, checks, ledger and run folder as the command line, in the
calling process.
"""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedgs.config.fields import Scalar
from fedgs.config.recipes import DEFAULT, is_fitted, overridden
from fedgs.config.recipes import recipe as named_recipe
from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.config.settings import GIVEN
from fedgs.data.federated import FederatedImages
from fedgs.data.given import Column, read_given
from fedgs.data.load import federate, load_data
from fedgs.data.records import fit
from fedgs.errors import UserError
from fedgs.privacy.accountant import Statement
from fedgs.privacy.rounding import upper
from fedgs.privacy_label import privacy_label
from fedgs.round import local
from fedgs.round.preparation import (
    Load,
    fitted_to_data,
    new_run,
    with_held_out,
)
from fedgs.round.run import Report, RunStopped, Stop
from fedgs.runs import epsilons
from fedgs.runs.publication import publish
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import draw_samples, load_generator
from fedgs.runs.sample_files import Samples


def train(
    images: Any = None,
    labels: Column = None,
    clients: Column = None,
    *,
    recipe: str | RunConfig | None = None,
    progress: Report | None = None,
    stop: Stop | None = None,
    **settings: Scalar | Path | None,
) -> "TrainingRun":
    """Trains a private generator of images in this process.

    Privacy: releases (epsilon, delta)-DP output; events: in the ledger of the run
    folder. Image size, channels and the number of classes are taken from the images
    unless they are set, and become public.

    Args:
        images: an array or tensor (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or
            float in [0, 1], 0 = background; a torch Dataset of (image, label) or
            (image, label, client); or a `datasets.Dataset`. None where the setting
            `data` names a source.
        labels: shape (N,), integers from 0; or the name of a column. None means that
            there are no labels.
        clients: shape (N,), the owner of each image, integers or strings; or the name
            of a column. None means `num_clients` shards.
        recipe: the settings to start from, by name or as they are. None means the
            default recipe, which is fitted to the data, as in `fedgs train`.
        progress: called with the public metrics of each round, and within a long warm
            start or fit with `warm_start_step` or `fit_step` beside the last round.
        stop: when set, the run checkpoints after the current round, or step of a warm
            start or fit, and returns.
        **settings: any setting of `RunConfig`, which overrides the recipe's. The first
            ones to know are `target_epsilon` (10 in the recipes) or `noise_multiplier`,
            `num_rounds`, `output` (the run folder, in `runs/` when unset) and `seed`.

    Returns:
        The run, finished unless `stop` was set.

    Raises:
        UserError: bad input; nothing was written.
        RunStopped: too few clients answered; the run folder has a checkpoint.

    >>> import numpy as np, tempfile
    >>> rng = np.random.default_rng(0)
    >>> images = rng.integers(0, 256, (60, 16, 16), dtype=np.uint8)
    >>> labels, owners = np.arange(60) % 2, np.repeat(["ann", "bob", "eve"], 20)
    >>> run = train(images, labels, owners, target_epsilon=10.0, recipe="moments",
    ...             background="dark", output=tempfile.mkdtemp() + "/run")
    >>> run.sample(5, labels=1).images.shape, run.epsilon() <= 10
    ((5, 1, 16, 16), True)
    """
    config, load = planned(images, labels, clients, recipe=recipe, **settings)
    folder, data = new_run(config, load)
    return TrainingRun(folder, data).resume(progress=progress, stop=stop)


def planned(
    images: Any = None,
    labels: Column = None,
    clients: Column = None,
    *,
    recipe: str | RunConfig | None = None,
    **settings: Scalar | Path | None,
) -> tuple[RunConfig, Load]:
    """Returns the settings of a run, and what loads its data; see `train`.

    Privacy: reads private data where the recipe is fitted to them; writes nothing.

    Raises:
        UserError: bad input.
    """
    given: dict[str, Scalar | None] = {}
    for name, value in settings.items():
        if isinstance(value, np.generic):
            value = value.item()
        given[name] = str(value) if isinstance(value, Path) else value
    recipe = recipe or DEFAULT
    if isinstance(recipe, str):
        config = named_recipe(recipe)
    elif isinstance(recipe, RunConfig):
        config = recipe
    else:
        raise UserError(f"recipe = {recipe!r}: give the name of one, or a RunConfig")
    # Settings that are given as they are stay so: only a recipe is fitted to the data.
    is_open = isinstance(recipe, str) and is_fitted(config)
    load_images: Load = load_data
    if images is not None:
        config = overridden(config, {"data": GIVEN, **given})
        if config.data != GIVEN:
            raise UserError(
                f"data = {config.data!r}: images are given as well; leave out one of "
                "the two"
            )
        load_images = _reader(config, images, labels, clients)
    else:
        _check_alone(labels, clients)
    config = overridden(config, given)
    _check_engine(config, "fedgs train")
    if isinstance(recipe, str):
        config = with_held_out(config, given)
    if is_open:
        config, data = fitted_to_data(config, given, load_images)
        return config, lambda config: data  # they have been read for the fit
    return config, load_images


def _check_alone(labels: Column, clients: Column) -> None:
    """Refuses labels or owners of images that were not given."""
    if labels is not None or clients is not None:
        raise UserError(
            "images is unset: labels or clients are given; give the images that they "
            "belong to, or data alone"
        )


def load(folder: str | Path) -> "TrainingRun":
    """Opens the folder of a run of any engine.

    Raises:
        UserError: no run folder, of another format version, or unreadable.
    """
    return TrainingRun(RunFolder.open(folder_of(folder)))


def folder_of(run: object) -> Path:
    """Returns the place of a run that a program names.

    Raises:
        UserError: it is no path.
    """
    if not isinstance(run, str | Path):
        raise UserError(f"run = {run!r}: give the path of a run folder")
    return Path(run)


class TrainingRun:
    """A run: its folder, and in the process that started it its data.

    Privacy: what it returns is DP output or public; it holds private images.

    Attributes:
        folder: the run folder.
    """

    def __init__(self, folder: RunFolder, data: FederatedImages | None = None) -> None:
        """Is called by `train` and `load`."""
        self.folder = folder
        self._data = data

    def __repr__(self) -> str:
        """Says where it is, what was trained on how many clients, and epsilon."""
        try:
            label = privacy_label(self.path)
            config = self.config
        except UserError as error:  # a published folder, or a broken one
            return str(error)
        method = config.methods
        if self.folder.is_baseline:
            method = label["mechanism"][0]
        epsilon = label["guarantee"]
        if label["epsilon"] is not None:
            # An epsilon says nothing without its adversary, relation, delta and unit.
            terms = (
                f"{label['adversary']}, {label['relation']}, "
                f"delta {upper(config.delta, 6)}, unit: {label['unit_of_privacy']}"
            )
            epsilon = f"epsilon {upper(label['epsilon'])} ({terms})"
            for condition in config.public_conditions:
                epsilon += f"; {condition}"
        return (
            f"{self.path}: {method}, {config.num_clients} clients, round "
            f"{self.folder.last_round} of {config.num_rounds}, {epsilon}"
        )

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def config(self) -> ResolvedConfig:
        """The run's resolved settings."""
        return self.folder.config

    @property
    def is_finished(self) -> bool:
        """Whether the generator is written."""
        return self.folder.is_finished

    @property
    def generator(self) -> nn.Module:
        """The averaged generator: (z, labels) -> images (B, C, S, S) in [0, 1].

        Privacy: post-processing of DP output.

        Raises:
            UserError: the run has no generator yet.
        """
        return load_generator(self.folder)

    def sample(
        self,
        count: int,
        labels: int | Sequence[int] | None = None,
        seed: int = 0,
    ) -> Samples:
        """Draws images; see `draw_samples`. Another seed draws other images."""
        return draw_samples(self.folder, count, labels, seed)

    def publish(self, folder: str | Path, count: int = 1000) -> None:
        """Writes what may go out into a new folder; see `fedgs.runs.publication`."""
        publish(self.folder, folder, privacy_label(self.path), count)

    def statements(self, delta: float | None = None) -> list[Statement]:
        """Returns every epsilon of what was released so far, with its conditions.

        Args:
            delta: above 0 and below 1; the run's own when None.

        Raises:
            UserError: delta is out of range, or the ledger is broken.
        """
        return epsilons.of_run(self.path, delta)

    def epsilon(
        self,
        adversary: str | None = None,
        relation: str | None = None,
        delta: float | None = None,
    ) -> float:
        """Returns the least epsilon that is guaranteed; inf where nothing is.

        Arguments that are None are those of the run's own target.

        Args:
            adversary: "release", or with the Flower engine "server" or "secagg", and
                "unmasked" of a run with secure aggregation.
            relation: "replace-one" or "zero-out".
            delta: above 0 and below 1.

        Raises:
            UserError: the run has no such adversary or relation.
        """
        wanted = (adversary or self.config.adversary, relation or self.config.relation)
        known: dict[tuple[str, str], list[float]] = {}
        for row in self.statements(delta):
            guaranteed = known.setdefault((row.adversary, row.relation), [])
            if row.guarantee and row.epsilon is not None:
                guaranteed.append(row.epsilon)
        if wanted not in known:
            stated = "; ".join(", ".join(pair) for pair in known)
            raise UserError(
                f"adversary, relation = {', '.join(wanted)}: this run has no such "
                f"epsilon; ask for one of {stated}"
            )
        return min(known[wanted], default=math.inf)

    def resume(
        self,
        images: Any = None,
        labels: Column = None,
        clients: Column = None,
        *,
        progress: Report | None = None,
        stop: Stop | None = None,
    ) -> "TrainingRun":
        """Trains from the last checkpoint on; a finished run stays as it is.

        Privacy: as `train`.

        Args:
            images: the same as at the start, where they were given and another process
                goes on; as are `labels` and `clients`.
            labels: see `train`.
            clients: see `train`.
            progress: see `train`.
            stop: see `train`.

        Raises:
            UserError: other data, a run of Flower, or a broken run folder.
            RunStopped: too few clients answered; the run folder has a checkpoint.
        """
        if self.is_finished:
            return self
        self.folder.check_unpublished()
        _check_engine(self.config, self.folder.go_on)
        if images is not None:
            self._data = _reader(self.config, images, labels, clients)(self.config)
        else:
            _check_alone(labels, clients)
        if self._data is None:
            self._data = load_data(self.config)
        report = progress or (lambda metrics: None)
        stop = stop or threading.Event()
        num_threads = torch.get_num_threads()
        try:
            local.train(self.folder, self._data, report, stop)
        except RunStopped:
            # A run whose budget is spent, or that was told to stop, ended as planned.
            is_planned = self.is_finished or stop.is_set()
            if not is_planned:
                raise
        finally:
            # The local engine sets one thread; the caller's program had its own number.
            torch.set_num_threads(num_threads)
        return self


# ------------------------------------------------------------------ what was given


def _reader(config: RunConfig, images: Any, labels: Column, clients: Column) -> Load:
    """Returns what fits given images to a run, and splits them into its clients."""
    records = read_given(config, images, labels, clients)
    return lambda config: federate(config, fit(config, records))


def _check_engine(config: RunConfig, command: str) -> None:
    if config.engine != "local":
        raise UserError(
            f"engine = {config.engine}: a program trains in its own process; give "
            f"engine='local', or use `{command}`"
        )
