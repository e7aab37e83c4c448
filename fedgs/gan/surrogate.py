"""The surrogate critic: a network on the server that learns the released gradients.

Each round releases one noisy averaged gradient per fake, and GS-WGAN uses it once. The
surrogate S(x, y) keeps the releases of recent rounds and learns a score whose gradient
is theirs,

    min over S of the mean of || P grad_x(-S(x, y)) - g / C ||^2

where P maps to the run's gradient basis and C is the clip bound. A smooth S cannot
follow noise that differs from fake to fake, so its gradient is nearer to the true
average than a release is. The generator then takes several steps against S, on fresh
latents.

Privacy: post-processing of DP output. This module gets fakes, labels and released
averages, and may import nothing that knows data (a contract of import-linter).

Differs from the reference: not in the paper, which steps once per release.

Source: Czarnecki et al., "Sobolev training for neural networks", NeurIPS 2017, Eq. 1,
with the gradient's term alone.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

from fedgs.config.run_config import ResolvedConfig
from fedgs.gan.models import build
from fedgs.mechanism.sanitizer import from_dct, to_dct
from fedgs.randomness import derived_seed, stream
from fedgs.shapes import ImageGrads, Images, Labels, Scores, TensorDict

WIDTH = 16
LEARNING_RATE = 2e-3
BETAS = (0.9, 0.99)
FIT_BATCH = 128  # remembered fakes of one step of the fit
FIRST_FIT = 5  # times as many steps in round 1, where S is random


class SurrogateCritic(nn.Module):
    """A smooth projection discriminator: three 5x5 convolutions of stride 2, SiLU.

        score = linear(h) + <embedding(y), h>,    h = features (B, 4 WIDTH * s * s)

    with s = side / 8, rounded up. Its gradient is what is trained, so the activation
    has a second derivative.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Makes the layers; without labels where the run is not conditional."""
        super().__init__()
        widths = (config.image_channels, WIDTH, 2 * WIDTH, 4 * WIDTH)
        self.convs = nn.ModuleList(
            nn.Conv2d(widths[i], widths[i + 1], 5, stride=2, padding=2)
            for i in range(3)
        )
        size = 4 * WIDTH * math.ceil(config.image_size / 8) ** 2
        self.linear = nn.Linear(size, 1)
        self.embedding = None
        if config.conditional:
            self.embedding = nn.Embedding(config.num_classes, size)
            nn.init.zeros_(self.embedding.weight)  # N(0, 1) would drown the score

    def forward(self, images: Images, labels: Labels) -> Scores:
        """Returns scores (B,), any real; higher is more real.

        Privacy: post-processing of DP output.

        Args:
            images: shape (B, C, S, S) in [0, 1], 0 = background.
            labels: shape (B,), int64; ignored when not conditional.
        """
        h = images
        for conv in self.convs:  # 28 -> 14 -> 7 -> 4
            h = F.silu(conv(h))
        h = h.flatten(1)  # (B, 4 WIDTH * s * s)
        scores = self.linear(h).squeeze(1)
        if self.embedding is None:
            return scores
        return scores + (self.embedding(labels) * h).sum(1)


class Surrogate:
    """The critic, its optimizer, and the releases of recent rounds that it learns from.

    Attributes:
        network: S.
        optimizer: Adam of S.
        memory: the releases: `fakes` (n, C, S, S), `labels` (n,) and `gradients`
            (n, C, k, k) in the gradient basis, divided by the clip bound; the oldest
            first, n at most `surrogate_memory` * B.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Initialises S from the seed, with nothing to remember."""
        self.config = config
        seed = derived_seed(config.seed, "surrogate")
        self.network = build(SurrogateCritic, config, seed).to(config.device)
        self.optimizer = torch.optim.Adam(
            self.network.parameters(), lr=LEARNING_RATE, betas=BETAS
        )
        channels, side = config.image_channels, config.image_size
        empty = {
            "fakes": torch.zeros(0, channels, side, side),
            "labels": torch.zeros(0, dtype=torch.int64),
            "gradients": torch.zeros(0, *config.release_shape[1:]),
        }
        self.memory: TensorDict = {n: v.to(config.device) for n, v in empty.items()}

    def remember(self, fakes: Images, labels: Labels, average: Tensor) -> None:
        """Adds a round's releases, and forgets the oldest beyond the memory.

        Privacy: post-processing of DP output.

        Args:
            fakes: the answered fakes as they were sent, (B, C, S, S).
            labels: theirs, (B,).
            average: sum of the releases / participants, (B, C, k, k) in the gradient
                basis.
        """
        # In units of the clip bound, so that one learning rate serves every C.
        gradients = average / self.config.clip_bound
        new = {"fakes": fakes, "labels": labels, "gradients": gradients}
        most = self.config.surrogate_memory * self.config.batch_size
        for name, value in new.items():
            old = self.memory[name]
            kept = old[max(0, len(old) + len(value) - most) :]
            self.memory[name] = torch.cat([kept, value.to(old)])

    def fit(self, round: int) -> None:
        """Takes `surrogate_fit_steps` steps on what is remembered, more in round 1.

        Privacy: post-processing of DP output.
        """
        rng = stream(self.config.seed, "surrogate-fit", round)
        num_steps = self.config.surrogate_fit_steps * (FIRST_FIT if round == 1 else 1)
        count = len(self.memory["labels"])
        for _ in range(num_steps):
            chosen = torch.from_numpy(rng.integers(count, size=min(FIT_BATCH, count)))
            batch = {n: v[chosen.to(v.device)] for n, v in self.memory.items()}
            self.optimizer.zero_grad(set_to_none=True)
            self._loss(**batch).backward()
            self.optimizer.step()

    def image_grads(self, images: Images, labels: Labels) -> ImageGrads:
        """Returns grad_x(-S(x, y)) of every image by itself, within the gradient basis.

        Privacy: post-processing of DP output.

        Args:
            images: shape (B, C, S, S).
            labels: shape (B,).

        Returns:
            Shape (B, C, S, S), in units of the clip bound, without a factor 1/B.
        """
        with torch.no_grad():  # grad differentiates all the same, keeping no graph
            grads = self._in_basis(self._gradient(images, labels))
        if self.config.gradient_basis == "dct":
            return from_dct(grads, self.config.image_size)
        return grads

    def _loss(self, fakes: Images, labels: Labels, gradients: Tensor) -> Tensor:
        found = self._in_basis(self._gradient(fakes, labels))
        return (found - gradients).square().sum((1, 2, 3)).mean()

    def _gradient(self, images: Images, labels: Labels) -> ImageGrads:
        return grad(lambda x: -self.network(x, labels).sum())(images)

    def _in_basis(self, image_grads: ImageGrads) -> Tensor:
        if self.config.gradient_basis == "dct":
            return to_dct(image_grads, self.config.dct_size)
        return image_grads
