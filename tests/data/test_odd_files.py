"""Odd input: what is no file, names in other encodings, marks, columns of anything.

Each is read as it is meant, or refused in one line that names it; nothing waits.
"""

import io
import os
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy
from PIL import Image

import femnist_files
import loading
from fedgs.cohorts.cohort_file import read_cohort
from fedgs.config.recipes import settings_in
from fedgs.config.run_config import RunConfig
from fedgs.data.given import read_given
from fedgs.files import read_json
from fedgs.privacy.client_limits import Limits
from fedgs.privacy.ledger import Ledger
from loading import load, refused, write_npz
from refusals import assert_refused

datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.usefixtures("hub_cache"),
    pytest.mark.filterwarnings("ignore::fedgs.data.records.DataWarning"),
]
GREY = np.random.default_rng(0).integers(256, size=(4, 28, 28), dtype=np.uint8)
OTHER = os.fsdecode(b"caf\xe9")  # a name in Latin-1


def write_folder(root: Path, client: str = "ann", label: str = "0") -> Path:
    """Writes a folder of two clients; returns where more of `client` can lie."""
    for name, pixels in ((client, GREY[0]), ("bob", GREY[1])):
        folder = root / name / label
        folder.mkdir(parents=True)
        Image.fromarray(pixels).save(folder / "a.png")
    return root / client / label


# ------------------------------------------------------------------ no files


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


NO_FILES = {
    "pipe": os.mkfifo,
    "socket": bound_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("/absent"),
    "link to itself": lambda path: path.symlink_to(path),
    "folder": Path.mkdir,
}


CALLED = {
    "link to nothing": "it is a link that leads to no file; remove it",
    "link to itself": "it is a link that leads to no file; remove it",
    "folder": "it is a folder, and pictures lie directly in CLIENT/LABEL; give",
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_among_pictures_is_called_what_it_is(
    tmp_path, kind, monkeypatch
):
    monkeypatch.chdir(write_folder(tmp_path))  # a socket's path must be short
    NO_FILES[kind](Path("b.png"))
    words = CALLED.get(kind, "it is no file, but a pipe, a socket or a device; remove")
    refused(rf"ann/0/b\.png: {words}", f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("b.TIF", "a .TIF file is not read in folders; convert it to PNG"),
        ("b.txt", r"it is no picture \(.png, .jpg, .jpeg, .dcm\); remove it, or give"),
    ],
)
def test_other_files_among_pictures_are_refused_with_their_remedy(
    tmp_path, name, words
):
    (write_folder(tmp_path) / name).write_bytes(b"II*\0")
    refused(f"ann/0/{name}: {words}", f"folder:{tmp_path}")


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to nothing"])
def test_the_same_among_those_of_a_hugging_face_folder(tmp_path, kind, monkeypatch):
    write_folder(tmp_path / "train")
    monkeypatch.chdir(tmp_path / "train")
    NO_FILES[kind](Path("b.png"))
    refused("cannot be read", f"hf:{tmp_path}", num_clients=2)


READERS = {
    "config": settings_in,
    "limits": Limits.read,
    "cohort": read_cohort,
    "JSON": read_json,
    "ledger": Ledger.read,
    "npz": lambda path: load(f"npz:{path}"),
    "femnist": lambda path: load(f"femnist:{path}"),
}


@pytest.mark.parametrize("reader", READERS)
def test_nobody_waits_for_a_pipe(tmp_path, reader):
    os.mkfifo(tmp_path / "pipe")
    assert_refused("pipe", READERS[reader], tmp_path / "pipe")


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    write_folder(tmp_path)

    def forbidden(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", forbidden)
    refused(r"cannot be read \(Permission denied\)", f"folder:{tmp_path}")


# ------------------------------------------------------------------ text


@pytest.mark.parametrize(("client", "label"), [(OTHER, "0"), ("ann", OTHER)])
def test_folder_names_of_other_encodings_are_refused(tmp_path, client, label):
    write_folder(tmp_path, client, label)
    settings = {"classes": label} if label == OTHER else {}
    refused(
        r"'caf\\udce9'.*: it is no UTF-8; rename it", f"folder:{tmp_path}", **settings
    )


def test_so_are_other_names_of_clients_and_settings(tmp_path):
    arrays = {"images": GREY, "clients": ["ann", "ann", "bob", OTHER]}
    refused("client = .*is no UTF-8", write_npz(tmp_path / "a.npz", **arrays))
    refused("data = .*is no UTF-8", f"folder:{tmp_path / OTHER}")
    # A picture's own name is read by nobody.
    path = write_folder(tmp_path / "pictures") / "a.png"
    path.rename(path.with_name(f"{OTHER}.png"))
    assert load(f"folder:{tmp_path / 'pictures'}").num_clients == 2


def test_a_byte_order_mark_is_read(tmp_path):
    def marked(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        return tmp_path / name

    assert settings_in(marked("a.toml", "num_rounds = 5\r\n")) == {"num_rounds": 5}
    assert Limits.read(marked("b.toml", "max_fakes = 3")) == Limits(max_fakes=3)
    assert read_cohort(marked("c.txt", "ann\r\nbob")).names == ("ann", "bob")
    assert read_json(marked("d.json", "{}")) == {}
    data = femnist_files.write_leaf(tmp_path / "leaf")
    plain = load(data)
    for path in (tmp_path / "leaf").iterdir():
        marked(f"leaf/{path.name}", path.read_text())
    assert load(data).images.tobytes() == plain.images.tobytes()


# ------------------------------------------------------------------ columns


def hugging_face(**columns: object) -> object:
    """Returns four pictures beside some columns, as (values, type)."""
    columns = {"image": ([*map(Image.fromarray, GREY)], datasets.Image()), **columns}
    values = {name: column[0] for name, column in columns.items()}
    kinds = {name: column[1] for name, column in columns.items()}
    return datasets.Dataset.from_dict(values, features=datasets.Features(kinds))


NUMBERS, TEXTS = datasets.Value("int64"), datasets.Value("string")
NAMED = datasets.ClassLabel(names=["0", "1"])
LISTS = datasets.List(NUMBERS)
LABELS = {
    "class without a value": ([0, None, 1, 0], NAMED, "has the label None; give"),
    "number without a value": ([0, None, 1, 0], NUMBERS, "has the label None; give"),
    "negative": ([0, -1, 1, 0], NUMBERS, "has the label -1; give"),
    "text": (["a"] * 4, TEXTS, "cannot be the label"),
    "lists": ([[1], [2, 3], [1], []], LISTS, "cannot be the label"),
    "floats": ([0.0] * 4, datasets.Value("float32"), "cannot be the label"),
}
OWNERS = {
    "lists": ([[1], [2, 3], [1], []], LISTS),
    "pictures": ([*map(Image.fromarray, GREY)], datasets.Image()),
    "floats": ([0.5] * 4, datasets.Value("float64")),
    "without a value": (["a", "b", None, "a"], TEXTS),
    "blank": (["a", "b", " ", "a"], TEXTS),
    "empty": (["a", "b", "", "a"], TEXTS),
    "numbers without a value": ([1, 2, None, 1], NUMBERS),
    "dictionaries": ([{"a": 1}] * 4, {"a": NUMBERS}),
}


@pytest.mark.parametrize("name", LABELS)
def test_columns_that_are_no_labels_are_refused(tmp_path, name):
    values, kind, words = LABELS[name]
    rows = hugging_face(label=(values, kind))
    rows.to_parquet(tmp_path / "train.parquet")
    refused(words, f"hf:{tmp_path}?label=label", num_clients=2)
    if name != "negative":  # whoever fits the images refuses that
        config = RunConfig(data="given")
        assert_refused("data = 'given'", read_given, config, rows, "label")


@pytest.mark.parametrize("name", OWNERS)
def test_columns_that_name_no_clients_are_refused(tmp_path, name):
    columns = {"owner": OWNERS[name]}
    rows = hugging_face(**columns)
    rows.save_to_disk(tmp_path / "saved")
    query = "image=image&client=owner"
    refused("owner cannot name the clients", f"hf:{tmp_path / 'saved'}?{query}")
    if name != "pictures":  # there only one column may hold some
        given = RunConfig(data="given"), rows, None, "owner"
        assert_refused("data = 'given'", read_given, *given)


def test_splits_that_were_saved_to_disk_are_chosen_by_name(tmp_path):
    columns = {"owner": (["a", "a", "b", "b"], TEXTS), "label": ([0, 1, 0, 1], NAMED)}
    rows = hugging_face(**columns)
    splits = {"train": rows, "rest": rows.select(range(3))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    rows.save_to_disk(tmp_path / "alone")
    for name, query, count in (
        ("saved", "", 4),
        ("saved", "&split=rest", 3),
        ("saved/rest", "", 3),
        ("alone", "", 4),
    ):
        data = load(f"hf:{tmp_path / name}?client=owner{query}")
        assert (len(data.images), data.client_names) == (count, ("a", "b"))
    words = "has no split 'no', it has train, rest; give --data hf:NAME.split=SPLIT"
    refused(words, f"hf:{tmp_path / 'saved'}?client=owner&split=no")
    refused("data = 'hf:.*split=no", f"hf:{tmp_path / 'alone'}?split=no")


# ------------------------------------------------------------------ sizes and types


def png_of(side: int) -> bytes:
    Image.new("1", (side, side)).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.mark.parametrize("side", [9_500, 14_000])  # what Pillow warns of, and refuses
def test_a_picture_that_unpacks_to_very_many_pixels_is_refused(tmp_path, side):
    (write_folder(tmp_path) / "b.png").write_bytes(png_of(side))
    refused(r"b\.png: it cannot be read .*bomb", f"folder:{tmp_path}")


def member(shape: tuple[int, ...], kind: str = "|u1", text: str = "") -> bytes:
    """Returns an array's file without its numbers."""
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file := io.BytesIO(), header)
    content = file.getvalue()
    return content.replace(b"}", text.encode()) if text else content


@pytest.mark.parametrize(
    "content",
    [
        member((10**7, 1000, 1000)),
        member((2**32, 2**32)),
        member((4, 28, 28), "|O"),
        member((4, 28, 28), text=" "),  # the tokenizer's error
        member((4, 28, 28), text="("),
        b"\x93NUMPY\x09\x00",
    ],
    ids=["terabytes", "overflow", "objects", "open brace", "parenthesis", "version"],
)
def test_an_array_that_is_not_what_its_header_says_is_refused(tmp_path, content):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", content)
    refused("cannot be read", f"npz:{tmp_path / 'a.npz'}", num_clients=2)


def test_an_archive_that_unpacks_to_more_than_memory_is_refused(tmp_path, monkeypatch):
    data = write_npz(tmp_path / "a.npz", images=GREY)

    class Full:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", Full)
    refused("^data = 'npz:", data, num_clients=2)


def test_a_pickle_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "loaded"),)

    images = np.array([Bomb()], dtype=object)
    refused("cannot be read", write_npz(tmp_path / "a.npz", images=images))
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize(
    "images",
    [
        GREY.astype(complex),
        GREY.astype("M8[s]"),
        GREY.astype("U3"),
        GREY.astype("S3"),
        GREY.view([("a", "u1")]),
        GREY > 9,
        GREY[:0],
        GREY[:, :0, :0],
        np.full(GREY.shape, np.nan),
        np.full(GREY.shape, np.inf),
        np.float64(3),
    ],
)
def test_images_of_other_types_and_shapes_are_refused(tmp_path, images):
    data = write_npz(tmp_path / "a.npz", images=images)
    refused("image", data, num_clients=2)


@pytest.mark.parametrize(
    "labels",
    [
        np.zeros(4),
        np.zeros((4, 1), int),
        np.zeros((2, 2), int),
        np.array([0, 1, -1, 0]),
        np.array(["a"] * 4),
        np.array([True] * 4),
        np.zeros(0, int),
    ],
)
def test_labels_of_other_types_and_shapes_are_refused(tmp_path, labels):
    data = write_npz(tmp_path / "a.npz", images=GREY, labels=labels)
    refused("label", data, num_clients=2)


def test_an_idx_file_without_images_is_refused(tmp_path):
    loading.write_mnist(tmp_path, GREY[:0], np.zeros(0, int))
    refused("idx3-ubyte: ", "mnist", data_dir=str(tmp_path), num_clients=2)
