"""The paper's accountant, autodp: figures for comparison, never for a guarantee.

autodp is the extra `oracle`; it is imported when a figure is asked for.

Source: Wang, Balle and Kasiviswanathan, "Subsampled Renyi differential privacy and
analytical moments accountant", AISTATS 2019; as used by GS-WGAN, reference
`privacy_analysis.py`.
"""

import contextlib
import importlib
import io
import warnings
from typing import Any

from fedgs.privacy.accountant import AS_PUBLISHED, Statement
from fedgs.privacy.amplification import Sampled, grid_step
from fedgs.privacy.gaussian import check_numbers
from fedgs.privacy.plan import Plan

_TABLE_1 = (
    "T*B independently subsampled releases are composed, but one client is drawn per "
    "round and answers all B fakes; and a discriminator that trains only when selected "
    "remembers the selection"
)
_TABLE_2 = "a client's average of {:.2f} rounds is composed, and many exceed it"


def autodp_epsilon(
    multiplier: float,
    count: float,
    rate: float | None,
    delta: float,
) -> float | None:
    """Returns autodp's epsilon of Gaussian releases; None means unbounded.

    Privacy: public. Not a bound for GS-WGAN; see `as_published`.

    Args:
        multiplier: noise / sensitivity of one release, at least 0; 0 is no noise.
        count: number of releases, above 0; need not be whole if rate is None.
        rate: chance that a release sees the data, subsampled each time; None for all.
        delta: above 0 and below 1.

    Source: autodp, `rdp_acct.anaRDPacct` and `rdp_bank.RDP_gaussian`.
    """
    if multiplier == 0:
        return None
    # Imported here: it loads matplotlib, and most commands do not need it.
    rdp_acct: Any = importlib.import_module("autodp.rdp_acct")
    rdp_bank: Any = importlib.import_module("autodp.rdp_bank")

    def rdp(order: float) -> float:
        return rdp_bank.RDP_gaussian({"sigma": multiplier}, order)

    accountant: Any = rdp_acct.anaRDPacct()
    # autodp prints its warnings, which would be in the way of --json.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if rate is None:
            accountant.compose_mechanism(rdp, coeff=count)
        else:
            accountant.compose_subsampled_mechanism(rdp, rate, coeff=count)
        return float(accountant.get_eps(delta))


def as_published(plan: Plan, delta: float) -> tuple[Statement, ...]:
    """Returns the paper's figures, Table 1's and (with nodes) Table 2's: no bounds.

    Args:
        plan: the run; needs a noise multiplier.
        delta: above 0 and below 1.

    Returns:
        Nothing unless m = 1 and the selection is uniform or unknown.

    Raises:
        UserError: delta is out of range, or there is no noise multiplier.

    Source: GS-WGAN, Tables 1 and 2; reference `privacy_analysis.py`; docs/privacy.md,
        "Why 'as published' is not a bound".
    """
    check_numbers(delta=delta)
    if plan.clients_per_round != 1 or plan.client_selection not in ("uniform", None):
        return ()
    plan.ratio("release", "replace-one", 0)  # refuses a plan without noise multiplier
    multiplier = plan.noise_multiplier or 0.0
    rate = 1 / plan.num_clients
    releases = plan.num_rounds * plan.batch_size
    table_1 = autodp_epsilon(multiplier, releases, rate, delta)
    table_2 = autodp_epsilon(multiplier, releases * rate, None, delta)
    average = _TABLE_2.format(plan.num_rounds * rate)
    rows = (("release", table_1, "1", _TABLE_1), ("server", table_2, "2", average))
    return tuple(
        Statement(
            label=AS_PUBLISHED,
            unit=plan.privacy_unit,
            relation="replace-one",
            epsilon=epsilon,
            delta=delta,
            theorem=f"as published: RDP, Table {table}",
            conditions=(f"not a bound: {why}", *plan.public_conditions),
            adversary=adversary,
            client_selection="uniform",
            num_rounds=plan.num_rounds,
        )
        for adversary, epsilon, table, why in rows
        if adversary in plan.adversaries
    )


def poisson_rdp_epsilon(
    multiplier: float,
    rate: float,
    count: int,
    delta: float,
) -> float:
    """Returns dp-accounting's RDP epsilon of Poisson-subsampled Gaussian releases.

    Privacy: public. Not a bound for GS-WGAN, which draws a fixed number of clients.

    Args:
        multiplier: noise / sensitivity of one release, above 0.
        rate: chance that a release sees the data, from 0 to 1.
        count: number of releases, each sampled anew.
        delta: above 0 and below 1.

    Source: dp-accounting, `RdpAccountant`, add-or-remove relation.
    """
    dp: Any = importlib.import_module("dp_accounting")
    accountant = dp.rdp.RdpAccountant()
    release = dp.GaussianDpEvent(multiplier)
    sampled = dp.PoissonSampledDpEvent(rate, release)
    accountant.compose(sampled, count)
    return float(accountant.get_epsilon(delta))


def sampled_rdp_epsilon(kind: Sampled, delta: float) -> float:
    """Returns dp-accounting's RDP epsilon of rounds that are sampled, replace-one.

    Privacy: public. A looser bound than `fedgs.privacy.amplification`: it allows no
    order between 1 and 2 of its own, so a small z makes it useless.

    Args:
        kind: the rounds; z above 0.
        delta: above 0 and below 1.

    Source: Wang, Balle and Kasiviswanathan, AISTATS 2019, Theorem 27 of the full
        version.
    """
    dp: Any = importlib.import_module("dp_accounting")
    relation = dp.NeighboringRelation.REPLACE_ONE
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation)
    release = dp.GaussianDpEvent(kind.ratio)
    sampled = dp.SampledWithoutReplacementDpEvent(
        kind.num_clients, kind.clients_per_round, release
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountant.compose(sampled, kind.rounds)
        return float(accountant.get_epsilon(delta))


def two_directions(kind: Sampled, is_attained: bool = False) -> Any:
    """Returns dp-accounting's privacy losses of sampled rounds, by direction.

    Its epsilon is the larger one of both directions: common, and no bound, for a round
    may go either way; see `fedgs.privacy.amplification`. With losses rounded down it
    is attained: no accountant can state less. One client then always sends +C e and all
    others -C e, for one unit vector e.

    Privacy: public; for comparison only.

    Args:
        kind: the rounds; z above 0.
        is_attained: round losses down, on a grid of 1e-4.

    Source: Lebeda, Regehr, Kamath and Steinke, "Avoiding pitfalls for privacy
        accounting of subsampled mechanisms under composition", 2024.
    """
    pld: Any = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    step = 1e-4 if is_attained else grid_step((kind,))
    one = pld.from_gaussian_mechanism(
        kind.ratio,
        pessimistic_estimate=not is_attained,
        value_discretization_interval=step,
        use_connect_dots=not is_attained,  # which only rounds up
        sampling_prob=kind.rate,
    )
    return one.self_compose(kind.rounds)
