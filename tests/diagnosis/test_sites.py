"""Sites that are compared with all others: who is named, by what, and how often."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from fedgs.data.transformations import TRANSFORMATIONS
from fedgs.diagnosis.diagnosis import OTHER, Rule, diagnose
from fedgs.diagnosis.sites import compare_sites
from fedgs.evaluation.images import LabelledImages
from refusals import assert_refused

G = 4
SIDE = 12
NUM_CLASSES = 3
BUGS = ("invert", "rotate", "transpose", "mirror", "brightness", "border")
BY_NAME = {entry.name: entry for entry in TRANSFORMATIONS}
ENTRIES = tuple(BY_NAME[name] for name in BUGS)


def _pattern():
    """A smooth picture of each class, in [0, 1], darker towards the edges."""
    values = np.random.default_rng(1).random((NUM_CLASSES, 1, SIDE, SIDE))
    smooth = gaussian_filter(values, (0, 0, 1, 1))
    return np.clip((smooth - 0.3) * 1.6, 0, 0.7)


PATTERN = _pattern()


def site(rng, change=None, noise=0.05):
    """G groups, each an average of every class; they differ by noise alone."""
    groups = []
    for _ in range(G):
        images = PATTERN + rng.normal(0, noise, PATTERN.shape)
        images = np.clip(images, 0, 1).astype(np.float32)
        if change is not None:
            images = change(images)
        groups.append(LabelledImages(images.astype(np.float32), np.arange(NUM_CLASSES)))
    return groups


def bug(name, degree=None):
    return lambda images: BY_NAME[name].images(images, degree)


def five(changes, count=5, seed=0, noise=0.05):
    """Sites a, b, c ... by name; some are changed."""
    rng = np.random.default_rng(seed)
    return {name: site(rng, changes.get(name), noise) for name in "abcde"[:count]}


def compare(sites, rule=None, entries=ENTRIES):
    return compare_sites(sites, NUM_CLASSES, SIDE, rule, entries)


def accused(found):
    return {
        name: own.diagnosis.verdict for name, own in found.items() if own.is_accused
    }


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize(
    ("name", "degree"), [("transpose", None), ("invert", None), ("brightness", 1.4)]
)
def test_the_site_with_a_bug_is_named_with_it_and_no_other(name, degree, count):
    found = compare(five({"b": bug(name, degree)}, count))
    assert accused(found) == {"b": name}
    assert found["b"].p <= 0.05
    assert [*found] == [*"abcde"[:count]]
    for other in {*found} - {"b"}:
        assert found[other].rivals == ()
        assert found[other].diagnosis.verdict == "none"
        assert found[other].p >= found["b"].p
        assert {*found[other].others} == {*found} - {"b", other}
    assert {*found["b"].others} == {*found} - {"b"}


@pytest.mark.parametrize("second", ["transpose", "invert"])
def test_two_sites_of_five_are_both_named_be_it_by_one_bug_or_two(second):
    found = compare(five({"b": bug("transpose"), "d": bug(second)}))
    assert accused(found) == {"b": "transpose", "d": second}
    later = [found[name].p for name in "ace"]
    assert min(later) >= max(found[name].p for name in "bd")


def test_half_of_the_sites_cannot_be_told_from_the_other_half():
    found = compare(five({"b": bug("transpose"), "d": bug("transpose")}, 4))
    assert accused(found) == {}
    assert {name: {*own.rivals} for name, own in found.items()} == {
        name: {*"abcd"} - {name} for name in "abcd"
    }


def test_of_two_sites_a_bug_that_something_undoes_accuses_neither():
    for change in (bug("transpose"), bug("brightness", 1 / 1.6)):
        found = compare(five({"a": change}, 2))
        assert accused(found) == {}
        assert found["a"].p == found["b"].p == pytest.approx(1 / 35)
        assert [own.rivals for own in found.values()] == [("b",), ("a",)]


def test_of_two_sites_a_bug_that_nothing_undoes_names_the_one_that_has_it():
    for name in "ab":
        found = compare(five({name: bug("border", 0.15)}, 2))
        assert accused(found) == {name: "border"}
        assert [own.rivals for own in found.values()] == [(), ()]


def test_a_site_that_differs_by_nothing_that_is_known_is_other():
    def stained(images):
        spots = images.copy()
        spots[:, :, 2:5, 7:10] = 0.5
        return spots

    found = compare(five({"c": stained}))
    assert accused(found) == {"c": OTHER}


def test_sites_that_are_alike_are_found_to_differ_as_often_as_alpha_says():
    rule, entries = Rule(alpha=0.2), ENTRIES[:1]
    count, named, seen, least = 40, 0, 0, []
    for seed in range(count):
        found = compare(five({}, 3, seed), rule, entries).values()
        named += any(own.is_accused for own in found)
        seen += any(own.is_accused or own.rivals for own in found)
        least.append(min(own.p for own in found))
    assert named <= seen <= 0.2 * count + 6  # more than two standard errors
    # The test is not merely deaf: about as many are below any level as should be.
    assert np.mean(np.array(least) <= 0.5) == pytest.approx(0.5, abs=0.2)


def test_a_difference_near_the_noise_accuses_no_site_without_it():
    """The guard: whoever could as well be the one is a rival."""
    wrong, undecided = 0, 0
    rule = Rule(alpha=0.2)
    for seed in range(12):
        sites = five({"c": bug("brightness", 1.04)}, 3, seed, noise=0.1)
        found = compare(sites, rule, ENTRIES[:1])
        wrong += bool({*accused(found)} - {"c"})
        undecided += any(own.rivals for own in found.values())
    assert wrong == 0
    assert undecided > 0


def test_bad_sites_are_refused():
    sites = five({}, 3)
    assert_refused("at least 2", compare, {"a": sites["a"]})
    fewer = sites | {"b": sites["b"][:3]}
    assert_refused("groups = ", compare, fewer)
    three = {name: groups[:3] for name, groups in sites.items()}
    assert_refused("from 4 to 6", compare, three)


def test_the_diagnosis_is_against_all_other_sites_at_the_rules_alpha():
    sites = five({"b": bug("border", 0.15)}, 3)
    found = compare(sites, Rule(alpha=0.1))["b"].diagnosis
    others = [*sites["a"], *sites["c"]]
    wanted = diagnose(others, sites["b"], NUM_CLASSES, SIDE, Rule(alpha=0.1), ENTRIES)
    assert (found.verdict, found.num_splits) == (wanted.verdict, 495)
    assert found.rule == wanted.rule
    for own, other in zip(found.ranking, wanted.ranking, strict=True):
        assert (own.bug, own.adjusted_p) == (other.bug, other.adjusted_p)
        assert own.fit == pytest.approx(other.fit)


def test_brightness_in_which_groups_of_one_site_differ_hides_no_site():
    """Groups of another brightness each; two sites are transposed."""
    rng = np.random.default_rng(1)

    def dimmed(groups):
        return [
            g._replace(images=np.float32(rng.uniform(0.7, 1)) * g.images)
            for g in groups
        ]

    sites = five({"b": bug("transpose"), "d": bug("transpose")}, seed=1, noise=0.01)
    found = compare({name: dimmed(groups) for name, groups in sites.items()})
    assert accused(found) == {"b": "transpose", "d": "transpose"}
