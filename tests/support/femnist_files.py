"""Federated EMNIST of four writers, written in each of its three published formats."""

import io
import json
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

# Labels of each writer: digits, upper case (10-35) and lower case (36-61).
WRITERS = {
    "f0000_14": [0, 10, 36, 61],
    "f0001_41": [9, 35],
    "f0010_07": [3, 3, 3, 40, 12, 5, 7],
    "f0002_30": [50],
}
CLASS_NAMES = [*map(str, range(10)), *(chr(65 + i) for i in range(26))]
CLASS_NAMES += [name.lower() for name in CLASS_NAMES[10:]]


def paper(user: str, count: int | None = None) -> np.ndarray:
    """Returns a writer's images as scanned, (n, 28, 28) uint8, 255 = white paper."""
    rng = np.random.default_rng([*user.encode()])
    if count is None:
        count = len(WRITERS[user])
    images = np.full((count, 28, 28), 255, np.uint8)
    images[:, 8:20, 8:20] = rng.integers(256, size=(len(images), 12, 12))
    return images


def write_hdf5(path: Path, writers=WRITERS, **options: object) -> str:
    """Writes TFF's layout; returns the setting `data`."""
    with h5py.File(path, "w") as file:
        for user, labels in writers.items():
            pixels = (paper(user, len(labels)) / 255).astype(np.float32)
            group = file.create_group(f"examples/{user}")
            group.create_dataset("pixels", data=pixels, **options)
            group.create_dataset("label", data=np.array(labels, np.int32))
    return f"femnist:{path}"


def write_leaf(folder: Path, files=((2, 0), (3, 1))) -> str:
    """Writes LEAF's layout: writers by number in several files, out of order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, chosen in enumerate(files):
        users, data = [[*WRITERS][i] for i in chosen], {}
        for user in users:
            pixels = (paper(user) / 255).reshape(-1, 784).tolist()
            data[user] = {"x": pixels, "y": WRITERS[user]}
        sizes = [len(WRITERS[user]) for user in users]
        content = {"users": users, "num_samples": sizes, "user_data": data}
        (folder / f"all_data_{number}.json").write_text(json.dumps(content))
    return f"femnist:{folder}"


def hub_rows() -> dict[str, list]:
    rows = {"image": [], "writer_id": [], "hsf_id": [], "character": []}
    for user, labels in WRITERS.items():
        for pixels, label in zip(paper(user), labels, strict=True):
            Image.fromarray(pixels).save(content := io.BytesIO(), format="PNG")
            rows["image"].append({"bytes": content.getvalue(), "path": None})
            rows["writer_id"].append(user)
            rows["hsf_id"].append(0)
            rows["character"].append(label)
    return rows


def write_hub(folder: Path, rows=None, names=CLASS_NAMES) -> str:
    """Writes the parquet file of flwrlabs/femnist, with its four columns."""
    import datasets

    features = datasets.Features(
        image=datasets.Image(),
        writer_id=datasets.Value("string"),
        hsf_id=datasets.Value("int64"),
        character=datasets.ClassLabel(names=names),
    )
    table = datasets.Dataset.from_dict(rows or hub_rows(), features=features)
    path = folder / "data" / "train-00000-of-00001.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path)
    return f"femnist:{folder}"
