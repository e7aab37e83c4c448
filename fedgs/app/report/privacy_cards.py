"""The report's cards about privacy: every statement with all of its conditions."""

from collections.abc import Sequence

from fedgs.app.commands.privacy import conditions_of, tables
from fedgs.app.report import words
from fedgs.app.report.cards import Card
from fedgs.app.report.run import RunFacts
from fedgs.app.tables import Table
from fedgs.privacy.accountant import VALID, Statement
from fedgs.runs.data_card import NO_GUARANTEE, in_words

LABEL_NOTE = (
    "After NIST SP 800-226 and arXiv:2507.15997. Conditions and versions stand on this "
    "page; fedgs publish RUN writes all of it as JSON."
)
ELSEWHERE = ("conditions", "versions")  # fields of the label with a table of their own


def cards_of_run(facts: RunFacts) -> list[Card]:
    """Returns what one run guarantees."""
    if not facts.statements:
        return [Card(facts.name, texts=["No epsilon: its method guarantees nothing."])]
    return cards_of_statements(facts.name, facts.statements)


def cards_of_statements(caption: str, statements: Sequence[Statement]) -> list[Card]:
    """Returns statements as `fedgs privacy` prints them, and every condition.

    Args:
        caption: says of which runs it is.
        statements: at least one.
    """
    items = conditions_of(statements)
    units = dict.fromkeys(row.unit_in_words for row in statements)
    text = (
        f"Unit: {' or '.join(units)}. Nobody is protected against who "
        "holds the images: a node, or who runs a central method."
    )
    # Folded, because they are long; but their number stands on the page, so that nobody
    # reads the epsilons as unconditional.
    fold = f"Conditions of {caption}: no number holds without its own ({len(items)})"
    return [
        Card(caption, texts=[text], tables=tables(statements, _worth)),
        Card(fold, items=items, is_folded=True),
    ]


def _worth(row: Statement) -> str:
    """Returns what an epsilon is worth, or why it is no guarantee."""
    # A number without a guarantee may be small. It is not to be praised for that.
    bound = None
    if row.guarantee:
        bound = row.epsilon
    text, kind = words.reading(bound, row.conditions)
    if row.label != VALID:
        text = f"{text}: {row.label}"
    return words.badge(text, kind)


def label_card(facts: RunFacts) -> Card:
    """Returns a run's privacy label."""
    rows = []
    for name, value in facts.label.items():
        if isinstance(value, list):
            items = value
        else:
            items = [value]
        text = "\n".join(in_words(item, name) for item in items) or "none"
        if text.startswith(NO_GUARANTEE):
            text = words.badge(text, "bad")
        if name not in ELSEWHERE:
            rows.append([name.replace("_", " "), text])
    caption = f"Privacy label of {facts.name}"
    head = ["field", "content"]
    table = Table(
        caption,
        head,
        rows,
        note=LABEL_NOTE,
        numeric=False,
    )
    return Card(tables=[table])
