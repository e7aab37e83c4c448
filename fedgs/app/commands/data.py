"""`fedgs data inspect`: what a source holds, as a table or JSON, and a contact sheet.

Everything here describes private images. It is for the people who own them: none of it
may leave the machine in a run that claims privacy.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedgs.app.commands.terminal import say
from fedgs.app.tables import Table
from fedgs.config.run_config import RunConfig
from fedgs.data import sources
from fedgs.data.cohort import for_all_clients, keep_cohort
from fedgs.data.federated import FederatedImages, to_float
from fedgs.data.load import split_records
from fedgs.data.picture_rules import IN_COLOUR, IN_GREY, Found
from fedgs.data.records import Records
from fedgs.errors import first_n, raise_if_any, wrap_error
from fedgs.runs.epsilons import spread
from fedgs.runs.run_folder import published_folder
from fedgs.runs.sample_files import has_title, save_images

# Rows and columns of the contact sheet
SHEET_CLIENTS = 12
SHEET_IMAGES = 10
MOST_SIZES = 3  # of pictures, in the table
SHEET_TITLE = "fedgs data inspect: contact sheet"  # by which a sheet is known


def inspect(config: RunConfig, sheet: Path, as_json: bool) -> None:
    """Loads the data, writes the contact sheet and prints what is there.

    Data without clients of its own counts as one client unless `num_clients` is set.

    Privacy: reads private data; output private.

    Raises:
        UserError: the data is missing or malformed, or the sheet cannot be written, or
            would replace a picture.
    """
    raise_if_any(f"sheet = {sheet}", _sheet_problems(config, sheet))
    if config.seed is None:
        # A look trains nothing, so it needs no secret seed, and twice the same sheet is
        # what somebody who compares two sources expects.
        config = dataclasses.replace(config, seed=0)
    records = sources.load_records(config.validate())
    # The demo's digits are always cut into clients; other data only if asked to.
    is_cut = config.num_clients is not None or config.data == "digits"
    if records.clients is None and not is_cut:
        config = dataclasses.replace(config, num_clients=1)
    # A cohort chooses among all clients, so they are split before it is applied.
    everybody = split_records(for_all_clients(config), records)
    data = keep_cohort(config, everybody)
    problem = f"sheet = {sheet}: it cannot be written"
    with wrap_error(OSError, problem, "give another --sheet"):
        write_contact_sheet(sheet, data)
    report = describe(config, records, data) | {"contact_sheet": str(sheet)}
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)


def _sheet_problems(config: RunConfig, sheet: Path) -> Iterator[str]:
    """Yields why no contact sheet can be written there."""
    if sheet.suffix != ".png":
        yield "give a name that ends in .png"
    place, _ = sources.place_of(config)
    source = Path(place.partition(":")[2])
    target = sheet.resolve()
    # The next look would read it as a picture of somebody.
    if source.is_absolute() and target.is_relative_to(source):
        yield f"it would lie in the data, {source}; give a --sheet outside of them"
    published = published_folder(sheet)
    if published is not None:
        yield (
            f"{published} is a published folder, and the sheet shows private images; "
            "give another --sheet"
        )
    # A sheet of an earlier look is replaced, and nothing else.
    if target.exists() and not has_title(target, SHEET_TITLE):
        yield (
            "it is there already and is no contact sheet that fedgs wrote; give "
            "another --sheet, or remove it"
        )


def describe(
    config: RunConfig,
    records: Records,
    data: FederatedImages,
) -> dict[str, Any]:
    """Returns the numbers of the report.

    Privacy: reads private data; output private.
    """
    sizes = data.sizes
    own = np.concatenate(data.client_records)
    # `minlength` lists a class without images as 0 instead of leaving it out.
    per_class = np.bincount(data.labels[own], minlength=data.num_classes)
    held_out = 0
    if data.held_out_records is not None:
        held_out = len(data.held_out_records)
    num_images = int(sizes.sum())
    return {
        "data": config.data,
        "clients": data.num_clients,
        "images": num_images,
        "held_out": held_out,
        "owners_held_out": len(data.test_owners),
        # A partition or a cohort may leave images to nobody.
        "without_client": len(data.images) - num_images - held_out,
        "images_per_client": {
            "min": int(sizes.min()),
            "median": float(np.median(sizes)),
            "max": int(sizes.max()),
        },
        "classes": data.num_classes,
        "images_per_class": per_class.tolist(),
        "image_shape": list(data.images.shape[1:]),
        "pictures": _pictures(config, records.found),
        "background": records.background,
        "background_guess": records.guess,
        "memory_bytes": data.images.nbytes + data.labels.nbytes,
    }


def _pictures(config: RunConfig, found: Found | None) -> dict[str, Any] | None:
    """Returns what pictures were and what was done to each; None of a fixed format."""
    if found is None:
        return None
    sizes: dict[str, int] = {}
    not_square = 0
    for (width, height), count in found.sizes.items():
        sizes[f"{width} x {height}"] = count
        if width != height:
            not_square += count
    return {
        "sizes": sizes,
        "values": dict(found.kinds),
        "in_colour": found.colours[IN_COLOUR],
        "grey": found.colours[IN_GREY],
        "black_and_white": dict(found.ranges),
        "inverted": found.inverted,
        "hidden": found.hidden,
        "not_square": not_square,
        "fit": config.fit,
        "window": config.window,
        "normalize": config.normalize,
    }


def write_contact_sheet(path: Path, data: FederatedImages) -> None:
    """Writes some images of some clients, a row for each, as a PNG.

    Both are spread evenly: owners are often sorted by name, and images by class.

    Privacy: reads private data; output private.

    Raises:
        OSError: the file cannot be written.
    """
    rows = []
    for client in spread(data.num_clients, SHEET_CLIENTS):
        records = data.client_records[client]
        places = spread(len(records), SHEET_IMAGES)
        images = to_float(data.images[records[places]])
        # A client with fewer images still fills its row, else the next one would begin
        # in it.
        num_blank = SHEET_IMAGES - len(images)
        blank = np.zeros((num_blank, *images.shape[1:]), np.float32)
        rows.append(np.concatenate([images, blank]))
    save_images(path, np.concatenate(rows), SHEET_IMAGES, SHEET_TITLE)


def _show(report: dict[str, Any]) -> None:
    per_client = report["images_per_client"]
    least = per_client["min"]
    median = per_client["median"]
    most = per_client["max"]
    shape = " x ".join(map(str, report["image_shape"]))
    per_class = report["images_per_class"]
    background = report["background"]
    guess = report["background_guess"]
    shown = {
        "clients": report["clients"],
        "images": f"{report['images']}, each {shape}",
        "held out": _held_out(report),
        "used by no client": report["without_client"],
        "per client": f"{least} to {most}, median {median:g}",
        "classes": report["classes"],
        "per class": f"{min(per_class)} to {max(per_class)} images",
        "background": f"read as {background}, looks {guess}",
        "memory": f"{report['memory_bytes'] / 2**20:.0f} MiB",
    }
    shown |= _shown_pictures(report["pictures"])
    rows = [[name, str(value)] for name, value in shown.items()]
    Table(report["data"], ["what", "now"], rows, numeric=False).show()
    sheet = report["contact_sheet"]
    clients = min(report["clients"], SHEET_CLIENTS)
    say(
        f"Contact sheet: {sheet} (private; a row of images for each of {clients} "
        "clients)"
    )


def _held_out(report: dict[str, Any]) -> str:
    shown = str(report["held_out"])
    owners = report["owners_held_out"]
    if owners:
        shown += f" images, all of {owners} owners"
    return shown


def _shown_pictures(pictures: dict[str, Any] | None) -> dict[str, str]:
    """Returns rows on what was done to pictures; none where their format fixes it."""
    if pictures is None:
        return {}
    sizes = pictures["sizes"]
    shown_sizes = _counted(sizes, MOST_SIZES)
    if len(sizes) > MOST_SIZES:
        shown_sizes += f" ({len(sizes)} sizes)"
    # All kinds, of which there are few: the rarest may be a mistake.
    ranges = pictures["black_and_white"]
    shown_ranges = _counted(ranges, len(ranges), by="by")
    if pictures["window"] is not None:
        shown_ranges += f" {pictures['window']}"
    if pictures["normalize"]:
        shown_ranges += " (1st and 99th percentile of each)"
    if pictures["inverted"]:
        shown_ranges += f"; {pictures['inverted']} inverted (white is the lowest)"
    values = pictures["values"]
    shown = {
        "picture sizes": shown_sizes,
        "picture values": _counted(values, len(values)),
        "colour": f"{pictures['in_colour']} in colour, {pictures['grey']} grey",
        "not square": f"{pictures['not_square']} (--fit {pictures['fit']})",
        "black and white": shown_ranges,
    }
    if pictures["hidden"]:
        shown["passed over"] = f"{pictures['hidden']} hidden (names that begin with .)"
    return shown


def _counted(counts: dict[str, int], most: int, by: str = "of") -> str:
    """Lists numbers of pictures, as "3 of 40 x 30, 1 of 28 x 28"."""
    return first_n((f"{count} {by} {name}" for name, count in counts.items()), most)
