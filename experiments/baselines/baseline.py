"""What a central method is: one class, whose objects are its trainings.

A method is one file with one subclass of `Baseline`, and one line in
`experiments.baselines.BASELINES`. The class says what a run guarantees; an object of it
trains. `experiments.baselines.loop` takes its steps, keeps ledger and checkpoints, and
resumes; `experiments.baselines.baseline_run` makes and reads the run folder.

Rules that the contract test checks, or that reviewers do:

- Private noise comes from `fedgs.mechanism.noise.NoiseStream(config.noise_seed, node,
  step)`, a stream for each release. Everything else comes from
  `fedgs.randomness.stream(seed, purpose, step)`, so a resumed training goes on with the
  same bits and no generator's state is stored.
- `step` computes and returns. It writes nothing and prints nothing: what it learned
  stays in the process until the loop has written the event that it returned.
- A guarantee that the settings cannot give is a `UserError` of `calibrated` or
  `guarantees`, with the reason and what to use instead.
- Settings that `RunConfig` has too, such as the width of the generator or the latent,
  are read from `config`; `recipe` has the method's own values of those.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from fedgs.config.fields import Scalar
from fedgs.config.run_config import NetworkConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.models import Generator, build_generator, sample_labels, sample_latents
from fedgs.privacy.accountant import Statement
from fedgs.randomness import derived_seed
from fedgs.round.checkpoint import load_tensors, tensors_of
from fedgs.shapes import Images, Labels, Latents, TensorDict

SECRET = "secret."  # begins the names of tensors and numbers that stay private

# Scores of an audit's trials, without the attacked unit and with it.
AuditScores = tuple[NDArray[np.float64], NDArray[np.float64]]
StepEvent = Mapping[str, Any]  # what one step released, as plain JSON values
AnySettings = TypeVar("AnySettings")


@dataclass(frozen=True)
class Facts:
    """The numbers of a run that count as public; nothing else of the data may.

    Attributes:
        num_clients: K, users of user level.
        num_records: n, training images after the cap; public by decision, because
            sampling rates and sensitivities are made of it.
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


class Baseline(Generic[AnySettings]):
    """A method, and a training by it; deterministic but for private noise.

    Privacy: reads private data; which of its parts are private their names say.

    Attributes:
        name: as on the command line.
        title: a line for tables.
        unit: the unit of its valid guarantee: "none", "record" or "user".
        Settings: frozen dataclass; its fields are made by `fedgs.config.fields.flag`
            and become command-line flags, coerced and checked against their ranges.
        recipe: settings of `RunConfig` that the method starts from (the generator, its
            width, the latent, ema_decay, ...); flags win over them.
        num_steps: outer steps, set by `build`. The loop may checkpoint and resume
            between any two, so a step should take under a few seconds: one event may
            stand for many updates, or none.
        net: the generator that is trained.
        parts: networks, stacks of networks and optimizers, by what the names of their
            tensors begin with. Images are drawn from the "average", if there is one.
            What no release made public, such as networks trained on images without
            noise, has a name that begins with `SECRET`: its tensors are kept in the
            run's private folder, because the checkpoint is passed on with the run.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str]
    Settings: ClassVar[type]
    recipe: ClassVar[Mapping[str, Scalar]]
    num_steps: int

    def __init__(
        self,
        settings: AnySettings,
        config: NetworkConfig,
        data: FederatedImages,
    ) -> None:
        """Builds the generator, and by `build` the rest.

        Args:
            settings: the settings of the method, with the noise set.
            config: data, image shape, classes, generator, device, noise_seed, and the
                seed of everything but noise.
            data: federated data by client, after the cap.
        """
        self.settings = settings
        self.config = config
        self.data = data
        self.seed = config.seed
        self.net = self.new_generator()
        # Checkpoints are made of these, so that no method writes or reads any.
        self.parts: dict[str, Any] = {"generator": self.net}
        self.build()

    # -------------------------------------------------------------- what it costs

    @classmethod
    def calibrated(
        cls,
        settings: Any,
        facts: Facts,
        target_epsilon: float,
        delta: float,
    ) -> Any:
        """Returns settings whose noise meets the epsilon of its own unit and relation.

        Raises:
            UserError: the method cannot give it; with the reason and what to use.
        """
        raise NotImplementedError

    @classmethod
    def guarantees(
        cls,
        settings: Any,
        facts: Facts,
        events: Sequence[StepEvent],
        delta: float,
    ) -> list[Statement]:
        """Returns what was released so far, by all events in their order.

        Published call and valid computation. The target's own line, label "valid" in
        the method's unit, comes first. Empty for a method that guarantees nothing.
        Lines that need values of `SECRET` are left out where the events lack them.

        A method of users states nothing of a record: some partitions give a client a
        record because of what the others have.
        """
        raise NotImplementedError

    @classmethod
    def audit_scores(
        cls,
        settings: Any,
        facts: Facts,
        event: StepEvent,
        relation: str,
        trials: int,
    ) -> AuditScores | None:
        """Attacks one release; None where nobody has written an attack yet.

        It runs the release of one event with a worst-case unit that takes part
        (inside) and with its neighbour under the relation (outside), by the code of the
        training and with fresh noise. `fedgs audit` turns the scores into a lower bound
        and compares it with the first valid line of `guarantees` of that event.

        Returns:
            The scores (outside, inside) of the best test, float64, each of shape
            (trials,), or shorter where a trial takes long.
        """
        return None

    # -------------------------------------------------------------- the training

    def build(self) -> None:
        """Sets `num_steps` and adds the method's own parts."""
        raise NotImplementedError

    def step(self, index: int) -> dict[str, Any] | None:
        """Takes outer step `index`, 0 to num_steps - 1.

        Returns:
            The ledger's event: plain JSON values of all that decides what the step's
            release costs (kind, noise_std or noise_per_clip, clip bound, sampling
            rate, count, ...). None if nothing that depends on private data was made;
            a step that makes it without noise says so in an event too. A value that
            tells of private data has a name that begins with `SECRET`: it is kept in
            the run's private folder and out of the ledger.
        """
        raise NotImplementedError

    def new_generator(self) -> Generator:
        """Returns a generator as it is before the first step."""
        seed = derived_seed(self.seed, "generator")
        return build_generator(self.config, seed).to(self.config.device)

    @property
    def generator(self) -> Generator:
        """What `fedgs sample` draws from: (z, labels) -> images in [0, 1]."""
        return self.parts.get("average", self.net)

    def latents(self, rng: np.random.Generator, count: int) -> tuple[Latents, Labels]:
        """Draws latents and uniform labels.

        Privacy: public.
        """
        z = sample_latents(self.config, rng, count)
        labels = sample_labels(self.config, rng, count)
        return z.to(self.config.device), labels.to(self.config.device)

    @torch.no_grad()
    def fakes(self, rng: np.random.Generator, count: int) -> tuple[Images, Labels]:
        """Draws images and their labels, without a graph.

        Privacy: post-processing of DP output, where the generator is.
        """
        z, labels = self.latents(rng, count)
        return self.net(z, labels), labels

    def state(self) -> TensorDict:
        """Returns the tensors of all parts, under "<part>.<name>"."""
        return tensors_of(self.parts)

    def load(self, state: TensorDict) -> None:
        """Goes on from what `state` returned; the next step's index tells the rest."""
        load_tensors(self.parts, state)


def descend(optimizer: Optimizer, loss: Tensor) -> None:
    """Takes one step against the gradient of a loss."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
