"""The tutorials run from the first cell to the last, at a small size."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra docs")
nbclient = pytest.importorskip("nbclient", reason="needs the extra docs")

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))
SMALL = (
    "NUM_ROUNDS, WARM_START_ROUNDS = 2, 1",
    'RECIPE = "moments"',  # no fit of minutes
)


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own packages
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path, tmp_path):
    pytest.importorskip("sklearn", reason="needs the digits of scikit-learn")
    notebook = nbformat.read(path, as_version=4)
    # Not every tutorial has rounds; what it has is made small.
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            names = cell.source.split(" = ")[0]
            (cell.source,) = [each for each in SMALL if each.startswith(f"{names} = ")]
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()
    assert [*tmp_path.glob("runs/*/generator.safetensors")]


def test_tutorials_are_stored_with_their_pictures():
    assert TUTORIALS
    for path in TUTORIALS:
        cells = nbformat.read(path, as_version=4).cells
        outputs = [o for cell in cells for o in cell.get("outputs", [])]
        assert any("image/png" in o.get("data", {}) for o in outputs), path.name
        assert not any(o.output_type == "error" for o in outputs), path.name
