"""How long Federated EMNIST takes to open, and in how much memory.

    python -m experiments.bench.data [--users 3400] [--formats hdf5 --formats leaf]

Makes files in the published layouts with random ink, as many users and images as the
real training file has, opens each in a process of its own, prints a table and deletes
the files. The full HDF5 file takes 2.1 GB of disk; LEAF's text takes more.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
from click import Choice
from numpy.typing import NDArray
from typer import Option

from experiments.bench.measuring import memory_bytes, printed_by
from experiments.flags import run_command
from experiments.tables import Table

USERS, IMAGES = 3400, 671_585  # of TFF's fed_emnist_train.h5
USERS_OF_A_FILE = 100  # LEAF's
FORMATS = ("hdf5", "gzip", "leaf")


def main(
    users: int = USERS,
    formats: Annotated[list[str] | None, Option(click_type=Choice(FORMATS))] = None,
) -> None:
    """Make the files and print the table."""
    rows: list[list[str]] = []
    for name in formats or ["hdf5"]:
        with tempfile.TemporaryDirectory() as folder:
            data, path = write(name, Path(folder), user_sizes(users))
            files = path.rglob("*") if path.is_dir() else [path]
            size = sum(file.stat().st_size for file in files)
            code = f"from experiments.bench.data import open_it; open_it({data!r})"
            num_users, images, *measured = printed_by(code)
            rows.append([name, num_users, images, f"{size / 1e6:.0f}", *measured])
    head = ["format", "users", "images", "on disk, MB", "seconds", "CPU seconds"]
    Table("opening Federated EMNIST", [*head, "peak, MB"], rows).show()


def open_it(data: str) -> None:
    """Prints users, images, seconds and peak MB; for a process of its own."""
    from fedgs.config.run_config import RunConfig
    from fedgs.data.load import load_data

    started, worked = time.perf_counter(), time.process_time()
    found = load_data(RunConfig(data=data, seed=0))
    found.client(0)
    seconds, work = time.perf_counter() - started, time.process_time() - worked
    counts = f"{found.num_clients} {len(found.images)}"
    print(counts, f"{seconds:.1f} {work:.1f} {memory_bytes('VmHWM') / 1e6:.0f}")


def user_sizes(users: int) -> NDArray[np.int64]:
    """Returns images per user, as many per user on average as the real file has."""
    total = round(IMAGES * users / USERS)
    rng = np.random.default_rng(0)
    return 1 + rng.multinomial(total - users, rng.dirichlet(np.full(users, 10.0)))


def paper(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Returns white images with grey noise in a fifth of their pixels."""
    images = np.full((count, 28, 28), 255, np.uint8)
    images[:, 8:20, 7:20] = rng.integers(256, size=(count, 12, 13), dtype=np.uint8)
    return images


def write(name: str, folder: Path, sizes: NDArray[np.int64]) -> tuple[str, Path]:
    """Writes the files of one format; returns the setting `data` and their path."""
    rng = np.random.default_rng(0)
    if name == "leaf":
        for start in range(0, len(sizes), USERS_OF_A_FILE):
            part = sizes[start : start + USERS_OF_A_FILE]
            text = json.dumps(_leaf(rng, start, part))
            (folder / f"all_data_{start // USERS_OF_A_FILE}.json").write_text(text)
        return f"femnist:{folder}", folder
    import h5py

    path = folder / "fed_emnist_train.h5"
    compression = "gzip" if name == "gzip" else None
    with h5py.File(path, "w") as file:
        for user, size in enumerate(sizes):
            group = file.create_group(f"examples/f{user:04d}_00")
            pixels = paper(rng, size).astype(np.float32) / np.float32(255)
            group.create_dataset("pixels", data=pixels, compression=compression)
            group["label"] = rng.integers(62, size=size, dtype=np.int32)
    return f"femnist:{path}", path


def _leaf(
    rng: np.random.Generator, first: int, sizes: NDArray[np.int64]
) -> dict[str, object]:
    users = [f"f{first + number:04d}_00" for number in range(len(sizes))]
    data = {
        user: {
            "x": (paper(rng, size).reshape(size, -1) / 255).tolist(),
            "y": rng.integers(62, size=size).tolist(),
        }
        for user, size in zip(users, sizes, strict=True)
    }
    return {"users": users, "num_samples": sizes.tolist(), "user_data": data}


if __name__ == "__main__":
    sys.exit(run_command(main))
