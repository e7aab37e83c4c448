"""What a run's releases cost: epsilon or delta for every adversary and relation.

It is computed for a plan, or for the ledgers of what was released. Each figure comes
with all that it depends on. `fedgs.privacy.participation` counts how often a client
took part, and the exact equations of `fedgs.privacy.gaussian` say what that costs.
Amplification by sampling (`fedgs.privacy.amplification`) is stated beside that, if it
was asked for and its conditions hold; otherwise a condition of the row says why not.

>>> plan = Plan(num_clients=539, clients_per_round=539, num_rounds=150, batch_size=32,
...             noise_multiplier=1.2, client_selection="all", engine="local")
>>> for s in statements(plan, delta=1e-5):
...     print(s.adversary, s.relation, s.unit, s.delta, round(s.epsilon or 0, 2))
release replace-one client 1e-05 13.12
release zero-out client 1e-05 5.64

Source: docs/privacy.md; its section names are those that docstrings cite.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, NamedTuple

from fedgs.config.amplification_rules import DEPLOYED, PUBLIC_SELECTION
from fedgs.errors import UserError
from fedgs.privacy.amplification import PLD_THEOREM, Sampled, SampledBound
from fedgs.privacy.budget import is_spent
from fedgs.privacy.gaussian import LEAST_DELTA, Law, check_numbers
from fedgs.privacy.participation import RunsOnSameClients
from fedgs.privacy.plan import (
    ADVERSARIES,
    ADVERSARY_COLUMNS,
    SENSITIVITIES,
    Plan,
    costs_of,
    relations_of,
)
from fedgs.privacy.rounding import upper
from fedgs.privacy.same_clients import DISCRETE, Run, conditions_of, numbered_alike
from fedgs.privacy.selection_cost import SelectionCost, with_selections
from fedgs.privacy.spending import Spending

# Labels of a statement: what it claims.
VALID = "valid"
SEEDED = "seeded: not private"
AS_PUBLISHED = "as published"
FIGURE_LABELS = (AS_PUBLISHED, "distributional")
# Conditions that begin so stand beside a figure wherever it is quoted.
LARGE_DELTA = "delta is too large to read"
HYPOTHETICAL = "hypothetical"
CAVEATS = (LARGE_DELTA, HYPOTHETICAL)
WITH_SELECTION = ", composed with the cohort's selection"
# What each adversary sees decides whose noise protects: `fedgs.privacy.plan` counts it.
_SEES = {
    "release": "adversary: it sees every generator that is published, so the noise of "
    "{nodes} protects",
    "server": "adversary: it is honest but curious, and sees who took part and each "
    "node's release, so the noise of one node protects",
    "secagg": "adversary: it is honest but curious and invents no nodes; it sees who "
    "took part and only the sum over at least {nodes}, of which {colluding} help it",
    "unmasked": "adversary: it is the server if masking fails, and sees each node's "
    "release, so the noise of one node protects",
}
_SEES_MASKED = (
    "adversary: it is computational, that is honest but curious with bounded computing "
    "power; it sees who took part and, behind masks, only the sum over at least "
    "{nodes}, of which {colluding} help it; this holds while at least two nodes of a "
    "round are honest"
)
_NOT_MASKED = (
    f"{HYPOTHETICAL}: this row supposes that all rounds were aggregated securely, and "
    "they are not; the row server states what the server of this run learns"
)
_MEANINGS = {
    "replace-one": "relation: one client's whole data set is replaced by any other",
    "zero-out": "relation: one client contributes the zero vector, and its place stays",
}
_OF_A_RECORD = (
    "relation: one record is replaced by any other; the number of records, the number "
    "of clients and the size of every shard are public and stay"
)
# How one unit may change, in the words of a report, by the relation.
CHANGES = {
    "zero-out": "contributes or contributes nothing",
    "replace-one": "has these data or any other",
    "add-or-remove": "is there or not",
}
# The conditions of docs/privacy.md, "Which theorem may be used when", 2, in its order.
# The code checks what settings and events show; the rest is the user's promise.
_AMPLIFIED = (
    "sampling: in each of {} m clients are drawn anew and uniformly, and answer all B "
    "fakes; the whole round is sampled, and then rounds are composed; the sensitivity "
    "is 2C sqrt(B) under either relation, because another client answers in the place "
    "of one that is not drawn",
    "sampling (a), which the setting amplification promises: nobody outside the "
    "server learns who was selected, nor anything that tells it; so nobody publishes "
    "private/, the ledger, metrics with times, or which node answered; whether a node "
    "answers does not depend on which client it hosts",
    "sampling (b): what a discriminator is does not depend on who was selected: it "
    "trains in every round or never, and an answer changes no bit of its state",
    "sampling: T, m, B, C and the noise were fixed in advance, and all attempts of a "
    "round ask the same clients",
)
_ASK = (
    "it was not requested; the setting amplification requests it, and promises that "
    "nobody learns who was selected"
)


@dataclass(frozen=True)
class Statement:
    """One epsilon and delta with all that they depend on.

    Attributes:
        label: `VALID`, or why it is no claim: `SEEDED`; `AS_PUBLISHED`, which is what
            the published code computes and is kept for comparison; "distributional",
            which holds over random data and is no differential privacy.
        unit: whom it protects: "client" (what one client stands for) or "record". For
            a central method it is "user", a client with all its images, or "record".
        relation: in what two neighbouring data sets differ: "replace-one", "zero-out",
            or for a central method "add-or-remove".
        epsilon: a number of at least 0. None means that it is unbounded; infinity
            becomes None.
        delta: a number from 1e-300, which stands for all smaller ones, to 1.
        theorem: the theorem that it was computed with.
        conditions: texts. Each says what the statement needs to be valid, or why no
            more is claimed.
        adversary: against whom it holds; one of `ADVERSARY_COLUMNS` of
            `fedgs.privacy.plan`.
        asked: which of the two numbers was computed from the other, "epsilon" or
            "delta".
        client_selection: how clients are selected: uniform, balanced or all. Where a
            ledger has several of these, they are joined by +.
        num_rounds: the number of rounds that it is about, or of releases for a central
            method.
    """

    label: str
    unit: str
    relation: str
    epsilon: float | None
    delta: float
    theorem: str
    conditions: tuple[str, ...] = ()
    _: KW_ONLY
    adversary: str = "release"
    asked: str = "epsilon"
    client_selection: str = "all"
    num_rounds: int = 0

    def __post_init__(self) -> None:
        """Makes an infinite epsilon None, because JSON has no infinity."""
        if self.epsilon == math.inf:
            object.__setattr__(self, "epsilon", None)

    @property
    def guarantee(self) -> bool:
        """Whether the statement guarantees anything, so that it may be quoted."""
        return self.label == VALID and self.epsilon is not None and self.delta < 1

    @property
    def is_hypothetical(self) -> bool:
        """Whether it supposes masks, and the rounds that it is about had none."""
        return _NOT_MASKED in self.conditions

    @property
    def unit_in_words(self) -> str:
        """What one unit is, in a few words; one of the conditions says more of it."""
        prefix = f"{self.unit}: "
        for condition in self.conditions:
            if condition.startswith(prefix):
                return in_short(condition)
        return f"one {self.unit}"

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, and whether it is a guarantee, as JSON values."""
        values = asdict(self)
        values["conditions"] = list(self.conditions)
        values["guarantee"] = self.guarantee
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Statement":
        """Returns the statement that `to_json` made; without a label it is no claim."""
        known: dict[str, Any] = {"label": "unlabelled", **values}
        del known["guarantee"]
        known["conditions"] = tuple(known["conditions"])
        return cls(**known)


def in_short(condition: str) -> str:
    """Returns the short part of a condition such as `RunConfig.unit_condition`."""
    return condition.partition(": ")[2].partition(";")[0]


def large_delta(delta: float, num_units: int) -> tuple[str, ...]:
    """Returns a condition if a delta is too large to read, and no condition if not.

    Args:
        delta: a number from 0 to 1.
        num_units: K, the number of clients or records that the guarantee may be about;
            0 if nothing was released.
    """
    if 10 * num_units * delta < 1:
        return ()
    # Such a delta allows the very thing that it should exclude.
    condition = (
        f"{LARGE_DELTA}: {upper(delta, 6)} is 1 / (10 K) or more for K = {num_units}; "
        "publishing the data of one of K, drawn by lot, has epsilon 0 at delta 1 / K"
    )
    return (condition,)


class _Rounds(NamedTuple):
    """What is planned to be released, or was, and what all its statements share.

    Attributes:
        selection, unit, num_rounds: as in `Statement`.
        num_clients: K; 0 if nothing was released.
        nodes: the smallest number of nodes of a round whose noise counts.
        is_masked: whether all releases are sums of secure aggregations.
        is_seeded: whether the noise of any release is seeded.
        laws: for each adversary the law of releases under replace-one, the name of its
            theorem and the condition under which it applies.
        no_amplification: why no row with amplification is stated, "" if it is.
        sampled: the draws that a row with amplification is about.
        shared: further conditions of all rows.
    """

    selection: str
    unit: str
    num_rounds: int
    num_clients: int
    nodes: int
    is_masked: bool
    is_seeded: bool
    laws: Mapping[str, tuple[Law, str, str]]
    no_amplification: str
    sampled: tuple[Sampled, ...]
    shared: tuple[str, ...] = ()


class _Question(NamedTuple):
    """What is asked about rounds; the arguments of `statements`."""

    delta: float
    at_epsilon: float | None
    colluding: int
    selections: tuple[SelectionCost, ...]

    def check(self) -> None:
        check_numbers(colluding=self.colluding)
        if self.at_epsilon is None:
            check_numbers(delta=self.delta)
        else:
            check_numbers(at_epsilon=self.at_epsilon)

    def rows(self, rounds: _Rounds) -> Iterator[Statement]:
        """Yields the statements for every adversary and relation."""
        for adversary, (law, theorem, why) in rounds.laws.items():
            for relation in relations_of(rounds.unit):
                # The ratio is that of replace-one; z grows as the sensitivity falls.
                scale = SENSITIVITIES["replace-one"] / SENSITIVITIES[relation]
                bound = law._replace(ratio=law.ratio * scale)
                yield self._row(
                    rounds,
                    adversary,
                    relation,
                    alone=bound,
                    theorem=theorem,
                    why=[why],
                )
        if rounds.no_amplification:
            return
        num_draws = sum(kind.rounds for kind in rounds.sampled)
        conditions = [text.format(f"{num_draws} rounds") for text in _AMPLIFIED]
        bound = SampledBound(rounds.sampled)
        # Only `release` does not see who takes part. The bound is the same under every
        # relation: in an unselected client's place somebody else answers.
        for relation in relations_of(rounds.unit):
            yield self._row(
                rounds,
                "release",
                relation,
                alone=bound,
                theorem=PLD_THEOREM,
                why=conditions,
            )

    def _row(
        self,
        rounds: _Rounds,
        adversary: str,
        relation: str,
        alone: Law | SampledBound,
        theorem: str,
        why: Sequence[str],
    ) -> Statement:
        """Returns one row: of the rounds, and of the selections where it can.

        `alone` is the bound of the rounds without the selections, under this relation;
        `theorem` names what it was computed with, `why` says on which conditions.
        """
        conditions = [*why, *self._conditions(rounds, adversary, relation)]
        bound = with_selections(alone, self.selections, adversary, relation)
        if self.selections:
            theorem += WITH_SELECTION
        for selection in self.selections:
            conditions += selection.conditions(adversary)
        if self.at_epsilon is None:
            asked = "epsilon"
            delta = self.delta
            epsilon = bound.epsilon(delta)
        else:
            asked = "delta"
            epsilon = self.at_epsilon
            # Less loses its digits, so that more is stated.
            delta = max(bound.delta(epsilon), LEAST_DELTA)
        label = VALID
        if rounds.is_seeded:
            # Whoever has the seed draws the noise again: nothing is guaranteed.
            label = SEEDED
        return Statement(
            label=label,
            unit=rounds.unit,
            relation=relation,
            epsilon=epsilon,
            delta=delta,
            theorem=theorem,
            # First, because nobody should read on without it.
            conditions=(*large_delta(delta, rounds.num_clients), *conditions),
            adversary=adversary,
            asked=asked,
            client_selection=rounds.selection,
            num_rounds=rounds.num_rounds,
        )

    def _conditions(
        self,
        rounds: _Rounds,
        adversary: str,
        relation: str,
    ) -> Iterator[str]:
        """Yields the conditions of a row that no theorem makes."""
        sees = _SEES[adversary]
        # Only if every round was masked: one bare round shows the node's own release.
        if adversary == "server" and rounds.is_masked:
            sees = _SEES_MASKED
        # The row is shown all the same, marked as hypothetical.
        if adversary == "secagg" and not rounds.is_masked:
            yield _NOT_MASKED
        nodes = f"{rounds.nodes} nodes"
        if rounds.nodes == 1:
            nodes = "1 node"
        yield sees.format(nodes=nodes, colluding=self.colluding)
        if rounds.unit == "record":
            yield _OF_A_RECORD
        else:
            yield _MEANINGS[relation]
        yield (
            "whether a node drops out does not depend on its data, and every node "
            "keeps to the batch size, the clip bound and the noise of the settings"
        )
        yield from rounds.shared
        if adversary == "release" and rounds.no_amplification:
            yield f"no amplification by sampling: {rounds.no_amplification}"
        if rounds.is_seeded:
            yield SEEDED


def statements(
    plan: Plan,
    delta: float,
    colluding: int = 0,
    at_epsilon: float | None = None,
    selections: Sequence[SelectionCost] = (),
) -> tuple[Statement, ...]:
    """Returns the guarantee of a plan for every selection, adversary and relation.

    Args:
        plan: the run; needs a noise multiplier.
        delta: above 0 and below 1.
        colluding: nodes that take their noise out of secagg's sum, at least 0.
        at_epsilon: state delta at this epsilon, at least 0; delta is then not read.
        selections: private ones of the run's cohort; see `fedgs.cohorts.cohort_file`.

    Raises:
        UserError: an argument is out of range, or there is no noise multiplier.

    Source: docs/privacy.md, "Which theorem may be used when".
    """
    question = _Question(
        delta=delta,
        at_epsilon=at_epsilon,
        colluding=colluding,
        selections=tuple(selections),
    )
    question.check()
    if plan.client_selection is None:
        possible = ("uniform", "balanced")
    else:
        possible = (plan.client_selection,)
    rows: list[Statement] = []
    # Unknown: both are stated, and nothing is claimed of which one holds.
    for selection in possible:
        rows += question.rows(_planned(plan, selection, colluding))
    return tuple(rows)


def _planned(plan: Plan, selection: str, colluding: int) -> _Rounds:
    reason = plan.why_not_amplified(selection)
    if reason:
        no_amplification = reason
    elif plan.amplification:
        no_amplification = ""
    else:
        no_amplification = _ASK
    # Of replace-one; `_Question.rows` scales them to the other relation.
    laws: dict[str, tuple[Law, str, str]] = {}
    for adversary in plan.adversaries:
        ratio = plan.ratio(adversary, "replace-one", colluding)
        laws[adversary] = plan.law(selection, ratio)
    shared = plan.public_conditions
    if plan.secure_aggregation:
        shared += (DISCRETE,)
    return _Rounds(
        selection=selection,
        unit=plan.privacy_unit,
        num_rounds=plan.num_rounds,
        num_clients=plan.num_clients,
        nodes=plan.counted_nodes,
        is_masked=plan.secure_aggregation,
        is_seeded=plan.noise_source == "seeded",
        laws=laws,
        no_amplification=no_amplification,
        sampled=plan.sampled(),
        shared=shared,
    )


def statements_of_runs(
    runs: Sequence[Run],
    delta: float,
    at_epsilon: float | None = None,
    is_reshuffled: bool = False,
    selections: Sequence[SelectionCost] = (),
    colluding: int = 0,
) -> tuple[Statement, ...]:
    """Returns the guarantee of several runs on the same clients, all of them together.

    An adversary has a row if it exists in every run: a local run has `release` only.

    Args:
        runs: at least one; that their clients are the same is for the caller to see.
            Clients of deployments are matched by node, others by number.
        delta: above 0 and below 1.
        at_epsilon: state delta at this epsilon, at least 0; delta is then not read.
        is_reshuffled: whether the unit is a record, in another shard in every run.
        selections: private ones of all the runs' cohorts, each once; see
            `fedgs.cohorts.cohort_file`.
        colluding: nodes that take their noise out of secagg's sum, at least 0.

    Raises:
        UserError: an argument is out of range, or the runs differ in what one client
            stands for, in the number of clients or in the nodes of a deployment.

    Source: docs/privacy.md, "Which theorem may be used when".
    """
    units = sorted({run.config.privacy_unit for run in runs})
    if len(units) != 1:
        raise UserError(
            f"privacy_unit = {' and '.join(units)}: runs of different units cannot be "
            "added; state them one by one"
        )
    question = _Question(
        delta=delta,
        at_epsilon=at_epsilon,
        colluding=colluding,
        selections=tuple(selections),
    )
    question.check()
    released = _released(runs, units[0], colluding, is_reshuffled)
    return tuple(question.rows(released))


def _released(
    runs: Sequence[Run],
    unit: str,
    colluding: int,
    is_reshuffled: bool,
) -> _Rounds:
    all_spent = [_spending(run, colluding) for run in numbered_alike(runs)]
    together = RunsOnSameClients(all_spent, is_reshuffled)
    # Every node of a deployment knows when it is asked.
    is_deployed = any(run.config.node_names for run in runs)
    reason = DEPLOYED if is_deployed else together.why_not_amplified()
    sampled: tuple[Sampled, ...] = ()
    if reason:
        no_amplification = reason
    elif not all(run.config.amplification for run in runs):
        # The promise that nobody learns who was drawn has to cover every run.
        no_amplification = _ASK
    else:
        no_amplification = ""
        sampled = together.sampled(ADVERSARY_COLUMNS.index("release"))
    masked = [event.is_discrete for run in runs for event in run.events]
    # Where nothing was masked, `unmasked` is `server` again.
    adversaries = ADVERSARY_COLUMNS if any(masked) else ADVERSARIES
    # Of a local run one curator sees everything: it has the adversary release only.
    if any(run.config.engine == "local" for run in runs):
        adversaries = ("release",)
    laws = {
        adversary: together.law(ADVERSARY_COLUMNS.index(adversary))
        for adversary in adversaries
    }
    selections = {name for spent in all_spent for name in spent.selections}
    # Runs without events have no clients to be matched.
    sizes = [run.num_clients for run in together.runs]
    return _Rounds(
        selection="+".join(sorted(selections)) or "none",
        unit=unit,
        num_rounds=sum(len(spent.draws) for spent in all_spent),
        num_clients=max(sizes, default=0),
        nodes=min((run.nodes for run in together.runs), default=0),
        is_masked=any(masked) and all(masked),
        is_seeded=any(spent.is_seeded for spent in all_spent),
        laws=laws,
        no_amplification=no_amplification,
        sampled=sampled,
        shared=conditions_of(runs),
    )


def _spending(run: Run, colluding: int) -> Spending:
    config = run.config
    spent = Spending(
        selection_hash=config.selection_hash,
        largest_node=config.largest_node,
        cohort=config.clients_per_round or 0,
    )
    for event in run.events:
        spent.add(event, costs_of(event, colluding))
    # Without the hash of a secret the draws followed from the seed, which is public:
    # they were known, and no client's number of rounds was random.
    why = PUBLIC_SELECTION
    if config.selection_hash:
        why = _why_ended_early(run, spent)
    # The exact count holds for any end and any selection: it is what remains then.
    spent.no_mixture = spent.no_mixture or why
    spent.no_amplification = spent.no_amplification or why
    return spent


def _why_ended_early(run: Run, spent: Spending) -> str:
    """Returns why the number of a run's rounds is not one that was fixed in advance.

    The mixture and amplification are of T draws. A run that was stopped, or is going
    on, may have stopped because of who was drawn. One whose budget allows no further
    round ended at a number that noise, B and target decide.
    """
    done = len(spent.draws)
    planned = run.planned_rounds or run.config.num_rounds
    if done == 0 or done >= planned:
        return ""
    if is_spent(run.config, run.events, run.selections):
        return ""
    return f"the events end after {done} of {planned} planned rounds"
