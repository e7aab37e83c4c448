"""What the PATE methods share: stacked teachers on disjoint data, and their student.

Every client is a teacher: a network that sees its images only. So a client's whole data
set decides one vote of each query, and the epsilon of votes is an epsilon of users.

Teachers are the discriminators' `ModuleStack`: one batched call trains or asks a chunk
of them. A student, or the generator, is a stack of one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgs.baselines.contract import SECRET, Guarantee
from fedgs.config.fields import entry, flag
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.federation.checkpoint import under
from fedgs.gan.client_training import draw_matching
from fedgs.gan.discriminators import ModuleStack
from fedgs.gan.models import Generator, build_generator, sample_labels, sample_latents
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import Images, Labels, Latents, TensorDict

TRUSTED = "the raw votes are seen by a trusted aggregator only"
REVEALING = (
    "neither the ledger is published, which reveals sums of votes without noise, nor "
    "the figures that are computed from them"
)
BETAS = (0.5, 0.999)  # of Adam, for all networks; the references'
MOST_NOISE = 30_000_000  # numbers of an audit, for each of its two arrays
FIRST = torch.zeros(1, dtype=torch.int64)  # the position of a stack's only module


@dataclass(frozen=True)
class TeacherSettings:
    """What both methods are asked for.

    Raises:
        UserError: a value outside its range.
    """

    steps: int = flag(100, "Steps of the generator.", at_least=1)
    teacher_steps: int = entry(1, at_least=1)  # of each teacher per step
    teacher_batch_size: int = entry(64, at_least=1)  # its real and fake images
    fakes_per_step: int = entry(256, at_least=1)  # that teachers learn from
    learning_rate: float = entry(1e-3, above=0)  # of Adam, for all networks
    batch_size: int = flag(64, "B, fakes that teachers vote on.", at_least=1)
    reveal_votes: bool = flag(
        False,
        "Write the accountant's sums as published into the ledger. They read the "
        "votes: the run folder is private then.",
    )


AnySettings = TypeVar("AnySettings", bound=TeacherSettings)


def valid_guarantees(
    epsilons: tuple[float, float], delta: float, theorem: str, is_revealed: bool
) -> list[Guarantee]:
    """Returns the valid lines of votes, with what they suppose.

    Args:
        epsilons: where one teacher's votes are replaced, and where they are left out.
        delta: of both.
        theorem: how they were computed.
        is_revealed: the ledger tells of the votes.
    """
    replaced, left_out = epsilons
    why = f"{theorem}; the user's teacher casts no vote"
    found = [("replace-one", replaced, theorem), ("zero-out", left_out, why)]
    conditions = (TRUSTED, REVEALING) if is_revealed else (TRUSTED,)
    return [
        Guarantee("valid", "user", relation, epsilon, delta, how, conditions)
        for relation, epsilon, how in found
    ]


def trial_scores(
    trials: int, numbers: int, score: Callable[[], float]
) -> npt.NDArray[np.float64]:
    """Returns the scores of an audit's trials, fewer where one draws much noise.

    Args:
        trials: asked for.
        numbers: of noise that one trial draws.
        score: of one trial.

    >>> len(trial_scores(10**6, 10_000, float))
    3000
    """
    count = min(trials, max(1, MOST_NOISE // numbers))
    return np.array([score() for _ in range(count)], np.float64)


class Teachers:
    """Networks on disjoint data, each trained against the same public fakes.

    Privacy: trained on private data; everything in here is private.

    Attributes:
        stack: the networks with their Adam state.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        training: TeacherSettings,
        data: FederatedImages,
        build: Callable[[ResolvedConfig, int], nn.Module],
        seed: int,
    ) -> None:
        """Builds the teacher of each client by `build(config, its seed)`."""
        self.config, self.training = config, training
        self.data, self.seed = data, seed
        self.stack = ModuleStack(
            lambda teacher: build(config, derived_seed(seed, "teacher", teacher)),
            data.num_clients,
            training.learning_rate,
            BETAS,
            config.stacked,
            config.device,
        )

    def train(self, images: Images, labels: Labels, index: int) -> None:
        """Takes one step with each teacher: own records against fakes of their labels.

        Privacy: reads private data; output private.

        Args:
            images: fakes (F, C, S, S) for all teachers.
            labels: (F,).
            index: of the step; no two steps of a run share one.
        """
        wanted = labels.cpu().numpy()
        for chunk in self.stack.chunks(range(len(self.stack))):
            records, fakes = [], []
            for teacher in chunk.tolist():
                rng = stream(self.seed, "teacher-batch", teacher, index)
                own = self.data.client_records[teacher]
                size = self.training.teacher_batch_size
                records.append(own[rng.integers(len(own), size=size)])
                drawn = self.data.labels[records[-1]]
                fakes.append(draw_matching(rng, drawn, wanted))
            rows = np.stack(records)
            real = torch.from_numpy(self.data.images[rows]).to(images.device)
            positions = torch.from_numpy(np.stack(fakes)).to(images.device)
            self.stack.step(
                _loss,
                chunk,
                real.float().div_(255.0),
                torch.from_numpy(self.data.labels[rows]).to(images.device),
                images[positions],
                labels[positions],
            )

    def ask(
        self, function: Callable[..., Tensor], images: Images, labels: Labels
    ) -> Iterator[Tensor]:
        """Yields function(teacher, images, labels) of chunks of teachers.

        Privacy: reads private data; output private.
        """
        for chunk in self.stack.chunks(range(len(self.stack))):
            yield self.stack.ask(function, chunk, images, labels)


def _loss(
    teacher: Any, real: Images, real_labels: Labels, fake: Images, fake_labels: Labels
) -> Tensor:
    on_real, on_fake = teacher(real, real_labels), teacher(fake, fake_labels)
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()


class Single:
    """One network with its Adam state, trained by pure functions of its tensors.

    Attributes:
        stack: a stack of one.
    """

    def __init__(
        self, build: Callable[[], nn.Module], learning_rate: float, device: str
    ) -> None:
        """Builds the network."""
        how = (learning_rate, BETAS, False, device)
        self.stack = ModuleStack(lambda _: build(), 1, *how)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Returns the network's output, without a graph."""
        with torch.no_grad():
            return self.stack.network(self.tensors(), {})(*inputs)

    def step(self, loss: Callable[..., Tensor], *batch: Tensor) -> None:
        """Takes one Adam step on loss(network, *batch), `network` a function."""
        self.stack.step(loss, FIRST, *(value.unsqueeze(0) for value in batch))

    def tensors(self) -> TensorDict:
        """Returns parameters and buffers by name."""
        groups = (self.stack.params, self.stack.buffers)
        return {name: value[0] for group in groups for name, value in group.items()}


class Student(Single):
    """The generator under way, and what it draws in each step."""

    def __init__(
        self, config: ResolvedConfig, training: TeacherSettings, seed: int
    ) -> None:
        """Builds the generator of the configuration."""
        self.config, self.seed = config, seed
        super().__init__(
            lambda: build_generator(config, derived_seed(seed, "generator")),
            training.learning_rate,
            config.device,
        )

    def draw(self, purpose: str, index: int, count: int) -> tuple[Latents, Labels]:
        """Draws latents and uniform labels of one purpose.

        Privacy: public.
        """
        rng = stream(self.seed, purpose, index)
        z = sample_latents(self.config, rng, count)
        labels = sample_labels(self.config, rng, count)
        return z.to(self.config.device), labels.to(self.config.device)

    @property
    def generator(self) -> Generator:
        """The network as it is, as a module of its own."""
        module = build_generator(self.config, derived_seed(self.seed, "generator"))
        module.load_state_dict({n: v.clone() for n, v in self.tensors().items()})
        return module.to(self.config.device)


class VoteTraining(Generic[AnySettings]):
    """A training under way; see `fedgs.baselines.contract.Trainer`.

    Attributes:
        teachers: what votes.
        generated: the generator under way.
        stacks: all that is trained, by the name of its tensors in `state`.
        build_teacher: builds a teacher from the settings and its own seed.
    """

    build_teacher: Callable[[ResolvedConfig, int], nn.Module]

    def __init__(
        self,
        settings: AnySettings,
        config: ResolvedConfig,
        data: FederatedImages,
        seed: int,
    ) -> None:
        """Builds teachers, each by `build_teacher`, and generator."""
        self.settings, self.config, self.seed = settings, config, seed
        self.num_steps = settings.steps
        self.teachers = Teachers(config, settings, data, self.build_teacher, seed)
        self.generated = Student(config, settings, seed)
        self.stacks = {
            f"{SECRET}teachers": self.teachers.stack,
            "generator": self.generated.stack,
        }

    @property
    def generator(self) -> Generator:
        """The generator as it is."""
        return self.generated.generator

    def train_teachers(self, index: int) -> None:
        """Takes the teachers' steps of one step of the generator."""
        settings, steps = self.settings, self.settings.teacher_steps
        for step in range(index * steps, (index + 1) * steps):
            z, labels = self.generated.draw("fakes", step, settings.fakes_per_step)
            self.teachers.train(self.generated(z, labels), labels, step)

    def state(self) -> TensorDict:
        """Returns the tensors of all stacks, under "<stack>.<name>".

        Privacy: reads private data (through the teachers); output private.
        """
        return {
            f"{stack}.{name}": value.clone()
            for stack, tensors in self.stacks.items()
            for name, value in tensors.state().items()
        }

    def load(self, state: TensorDict) -> None:
        """Copies the tensors of `state` in.

        Raises:
            ValueError: they are of other architectures.
        """
        for stack, tensors in self.stacks.items():
            tensors.load_state(under(f"{stack}.", state))
