"""The drawings of the documentation: made by the script, and of what a run does."""

import xml.etree.ElementTree as ElementTree

import pytest

from experiments.drawings import DRAWINGS, FOLDER, PHASES, WHO_SEES_WHAT, svg
from fedgs.config.recipes import DEFAULT, recipe

every_drawing = pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda one: one.file)


@every_drawing
def test_committed_drawing_is_what_the_script_makes(drawing):
    assert (FOLDER / drawing.file).read_text() == svg(drawing)


@every_drawing
def test_drawing_has_its_words_as_text_inside_its_frame(drawing):
    root = ElementTree.fromstring(svg(drawing))
    texts = [one for one in root.iter() if one.tag.endswith("}text")]
    words = {one.text for one in texts}
    for row in drawing.rows:
        assert {row.name, *row.note}.union(*row.cells) <= words
    height = int(root.attrib["height"])
    assert all(0 < int(one.attrib["y"]) < height for one in texts)
    assert all(0 < int(one.attrib["x"]) < drawing.width for one in texts)


def test_phases_are_those_of_the_default_recipe():
    drawn = [row.name for row in PHASES.rows if not row.is_optional]
    phases = [phase.method for phase in recipe(DEFAULT).phases]
    assert drawn == [*phases, "fit"]


def test_privacy_barrier_lies_below_the_node():
    (above,) = [row.name for row in WHO_SEES_WHAT.rows if row.is_barrier]
    assert above == "Node"
