"""Every loader: whatever one client's data are, no bit of another client's moves.

A client's data are replaced by some that tempt a loader to decide for everybody:
another range of values, another type, labels and names that sort before all others,
more images.
"""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import femnist_files
from fedgs.data import sources
from fedgs.errors import UserError
from loading import load, write_mnist, write_npz, write_writers

RNG = np.random.default_rng(0)
GREY = RNG.integers(256, size=(4, 28, 28), dtype=np.uint8)
INK = (GREY > 127).astype(np.float64)  # only 0 and 1: of either range
OWNERS = np.array(["ann", "ann", "bob", "bob"])
pytestmark = pytest.mark.filterwarnings("ignore::fedgs.data.records.DataWarning")


def _pictures(root: Path, folders: list[str]) -> None:
    for number, (name, pixels) in enumerate(zip(folders, GREY, strict=True)):
        (root / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / name / f"{number}.png")


def _numbered_folders(root: Path, is_changed: bool) -> dict[str, object]:
    bob = ("12", "0") if is_changed else ("3", "3")
    _pictures(root, ["ann/3", "ann/10", *(f"bob/{label}" for label in bob)])
    return {"data": f"folder:{root}"}


def _named_folders(root: Path, is_changed: bool) -> dict[str, object]:
    bob = ("ant", "7") if is_changed else ("dog", "dog")
    _pictures(root, ["ann/cat", "ann/dog", *(f"bob/{label}" for label in bob)])
    if is_changed:
        Image.new("L", (50, 50), 255).save(root / "bob/ant/3.png")
    return {"data": f"folder:{root}", "classes": "dog,cat,ant,7", "image_size": 28}


def _hdf5(root: Path, is_changed: bool) -> dict[str, object]:
    import h5py

    data = femnist_files.write_hdf5(root / "x.h5")
    if is_changed:
        with h5py.File(root / "x.h5", "r+") as file:
            del file["examples/f0010_07"]
            group = file.create_group("examples/f0010_07")
            group["pixels"], group["label"] = INK, np.array([[61], [0], [0], [0]])
    return {"data": data}


def _leaf(root: Path, is_changed: bool) -> dict[str, object]:
    data = femnist_files.write_leaf(root)
    if is_changed:
        path = root / "all_data_0.json"
        content = json.loads(path.read_text())
        content["num_samples"][content["users"].index("f0010_07")] = 4
        changed = {"x": INK.reshape(4, -1).tolist(), "y": [61, 0, 0, 0]}
        content["user_data"]["f0010_07"] = changed
        path.write_text(json.dumps(content))
    return {"data": data}


def _hub(root: Path, is_changed: bool) -> dict[str, object]:
    rows = femnist_files.hub_rows()
    if is_changed:
        for index, writer in enumerate(rows["writer_id"]):
            if writer == "f0010_07":
                rows["character"][index] = 0
                rows["image"][index] = rows["image"][0]
    return {"data": femnist_files.write_hub(root, rows)}


def _rows(root: Path, is_changed: bool) -> dict[str, object]:
    import datasets

    pictures = [Image.fromarray(pixels) for pixels in GREY]
    if is_changed:
        pictures[2:] = [Image.new("RGB", (50, 50), (255,) * 3)] * 2
    values = {"image": pictures, "owner": OWNERS, "label": [0, 3, 3, 0]}
    values["label"][2] = 9 if is_changed else 3
    kinds = {"image": datasets.Image(), "owner": datasets.Value("string")}
    features = datasets.Features(**kinds, label=datasets.Value("int64"))
    table = datasets.Dataset.from_dict(values, features=features)
    table.to_parquet(root / "train.parquet")
    return {"data": f"hf:{root}?client=owner&label=label", "image_size": 28}


def _writers(root: Path, is_changed: bool) -> dict[str, object]:
    pixels, labels = GREY.copy(), np.array([3, 4, 5, 6])
    if is_changed:
        pixels[2:], labels[2:] = 1, 0
    write_mnist(root, pixels, labels)
    write_writers(root, labels, np.array([30, 30, 7, 7]))
    return {"data": "mnist-by-writer", "data_dir": str(root)}


def _radiographs(root: Path, is_changed: bool) -> dict[str, object]:
    kind = "virus" if is_changed else "bacteria"
    names = ["NORMAL/IM-0001-0001", "PNEUMONIA/person1_virus_1"]
    names += [f"PNEUMONIA/bob_{kind}_{number}" for number in (2, 3)]
    for name, pixels in zip(names, GREY, strict=True):
        path = root / f"{name.replace('bob', 'person7')}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels // 9 if "bob" in name and is_changed else pixels).save(
            path
        )
    if is_changed:  # a size of its own, and all of one grey
        Image.new("L", (90, 50), 7).save(root / "PNEUMONIA/person7_bacteria_9.png")
    return {"data": f"chest-xray:{root}", "normalize": True}


LOADERS = {
    "chest-xray": _radiographs,
    "folder numbers": _numbered_folders,
    "folder names": _named_folders,
    "femnist hdf5": _hdf5,
    "femnist leaf": _leaf,
    "femnist hub": _hub,
    "hf column": _rows,
    "mnist-by-writer": _writers,
}
CHANGED = {"bob", "f0010_07", "7", "person7"}
WITHOUT_CLIENTS = {"digits", "mnist", "fashion-mnist"}


def _clients(make, root: Path, is_changed: bool) -> dict[str, tuple[bytes, list[int]]]:
    root.mkdir()
    data = load(**make(root, is_changed))
    return {
        name: (data.images[own].tobytes(), data.labels[own].tolist())
        for name, own in zip(data.client_names, data.client_records, strict=True)
    }


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("loader", LOADERS)
def test_one_clients_data_change_no_bit_of_another(tmp_path, loader):
    ours = _clients(LOADERS[loader], tmp_path / "ours", is_changed=False)
    theirs = _clients(LOADERS[loader], tmp_path / "theirs", is_changed=True)
    assert ours.keys() == theirs.keys()
    moved = {name for name in ours if ours[name] != theirs[name]}
    assert len(moved) == 1
    assert moved <= CHANGED


def test_every_loader_is_tested():
    tested = {"npz", *(name.split()[0] for name in LOADERS)}
    assert tested | WITHOUT_CLIENTS == {*sources.READERS, *sources.FOLDERS, "digits"}


KINDS = {
    "integers": GREY,
    "fractions": GREY / 255,
    "float ink": INK,
    "dark": GREY / 255**2,
    "blank": np.zeros_like(GREY),
    "blank floats": np.zeros(GREY.shape),
}


@pytest.mark.parametrize("ann", KINDS)
def test_npz_range_and_type_of_another_move_no_pixel(tmp_path, ann):
    """Whatever bob's images are: ann's become the same ones, or the file is refused."""
    found = set()
    for bob in KINDS.values():
        images = np.concatenate([KINDS[ann][:2], bob[2:]])
        with contextlib.suppress(UserError):
            labels = [0, 1, 1, 0]
            arrays = {"images": images, "labels": labels, "clients": OWNERS}
            data = load(write_npz(tmp_path / "toy.npz", **arrays))
            found.add(data.images[data.client_records[0]].tobytes())
    assert len(found) == 1
