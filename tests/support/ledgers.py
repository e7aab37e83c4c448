"""States the guarantee of events as a run of these settings would."""

from fedgs.privacy.accountant import statements_of_runs
from fedgs.privacy.same_clients import Run
from tiny import run_config


def statements_from_ledger(
    events, delta, *, num_rounds=None, colluding=0, at_epsilon=None, **settings
):
    """Returns what `statements_of_runs` does of one run; its settings may be given.

    Args:
        events: the ledger's, in order; none gives epsilon 0.
        delta: above 0 and below 1.
        num_rounds: that were planned; None: those of the events, fixed in advance.
        colluding: nodes that take their noise out of secagg's sum, at least 0.
        at_epsilon: state delta at this epsilon; delta is then not read.
        **settings: of `RunConfig`, over engine flower and a cohort as in the events.
    """
    events = tuple(events)
    planned = num_rounds or max((event.round for event in events), default=1)
    own = {"engine": "flower", "clients_per_round": None, "selection_hash": "one"}
    own |= settings
    run = Run(run_config(num_rounds=planned, **own), events)
    return statements_of_runs([run], delta, at_epsilon, colluding=colluding)
