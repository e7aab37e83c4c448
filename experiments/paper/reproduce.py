"""`fedgs privacy reproduce`: recomputes the published and the analysed numbers.

Every row has a reference value, as printed by its source with all its digits, and our
own computation of the same quantity. Where the reference is a figure that is no bound
(the larger of the two directions of a subsampled round), the row also has what the
dominating pair gives. Nothing is copied from one column to the other. The rows are in
`reproduce.json`: each names its computation here, in `NUMBERS` or `PAIRS`, and the
arguments.

Source: GS-WGAN, Tables 1 and 2, and its reference `privacy_analysis.py`;
docs/privacy.md, "Which theorem may be used when" and "Why 'as published' is not a
bound".
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from scipy import optimize

from fedgs.app.commands.run_outcome import Exit
from fedgs.app.commands.terminal import Progress
from fedgs.app.tables import Table
from fedgs.files import read_json
from fedgs.privacy.amplification import Sampled, SampledBound
from fedgs.privacy.gaussian import binomial_law, epsilon_from_mu, mu_from_epsilon
from fedgs.privacy.oracle import (
    autodp_epsilon,
    poisson_rdp_epsilon,
    sampled_rdp_epsilon,
    two_directions,
)
from fedgs.privacy.rounding import upper

SIGMA = 1.07
B = 32
ROOT = math.sqrt(B)
STORED_NUMBERS = Path(__file__).with_suffix(".json")
MOST_DEVIATION = 0.01  # relative, of a number whose difference is explained
_ROUNDING = 1e-13
Epsilon = Callable[[Any, float], float]  # of sampled rounds at a delta


class Result(NamedTuple):
    """One reproduced number; the fields of `--json`.

    Attributes:
        what: the quantity.
        reference: as its source prints it; its digits are the tolerance. ">= x" and
            "<= x" are bounds.
        ours: the same quantity, computed.
        dominating: the valid bound, where the reference is none; else None.
        agrees: whether `ours` is the reference to the digits that it has.
        note: why the two differ, where they may.
    """

    what: str
    reference: str
    ours: float
    dominating: float | None
    agrees: bool
    note: str


class Setting(NamedTuple):
    """One of the paper's two runs: K clients, T rounds, a delta."""

    clients: int
    rounds: int
    delta: float

    def draws(self, ratio: float, clients: int = 1, shared: int = B) -> Any:
        """Returns the draws of all rounds.

        Args:
            ratio: noise of the sum of a draw, over its sensitivity.
            clients: the number of clients of a draw.
            shared: fakes of a draw; all B of them is the algorithm.
        """
        # Draws of fewer fakes take so many times more of them.
        num_draws = self.rounds * (B // shared)
        return (Sampled(self.clients, clients, ratio, num_draws),)

    def fakes(self, shared: int = B, noise: float = SIGMA) -> Any:
        """Returns the draws of one client, by the noise of one fake."""
        ratio = noise / math.sqrt(shared)
        return self.draws(ratio, shared=shared)


def agrees(reference: str, ours: float) -> bool:
    """Tells whether a number is the reference, to the digits that it is printed with.

    >>> agrees("346.66", 346.6557), agrees("346.66", 346.67), agrees(">= 327.6", 330)
    (True, False, True)
    """
    sign, _, text = reference.rpartition(" ")
    text = text.replace(",", "")
    if sign == ">=":
        return ours >= float(text)
    if sign:
        return ours <= float(text)
    # Half a unit of the last digit that is printed, and a little for rounding.
    mantissa, _, power = text.lower().partition("e")
    _, _, decimals = mantissa.partition(".")
    exponent = int(power or 0) - len(decimals)
    unit = 10.0**exponent
    return abs(ours - float(text)) <= 0.5000001 * unit


def is_close(reference: str, ours: float) -> bool:
    """Tells whether a number is near enough to the reference to be explained.

    >>> is_close("2,059", 2057.7), is_close("2,059", 2101)
    (True, False)
    """
    _, _, text = reference.rpartition(" ")
    value = float(text.replace(",", ""))
    allowed = max(MOST_DEVIATION * value, _ROUNDING)
    return abs(ours - value) <= allowed


def results(numbers: Iterable[Mapping[str, Any]]) -> Iterator[Result]:
    """Computes rows of `reproduce.json`, one after the other."""
    known = read_json(STORED_NUMBERS)["settings"]
    settings = {name: Setting(**values) for name, values in known.items()}
    for number in numbers:
        values = dict(number)
        what = values.pop("what")
        reference = values.pop("reference")
        quantity = values.pop("quantity")
        why_different = values.pop("differs", "")
        where: list[Setting] = []
        if "setting" in values:
            where.append(settings[values.pop("setting")])
        # Some quantities have a figure that is no bound, and the bound beside it.
        dominating = None
        if quantity in NUMBERS:
            found = NUMBERS[quantity](*where, **values)
            ours = math.inf  # where there is no finite number
            if found is not None:
                ours = float(found)
        else:
            compute = PAIRS[quantity]
            ours = float(compute(_naive_epsilon, *where, **values))
            dominating = float(compute(_valid_epsilon, *where, **values))
        is_same = agrees(reference, ours)
        note = ""
        if not is_same and is_close(reference, ours):
            note = why_different
        yield Result(
            what=what,
            reference=reference,
            ours=ours,
            dominating=dominating,
            agrees=is_same,
            note=note,
        )


def _naive_epsilon(draws: Any, delta: float) -> float:
    return two_directions(*draws).get_epsilon_for_delta(delta)


def _valid_epsilon(draws: Any, delta: float) -> float:
    return SampledBound(draws).epsilon(delta)


def _releases(setting: Setting, count: float, sensitivity: float) -> float:
    """Returns epsilon of `count` releases of one fake each, without amplification."""
    # SIGMA is a multiple of 2C, and the sensitivity one of C.
    mu = math.sqrt(count) / SIGMA * sensitivity / 2
    return epsilon_from_mu(mu, setting.delta)


def _uniform_selection(setting: Setting, sensitivity: float) -> float:
    ratio = SIGMA / ROOT * 2 / sensitivity
    law = binomial_law({1: setting.rounds}, 1 / setting.clients, ratio)
    return law.epsilon(setting.delta)


def _noise_of_all_clients(setting: Setting, target: float) -> float:
    mu = mu_from_epsilon(target, setting.delta)
    of_sum = 2 * math.sqrt(setting.rounds) / mu * ROOT
    return of_sum / setting.clients  # of the average


def _server_of_full_participation() -> float:
    clients = 539
    delta = 1 / clients
    # The server sees each client's release under the noise of that one alone.
    of_release = mu_from_epsilon(10, delta)
    of_server = of_release * math.sqrt(clients)
    return epsilon_from_mu(of_server, delta)


@lru_cache(maxsize=256)
def _ratio(
    epsilon: Epsilon,
    setting: Setting,
    target: float,
    clients: int,
    shared: int,
) -> float:
    """Returns the least ratio of a draw that reaches a target."""

    def excess(log_ratio: float) -> float:
        draws = setting.draws(math.exp(log_ratio), clients, shared)
        return epsilon(draws, setting.delta) - target

    found: Any = optimize
    # In logarithms: the ratios of all rows lie between e^-2 and e^5.
    log_ratio = found.brentq(excess, -2.0, 5.0, xtol=2e-5)
    return math.exp(float(log_ratio))


@lru_cache
def _attained(setting: Setting) -> Any:
    return two_directions(*setting.fakes(), is_attained=True)


NUMBERS: dict[str, Callable[..., float | None]] = {
    "mu": mu_from_epsilon,
    "epsilon of mu": epsilon_from_mu,
    "epsilon of the server": _server_of_full_participation,
    "epsilon by autodp": autodp_epsilon,
    "epsilon by RDP, Poisson": poisson_rdp_epsilon,
    "epsilon by RDP": lambda s, noise: sampled_rdp_epsilon(
        s.fakes(1, noise)[0], s.delta
    ),
    "epsilon of releases": _releases,
    "epsilon of uniform selection": _uniform_selection,
    "epsilon": lambda s, shared: _valid_epsilon(s.fakes(shared), s.delta),
    "delta": lambda s, shared, epsilon: SampledBound(s.fakes(shared)).delta(epsilon),
    "attained epsilon": lambda s: _attained(s).get_epsilon_for_delta(s.delta),
    "attained delta": lambda s, epsilon: _attained(s).get_delta_for_epsilon(epsilon),
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


def main(as_json: bool) -> None:
    """Recomputes all numbers and prints them; progress goes to standard error.

    Raises:
        Exit: a number that should agree does not (code 1).
    """
    numbers = read_json(STORED_NUMBERS)["numbers"]
    # One by one: some take seconds, and the progress says which.
    done: list[Result] = []
    with Progress() as progress:
        stage = progress.stage("number")
        for result in results(numbers):
            done.append(result)
            stage(len(done), len(numbers), result.what)
    if as_json:
        print(json.dumps([result._asdict() for result in done], indent=2))
    else:
        _show(done)
    for result in done:
        if not result.agrees and not result.note:
            raise Exit(1)


def _show(done: list[Result]) -> None:
    rows: list[list[str]] = []
    same = 0
    for result in done:
        valid = ""
        if result.dominating is not None:
            valid = upper(result.dominating, 6)
        if result.agrees:
            verdict = "yes"
            same += 1
        else:
            why = result.note or "NOT EXPLAINED"
            verdict = f"no: {why}"
        ours = f"{result.ours:.6g}"
        rows.append([result.what, result.reference, ours, valid, verdict])
    note = (
        f"{same} of {len(done)} agree to the digits given; the others are explained, "
        "or the exit code is 1. A figure marked 'no bound' is no guarantee; the "
        "dominating pair's number beside it is the one to use."
    )
    head = ["quantity", "reference", "ours", "dominating pair", "agrees"]
    Table("Numbers of the paper and of the analysis", head, rows, note).show()
