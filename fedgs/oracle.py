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

from fedgs.config import UserError


class AutodpMissing(UserError):
    """autodp is not installed: the figures as published cannot be computed."""


def autodp_epsilon(
    multiplier: float, count: float, rate: float | None, delta: float
) -> float | None:
    """Returns autodp's epsilon of Gaussian releases; None means unbounded.

    Privacy: public. Not a bound for GS-WGAN; see `fedgs.accounting.as_published`.

    Args:
        multiplier: noise / sensitivity of one release, at least 0; 0 is no noise.
        count: number of releases, above 0; need not be whole if rate is None.
        rate: chance that a release sees the data, subsampled each time; None for all.
        delta: above 0 and below 1.

    Raises:
        AutodpMissing: it is not installed.

    Source: autodp, `rdp_acct.anaRDPacct` and `rdp_bank.RDP_gaussian`.
    """
    if multiplier == 0:
        return None
    try:
        rdp_acct: Any = importlib.import_module("autodp.rdp_acct")
        rdp_bank: Any = importlib.import_module("autodp.rdp_bank")
    except ModuleNotFoundError as error:
        if error.name != "autodp":  # something that autodp itself needs
            raise
        remedy = "the figures as published need it: pip install 'fedgs[oracle]'"
        raise AutodpMissing(f"autodp is not installed; {remedy}") from error

    def rdp(order: float) -> float:
        return rdp_bank.RDP_gaussian({"sigma": multiplier}, order)

    accountant: Any = rdp_acct.anaRDPacct()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if rate is None:
            accountant.compose_mechanism(rdp, coeff=count)
        else:
            accountant.compose_subsampled_mechanism(rdp, rate, coeff=count)
        return float(accountant.get_eps(delta))
