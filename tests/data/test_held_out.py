"""Images held out by their owners, and bugs put into the data."""

import dataclasses

import numpy as np
import pytest

from clients.deployed_client import own_images
from experiments.baselines import baseline_run
from fedgs import library
from fedgs.app.commands.forecast import evaluation_note
from fedgs.config.recipes import HELD_OUT, OWNERS_HELD_OUT, overridden, recipe
from fedgs.config.run_config import RunConfig
from fedgs.data.corruption import corrupt, corrupted, corrupted_clients
from fedgs.data.federated import to_float
from fedgs.data.load import load_data, load_test_data
from fedgs.data.records import Records
from fedgs.errors import UserError
from fedgs.round.preparation import fitted_to_data, resolve, with_held_out
from loading import configured, load, refused
from refusals import assert_refused

SIZES = {"ann": 20, "bob": 11, "cleo": 1, "dora": 40}
NAMES = tuple(SIZES)
OWNERS = np.random.default_rng(1).permutation(np.repeat(NAMES, [*SIZES.values()]))
PIXELS = np.random.default_rng(0).integers(256, size=(72, 28, 28), dtype=np.uint8)


@pytest.fixture
def source(tmp_path):
    np.savez(tmp_path / "toy.npz", images=PIXELS, clients=OWNERS)
    return f"npz:{tmp_path / 'toy.npz'}"


def images_held_out(*source, **settings):
    return load_test_data(configured(*source, **settings))[0]


# ------------------------------------------------------------------ held out


def test_every_owner_holds_out_its_share(source):
    data = load(source, test_fraction=0.3)
    held = dict(zip(data.client_names, map(len, data.client_test_records), strict=True))
    assert held == {"ann": 6, "bob": 3, "cleo": 0, "dora": 12}
    for name, train, test in zip(
        data.client_names, data.client_records, data.client_test_records, strict=True
    ):
        assert sorted([*train, *test]) == np.flatnonzero(name == OWNERS).tolist()
    test, train = data.client_test_records[3], data.client_records[3]
    assert min(test) < max(train)  # not all of one end
    assert min(train) < max(test)
    # An owner keeps at least one image to train on.
    assert load(source, test_fraction=0.99).sizes.tolist() == [1] * 4
    nothing = load(source)
    assert (nothing.client_test_records, nothing.sizes.sum()) == ((), 72)


def test_choice_depends_on_neither_seed_partition_nor_other_owners(source, tmp_path):
    settings = {"test_fraction": 0.3}
    expected = images_held_out(source, **settings)
    for other in ({"seed": 9, "num_clients": 2}, {"partition": "iid"}):
        assert (images_held_out(source, **settings, **other) == expected).all()
    is_ann = OWNERS == "ann"
    np.savez(tmp_path / "ann.npz", images=PIXELS[is_ann], clients=OWNERS[is_ann])
    alone = load(f"npz:{tmp_path / 'ann.npz'}", **settings)
    together = load(source, **settings)
    one, other = (
        data.images[data.client_test_records[0]] for data in (alone, together)
    )
    assert (one == other).all()


@pytest.mark.parametrize(("partition", "count"), [("iid", 48), ("dirichlet", 51)])
def test_no_client_trains_on_a_test_image(source, partition, count):
    settings = {"test_fraction": 0.3, "partition": partition, "num_clients": 4}
    data = load(source, **settings)
    test = {image.tobytes() for image in images_held_out(source, **settings)}
    train = [image.tobytes() for k in range(4) for image in to_float(data.of(k).images)]
    assert (len(test), len(train)) == (21, count)
    assert test.isdisjoint(train)


def test_data_without_owners_is_held_out_as_a_whole():
    settings = {"test_fraction": 0.25}
    images, labels = load_test_data(configured("digits", **settings))
    assert len(images) == len(labels) == round(1797 / 4)
    data = load("digits", **settings)
    assert data.sizes.tolist() == [(1797 - 449) // 180] * 180
    assert data.client_test_records == ()


@pytest.mark.parametrize(
    ("settings", "given", "share"),
    [
        ({"data": "npz:a.npz"}, (), HELD_OUT),
        ({"data": "npz:a.npz", "test_fraction": 0.3}, ("test_fraction",), 0.3),
        ({"data": "npz:a.npz"}, ("test_fraction",), 0),
        *[({"data": data}, (), 0) for data in ("mnist", "fonts", "hf:a")],
        ({"data": "femnist:a"}, (), HELD_OUT),  # no test file lies beside it
        ({"data": "given"}, (), 0),
        ({"data": "npz:a.npz", "privacy_unit": "record"}, (), 0),
        ({"data": "hf:a?partitioner=IidPartitioner"}, (), 0),
    ],
)
def test_a_share_is_held_out_where_scores_need_it(settings, given, share):
    config = overridden(recipe("moments"), settings)
    assert with_held_out(config, given).test_fraction == share


def test_baselines_and_programs_hold_out_the_same(source, monkeypatch):
    shares = []

    def stop(config: RunConfig, *_: object, **__: object) -> None:
        shares.append(config.test_fraction)
        raise UserError("stop here")

    monkeypatch.setattr(baseline_run, "resolve", stop)
    monkeypatch.setattr(library, "new_run", stop)
    given = {"data": source}
    assert_refused("stop", baseline_run.new_run, "dp-merf", given)
    assert_refused("stop", library.train, recipe="moments", **given)
    assert shares == [HELD_OUT, HELD_OUT]


def test_records_as_units_of_owned_data_are_refused(source):
    settings = {"privacy_unit": "record", "partition": "iid", "num_clients": 3}
    words = r"test_fraction = 0\.1: privacy_unit = record"
    refused(words, source, **settings, test_fraction=0.1)


# ------------------------------------------------------------------ whole owners

PEOPLE = np.array([f"p{number:03}" for number in range(72)])  # each of one image


def people(root, names=PEOPLE):
    np.savez(root / "people.npz", images=PIXELS[: len(names)], clients=names)
    return f"npz:{root / 'people.npz'}"


def test_whole_owners_are_held_out_and_never_seen(source):
    seen = set()
    for share in (0.3, 0.49):
        data = load(source, test_owners=share)
        assert {*data.client_names} | {*data.test_owners} == {*NAMES}
        assert {*data.client_names}.isdisjoint(data.test_owners)
        seen.add(data.test_owners)
        test = {image.tobytes() for image in images_held_out(source, test_owners=share)}
        expected = np.isin(OWNERS, data.test_owners)
        assert test == {
            image.tobytes() for image in to_float(PIXELS[expected][:, None])
        }
        assert data.sizes.sum() == (~expected).sum()
    assert len(seen) > 1


def test_owners_of_one_image_are_held_out(tmp_path):
    """A fraction of one image is none, and the number of clients is of the rest."""
    source = people(tmp_path)
    assert len(load(source, test_fraction=0.2).sizes) == 72
    data = load(source, test_owners=0.2)
    assert data.num_clients == 72 - len(data.test_owners)
    assert abs(len(data.test_owners) - 14.4) < 5 * np.sqrt(72 * 0.16)
    refused("num_clients = 72", source, test_owners=0.2, num_clients=72)


def test_an_owner_is_held_out_by_its_name_alone(tmp_path):
    some = PEOPLE[::3]
    held = set(load(people(tmp_path), test_owners=0.5).test_owners)
    alone = set(load(people(tmp_path, some), test_owners=0.5).test_owners)
    assert alone == held & {*some}
    for other in ({"seed": 5}, {"num_clients": 9}, {"partition": "iid"}):
        more = {"num_clients": 9} | other
        assert set(load(people(tmp_path), test_owners=0.5, **more).test_owners) == held
        fewer = images_held_out(people(tmp_path), test_owners=0.2, **more)
        larger = images_held_out(people(tmp_path), test_owners=0.5, **more)
        all_larger = {image.tobytes() for image in larger}
        assert {image.tobytes() for image in fewer} < all_larger


def test_images_without_owners_are_their_own_owners(tmp_path):
    """K = number of images: each image is a client, or is held out."""
    np.savez(tmp_path / "toy.npz", images=PIXELS)
    settings = {"partition": "iid", "test_owners": 0.2, "privacy_unit": "record"}
    source = f"npz:{tmp_path / 'toy.npz'}"
    held = images_held_out(source, num_clients=9, **settings)
    data = load(source, num_clients=72 - len(held), **settings)
    assert data.sizes.tolist() == [1] * (72 - len(held))
    train = {
        image.tobytes()
        for image in to_float(data.images[np.ravel(data.client_records)])
    }
    assert train.isdisjoint(image.tobytes() for image in held)


def deployed(source, count):
    config = RunConfig.from_flat({"test_owners": 0.2}, configured(source))
    return own_images(config, range(7, 7 + count))


def test_a_client_of_a_deployment_holds_out_its_own_owners(tmp_path):
    held = set(load(people(tmp_path), test_owners=0.2).test_owners)
    own = PEOPLE[40:]
    left = [name for name in own if name not in held]
    source = people(tmp_path, own)
    data = deployed(source, len(left))
    trained = {
        data.images[record].tobytes()
        for records in data.client_records.values()
        for record in records
    }
    expected = [PIXELS[index] for index, name in enumerate(own) if name in left]
    assert trained == {image.tobytes() for image in expected}
    assert_refused("^data = ", deployed, source, len(own))
    np.savez(tmp_path / "toy.npz", images=PIXELS)  # names nobody: one client
    words = "^test_owners = 0.2: "
    assert_refused(words, deployed, f"npz:{tmp_path / 'toy.npz'}", 1)


def test_a_cohort_may_name_owners_held_out(tmp_path):
    source = people(tmp_path)
    (tmp_path / "cohort.txt").write_text("\n".join(PEOPLE[:40]) + "\n")
    data = load(source, test_owners=0.2, cohort=str(tmp_path / "cohort.txt"))
    assert set(data.client_names) == {*PEOPLE[:40]} - {*data.test_owners}
    rows = [f"{name},x" for name in PEOPLE]
    (tmp_path / "own.csv").write_text("\n".join(["owner,cohort", *rows]) + "\n")
    data = load(source, test_owners=0.2, cohorts=str(tmp_path / "own.csv"))
    assert len(data.client_cohorts) == data.num_clients


def by_default(source, **given):
    """Returns settings and data of a run whose user gave these settings."""
    config = overridden(recipe("moments"), {"data": source, **given})
    config = with_held_out(config, given)
    fitted, data = fitted_to_data(config, given)
    resolved, _ = resolve(fitted, data)  # the data are not read again
    # A recipe that is not fitted reads them there, and finds the same.
    direct, _ = resolve(config)
    assert direct.test_owners == resolved.test_owners
    assert direct.test_fraction == resolved.test_fraction
    return resolved, data


# The owners' numbers of images, and whether a tenth of most of them is none.
MOST_HAVE_FEW = {
    "one each": ([1] * 30, True),
    "six each": ([6] * 12, False),
    "half have few": ([1] * 10 + [6] * 10, False),
    "more than half have few": ([5] * 11 + [6] * 2, True),
}


@pytest.mark.parametrize("case", MOST_HAVE_FEW)
def test_owners_are_held_out_by_default_where_most_have_few_images(tmp_path, case):
    counts, is_by_owners = MOST_HAVE_FEW[case]
    names = np.repeat(PEOPLE[: len(counts)], counts)
    pixels = np.resize(PIXELS, (len(names), 28, 28))
    labels = np.arange(len(names)) % 2
    path = tmp_path / "mine.npz"
    np.savez(path, images=pixels, labels=labels, clients=names)
    config, data = by_default(f"npz:{path}")
    if is_by_owners:
        assert (config.test_owners, config.test_fraction) == (OWNERS_HELD_OUT, 0)
        assert config.num_clients == len(counts) - len(data.test_owners)
    else:
        assert (config.test_owners, config.test_fraction) == (0, HELD_OUT)
        assert config.num_clients == len(counts)
    # The images decided it, so every epsilon says so.
    assert f"test_owners = {config.test_owners}, taken from the private data" in str(
        config.public_conditions
    )
    # An evaluation, by the settings of the run, meets no image of it.
    test, _ = load_test_data(config)
    assert len(test) == len(names) - data.sizes.sum()


def test_what_is_held_out_counts_before_the_test_split_of_the_data():
    every, _ = load_test_data(configured("fonts"))
    for name in ("test_owners", "test_fraction"):
        data = load("fonts", **{name: 0.2})
        test, labels = load_test_data(configured("fonts", **{name: 0.2}))
        count = 59_829 - data.sizes.sum()
        assert len(test) == len(labels) == count != len(every)


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (np.zeros(72, int), "to train on have one class only"),
        (np.arange(72) % 2, "evaluated on 0.1 of every owner's images"),
    ],
)
def test_a_note_says_whether_scores_will_be_possible(tmp_path, labels, named):
    np.savez(tmp_path / "own.npz", images=PIXELS, clients=OWNERS, labels=labels)
    config, data = by_default(f"npz:{tmp_path / 'own.npz'}")
    assert named in evaluation_note(config, data)


@pytest.mark.filterwarnings("ignore::fedgs.data.records.DataWarning")  # of shards
@pytest.mark.parametrize("partition", ["auto", "iid", "dirichlet"])
@pytest.mark.parametrize("each", [2, 10])
def test_a_note_says_the_truth_of_every_partition(tmp_path, partition, each):
    """Of two images of an owner a tenth is none, also if owners are cut into shards."""
    names = np.repeat(PEOPLE[:20], each)
    pixels = np.resize(PIXELS, (len(names), 28, 28))
    labels = np.arange(len(names)) % 2
    path = tmp_path / "own.npz"
    np.savez(path, images=pixels, labels=labels, clients=names)
    given = {"partition": partition, "num_clients": 16}
    config, data = by_default(f"npz:{path}", **given)
    assert (config.test_owners, config.test_fraction) == (0, HELD_OUT)
    note = evaluation_note(config, data)
    test, _ = load_test_data(config)
    assert len(test) == len(data.held_out_records) == 20 * round(each * HELD_OUT)
    if each == 2:
        assert "not be possible, because test_fraction 0.1 of so few images" in note
    else:
        assert "evaluated on 0.1 of every owner's images" in note


def test_a_note_says_if_all_that_is_held_out_is_of_one_class(tmp_path):
    held = set(load(people(tmp_path), test_owners=0.2).test_owners)
    labels = [0 if name in held else index % 2 for index, name in enumerate(PEOPLE)]
    path = tmp_path / "own.npz"
    np.savez(path, images=PIXELS[: len(PEOPLE)], labels=labels, clients=PEOPLE)
    config, data = by_default(f"npz:{path}")
    note = evaluation_note(config, data)
    assert "what test_owners 0.2 holds out has one class only" in note
    assert "Give a larger --test-owners" in note


def test_a_run_goes_on_with_the_same_clients_or_not_at_all(tmp_path):
    source = people(tmp_path, PEOPLE[1:])
    config, data = by_default(source)
    assert load_data(config).client_names == data.client_names
    # One more name, the first of all: every client would be another owner.
    people(tmp_path, ["a new one", *PEOPLE[1:]])
    words = f"has {config.num_clients + 1} clients now, and the run began with"
    assert_refused(words, load_data, config)
    given = dataclasses.replace(config, counted="")  # the user wanted so many of them
    assert load_data(given).num_clients == config.num_clients


def test_radiographs_of_a_given_number_of_patients_have_no_default():
    config = overridden(recipe("moments"), {"data": "chest-xray"})
    assert with_held_out(config, ()).test_owners == OWNERS_HELD_OUT
    config = overridden(config, {"num_clients": 40})
    assert with_held_out(config, ("num_clients",)).test_owners == 0


def test_an_error_that_counts_owners_names_those_held_out(tmp_path):
    words = "clients beside those that test_owners = 0.2 holds out; give --num-clients"
    source = people(tmp_path)
    assert_refused(words, load, source, test_owners=0.2, num_clients=len(PEOPLE))


def test_what_the_user_gives_is_not_left_to_the_images(tmp_path):
    source = people(tmp_path)
    for name, share in (("test_fraction", 0.3), ("test_owners", 0.0)):
        config, _ = by_default(source, **{name: share})
        assert getattr(config, name) == share
        assert config.num_clients == len(PEOPLE)
        assert "test_owners" not in config.counted
    # The number of clients is that of all owners, so all of them take part.
    config, _ = by_default(source, num_clients=len(PEOPLE))
    assert (config.test_owners, config.num_clients) == (0, len(PEOPLE))
    assert "test_owners" not in config.counted


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"test_fraction": 0.1}, "^test_owners = 0.2: "),
        (
            {"privacy_unit": "record", "partition": "iid", "num_clients": 3},
            "^test_owners = 0.2: ",
        ),
        ({"test_owners": 0.999999}, "^test_owners = 0.999999: "),
    ],
)
def test_what_cannot_be_held_out_by_owners(source, settings, named):
    assert_refused(named, load, source, **({"test_owners": 0.2} | settings))


# ------------------------------------------------------------------ corruption


def test_all_images_of_some_clients_are_corrupted(source):
    settings = configured(source, corruption="rotate", seed=3, test_fraction=0.3)
    data = load_data(settings)
    is_corrupted = corrupted_clients(settings, data.client_names)
    assert 0 < is_corrupted.sum() < 4
    for groups in (data.client_records, data.client_test_records):
        for own, changed in zip(groups, is_corrupted, strict=True):
            expected = np.rot90(PIXELS[own], axes=(1, 2)) if changed else PIXELS[own]
            assert (data.images[own, 0] == expected).all()


def test_single_images_are_corrupted(source):
    settings = configured(source, corruption="invert", corruption_unit="image")
    data = load_data(settings)
    count = 0
    for own, name in zip(data.client_records, NAMES, strict=True):
        mask = corrupted(settings, name, len(own))[:, None, None]
        expected = np.where(mask, 255 - PIXELS[own], PIXELS[own])
        assert (data.images[own, 0] == expected).all()
        count += mask.sum()
    assert 20 < count < 52  # 36 of 72 expected, standard deviation 4.2
    words = "no client is corrupted as a whole"
    assert_refused(words, corrupted_clients, settings, NAMES)


def test_draw_depends_on_seed_and_name_alone():
    names = [f"f{k:04d}" for k in range(4000)]
    first = corrupted_clients(configured("digits", corruption="invert"), names)
    rotated = corrupted_clients(configured("digits", corruption="rotate"), names[::-1])
    assert (first == rotated[::-1]).all()
    other = corrupted_clients(configured("digits", corruption="invert", seed=1), names)
    assert (first != other).any()
    some = configured("digits", corruption="rotate", corruption_fraction=0.2)
    share = corrupted_clients(some, names).mean()
    assert abs(share - 0.2) < 5 * np.sqrt(0.2 * 0.8 / 4000)


def test_labels_are_corrupted_too_and_the_records_keep_theirs():
    settings = configured("digits", corruption="shift-labels", corruption_fraction=1.0)
    own = Records(PIXELS[:4, None].copy(), np.arange(4), 4)
    images, labels = corrupt(settings, own, [np.arange(4)], ["ann"])
    assert labels.tolist() == [1, 2, 3, 0]
    assert own.labels.tolist() == [0, 1, 2, 3]
    assert (images[:, 0] == PIXELS[:4]).all()
