"""What trainers of central methods share: all that they resume from is named parts."""

from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from fedgs.config.run_config import NetworkConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.models import Generator, build_generator, sample_labels, sample_latents
from fedgs.randomness import derived_seed
from fedgs.round.checkpoint import load_tensors, tensors_of
from fedgs.shapes import Images, Labels, Latents, TensorDict

AnySettings = TypeVar("AnySettings")


class NetworkTrainer(Generic[AnySettings]):
    """A training under way; see `experiments.baselines.contract.Trainer`.

    Privacy: reads private data; which of its parts are private their names say.

    Attributes:
        net: the generator that is trained.
        parts: networks, stacks of networks and optimizers, by what the names of their
            tensors begin with; images are drawn from the "average", if there is one.
        num_steps: outer steps.
    """

    num_steps: int

    def __init__(
        self,
        settings: AnySettings,
        config: NetworkConfig,
        data: FederatedImages,
        seed: int,
    ) -> None:
        """Builds the generator, and by `build` the rest."""
        self.settings, self.config, self.data, self.seed = settings, config, data, seed
        self.net = self.new_generator()
        self.parts: dict[str, Any] = {"generator": self.net}
        self.build()

    def build(self) -> None:
        """Sets `num_steps` and adds the method's own parts."""
        raise NotImplementedError

    def new_generator(self) -> Generator:
        """Returns a generator as it is before the first step."""
        seed = derived_seed(self.seed, "generator")
        return build_generator(self.config, seed).to(self.config.device)

    @property
    def generator(self) -> Generator:
        """What images are drawn from."""
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
        """Goes on from what `state` returned."""
        load_tensors(self.parts, state)


def descend(optimizer: Optimizer, loss: Tensor) -> None:
    """Takes one step against the gradient of a loss."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
