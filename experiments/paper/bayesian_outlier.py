"""An outlier breaks Bayesian epsilons: `python -m experiments.paper.bayesian_outlier`.

A critic tells scikit-learn's digits from noise. It takes a few steps by DP-SGD, whose
noisy sums of clipped gradients are the release. Then, for the same releases:

* the Bayesian epsilon of BDP-GAN, from the gradients of digits drawn at random;
* the classical epsilon, exact, of any image that clipping lets through;
* the epsilon that an attack attains: trainings with and without one image that is no
  digit (white all over) are told apart by their releases.

The attack exceeds the Bayesian epsilon. That is no mistake of the accountant: it speaks
of images like the others, and a membership attack looks for one that is not.

The critic is logistic: p = 1 / (1 + e^-(w x)), with a gradient (1 - p) x of each digit.
It starts from weights that were fitted to digits drawn from fonts, which are public.

Source: Triastcyn, Faltings, "Generating higher-fidelity synthetic datasets with privacy
guarantees", Algorithms 15, 2022, sections 2.4 and 3.1.
"""

import math
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedgs.app.flags import run_command
from fedgs.app.tables import Table
from fedgs.audit.bounds import best_threshold, epsilon_at_least, error_rates
from fedgs.baselines import bayesian_accounting as bayesian
from fedgs.config.run_config import RunConfig
from fedgs.data.load import load_data
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.randomness import stream

Floats = npt.NDArray[np.float64]

SIDE = 16
RECORDS = 400  # digits that are trained on
PUBLIC = 2000  # digits from fonts that the critic starts from
LEARNING_RATE = 0.2  # of the mean gradient
ALPHA = 0.05  # the chance that an attack's bound is wrong
STEPS, NOISE = 10, 1.0  # of DP-SGD on all images; noise of a sum / clip bound
DRAWN = 64  # images, to estimate the Bayesian cost
TRIALS = 10_000  # trainings of the attack, of each kind
DELTA, SEED = 1e-5, 0


class Result(NamedTuple):
    """The epsilons of one mechanism.

    Attributes:
        bayesian: of digits as they are.
        classical: of any image.
        attained: by the attack on the white image, with 95 % confidence.
    """

    bayesian: float
    classical: float
    attained: float


class Critic:
    """Logistic critics, many at once, that take noisy steps on the same digits.

    Attributes:
        weights: (trainings, pixels + 1).
    """

    def __init__(self, images: Floats, start: Floats, trainings: int) -> None:
        """Gives every training the same images (n, pixels + 1) and start."""
        self.images = images
        self.norms = np.linalg.norm(images, axis=1)
        self.weights = np.tile(start, (trainings, 1))

    def step(self, noise: Floats) -> Floats:
        """Returns the noisy sums, (trainings, pixels + 1), and moves along them."""
        sizes = 1 - chance_of_digit(self.weights @ self.images.T)
        shares = np.minimum(sizes, 1 / self.norms)  # clipped to norm 1
        released = shares @ self.images + noise
        self.weights = self.weights + LEARNING_RATE * released / len(self.images)
        return released


def measure() -> Result:
    """Computes the three epsilons."""
    digits = vectors("digits", RECORDS)
    start = public_start()
    cost = bayesian_cost(digits, start)
    of_digits = bayesian.bayesian_epsilon(cost, STEPS, DELTA)
    classical = epsilon_from_mu(math.sqrt(STEPS) / NOISE, DELTA)
    white = np.ones(digits.shape[1])
    found = attained(digits, white, start)
    return Result(of_digits, classical, found)


def bayesian_cost(images: Floats, start: Floats) -> Floats:
    """Returns the summed costs of one training, from records drawn in every step."""
    critic = Critic(images, start, 1)
    total = np.zeros(len(bayesian.ORDERS))
    for step in range(STEPS):
        rng = stream(SEED, "bayesian-records", step)
        drawn = images[rng.choice(len(images), DRAWN, replace=False)]
        distances = gradient_norms(critic.weights[0], drawn) / NOISE
        moments = bayesian.log_moments(distances, rate=1.0)
        total += bayesian.step_cost(moments, STEPS)
        critic.step(noise_of("training", step, 1))
    return total


def attained(images: Floats, target: Floats, start: Floats) -> float:
    """Returns the epsilon that the best test for an image among others proves.

    The test knows all of them: it adds up how much of each release, less the others'
    gradients, lies along the gradient of the one that it looks for.

    Args:
        images: the others, (n, pixels + 1).
        target: the image, (pixels + 1,).
        start: weights of the critic.
    """
    scores: list[Floats] = []
    with_it = np.vstack([images, target])
    for name, present in (("outside", images), ("inside", with_it)):
        critic = Critic(present, start, TRIALS)
        score = np.zeros(TRIALS)
        for step in range(STEPS):
            before = critic.weights
            known = Critic(images, start, 1)
            known.weights = before
            expected = known.step(np.zeros(1))
            size = 1 - chance_of_digit(before @ target)
            size = np.minimum(size, 1 / np.linalg.norm(target))
            direction = size[:, None] * target
            released = critic.step(noise_of(name, step, TRIALS))
            score += ((released - expected) * direction).sum(1)
        scores.append(score)
    half = TRIALS // 2
    value = partial(epsilon_at_least, delta=DELTA)
    threshold = best_threshold(scores[0][:half], scores[1][:half], value, ALPHA)
    rates = error_rates(scores[0][half:], scores[1][half:], threshold, ALPHA)
    return float(value(rates))


def noise_of(name: str, step: int, trainings: int) -> Floats:
    """Draws the noise of one step: seeded, because nothing here is released."""
    rng = stream(SEED, f"outlier-noise-{name}", step)
    return NOISE * rng.standard_normal((trainings, SIDE**2 + 1))


def gradient_norms(weights: Floats, images: Floats) -> Floats:
    """Returns the norms of the clipped gradients, shape (n,), at most 1."""
    sizes = 1 - chance_of_digit(images @ weights)
    return np.minimum(sizes * np.linalg.norm(images, axis=1), 1.0)


def chance_of_digit(scores: Floats) -> Floats:
    """Returns 1 / (1 + e^-score)."""
    return 0.5 * (1 + np.tanh(scores / 2))


def vectors(data: str, count: int) -> Floats:
    """Returns images and a constant 1, shape (count, pixels + 1), in [0, 1]."""
    images = load_data(RunConfig(data=data, image_size=SIDE, seed=0)).images
    chosen = stream(SEED, "outlier-images").choice(len(images), count, replace=False)
    return with_constant(images[chosen].reshape(count, -1) / 255.0)


def with_constant(pixels: Floats) -> Floats:
    """Returns images with a constant 1 after their pixels."""
    return np.hstack([pixels, np.ones((len(pixels), 1))])


def public_start() -> Floats:
    """Fits the critic to digits from fonts against uniform noise; both are public."""
    real = vectors("fonts", PUBLIC)
    fake = with_constant(stream(SEED, "outlier-fakes").random((PUBLIC, SIDE**2)))
    weights = np.zeros(real.shape[1])
    for _ in range(300):
        toward = (1 - chance_of_digit(real @ weights)) @ real
        away = chance_of_digit(fake @ weights) @ fake
        weights += LEARNING_RATE * (toward - away) / PUBLIC
    return weights


def command() -> None:
    """Prints the Bayesian, the classical and the attained epsilon of one mechanism."""
    whose = ("a digit drawn at random", "any image", "a white image")
    names = ("Bayesian", "classical", "attained by the attack")
    rows = [
        (name, f"{value:.2f}", of_whom)
        for name, value, of_whom in zip(names, measure(), whose, strict=True)
    ]
    caption = f"{STEPS} steps, noise {NOISE:g}, delta {DELTA:g}"
    Table(caption, ("epsilon", "value", "of whom"), rows, numeric=False).show()


if __name__ == "__main__":
    sys.exit(run_command(command))
