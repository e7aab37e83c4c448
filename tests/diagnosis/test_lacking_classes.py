"""Sites that lack classes which others have are compared in those that they share."""

import dataclasses

import numpy as np
import pytest

from fedgs.config.recipes import configure
from fedgs.data.load import load_data
from fedgs.data.transformations import TRANSFORMATIONS
from fedgs.diagnosis.catalogue import CohortSamples
from fedgs.diagnosis.conclusion import conclude
from fedgs.diagnosis.diagnosis import Rule, diagnose
from fedgs.diagnosis.products import alike, over_classes, products
from fedgs.diagnosis.sites import compare_sites
from fedgs.evaluation.images import LabelledImages
from fedgs.round.preparation import new_run
from mean_pictures import mean_pictures
from runs import train

G = 4
SIDE = 8  # of the low frequencies
BY_NAME = {entry.name: entry for entry in TRANSFORMATIONS}
# Of those whose verdicts are asked for here: the whole catalogue takes seconds.
NAMES = ("invert", "rotate", "mirror", "transpose", "shift", "contrast", "blank")
NAMES = (*NAMES, "swap-labels", "shift-labels", "mislabel")
ENTRIES = tuple(BY_NAME[name] for name in NAMES)
NORMAL = 0  # classes of radiographs
VIRUS = 2


@pytest.fixture(scope="module")
def digits():
    """scikit-learn's digits, 16 x 16, at three sites of four groups."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (found.images / 16).astype(np.float32).repeat(2, 1).repeat(2, 2)[:, None]
    labels = found.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    groups = [
        LabelledImages(images[own], labels[own]) for own in np.array_split(order, 3 * G)
    ]
    return {name: groups[G * i : G * (i + 1)] for i, name in enumerate("abc")}


def without(group, classes):
    is_kept = ~np.isin(group.labels, classes)
    return LabelledImages(group.images[is_kept], group.labels[is_kept])


def with_bug(group, name, degree=None):
    entry = BY_NAME[name]
    degree = entry.degrees_of(10)[0] if degree is None else degree
    images, labels = group
    if entry.images is not None:
        images = entry.images(images, degree)
    if entry.labels is not None:
        labels = entry.labels(labels, 10, degree)
    return LabelledImages(images, labels)


def compare(sites):
    """Compares what releases without noise show of the sites' images."""
    pictures = {
        name: [mean_pictures(group, SIDE) for group in groups]
        for name, groups in sites.items()
    }
    return compare_sites(pictures, 10, SIDE, entries=ENTRIES)


def accused(found):
    return {
        name: own.diagnosis.verdict for name, own in found.items() if own.is_accused
    }


LACKED = [(4,), (0, 1, 2), (1, 2, 3, 4, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize("lacked", LACKED)
def test_a_site_that_lacks_classes_is_like_the_others_in_the_rest(digits, lacked):
    own = [without(group, lacked) for group in digits["c"]]
    found = compare(digits | {"c": own})
    assert accused(found) == {}
    for verdict in found.values():
        assert verdict.diagnosis.verdict in ("none", "undecided")
        assert verdict.rivals == ()
    compared = {d.label: d.distance for d in found["c"].diagnosis.differences}
    assert {label for label, far in compared.items() if far is None} == {*lacked}


@pytest.mark.parametrize("lacked", LACKED)
@pytest.mark.parametrize("name", ["transpose", "rotate", "invert"])
def test_a_turn_is_named_where_its_site_lacks_classes(digits, name, lacked):
    own = [with_bug(without(group, lacked), name) for group in digits["c"]]
    assert accused(compare(digits | {"c": own})) == {"c": name}


@pytest.mark.parametrize("name", ["transpose", "rotate", "invert", "mirror"])
def test_of_two_sites_that_alone_have_some_classes_either_may_be_spoilt(digits, name):
    low, high = range(5), range(5, 10)
    sites = {
        "a": [without(group, low) for group in digits["a"]],
        "b": digits["b"],
        "c": [with_bug(without(group, high), name) for group in digits["c"]],
    }
    found = compare(sites)
    assert accused(found) == {}
    assert found["c"].diagnosis.verdict == name
    assert "b" in found["c"].rivals


@pytest.mark.parametrize("lacked", [(), (4,), (0, 1, 2)])
def test_a_mislabelled_class_is_named_because_the_other_ones_mean_moved(digits, lacked):
    own = [with_bug(without(g, lacked), "mislabel", (7, 5)) for g in digits["c"]]
    found = compare(digits | {"c": own})
    assert found["c"].diagnosis.verdict == "mislabel"
    assert found["c"].p <= 0.05
    # So few digits may leave it open which site it is, but accuse no other one.
    assert accused(found).keys() <= {"c"}
    first, *_ = found["c"].diagnosis.ranking
    assert (first.bug, first.degree, first.spoilt) == ("mislabel", (7, 5), "suspicious")


def test_a_mislabelled_class_is_named_where_some_of_the_others_lack_it(digits):
    """They cannot tell how its pictures would mix with those of the other class."""
    own = [with_bug(group, "mislabel", (7, 5)) for group in digits["c"]]
    lacking = [without(group, (7,)) for group in digits["b"]]
    found = compare(digits | {"b": lacking, "c": own})["c"].diagnosis
    first, *_ = found.ranking
    assert (first.bug, first.degree, first.spoilt) == ("mislabel", (7, 5), "suspicious")
    assert first.fit > 0.9
    low, high = first.interval
    assert low < 1 < high


@pytest.mark.parametrize("name", ["swap-labels", "shift-labels"])
def test_other_labels_are_told_from_a_mislabelled_class(digits, name):
    own = [with_bug(without(group, (9,)), name) for group in digits["c"]]
    assert accused(compare(digits | {"c": own})) == {"c": name}


def test_a_group_that_lacks_a_class_cannot_tell_where_its_pictures_would_be(digits):
    groups = [*digits["a"], *(without(group, (4,)) for group in digits["b"])]
    pictures = [mean_pictures(group, SIDE) for group in groups]
    samples = CohortSamples(pictures, 10, SIDE, G)
    mislabels = samples.candidates([BY_NAME["mislabel"]])
    of_four = [c for c in mislabels if c.steps[-1][1] == (4, 7)]
    assert {candidate.spoilt for candidate in of_four} == {"healthy", "suspicious"}
    rows = samples.rows[:1]
    for candidate in of_four:
        moved = candidate.products(~rows, rows)[1]
        assert (moved > 0) == (candidate.spoilt == "suspicious")


def test_what_a_class_counts_is_asked_of_every_split():
    is_known = np.ones((4, 2), bool)
    is_known[:2, 1] = False
    values = np.zeros((4, 2, 1))
    values[:, 0, 0] = 1.0
    values[:, 1, 0] = 10.0
    gram = products(values, values, alike(is_known))
    assert [part.is_known.tolist() for part in gram] == [
        [False, False, True, True],
        [True] * 4,
    ]
    rows = np.array([[False, False, True, True], [True, False, True, False]])

    def diagonal(matrix, own, others):
        return own @ np.diag(matrix) / own.sum(1)

    # No split has two groups on each side that know the second class.
    assert over_classes(gram, rows, ~rows, diagonal).tolist() == [1.0, 1.0]
    assert over_classes(gram, rows[:1], rows[:1], diagonal).tolist() == [101.0]
    assert over_classes(gram[:1], rows, ~rows, diagonal).tolist() == [0.0, 0.0]


def test_the_error_rate_holds_where_groups_that_are_alike_lack_classes():
    """Each class is lacked by a third of all groups, whichever cohort they are in."""
    alpha, count, seen = 0.2, 200, 0
    entries = (BY_NAME["mirror"], BY_NAME["mislabel"])
    for seed in range(count):
        rng = np.random.default_rng(seed)
        groups = []
        for _ in range(2 * G):
            images = rng.normal(0.5, 0.1, (3, 1, SIDE, SIDE)).astype(np.float32)
            is_kept = rng.random(3) > 1 / 3
            is_kept[0] = True
            groups.append(LabelledImages(images[is_kept], np.arange(3)[is_kept]))
        found = diagnose(groups[:G], groups[G:], 3, SIDE, Rule(alpha=alpha), entries)
        seen += found.p <= alpha
    # Three standard errors of a share of 0.2 among 200.
    assert seen <= (alpha + 3 * (alpha * (1 - alpha) / count) ** 0.5) * count
    assert seen > 0


# ------------------------------------------------------------------ radiographs


@pytest.fixture(scope="module")
def archive(data_dir):
    """Radiographs, labels and patients in the order of the patients' names."""
    if not (data_dir / "ChestXRay").is_dir():
        pytest.skip("needs the X-rays: FEDGS_DATA_DIR/ChestXRay/{NORMAL,PNEUMONIA}")
    config = configure("group-means", None, {"data": "chest-xray", "seed": 0})
    data = load_data(dataclasses.replace(config, data_dir=str(data_dir)))
    records = np.concatenate(data.client_records)
    counts = [len(own) for own in data.client_records]
    patients = np.repeat(np.arange(data.num_clients), counts)
    return data.images[records], data.labels[records], patients


def diagnosed(archive, place, sizes, **settings):
    """The comparisons of three sites; a bug is in the first one."""
    images, labels, patients = archive
    names = [f"{patient:04}" for patient in patients]
    np.savez(place / "own.npz", images=images, labels=labels, clients=names)
    own = {
        "data": f"npz:{place / 'own.npz'}",
        "node_sizes": ",".join(map(str, sizes)),
        "corruption_unit": "node",
        "output": str(place / "run"),
        "seed": 0,  # by which it is the first one
        "noise_seed": 1,
    }
    folder, data = new_run(configure("group-means", None, own | settings))
    train(folder, data=data)
    content = conclude(folder)
    assert content is not None
    if settings["corruption"] != "none":
        assert content["planted"]["where"] == "0"
    return content["comparisons"]


def compared_in(found):
    return {own["label"] for own in found["differences"] if own["distance"] is not None}


@pytest.mark.slow  # 20 seconds
@pytest.mark.parametrize("bug", ["none", "transpose", "rotate"])
@pytest.mark.parametrize("epsilon", [3.0, 10.0])
def test_no_hospital_is_said_to_mislabel_because_it_has_healthy_patients_only(
    archive, bug, epsilon, tmp_path
):
    """Dealt by name: the first has the healthy alone, and the last one has none."""
    sizes = (1040, 1039, 1039)
    settings = {"corruption": bug, "target_epsilon": epsilon}
    found = diagnosed(archive, tmp_path, sizes, **settings)
    assert all("mislabel" not in own["verdict"] for own in found)
    first, *_ = found
    assert compared_in(first) == {NORMAL}
    # That class has one other site, so nothing tells which of the two is turned.
    assert not any(own["is_accused"] for own in found)
    if bug != "none":
        assert first["verdict"] == bug
        assert "1" in first["rivals"]


@pytest.mark.slow  # 20 seconds
@pytest.mark.parametrize("bug", ["none", "transpose", "mirror"])
def test_a_hospital_without_virus_is_named_if_its_radiographs_lie_and_only_then(
    archive, bug, tmp_path
):
    images, labels, patients = archive
    # Dealt at random: the new number of every patient.
    order = np.random.default_rng(0).permutation(patients[-1] + 1)
    dealt = order[patients]
    is_first = dealt < 1040
    kept = np.flatnonzero(~is_first | (labels != VIRUS))
    kept = kept[np.argsort(dealt[kept], kind="stable")]
    own = images[kept], labels[kept], dealt[kept]
    sizes = [len({*dealt[kept][is_first[kept]].tolist()}), 1039, 1039]
    found = diagnosed(own, tmp_path, sizes, corruption=bug, target_epsilon=3.0)
    assert compared_in(found[0]) == {0, 1}
    accused = {own["suspicious"]: own["verdict"] for own in found if own["is_accused"]}
    assert accused == ({} if bug == "none" else {"0": bug})
