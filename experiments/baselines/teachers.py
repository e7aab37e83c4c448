"""What the PATE methods share: stacked teachers on disjoint data, and their student.

Every client is a teacher: a network that sees its images only. So a client's whole data
set decides one vote of each query, and the epsilon of votes is an epsilon of users.

Teachers are a `ModuleStack`, as discriminators are, and trained like them: one batched
call trains or asks a chunk of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

from experiments.baselines.baseline import SECRET, Baseline, descend
from fedgs.config.fields import Scalar, entry, flag
from fedgs.config.run_config import NetworkConfig
from fedgs.gan.client_training import Draws, train_discriminators
from fedgs.gan.discriminators import ModuleStack
from fedgs.gan.models import advance_in_place
from fedgs.privacy.accountant import Statement
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import Images, Labels, Positions

TRUSTED = "the raw votes are seen by a trusted aggregator only"
REVEALING = (
    "neither the ledger is published, which reveals sums of votes without noise, nor "
    "the figures that are computed from them"
)
_ADAM_BETAS = (0.5, 0.999)  # of Adam, for all networks; the references'
# Settings of the run that both methods start from.
PATE_RECIPE: dict[str, Scalar] = {
    "generator": "upsample",
    "generator_dim": 16,
    "latent": "uniform",
    "latent_dim": 100,
}
_MOST_NOISE = 30_000_000  # numbers of an audit, for each of its two arrays


@dataclass(frozen=True)
class TeacherSettings:
    """What both methods are asked for.

    Raises:
        UserError: a value outside its range.
    """

    steps: int = flag(100, "Number of steps of the generator.", at_least=1)
    teacher_steps: int = entry(1, at_least=1)  # of each teacher per step
    teacher_batch_size: int = entry(64, at_least=1)  # its real and fake images
    fakes_per_step: int = entry(256, at_least=1)  # that teachers learn from
    learning_rate: float = entry(1e-3, above=0)  # of Adam, for all networks
    batch_size: int = flag(
        64,
        "Number of fake images that teachers vote on in a step (B).",
        at_least=1,
    )
    reveal_votes: bool = flag(
        False,
        "Write the accountant's sums, computed as published, into the ledger. They "
        "depend on the votes, so the run folder is then private.",
    )


AnyTeacherSettings = TypeVar("AnyTeacherSettings", bound=TeacherSettings)


def valid_guarantees(
    replaced: float,
    left_out: float,
    delta: float,
    theorem: str,
    is_revealed: bool,
) -> list[Statement]:
    """Returns the valid lines of votes, with what they suppose.

    Args:
        replaced: epsilon where one teacher's votes are replaced.
        left_out: epsilon where they are left out.
        delta: the delta of both.
        theorem: how they were computed.
        is_revealed: the ledger tells of the votes.
    """
    conditions = [TRUSTED]
    if is_revealed:
        conditions.append(REVEALING)
    first = Statement(
        label="valid",
        unit="user",
        relation="replace-one",
        epsilon=replaced,
        delta=delta,
        theorem=theorem,
        conditions=tuple(conditions),
    )
    second = replace(
        first,
        relation="zero-out",
        epsilon=left_out,
        theorem=f"{theorem}; the user's teacher casts no vote",
    )
    return [first, second]


def trial_scores(
    trials: int,
    numbers: int,
    score: Callable[[], float],
) -> npt.NDArray[np.float64]:
    """Returns the scores of an audit's trials, fewer where one draws much noise.

    Args:
        trials: asked for.
        numbers: how many numbers of noise one trial draws.
        score: the score of one trial.

    >>> len(trial_scores(10**6, 10_000, float))
    3000
    """
    affordable = max(1, _MOST_NOISE // numbers)
    count = min(trials, affordable)
    scores = [score() for _ in range(count)]
    return np.array(scores, np.float64)


class Teachers(ModuleStack):
    """Networks on disjoint data, each trained against the same public fakes.

    Privacy: trained on private data; everything in here is private.
    """

    def train(self, indices: Positions, *batches: Tensor) -> None:
        """Takes one step with each listed teacher, as `Discriminators.train`.

        Privacy: reads private data; output private.
        """
        self.step(_loss, indices, *batches[:-1])  # nothing is mixed


def _loss(
    teacher: Any,
    real: Images,
    real_labels: Labels,
    fake: Images,
    fake_labels: Labels,
) -> Tensor:
    on_real = teacher(real, real_labels)
    on_fake = teacher(fake, fake_labels)
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()


class PateBaseline(Baseline[AnyTeacherSettings]):
    """What both methods are.

    Attributes:
        teachers: what votes.
        build_teacher: builds a teacher from the settings and its own seed.
    """

    build_teacher: Callable[[NetworkConfig, int], nn.Module]

    def build(self) -> None:
        """Builds teachers, each by `build_teacher`."""
        config = self.config
        settings = self.settings
        self.num_steps = settings.steps

        def build_teacher(number: int) -> nn.Module:
            # A seed for each: teachers that begin alike would vote alike.
            seed = derived_seed(self.seed, "teacher", number)
            return self.build_teacher(config, seed)

        self.teachers = Teachers(
            build_teacher,
            self.data.num_clients,
            settings.learning_rate,
            _ADAM_BETAS,
            config.stacked,
            config.device,
        )
        self.adam = self.new_adam(self.net)
        self.parts |= {"adam": self.adam, f"{SECRET}teachers": self.teachers}

    def new_adam(self, network: nn.Module) -> Adam:
        """Returns the optimizer of one network."""
        return Adam(network.parameters(), self.settings.learning_rate, _ADAM_BETAS)

    def train_teachers(self, index: int) -> None:
        """Takes the teachers' steps of one step of the generator.

        Privacy: reads private data; output private.
        """
        steps = self.settings.teacher_steps
        first = index * steps
        for step in range(first, first + steps):
            rng = stream(self.seed, "fakes", step)
            images, labels = self.fakes(rng, self.settings.fakes_per_step)
            self.teach(images, labels, step)

    def teach(self, images: Images, labels: Labels, index: int) -> None:
        """Takes one step with each teacher: own records against fakes of their labels.

        Privacy: reads private data; output private.

        Args:
            images: fakes (F, C, S, S) for all teachers.
            labels: (F,).
            index: the index of the step; no two steps of a run share one.
        """
        # Teachers are trained as clients train discriminators, one step at a time.
        config = replace(
            self.config,
            discriminator_steps=1,
            discriminator_batch_size=self.settings.teacher_batch_size,
        )
        teachers: Any = self.teachers
        # Real images of the fakes' labels, so that no label tells the two apart.
        own_labels = labels.cpu().numpy()
        for chunk in teachers.chunks(range(len(teachers))):
            owners = [self.data.of(client) for client in chunk.tolist()]
            draws = Draws(config, owners, "teacher-batch", index, own_labels)
            train_discriminators(config, teachers, chunk, draws, images, labels)

    def ask(
        self,
        function: Callable[..., Tensor],
        images: Images,
        labels: Labels,
    ) -> Iterator[Tensor]:
        """Yields function(teacher, images, labels) of chunks of teachers.

        Privacy: reads private data; output private.
        """
        for chunk in self.teachers.chunks(range(len(self.teachers))):
            yield self.teachers.ask(function, chunk, images, labels)

    def move_generator(self, loss: Tensor) -> None:
        """Takes one step of the generator; its spectral norms follow the weights."""
        descend(self.adam, loss)
        # Once a step, whatever was drawn in between: a resumed run has the same ones.
        advance_in_place(self.net)
