"""The plans, the run and the event that tests of accounting and budget share."""

from dataclasses import replace

from fedgs.config.run_config import ResolvedConfig
from fedgs.privacy.ledger import Event
from fedgs.privacy.plan import Plan
from fedgs.privacy.selection_cost import SelectionCost

# The paper's federated run (Table 2), and its central run (Table 1).
PAPER = {"num_clients": 866, "clients_per_round": 1, "num_rounds": 30_000}
PAPER |= {"batch_size": 32, "noise_multiplier": 1.07}
TABLE_2 = Plan(**PAPER, client_selection=None, engine="flower")
TABLE_1 = replace(TABLE_2, num_clients=1000, num_rounds=20_000, engine="local")
# Everybody in every round, as in the design's prototype.
ALL = {"num_clients": 539, "clients_per_round": 539, "client_selection": "all"}
FULL = Plan(**ALL, num_rounds=150, batch_size=32, noise_multiplier=1.2)
# Two releases of embeddings, then four of gradients.
WITH_RELEASES = ResolvedConfig.from_flat(
    {
        **ALL,
        "image_size": 28,
        "image_channels": 1,
        "num_classes": 10,
        "clients_per_node": 49,
        "num_rounds": 6,
        "phases": "means:0.5,scatter:2,gs-wgan",
        "batch_size": 4,
        "noise_multiplier": 0.7,
        "engine": "flower",
        "seed": 0,
    }
)
# A private selection of the cohort.
COUNTS = {"num_counts": 8, "count_noise_std": 4.0, "membership_epsilon": 1.0}
COST = SelectionCost(noise_per_clip=2.0, num_releases=3, **COUNTS)


def event(round=1, **changes):
    values = {
        "round": round,
        "attempt": 1,
        "participants": (round % 10,),
        "num_clients": 10,
        "planned_nodes": 1,
        "counted_nodes": 1,
        "noise_std": 40.0,
        "clip_bound": 1.0,
        "batch_size": 4,
        "client_selection": "uniform",
        "discriminator_training": "selected",
        "noise_source": "os",
    }
    return Event(**values | changes)


def everybody(round, num_clients=10, **changes):
    """An event that all clients answer, one client on a node unless told otherwise."""
    counted = ("num_clients", "planned_nodes", "counted_nodes")
    counts = dict.fromkeys(counted, num_clients)
    asked = {"participants": "all", "client_selection": "all"}
    return event(round, **counts | asked | changes)


def frozen(round, **changes):
    """An event whose discriminators do not depend on who was selected."""
    return event(round, discriminator_training="frozen", **changes)


def epsilons(stated, **wanted):
    """The epsilons of the statements with these fields, in order."""
    known = wanted.items()
    return [s.epsilon for s in stated if all(getattr(s, n) == v for n, v in known)]


def epsilon(stated, **wanted):
    (found,) = epsilons(stated, **wanted)
    return found


def theorems(stated):
    return {statement.theorem for statement in stated}
