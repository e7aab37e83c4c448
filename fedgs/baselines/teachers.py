"""What the PATE methods share: stacked teachers on disjoint data, and their student.

A teacher is a network that sees the images of its own clients only. Client i belongs to
teacher i modulo the number of teachers, whatever the data are: so a client's whole data
set decides one vote of each query, and the epsilon of votes is an epsilon of users.

Teachers are the discriminators' `ModuleStack`: one batched call trains or asks a chunk
of them. A student, or the generator, is a stack of one.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgs.baselines.contract import Facts, Guarantee
from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.errors import UserError
from fedgs.gan.client_training import draw_matching
from fedgs.gan.discriminators import Function, ModuleStack
from fedgs.gan.models import (
    Generator,
    build_generator,
    sample_labels,
    sample_latents,
)
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import Images, Labels, Latents, Positions, TensorDict

TRUSTED = "the raw votes are seen by a trusted aggregator only"
REVEALING = (
    "neither the ledger is published, which reveals sums of votes without noise, nor "
    "the figures that are computed from them"
)
BETA2 = 0.999  # Adam's default, as the reference's
NOISE_AT_ONCE = 2_000_000  # numbers; an audit draws them in chunks
MOST_NOISE = 30_000_000  # and so many in all, for each of its two arrays: half a minute
FIRST = torch.zeros(1, dtype=torch.int64)  # the position of a stack's only module


def num_teachers(given: int | None, facts: Facts) -> int:
    """Returns how many teachers there are: one for each client when not given."""
    return given or facts.num_clients


def valid_guarantees(
    teachers: int,
    facts: Facts,
    epsilons: tuple[float | None, float | None],
    delta: float,
    theorem: str,
    is_revealed: bool,
) -> list[Guarantee]:
    """Returns the valid lines of votes, with what they suppose.

    Args:
        teachers: how many there are.
        facts: of the run.
        epsilons: where one teacher's votes are replaced, and where they are left out.
        delta: of both.
        theorem: how they were computed.
        is_revealed: the ledger tells of the votes.
    """
    replaced, left_out = epsilons
    found = [("user", "replace-one", replaced, theorem)]
    if teachers == facts.num_clients:
        why = f"{theorem}; the user's teacher casts no vote"
        found.append(("user", "zero-out", left_out, why))
    why = f"{theorem}; a record is in one user's data"
    found.append(("record", "replace-one", replaced, why))
    conditions = (TRUSTED, REVEALING) if is_revealed else (TRUSTED,)
    return [
        Guarantee("valid", unit, relation, epsilon, delta, how, conditions)
        for unit, relation, epsilon, how in found
    ]


def trial_chunks(trials: int, numbers: int) -> Iterator[int]:
    """Splits the trials of an audit, fewer where one of them draws much noise.

    Args:
        trials: asked for.
        numbers: of noise that one trial draws.

    >>> list(trial_chunks(5, 400_000))
    [5]
    >>> sum(trial_chunks(10**6, 10_000))
    3000
    """
    left = min(trials, max(1, MOST_NOISE // numbers))
    at_once = max(1, NOISE_AT_ONCE // numbers)
    while left > 0:
        yield min(left, at_once)
        left -= at_once


class Training(Protocol):
    """What teachers and student read of a method's settings."""

    @property
    def teacher_batch_size(self) -> int:
        """Real and fake images of a teacher's step."""
        ...

    @property
    def learning_rate(self) -> float:
        """Adam's step size of all networks."""
        ...

    @property
    def beta1(self) -> float:
        """Adam's beta1 of all networks."""
        ...


def check_teachers(num_teachers: int, num_clients: int) -> None:
    """Refuses fewer than two teachers, and teachers without clients.

    Raises:
        UserError: with the numbers that are possible.
    """
    if not 2 <= num_teachers <= num_clients:
        raise UserError(
            f"num_teachers = {num_teachers}: a vote needs two teachers, and each of "
            f"them a client of its own; give --num-teachers from 2 to {num_clients}"
            + (" and --num-clients above 1" if num_clients < 2 else "")
        )


class Teachers:
    """Networks on disjoint data, each trained against the same public fakes.

    Privacy: trained on private data; everything in here is private.

    Attributes:
        stack: the networks with their Adam state.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        training: Training,
        data: FederatedImages,
        num_teachers: int,
        build: Callable[[int], nn.Module],
        seed: int,
    ) -> None:
        """Builds teacher t by `build(its seed)` and gives it clients t, t + n, ..."""
        self.config, self.training = config, training
        self.data, self.seed = data, seed
        self.records = [
            np.concatenate(data.client_records[teacher::num_teachers])
            for teacher in range(num_teachers)
        ]
        self.stack = ModuleStack(
            lambda teacher: build(derived_seed(seed, "teacher", teacher)),
            num_teachers,
            training.learning_rate,
            (training.beta1, BETA2),
            config.stacked,
            config.device,
        )

    def train(self, loss: Function, images: Images, labels: Labels, index: int) -> None:
        """Takes one step with each teacher: own records against fakes of their labels.

        Privacy: reads private data; output private.

        Args:
            loss: loss(params, buffers, real, real labels, fake, fake labels).
            images: fakes (F, C, S, S) for all teachers.
            labels: (F,).
            index: of the step; no two steps of a run share one.
        """
        wanted = labels.cpu().numpy()
        for chunk in self.chunks():
            records, fakes = [], []
            for teacher in chunk.tolist():
                rng = stream(self.seed, "teacher-batch", teacher, index)
                own, size = self.records[teacher], self.training.teacher_batch_size
                records.append(own[rng.integers(len(own), size=size)])
                drawn = self.data.labels[records[-1]]
                fakes.append(draw_matching(rng, drawn, wanted))
            rows = np.stack(records)
            real = torch.from_numpy(self.data.images[rows]).to(images.device)
            positions = torch.from_numpy(np.stack(fakes)).to(images.device)
            self.stack.step(
                loss,
                chunk,
                real.float().div_(255.0),
                torch.from_numpy(self.data.labels[rows]).to(images.device),
                images[positions],
                labels[positions],
            )

    def ask(
        self, function: Function, images: Images, labels: Labels
    ) -> Iterator[Tensor]:
        """Yields function(params, buffers, images, labels) of chunks of teachers.

        Privacy: reads private data; output private.
        """
        for chunk in self.chunks():
            count = len(chunk)
            yield self.stack.map(
                function,
                chunk,
                images.expand(count, *images.shape),
                labels.expand(count, *labels.shape),
            )

    def chunks(self) -> Iterator[Positions]:
        """Splits the teachers into chunks of at most `chunk_size`, in order."""
        everyone = torch.arange(len(self.records), device=self.config.device)
        yield from everyone.split(self.config.chunk_size)


class Single:
    """One network with its Adam state, trained by pure functions of its tensors.

    Attributes:
        stack: a stack of one.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        learning_rate: float,
        betas: tuple[float, float],
        device: str,
    ) -> None:
        """Builds the network."""
        self.stack = ModuleStack(
            lambda _: build(), 1, learning_rate, betas, False, device
        )

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Returns the network's output, without a graph."""
        with torch.no_grad():
            return functional_call(self.stack.template, self.tensors(), inputs)

    def step(self, loss: Callable[..., Tensor], *batch: Tensor) -> None:
        """Takes one Adam step on loss(network, *batch), `network` a function."""

        def of_tensors(
            params: TensorDict, buffers: TensorDict, *inputs: Tensor
        ) -> Tensor:
            return loss(self.function(params, buffers), *inputs)

        self.stack.step(of_tensors, FIRST, *(value.unsqueeze(0) for value in batch))

    def function(self, params: TensorDict, buffers: TensorDict) -> Any:
        """Returns the network with these tensors, as a function of its inputs."""
        return lambda *inputs: functional_call(
            self.stack.template, (params, buffers), inputs
        )

    def tensors(self) -> TensorDict:
        """Returns parameters and buffers by name."""
        groups = (self.stack.params, self.stack.buffers)
        return {name: value[0] for group in groups for name, value in group.items()}


class Student(Single):
    """The generator under way, and what it draws in each step."""

    def __init__(self, config: ResolvedConfig, training: Training, seed: int) -> None:
        """Builds the generator of the configuration."""
        self.config, self.seed = config, seed
        super().__init__(
            lambda: build_generator(config, derived_seed(seed, "generator")),
            training.learning_rate,
            (training.beta1, BETA2),
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


def joined_state(stacks: Mapping[str, ModuleStack]) -> TensorDict:
    """Returns the tensors of several stacks, under "<stack>.<name>".

    Privacy: reads private data (through the teachers); output private.
    """
    return {
        f"{stack}.{name}": value.clone()
        for stack, tensors in stacks.items()
        for name, value in tensors.state().items()
    }


def load_joined(state: TensorDict, stacks: Mapping[str, ModuleStack]) -> None:
    """Copies the tensors of `joined_state` in.

    Raises:
        ValueError: they are of other architectures.
    """
    for stack, tensors in stacks.items():
        prefix = f"{stack}."
        tensors.load_state(
            {
                name.removeprefix(prefix): value
                for name, value in state.items()
                if name.startswith(prefix)
            }
        )
