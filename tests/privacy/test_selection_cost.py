"""A private selection of the cohort: what it costs, alone and with the runs on it."""

import contextlib
import dataclasses
import json
import math
from dataclasses import replace

import pytest

import runs
from fedgs.app.commands import privacy as privacy_report
from fedgs.cohorts.cohort_file import (
    EXCLUDED,
    OWN_COHORT,
    Cohort,
    selection_costs,
    write_cohort,
)
from fedgs.config.run_config import RunConfig
from fedgs.privacy.accountant import WITH_SELECTION, statements
from fedgs.privacy.gaussian import binomial_law
from fedgs.privacy.plan import Plan
from fedgs.privacy.selection_cost import SelectionCost
from fedgs.round.preparation import resolve, with_noise
from fedgs.round.run import BudgetSpent
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder
from plans import COST, everybody
from refusals import assert_refused
from tiny import tiny_config, write_tiny_npz

DELTA = 1e-5
# mu^2 of the selection: 3 (f / 2)^2 + 8 / 4^2, f = 2 replace-one, 1 zero-out.
SELECTION = {"replace-one": 3 + 0.5, "zero-out": 0.75 + 0.5}
# All 10 clients in all 4 rounds. z^2 = sigma^2 n / B (2 / f)^2 for the sum of 10 nodes.
TEN = {"num_clients": 10, "clients_per_round": 10, "num_rounds": 4, "batch_size": 4}
PLAN = Plan(noise_multiplier=2.0, client_selection="all", **TEN)
RUN = {"replace-one": 4 / (4 * 10 / 4), "zero-out": 4 / (4 * 10 / 4 * 4)}
DRAWN = replace(PLAN, client_selection="uniform", discriminator_training="frozen")
SAMPLED = {"clients_per_round": 2, "num_rounds": 50, "noise_multiplier": 8.0}


def by_hand(mu_squared: float, responses: int, epsilon: float) -> float:
    """Delta of Gaussian releases and some randomised responses, with erfc alone."""

    def normal(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def gaussian(at: float) -> float:
        mu = math.sqrt(mu_squared)
        second = math.exp(at) * normal(-mu / 2 - at / mu)
        return normal(mu / 2 - at / mu) - second

    keep = 1 / (1 + math.exp(-1.0))  # each response moves the loss by 1, up or down
    return sum(
        math.comb(responses, ups)
        * (keep**ups * (1 - keep) ** (responses - ups))
        * gaussian(epsilon - (2 * ups - responses))
        for ups in range(responses + 1)
    )


def row(found, adversary="release", relation="replace-one", theorem=""):
    (chosen,) = [
        s
        for s in found
        if (s.adversary, s.relation) == (adversary, relation) and theorem in s.theorem
    ]
    return chosen


# ------------------------------------------------------------------ its law


def test_random_number_of_releases_is_averaged():
    law = binomial_law({1: 30}, 0.1, 2.0)
    both = COST.composed("release", "zero-out", law)
    deltas = [by_hand(n / 2.0**2 + SELECTION["zero-out"], 1, 4) for n in law.counts]
    assert both.delta(4.0) == pytest.approx(law.tail + law.weights @ deltas, rel=1e-9)
    silent = law._replace(ratio=0.0)
    assert COST.composed("release", "zero-out", silent).epsilon(DELTA) == math.inf


@pytest.mark.parametrize(
    "change",
    [
        {"noise_per_clip": 0.0},
        {"noise_per_clip": math.nan},
        {"num_releases": 0},
        {"num_counts": -1},
        {"count_noise_std": 0.0},
        {"membership_epsilon": math.inf},
        {"membership_epsilon": "x"},
    ],
)
def test_costs_out_of_range_are_refused(change):
    (name,) = change
    assert SelectionCost.from_json(dataclasses.asdict(COST)) == COST
    assert_refused(name, SelectionCost.from_json, dataclasses.asdict(COST) | change)


# ------------------------------------------------------------------ statements


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_mu_squared_of_selection_and_run_adds_up(relation):
    found = row(statements(PLAN, DELTA, selections=[COST]), relation=relation)
    mu_squared = SELECTION[relation] + RUN[relation]
    assert by_hand(mu_squared, 1, found.epsilon) == pytest.approx(DELTA, rel=1e-4)
    assert by_hand(mu_squared, 1, found.epsilon) <= DELTA
    assert found.guarantee
    assert found.theorem.endswith(WITH_SELECTION)
    assert any("at most 3 rounds" in text for text in found.conditions)
    assert any("were fixed before it" in text for text in found.conditions)
    asked = statements(PLAN, DELTA, at_epsilon=6.0, selections=[COST])
    delta = row(asked, relation=relation).delta
    assert delta == pytest.approx(by_hand(mu_squared, 1, 6.0), rel=1e-9)


def test_amplified_rows_are_composed(coarse_grid):
    plan = replace(DRAWN, amplification=True, **SAMPLED)
    found, alone = statements(plan, DELTA, selections=[COST]), statements(plan, DELTA)
    plain = row(found, theorem="mixture").epsilon
    amplified = row(found, theorem="dominating")
    selection = COST.composed("release", "replace-one").epsilon(DELTA)
    assert max(selection, row(alone, theorem="dominating").epsilon) < amplified.epsilon
    assert amplified.epsilon < plain
    assert amplified.guarantee


# ------------------------------------------------------------------ runs


EVERYBODY = {"client_selection": "all", "num_clients": 10, "batch_size": 4}
NAMES = tuple(map(str, range(10)))
PRIVATE = Cohort(NAMES, "private", COST, "one")
TWO, UNNAMED = (replace(PRIVATE, selection_id=name) for name in ("two", ""))


def cohort_run(folder, cohort, name="run") -> RunFolder:
    """A run folder on a cohort, with the releases of PLAN in its ledger."""
    path = folder / f"{name}.txt"
    write_cohort(path, cohort, "title")
    noise = {"noise_multiplier": 2.0, "noise_seed": None, "engine": "flower"}
    place = {"cohort": str(path), "output": str(folder / name)}
    run = RunFolder.create(tiny_config(**EVERYBODY | noise | place))
    path.unlink()
    with contextlib.closing(run.ledger()) as ledger:
        for round in range(1, 5):
            ledger.append(everybody(round, noise_std=4.0))
    return run


@pytest.mark.parametrize(
    ("cohorts", "mu_squared", "condition"),
    [
        ([PRIVATE], 3.9, None),
        ([Cohort(NAMES)], 0.4, OWN_COHORT),
        ([Cohort(NAMES, "not private")], 0.4, EXCLUDED),
        ([PRIVATE, PRIVATE], 3.5 + 0.8, None),  # paid for once
        ([PRIVATE, TWO], 7 + 0.8, None),
        ([PRIVATE, UNNAMED], 7 + 0.8, None),
    ],
)
def test_privacy_of_run_folders_includes_their_selections(
    tmp_path, cohorts, mu_squared, condition
):
    made = [cohort_run(tmp_path, c, f"run{i}") for i, c in enumerate(cohorts)]
    costs = selection_costs(run.config for run in made)
    found = epsilons.of_runs([run.path for run in made], {})
    if len(made) == 1:
        assert found == epsilons.of_run(made[0].path)
    delta = by_hand(mu_squared, len(costs), row(found).epsilon)
    assert delta == pytest.approx(DELTA, rel=1e-4)
    assert row(found).guarantee
    for adversary in ("server", "secagg"):  # who sees the server has no bound
        assert (row(found, adversary).epsilon is None) == bool(costs)
    for text in (OWN_COHORT, EXCLUDED):
        assert (text in row(found).conditions) == (text == condition)


def test_runs_on_other_clients_are_refused(tmp_path):
    other = Cohort((*NAMES[1:], "10"), "private", COST, "one")
    made = [cohort_run(tmp_path, c, f"run{i}") for i, c in enumerate((PRIVATE, other))]
    words, paths = r"cohort = .*run0.*other clients", [run.path for run in made]
    assert_refused(words, epsilons.of_runs, paths, {})


def test_calibration_of_a_run_includes_the_selection(tmp_path):
    path = tmp_path / "c.txt"
    write_cohort(path, PRIVATE, "title")
    target = {"noise_multiplier": None, "target_epsilon": 14.0, "cohort": str(path)}
    run = {"noise_seed": None, "num_rounds": 4, "engine": "flower"}
    config = tiny_config(RunConfig, **EVERYBODY | target | run)
    resolved = with_noise(config)
    plan = replace(PLAN, noise_multiplier=resolved.noise_multiplier)
    found = row(statements(plan, DELTA, selections=[COST]), relation=config.relation)
    assert 13.9 < found.epsilon <= 14.0
    for noise in (None, 5.0):
        other = replace(config, adversary="server", noise_multiplier=noise)
        assert_refused("adversary = server", with_noise, other)


def test_a_cohort_file_has_the_cost_that_a_plan_reads_from_it(tmp_path):
    write_cohort(tmp_path / "c.txt", PRIVATE, "title")
    mark = "# selection: private "
    _, _, after = (tmp_path / "c.txt").read_text().partition(mark)
    assert json.loads(after.partition("\n")[0]) == {
        **dataclasses.asdict(COST),
        "id": "one",
    }
    (tmp_path / "plan.toml").write_text(f"cohort = '{tmp_path / 'c.txt'}'")
    settings = EVERYBODY | {"num_rounds": 4, "noise_multiplier": 2.0}
    file = tmp_path / "plan.toml"
    found = privacy_report.of_settings("algorithm-2", file, settings)
    assert by_hand(3.9, 1, row(found).epsilon) == pytest.approx(DELTA, rel=1e-4)


def test_run_stops_before_both_together_exceed_its_target(tmp_path):
    write_cohort(tmp_path / "c.txt", Cohort(("0", "2", "4"), "private", COST), "title")
    given = {"cohort": str(tmp_path / "c.txt"), "output": str(tmp_path / "run")}
    given |= {"target_epsilon": 14.0, "noise_multiplier": 1.0, "warm_start_rounds": 0}
    given |= {"client_selection": "all"}
    given |= dict.fromkeys(("num_clients", "clients_per_round"))
    data = write_tiny_npz(tmp_path / "tiny.npz")
    config, images = resolve(tiny_config(RunConfig, data=data, **given))
    folder = RunFolder.create(config)
    with pytest.raises(BudgetSpent):
        runs.train(folder, data=images)
    found = row(epsilons.of_run(folder.path))
    assert 0 < found.num_rounds < config.num_rounds
    alone = COST.composed("release", "replace-one").epsilon(DELTA)
    assert alone < found.epsilon <= 14.0


def test_a_condition_claims_no_more_than_was_accounted():
    cost = replace(
        COST,
        noise_per_clip=1.2345678,
        count_noise_std=4.5678919,
        membership_epsilon=2.7182812,
    )
    included = cost.conditions("release")[0]
    assert "epsilon 2.71829" in included
    assert "noise 1.23456 C" in included
    assert "noise 4.56789" in included
