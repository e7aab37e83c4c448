"""The records of one source, and how they are fitted to the images of a run.

A reader (`sources`, `npz`, `femnist`, `folder`, `hugging_face`) makes `Records`; `fit`
checks names and labels, resizes, adds channels and turns a light background dark.
"""

import dataclasses
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.fields import Problem, refuse
from fedgs.config.run_config import RunConfig
from fedgs.config.settings import IMAGE_SIZES
from fedgs.data.picture_rules import IN_COLOUR, IN_GREY, Found, resize
from fedgs.errors import UserError, check_printable, first_n

DARK, LIGHT, UNCLEAR = "dark", "light", "unclear"
CLEAR_SHARE = 0.75  # of the border pixels that must agree for a guess
LEFT_OUT = -1  # the label of a record that is of none of the run's classes
GUESSED_FROM = 4096  # images, evenly spread
MOST_CLASSES = 1000  # a larger label is no class but a mistake
# Of a user who has none.
NO_IMAGES: NDArray[np.uint8] = np.empty((0, 1, 0, 0), np.uint8)


class DataWarning(UserWarning):
    """Something about the data that the user should look at; nothing is refused."""


@dataclass(frozen=True, eq=False)
class Records:
    """The records of one source, before they are split into clients.

    Attributes:
        images: shape (N, channel, height, width), uint8; after `fit` 0 = background.
        labels: shape (N,), int64, in [0, num_classes), or `LEFT_OUT`: such a record has
            its place in every cut, so that no other's depends on a label.
        num_classes: number of labels, at least 1.
        clients: owner of each record, shape (N,), integers or strings; None without.
        owners: all of them, where some have no record.
        background: what the source's format declares, dark- or light.
        guess: what the pixels look like, as `guess_polarity` of the source's pixels.
        found: what the pictures were; None of a source whose format fixes it.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    num_classes: int
    clients: NDArray[np.generic] | None = None
    background: str = DARK
    guess: str = UNCLEAR
    owners: NDArray[np.generic] | None = None
    found: Found | None = None


def gathered(
    data: str,
    parts: Iterable[tuple[str | int, NDArray[np.uint8], Any]],
    capacity: int,
    num_classes: int,
    background: str,
    found: Found | None = None,
    may_mix: bool = True,
) -> Records:
    """Collects users' images; warns about users without any, who stay owners.

    Grey images become RGB where one is in colour, with a warning, unless that is
    refused. Readers make all alike where `image_channels` is set. Memory that is not
    used is not touched, so a capacity above the need costs nothing.

    Privacy: reads private data; output private.

    Args:
        data: the setting, in errors.
        parts: a user, some images (n, channel, height, width) of it, or `NO_IMAGES`,
            and their labels (n,), or one label; all parts of a user one after another.
        capacity: the largest number of records.
        num_classes: number of labels.
        background: what the data's format declares.
        found: what the pictures were, counted while they are read.
        may_mix: whether some images may be grey and others in colour.

    Raises:
        UserError: there is no image at all, two of them differ in size, or some are in
            colour against `may_mix`.
    """
    images: NDArray[np.uint8] = NO_IMAGES
    labels = np.empty(capacity, np.int64)
    sizes: dict[str | int, int] = {}
    end = 0
    num_grey = 0
    for user, more, numbers in parts:
        sizes[user] = sizes.get(user, 0) + len(more)
        if not len(more):
            continue
        if not end:
            shape = more.shape[1:]
            images = np.empty((capacity, *shape), np.uint8)
        # Readers resize to `image_size`, so it is unset here.
        if more.shape[2:] != images.shape[2:]:
            raise _unset_size(data, images.shape[2], more.shape[2])
        if more.shape[1] > images.shape[1]:  # the first one in colour
            all_grey = images[:end]
            shape = more.shape[1:]
            images = np.empty((capacity, *shape), np.uint8)
            images[:end] = all_grey
        if more.shape[1] == 1:
            num_grey += len(more)
        part = slice(end, end + len(more))
        images[part] = more
        labels[part] = numbers
        end = part.stop
    if not end:
        raise UserError(f"data = {data!r}: it has no images; give other data")
    if images.shape[1] == 3 and num_grey:
        if not may_mix:
            raise _mixed_colours(data, found)
        warn_of_mixed_colours(f"data = {data!r}", num_grey, end - num_grey)
    users = np.array(list(sizes))
    owners = np.repeat(users, list(sizes.values()))
    is_of_class = labels[:end] != LEFT_OUT
    _warn_of_users_without(data, users, owners[is_of_class])
    return Records(
        images=images[:end],
        labels=labels[:end],
        num_classes=num_classes,
        clients=owners,
        background=background,
        owners=users,
        found=found,
    )


def _warn_of_users_without(
    data: str,
    users: NDArray[np.generic],
    owners: NDArray[np.generic],
) -> None:
    """Warns of users who own no image of the run's classes.

    Args:
        data: the setting.
        users: all of them.
        owners: the owners of each image of these classes.
    """
    # They stay clients: leaving them out would tell that they had no such image.
    is_without = ~np.isin(users, owners)
    count = int(is_without.sum())
    if count == 0:
        return
    warnings.warn(
        f"data = {data!r}: {count} of {len(users)} users have no images of these "
        f"classes and contribute nothing ({first_n(users[is_without])})",
        DataWarning,
        stacklevel=3,
    )


def _mixed_colours(data: str, found: Found | None) -> UserError:
    """Returns the error of pictures of which some are grey and others in colour."""
    assert found is not None  # noqa: S101 - by readers of files
    num_grey = found.colours[IN_GREY]
    num_colour = found.colours[IN_COLOUR]
    rarer = IN_GREY
    if num_colour <= num_grey:
        rarer = IN_COLOUR
    return UserError(
        f"data = {data!r}: it mixes files, {num_colour} in colour and {num_grey} grey "
        f"({found.examples[rarer]} is {rarer}); give --image-channels 3 to read all as "
        "RGB, or --image-channels 1 to take grey files only"
    )


def warn_of_mixed_colours(where: str, num_grey: int, num_colour: int) -> None:
    """Warns that grey images become RGB because others are in colour.

    It is no error: data sets in colour, as CIFAR-10, contain a few grey pictures.

    Args:
        where: the setting and its value.
        num_grey: number of grey images.
        num_colour: number of the others.
    """
    warnings.warn(
        f"{where}: it mixes pictures, {num_colour} in colour and {num_grey} grey, so "
        "all are read as RGB; give --image-channels 3 if that is right, or "
        "--image-channels 1 to take grey pictures only",
        DataWarning,
        stacklevel=3,
    )


def _unset_size(data: str, *sides: int) -> UserError:
    """Returns the error of pictures whose size cannot be that of a run's images."""
    found = " and of ".join(f"{side} x {side}" for side in sides)
    return UserError(
        f"image_size is unset: data = {data!r} has pictures of {found} pixels, but "
        "generated images have 16, 28, 32 or 64 pixels on each side; give "
        "--image-size, to which the pictures are then resized"
    )


def plain_name(name: str) -> str:
    """Returns a name in the one spelling by which it is compared.

    Hashes that choose owners read it as well, so that two machines with two spellings
    of a name choose alike.

    >>> plain_name("Rene\u0301 ") == "Ren\u00e9"
    True
    """
    # An accent may be typed as one character or two.
    return unicodedata.normalize("NFC", name).strip()


def check_owners(data: str, records: Records) -> None:
    """Refuses names of owners that may be one person's, or that cannot be shown.

    Each of two clients would be protected less than the guarantee says, and one of them
    could be held out while the other is trained on.

    Privacy: reads the names alone.

    Args:
        data: the setting, in errors.
        records: the source's.

    Raises:
        UserError: two names are two spellings of one, or one is no printable text.
    """
    owners = records.owners
    if owners is None:
        owners = records.clients
    if owners is None or owners.dtype.kind != "U":  # numbers have one spelling
        return
    names = np.unique(owners).tolist()
    for name in names:
        check_printable("client", name)
    same = _first_pair(names, [plain_name(name) for name in names])
    if same is not None:
        first, second = same
        # Escaped, because the two look alike.
        raise UserError(
            f"data = {data!r}: the owners {first!a} and {second!a} are one name in two "
            "spellings (of an accent, or of blanks around it), so one person could be "
            "two clients; give both one name, or two persons names that differ"
        )
    alike = _first_pair(names, [plain_name(name).casefold() for name in names])
    if alike is not None:
        first, second = alike
        warnings.warn(
            f"data = {data!r}: the owners {first!a} and {second!a} differ in capital "
            "letters alone; give both one name if they are one person, who would be "
            "protected less as two clients",
            DataWarning,
            stacklevel=2,
        )


def _first_pair(
    names: Iterable[str],
    forms: Iterable[str],
) -> tuple[str, str] | None:
    """Returns the first two names of one form; None if all forms differ."""
    first: dict[str, str] = {}
    for name, form in zip(names, forms, strict=True):
        known = first.setdefault(form, name)
        if known != name:
            return known, name
    return None


def guess_polarity(images: NDArray[np.uint8]) -> str:
    """Guesses from the outermost pixels whether the background is dark or light.

    Privacy: reads private data; output private.

    Args:
        images: shape (N, C, H, W), uint8.

    Returns:
        dark, light, or unclear where fewer than three quarters
        of the border pixels are on one side of 127.5.

    >>> guess_polarity(np.full((1, 1, 4, 4), 255, np.uint8))
    'light'
    """
    step = -(-len(images) // GUESSED_FROM)  # rounded up
    is_light = images[::step] > 127
    rows = is_light[:, :, [0, -1]]
    columns = is_light[:, :, 1:-1, [0, -1]]  # without the corners, which rows have
    border = np.concatenate([rows.ravel(), columns.ravel()])
    share = border.mean()
    if share >= CLEAR_SHARE:
        return LIGHT
    if share <= 1 - CLEAR_SHARE:
        return DARK
    return UNCLEAR


def fit(config: RunConfig, records: Records) -> Records:
    """Checks labels against `num_classes`; fits size, channels and background.

    Images keep the size and the channels that they have where the settings are unset.

    Privacy: reads private data; output private.

    Raises:
        UserError: names of owners that `check_owners` refuses, labels beyond
            `num_classes`, RGB images for a grey run, or no `image_size` for pictures of
            a size that is not generated.
    """
    check_owners(config.data, records)
    num_classes = config.num_classes or records.num_classes
    images = records.images
    own_channels = images.shape[1]
    own_side = images.shape[2]
    problems = _problems(config, records.labels, num_classes, own_channels)
    refuse(config, problems)
    if config.image_size is None and own_side not in IMAGE_SIZES:
        raise _unset_size(config.data, own_side)
    side = config.image_size or own_side
    channels = config.image_channels or own_channels
    if own_side != side:
        images = resize(images, side)
    if own_channels < channels:
        images = np.repeat(images, channels, axis=1)
    # A light background would be learned as strokes, so a wrong one is worth a warning.
    guess = guess_polarity(images)
    declared = config.background
    if declared == "auto":
        declared = records.background
    if guess not in (declared, UNCLEAR):
        warnings.warn(
            f"background = {config.background}: data = {config.data!r} is read as "
            f"{declared}, but its border pixels look like {guess}; look at `fedgs data "
            f"inspect {config.data}` and give --background {guess} if that is right",
            DataWarning,
            stacklevel=2,
        )
    if declared == LIGHT:
        # In place where that is possible: a large data set fits once into memory.
        target = None
        if images.flags.writeable:
            target = images
        images = np.subtract(np.uint8(255), images, out=target)
    return dataclasses.replace(
        records,
        images=images,
        num_classes=num_classes,
        background=declared,
        guess=guess,
    )


def _problems(
    config: RunConfig,
    labels: NDArray[np.int64],
    num_classes: int,
    channels: int,
) -> Iterator[Problem]:
    """Yields labels that no class has, and colours that the run has not."""
    most = max(config.num_classes or 0, MOST_CLASSES)
    largest = labels.max(initial=0)
    for limit, remedy in (
        (most, f"labels below {most}"),
        (num_classes, f"--num-classes above {largest}"),
    ):
        is_wrong = labels >= limit
        if is_wrong.any():
            index = int(is_wrong.argmax())
            yield "data", f"image {index} has the label {labels[index]}; give {remedy}"
    if config.image_channels is not None and channels > config.image_channels:
        remedy = "give --image-channels 3"
        yield "image_channels", f"data = {config.data!r} has RGB images; {remedy}"
