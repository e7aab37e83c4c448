"""The numbers that `fedgs privacy --reproduce` recomputes, and how.

Source: GS-WGAN, Tables 1 and 2, and its reference `privacy_analysis.py`;
docs/privacy.md, "Which theorem may be used when" and "Why 'as published' is not a
bound".
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

from scipy import optimize

from fedgs.privacy.amplification import (
    AttainedBound,
    RenyiBound,
    Sampled,
    SampledBound,
    naive_epsilon,
)
from fedgs.privacy.gaussian import binomial_epsilon, epsilon_from_mu, mu_from_epsilon
from fedgs.privacy.oracle import autodp_epsilon, poisson_rdp_epsilon
from fedgs.privacy.plan import RELATIONS

SIGMA, B, DELTA = 1.07, 32, 1e-5
ROOT = math.sqrt(B)
Number = Callable[[], float | None]
Epsilon = Callable[[Any, float], float]


class Setting(NamedTuple):
    """One of the paper's two runs: K clients, T rounds, a delta."""

    clients: int
    rounds: int
    delta: float

    def sampled(self, ratio: float, clients: int = 1, times: int = 1) -> Any:
        """Returns `times` draws of `clients` clients in every round."""
        return (Sampled(self.clients, clients, ratio, self.rounds * times),)


CENTRAL = Setting(1000, 20_000, DELTA)
FED = Setting(866, 30_000, 1 / 866)
FED_STRICT = FED._replace(delta=DELTA)
TABLE_2 = FED._replace(delta=1.15e-3)


@dataclass(frozen=True)
class Row:
    """One number to reproduce.

    Attributes:
        what: the quantity.
        reference: as its source prints it; its digits are the tolerance. ">= x" and
            "<= x" are bounds.
        compute: our computation of the same quantity.
        dominating: the valid bound, where the reference is none.
        differs: why it need not agree; "" if it must.
    """

    what: str
    reference: str
    compute: Number
    dominating: Number | None = None
    differs: str = ""


# ------------------------------------------------------------------ the quantities


def _releases(count: float, setting: Setting, sensitivity: float = 2.0) -> float:
    """Returns epsilon of `count` releases of one fake each, without amplification."""
    mu = math.sqrt(count) / SIGMA * sensitivity / 2
    return epsilon_from_mu(mu, setting.delta)


def _mixture(setting: Setting, sensitivity: float = 2.0) -> float:
    ratio = SIGMA / ROOT * 2 / sensitivity
    return binomial_epsilon(setting.rounds, 1 / setting.clients, ratio, setting.delta)


def _published(setting: Setting, noise: float = SIGMA, extra: int = 0) -> float:
    releases = (setting.rounds + extra) * B
    return autodp_epsilon(noise, releases, 1 / setting.clients, setting.delta) or 0.0


def _valid_epsilon(rounds: Any, delta: float) -> float:
    return SampledBound(rounds).epsilon(delta)


PARTICIPANTS = (1, 8, 32, 64, 128)  # m of the analysis' designs
# Of sampled rounds at a delta: by naive PLD, no bound, and by the dominating pair.
EPSILONS: tuple[Epsilon, Epsilon] = (naive_epsilon, _valid_epsilon)


def _amplified(setting: Setting, ratio: float, times: int = 1) -> tuple[Number, Number]:
    """Returns epsilon of sampled rounds, by both of `EPSILONS`."""
    rounds = setting.sampled(ratio, times=times)
    naive, valid = (partial(epsilon, rounds, setting.delta) for epsilon in EPSILONS)
    return naive, valid


def _renyi(setting: Setting, noise: float) -> float:
    return RenyiBound(setting.sampled(noise, times=B)).epsilon(setting.delta)


def _poisson(setting: Setting, noise: float) -> float:
    releases = setting.rounds * B
    return poisson_rdp_epsilon(noise, 1 / setting.clients, releases, setting.delta)


@lru_cache(maxsize=256)
def _ratio(
    epsilon: Epsilon, setting: Setting, target: float, clients: int, times: int
) -> float:
    """Returns the least z of a round (of one fake, if times = B) for a target."""

    def excess(log_ratio: float) -> float:
        rounds = setting.sampled(math.exp(log_ratio), clients, times)
        return epsilon(rounds, setting.delta) - target

    found: Any = optimize
    return math.exp(float(found.brentq(excess, -2.0, 5.0, xtol=2e-5)))


def _noise(
    setting: Setting, target: float, clients: int, times: int = 1, factor: float = 1.0
) -> tuple[Number, Number]:
    """Returns `factor` times the least z of a round, by both of `EPSILONS`."""

    def number(epsilon: Epsilon) -> float:
        return factor * _ratio(epsilon, setting, target, clients, times)

    naive, valid = (partial(number, epsilon) for epsilon in EPSILONS)
    return naive, valid


def _all_clients_noise(setting: Setting, target: float) -> float:
    mu = mu_from_epsilon(target, setting.delta)
    return 2 * math.sqrt(setting.rounds) / mu * ROOT / setting.clients


def _server_of_full_participation() -> float:
    mu = mu_from_epsilon(10, 1 / 539) * math.sqrt(539)
    return epsilon_from_mu(mu, 1 / 539)


# ------------------------------------------------------------------ the rows

UNDERFLOW = "the reference's inversion underflows above epsilon 745"
GRID = "the reference was solved on a coarser grid, so its noise is a little large"


def rows() -> list[Row]:
    """Returns all rows, in the order of the analysis."""
    return [
        *_targets(),
        *_as_published(),
        *_one_draw_per_round(),
        *_without_amplification(),
        *_independent_draws(),
        *_shared_draws(),
        *_designs(),
    ]


def _targets() -> Iterable[Row]:
    for epsilon, delta, reference in (
        (10, 1e-5, "2.0004"),
        (10, 1 / 866, "2.4827"),
        (10, 1 / 539, "2.5521"),
        (3, 1e-5, "0.7191"),
        (1, 1e-5, "0.2681"),
    ):
        what = f"mu of epsilon {epsilon} at delta {delta:.3g}"
        yield Row(what, reference, partial(mu_from_epsilon, epsilon, delta))
    for mu, relation, reference in (
        (1.0, "any relation", "4.3772"),
        (2.5521, "zero-out", "13.56"),
        (2 * 2.5521, "replace-one, zero-out's mu 2.5521", "34.07"),
        (0.5, "zero-out", "1.99"),
        (1.0, "replace-one, zero-out's mu 0.5", "4.38"),
    ):
        what = f"epsilon of mu {mu:g} at delta 1e-5, {relation}"
        yield Row(what, reference, partial(epsilon_from_mu, mu, 1e-5))
    what = "epsilon of 539 nodes against the server, 10 for the release, delta 1/539"
    yield Row(what, "1926", _server_of_full_participation)


def _as_published() -> Iterable[Row]:
    for name, setting, reference in (
        ("K 1000, T 20000, delta 1e-5", CENTRAL, "9.9926"),
        ("K 866, T 30000, delta 1/866", FED, "12.600"),
        ("K 866, T 30000, delta 1.15e-3", TABLE_2, "12.602"),
        ("K 866, T 30000, delta 1e-5", FED_STRICT, "14.975"),
    ):
        yield Row(
            f"as published (no bound): {name}", reference, partial(_published, setting)
        )
    what = "as published (no bound): K 1000, T 20001"
    yield Row(what, "9.9929", partial(_published, CENTRAL, SIGMA, 1))
    for name, setting, reference in (("1000", CENTRAL, "53.64"), ("866", FED, "91.01")):
        what = f"as published, noise as in the paper's text (no bound): K {name}"
        yield Row(what, reference, partial(_published, setting, SIGMA / 2))
    average = TABLE_2.rounds * B / TABLE_2.clients
    once = partial(autodp_epsilon, SIGMA, average, None, TABLE_2.delta)
    yield Row("paper's Table 2 (an average, no bound): RDP", "598.605", once)
    what = "the same average, exact (no bound)"
    yield Row(f"{what}: replace-one", "578.03", partial(_releases, average, TABLE_2))
    yield Row(f"{what}: zero-out", "167.55", partial(_releases, average, TABLE_2, 1.0))
    per_round = partial(autodp_epsilon, SIGMA / ROOT, CENTRAL.rounds, 1e-3, DELTA)
    yield Row("paper's Theorems 4.1 and A.1 in autodp, K 1000", "296565", per_round)


def _one_draw_per_round() -> Iterable[Row]:
    (kind,) = CENTRAL.sampled(SIGMA / ROOT)
    (once,) = CENTRAL._replace(rounds=1).sampled(SIGMA / ROOT)
    lower, upper = AttainedBound(kind), SampledBound((kind,))
    both = "one draw per round, K 1000, T 20000"
    yield Row(f"{both}: proved from above", "346.66", partial(upper.epsilon, DELTA))
    yield Row(f"{both}: attained from below", "327.6", partial(lower.epsilon, DELTA))
    yield Row(
        f"{both}: delta attained at epsilon 10", ">= 0.9998", partial(lower.delta, 10)
    )
    one = SampledBound((once,))
    yield Row("one round of it: delta at epsilon 1", "8.5e-4", partial(one.delta, 1.0))
    many = SampledBound(Setting(1000, 1, DELTA).sampled(SIGMA, times=B))
    yield Row(
        "one round, a draw for every fake: delta at epsilon 1",
        "<= 1e-15",
        partial(many.delta, 1.0),
        differs="ours is an upper bound with the rounding of 32 transforms, 3e-14",
    )


def _without_amplification() -> Iterable[Row]:
    for clients, setting, references in (
        ("K 1000", CENTRAL, ("610.34", "168.82")),
        ("K 866", TABLE_2, ("774.31", "206.70")),
    ):
        what = f"the algorithm as it is, uniform selection: {clients}"
        for relation, reference in zip(RELATIONS, references, strict=True):
            epsilon = partial(_mixture, setting, RELATIONS[relation])
            yield Row(f"{what}, {relation}", reference, epsilon)
    for what, count, setting, sensitivity, reference in (
        ("balanced, 35 visits: replace-one", 35, TABLE_2, 2.0, "583.52"),
        ("balanced, 35 visits: zero-out", 35, TABLE_2, 1.0, "169.04"),
        ("average of 20 visits (no bound), K 1000", 20, CENTRAL, 2.0, "379"),
        ("busiest client, 58 visits, K 866", 58, FED, 2.0, "932"),
    ):
        yield Row(what, reference, partial(_releases, count * B, setting, sensitivity))


def _independent_draws() -> Iterable[Row]:
    """A draw for every fake: T * B releases, each sampled anew."""
    for name, setting, noise, wor, renyi, poisson, naive in (
        ("K 1000", CENTRAL, SIGMA, "9.99", "9.24", "4.45", "4.12"),
        ("K 866, 1/866", FED, SIGMA, "12.60", "11.51", "5.00", "4.46"),
        ("K 866, 1e-5", FED_STRICT, SIGMA, "14.97", "14.02", "6.64", "6.17"),
        ("K 1000, text's noise", CENTRAL, SIGMA / 2, "53.6", "52.2", "30.5", "28.3"),
    ):
        what = f"a draw for every fake, {name}"
        yield Row(f"{what}: autodp", wor, partial(_published, setting, noise))
        yield Row(f"{what}: RDP", renyi, partial(_renyi, setting, noise))
        yield Row(f"{what}: RDP, Poisson", poisson, partial(_poisson, setting, noise))
        pair = _amplified(setting, noise, B)
        yield Row(f"{what}: naive PLD (no bound)", naive, *pair)
    what = "a draw for every fake, K 1000: dominating pair"
    yield Row(what, "5.51", _amplified(CENTRAL, SIGMA, B)[1])


def _shared_draws() -> Iterable[Row]:
    """Some fakes share a draw; all B of them is the algorithm."""
    for name, setting, references in (
        ("K 1000", CENTRAL, ("4.12", "5.67", "12.4", "43.3", "141", "329")),
        ("K 866, 1/866", FED, ("4.46", "6.28", "13.8", "50.0", "172", "404")),
        ("K 866, 1e-5", FED_STRICT, ("6.17", "8.53", "18.4", "63.8", "210", "485")),
    ):
        for power, reference in enumerate(references):
            shared = 2**power
            pair = _amplified(setting, SIGMA / math.sqrt(shared), B // shared)
            what = f"{shared} fakes share a draw, {name}: naive PLD (no bound)"
            yield Row(what, reference, *pair)
    for name, setting, reference in (("1000", CENTRAL, "2,059"), ("866", FED, "2,640")):
        pair = _amplified(setting, SIGMA / ROOT / 2)
        what = f"the text's noise, one draw per round, K {name}: naive PLD (no bound)"
        yield Row(what, reference, *pair, UNDERFLOW)


def _designs() -> Iterable[Row]:
    """Noise that reaches a target if (a) and (b) hold; references by naive PLD."""
    for name, setting, target, references in (
        ("K 1000", CENTRAL, 10, ("5.11", "1.20", "0.84", "0.811", "0.803")),
        ("K 1000", CENTRAL, 1, ("9.4", "6.07", "5.98", "5.98", "5.98")),
        ("K 866, 1/866", FED, 10, ("4.98", "1.28", "0.945", "0.92")),
    ):
        for clients, reference in zip(PARTICIPANTS, references, strict=False):
            # On the average of one fake with C = 1; z is of a round, replace-one.
            pair = _noise(setting, target, clients, factor=2 * ROOT / clients)
            what = f"noise std on the average, epsilon {target}, m {clients}, {name}"
            slack = GRID if target == 1 and clients > 32 else ""
            yield Row(what, reference, *pair, slack)
    for setting, target, reference in (
        (CENTRAL, 10, "0.80"),
        (CENTRAL, 1, "5.97"),
        (FED, 10, "0.911"),
    ):
        what = f"the same of all {setting.clients} clients, epsilon {target}: exact"
        yield Row(what, reference, partial(_all_clients_noise, setting, target))
    for setting, reference in ((CENTRAL, "2.56"), (FED, "2.49")):
        what = f"sigma for epsilon 10, one draw per round, K {setting.clients}"
        yield Row(what, reference, *_noise(setting, 10, clients=1, factor=ROOT))
    references = ("0.452", "0.850", "2.375", "4.59", "9.09")
    for clients, reference in zip(PARTICIPANTS, references, strict=True):
        what = f"z of a round for epsilon 10, m {clients}, K 1000"
        slack = GRID if clients in (32, 128) else ""
        yield Row(what, reference, *_noise(CENTRAL, 10, clients), slack)
    for target, reference in ((10, "0.717"), (1, "3.09")):
        what = f"sigma for epsilon {target}, a draw for every fake, K 1000"
        yield Row(what, reference, *_noise(CENTRAL, target, 1, times=B), GRID)
