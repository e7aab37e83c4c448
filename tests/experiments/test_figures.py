"""The papers' figures: redrawn without training, what a probe writes, and bad input."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from evaluation_data import refuse
from experiments.grid import lines, runs
from experiments.grid.cells import NO_NOISE, CellMethod, Cells, Source
from experiments.paper import figures, gradient_norms
from experiments.paper.figure_drawing import Point, privacy_utility
from experiments.paper.gradient_norms import probe, read_norms, unprotected
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.app.flags import run_command
from fedgs.data.records import DataWarning
from fedgs.privacy_label import privacy_label
from fedgs.round import local
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from tiny import tiny_config, write_tiny_npz

TINY = {"moment_size": 3, "latent_dim": 4}
UPDATES = {"num_rounds": 2, "discriminator_batch_size": 4, "generator_dim": 4}
UPDATES |= {"discriminator_dim": 4, "latent_dim": 4}
FEW = {"num_clients": 12, "clients_per_node": 6, "test_fraction": 0.25}
CELLS = Cells(
    {"digits": Source(FEW | {"image_size": 16})},
    {
        "gs-wgan": CellMethod("moments", TINY, {10.0: {}, NO_NOISE: {}}),
        "fedavg-gan": CellMethod("fedavg-gan", UPDATES, {9.0: {}}),
    },
)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Makes a figure of tiny cells, with scores in the place of an evaluation's."""

    def evaluate(request: EvaluationRequest, as_json: bool) -> None:
        scores = {"is_lenet_x": 3.0, "is_lenet_x_std": 0.1, "fid_lenet_x": 20.0}
        scores |= {"downstream_cnn_accuracy": 0.5, "num_neighbour_images": 9}
        path = Path(request.source) / "evaluations.jsonl"
        path.write_text(json.dumps(scores) + "\n")

    monkeypatch.setattr(figures, "CELLS", CELLS)
    monkeypatch.setattr(runs, "evaluate", evaluate)
    monkeypatch.setattr(lines, "TRIALS", 300)

    def call(*words: str) -> int:
        return run_command(
            figures.figures, [*words, "--seeds=0", f"--output={tmp_path / 'out'}"]
        )

    return call


def test_a_figure_is_redrawn_without_training(call, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert call("noise-scale", "--print") == 2
    assert call("noise-scale") == 0
    assert call("table2") == 0
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in (out / "table.md").read_text().splitlines()
        if (cells := line.split("|"))[1].strip().startswith("digits")
    }
    assert len(rows) == 3
    private = rows["digits-gs-wgan-eps10"]
    assert private[0] == "9.996 zero-out / 24.38 replace-one"
    assert private[1] == "–"  # no server sees what one process computes
    assert private[2:5] == ["3", "20", "0.5"]
    assert "unbounded zero-out" in rows["digits-gs-wgan-epsinf"][0]
    published = rows["digits-fedavg-gan-eps9"]
    assert (published[1], published[-2:]) == ("–", ["2", "1"])
    picture = (out / "noise-scale.png").read_bytes()
    (out / "noise-scale.png").unlink()
    monkeypatch.setattr(runs, "compute", refuse)
    assert call("noise-scale", "--print") == 0
    assert (out / "noise-scale.png").read_bytes() == picture
    assert not (out / "table2.png").exists()


def test_an_unknown_figure_is_refused(call, tmp_path, capsys):
    assert call("table3") == 2
    assert "figure = 'table3': give" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_points_lie_at_their_epsilon_and_no_noise_is_a_line():
    points = [Point("a", 1.0, 2.0, 30.0), Point("b", None, 4.0, 20.0)]
    above, below = privacy_utility(points).axes
    for axes, values in ((above, (2.0, 4.0)), (below, (30.0, 20.0))):
        point, line = axes.lines
        assert np.asarray(point.get_xydata()).tolist() == [[1.0, values[0]]]
        assert set(line.get_ydata()) == {values[1]}


# ------------------------------------------------------------------ norms


SMALL = [
    "--num-rounds=3",
    "--set=image_size=16",
    "--set=batch_size=4",
    "--set=latent_dim=4",
    "--set=discriminator_steps=2",
    "--set=discriminator_batch_size=4",
    "--set=warm_start_rounds=1",
    "--set=generator=upsample",
    "--set=generator_dim=4",
    "--set=discriminator_dim=4",
    "--set=num_workers=1",
    "--set=clip_bound=0.02",
    "--set=num_clients=6",
    "--set=clients_per_round=6",
]


def test_a_probe_measures_what_is_clipped_and_says_that_it_is_not_private(
    tmp_path, monkeypatch
):
    data = write_tiny_npz(tmp_path / "tiny.npz")
    out = tmp_path / "norms"
    words = [*SMALL, f"--data={data}", f"--output={out}"]
    with pytest.warns(DataWarning, match="partition = iid: a client is a shard"):
        assert run_command(gradient_norms.gradient_norms, words) == 0
    assert (out / "NOT-PRIVATE.txt").read_text().startswith("NOT PRIVATE")
    assert privacy_label(out)["epsilon"] is None
    found = read_norms(RunFolder.open(out))
    assert [norms.round for norms in found] == [1, 2, 3]
    for norms in found:
        assert len(norms.before) == 6 * 4  # clients, fakes
        assert norms.after == pytest.approx(np.minimum(norms.before, 0.02))
    assert max(norms.before.max() for norms in found) > 0.03
    pictures = [out / "norm-dynamics.png", out / "norm-histograms.png"]
    before = [picture.read_bytes() for picture in pictures]
    for picture in pictures:
        picture.unlink()
    monkeypatch.setattr(gradient_norms, "probe", refuse)
    assert run_command(gradient_norms.gradient_norms, words) == 0
    assert [picture.read_bytes() for picture in pictures] == before


@pytest.mark.parametrize("size", [None, 8])
def test_the_norms_are_those_of_the_release(tmp_path, monkeypatch, size):
    """Of one client without noise the release itself is what was clipped."""
    released = []
    original = local.LocalNodes.answers

    def answers(self: local.LocalNodes, request: object) -> object:
        found = original(self, request)  # type: ignore[arg-type]
        released.append(found[0].values.double().flatten(1).norm(dim=1).numpy())
        return found

    monkeypatch.setattr(local.LocalNodes, "answers", answers)
    monkeypatch.setattr(gradient_norms, "MOST_NORMS", 3)
    settings = {"data": write_tiny_npz(tmp_path / "tiny.npz"), "dct_size": size}
    settings |= {"noise_multiplier": 0.0, "clients_per_round": 1, "clip_bound": 0.05}
    config = tiny_config(**settings, output=str(tmp_path / "run"))
    folder = RunFolder.create(unprotected(config))
    probe(folder, threading.Event())
    found = read_norms(folder)
    assert len(found) == len(released) == 3
    for norms, values in zip(found, released, strict=True):
        assert len(norms.before) == 3  # of 4: a random subset is kept
        differences = np.abs(norms.after[:, None] - values)
        assert (differences.min(1) <= 1e-5 * norms.after).all()


def test_no_run_that_is_not_marked_is_continued_or_read(tmp_path, capsys):
    config = tiny_config(output=str(tmp_path / "run"))
    folder = RunFolder.create(config)
    line = {"round": 1, "before": [1.0], "after": [1.0]}
    (folder.path / gradient_norms.NORMS_FILE).write_text(json.dumps(line) + "\n")
    assert_refused("NOT-PRIVATE", read_norms, folder)
    assert run_command(gradient_norms.gradient_norms, [f"--output={folder.path}"]) == 2
    assert "NOT-PRIVATE" in capsys.readouterr().err
