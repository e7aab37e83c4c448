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

import json
import math
import sys
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from experiments.flags import JsonOption, request_flags, run_command
from experiments.tables import Table
from fedgs.audit.bounds import best_threshold, epsilon_at_least, error_rates
from fedgs.baselines import bayesian_accounting as bayesian
from fedgs.config.fields import coerce_fields, flag
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


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Raises:
        UserError: a value outside its range.
    """

    steps: int = flag(10, "Steps of DP-SGD, each on all images.", at_least=1)
    noise: float = flag(1.0, "Noise of a sum / clip bound.", above=0.0)
    records: int = flag(64, "Images drawn to estimate the Bayesian cost.", at_least=28)
    trials: int = flag(10_000, "Trainings of the attack, of each kind.", at_least=100)
    delta: float = flag(1e-5, "Of every epsilon.", above=0.0, below=1.0)
    seed: int = flag(0, "Of everything.", at_least=0)

    def __post_init__(self) -> None:
        """Checks every field."""
        coerce_fields(self)


@dataclass(frozen=True)
class Result:
    """The epsilons of one mechanism; the fields of `--json`.

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


def measure(request: Request) -> Result:
    """Computes the three epsilons."""
    digits = vectors("digits", RECORDS, request.seed)
    start = public_start(request.seed)
    cost = bayesian_cost(digits, start, request)
    of_digits = bayesian.bayesian_epsilon(cost, request.steps, request.delta)
    classical = epsilon_from_mu(math.sqrt(request.steps) / request.noise, request.delta)
    white = np.ones(digits.shape[1])
    found = attained(digits, white, start, request)
    return Result(of_digits, classical, found)


def bayesian_cost(images: Floats, start: Floats, request: Request) -> Floats:
    """Returns the summed costs of one training, from records drawn in every step."""
    critic = Critic(images, start, 1)
    total = np.zeros(len(bayesian.ORDERS))
    for step in range(request.steps):
        rng = stream(request.seed, "bayesian-records", step)
        drawn = images[rng.choice(len(images), request.records, replace=False)]
        distances = gradient_norms(critic.weights[0], drawn) / request.noise
        moments = bayesian.log_moments(distances, rate=1.0)
        total += bayesian.step_cost(moments, request.steps)
        critic.step(noise_of(request, "training", step, 1))
    return total


def attained(images: Floats, target: Floats, start: Floats, request: Request) -> float:
    """Returns the epsilon that the best test for an image among others proves.

    The test knows all of them: it adds up how much of each release, less the others'
    gradients, lies along the gradient of the one that it looks for.

    Args:
        images: the others, (n, pixels + 1).
        target: the image, (pixels + 1,).
        start: weights of the critic.
        request: steps, noise, trials, delta.
    """
    scores: list[Floats] = []
    with_it = np.vstack([images, target])
    for name, present in (("outside", images), ("inside", with_it)):
        critic = Critic(present, start, request.trials)
        score = np.zeros(request.trials)
        for step in range(request.steps):
            before = critic.weights
            known = Critic(images, start, 1)
            known.weights = before
            expected = known.step(np.zeros(1))
            size = 1 - chance_of_digit(before @ target)
            size = np.minimum(size, 1 / np.linalg.norm(target))
            direction = size[:, None] * target
            released = critic.step(noise_of(request, name, step, request.trials))
            score += ((released - expected) * direction).sum(1)
        scores.append(score)
    half = request.trials // 2
    value = partial(epsilon_at_least, delta=request.delta)
    threshold = best_threshold(scores[0][:half], scores[1][:half], value, ALPHA)
    rates = error_rates(scores[0][half:], scores[1][half:], threshold, ALPHA)
    return float(value(rates))


def noise_of(request: Request, name: str, step: int, trainings: int) -> Floats:
    """Draws the noise of one step: seeded, because nothing here is released."""
    rng = stream(request.seed, f"outlier-noise-{name}", step)
    return request.noise * rng.standard_normal((trainings, SIDE**2 + 1))


def gradient_norms(weights: Floats, images: Floats) -> Floats:
    """Returns the norms of the clipped gradients, shape (n,), at most 1."""
    sizes = 1 - chance_of_digit(images @ weights)
    return np.minimum(sizes * np.linalg.norm(images, axis=1), 1.0)


def chance_of_digit(scores: Floats) -> Floats:
    """Returns 1 / (1 + e^-score)."""
    return 0.5 * (1 + np.tanh(scores / 2))


def vectors(data: str, count: int, seed: int) -> Floats:
    """Returns images and a constant 1, shape (count, pixels + 1), in [0, 1]."""
    images = load_data(RunConfig(data=data, image_size=SIDE, seed=0)).images
    chosen = stream(seed, "outlier-images").choice(len(images), count, replace=False)
    return with_constant(images[chosen].reshape(count, -1) / 255.0)


def with_constant(pixels: Floats) -> Floats:
    """Returns images with a constant 1 after their pixels."""
    return np.hstack([pixels, np.ones((len(pixels), 1))])


def public_start(seed: int) -> Floats:
    """Fits the critic to digits from fonts against uniform noise; both are public."""
    real = vectors("fonts", PUBLIC, seed)
    fake = with_constant(stream(seed, "outlier-fakes").random((PUBLIC, SIDE**2)))
    weights = np.zeros(real.shape[1])
    for _ in range(300):
        toward = (1 - chance_of_digit(real @ weights)) @ real
        away = chance_of_digit(fake @ weights) @ fake
        weights += LEARNING_RATE * (toward - away) / PUBLIC
    return weights


@request_flags(Request)
def command(given: dict[str, object], as_json: JsonOption = False) -> None:
    """Prints the Bayesian, the classical and the attained epsilon of one mechanism."""
    request = Request(**given)  # type: ignore[arg-type]
    result = measure(request)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    rows = (
        ("Bayesian", result.bayesian, "a digit drawn at random"),
        ("classical", result.classical, "any image"),
        ("attained by the attack", result.attained, "a white image"),
    )
    Table(
        f"{request.steps} steps, noise {request.noise:g}, delta {request.delta:g}",
        ("epsilon", "value", "of whom"),
        [(name, f"{value:.2f}", of_whom) for name, value, of_whom in rows],
        numeric=False,
    ).show()


if __name__ == "__main__":
    sys.exit(run_command(command))
