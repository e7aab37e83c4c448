"""The benchmark's page: the same content in Markdown and as one HTML file."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark.published import NOTE, beside_the_paper, by_classifier
from experiments.benchmark.tables import UNITS, Row, details, overview
from experiments.report.page import environment
from experiments.report.pictures import data_uri
from experiments.tables import Table

# What to use when: of the methods themselves, whatever the numbers are.
ADVICE = (
    (
        "Few releases, nobody trusted with images, pictures in seconds",
        "`staged`: every client sends clipped moments, three times in all; with a "
        "fourth release `staged-parts` is better where there are many clients and a "
        "large epsilon. With public pictures of the same kind (fonts for digits) "
        "`staged-fonts` needs one release and is the best one at epsilon 1.",
    ),
    (
        "One release, and no Gaussian model",
        "`dp-merf-federated`: one embedding of random features from each client; the "
        "generator is fitted to it afterwards, without the data.",
    ),
    (
        "Detail that moments do not hold, hundreds of releases",
        "`gs-wgan`, `fedavg-gan`: a GAN trained over many rounds. "
        "Each round costs privacy, so these need many users or a large epsilon.",
    ),
    (
        "A curator who may see all images, protection of single images",
        "`dp-merf`, `dp-sgd-gan-strong` (record level). One record in 60,000 is cheap "
        "to hide: at epsilon 1 they lose little of 10. But that epsilon says nothing "
        "of a user until the cap on a user's images is counted in; see the record "
        "table.",
    ),
    (
        "A curator who may see all images, protection of users",
        "`pate-gan` and `g-pate` count votes of clients: user level by itself. Who "
        "counts the votes sees them without noise.",
    ),
    (
        "No privacy needed",
        "`wgan-gp`: the ceiling of a GAN. It guarantees nothing.",
    ),
)
LIMITS = (
    "`staged` and `staged-fonts` draw one Gaussian for each class, `staged-parts` "
    "four. At epsilon 10 the limit of the first two is the Gaussian and not the noise: "
    "without noise they stay below real images. Sharp texture they cannot draw: a CNN "
    "learns more from `staged` than from `wgan-gp`, yet by FID it is far behind.",
    "`staged` at epsilon 1 loses much of what it has at 3. Public pictures help.",
    "`gs-wgan` pays in every round. With some hundred users its fifty rounds are "
    "below one release of moments or of random features, and cost at least a "
    "hundred times the bytes. The rounds are the limit there: without noise fifty "
    "have no more.",
)
NOTES = (
    "A user is one client with all its images: a writer in `mnist-by-writer` (539), "
    "one of K = 1000 shards in `mnist` and `fashion-mnist`, which is no person.",
    "One epsilon of a record and one of a user are different things: they stand in "
    "different tables. Of a record-level run the epsilon of a user is by group privacy "
    "at the cap, a public number: images over it were dropped before the training.",
    "epsilon: that of the run's own ledger, delta 1e-5, against whoever sees what is "
    "published, by relation. Of users zero-out is asked for: 10 of zero-out is 24.4 of "
    "replace-one for the same Gaussian noise; a run that was asked for replace-one has "
    "less of zero-out, as its row says. Of records it is the relation of the method, "
    "the first one named.",
    "CNN: accuracy of the small CNN of `fedgs evaluate` on the real test images, "
    "trained on 10,000 synthetic ones. 13: mean of the thirteen classifiers, with the "
    "number of synthetic images where it is another. FID: on features of a LeNet. Both "
    "are of seed 0 alone. No "
    "epsilon covers these numbers: they were computed from real images.",
    "Beside these rows, by the same protocol: 10,000 real images have 0.973 (MNIST) "
    "and 0.838 (Fashion-MNIST); the model of fonts alone, nothing private, 0.681 on "
    "MNIST.",
    NOTE,
    "Three methods stand at chance or near it. fedavg-gan: 60 rounds are too few "
    "for it, without noise they have no more; with it, the noise on 21,889 values "
    "has a norm of 98 in each round, and the sum of 54 clipped updates one of 27 at "
    "most. g-pate: the votes of 539 teachers pay for 16,000 queries with a noise of "
    "64 votes; the paper's table has 2,000 teachers. pate-gan: teachers are certain "
    "that a fake is a fake, so the student sees no other label.",
    "Published accuracies of the CNN that our rows reach, below the published "
    "sizes: the GAN without privacy and DP-MERF on both data, the DP-SGD GAN on "
    "Fashion-MNIST, and on digits by the strong recipe only. Not reached: the "
    "DP-SGD GAN's own recipe on digits (500 of 30,000 steps), DP-MERF AE (500 of "
    "1,200 steps of its autoencoder, whose encoder is trained with noise here and "
    "was not there), G-PATE (539 or 1,000 teachers, of 2,000), and GS-WGAN, whose "
    "50 rounds protect users where the published 20,000 protect records; 320 rounds "
    "of its recipe have 0.77 on digits (docs/benchmark.md), and `staged` more than "
    "is published.",
    "audited: a lower bound (95 %) of what one release costs, by an attack with a "
    "worst-case user or record, beside what is claimed for that release. Of fedgs' own "
    "rows it supposes that the noise is Gaussian, of the others nothing; of g-pate and "
    "pate-gan it is of replace-one.",
    "bytes/client: what one client receives and sends in the whole run, where the "
    "method is federated. memory: the most that the training process held, Python and "
    "its libraries included. CPU s, wall s: of the training; wall says little, because "
    "other work ran on the two cores.",
    "*: settings below the published ones, so that a cell trains at most 15 minutes on "
    "two cores; they are listed below. †: it took longer. Most were cut for time "
    "before a method's first cell. `dp-sgd-gan-strong` was tuned on digits of fonts, "
    "by eye; `g-pate` was tried with others as well (docs/baselines.md), and "
    "`fedavg-gan` has other rates, steps and clip bound since its first cell stood at "
    "chance.",
    "‡: settings that were chosen with test accuracies on these data in view, which no "
    "epsilon covers: an upper end (docs/benchmark.md). `gs-wgan` has its recipe's, "
    "`wgan-gp` those of an earlier run whose accuracy was known.",
    "An epsilon is of its own cell. All cells of a table together cost more than one: "
    "whoever publishes several, of the same images, composes their costs.",
    "`not run`: nobody has computed this cell. –: there is no such cell, or the number "
    "is not known.",
)
COMMANDS = (
    "fedgs benchmark --data-dir DATA --only mnist-by-writer-staged",
    "fedgs benchmark --print --output docs/benchmark",
    "fedgs benchmark --data folder:IMAGES --num-clients 50 --only staged",
    "fedgs benchmark --method my_file:METHOD --only my-method",
    "fedgs benchmark --full --device cuda --output runs/full --data-dir DATA",
)
KINDS = tuple(UNITS)


def tables_of(rows: Sequence[Row]) -> dict[str, list[Table]]:
    """Returns the tables by data set: for each unit the overview, then the details."""
    found: dict[str, list[Table]] = {}
    for data in dict.fromkeys(row.data for row in rows):
        known = [overview(data, kind, rows) for kind in KINDS]
        known += [details(data, kind, rows) for kind in KINDS]
        compared = (beside_the_paper(data, rows), by_classifier(data, rows))
        known += [table for table in compared if table is not None]
        found[data] = [table for table in known if table.rows]
    return found


def losses(rows: Sequence[Row]) -> list[str]:
    """Returns where fedgs' own methods have less than others of the same unit."""
    found: list[str] = []
    keys = dict.fromkeys((row.data, row.asked, row.unit) for row in rows if row.done)
    for data, asked, unit in keys:
        group = [r for r in rows if (r.data, r.asked, r.unit) == (data, asked, unit)]
        if asked is None:  # without noise the unit is no difference
            group = [r for r in rows if (r.data, r.asked) == (data, asked)]
        group = sorted((r for r in group if r.done), key=lambda row: -row.accuracy)
        for own in (row for row in group if row.is_own):
            better = [r for r in group if not r.is_own and r.accuracy > own.accuracy]
            if better:
                names = ", ".join(f"{r.method} ({r.accuracy:.3f})" for r in better)
                what = f"epsilon {asked:g} of one {unit}" if asked else "without noise"
                score = f"{own.method} ({own.accuracy:.3f})"
                found.append(f"{data}, {what}: {score} is below {names}")
    return [*dict.fromkeys(found), *_records(rows)]


def _records(rows: Sequence[Row]) -> list[str]:
    """Returns where a curator and record level give better pictures."""
    found: list[str] = []
    for row in rows:
        if row.unit != "record" or not row.done or row.asked is None:
            continue
        same = [r for r in rows if (r.data, r.asked) == (row.data, row.asked)]
        own = [r.accuracy for r in same if r.is_own]
        if own and row.accuracy > max(own):
            found.append(
                f"{row.data}, epsilon {row.asked:g}: {row.method} has "
                f"{row.accuracy:.3f}, more than all of fedgs' ({max(own):.3f}), with a "
                "trusted curator and for one record"
            )
    return found


def trusts(rows: Sequence[Row]) -> Table:
    """Returns whom each method that was run needs to be trusted."""
    found = {row.method: row.done[0] for row in rows if row.done}
    cells = [
        [name, line["trust"], str(line["releases"])] for name, line in found.items()
    ]
    head = ["method", "who must be trusted", "releases"]
    return Table("Who must be trusted", head, cells, numeric=False)


def reductions(rows: Sequence[Row]) -> list[str]:
    """Returns the settings that were reduced, by method."""
    found = {row.method: row.done[0]["reduced"] for row in rows if row.done}
    return [
        f"{name}: {', '.join(f'{key} {value}' for key, value in values.items())}"
        for name, values in found.items()
        if values
    ]


def failures(rows: Sequence[Row]) -> list[str]:
    """Returns why cells failed."""
    failed = [line for row in rows for line in row.lines if "failed" in line]
    return [f"{line['cell']}: {line['failed']}" for line in failed]


def markdown(rows: Sequence[Row]) -> str:
    """Returns the tables as Markdown; docs/benchmark.md ends with them."""
    parts = [
        trusts(rows).markdown(),
        "## Where fedgs' own methods lose\n",
        _items(losses(rows)),
    ]
    for data, tables in tables_of(rows).items():
        parts += [f"## {data}\n"]
        for table in tables:
            parts += [f"**{table.caption.removeprefix(f'{data}: ')}**\n"]
            parts += [table.markdown()]
    if settings := reductions(rows):
        parts += ["Reduced settings:\n", _items(settings)]
    if failed := failures(rows):
        parts += ["Failed:\n", _items(failed)]
    return "\n".join(parts)


def _items(texts: Any) -> str:
    return "".join(_wrapped(f"- {text}", "  ") for text in texts)


def _wrapped(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False)
    return "\n".join(lines) + "\n"


def html(rows: Sequence[Row], pictures: Mapping[str, Path]) -> str:
    """Returns the page as one HTML file, without script and network.

    Args:
        rows: of all data.
        pictures: PNG of a row's first seed, by the row's name.
    """
    shown = {name: data_uri(path.read_bytes()) for name, path in pictures.items()}
    content = {
        "advice": ADVICE,
        "commands": COMMANDS,
        "data": tables_of(rows),
        "failures": failures(rows),
        "losses": [*LIMITS, *losses(rows)],
        "notes": NOTES,
        "pictures": {row: shown[row.name] for row in rows if row.name in shown},
        "reductions": reductions(rows),
        "trust": trusts(rows),
    }
    return environment().get_template("benchmark.html").render(content)
