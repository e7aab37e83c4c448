"""The report's cards about privacy: every statement with all of its conditions."""

from collections.abc import Sequence

from markupsafe import Markup

from fedgs.app.report import words
from fedgs.app.report.cards import Card
from fedgs.app.report.run import RunFacts
from fedgs.app.tables import Table
from fedgs.config.run_config import RunConfig
from fedgs.privacy.accountant import Statement
from fedgs.privacy_label import said, unit_in_words
from fedgs.runs.data_card import NO_GUARANTEE, in_words

LABEL_NOTE = (
    "After NIST SP 800-226 and arXiv:2507.15997. Conditions and versions stand on this "
    "page; fedgs privacy RUN --label writes all of it as JSON."
)
ELSEWHERE = ("conditions", "versions")  # fields of the label with a table of their own


def cards_of_run(facts: RunFacts) -> list[Card]:
    """Returns what one run guarantees."""
    if not facts.statements:
        return [Card(facts.name, texts=["No epsilon: its method guarantees nothing."])]
    return cards_of_statements(facts.name, facts.statements, facts.config)


def cards_of_statements(
    caption: str, statements: Sequence[Statement], config: RunConfig
) -> list[Card]:
    """Returns statements by their theorems, and every condition with its rows.

    Args:
        caption: of which runs.
        statements: at least one.
        config: of the first of these runs.
    """
    theorems: dict[tuple[str, ...], list[Statement]] = {}
    conditions: dict[str, list[str]] = {}
    for row in statements:
        kind = (row.unit, row.theorem, row.client_selection)
        theorems.setdefault(kind, []).append(row)
        for condition in row.conditions:
            conditions.setdefault(condition, []).append(_place(row))
    everyone = {_place(row) for row in statements}
    where = {
        condition: "all" if {*rows} == everyone else "; ".join(dict.fromkeys(rows))
        for condition, rows in conditions.items()
    }
    items = [f"{condition} ({rows})" for condition, rows in where.items()]
    units = {row.unit: unit_in_words(config, row) for row in statements}
    text = f"Unit: {' or '.join(units.values())}. Nobody is protected against who "
    text += "holds the images: a node, or who runs a central method."
    fold = f"Conditions of {caption}: no number holds without its own ({len(items)})"
    return [
        Card(caption, texts=[text], tables=[_table(r) for r in theorems.values()]),
        Card(fold, items=items, is_folded=True),
    ]


def _place(row: Statement) -> str:
    return f"{row.adversary}, {row.relation}"


def _table(rows: Sequence[Statement]) -> Table:
    """Returns the statements of one theorem, by adversary and relation."""
    first, cells = rows[0], {_place(row): _cell(row) for row in rows}
    relations = {row.relation: _named(row, "relation") for row in rows}
    adversaries = {row.adversary: _named(row, "adversary") for row in rows}
    lines = [
        [named, *(cells.get(f"{name}, {relation}", "–") for relation in relations)]
        for name, named in adversaries.items()
    ]
    note = f"Theorem: {first.theorem}. Clients: {first.client_selection}."
    caption = f"ε of one {first.unit} at δ = {first.delta:g}"
    return Table(
        caption, ["against whom", *relations.values()], lines, note, numeric=False
    )


def _named(row: Statement, what: str) -> str:
    return f"{getattr(row, what)}: {said(row.conditions, what, '')}"


def _cell(row: Statement) -> str:
    """Returns an epsilon and what it is worth."""
    bound = row.epsilon if row.guarantee else None
    worth = words.badge(*words.reading(bound, row.conditions))
    return Markup("<strong>{}</strong> {}").format(words.epsilon(row.epsilon), worth)


def label_card(facts: RunFacts) -> Card:
    """Returns a run's privacy label."""
    rows = []
    for name, value in facts.label.items():
        items = value if isinstance(value, list) else [value]
        text = "\n".join(map(in_words, items)) or "none"
        if text.startswith(NO_GUARANTEE):
            text = words.badge(text, "bad")
        if name not in ELSEWHERE:
            rows.append([name.replace("_", " "), text])
    caption = f"Privacy label of {facts.name}"
    head = ["field", "content"]
    return Card(tables=[Table(caption, head, rows, LABEL_NOTE, numeric=False)])
