"""Noisy means of every class, in one release: user level, zero-out."""

import dataclasses
import math
from types import MappingProxyType

import torch

from fedgs.baselines.contract import Guarantee
from fedgs.config.fields import flag
from fedgs.gan.models import build_generator
from fedgs.mechanism.noise import NoiseStream
from fedgs.privacy.gaussian import epsilon_from_mu, mu_from_epsilon


@dataclasses.dataclass(frozen=True)
class Settings:
    clip_bound: float = flag(10.0, "Largest norm of a client's means.", above=0)
    noise_per_clip: float = flag(1.0, "Noise over the clip bound.", at_least=0)


def released(sums, settings, noise):
    return sums + noise.normal(
        sums.shape, settings.noise_per_clip * settings.clip_bound
    )


class Trainer:
    num_steps = 1

    def __init__(self, settings, config, data):
        self.settings, self.config, self.data = settings, config, data
        self.generator = build_generator(config, config.seed)

    def step(self, index):
        sums = 0.0
        for client in range(self.data.num_clients):
            means = self.means(*self.data.client(client))
            sums = sums + means * min(1.0, self.settings.clip_bound / means.norm())
        config = self.config
        noise = NoiseStream(config.noise_seed, 0, index)
        noisy = released(sums.numpy(), self.settings, noise) / self.data.num_clients
        with torch.no_grad():
            self.generator.mean.copy_(torch.from_numpy(noisy))
        return {
            "kind": "class-means",
            "noise_per_clip": self.settings.noise_per_clip,
        }

    def means(self, images, labels):
        shape = (self.data.num_classes, *images.shape[1:])
        sums = torch.zeros(shape).index_add(
            0, torch.tensor(labels), torch.tensor(images)
        )
        counts = torch.bincount(torch.tensor(labels), minlength=len(sums))
        return sums / counts.clamp(min=1).view(-1, 1, 1, 1)

    def state(self):
        return {"mean": self.generator.mean, "factor": self.generator.factor}

    def load(self, state):
        self.generator.load_state_dict(state)


class ClassMeans:
    name, title, unit = "class-means", "Noisy class means", "user"
    Settings = Settings
    recipe = MappingProxyType(
        {"generator": "gaussian", "latent": "normal", "latent_dim": 4}
    )

    def calibrated(self, settings, facts, target_epsilon, delta):
        noise = 1 / mu_from_epsilon(target_epsilon, delta)
        return dataclasses.replace(settings, noise_per_clip=noise)

    def guarantees(self, settings, facts, events, delta):
        ratios = [event["noise_per_clip"] for event in events]
        costs = [1 / ratio**2 if ratio else math.inf for ratio in ratios]
        epsilon = epsilon_from_mu(math.sqrt(sum(costs)), delta)
        theorem = "exact curve of Gaussian noise"
        return [Guarantee("valid", "user", "zero-out", epsilon, delta, theorem)]

    def trainer(self, settings, config, data, seed):
        return Trainer(settings, config, data)

    def audit_scores(self, settings, facts, event, relation, trials):
        size = torch.zeros(trials).numpy()  # a client of zeros, and one of norm C
        there, gone = (
            released(size + c, settings, NoiseStream(None, 0, 0))
            for c in (settings.clip_bound, 0.0)
        )
        return gone, there


METHOD = ClassMeans()
