"""Cohort files, a run's clients, thresholds and answers."""

import dataclasses
import json
import math
import random
from collections import Counter

import numpy as np
import pytest

from fedgs.cohorts import cohort_file
from fedgs.cohorts.selection import (
    Selection,
    divided,
    membership,
    randomise,
    statements,
)
from fedgs.config.run_config import RunConfig
from fedgs.data.load import load_data
from fedgs.privacy.selection_cost import SelectionCost
from refusals import assert_refused
from tiny import tiny_config, write_tiny_npz

COST = SelectionCost(1.0, 4, 8, 3.0, 2.0)
PRIVATE = f"# selection: private {json.dumps(dataclasses.asdict(COST))}\n"


@pytest.fixture
def config(tmp_path):
    data = write_tiny_npz(tmp_path / "tiny.npz")

    def config(text: str, **settings: object) -> RunConfig:
        path = tmp_path / "cohort.txt"
        path.write_text(text)
        settings = {"num_clients": None, "data": data} | settings
        return tiny_config(RunConfig, cohort=str(path), **settings)

    return config


# ------------------------------------------------------------------ files


@pytest.mark.parametrize(
    "cohort",
    [
        cohort_file.Cohort(("b", "a c", "3")),
        cohort_file.Cohort(("ü",), "not private"),
        cohort_file.Cohort(("1", "2"), "private", COST),
        cohort_file.Cohort(("1", "2"), "private", COST, "5f0e"),
    ],
)
def test_written_cohort_is_read_as_it_was(tmp_path, cohort):
    path = tmp_path / "c.txt"
    cohort_file.write_cohort(path, cohort, "title")
    assert cohort_file.read_cohort(path) == cohort
    path.write_text("# a user's\n\n  ann \nbob\n# selection was by hand\n")
    assert cohort_file.read_cohort(path) == cohort_file.Cohort(("ann", "bob"))
    assert_refused(
        r"no.txt: .*No such file", cohort_file.read_cohort, tmp_path / "no.txt"
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "names no client"),
        (b"a\nb\na\nc\nc\n", "'a', 'c' twice"),
        (b"# selection: perhaps\na\n", "line 1: unknown selection"),
        (b'# selection: private {"noise_per_clip": 1}\na\n', "unknown selection"),
        (b"# selection: not private\n# selection: not private\na\n", "line 2: a sec"),
        (b"\xff\xfea", "one client name a line"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, named):
    path = tmp_path / "c.txt"
    path.write_bytes(text)
    assert_refused(rf"{path}.*{named}", cohort_file.read_cohort, path)
    for name in ("#1", " a", "a\nb", "", "a\u2028b"):  # nor can a file hold these
        assert_refused("rename the client", cohort_file.check_names, ["fine", name])


# ------------------------------------------------------------------ a run's cohort


def test_run_uses_the_clients_of_its_cohort_only(config):
    settings = config("4\n1\n", test_fraction=0.5)
    found = load_data(settings)
    everybody = load_data(dataclasses.replace(settings, cohort=None))
    assert found.client_names == ("1", "4")
    assert load_data(config("5\n4\n2\n", num_clients=2)).client_names == ("2", "4")
    for new, old in enumerate((1, 4)):
        got, expected = found.of(new), everybody.of(old)
        np.testing.assert_array_equal(got.images, expected.images)
        np.testing.assert_array_equal(got.labels, expected.labels)
        held_out = everybody.client_test_records[old]
        np.testing.assert_array_equal(found.client_test_records[new], held_out)


@pytest.mark.parametrize(
    ("text", "settings", "named"),
    [
        ("x\n1\n9\n", {}, r"has no client '9', 'x' \(2 of 3 names\)"),
        ("5\n4\n2\n", {"num_clients": 4}, "num_clients = 4:"),
        ("1\n", {"data": "digits", "num_classes": None}, "names no clients"),
        ("1\n", {"partition": "iid", "num_clients": 2}, "cohort = .*:"),
    ],
)
def test_cohorts_that_the_data_do_not_have_are_refused(config, text, settings, named):
    assert_refused(named, lambda: load_data(config(text, **settings)))


# ------------------------------------------------------------------ thresholds


@pytest.mark.parametrize(
    ("accuracy", "low", "high", "cohort"),
    [
        (0.5, 0.5, 0.5, "selected"),
        (0.5001, 0.5, 0.5, "above"),
        (0.0, None, 0.5, "rest"),
        (1.0, 0.5, None, "rest"),
        (math.nan, 1.0, 1.0, "rest"),
    ],
)
def test_membership_at_the_thresholds(accuracy, low, high, cohort):
    both = {"below": low, "above": high}
    thresholds = {name: limit for name, limit in both.items() if limit is not None}
    assert membership(accuracy, thresholds) == cohort


@pytest.mark.parametrize("percentile", [5, 25, 50, 74.5, 90])
def test_threshold_of_a_percentile_is_near_numpys(percentile):
    accuracies = np.random.default_rng(0).beta(8, 2, 500)
    selection = Selection(below=percentile, above=90, are_percentiles=True)
    found, cohorts = divided(selection, accuracies)
    expected = np.percentile(accuracies, [percentile, 90])
    np.testing.assert_allclose([*found.values()], expected, atol=1 / 256)
    assert cohorts == [membership(value, found) for value in accuracies]


@pytest.mark.parametrize(
    "cohorts", [("selected", "rest"), ("selected", "above", "rest")]
)
def test_randomised_answers_have_the_probabilities_of_their_epsilon(cohorts):
    rng, trials, epsilon = random.Random(0), 40_000, 1.0
    found = {
        own: Counter(randomise(own, cohorts, epsilon, rng) for _ in range(trials))
        for own in cohorts
    }
    for own in cohorts:
        for answer in cohorts:
            weight = math.exp(epsilon) if answer == own else 1.0
            expected = weight / (math.exp(epsilon) + len(cohorts) - 1)
            deviation = math.sqrt(expected * (1 - expected) / trials)
            share = found[own][answer] / trials
            assert share == pytest.approx(expected, abs=4.5 * deviation)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "below is unset"),
        ({"below": 1.1}, "below = 1.1:"),
        ({"below": 0.9, "above": 0.8}, "below = 0.9:"),
        ({"below": 0, "are_percentiles": True}, "below = 0: .* above 0 and below 100"),
        ({"below": 0.5, "noise_per_clip": 0}, "noise_per_clip = 0"),
    ],
)
def test_bad_settings_are_refused(settings, named):
    assert_refused(named, Selection, **settings)


def test_cost_counts_rounds_counts_and_the_answer():
    """539 clients, 50 a round: 40 rounds are 3.7 laps, so a client has at most 4."""
    percentiles = {"below": 25, "above": 75, "are_percentiles": True}
    selection = Selection(**percentiles, noise_per_clip=1.5)
    expected = SelectionCost(1.5, 4, 16, math.sqrt(539) / 2, 3.0)
    assert selection.cost(539) == expected
    few = Selection(below=0.5, noise_per_clip=1.0).cost(20)
    assert few == SelectionCost(1.0, 40, 0, 0.0, 3.0)
    assert Selection(below=0.5).cost(539) is None
    assert Selection(below=0.5).cohorts == ("selected", "rest")
    assert Selection(above=0.5).cohorts == ("above", "rest")
    assert selection.cohorts == ("selected", "above", "rest")


@pytest.mark.parametrize("is_percentile", [False, True])
def test_statements_say_all_that_they_depend_on(is_percentile):
    thresholds = {"below": 0.5, "are_percentiles": is_percentile}
    selection = Selection(noise_per_clip=4.0, **thresholds)
    found = {
        (s.adversary, s.relation): s for s in statements(selection, selection.cost(539))
    }
    told = "tell it every cohort that a percentile bounds, exactly"
    for relation in ("replace-one", "zero-out"):
        release, server = found["release", relation], found["server", relation]
        composed = selection.cost(539).composed("release", relation)
        assert release.epsilon == composed.epsilon(1e-5)
        assert (release.guarantee, release.delta) == (True, 1e-5)
        assert (server.epsilon, server.guarantee) == (None, False)
        # The server is told by a percentile's comparisons, else by the answer alone.
        text = " ".join(server.conditions)
        assert (told in text) == is_percentile
        assert ("only the membership" in text) != is_percentile
    assert statements(Selection(**thresholds), None) == ()
