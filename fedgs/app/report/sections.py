"""The sections of a page: what each of them tells of the runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedgs.app.report import words
from fedgs.app.report.cards import Card, Picture, Section, picture_of
from fedgs.app.report.communication import communication_table
from fedgs.app.report.curves import curves
from fedgs.app.report.diagnosis_cards import diagnosis_cards, verdict_cards
from fedgs.app.report.evaluation import evaluation_tables
from fedgs.app.report.phase_tables import phase_tables
from fedgs.app.report.privacy_cards import cards_of_run, cards_of_statements, label_card
from fedgs.app.report.run import RunFacts
from fedgs.app.report.settings_tables import (
    OF_CLIENTS,
    settings_tables,
    shown_data,
    train_command,
    versions_table,
)
from fedgs.app.report.svg import draw
from fedgs.app.tables import is_number
from fedgs.privacy.accountant import Statement
from fedgs.privacy.rounding import upper
from fedgs.privacy_label import said
from fedgs.runs.data_card import to_outsiders


@dataclass(frozen=True)
class Page:
    """All that a page is about.

    Attributes:
        runs: in the order given.
        together: what all of them released together; None if that cannot be stated.
    """

    runs: Sequence[RunFacts]
    together: Sequence[Statement] | None

    @cached_property
    def trained(self) -> list[RunFacts]:
        """The runs of `fedgs train`: rounds, a ledger of events, messages."""
        return [facts for facts in self.runs if facts.baseline is None]

    @property
    def title(self) -> str:
        """The page's name."""
        if len(self.runs) > 1:
            return f"{len(self.runs)} runs compared"
        return self.runs[0].name

    @property
    def data(self) -> str:
        """The data that all runs trained on."""
        run = self.runs[0].config
        if run.nodes is not None:
            return OF_CLIENTS
        return shown_data(run.data)

    @cached_property
    def sections(self) -> list[Section]:
        """The parts that have something to show."""
        found = [
            _glance(self),
            _diagnosis(self),
            _training(self),
            _privacy(self),
            _communication(self),
            _evaluation(self),
            _reproduce(self),
        ]
        return [section for section in found if section.cards]


def _glance(page: Page) -> Section:
    cards = [card for facts in page.runs for card in verdict_cards(facts)]
    cards += [_card_of_run(facts) for facts in page.runs]
    return Section("glance", "At a glance", cards)


def _card_of_run(facts: RunFacts) -> Card:
    """Returns the last picture of a run, its epsilon and what that is worth."""
    label = facts.label
    epsilon = label["epsilon"]
    about: dict[str, str] = {}
    texts: list[str] = []
    # The picture never stands without its epsilon, or the words that there is none:
    # good pictures alone say nothing about privacy.
    if epsilon is None:
        answer = "no epsilon"
        texts.append(words.badge(label["guarantee"], "bad"))
    else:
        answer = f"{words.stated(epsilon)} at δ = {upper(label['delta'], 6)}"
        worth, kind = words.reading(epsilon, [label["guarantee"]])
        texts.append(words.badge(worth, kind))
        texts.append(f"{to_outsiders(label).capitalize()}.")
        about = _guaranteed(facts)
    about |= _trained(facts)
    pictures: list[Picture] = []
    # What a comparison is about are its mean pictures, which stand above: its generator
    # draws noise.
    is_shown_above = facts.config.compares_groups and facts.diagnosis is not None
    if not is_shown_above:
        pictures.append(picture_of(facts, facts.grids[-1], "After"))
    return Card(
        facts.name,
        answer,
        pictures=pictures,
        texts=texts,
        facts=about,
    )


def _guaranteed(facts: RunFacts) -> dict[str, str]:
    """Returns against whom the epsilon holds, and the others that the run states."""
    label = facts.label
    adversary = label["adversary"]
    relation = label["relation"]
    meaning = said(facts.headline.conditions, "relation", "")
    about = {"neighbours": f"{meaning} ({relation})", "unit": label["unit_of_privacy"]}
    # The large number on the card holds against one adversary and for one relation.
    # The other epsilons stand right below it, so that nobody takes it for them.
    for entry in label["who_sees_what"]:
        if entry["adversary"] == adversary:
            about["against"] = f"{entry['capability']} ({adversary})"
        for name, number in entry["epsilon"].items():
            if (entry["adversary"], name) != (adversary, relation):
                about[f"{entry['adversary']}, {name}"] = words.stated(number)
    return about


def _trained(facts: RunFacts) -> dict[str, str]:
    """Returns what was trained, on what, how far, and how useful the samples are."""
    config = facts.config
    baseline = facts.baseline
    done = f"{facts.round} of {config.num_rounds}"
    if facts.repeats:
        done = f"{done}, {facts.repeats} repeated"
    if not facts.is_finished:
        done = f"{done} · not finished"
    if config.num_nodes == 1:
        nodes = "1 node"
    else:
        nodes = f"{config.num_nodes} nodes"
    clients = f"{config.num_clients} on {nodes}"
    about = {"clients": f"{clients}, {config.clients_per_round} in a round"}
    if baseline is not None:
        data = f"{baseline.num_records} images of {config.num_clients} clients"
        about = {"method": baseline.title, "data": data}
    about |= {f"{facts.unit_of_time}s": done, "trust": facts.label["trust_model"]}
    accuracy: Any = facts.evaluation.get("downstream_cnn_accuracy")
    if is_number(accuracy):  # anybody may have written the file of scores
        text = f"{words.number(accuracy)} accuracy of a CNN trained on the samples"
        about["usefulness"] = text
    return about


def _diagnosis(page: Page) -> Section:
    cards = [card for facts in page.runs for card in diagnosis_cards(facts)]
    text = "Computed from what was released alone, so it costs no privacy."
    return Section("diagnosis", "Diagnosis", cards, [text])


def _training(page: Page) -> Section:
    cards = [Card(tables=[table]) for table in phase_tables(page.trained)]
    drawn = []
    if page.trained:
        drawn = curves(page.trained)
    for curve in drawn:
        # A curve without lines keeps its card: the note says why nothing is drawn.
        pictures = []
        if curve.lines:
            pictures.append(Picture(draw(curve), curve.description))
        texts = [text for text in (curve.note, curve.text) if text]
        cards.append(Card(curve.title, pictures=pictures, texts=texts))
    for facts in page.runs:
        if len(facts.grids) > 1:
            # The same latents in each grid, so that pictures in the same place differ
            # by training alone.
            title = f"Samples of {facts.name} during training, same latents"
            strip = [picture_of(facts, grid, "After") for grid in facts.grids]
            has_others = len(page.runs) > 1
            cards.append(Card(title, pictures=strip, is_folded=has_others))
    text = "All of this is computed from what was released: ledger, sums, sample grids."
    return Section("training", "Training", cards, [text])


def _privacy(page: Page) -> Section:
    texts = [
        "An epsilon holds against one adversary, for one relation and one unit, under "
        "its conditions; without them it says nothing. Whatever an adversary knows "
        "already, the odds of telling two neighbouring data sets apart change by at "
        "most a factor exp(ε), except with a small probability that δ measures."
    ]
    # A baseline's numbers stand beside those of federated runs but are of another kind.
    has_baselines = len(page.trained) < len(page.runs)
    if has_baselines:
        texts.append(
            "Of a baseline, nobody is protected against who runs a central method. A "
            "figure as published is what the published code would print: it is no "
            "claim. One epsilon of a record and one of a user are different things. "
            "What runs on the same data released together costs at most the sum of "
            "their epsilons at the sum of their deltas, of one unit and relation."
        )
    # Epsilons of several runs invite the reader to take the largest for all of them.
    if len(page.runs) > 1 and not page.together:
        texts.append(
            "Not added up: every table is of its own run. Where runs have clients in "
            "common, all that they released together has a larger epsilon than any "
            "of them; fedgs privacy of RUN RUN --same-clients states it for runs of "
            "fedgs train."
        )
    cards = [card for facts in page.runs for card in cards_of_run(facts)]
    if page.together:
        caption = "All of these runs together, on the same clients"
        cards += cards_of_statements(caption, page.together)
    cards += [label_card(facts) for facts in page.runs]
    return Section("privacy", "Privacy", cards, texts)


def _communication(page: Page) -> Section:
    cards = []
    if page.trained:
        cards.append(Card(tables=[communication_table(page.trained)]))
    return Section("communication", "Communication", cards)


def _evaluation(page: Page) -> Section:
    tables = evaluation_tables(page.runs)
    cards = [Card(tables=[table]) for table in tables[:1]]
    for table in tables[1:]:
        card = Card(table.caption, tables=[table], is_folded=True)
        cards.append(card)
    # Whoever passes the page on has to see that this part alone reads private data.
    badge = words.badge("no epsilon covers these numbers", "unsure")
    text = (
        "They were computed from real images. Publish this section only if the real "
        "data are public, or after deciding that you may."
    )
    return Section("evaluation", "Evaluation", cards, [badge, text])


def _reproduce(page: Page) -> Section:
    texts = [
        "Paths are shown without their folders. Noise without a seed is fresh in every "
        "run, so the images differ in detail."
    ]
    commands = [train_command(facts) for facts in page.runs]
    cards = [Card("Train again", commands=commands)]
    shared, differing = settings_tables(page.runs)
    if len(page.runs) > 1:
        cards.append(Card(tables=[differing]))
    for table in (shared, versions_table(page.runs)):
        cards.append(Card(table.caption, tables=[table], is_folded=True))
    return Section("reproduce", "Settings and commands", cards, texts)
