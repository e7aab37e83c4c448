"""How Table 2 is shown: JSON lines, Markdown and a table on the terminal."""

import json
import statistics
from pathlib import Path
from typing import Any

from experiments.paper.scores import epsilon_of, metric
from experiments.store import Line
from fedgs.app.tables import Table
from fedgs.files import write_atomically
from fedgs.privacy.plan import ADVERSARIES, RELATIONS
from fedgs.runs.run_folder import RunFolder

PUBLISHED = (  # the paper's Table 2: Federated EMNIST, 866 users; its own networks
    ("Fed-Avg GAN, as published", "10.88", "218.24"),
    ("GS-WGAN, as published", "11.25", "60.76"),
)
PUBLISHED_NOTE = (
    "as published: other data, networks, scale and scores, not to be compared with the "
    "rows above (docs/evaluation.md)"
)


def about(folder: RunFolder) -> Line:
    """Returns what a line says of its run."""
    config = folder.config
    return {
        "data": config.data,
        "num_clients": config.num_clients,
        "clients_per_node": config.node_sizes or config.clients_per_node,
        "num_rounds": config.num_rounds,
        "message_precision": config.message_precision,
        "is_private": config.noise_multiplier != 0 and config.noise_seed is None,
    }


def show(output: Path, lines: list[Line]) -> None:
    """Prints and writes the table: `table2.jsonl`, every number, and `table2.md`."""
    head, rows = cells(lines)
    marks = [f"- {note}" for note in notes(lines)]
    output.mkdir(parents=True, exist_ok=True)
    table, numbers = output / "table2.md", output / "table2.jsonl"
    text = "\n".join([Table("Table 2", head, rows).markdown(), *marks, ""])
    write_atomically(table, text.encode())
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomically(numbers, text.encode())
    for part in (slice(1, 4), slice(4, 7), slice(7, None)):  # a terminal is narrow
        narrow = [[row[0], *row[part]] for row in rows]
        Table("Table 2", [head[0], *head[part]], narrow).show()
    print(*marks, f"table  {table}\nnumbers  {numbers}", sep="\n")


def cells(lines: list[Line]) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows; runs that differ in the seed alone share a row."""
    quality = _quality_names(lines)
    header = ["", *quality.values()]
    header += [f"epsilon, {adversary}" for adversary in ADVERSARIES]
    header += ["bytes per client", "largest round", "values per node"]
    rows: list[list[str]] = []
    for name in dict.fromkeys(line["row"] for line in lines):
        found = [line for line in lines if line["row"] == name]
        done = [line for line in found if "missing" not in line]
        if done:
            rows.append(_row(done, quality))
        else:
            width = len(header) - 1
            rows.append([found[0]["title"], *[found[0]["missing"]] * width])
    for title, *scores in PUBLISHED:
        rows.append([title, *scores, *["-"] * (len(header) - 1 - len(scores))])
    return header, rows


def _quality_names(lines: list[Line]) -> dict[str, str]:
    """Returns the scores that are columns: what their name begins with, and the name.

    The name states the protocol; all lines of a call share it.
    """
    names = {"is_": "IS", "fid_": "FID", "downstream_cnn": "downstream CNN accuracy"}
    for line in lines:
        if "missing" not in line:
            return {prefix: metric(line, prefix)[0] for prefix in names}
    return names


def _row(done: list[Line], quality: dict[str, str]) -> list[str]:
    sent = [line["communication"] for line in done]
    row = [done[0]["title"]]
    for prefix in quality:
        row.append(_mean([metric(line, prefix)[1] for line in done]))
    for adversary in ADVERSARIES:
        row.append(" / ".join(_epsilon(done, adversary, name) for name in RELATIONS))
    row.append(f"{statistics.mean(c['bytes_per_client'] for c in sent):,.0f}")
    row.append(f"{max(c['bytes_per_client_max'] for c in sent):,}")
    row.append(f"{sent[0]['values_per_node']:,}")
    return row


def _epsilon(done: list[Line], adversary: str, relation: str) -> str:
    if all(row["adversary"] != adversary for row in done[0]["epsilons"]):
        return "-"
    values = [epsilon_of(line, adversary, relation) for line in done]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "unbounded"
    text = f"{max(known):.4g}"
    return text if all(line["is_private"] for line in done) else f"{text}*"


def _mean(values: list[float]) -> str:
    text = f"{statistics.mean(values):.4g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2g}"
    return text


def notes(lines: list[Line]) -> list[str]:
    """Returns what has to be said with the table; docs/evaluation.md has the rest."""
    done = [line for line in lines if "missing" not in line]
    found: list[str] = []
    for name in dict.fromkeys(line["row"] for line in done):
        found.append(_about_row([line for line in done if line["row"] == name]))
    if done:
        deltas = {row["delta"] for line in done for row in line["epsilons"]}
        found.append(
            f"epsilon: replace-one / zero-out, delta {_join(deltas)}, unit: one client,"
            " nobody colludes; conditions: `fedgs privacy RUN`"
        )
    if any(not line["is_private"] for line in done):
        found.append("* no guarantee: the noise was seeded, or there was none")
    found.append(PUBLISHED_NOTE)
    return found


def _about_row(same: list[Line]) -> str:
    first = same[0]
    sent = first["communication"]
    seeds = ", ".join(str(line["seed"]) for line in same)
    return (
        f"{first['row']}: {first['num_clients']} clients of {first['data']}, "
        f"{first['clients_per_node']} on a node, seed {seeds}; {first['scale']}. One "
        f"node receives {sent['bytes_down']:,} and sends {sent['bytes_up']:,} bytes in "
        f"a round, nodes in a round: {sent['messages_per_round']:g}"
    )


def _join(values: set[Any]) -> str:
    return " and ".join(f"{value:g}" for value in sorted(values))
