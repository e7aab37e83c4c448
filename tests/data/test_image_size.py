"""Data bring their own size and colours: every source, every recipe, every command."""

import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

from command_line import flags, printed, refused
from fedgs import library
from fedgs.config.recipes import RECIPES
from fedgs.config.run_config import RunConfig
from fedgs.data.given import read_given
from fedgs.data.load import load_test_data
from fedgs.data.records import DataWarning
from fedgs.errors import UserError
from fedgs.round.preparation import planned_run, resolve_deployed
from fedgs.runs.run_folder import RunFolder
from loading import configured, load, write_mnist
from refusals import assert_refused
from tiny import run_config

pytestmark = [
    pytest.mark.usefixtures("hub_cache"),
    pytest.mark.filterwarnings("ignore::fedgs.data.records.DataWarning"),
]

COLOUR = np.random.default_rng(0).integers(256, size=(12, 32, 32, 3), dtype=np.uint8)
GREY = COLOUR[..., 0]
OWNERS = np.repeat(["ann", "bob", "eve"], 4)
LABELS = np.arange(12) % 2


def write_npz(root: Path, pixels: np.ndarray) -> str:
    np.savez(root / "own.npz", images=pixels, labels=LABELS, clients=OWNERS)
    return f"npz:{root}/own.npz"


def write_folder(root: Path, pixels: list[np.ndarray] | np.ndarray) -> str:
    for number, (owner, label) in enumerate(zip(OWNERS, LABELS, strict=True)):
        folder = root / owner / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number]).save(folder / f"{number:02}.png")
    return f"folder:{root}"


def write_parquet(root: Path, pixels: list[np.ndarray] | np.ndarray) -> str:
    """Writes a file as the hub has it: pictures are the bytes of a PNG."""
    datasets = pytest.importorskip("datasets")
    kinds = {"img": datasets.Image(), "owner": datasets.Value("string")}
    features = datasets.Features(**kinds, label=datasets.ClassLabel(names=["a", "b"]))
    pictures = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        pictures.append({"bytes": file.getvalue(), "path": None})
    values = {"img": pictures, "owner": OWNERS.tolist(), "label": LABELS.tolist()}
    table = datasets.Dataset.from_dict(values, features=features)
    (root / "data").mkdir()
    for split in ("train", "test"):
        table.to_parquet(root / "data" / f"{split}-00000-of-00001.parquet")
    return f"hf:{root}?client=owner"


WRITERS = {"npz": write_npz, "folder": write_folder, "hf": write_parquet}


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


def in_order_of_pixels(data, pixels):
    """The pictures of `data` by the number that each has in `pixels`."""
    return [
        next(n for n, known in enumerate(pixels) if (known == image).all())
        for image in np.moveaxis(data.images, 1, 3)
    ]


def test_pictures_keep_their_size_and_colours(write, tmp_path):
    data = load(write(tmp_path, COLOUR))
    assert data.images.shape == (12, 3, 32, 32)
    assert sorted(in_order_of_pixels(data, COLOUR)) == [*range(12)]


def test_grey_pictures_stay_grey(write, tmp_path):
    assert load(write(tmp_path, GREY)).images.shape == (12, 1, 32, 32)


def write_items(pixels):
    """A program's own pictures, read at once."""
    items = type("Items", (Dataset,), {"__getitem__": pixels.__getitem__})
    items.__len__ = lambda self: len(pixels)
    return items()


def are_rgb_but_grey(images):
    """Whether all images have three channels, and all but the last are grey."""
    grey = sum(bool((image == image[:1]).all()) for image in images)
    return images.shape == (12, 3, 32, 32) and grey == 11


def test_grey_pictures_beside_colour_are_rgb_with_a_warning(tmp_path):
    """CIFAR-10 has such grey pictures, whose three channels are equal."""
    data = write_parquet(tmp_path, [*GREY[:-1], COLOUR[-1]])
    with pytest.warns(DataWarning, match="1 in colour and 11 grey, .*image-channels 3"):
        assert are_rgb_but_grey(load(data).images)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        assert are_rgb_but_grey(load(data, image_channels=3).images)


@pytest.mark.parametrize("make", [Image.fromarray, lambda pixels: pixels])
def test_grey_items_of_a_program_beside_colour_are_rgb_with_a_warning(make):
    arrays = [*GREY[:-1, None], COLOUR[-1].transpose(2, 0, 1)]
    if make is Image.fromarray:
        arrays = [*GREY[:-1], COLOUR[-1]]
    items = write_items([make(pixels) for pixels in arrays])
    config = RunConfig(data="given")
    with pytest.warns(DataWarning, match="1 in colour and 11 grey, .*image-channels 3"):
        assert are_rgb_but_grey(read_given(config, items).images)
    config = RunConfig(data="given", image_channels=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        assert are_rgb_but_grey(read_given(config, items).images)


@pytest.mark.parametrize(
    ("num_grey", "rarer", "words"),
    [
        (11, "eve/1/11.png is in colour", "1 in colour and 11 grey"),
        (1, "ann/0/00.png is grey", "11 in colour and 1 grey"),
    ],
)
def test_a_folder_of_grey_and_colour_needs_the_setting(
    fedgs, tmp_path, monkeypatch, num_grey, rarer, words
):
    monkeypatch.chdir(tmp_path)
    data = write_folder(tmp_path / "in", [*GREY[:num_grey], *COLOUR[num_grey:]])
    asked = ("data", "inspect", data)
    refused(fedgs(*asked), words, rarer, "--image-channels 3", "--image-channels 1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]
    assert load(data, image_channels=3).images.shape == (12, 3, 32, 32)
    with pytest.raises(UserError, match=r"in colour; give .* remove it"):
        load(data, image_channels=1)
    shown = printed(fedgs(*asked, "--image-channels", "3"))
    assert f"{12 - num_grey} in colour, {num_grey} grey" in shown


@pytest.mark.parametrize("side", [16, 28, 64])
def test_all_sizes_that_are_generated_are_kept(write, tmp_path, side):
    pixels = np.random.default_rng(side).integers(
        256, size=(12, side, side), dtype=np.uint8
    )
    assert load(write(tmp_path, pixels)).images.shape == (12, 1, side, side)


def test_a_size_that_is_given_is_the_size(write, tmp_path):
    data = load(write(tmp_path, GREY), image_size=16, image_channels=3)
    assert data.images.shape == (12, 3, 16, 16)


def test_the_test_split_is_as_large_as_the_training_split(tmp_path):
    data = write_parquet(tmp_path, COLOUR)
    images, _ = load_test_data(configured(data))
    assert images.shape == (12, 3, 32, 32)


def test_built_in_sets_have_the_size_that_the_documentation_says(tmp_path):
    assert load("digits", num_clients=2).images.shape[1:] == (1, 28, 28)
    write_mnist(tmp_path, GREY[:, :28, :28], LABELS)
    found = load("mnist", data_dir=str(tmp_path), num_clients=2).images
    assert found.shape[1:] == (1, 28, 28)


# ------------------------------------------------------------------ every command


# Groups of clients need more of them; tests/app/test_bug_detection.py has these.
@pytest.mark.parametrize("recipe", [None, *(r for r in RECIPES if r != "group-means")])
def test_every_recipe_takes_the_datas_size(tmp_path, recipe):
    given = {"data": write_npz(tmp_path, COLOUR), "output": str(tmp_path / "run")}
    if recipe in ("algorithm-1", "algorithm-2"):
        given |= {"num_clients": 2}
    if recipe == "feature-means-fonts":
        given |= {"public_data": write_npz_of_others(tmp_path)}
    config, loads = library.planned(recipe=recipe, seed=0, **given)
    resolved, data = planned_run(config, loads)
    assert (resolved.image_size, resolved.image_channels) == (32, 3)
    assert data.images.shape == (12, 3, 32, 32)
    assert {"image_size", "image_channels"} <= {*resolved.counted.split(",")}


def write_npz_of_others(root: Path) -> str:
    others = np.random.default_rng(9).integers(256, size=COLOUR.shape, dtype=np.uint8)
    np.savez(root / "others.npz", images=others, labels=LABELS)
    return f"npz:{root}/others.npz"


@pytest.mark.parametrize("recipe", [None, "moments"])
def test_training_and_inspection_agree(write, tmp_path, fedgs, monkeypatch, recipe):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    data, run = write(tmp_path / "data", GREY), tmp_path / "run"
    report = json.loads(printed(fedgs("data", "inspect", data, "--json")))
    assert report["image_shape"] == [1, 32, 32]
    given = flags(data=data, recipe=recipe, target_epsilon=100, output=run)
    dry = printed(fedgs("train", *given, "--dry-run"))
    assert not run.exists()
    trained = printed(fedgs("train", *given))
    assert "Recipe" in dry
    assert "Recipe" in trained
    config = RunFolder.open(run).config
    assert (config.image_size, config.image_channels) == (32, 1)
    assert library.load(run).sample(2).images.shape == (2, 1, 32, 32)


def test_images_of_a_program_keep_their_size(tmp_path):
    for recipe in (None, "moments"):
        config, loads = library.planned(COLOUR, LABELS, OWNERS, recipe=recipe, seed=0)
        resolved, _ = planned_run(config, loads, name=str(recipe))
        assert (resolved.image_size, resolved.image_channels) == (32, 3)


def test_a_size_that_is_given_is_not_counted_in_the_data(tmp_path):
    given = {"data": write_npz(tmp_path, COLOUR), "output": str(tmp_path / "run")}
    given |= {"image_size": 28, "image_channels": 3, "seed": 0}
    resolved, _ = planned_run(*library.planned(**given))
    assert resolved.image_size == 28
    assert resolved.counted == "num_clients,num_classes,test_owners"


# ------------------------------------------------------------------ asked for


def mixed(pixels: np.ndarray, other: np.ndarray) -> list[np.ndarray]:
    """All pictures but the last one, and another one in its place."""
    return [*pixels[:-1], other]


@pytest.mark.parametrize("write", [write_folder, write_parquet])
def test_pictures_of_two_sizes_need_the_setting(fedgs, tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    data = write(tmp_path / "data", [*GREY[:-1], GREY[-1, :28, :28]])
    for command in (
        ("train", *flags(data=data, target_epsilon=10)),
        ("train", *flags(data=data, target_epsilon=10, recipe="moments")),
        ("data", "inspect", data),
    ):
        refused(fedgs(*command), "image_size is unset", "28 x 28", "--image-size")
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
    assert load(data, image_size=32).images.shape == (12, 1, 32, 32)


def test_one_other_size_needs_the_setting(write, tmp_path, fedgs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    data = write(tmp_path / "data", GREY[:, :30, :30])
    for command in (
        ("train", *flags(data=data, target_epsilon=10)),
        ("data", "inspect", data),
    ):
        refused(fedgs(*command), "image_size is unset", "30 x 30", "--image-size")
    assert load(data, image_size=28).images.shape == (12, 1, 28, 28)


def test_the_server_of_a_deployment_is_told_the_size():
    given = {"num_classes": 2, "noise_multiplier": 1.0, "engine": "flower"}
    config = run_config(nodes="a,b", **given)
    assert_refused("^image_size is unset: .*--image-size", resolve_deployed, config)
    config = run_config(nodes="a,b", image_size=32, **given)
    assert resolve_deployed(config).image_shape == (1, 32, 32)
