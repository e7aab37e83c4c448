"""What counts as public: images that a run starts from, and numbers of its data."""

import numpy as np
import pytest

from fedgs.config.checks import same_source_problems
from fedgs.config.recipes import overridden, recipe
from fedgs.config.run_config import RunConfig
from fedgs.methods import new_state
from fedgs.privacy.accountant import statements
from fedgs.privacy.plan import Plan
from fedgs.round.preparation import fitted_to_data, resolve
from fedgs.runs.epsilons import of_run
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from runs import train
from tiny import (
    MOMENTS,
    embedding_round,
    next_request,
    run_config,
    tiny_config,
    tiny_data,
    write_tiny_npz,
)

PUBLIC = MOMENTS | {"phases": "moments,moments"}
PUBLIC |= {"num_rounds": 2, "public_data": "fonts"}

STARTS = [
    ("mnist-by-writer", "mnist", True),
    ("mnist", "femnist", True),
    ("femnist:/somewhere/leaf", "mnist", True),
    ("hf:ylecun/mnist", "mnist", True),
    ("mnist", "hf:flwrlabs/femnist", True),
    ("hf:tanganke/emnist_letters", "hf:mnist", True),
    ("fashion-mnist", "hf:zalando-datasets/fashion_mnist", True),
    ("npz:{}/a.npz", "npz:{}/x/../a.npz", True),
    ("folder:{}/x", "folder:{}/x/", True),
    ("folder:{}/x", "folder:{}/link", True),
    ("mnist", "fonts", False),
    ("mnist", "fashion-mnist", False),
    ("hf:org/kmnist", "mnist", False),
    ("npz:/a/mnist.npz", "npz:/b/mnist.npz", False),
    ("digits", "mnist", False),
]


@pytest.mark.parametrize(("private", "public", "are_same_people"), STARTS)
def test_private_images_under_another_name_are_no_public_start(
    tmp_path, private, public, are_same_people
):
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    names = private.format(tmp_path), public.format(tmp_path)
    for data, start in (names, names[::-1]):
        config = run_config(data=data, public_data=start)
        problems = [name for name, _ in same_source_problems(config)]
        assert problems == ["public_data"] * are_same_people


@pytest.mark.filterwarnings("ignore:background")
@pytest.mark.parametrize("change", ["copied", "inverted"])
def test_public_images_that_are_private_ones_are_refused_with_their_number(
    tmp_path, change
):
    settings = PUBLIC | {"data": write_tiny_npz(tmp_path / "private.npz")}
    data = tiny_data(tiny_config(**settings))
    images = data.images if change == "copied" else 255 - data.images
    public = np.concatenate([np.zeros_like(images[:1]), images[:5]])
    labels = [0, *(np.arange(5) % 3)]
    np.savez(tmp_path / "public.npz", images=public, labels=labels)
    start = {"public_data": f"npz:{tmp_path / 'public.npz'}"}
    config = tiny_config(**settings | start)
    assert_refused("public_data = .*:", resolve, config)


def test_every_row_of_a_run_with_public_data_states_what_it_supposes(tmp_path):
    start = {"public_data": write_tiny_npz(tmp_path / "public.npz"), "noise_seed": None}
    config = tiny_config(**PUBLIC | start, output=str(tmp_path / "run"))
    planned = statements(Plan.from_config(config), config.delta)
    folder = RunFolder.create(config)
    train(folder, data=tiny_data(config))
    for row in (*planned, *of_run(folder.path)):
        (text,) = [c for c in row.conditions if c.startswith("public data: ")]
        assert "belong to nobody who is protected" in text
        assert "not chosen by a look at the private ones" in text


@pytest.mark.parametrize(
    ("labels", "channels", "named"),
    [
        ([0, 1, 2, 3], 1, "has images of 4 classes, .*3; give"),
        ([0, 2, 2, 0], 1, "has images of 2 classes, .*3; give"),
        ([0, 1, 2, 1], 3, "image_channels = 1:"),
    ],
)
def test_public_images_of_other_classes_or_channels_are_refused(
    tmp_path, labels, channels, named
):
    images = np.zeros((4, channels, 16, 16), np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    config = tiny_config(**PUBLIC | {"public_data": f"npz:{tmp_path / 'x.npz'}"})
    words = f"public_data = 'npz:.*{named}"
    assert_refused(words, next_request, config, new_state(config))


def test_clients_do_not_read_the_public_data(tmp_path):
    there = {"public_data": write_tiny_npz(tmp_path / "public.npz")}
    config = tiny_config(**PUBLIC | there)
    request = next_request(config, new_state(config))
    elsewhere = tiny_config(**PUBLIC | {"public_data": "npz:/nowhere.npz"})
    assert embedding_round(elsewhere, tiny_data(elsewhere), range(6), request, 0)


# ------------------------------------------------------------------ what was counted


def counted(**settings: object) -> str:
    unset = {"num_clients": "", "num_classes": "", "clients_per_round": ""}
    config, _ = resolve(RunConfig.from_flat(unset | settings, tiny_config(**MOMENTS)))
    conditions = statements(Plan.from_config(config), 1e-5)[0].conditions
    return "".join(text for text in conditions if text.startswith("public: "))


def test_numbers_that_the_private_data_decided_are_in_every_row(tmp_path):
    given = {"data": write_tiny_npz(tmp_path / "private.npz")}
    text = counted(**given)
    assert text.startswith("public: num_clients = 6, num_classes = 3, ")
    assert "about data sets that agree in this" in text
    assert "num_classes = 3, taken from the private data" in counted(
        **given, num_clients=6
    )
    assert counted(**given, num_clients=6, num_classes=3) == ""


def test_the_size_of_images_that_was_taken_from_them_is_in_every_row(tmp_path):
    data = write_tiny_npz(tmp_path / "private.npz")
    given = {"data": data, "target_epsilon": 100.0, "image_channels": 1}
    config = overridden(recipe("moments"), given)
    fitted, images = fitted_to_data(config, given)
    resolved, _ = resolve(fitted, images)
    assert resolved.counted == "num_clients,num_classes,image_size"


def test_of_data_that_everybody_has_nothing_is_counted():
    pytest.importorskip("sklearn", reason="needs the digits of scikit-learn")
    config, _ = resolve(run_config(noise_multiplier=1.0, seed=1))
    assert config.counted == ""
