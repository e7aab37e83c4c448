"""Pictures as hospitals have them: any size, 16 bits, DICOM; what is done to each."""

import io
import json
import re
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from command_line import plain_flags, printed
from command_line import refused as refused_by_command
from fedgs.config.run_config import RunConfig
from fedgs.data.given import read_given
from fedgs.data.sources import read_records
from fedgs.errors import UserError
from loading import configured, load, refused, write_npz
from refusals import assert_refused

pydicom = pytest.importorskip("pydicom")
from pydicom.dataset import Dataset  # noqa: E402 - needs pydicom
from pydicom.uid import ImplicitVRLittleEndian  # noqa: E402

import dicom_files  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::fedgs.data.records.DataWarning")
RNG = np.random.default_rng(0)
WIDE = RNG.integers(256, size=(28, 40), dtype=np.uint8)
DEEP = RNG.integers(4096, size=(28, 28), dtype=np.uint16)
BLANK = np.zeros((28, 28), np.uint16)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def folder_of(root, pixels):
    save(root / "pictures/ann/1.png", pixels)
    return f"folder:{root / 'pictures'}"


def rows_of(root, pixels):
    datasets = pytest.importorskip("datasets")
    save(root / "1.png", pixels)
    content = (root / "1.png").read_bytes()
    features = datasets.Features({"image": datasets.Image()})
    values = {"image": [{"bytes": content, "path": None}]}
    (root / "rows").mkdir()
    table = datasets.Dataset.from_dict(values, features=features)
    table.to_parquet(root / "rows/train.parquet")
    return f"hf:{root / 'rows'}"


def arrays_of(root, pixels):
    return write_npz(root / "own.npz", images=pixels[None], clients=["ann"])


SOURCES = {"folder": folder_of, "hf": rows_of, "npz": arrays_of}
ONE = {"num_clients": 1, "noise_multiplier": 0}


@pytest.fixture(params=SOURCES)
def write(request, hub_cache):
    return SOURCES[request.param]


def image_of(source, **settings):
    """The one image of a source, (S, S)."""
    return load(source, **ONE, **settings).images[0, 0]


# ------------------------------------------------------------------ sides


def test_a_picture_becomes_square_in_the_same_way_from_every_source(write, tmp_path):
    source = write(tmp_path, WIDE)
    cropped = image_of(source, fit="crop")
    assert (cropped == WIDE[:, 6:34]).all()
    padded = image_of(source, image_size=64)  # the default
    assert not padded[:9].any()
    assert not padded[-9:].any()
    assert padded[12:52].all(axis=1).sum() > 30
    light = image_of(source, image_size=64, background="light")
    assert (light[:9] == 0).all()  # the background, whatever its colour is
    stretched = image_of(source, fit="stretch", image_size=32)
    assert abs(stretched.mean() - WIDE.mean()) < 2
    assert stretched[0].any()
    assert stretched[-1].any()


def test_a_thin_picture_becomes_no_square_of_gigabytes(write, tmp_path):
    data = write(tmp_path, np.zeros((1, 60_000), np.uint8))
    refused(r"60000 x 1 pixels; .*8192", data=data, image_size=28, **ONE)


def test_a_square_picture_is_the_same_by_every_fit(write, tmp_path):
    source = write(tmp_path, WIDE[:, :28])
    for fit in ("pad", "crop", "stretch"):
        assert (image_of(source, fit=fit) == WIDE[:, :28]).all()


def test_pictures_of_a_program_are_fitted_one_by_one(tmp_path):
    torch_data = [(Image.fromarray(WIDE), 0), (Image.fromarray(WIDE.T), 1)]

    class Own:
        def __getitem__(self, index):
            return torch_data[index]

        def __len__(self):
            return 2

    import torch.utils.data

    made = type("Made", (Own, torch.utils.data.Dataset), {})()
    config = RunConfig(data="given", fit="crop")
    records = read_given(config, made)
    assert (records.images[0, 0] == WIDE[:, 6:34]).all()
    assert (records.images[1, 0] == WIDE[:, 6:34].T).all()
    assert records.found.sizes == {(40, 28): 1, (28, 40): 1}


# ------------------------------------------------------------------ values


def test_sixteen_bits_need_a_window_from_every_source(write, tmp_path):
    source = write(tmp_path, DEEP)
    refused("--window LOW,HIGH", source, **ONE)
    found = image_of(source, window="0,4095")
    assert (found == np.rint(DEEP * (255 / 4095))).all()
    narrow = image_of(source, window="1000, 2000")
    assert (narrow[DEEP <= 1000] == 0).all()
    assert (narrow[DEEP >= 2000] == 255).all()
    own = image_of(source, normalize=True)
    low, high = np.percentile(DEEP, (1, 99))
    assert (own == np.rint(255 * ((DEEP - low) / (high - low)).clip(0, 1))).all()


def test_a_picture_of_one_value_is_black_by_its_own_values(write, tmp_path):
    assert not image_of(write(tmp_path, DEEP * 0 + 9), normalize=True).any()


def test_thin_strokes_on_a_plain_ground_are_not_black_by_their_own_values(
    write, tmp_path
):
    strokes = BLANK + 100
    strokes[3, 3:6] = 300  # less than a hundredth of the picture
    strokes[3, 6] = 200
    found = image_of(write(tmp_path, strokes), normalize=True)
    assert found[3, 2:8].tolist() == [0, 255, 255, 255, 128, 0]


@pytest.mark.parametrize(
    "window",
    ["5", "9,1", "1,1", "0,inf", "a,b", "0,1,2", "0,nan", "0,1e-320", "-1e308,1e308"],
)
def test_no_window(window):
    assert_refused("window = .*give --window", RunConfig, window=window)


@pytest.mark.parametrize("settings", [{"window": "0,1e-9"}, {"normalize": True}])
def test_large_values_do_not_overflow(tmp_path, settings):
    floats = np.zeros((28, 28))
    floats[:, 0] = 1e300
    source = arrays_of(tmp_path, floats)
    assert (image_of(source, **settings) == 255 * (floats > 0)).all()


@pytest.mark.parametrize("settings", [{}, {"window": "0,9"}, {"normalize": True}])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_called_so(tmp_path, settings, value):
    source = arrays_of(tmp_path, np.full((28, 28), value))
    said = refused("image 0 has values that are not finite", source, **ONE, **settings)
    assert "--normalize" not in said


# Files that Pillow reads, but cannot write.
DEEP_RGB = RNG.integers(65536, size=(28, 28, 3), dtype=np.uint16)


def deep_png(pixels, kind):
    """A PNG of 16 bits per channel; of kind 2, RGB, 4, grey and alpha, or 6, RGBA."""

    def chunk(name, content):
        length = struct.pack(">I", len(content))
        check = struct.pack(">I", zlib.crc32(name + content))
        return length + name + content + check

    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    rows = [b"\0" + row.astype(">u2").tobytes() for row in pixels]
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(rows)))
    return b"\x89PNG\r\n\x1a\n" + content + chunk(b"IEND", b"")


def deep_tiff(pixels):
    """An uncompressed RGB TIFF of 16 bits per channel."""
    height, width, _ = pixels.shape
    start = 8 + 2 + 8 * 12 + 4  # of the bits of channels, after 8 entries
    entries = [(256, width), (257, height), (259, 1), (262, 2), (277, 3)]
    entries += [(273, start + 6), (279, pixels.nbytes)]
    packed = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries]
    packed.append(struct.pack("<HHII", 258, 3, 3, start))
    packed.sort(key=lambda entry: struct.unpack("<H", entry[:2]))
    directory = struct.pack("<H", 8) + b"".join(packed) + bytes(4)
    bits = struct.pack("<HHH", 16, 16, 16)
    return b"II*\0" + struct.pack("<I", 8) + directory + bits + pixels.tobytes()


OPAQUE = np.full((28, 28, 1), 65535, np.uint16)
DEEP_COLOURS = {
    "RGB": deep_png(DEEP_RGB, 2),
    "grey and alpha": deep_png(np.dstack([DEEP_RGB[..., :1], OPAQUE]), 4),
    "RGBA": deep_png(np.dstack([DEEP_RGB, OPAQUE]), 6),
    "TIFF": deep_tiff(DEEP_RGB),
    "PPM": b"P6 28 28 65535\n" + DEEP_RGB.astype(">u2").tobytes(),
    "PPM of 10 bits": b"P6 28 28 1023\n" + (DEEP_RGB >> 6).astype(">u2").tobytes(),
    "PPM of text": b"P3 1 1 1023\n1000 2 3\n",
}


@pytest.mark.parametrize("settings", [{}, {"window": "0,4095"}, {"normalize": True}])
@pytest.mark.parametrize("kind", DEEP_COLOURS)
def test_colour_of_sixteen_bits_is_not_cut_to_eight(tmp_path, kind, settings):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann/1.png").write_bytes(DEEP_COLOURS[kind])
    Image.open(tmp_path / "ann/1.png").load()  # it is a whole file
    source = f"folder:{tmp_path}"
    refused(r"ann/1\.png: it has 16 bits per channel", source, **ONE, **settings)


def with_white_as_zero(pixels):
    """A TIFF whose tag says so; Pillow would write the tag, and not invert."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "TIFF", tiffinfo={262: 1})
    content = file.getvalue()
    tag = struct.pack("<HHIH", 262, 3, 1, 1)
    assert content.count(tag) == 1
    return content.replace(tag, struct.pack("<HHIH", 262, 3, 1, 0))


@pytest.mark.parametrize("bits", [8, 16])
def test_a_tiff_whose_zero_is_white_is_inverted(tmp_path, bits):
    pixels = DEEP if bits == 16 else WIDE[:, :28]
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann/1.png").write_bytes(with_white_as_zero(pixels))
    source = f"folder:{tmp_path}"
    settings = {"window": "0,4095"} if bits == 16 else {}
    expected = displayed(pixels.astype(float), 0, 4095) if bits == 16 else pixels
    assert (image_of(source, **settings) == 255 - expected).all()
    records = read_records(configured(source, **settings))
    assert records.found.inverted == (bits == 16)  # else Pillow has done it


@pytest.mark.parametrize("largest", [65535, 4095])
def test_a_grey_portable_map_has_sixteen_bits(tmp_path, largest):
    (tmp_path / "ann").mkdir()
    pixels = DEEP.astype(">u2")
    content = b"P5 28 28 %d\n" % largest + pixels.tobytes()
    (tmp_path / "ann/1.png").write_bytes(content)
    source = f"folder:{tmp_path}"
    refused("it has 16 bits, and nothing says", source, **ONE)
    found = image_of(source, window="0,65535")
    assert abs(found - displayed(DEEP.astype(float), 0, largest).astype(int)).max() < 2
    records = read_records(configured(source, normalize=True))
    assert records.found.kinds == {"16 bits": 1}


def test_transparent_pixels_of_sixteen_bits_are_refused(tmp_path):
    path = tmp_path / "ann/1.png"
    path.parent.mkdir()
    source = f"folder:{tmp_path}"
    Image.fromarray(DEEP).save(path, transparency=65535)  # the value of no pixel
    assert image_of(source, window="0,4095").any()
    Image.fromarray(DEEP).save(path, transparency=int(DEEP[0, 0]))
    refused("transparent pixels", source, window="0,4095", **ONE)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "PNG"])
def test_a_file_of_several_pictures_is_refused(tmp_path, kind):
    path = tmp_path / "ann/1.png"
    path.parent.mkdir()
    others = [Image.fromarray(WIDE[:, :28] // (2 + page)) for page in range(2)]
    first = Image.fromarray(WIDE[:, :28])
    first.save(path, kind, save_all=True, append_images=others)
    refused("ann/1.png: it contains 3 pictures", f"folder:{tmp_path}", **ONE)


def test_the_first_view_of_a_telephone_is_its_photograph(tmp_path):
    path = tmp_path / "ann/1.jpg"
    path.parent.mkdir()
    first = Image.fromarray(np.full((28, 28), 90, np.uint8)).convert("RGB")
    second = Image.fromarray(WIDE[:, :28]).convert("RGB")
    first.save(path, "MPO", save_all=True, append_images=[second])
    assert set(image_of(f"folder:{tmp_path}").flat) == {90}


def test_a_program_that_draws_is_no_picture_and_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "ann").mkdir()
    run = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: run.append(1))
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\nshowpage\n"
    (tmp_path / "ann/1.png").write_bytes(program)
    refused("ann/1.png: it cannot be read as a picture", f"folder:{tmp_path}", **ONE)
    assert run == []


def test_colour_of_sixteen_bits_from_a_program_is_not_cut_to_eight():
    import torch.utils.data

    opened = Image.open(io.BytesIO(DEEP_COLOURS["RGB"]))
    items = type("Made", (torch.utils.data.Dataset,), {"__len__": lambda self: 1})
    items.__getitem__ = lambda self, index: (opened, 0)
    assert_refused("image 0: it has 16 bits", read_given, RunConfig(), items())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"window": "0,9", "normalize": True}, "window"),
        ({"window": "0,9", "data": "digits"}, "window"),
        ({"normalize": True, "data": "digits"}, "normalize"),
        ({"data": "chest-xray", "download": True, "data_dir": "."}, "download"),
    ],
)
def test_settings_of_pictures_that_contradict_each_other(settings, named):
    assert_refused(f"{named} = ", configured, **{"data": "npz:a.npz", **settings})


# ------------------------------------------------------------------ DICOM


def dicom_image(root, pixels, settings=None, **fields):
    dicom_files.write(root / "ann/1.dcm", pixels, **fields)
    return image_of(f"folder:{root}", **(settings or {}))


def displayed(values, low, high):
    return np.rint(255 * ((values - low) / (high - low)).clip(0, 1)).astype(np.uint8)


def test_a_dicom_without_a_window_spans_its_bits(tmp_path):
    assert (dicom_image(tmp_path, DEEP) == displayed(DEEP.astype(float), 0, 4095)).all()


def test_a_dicom_is_shown_by_its_own_rescale_window_and_inversion(tmp_path):
    fields = {"WindowCenter": 40, "WindowWidth": 400}
    fields |= {"RescaleSlope": 2, "RescaleIntercept": -1024}
    units = DEEP * 2.0 - 1024
    # PS3.3 C.11.2.1.2.1: from center - 0.5 - (width - 1) / 2, width - 1 wide.
    expected = displayed(units, 40 - 0.5 - 399 / 2, 40 - 0.5 + 399 / 2)
    found = dicom_image(tmp_path, DEEP, **fields)
    assert abs(found.astype(int) - expected).max() <= 1
    fields["PhotometricInterpretation"] = "MONOCHROME1"
    assert (dicom_image(tmp_path, DEEP, **fields) == 255 - found).all()
    # The window of the settings is in the same units, and counts.
    own = dicom_image(tmp_path, DEEP, {"window": "-1000,400"}, **fields)
    assert (own == 255 - displayed(units, -1000, 400)).all()


def test_a_dicom_of_signed_values_and_one_with_a_table(tmp_path):
    signed = DEEP.astype(np.int16) - 2048
    found = dicom_image(tmp_path, signed)
    assert (found == displayed(signed.astype(float), -2048, 2047)).all()
    table = dicom_files.table(np.arange(4096)[::-1] // 4, bits=10)
    found = dicom_image(tmp_path, DEEP, VOILUTSequence=[table])
    assert (found == displayed((4095 - DEEP) // 4, 0, 1023)).all()


FULL = np.arange(4096)


def table_of(values, bits, stored="words", first=0):
    made = dicom_files.table(values, bits)  # of words
    if stored == "numbers":
        made.add_new("LUTData", "US", values.tolist())
    elif stored == "bytes":
        made.LUTData = values.astype("u1").tobytes()
    made["LUTDescriptor"].VR = "SS" if first < 0 else "US"
    made.LUTDescriptor = [len(values), first, bits]
    return made


@pytest.mark.parametrize("stored", ["words", "bytes", "numbers"])
def test_a_table_of_entries_of_8_bits_is_read_however_they_lie(tmp_path, stored):
    table = table_of(FULL // 16, bits=8, stored=stored)
    found = dicom_image(tmp_path, DEEP, VOILUTSequence=[table])
    assert (found == DEEP // 16).all()


@pytest.mark.parametrize("bits", [8, 10, 16])
@pytest.mark.parametrize("left", [3000, 2048, 4095])
@pytest.mark.parametrize("name", ["VOILUTSequence", "ModalityLUTSequence"])
def test_a_table_that_was_cut_short_is_refused(tmp_path, bits, left, name):
    """Half of the words of a table have as many bytes as the table has entries."""
    if (bits, left) == (8, 2048):  # they may be a whole table of bytes
        return
    table = table_of(FULL >> (12 - min(bits, 12)), bits)
    table.LUTData = table.LUTData[: 2 * left]
    words = f"says 4096 entries of {bits} bits, and has {left}; get it again"
    with pytest.raises(UserError, match=words):
        dicom_image(tmp_path, DEEP, **{name: [table]})


def test_a_table_of_bytes_may_be_followed_by_one_more(tmp_path):
    table = table_of(np.arange(255), bits=8)
    table.LUTData = np.arange(255).astype("u1").tobytes() + b"\0"
    found = dicom_image(tmp_path, DEEP // 16, VOILUTSequence=[table])
    assert (found == (DEEP // 16).clip(0, 254)).all()


def test_a_table_ends_at_its_first_and_last_entry(tmp_path):
    table = table_of(np.arange(256), bits=8, first=1000)
    found = dicom_image(tmp_path, DEEP, VOILUTSequence=[table])
    assert (found == (DEEP.astype(int) - 1000).clip(0, 255)).all()


@pytest.mark.parametrize("is_implicit", [False, True])
def test_a_table_may_begin_below_0_also_where_the_header_has_no_types(
    tmp_path, is_implicit
):
    table = table_of(FULL * 16, bits=16, first=-1024)
    made = dicom_files.dataset(
        DEEP, RescaleSlope=1, RescaleIntercept=-1024, VOILUTSequence=[table]
    )
    if is_implicit:
        made.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    path = tmp_path / "ann/1.dcm"
    path.parent.mkdir()
    made.save_as(path, enforce_file_format=True)
    found = image_of(f"folder:{tmp_path}")
    assert (found == displayed(DEEP * 16.0, 0, 65535)).all()


def test_a_table_of_the_device_counts_before_the_window(tmp_path):
    table = table_of(FULL[::-1], bits=12)
    found = dicom_image(tmp_path, DEEP, ModalityLUTSequence=[table])
    assert (found == displayed(4095.0 - DEEP, 0, 4095)).all()
    fields = {"WindowCenter": 1000, "WindowWidth": 400}
    windowed = dicom_image(tmp_path, DEEP, ModalityLUTSequence=[table], **fields)
    direct = dicom_image(tmp_path, 4095 - DEEP, **fields)
    assert (windowed == direct).all()


def test_an_enhanced_dicom_of_one_frame_has_its_rescale_and_window_in_groups(tmp_path):
    rescale = {"RescaleSlope": 2, "RescaleIntercept": -1024}
    window = {"WindowCenter": 40, "WindowWidth": 400}
    expected = dicom_image(tmp_path, DEEP, **rescale, **window)
    group = Dataset()
    group.PixelValueTransformationSequence = [as_dataset(rescale)]
    per_frame = Dataset()
    per_frame.FrameVOILUTSequence = [as_dataset(window)]
    found = dicom_image(
        tmp_path,
        DEEP,
        NumberOfFrames=1,
        SharedFunctionalGroupsSequence=[group],
        PerFrameFunctionalGroupsSequence=[per_frame],
    )
    assert (found == expected).all()


def as_dataset(fields):
    made = Dataset()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("slope", [1, -1])
@pytest.mark.parametrize("kind", ["MONOCHROME2", "MONOCHROME1"])
def test_padding_says_nothing_of_black_and_white(tmp_path, kind, slope):
    signed = DEEP.astype(np.int16) // 2 - 500
    fields = {"PhotometricInterpretation": kind}
    fields |= {"RescaleSlope": slope, "RescaleIntercept": 0}
    is_low_black = (kind == "MONOCHROME2") == (slope == 1)
    filled = signed.copy()
    # What is padding is as black as the blackest beside it.
    filled[0] = signed[1:].min() if is_low_black else signed[1:].max()
    expected = dicom_image(tmp_path, filled, {"normalize": True}, **fields)
    signed[0] = -2000
    padded = dicom_image(
        tmp_path, signed, {"normalize": True}, PixelPaddingValue=-2000, **fields
    )
    assert padded[0].max() == 0
    assert (padded == expected).all()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"Rows": 14}, r"pixels have the shape \(2, 14, 28\).* one\s+picture each"),
        ({"RescaleSlope": 2}, "lacks RescaleIntercept"),
        ({"RescaleIntercept": 2}, "lacks RescaleSlope"),
        ({"VOILUTSequence": [table_of(FULL[:9], 4)]}, "9 entries of 4 bits"),
    ],
)
def test_a_dicom_that_contradicts_itself_is_refused_by_name(tmp_path, fields, named):
    with pytest.raises(UserError, match=f"1.dcm.*{named}"):
        dicom_image(tmp_path, DEEP, **fields)


def as_typed(path, name, value):
    """Has a file say of a number what its type does not allow."""
    content = path.read_bytes()
    marked = b"7777777 "
    assert content.count(marked) == 1
    path.write_bytes(content.replace(marked, value.encode().ljust(8)))


@pytest.mark.parametrize("value", ["nan", "inf", "1e400", "abc", ""])
@pytest.mark.parametrize(
    "name", ["WindowWidth", "WindowCenter", "RescaleSlope", "RescaleIntercept"]
)
def test_a_number_of_a_dicom_that_is_none_is_named(tmp_path, name, value):
    fields = {"WindowWidth": 400, "WindowCenter": 40}
    fields |= {"RescaleSlope": 1, "RescaleIntercept": 0, name: "7777777"}
    path = dicom_files.write(tmp_path / "ann/1.dcm", DEEP, **fields)
    as_typed(path, name, value)
    said = refused(rf"1\.dcm: .*{name}", f"folder:{tmp_path}", **ONE)
    assert "convert" not in said
    assert "cannot be read as DICOM" not in said
    if name.startswith("Window"):
        assert "give --window LOW,HIGH" in said
        assert image_of(f"folder:{tmp_path}", window="0,4095").any()


@pytest.mark.parametrize(
    ("width", "function", "is_one"),
    [
        (0, None, False),
        (-5, "SIGMOID", False),
        (0, "LINEAR_EXACT", False),
        (0.5, None, False),
        (0.5, "LINEAR_EXACT", True),
        (1, None, True),
    ],
)
def test_a_window_without_a_width_is_refused(tmp_path, width, function, is_one):
    fields = {"WindowCenter": 2000, "WindowWidth": width}
    if function is not None:
        fields["VOILUTFunction"] = function
    dicom_files.write(tmp_path / "ann/1.dcm", DEEP, **fields)
    if is_one:  # a step, at its center
        assert (image_of(f"folder:{tmp_path}") == 255 * (DEEP >= 2000)).all()
    else:
        words = f"WindowWidth = {width:g}, .*; give --window LOW,HIGH"
        refused(words, f"folder:{tmp_path}", **ONE)


def test_an_empty_window_is_none(tmp_path):
    found = dicom_image(tmp_path, DEEP, WindowCenter="", WindowWidth="")
    assert (found == displayed(DEEP.astype(float), 0, 4095)).all()


def test_a_grey_dicom_of_three_samples_is_refused(tmp_path):
    colour = RNG.integers(256, size=(28, 28, 3), dtype=np.uint8)
    with pytest.raises(UserError, match=r"1.dcm.*shape \(28, 28, 3\).*\(28, 28\)"):
        dicom_image(tmp_path, colour, PhotometricInterpretation="MONOCHROME2")


def test_a_dicom_in_colour_and_one_without_a_suffix(tmp_path):
    colour = RNG.integers(256, size=(28, 28, 3), dtype=np.uint8)
    dicom_files.write(tmp_path / "ann/1.dcm", colour)
    dicom_files.write(tmp_path / "ann/IM0002", DEEP)
    images = load(f"folder:{tmp_path}", image_channels=3, **ONE).images
    assert (images[0] == colour.transpose(2, 0, 1)).all()
    assert (images[1, 0] == images[1, 2]).all()


@pytest.mark.parametrize("kind", ["MONOCHROME2", "MONOCHROME1"])
def test_a_dicom_with_a_negative_slope_has_black_below_white(tmp_path, kind):
    fields = {"RescaleSlope": -2, "RescaleIntercept": 100}
    fields["PhotometricInterpretation"] = kind
    units = 100 - 2.0 * DEEP
    expected = displayed(units, 100 - 2 * 4095, 100)
    windowed = displayed(units, -4000 - 0.5 - 999 / 2, -4000 - 0.5 + 999 / 2)
    if kind == "MONOCHROME1":
        expected = 255 - expected
        windowed = 255 - windowed
    assert (dicom_image(tmp_path, DEEP, **fields) == expected).all()
    fields |= {"WindowCenter": -4000, "WindowWidth": 1000}
    found = dicom_image(tmp_path, DEEP, **fields).astype(int)
    assert abs(found - windowed).max() <= 1


def bare_content(made):
    """The content of a file, without its preamble and mark."""
    file = io.BytesIO()
    made.save_as(file, enforce_file_format=True)
    return file.getvalue()[132:]


def without_meta(made, syntax):
    """The content of a file that does not even say how it is stored."""
    made.file_meta.TransferSyntaxUID = syntax
    content = bare_content(made)
    (length,) = struct.unpack("<I", content[8:12])
    return content[12 + length :]


@pytest.mark.parametrize("syntax", [None, "implicit", "explicit"])
def test_a_dicom_without_preamble_is_read_by_its_name(tmp_path, syntax):
    made = dicom_files.dataset(DEEP, PatientID="secret")
    content = bare_content(made)
    if syntax == "implicit":
        content = without_meta(made, pydicom.uid.ImplicitVRLittleEndian)
    elif syntax == "explicit":
        content = without_meta(made, pydicom.uid.ExplicitVRLittleEndian)
    assert content[:2] == (b"\x08\0" if syntax else b"\x02\0")
    path = tmp_path / "ann/1.DCM"
    path.parent.mkdir()
    path.write_bytes(content)
    found = image_of(f"folder:{tmp_path}")
    assert (found == displayed(DEEP.astype(float), 0, 4095)).all()


# ------------------------------------------------------------------ bad files


def half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def damaged(kind, syntax):
    """Returns what writes pixels of which the codec is there, cut short."""

    def spoil(path):
        file = io.BytesIO()
        Image.fromarray(WIDE).save(file, kind)
        content = file.getvalue()[: len(file.getvalue()) // 4]
        made = dicom_files.dataset(WIDE, BitsStored=8, HighBit=7)
        made.file_meta.TransferSyntaxUID = syntax
        made.PixelData = pydicom.encaps.encapsulate([content])
        made["PixelData"].VR = "OB"
        made.save_as(path, enforce_file_format=True)

    return spoil


def lacking(*names):
    """Returns what writes a file whose header lacks elements."""
    return lambda path: dicom_files.write(path, DEEP, **dict.fromkeys(names))


def having(**fields):
    return lambda path: dicom_files.write(path, DEEP, **fields)


def bare_and_compressed(path):
    made = dicom_files.dataset(DEEP)
    made.PixelData = pydicom.encaps.encapsulate([bytes(8)])
    made["PixelData"].VR = "OB"
    path.write_bytes(without_meta(made, pydicom.uid.JPEGBaseline8Bit))


def compressed(syntax):
    """Returns what writes a file for which pydicom alone has no codec."""

    def spoil(path):
        made = dicom_files.dataset(DEEP)
        made.file_meta.TransferSyntaxUID = syntax
        pixels = b"\xff\xd8\xff\xc3" + bytes(64)
        made.PixelData = pydicom.encaps.encapsulate([pixels])
        made["PixelData"].VR = "OB"
        made.save_as(path, enforce_file_format=True)

    return spoil


BAD = {
    "truncated": (half, {}, "cannot be read as DICOM"),
    "compressed": (
        compressed(pydicom.uid.JPEGLosslessSV1),
        {},
        "JPEG Lossless.* install its codec .*pylibjpeg",
    ),
    "compressed from 12 bits": (
        compressed(pydicom.uid.JPEGExtended12Bit),
        {},
        "JPEG Extended.* install its codec .*pylibjpeg",
    ),
    "a damaged JPEG": (
        damaged("JPEG", pydicom.uid.JPEGBaseline8Bit),
        {},
        "JPEG Baseline.* codec that is installed; .*damaged .*; get it again",
    ),
    "a damaged JPEG 2000": (
        damaged("JPEG2000", pydicom.uid.JPEG2000),
        {},
        "JPEG 2000.* codec that is installed; .*damaged .*; get it again",
    ),
    "without rows": (lacking("Rows"), {}, "its header lacks Rows, .*; get it again"),
    "without colours": (
        lacking("PhotometricInterpretation", "BitsStored"),
        {},
        "its header lacks PhotometricInterpretation, BitsStored, .*; get it again",
    ),
    "without a width": (having(WindowCenter=9), {}, "no WindowWidth, .* --window"),
    "without a center": (having(WindowWidth=9), {}, "no WindowCenter, .* --window"),
    "of values that begin above bit 0": (
        having(HighBit=15),
        {},
        r"end at bit 15 \(HighBit\) and have 12 bits \(BitsStored\).*; get it again",
    ),
    "of a film": (
        compressed(pydicom.uid.MPEG2MPML),
        {},
        r"MPEG2 .* cannot be unpacked \([^;]*\); unpack the file",
    ),
    "of empty pixels": (having(PixelData=b""), {}, r"no picture \(PixelData\)"),
    "of a function that is none": (
        having(WindowCenter=9, WindowWidth=9, VOILUTFunction="OTHER"),
        {},
        "VOILUTFunction = OTHER, .*; give --window LOW,HIGH",
    ),
    "of one value": (
        having(RescaleSlope=0, RescaleIntercept=1),
        {},
        "RescaleSlope = 0, .*; get it again",
    ),
    "of nearly one value": (
        having(RescaleSlope="1e-30", RescaleIntercept=100),
        {"window": "0,4095"},
        r"RescaleSlope\) with equal ends, .*; get it again",
    ),
    "of an empty rescale": (
        having(RescaleSlope="", RescaleIntercept=1),
        {},
        "its header lacks RescaleSlope",
    ),
    "bare and compressed": (bare_and_compressed, {}, "TransferSyntaxUID"),
    "of no known mark": (
        lambda path: path.write_bytes(b"text" * 99),
        {},
        "no mark of DICOM, and cannot be read as a picture",
    ),
    "empty": (lambda path: path.write_bytes(b""), {}, "is empty"),
    "in colour": (
        lambda path: dicom_files.write(path, np.dstack([WIDE, WIDE, 255 - WIDE])),
        {"image_channels": 1},
        "is in colour; give --image-channels 3",
    ),
    "of 16 bits": (
        lambda path: Image.fromarray(DEEP).save(path, "PNG"),
        {},
        "has 16 bits.* --window",
    ),
    "of frames": (
        lambda path: dicom_files.write(path, DEEP, NumberOfFrames=3),
        {},
        "NumberOfFrames",
    ),
    "of a palette": (
        lambda p: dicom_files.write(p, DEEP, PhotometricInterpretation="PALETTE COLOR"),
        {},
        "PhotometricInterpretation",
    ),
    "of no picture": (
        lambda path: dicom_files.write(path, DEEP, PixelData=None),
        {},
        "PixelData",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_file_is_refused_by_its_name(tmp_path, bad):
    spoil, settings, words = BAD[bad]
    spoil(dicom_files.write(tmp_path / "ann/1.dcm", DEEP))
    said = refused(rf"ann/1\.dcm: .*{words}", f"folder:{tmp_path}", **ONE, **settings)
    assert "\n" not in said


def test_patients_of_files_and_owners_of_folders_must_agree(tmp_path):
    dicom_files.write(tmp_path / "ann/1.dcm", DEEP, PatientID="secret-1")
    dicom_files.write(tmp_path / "ann/2.dcm", DEEP, PatientID="secret-2")
    two_in_one = refused(r"ann/2\.dcm: .*PatientID.*'ann'", f"folder:{tmp_path}")
    dicom_files.write(tmp_path / "ann/2.dcm", DEEP, PatientID="secret-1")
    dicom_files.write(tmp_path / "bob/1.dcm", DEEP, PatientID="secret-1")
    one_in_two = refused(r"bob/1\.dcm: .*PatientID.*'bob'", f"folder:{tmp_path}")
    assert "secret" not in two_in_one + one_in_two
    dicom_files.write(tmp_path / "bob/1.dcm", DEEP, PatientID="")
    assert load(f"folder:{tmp_path}").client_names == ("ann", "bob")


def test_without_pydicom_the_extra_is_named(tmp_path, monkeypatch):
    dicom_files.write(tmp_path / "ann/1.dcm", DEEP)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    refused(
        r"ann/1\.dcm: it needs pydicom; .*fedgs\[dicom\]", f"folder:{tmp_path}", **ONE
    )


# ------------------------------------------------------------------ independence


@pytest.mark.parametrize(
    "settings",
    [{}, {"normalize": True}, {"window": "100,900"}, {"fit": "crop"}],
    ids=lambda settings: " ".join(settings) or "default",
)
def test_what_another_owner_has_moves_no_pixel(tmp_path, settings):
    """Bob has other bits, another range, window and size; ann's image stays."""
    found = set()
    others = {
        "dark": (BLANK, {}),
        "bright": (BLANK + 4095, {"WindowCenter": 9, "WindowWidth": 3}),
        "inverted": (DEEP, {"PhotometricInterpretation": "MONOCHROME1"}),
        "large": (np.tile(DEEP, (2, 3)), {"RescaleSlope": 9, "RescaleIntercept": 1}),
    }
    for name, (pixels, fields) in others.items():
        root = tmp_path / name
        dicom_files.write(root / "ann/1.dcm", DEEP[:20])
        dicom_files.write(root / "bob/1.dcm", pixels, **fields)
        data = load(f"folder:{root}", image_size=16, **settings)
        found.add(data.images[data.client_records[0]].tobytes())
    assert len(found) == 1


# ------------------------------------------------------------------ the command


def test_inspect_says_what_was_done(fedgs, tmp_path):
    save(tmp_path / "in/ann/1.png", WIDE)
    dicom_files.write(tmp_path / "in/bob/1.dcm", DEEP)
    asked = ["data", "inspect", f"folder:{tmp_path / 'in'}"]
    asked += plain_flags(sheet=tmp_path / "sheet.png", image_size=28, fit="crop")
    pictures = json.loads(printed(fedgs(*asked, "--json")))["pictures"]
    assert pictures["sizes"] == {"40 x 28": 1, "28 x 28": 1}
    assert pictures["values"] == {"8 bits": 1, "DICOM, 12 bits": 1}
    assert (pictures["not_square"], pictures["fit"]) == (1, "crop")
    assert (pictures["window"], pictures["normalize"]) == (None, False)
    assert (pictures["in_colour"], pictures["grey"]) == (0, 2)
    ranges = {"0 to 255": 1, "range of bits": 1}
    assert (pictures["black_and_white"], pictures["inverted"]) == (ranges, 0)
    shown = printed(fedgs(*asked, "--normalize"))
    assert re.search("not square .*1 .--fit crop", shown)
    assert "--normalize" in shown
    (tmp_path / "in/bob/1.dcm").write_bytes(b"")
    refused_by_command(fedgs(*asked), ".*1.dcm: it is empty")


def test_inspect_says_how_black_and_white_were_found(fedgs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    window = {"WindowCenter": 40, "WindowWidth": 400}
    inverted = {"PhotometricInterpretation": "MONOCHROME1"}
    table = dicom_files.table(np.arange(4096) // 4, bits=10)
    save(tmp_path / "in/ann/1.png", DEEP.astype(np.uint8))
    dicom_files.write(tmp_path / "in/ann/2.dcm", DEEP, **window)
    dicom_files.write(tmp_path / "in/ann/3.dcm", DEEP, **window, **inverted)
    dicom_files.write(tmp_path / "in/ann/4.dcm", DEEP, **inverted)
    dicom_files.write(tmp_path / "in/ann/5.dcm", DEEP, VOILUTSequence=[table])
    asked = ["data", "inspect", f"folder:{tmp_path / 'in'}"]
    shown = printed(fedgs(*asked))
    ways = "1 by 0 to 255, 2 by own window, 1 by range of bits, 1 by own look"
    assert re.search(f"black and white .*{ways}-up table; 2 inverted", shown)
    assert re.search("picture sizes +│ 5 of 28 x 28 ", shown)
    assert re.search("colour +│ 0 in colour, 5 grey", shown)
    shown = printed(fedgs(*asked, "--window", "0,4095"))
    assert re.search("black and white .*5 by --window 0,4095; 2 inverted", shown)
    shown = printed(fedgs(*asked, "--normalize"))
    assert re.search("black and white .*5 by --normalize .*1st and 99th", shown)
    for side in (1, 2, 3):
        save(tmp_path / f"in/ann/{side}.png", WIDE[:side, :side])
    shown = printed(fedgs(*asked, "--image-size", "28"))
    assert "1 of 1 x 1, 4 of 28 x 28, 1 of 2 x 2, ... (4 sizes)" in shown
