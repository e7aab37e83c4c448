"""Attack A against the paper's own accounting, of one round.

The published accountant composes B * T independently subsampled Gaussian releases. One
client is drawn per round and answers all B fakes: a single round refutes it. The
adversary sees the release only, not who was drawn; whoever is drawn instead of the
attacked client answers -C e.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, Theorem A.1 and reference
`privacy_analysis.py`; docs/privacy.md, "Why as published is not a bound".
"""

import secrets

import numpy as np

from fedgs.audit.finding import CONFIDENCE, Finding
from fedgs.audit.mechanism import CHOICE_SHARE, asked, bound_epsilon, node_scores
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.settings import REFERENCE_NOISE_MULTIPLIER, REFERENCE_NUM_CLIENTS
from fedgs.privacy.gaussian import binomial_epsilon
from fedgs.privacy.oracle import autodp_epsilon
from fedgs.privacy.plan import noise_ratio

DELTA = 1e-5
BATCH_SIZE = 32


def refute_published(trials: int) -> Finding:
    """Returns a lower bound for one round of the paper's own setting beside its claim.

    K = 1000, m = 1, noise multiplier 1.07, B = 32, delta 1e-5, replace-one. The valid
    epsilon of that round, the Binomial mixture, is `details["epsilon_mixture"]`.

    Privacy: public; reads no data.

    Args:
        trials: rounds of each of the two worlds, at least 100.
    """
    rate = 1 / REFERENCE_NUM_CLIENTS
    claimed = autodp_epsilon(REFERENCE_NOISE_MULTIPLIER, BATCH_SIZE, rate, DELTA)
    config = ResolvedConfig(
        num_clients=REFERENCE_NUM_CLIENTS,
        clients_per_round=1,
        num_classes=10,
        noise_multiplier=REFERENCE_NOISE_MULTIPLIER,
        batch_size=BATCH_SIZE,
        secure_noise=False,  # as in the paper's code
        seed=secrets.randbelow(2**31),
    )
    total = int(trials * (1 + CHOICE_SHARE))
    inside = node_scores(config, np.where(asked(config, total), 1.0, -1.0))
    outside = node_scores(config, np.full(total, -1.0))
    bound, rates = bound_epsilon(outside, inside, total - trials, DELTA, 1 - CONFIDENCE)
    z = noise_ratio(REFERENCE_NOISE_MULTIPLIER, BATCH_SIZE, "replace-one", 1)
    return Finding(
        attack="A paper's round",
        adversary="release",
        relation="replace-one",
        rounds=1,
        delta=DELTA,
        lower_bound=bound,
        epsilon=claimed,
        theorem="as published: RDP, Table 1",
        is_guarantee=False,
        details={
            "trials": trials,
            "num_clients": REFERENCE_NUM_CLIENTS,
            "noise_multiplier": REFERENCE_NOISE_MULTIPLIER,
            "batch_size": BATCH_SIZE,
            "epsilon_mixture": binomial_epsilon(1, rate, z, DELTA),
            **rates._asdict(),
        },
    )
