"""What a private selection of cohorts costs each client, and how runs add to it.

A client takes part in n rounds of federated averaging and in a number of counts, and
states its cohort once, by randomised response of pure epsilon_r. With the releases of a
run on the cohort, of ratio z_run, that is

    (1)  mu_s^2 = n (f / z)^2 + counts / s^2,  f = 2 replace-one, 1 zero-out
    (2)  mu^2 = mu_s^2 + n_run / z_run^2
    (3)  delta(epsilon) = p D(epsilon - epsilon_r) + (1 - p) D(epsilon + epsilon_r)

z is the noise on the sum of updates over their bound C, s the noise on a count, which
moves by at most 1 whatever a client's data are. D is the exact delta of Gaussian
releases with mu, Eqs. 2 and 3 of `fedgs.privacy.gaussian`, for epsilons of either sign,
and p = e^epsilon_r / (1 + e^epsilon_r). Without a run n_run = 0.

(2): the run is chosen by the selection's output (who is in the cohort), so this is
adaptive composition. (3): binary randomised response dominates all mechanisms of pure
epsilon_r. Its privacy loss is epsilon_r with probability p, else -epsilon_r, and the
losses of a composition add up, so each outcome shifts the epsilon of the rest. Where
the run's rounds are sampled, D is Eq. 3 of `fedgs.privacy.amplification`: one release
of mu_s by everybody is then one more kind of round. Several selections: mu_s^2 adds up,
and Eq. 3 is taken once for each.

>>> cost = SelectionCost(2.0, 8, 0, 0.0, 3.0)
>>> alone = cost.composed("release", "replace-one")
>>> round(cost.mu("release", "replace-one"), 3), round(alone.epsilon(1e-5), 2)
(2.828, 18.42)
>>> cost.composed("server", "replace-one").epsilon(1e-5)
inf

Source:
    (1), (2): Dong, Roth and Su, "Gaussian differential privacy", 2022, Corollary 3.3.
    (3): Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
    ICML 2015, Theorem 3.1; Warner, 1965 (randomised response).
    Updates: McMahan et al., "Learning differentially private recurrent language
    models", ICLR 2018.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self, cast

from scipy import optimize  # pyright: ignore

from fedgs.config.fields import coerce_fields, entry
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError, wrap_error
from fedgs.privacy.amplification import Sampled, SampledBound
from fedgs.privacy.gaussian import Law, fixed_law
from fedgs.privacy.plan import SENSITIVITIES
from fedgs.privacy.rounding import lower, upper

_INCLUDED = (
    "cohort selection is included: at most {} rounds of its classifier, with noise {} "
    "C on their sum; {} counts with noise {}; and a randomised response of epsilon {}"
)
_FIXED = (
    "cohort selection: the run's number of clients, rounds and noise were fixed before "
    "it; if its outcome decided them, only a cap that was set before holds, and no "
    "mixture"
)
_UNBOUNDED = (
    "cohort selection: its server sees each update with only its client's share of the "
    "noise, and comparisons without any, so the row of this adversary is unbounded"
)
_LARGEST_RATIO = 1e9  # more is no cost at all
_NOTHING = fixed_law(0)


@dataclass(frozen=True)
class SelectionCost:
    """What decides the epsilon of a private selection.

    Attributes:
        noise_per_clip: z, noise_std of the sum of updates over C, above 0. One of its
            m nodes has `RunConfig.noise_multiplier` = z / (2 sqrt(m)).
        num_releases: n, the most rounds of the classifier that a client takes part in.
        num_counts: how often a noisy number of clients below a threshold was taken.
        count_noise_std: s, its noise, above 0 if there are counts.
        membership_epsilon: epsilon_r of the randomised response, above 0.

    Raises:
        UserError: a value is out of its range.
    """

    noise_per_clip: float = entry(above=0)
    num_releases: int = entry(above=0)
    num_counts: int = entry(at_least=0)
    count_noise_std: float = entry(at_least=0)
    membership_epsilon: float = entry(above=0)

    def __post_init__(self) -> None:
        """Checks the ranges."""
        coerce_fields(self)
        if self.num_counts and not self.count_noise_std:
            raise UserError("count_noise_std = 0: counts need noise; give more than 0")

    def mu(self, adversary: str, relation: str) -> float:
        """Returns mu_s of Eq. 1: all but the randomised response.

        Args:
            adversary: release sees the classifier of every round, the thresholds and
                counts asked, and the cohorts. Of all others no bound is claimed: the
                server sees comparisons without noise.
            relation: a key of `SENSITIVITIES`.
        """
        if adversary != "release":
            return math.inf
        sensitivity = SENSITIVITIES[relation]
        training = self.num_releases * (sensitivity / self.noise_per_clip) ** 2
        counts = 0.0
        if self.num_counts:
            counts = self.num_counts / self.count_noise_std**2
        return math.sqrt(training + counts)

    def composed(
        self,
        adversary: str,
        relation: str,
        rounds: Law = _NOTHING,
    ) -> "Law | SampledBound | Composed":
        """Returns the guarantee of the selection and of a run on the cohort, together.

        Args:
            adversary: as in `mu`.
            relation: a key of `SENSITIVITIES`; that of the run's z.
            rounds: the rounds of a client in the run; nothing: the selection alone.
        """
        return with_selections(rounds, [self], adversary, relation)

    def conditions(self, adversary: str) -> tuple[str, ...]:
        """Returns what a statement depends on that includes this selection."""
        if adversary != "release":
            return (_UNBOUNDED,)
        # Less noise and more epsilon are the safe sides of what is quoted.
        included = _INCLUDED.format(
            self.num_releases,
            lower(self.noise_per_clip, 6),
            self.num_counts,
            lower(self.count_noise_std, 6),
            upper(self.membership_epsilon, 6),
        )
        return (included, _FIXED)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SelectionCost":
        """Reads the fields of a cost.

        Raises:
            UserError: other fields, or values out of range.
        """
        kinds = (UserError, KeyError, TypeError, ValueError)
        problem = f"selection cost {values}: it cannot be read"
        with wrap_error(kinds, problem, "select anew"):
            own = {spec.name: values[spec.name] for spec in fields(cls)}
            return cls(**own)


class Composed(NamedTuple):
    """Gaussian releases and one randomised response: Eq. 3.

    Attributes:
        rest: all but the response; with at least one release, so that its delta holds
            for epsilons of either sign.
        membership_epsilon: epsilon_r.
    """

    rest: "Law | SampledBound | Composed"
    membership_epsilon: float

    def delta(self, epsilon: float) -> float:
        """Returns Eq. 3.

        Args:
            epsilon: finite.
        """
        shift = self.membership_epsilon
        honest = 1 / (1 + math.exp(-shift))  # p, the chance of a true response
        of_honest = self.rest.delta(epsilon - shift)
        of_flipped = self.rest.delta(epsilon + shift)
        return honest * of_honest + (1 - honest) * of_flipped

    def epsilon(self, delta: float) -> float:
        """Returns the least epsilon at which Eq. 3 is at most delta, rounded up.

        inf if there is none: without noise, or if delta is not above the law's tail.

        Args:
            delta: above 0 and below 1.
        """
        if self.delta(0.0) <= delta:
            return 0.0
        # Basic composition bounds the root from above.
        high = self.rest.epsilon(delta) + self.membership_epsilon
        if high == math.inf or self.delta(high) > delta:
            return high

        def excess(epsilon: float) -> float:
            return self.delta(epsilon) - delta

        # Either is a bound: the root was rounded up.
        return min(_root(excess, 0.0, high), high)


def with_selections(
    rounds: Law | SampledBound,
    selections: Sequence[SelectionCost],
    adversary: str,
    relation: str,
) -> Law | SampledBound | Composed:
    """Returns the guarantee of runs and of the selections of their cohorts, together.

    Args:
        rounds: of the runs alone, as this adversary sees them under this relation.
        selections: each selection once; without any, nothing is added.
        adversary: as in `SelectionCost.mu`.
        relation: a key of `SENSITIVITIES`.
    """
    if not selections:
        return rounds
    mus = [selection.mu(adversary, relation) for selection in selections]
    # Gaussians first: their mu^2 add up, and Eq. 3 shifts the delta of what is there.
    result = _with_gaussians(rounds, math.hypot(*mus))
    for selection in selections:
        result = Composed(result, selection.membership_epsilon)
    return result


def _with_gaussians(rounds: Law | SampledBound, mu: float) -> Law | SampledBound:
    """Adds Gaussian releases of mu to rounds: Eq. 2."""
    if isinstance(rounds, SampledBound):
        everybody = Sampled(num_clients=1, clients_per_round=1, ratio=1 / mu, rounds=1)
        return rounds._replace(rounds=(*rounds.rounds, everybody))
    if mu == math.inf or rounds.ratio == 0:
        return fixed_law(1, 0.0)
    # So many releases of the run's z have this mu^2; they are certain, hence a shift.
    more = (rounds.ratio * mu) ** 2
    return rounds._replace(counts=rounds.counts + more)


class Target(NamedTuple):
    """What the releases of a run, and the selection of its cohort, may cost together.

    Attributes:
        epsilon: finite, at least 0.
        delta: above 0 and below 1.
        adversary: as in `SelectionCost.mu`.
        relation: a key of `SENSITIVITIES`.
        selections: as in `with_selections`.
    """

    epsilon: float
    delta: float
    adversary: str
    relation: str
    selections: tuple[SelectionCost, ...] = ()

    @classmethod
    def of(cls, config: RunConfig, selections: Iterable[SelectionCost] = ()) -> Self:
        """Returns what the settings of a run ask for; infinity where nothing."""
        epsilon = config.target_epsilon
        if epsilon is None:
            epsilon = math.inf
        return cls(
            epsilon=epsilon,
            delta=config.delta,
            adversary=config.adversary,
            relation=config.relation,
            selections=tuple(selections),
        )

    def excess(self, rounds: Law | SampledBound) -> float:
        """Returns how much the delta of rounds at this epsilon exceeds that asked."""
        together = with_selections(
            rounds,
            self.selections,
            adversary=self.adversary,
            relation=self.relation,
        )
        return together.delta(self.epsilon) - self.delta

    def is_kept(self, rounds: Law | SampledBound) -> bool:
        """Tells whether rounds, with the selections, cost no more than this."""
        return self.excess(rounds) <= 0

    def least_ratio(self, law: Law) -> float:
        """Returns the least z of a run's releases that keeps the target, rounded up.

        Args:
            law: the law of a client's number of releases.

        Raises:
            UserError: as `check`, or as `Law.smallest_ratio`.
        """
        self.check()

        def excess(ratio: float) -> float:
            return self.excess(law._replace(ratio=ratio))

        low = law.smallest_ratio(self.epsilon, self.delta)
        if not self.selections or excess(low) <= 0:
            return low
        # The selections cost something: the root lies above what the run alone needs.
        high = 2 * low
        while excess(high) > 0:
            if high > _LARGEST_RATIO:
                raise self._too_little()
            high *= 2
        return _root(excess, low, high)

    def check(self) -> None:
        """Refuses a target that the selections alone exceed.

        Raises:
            UserError: with what they cost.
        """
        if self.selections and self.excess(_NOTHING) >= 0:
            raise self._too_little()

    def _too_little(self) -> UserError:
        target = (
            f"target_epsilon = {self.epsilon:g}: the private selection of the cohort"
        )
        if self.adversary != "release":
            return UserError(
                f"{target} alone is unbounded for adversary = {self.adversary}, who "
                "sees it before its noise; give --adversary release, or a cohort of "
                "your own"
            )
        alone = with_selections(
            _NOTHING, self.selections, self.adversary, self.relation
        )
        delta = self.delta
        cost = upper(alone.epsilon(delta))
        return UserError(
            f"{target} alone costs {cost} ({self.relation}, delta "
            f"{delta:g}); give a larger --target-epsilon, or a cohort of your own"
        )


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Returns the root of a decreasing function, rounded up by 1e-10."""
    solve = cast(Any, optimize).brentq
    found = float(solve(excess, low, high, xtol=1e-12))
    # Up is the safe direction of an epsilon and of a noise ratio alike.
    return found * (1 + 1e-10) + 1e-10
