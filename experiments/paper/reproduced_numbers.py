"""The numbers that `fedgs privacy --reproduce` recomputes, and how.

Which numbers, and what their sources print, is in `reproduced_numbers.json`: the rows
in the order of the analysis. Each names its computation here, in `NUMBERS` or `PAIRS`,
and the arguments.

Source: GS-WGAN, Tables 1 and 2, and its reference `privacy_analysis.py`;
docs/privacy.md, "Which theorem may be used when" and "Why 'as published' is not a
bound".
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
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

SIGMA, B = 1.07, 32
ROOT = math.sqrt(B)
STORED = Path(__file__).with_suffix(".json")
Number = Callable[[], float | None]
Epsilon = Callable[[Any, float], float]  # of sampled rounds at a delta


class Setting(NamedTuple):
    """One of the paper's two runs: K clients, T rounds, a delta."""

    clients: int
    rounds: int
    delta: float

    def draws(self, ratio: float, clients: int = 1, shared: int = B) -> Any:
        """Returns the draws of all rounds.

        Args:
            ratio: noise of the sum of a draw, over its sensitivity.
            clients: of a draw.
            shared: fakes of a draw; all B of them is the algorithm.
        """
        return (Sampled(self.clients, clients, ratio, self.rounds * (B // shared)),)

    def fakes(self, shared: int = B, noise: float = SIGMA) -> Any:
        """Returns the draws of one client, by the noise of one fake."""
        return self.draws(noise / math.sqrt(shared), shared=shared)


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


def rows() -> list[Row]:
    """Returns all rows, in the order of the analysis."""
    stored = json.loads(STORED.read_text())
    settings = {name: Setting(**values) for name, values in stored["settings"].items()}
    return [_row(settings, **number) for number in stored["numbers"]]


def _row(
    settings: dict[str, Setting],
    *,
    what: str,
    reference: str,
    quantity: str,
    setting: str | None = None,
    differs: str = "",
    **values: float,
) -> Row:
    where = [] if setting is None else [settings[setting]]
    if quantity in NUMBERS:
        number = partial(NUMBERS[quantity], *where, **values)
        return Row(what, reference, number, None, differs)
    naive, valid = (
        partial(PAIRS[quantity], epsilon, *where, **values)
        for epsilon in (naive_epsilon, _valid_epsilon)
    )
    return Row(what, reference, naive, valid, differs)


def _valid_epsilon(draws: Any, delta: float) -> float:
    return SampledBound(draws).epsilon(delta)


def _releases(setting: Setting, count: float, sensitivity: float) -> float:
    """Returns epsilon of `count` releases of one fake each, without amplification."""
    mu = math.sqrt(count) / SIGMA * sensitivity / 2
    return epsilon_from_mu(mu, setting.delta)


def _uniform_selection(setting: Setting, sensitivity: float) -> float:
    ratio = SIGMA / ROOT * 2 / sensitivity
    return binomial_epsilon(setting.rounds, 1 / setting.clients, ratio, setting.delta)


def _noise_of_all_clients(setting: Setting, target: float) -> float:
    mu = mu_from_epsilon(target, setting.delta)
    return 2 * math.sqrt(setting.rounds) / mu * ROOT / setting.clients


def _server_of_full_participation() -> float:
    mu = mu_from_epsilon(10, 1 / 539) * math.sqrt(539)
    return epsilon_from_mu(mu, 1 / 539)


@lru_cache(maxsize=256)
def _ratio(
    epsilon: Epsilon, setting: Setting, target: float, clients: int, shared: int
) -> float:
    """Returns the least ratio of a draw that reaches a target."""

    def excess(log_ratio: float) -> float:
        draws = setting.draws(math.exp(log_ratio), clients, shared)
        return epsilon(draws, setting.delta) - target

    found: Any = optimize
    return math.exp(float(found.brentq(excess, -2.0, 5.0, xtol=2e-5)))


NUMBERS: dict[str, Callable[..., float | None]] = {
    "mu": mu_from_epsilon,
    "epsilon of mu": epsilon_from_mu,
    "epsilon of the server": _server_of_full_participation,
    "epsilon by autodp": autodp_epsilon,
    "epsilon by RDP, Poisson": poisson_rdp_epsilon,
    "epsilon by RDP": lambda s, noise: RenyiBound(s.fakes(1, noise)).epsilon(s.delta),
    "epsilon of releases": _releases,
    "epsilon of uniform selection": _uniform_selection,
    "epsilon": lambda s, shared: _valid_epsilon(s.fakes(shared), s.delta),
    "delta": lambda s, shared, epsilon: SampledBound(s.fakes(shared)).delta(epsilon),
    "attained epsilon": lambda s: AttainedBound(*s.fakes()).epsilon(s.delta),
    "attained delta": lambda s, epsilon: AttainedBound(*s.fakes()).delta(epsilon),
    "noise of all clients": _noise_of_all_clients,
}
# Each by naive PLD, which is no bound, and by the dominating pair.
PAIRS: dict[str, Callable[..., float]] = {
    "both epsilons": lambda e, s, **fakes: e(s.fakes(**fakes), s.delta),
    "ratio": lambda e, s, target, clients: _ratio(e, s, target, clients, B),
    "sigma": lambda e, s, target, shared: (
        math.sqrt(shared) * _ratio(e, s, target, 1, shared)
    ),
    # Of one fake with C = 1; the ratio is of a round, replace-one.
    "noise of the average": lambda e, s, target, clients: (
        2 * ROOT / clients * _ratio(e, s, target, clients, B)
    ),
}
