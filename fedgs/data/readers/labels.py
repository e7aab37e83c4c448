"""Labels of classes that the data names, as folders do.

A name that is a number is its own label; any other name needs the public setting
`classes`, whose order decides. Numbering the names that the data happen to have would
let one client's folder move the labels of all others, and labels would differ between
machines of a deployment.
"""

from collections.abc import Iterable

from fedgs.config.fields import shortened
from fedgs.config.run_config import RunConfig
from fedgs.data.records import MOST_CLASSES, plain_name
from fedgs.errors import UserError, check_printable


def numbered(config: RunConfig, names: Iterable[str]) -> dict[str, int]:
    """Returns the label of each class name; of the others it does not depend.

    Privacy: post-processing of the names, which are private unless `classes` has them.

    Args:
        config: uses `classes` and `data`.
        names: the names of the classes that the data has.

    Raises:
        UserError: a name is neither in `classes` nor, without that, a small number.

    >>> numbered(RunConfig(data="folder:x", classes="dog,cat"), ["cat"])
    {'cat': 1}
    >>> numbered(RunConfig(data="folder:x"), ["7", "03"])
    {'7': 7, '03': 3}
    """
    names = list(names)
    shown = f"data = {config.data!r}"
    for name in names:
        check_printable("class", name)
    classes = config.class_names
    if classes:
        # Settings have names in this spelling.
        spelled = {name: plain_name(name) for name in names}
        unknown = [name for name in names if spelled[name] not in classes]
        if unknown:
            raise UserError(
                f"classes = {config.classes!r}: {shown} has the class {unknown[0]!r}; "
                "add it to --classes, or take its images out"
            )
        return {name: classes.index(spelled[name]) for name in names}
    numbers = [int(name) for name in names if name.isdecimal()]
    largest = max(numbers, default=-1)
    # A year or a number of a patient, taken for a label, would make as many classes.
    if largest >= MOST_CLASSES:
        number = shortened(str(largest))
        count = shortened(str(largest + 1))
        raise UserError(
            f"{shown}: the class {number} would make {count} classes; number labels "
            "from 0, or give their names in --classes"
        )
    unknown = [name for name in names if not name.isdecimal()]
    if unknown:
        raise UserError(
            f"classes is unset: {shown} has the class {unknown[0]!r}, whose label "
            "must not depend on which clients are there; give --classes "
            f"'{_all_classes(names, largest)}' (labels in this order, the same on all "
            "machines), or name the classes 0, 1, ..."
        )
    return {name: int(name) for name in names}


def _all_classes(names: list[str], largest: int) -> str:
    """Returns a value of `classes` that has all names, and in which numbers stay.

    A number is its own label, also where nobody here has a smaller one.
    """
    spelled = {int(name): name for name in names if name.isdecimal()}
    kept: list[str] = []
    for number in range(largest + 1):
        kept.append(spelled.get(number, str(number)))
    others = sorted({plain_name(name) for name in names} - set(kept))
    return ",".join(kept + others)


def number_of_classes(config: RunConfig, labels: Iterable[int]) -> int:
    """Returns how many classes there are: those of `classes`, or up to the largest.

    Privacy: public by `classes`; the largest label becomes public without it.
    """
    if config.class_names:
        return len(config.class_names)
    return max(labels, default=0) + 1
