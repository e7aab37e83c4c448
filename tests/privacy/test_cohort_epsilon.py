"""The epsilon of a run on a privately selected cohort: both together, or why not."""

import contextlib
import json
import math
from dataclasses import replace

import pytest

import runs
from experiments.commands import privacy as privacy_report
from fedgs.cohorts.files import EXCLUDED, GIVEN, Cohort, selection_costs, write_cohort
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.federation.preparation import resolve, with_noise
from fedgs.federation.training import BudgetSpent
from fedgs.privacy.accounting import WITH_SELECTION, Run, statements, statements_of_runs
from fedgs.privacy.amplification import MOST_KINDS, Sampled, SampledBound
from fedgs.privacy.budget import Budget, calibrate_noise, largest_num_rounds
from fedgs.privacy.plan import Plan
from fedgs.privacy.selection_cost import SelectionCost, with_selections
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder
from plans import event, everybody, frozen
from refusals import assert_refused
from tiny import open_config, tiny_config, write_tiny_npz

DELTA = 1e-5
COST = SelectionCost(
    noise_per_clip=2.0,
    num_releases=3,
    num_counts=8,
    count_noise_std=4.0,
    membership_epsilon=1.0,
)
# mu^2 of the selection: 3 (f / 2)^2 + 8 / 4^2, f = 2 replace-one, 1 zero-out.
SELECTION = {"replace-one": 3 + 0.5, "zero-out": 0.75 + 0.5}
# All 10 clients in all 4 rounds. z^2 = sigma^2 n / B (2 / f)^2 for the sum of 10 nodes.
PLAN = Plan(
    num_clients=10,
    clients_per_round=10,
    num_rounds=4,
    batch_size=4,
    noise_multiplier=2.0,
    client_selection="all",
)
RUN = {"replace-one": 4 / (4 * 10 / 4), "zero-out": 4 / (4 * 10 / 4 * 4)}
SAMPLED = Plan(
    num_clients=10,
    clients_per_round=2,
    num_rounds=50,
    batch_size=4,
    noise_multiplier=8.0,
    client_selection="uniform",
    discriminator_training="frozen",
    amplification=True,
)
BOTH = pytest.mark.parametrize("relation", ["replace-one", "zero-out"])


def by_hand(mu_squared: float, response: float, epsilon: float) -> float:
    """Delta of Gaussian releases and one randomised response, with erfc alone."""

    def normal(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def gaussian(at: float) -> float:
        mu = math.sqrt(mu_squared)
        second = math.exp(at) * normal(-mu / 2 - at / mu)
        return normal(mu / 2 - at / mu) - second

    keep = math.exp(response) / (1 + math.exp(response))
    return keep * gaussian(epsilon - response) + (1 - keep) * gaussian(
        epsilon + response
    )


def row(found, adversary="release", relation="replace-one", theorem=""):
    (chosen,) = [
        s
        for s in found
        if (s.adversary, s.relation) == (adversary, relation) and theorem in s.theorem
    ]
    return chosen


# ------------------------------------------------------------------ statements


@BOTH
def test_mu_squared_of_selection_and_run_adds_up(relation):
    found = row(statements(PLAN, DELTA, selections=[COST]), relation=relation)
    mu_squared = SELECTION[relation] + RUN[relation]
    assert by_hand(mu_squared, 1.0, found.epsilon) == pytest.approx(DELTA, rel=1e-4)
    assert by_hand(mu_squared, 1.0, found.epsilon) <= DELTA
    assert found.guarantee
    assert found.theorem.endswith(WITH_SELECTION)
    assert any("at most 3 rounds" in text for text in found.conditions)
    assert any("were fixed before it" in text for text in found.conditions)


def test_epsilon_of_both_is_the_known_number():
    """mu^2 = 3.5 + 0.4; by a Riemann sum over losses, normal of mean mu^2 / 2."""
    found = row(statements(PLAN, DELTA, selections=[COST])).epsilon
    mu, step, delta = math.sqrt(3.9), 1e-3, 0.0
    keep = 1 / (1 + math.exp(-1.0))
    for number in range(-12_000, 20_000):
        loss = (number + 0.5) * step
        density = math.exp(-((loss - mu**2 / 2) ** 2) / (2 * mu**2)) / mu
        for shift, chance in ((1.0, keep), (-1.0, 1 - keep)):
            lost = max(0.0, 1 - math.exp(found - loss - shift))
            delta += chance * lost * density * step / math.sqrt(2 * math.pi)
    assert delta == pytest.approx(DELTA, rel=1e-3)


@pytest.mark.parametrize("adversary", ["server", "secagg"])
def test_who_sees_the_server_has_no_bound(adversary):
    found = row(statements(PLAN, DELTA, selections=[COST]), adversary)
    assert (found.epsilon, found.guarantee) == (None, False)
    assert any("before it adds the noise" in text for text in found.conditions)
    assert row(statements(PLAN, DELTA), adversary).guarantee


@BOTH
def test_ledger_gives_the_same_as_its_plan(relation):
    events = [everybody(round, noise_std=4.0) for round in (1, 2, 3, 4)]
    config = RunConfig(engine="flower", client_selection="all")
    found = statements_of_runs([Run(config, events)], DELTA, selections=[COST])
    planned = statements(PLAN, DELTA, selections=[COST])
    expected = row(planned, relation=relation).epsilon
    assert row(found, relation=relation).epsilon == pytest.approx(expected, rel=1e-9)


def test_delta_at_an_epsilon_is_composed_too():
    found = row(statements(PLAN, DELTA, at_epsilon=6.0, selections=[COST]))
    assert found.delta == pytest.approx(by_hand(3.9, 1.0, 6.0), rel=1e-9)


def test_amplified_rows_are_composed_and_the_second_opinion_is_not(coarse_grid):
    found = statements(SAMPLED, DELTA, selections=[COST])
    alone = statements(SAMPLED, DELTA)
    plain = row(found, theorem="mixture").epsilon
    amplified = row(found, theorem="dominating")
    selection = COST.composed("release", "replace-one").epsilon(DELTA)
    assert max(selection, row(alone, theorem="dominating").epsilon) < amplified.epsilon
    assert amplified.epsilon < plain
    assert amplified.guarantee
    opinion = row(found, theorem="RDP")
    assert not opinion.guarantee
    assert opinion.epsilon == row(alone, theorem="RDP").epsilon
    assert any(text.startswith("excludes cohort sel") for text in opinion.conditions)
    assert row(alone, theorem="RDP").guarantee


@BOTH
def test_sampling_everybody_composes_as_the_count_does(relation):
    """Rate 1 is no amplification: two ways to the same number, replace-one's z."""
    rounds = SampledBound((Sampled(10, 10, 4.0, 50),))
    sampled = with_selections(rounds, [COST], "release", relation)
    mu_squared = 50 / 4.0**2 + SELECTION[relation]
    for epsilon in (0.5, 4.0, 9.0):
        expected = by_hand(mu_squared, 1.0, epsilon)
        assert sampled.delta(epsilon) == pytest.approx(expected, rel=2e-3)
        assert sampled.delta(epsilon) >= expected


def test_a_selection_joins_as_many_kinds_of_rounds_as_there_may_be(coarse_grid):
    kinds = [Sampled(10, 2, 40.0 + n, 1) for n in range(MOST_KINDS)]
    bound = with_selections(SampledBound((*kinds,)), [COST], "release", "zero-out")
    alone = COST.composed("release", "zero-out").delta(4.0)
    assert alone < bound.delta(4.0) < 1.2 * alone


def test_two_selections_cost_twice():
    once = row(statements(PLAN, DELTA, selections=[COST])).epsilon
    twice = row(statements(PLAN, DELTA, selections=[COST, COST])).epsilon
    silent = replace(COST, membership_epsilon=1e-12)
    expected = row(statements(PLAN, DELTA, selections=[silent, silent])).epsilon
    mu_squared = 2 * SELECTION["replace-one"] + RUN["replace-one"]
    assert by_hand(mu_squared, 0.0, expected) == pytest.approx(DELTA, rel=1e-4)
    assert once + 1 < expected < twice < expected + 2


# ------------------------------------------------------------------ calibration


@pytest.mark.parametrize("is_amplified", [False, True])
@BOTH
def test_calibrated_noise_is_the_least_within_the_target(
    coarse_grid, relation, is_amplified
):
    plan = replace(SAMPLED, amplification=is_amplified)
    asked = (14.0, DELTA, "release", relation)
    noise = calibrate_noise(plan, *asked, selections=[COST])
    assert noise > calibrate_noise(plan, *asked)

    def epsilon(noise: float) -> float:
        found = statements(
            replace(plan, noise_multiplier=noise), DELTA, selections=[COST]
        )
        chosen = [s for s in found if s.relation == relation and s.guarantee]
        return min(s.epsilon for s in chosen)

    assert epsilon(noise) <= 14.0 < epsilon(noise * (1 - 2e-3))


def test_largest_number_of_rounds_counts_the_selection():
    asked = (14.0, DELTA, "release", "replace-one")
    most = largest_num_rounds(PLAN, *asked, selections=[COST])
    assert most < largest_num_rounds(PLAN, *asked)
    for rounds, holds in ((most, True), (most + 1, False)):
        plan = replace(PLAN, num_rounds=rounds)
        found = row(statements(plan, DELTA, selections=[COST]))
        assert (found.epsilon <= 14.0) == holds


REFUSED = (
    (2.0, "release", r"the private selection of the cohort alone costs \d"),
    (50.0, "server", r"is unbounded for adversary = server, .* --adversary release"),
)


@pytest.mark.parametrize(("target", "adversary", "named"), REFUSED)
@pytest.mark.parametrize("what", [calibrate_noise, largest_num_rounds, Budget])
def test_targets_that_the_selection_alone_exceeds_are_refused(
    target, adversary, named, what
):
    asked = (target, DELTA, adversary, "replace-one")
    with pytest.raises(UserError, match=f"target_epsilon = {target:g}: .*{named}"):
        what(PLAN, *asked, selections=[COST])


@pytest.mark.parametrize(
    ("plan", "make"),
    [
        (replace(SAMPLED, amplification=False), frozen),
        (SAMPLED, frozen),
        (replace(SAMPLED, amplification=False, client_selection="balanced"), None),
    ],
)
def test_budget_stops_before_both_together_exceed_the_target(coarse_grid, plan, make):
    """The same events, judged by the statements afterwards."""
    target, done = 14.0, []
    budget = Budget(plan, target, DELTA, "release", "replace-one", selections=[COST])
    for round in range(1, 200):
        given = {"participants": (round % 5, 5 + round % 5), "noise_std": 6.0}
        given["client_selection"] = plan.client_selection
        new = (make or event)(round, **given)
        if not budget.allows(new):
            break
        budget.add(new)
        done.append(new)
    assert 0 < len(done) < 198

    def epsilon(events):
        planned = {"num_rounds": len(events), "amplification": plan.amplification}
        config = RunConfig(engine="flower", **planned)
        found = statements_of_runs([Run(config, events)], DELTA, selections=[COST])
        rows = [s for s in found if s.relation == "replace-one" and s.guarantee]
        return min(s.epsilon for s in rows)

    assert epsilon(done) <= target < epsilon([*done, new])


# ------------------------------------------------------------------ runs


EVERYBODY = {"client_selection": "all", "num_clients": 10, "batch_size": 4}


def cohort_run(folder, cohort, name="run", num_events=4) -> RunFolder:
    """A run folder on a cohort, with the releases of PLAN in its ledger."""
    path = folder / f"{name}.txt"
    write_cohort(path, cohort, "title")
    noise = {"noise_multiplier": 2.0, "noise_seed": None, "engine": "flower"}
    place = {"cohort": str(path), "output": str(folder / name)}
    run = RunFolder.create(tiny_config(**EVERYBODY | noise | place))
    path.unlink()
    with contextlib.closing(run.ledger()) as ledger:
        for round in range(1, num_events + 1):
            ledger.append(everybody(round, noise_std=4.0))
    return run


NAMES = tuple(map(str, range(10)))
PRIVATE = Cohort(NAMES, "private", COST, "one")


def test_privacy_of_a_run_folder_includes_the_selection(tmp_path):
    run = cohort_run(tmp_path, PRIVATE)
    found = epsilons.of_run(run.path)
    assert by_hand(3.9, 1.0, row(found).epsilon) == pytest.approx(DELTA, rel=1e-4)
    assert row(found).guarantee
    assert not row(found, "server").guarantee
    assert not any(text in row(found).conditions for text in (GIVEN, EXCLUDED))


@pytest.mark.parametrize(
    ("cohort", "condition"),
    [(Cohort(NAMES), GIVEN), (Cohort(NAMES, "not private"), EXCLUDED)],
)
def test_other_cohorts_add_nothing_but_a_condition(tmp_path, cohort, condition):
    found = row(epsilons.of_run(cohort_run(tmp_path, cohort).path))
    assert by_hand(0.4, 0.0, found.epsilon) == pytest.approx(DELTA, rel=1e-4)
    assert condition in found.conditions


def test_runs_on_one_selection_pay_for_it_once(tmp_path):
    runs = [cohort_run(tmp_path, PRIVATE, name).path for name in ("a", "b")]
    found = row(epsilons.of_runs(runs, {}))
    assert by_hand(3.5 + 0.8, 1.0, found.epsilon) == pytest.approx(DELTA, rel=1e-4)


@pytest.mark.parametrize("selection_id", ["two", ""])
def test_runs_on_two_selections_pay_for_both(tmp_path, selection_id):
    cohorts = [PRIVATE, replace(PRIVATE, selection_id=selection_id)]
    runs = [cohort_run(tmp_path, c, f"run{i}") for i, c in enumerate(cohorts)]
    costs = selection_costs(run.config for run in runs)
    assert costs == (COST, COST)
    found = row(epsilons.of_runs([run.path for run in runs], {}))
    expected = statements(replace(PLAN, num_rounds=8), DELTA, selections=costs)
    assert found.epsilon == pytest.approx(row(expected).epsilon, rel=1e-9)


def test_runs_on_other_clients_are_still_refused(tmp_path):
    other = Cohort((*NAMES[1:], "10"), "private", COST, "one")
    runs = [cohort_run(tmp_path, c, f"run{i}") for i, c in enumerate((PRIVATE, other))]
    with pytest.raises(UserError, match=r"cohort = .*run0.*other clients"):
        epsilons.of_runs([run.path for run in runs], {})


def test_calibration_of_a_run_includes_the_selection(tmp_path):
    path = tmp_path / "c.txt"
    write_cohort(path, PRIVATE, "title")
    target = {"noise_multiplier": None, "target_epsilon": 14.0, "cohort": str(path)}
    run = {"noise_seed": None, "num_rounds": 4, "engine": "flower"}
    config = open_config(**EVERYBODY | target | run)
    resolved = with_noise(config)
    plan = replace(PLAN, noise_multiplier=resolved.noise_multiplier)
    found = row(statements(plan, DELTA, selections=[COST]), relation=config.relation)
    assert 13.9 < found.epsilon <= 14.0
    for noise in (None, 5.0):
        other = replace(config, adversary="server", noise_multiplier=noise)
        assert_refused("unbounded for adversary = server", with_noise, other)


def test_plan_in_a_file_includes_the_selection_of_its_cohort(tmp_path):
    write_cohort(tmp_path / "c.txt", PRIVATE, "title")
    (tmp_path / "plan.toml").write_text(f"cohort = '{tmp_path / 'c.txt'}'")
    settings = EVERYBODY | {"num_rounds": 4, "noise_multiplier": 2.0}
    found = privacy_report.of_settings(None, tmp_path / "plan.toml", settings)
    assert by_hand(3.9, 1.0, row(found).epsilon) == pytest.approx(DELTA, rel=1e-4)


def test_run_stops_before_both_together_exceed_its_target(tmp_path):
    write_cohort(tmp_path / "c.txt", Cohort(("0", "2", "4"), "private", COST), "title")
    given = {"cohort": str(tmp_path / "c.txt"), "output": str(tmp_path / "run")}
    given |= {"target_epsilon": 14.0, "noise_multiplier": 1.0, "num_clients": None}
    given |= {"client_selection": "all", "clients_per_round": None}
    given |= {"warm_start_rounds": 1}
    data = write_tiny_npz(tmp_path / "tiny.npz")
    config, images = resolve(open_config(data=data, **given))
    folder = RunFolder.create(config)
    with pytest.raises(BudgetSpent):
        runs.train(folder, data=images)
    found = row(epsilons.of_run(folder.path))
    assert 0 < found.num_rounds < config.num_rounds
    alone = COST.composed("release", "replace-one").epsilon(DELTA)
    assert alone < found.epsilon <= 14.0


def test_id_of_a_selection_is_in_its_files(tmp_path):
    write_cohort(tmp_path / "c.txt", PRIVATE, "title")
    mark = "# selection: private "
    _, _, after = (tmp_path / "c.txt").read_text().partition(mark)
    assert json.loads(after.partition("\n")[0]) == {**COST.to_json(), "id": "one"}
