"""What a method of the baselines has to have; the frame does everything else.

A method is one file with one object that satisfies `Baseline`, and one line in
`experiments.baselines.METHODS`. The frame (`baselines.frame`) makes the run folder,
keeps ledger and checkpoints, resumes, and prints what `guarantees` says.

Rules that the contract test checks, or that reviewers do:

- Private noise comes from `fedgs.mechanism.noise.NoiseStream(config.noise_seed, node,
  step)`, a stream for each release. Everything else comes from
  `fedgs.randomness.stream(seed, purpose, step)`, so a resumed training goes on with the
  same bits and no generator's state is stored.
- `step` computes and returns. It writes nothing, prints nothing: what it learned stays
  in the process until the frame has written the event it returned.
- A guarantee that the settings cannot give is a `UserError` of `calibrated` or
  `guarantees`, with the reason and what to use instead.
- Settings that RunConfig has too, such as the width of the generator or the latent, are
  read from `config`; `recipe` has the method's own values of those, which become flags.

Optional, found by name:

- `Settings` may have a property `unit` ("none", "record", "user"), where it depends on
  the settings. It replaces that of the method.
- `audit_scores(settings, facts, event, relation, trials) -> (outside, inside)`: runs
  the release of one event of the ledger so often with a worst-case unit that takes part
  (inside) and with its neighbour under the relation (outside), by the code of the
  training and with fresh noise, and returns the scores of the best test, float64 arrays
  of shape (trials,), or shorter where a trial takes long. `fedgs audit` turns them into
  a lower bound and compares it with the first valid line of
  `guarantees(settings, facts, [event], delta)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedgs.config.fields import Scalar
from fedgs.config.run_config import NetworkConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.models import Generator
from fedgs.privacy.accountant import Statement
from fedgs.shapes import TensorDict

SECRET = "secret."  # begins the names of tensors and numbers that stay private
RELATIONS = ("add-or-remove", "zero-out", "replace-one")

# Scores of an audit's trials, without the attacked unit and with it.
AuditScores = tuple[NDArray[np.float64], NDArray[np.float64]]
Event = Mapping[str, Any]  # what one step released, as plain JSON values


@dataclass(frozen=True)
class Facts:
    """The numbers of a run that count as public; nothing else of the data may.

    Attributes:
        num_clients: K, users of user level.
        num_records: n, training images after the cap; public by decision, because
            sampling rates and sensitivities are made of it. 0 in a deployment, whose
            server does not learn it.
        max_images_per_user: no client has more images, images over this cap were
            dropped; None where no cap was asked for: then a record-level epsilon says
            nothing of users.
        num_classes: labels, at least 1.
        image_shape: (C, S, S).
    """

    num_clients: int
    num_records: int
    max_images_per_user: int | None
    num_classes: int
    image_shape: tuple[int, int, int]


class Trainer(Protocol):
    """A training under way; deterministic given the run's seed, except private noise.

    Attributes:
        num_steps: outer steps. The frame may checkpoint and resume between any two, so
            a step should take under a few seconds: one event may stand for many
            updates, or none.
    """

    num_steps: int

    @property
    def generator(self) -> Generator:
        """What `fedgs sample` draws from, the average where the method keeps one.

        (z, labels) -> images in [0, 1]; built by `build_generator(config, seed)`, so
        that the run folder can be read without the method.
        """
        ...

    def step(self, index: int) -> dict[str, Any] | None:
        """Takes outer step `index`, 0 to num_steps - 1.

        Returns:
            The ledger's event: plain JSON values of all that decides what the step's
            release costs (kind, noise_std or noise_per_clip, clip bound, sampling
            rate, count, ...). None if nothing that depends on private data was made;
            a step that makes it without noise says so in an event too. A value that
            tells of private data has a name that begins with `SECRET`: the frame keeps
            it in the run's private folder and out of the ledger.
        """
        ...

    def state(self) -> TensorDict:
        """Returns everything that a resumed training needs, as tensors.

        The checkpoint is passed on with the run folder. What no release made public,
        such as networks trained on images without noise, has a name that begins with
        `SECRET`: the frame keeps it in the run's private folder.
        """
        ...

    def load(self, state: TensorDict) -> None:
        """Goes on from what `state` returned; the next step's index tells the rest."""
        ...


class Baseline(Protocol):
    """One method.

    Attributes:
        name: as on the command line.
        title: a line for tables.
        unit: of its valid guarantee by its default settings: "none", "record", "user".
        Settings: frozen dataclass; its fields are made by `fedgs.config.fields.flag`
            and become command-line flags. The frame coerces and range-checks them.
        recipe: settings of RunConfig that the method starts from (the generator, its
            width, the latent, ema_decay, ...); flags win over them.
    """

    name: str
    title: str
    unit: str
    Settings: type
    recipe: Mapping[str, Scalar]

    def calibrated(
        self, settings: Any, facts: Facts, target_epsilon: float, delta: float
    ) -> Any:
        """Returns settings whose noise meets the epsilon of its own unit and relation.

        Raises:
            UserError: the method cannot give it; with the reason and what to use.
        """
        ...

    def guarantees(
        self, settings: Any, facts: Facts, events: Sequence[Event], delta: float
    ) -> list[Statement]:
        """Returns what was released so far, by all events in their order.

        Published call and valid computation. The target's own line, label "valid" in
        the method's unit, comes first. Empty for a method that guarantees nothing.
        Lines that need values of `SECRET` are left out where the events lack them.

        A method of users states nothing of a record: some partitions give a client a
        record because of what the others have.
        """
        ...

    def trainer(
        self, settings: Any, config: NetworkConfig, data: FederatedImages, seed: int
    ) -> Trainer:
        """Starts a training.

        Args:
            settings: with the noise set.
            config: data, image shape, classes, generator, device, noise_seed, seed.
            data: federated data by client, after the cap.
            seed: of everything but noise.
        """
        ...
