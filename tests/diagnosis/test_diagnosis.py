"""Diagnosis of groups' samples: power, calibration, invariances and bad input."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.ndimage import zoom

from fedgs.data.transformations import TRANSFORMATIONS
from fedgs.diagnosis import diagnosis, sentences
from fedgs.diagnosis.diagnosis import OTHER, Rule
from fedgs.evaluation.images import LabelledImages
from mean_pictures import mean_pictures
from refusals import assert_refused

G = 4
SIDE = 12  # of the low frequencies
INVERT = "invert"
ROTATE = "rotate"
# The whole catalogue is tried in test_catalogue.py.
TURNED = ("rotate", "rotate-270", "transpose", "anti-transpose")
FEW = ("invert", *TURNED, "brightness", "contrast", "scale")
FEW = tuple(entry for entry in TRANSFORMATIONS if entry.name in FEW)


def diagnose(healthy, suspicious, num_classes, rule=None):
    """Compares what releases without noise show of two cohorts' images."""
    cohorts = each(mean_pictures, healthy, SIDE), each(mean_pictures, suspicious, SIDE)
    return diagnosis.diagnose(*cohorts, num_classes, SIDE, rule, FEW)


@pytest.fixture(scope="module")
def digits():
    """scikit-learn's digits with a margin, 24 x 24, in 8 groups of 120."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (found.images / 16).astype(np.float32).repeat(2, 1).repeat(2, 2)[:, None]
    images = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    order = np.random.default_rng(0).permutation(len(images))[: 2 * G * 120]
    parts = np.split(order, 2 * G)
    return [LabelledImages(images[p], found.target[p].astype(np.int64)) for p in parts]


def invert(group, share=1.0):
    return spoil(group, lambda images: 1 - images, share)


def rotate(group, share=1.0):
    return spoil(group, lambda images: np.rot90(images, axes=(2, 3)), share)


def spoil(group, change, share):
    images = group.images.copy()
    count = round(share * len(images))
    images[:count] = change(images[:count])
    return group._replace(images=images)


def each(change, groups, *more):
    return [change(group, *more) for group in groups]


def with_images(change, groups):
    """Groups whose images are changed all at once."""
    return [g._replace(images=change(g.images).astype(np.float32)) for g in groups]


def names_in(found):
    """The bugs of a verdict, or what it is instead."""
    return {*found.verdict.removeprefix(diagnosis.ONE_OF).split(", ")}


def suspect(found, bug):
    return next(s for s in found.ranking if s.bug == bug)


def test_alike_cohorts_show_no_bug(digits):
    found = diagnose(digits[:G], digits[G:], 10)
    assert found.verdict == "none"
    assert found.shows_data
    for bug in (INVERT, ROTATE):
        low, high = suspect(found, bug).interval
        assert low < 0.05
        assert high < 0.25
    assert suspect(found, OTHER).decision == diagnosis.SAME


@pytest.mark.parametrize(("bug", "change"), [(INVERT, invert), (ROTATE, rotate)])
@pytest.mark.parametrize("has_labels", [True, False])
def test_a_planted_bug_is_named_with_its_share(digits, bug, change, has_labels):
    own = digits if has_labels else [g._replace(labels=g.labels * 0) for g in digits]
    found = diagnose(own[:G], each(change, own[G:], 0.75), 10 if has_labels else 1)
    assert found.verdict == bug
    first = found.ranking[0]
    assert first.bug == bug
    assert first.adjusted_p == pytest.approx(1 / 35)
    assert first.effect == pytest.approx(0.75, abs=0.06)
    assert first.interval[0] >= 0.5
    assert first.fit > 0.9
    assert first.fit > suspect(found, ROTATE if bug == INVERT else INVERT).fit + 0.1
    assert suspect(found, OTHER).decision == diagnosis.DIFFERS
    assert found.ranking[-1].bug == OTHER


def test_quarter_turns_that_pictures_cannot_tell_apart_are_all_listed():
    """Upright bars, as often mirrored as not, and as often turned by a half."""
    rng = np.random.default_rng(3)
    bars = np.zeros((2 * G, 10, 1, 12, 12), np.float32)
    bars[..., 2:10, 5:7] = 0.8
    bars += 0.2 * rng.random(bars.shape)
    bars = np.concatenate([bars, bars[..., ::-1]], axis=1)
    bars = np.concatenate([bars, bars[..., ::-1, :]], axis=1)
    own = [LabelledImages(images, np.zeros(40, np.int64)) for images in bars]
    found = diagnose(own[:G], each(rotate, own[G:]), 1)
    assert names_in(found) == {*TURNED}


def test_a_turned_healthy_cohort_is_a_cohort_turned_back(digits):
    found = diagnose(each(rotate, digits[:G]), digits[G:], 10)
    assert (found.verdict, found.ranking[0].spoilt) == ("rotate-270", None)


@pytest.mark.parametrize(("change", "bug"), [(invert, INVERT), (rotate, ROTATE)])
def test_a_turn_in_part_of_the_healthy_cohort_is_not_excluded(digits, change, bug):
    found = diagnose(each(change, digits[:G], 0.4), digits[G:], 10)
    assert suspect(found, bug).decision != diagnosis.CLEARED
    assert found.verdict not in ("none", diagnosis.OTHER)


def test_a_verdict_is_about_clients_and_measured_strength(digits):
    found = diagnose(digits[:G], each(invert, digits[G:]), 10)
    assert "inverted (measured strength 1.00, interval" in said(found)
    none = dataclasses.replace(found, verdict="none", ranking=())
    assert "each in 25% of the clients or more" in said(none)


def test_what_may_be_no_effect_at_all_is_no_closest_entry(digits):
    found = diagnose(digits[:G], each(invert, digits[G:]), 10)
    best, *others = found.ranking
    for low, is_told in ((0.1, True), (0.0, False), (-0.1, False)):
        near = dataclasses.replace(best, interval=(low, 1.0))
        changed = dataclasses.replace(found, ranking=(near, *others))
        assert ("closest entry" in sentences._closest(changed)) == is_told


def said(found):
    return sentences.sentence(found, "b", "a")


def test_a_small_share_is_significant_and_not_named(digits):
    spoilt = each(invert, digits[G:], 0.1)
    found = diagnose(digits[:G], spoilt, 10)
    assert suspect(found, INVERT).adjusted_p == pytest.approx(1 / 35)
    assert suspect(found, INVERT).decision == diagnosis.CLEARED
    assert found.verdict == OTHER
    strict = diagnose(digits[:G], spoilt, 10, Rule(min_effect=0.05))
    assert strict.verdict == INVERT


def smaller(images):
    small = zoom(images, (1, 1, 0.75, 0.75), order=1)
    return np.pad(small, ((0, 0), (0, 0), (3, 3), (3, 3)))


def test_differences_name_the_class_that_differs(digits):
    def pale_sevens(group):
        is_seven = (group.labels == 7)[:, None, None, None]
        pale = np.where(is_seven, 0.5 * group.images, group.images)
        return group._replace(images=pale)

    found = diagnose(digits[:G], each(pale_sevens, digits[G:]), 10).differences
    assert found[0].label == 7
    assert len(found) == 10
    assert found[0].distance > 2 * found[1].distance


def test_another_handwriting_is_neither_inverted_nor_turned(digits):
    """Nor is it cleared: a paler hand is another brightness, whoever made it."""
    smaller_and_paler = with_images(lambda x: 0.7 * smaller(x), digits[G:])
    found = diagnose(digits[:G], smaller_and_paler, 10)
    assert not {INVERT, "none", *TURNED} & names_in(found)
    assert suspect(found, OTHER).decision == diagnosis.DIFFERS  # and it was seen


@pytest.mark.slow  # 3 seconds
def test_a_mean_pixel_on_either_side_of_the_middle_is_no_inversion(digits):
    """The vectors oppose each other exactly, and are as short as +-0.1."""
    dark, light = (
        with_images(lambda x, mean=mean: 0.5 * (x - x.mean()) + mean, own)
        for mean, own in ((0.45, digits[:G]), (0.55, digits[G:]))
    )
    found = diagnose(dark, light, 10)
    assert suspect(found, INVERT).decision != diagnosis.NAMED
    assert found.verdict != "none"


def test_less_structure_is_no_bug(digits):
    """Blur by grey shrinks both vectors to 0, never beyond."""
    own = with_images(lambda x: 0.5 + 0.6 * (x - 0.5), digits[G:])
    assert not {INVERT, ROTATE} & names_in(diagnose(digits[:G], own, 10))
    is_kept = np.arange(120)[:, None, None, None] % 2  # no direction is left

    def turn_half(x):
        return np.where(is_kept, x, np.rot90(x, axes=(2, 3)))

    found = diagnose(digits[:G], with_images(turn_half, digits[G:]), 10)
    assert suspect(found, ROTATE).effect == pytest.approx(0.5, abs=0.1)


def test_alpha_below_the_attainable_p_is_undecided(digits):
    found = diagnose(digits[:G], each(invert, digits[G:]), 10, Rule(alpha=0.02))
    assert found.verdict == "undecided"
    assert found.false_positive_rate == 0


def test_pictures_that_have_nothing_in_common_are_undecided_and_not_cleared():
    """Each group has a pattern of its own."""
    rng, labels, own = np.random.default_rng(0), np.arange(60) % 3, []
    for pattern in rng.normal(0.2, 0.1, (2 * G, 3, 1, SIDE, SIDE)):
        images = pattern[labels] + rng.normal(0, 0.05, (60, 1, SIDE, SIDE))
        own.append(LabelledImages(np.clip(images, 0, 1).astype(np.float32), labels))
    found = diagnose(own[:G], own[G:], 3)
    assert not found.shows_data
    assert suspect(found, INVERT).decision == diagnosis.UNDECIDED
    assert found.verdict == "undecided"


def test_json_has_no_nan_and_all_of_the_rule(digits):
    flat = with_images(lambda images: images * 0, digits)
    found = diagnose(flat[:G], flat[G:], 10).to_json()
    assert found["verdict"] == "undecided"
    rotated = next(s for s in found["ranking"] if s["bug"] == ROTATE)
    assert rotated["effect"] is rotated["interval"] is None
    assert found["alpha"] == 0.05
    assert found["num_splits"] == 35


def test_pictures_that_no_turn_moves_clear_nothing():
    """Discs, and a little noise: an inversion would be seen, a turn never."""
    rng, place = np.random.default_rng(0), np.arange(SIDE) - (SIDE - 1) / 2
    disc = 0.8 * (np.hypot(place[:, None], place) < SIDE / 3)
    discs = disc + rng.normal(0, 0.01, (2 * G, 1, 1, SIDE, SIDE))
    own = [LabelledImages(x.astype(np.float32), np.zeros(1, np.int64)) for x in discs]
    found = diagnose(own[:G], own[G:], 1)
    assert suspect(found, INVERT).interval[1] < 0.1
    assert not found.shows_data
    assert {s.decision for s in found.ranking} == {"undecided", diagnosis.SAME}


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("at", "change", "words"),
    [
        (4, lambda g: {"images": g.images[:9]}, "group 4.*one data set"),
        (4, lambda g: {"images": g.images[..., :9]}, "group 4.*one data set"),
        (7, lambda g: {"images": g.images * np.nan}, "group 7.*not finite"),
        (7, lambda g: {"labels": g.labels + 1}, r"outside \[0, 10\)"),
    ],
)
def test_groups_that_cannot_be_compared_are_refused(digits, at, change, words):
    groups = each(mean_pictures, digits, SIDE)
    groups[at] = groups[at]._replace(**change(groups[at]))
    cohorts = groups[:G], groups[G:]
    assert_refused(words, diagnosis.diagnose, *cohorts, 10, SIDE)
    assert_refused("from 4 to 6", diagnose, digits[:3], digits[4:7], 10)
    assert_refused("same number", diagnose, digits[:4], digits[4:7], 10)


@pytest.mark.parametrize("name", ["alpha", "min_effect"])
@pytest.mark.parametrize("value", [0, 1, math.nan])
def test_rule_checks_its_ranges(name, value):
    assert_refused(f"{name} = ", Rule, **{name: value})
