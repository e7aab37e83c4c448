"""The figures: redrawn without training, what a probe writes, and bad input."""

import json
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import small_scale
from experiments.paper import figures, gradient_norms, scores
from experiments.paper.figure_drawing import Point, privacy_utility, sample_grids
from experiments.paper.gradient_norms import Norms, probe, read_norms, unprotected
from experiments.paper.privacy_utility import parse_values, variations
from experiments.paper.stored_runs import generator_of, snapshot_rounds, stored
from fedgs.app.evaluation import evaluate as evaluation
from fedgs.config.run_config import RunConfig
from fedgs.federation import local
from fedgs.privacy.ledger import Ledger
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from small_scale import data_flags, refuse
from tiny import tiny_config, write_tiny_npz


@pytest.fixture(autouse=True)
def _process(monkeypatch, tmp_path):
    small_scale.prepare(monkeypatch, tmp_path)


@pytest.fixture
def flags(tmp_path) -> list[str]:
    return [*data_flags(tmp_path), f"--output={tmp_path / 'out'}"]


def forbid_training(monkeypatch) -> None:
    monkeypatch.setattr(figures, "train", refuse)
    monkeypatch.setattr(figures, "probe", refuse)


# ------------------------------------------------------------------ curves


def test_a_curve_is_redrawn_without_training(flags, tmp_path, monkeypatch):
    command = ["noise-scale", "--values=3,30,0", *flags]
    out = tmp_path / "out"
    assert figures.main([*command, "--redraw"]) == 2
    assert not (out / "noise-scale.png").exists()
    assert figures.main(command) == 0
    before = [(out / f"noise-scale.{kind}").read_bytes() for kind in ("png", "json")]
    for kind in ("png", "json"):
        (out / f"noise-scale.{kind}").unlink()
    forbid_training(monkeypatch)
    assert figures.main([*command, "--redraw"]) == 0  # the numbers, again, are found
    assert figures.main(command) == 0
    after = [(out / f"noise-scale.{kind}").read_bytes() for kind in ("png", "json")]
    assert after == before
    monkeypatch.setattr(evaluation, "evaluate", refuse)
    assert figures.main([*command, "--redraw"]) == 0
    (out / "scores.jsonl").unlink()
    with pytest.raises(AssertionError, match="computed"):
        figures.main([*command, "--redraw"])


def test_the_points_of_a_curve_are_what_the_runs_reached(flags, tmp_path):
    assert figures.main(["noise-scale", "--values=30,3,0", *flags]) == 0
    found = json.loads((tmp_path / "out" / "noise-scale.json").read_text())
    assert [name.split("_")[0] for name in found["scores"]] == ["is", "fid"]
    small, large = found["curves"]["fedgs"]
    # The noise is calibrated for zero-out, the curve is of replace-one.
    assert 3 < small["epsilon"] < 30 < large["epsilon"]
    assert [point["epsilon"] for point in found["curves"]["no noise"]] == [None]
    assert small["note"] != large["note"]


def test_iterations_are_snapshots_of_one_run(flags, tmp_path):
    assert figures.main(["iterations", *flags]) == 0
    found = json.loads((tmp_path / "out" / "iterations.json").read_text())
    points = found["curves"]["fedgs"]
    assert [point["note"] for point in points] == ["round 2", "round 4"]
    assert points[0]["epsilon"] < points[1]["epsilon"]
    (run,) = (tmp_path / "out" / "runs").iterdir()
    folder = RunFolder.open(run)
    assert snapshot_rounds(folder) == [2, 4]
    early, late = (generator_of(folder, round).state_dict() for round in (2, 4))
    assert any((early[name] != late[name]).any() for name in late)
    with_all = scores.epsilons(folder, 4)
    of_two = [e for e in Ledger.read(run / "ledger.jsonl").events if e.round <= 2]
    assert len(of_two) == 2
    assert scores.epsilons(folder, 2)[0]["epsilon"] < with_all[0]["epsilon"]


def test_sampling_rate_varies_clients_or_participants():
    own = {"data": "digits", "seed": 0}
    drawn = variations("sampling-rate", "algorithm-1", "small", (50, 100), own)
    assert [c.num_clients for c in drawn.values()] == [50, 100]
    assert list(drawn) == ["sampling rate 1/50", "sampling rate 1/100"]
    asked = variations("sampling-rate", "full-participation", "small", (5, 9), own)
    assert [c.clients_per_round for c in asked.values()] == [5, 9]
    assert {c.client_selection for c in asked.values()} == {"uniform"}
    assert_refused("varies nothing", parse_values, "iterations", "1,2", "small")
    assert_refused("values", parse_values, "noise-scale", "1,-2", "small")


def test_every_picture_says_its_scale():
    points = [Point("round 1", 1.0, 2.0, 30.0), Point("round 2", 3.0, 4.0, 20.0)]
    drawn = privacy_utility(
        {"fedgs": points}, ("is_x", "fid_x"), "release", "12 rounds"
    )
    assert "12 rounds" in drawn.get_supxlabel()
    above, below = drawn.axes
    assert above.get_ylabel() == "is_x"
    drawn_points = np.asarray(below.lines[0].get_xydata())
    assert drawn_points.tolist() == [[1.0, 30.0], [3.0, 20.0]]
    grid = np.zeros((6, 1, 2, 2), np.float32)
    grid[2] = 1  # first row, third column
    drawn = sample_grids({"a": grid}, 3, "12 rounds")
    picture = np.asarray(drawn.axes[0].images[0].get_array())
    assert picture.shape == (4, 6, 3)
    assert picture[:2, 4:].min() == 1
    assert picture.sum() == 4 * 3
    assert "12 rounds" in drawn.get_supxlabel()


# ------------------------------------------------------------------ norms


def test_a_probe_measures_what_is_clipped_and_says_that_it_is_not_private(
    flags, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    command = ["norms", *flags, "--set=clip_bound=0.02"]
    assert figures.main([*command, "--redraw"]) == 2
    assert figures.main(command) == 0
    (folder,) = map(RunFolder.open, (out / "probes").iterdir())
    assert (folder.path / "NOT-PRIVATE.txt").read_text().startswith("NOT PRIVATE")
    assert not scores.epsilons(folder, 4)[0]["guarantee"]
    found = read_norms(folder)
    assert [norms.round for norms in found] == [1, 2, 3, 4]
    for norms in found:
        assert len(norms.before) == 6 * 4  # clients, fakes
        assert norms.after == pytest.approx(np.minimum(norms.before, 0.02))
    assert max(norms.before.max() for norms in found) > 0.03
    pictures = [out / "norm-dynamics.png", out / "norm-histograms.png"]
    before = [picture.read_bytes() for picture in pictures]
    for picture in pictures:
        picture.unlink()
    forbid_training(monkeypatch)
    assert figures.main([*command, "--redraw"]) == 0
    assert [picture.read_bytes() for picture in pictures] == before


def probed(folder: Path, config: RunConfig) -> RunFolder:
    train = partial(probe, stop=threading.Event())
    return stored(folder, "probe", unprotected(config), train)


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
    data = write_tiny_npz(tmp_path / "tiny.npz")
    settings = {"dct_size": size, "clip_bound": 0.05}
    settings |= {"noise_multiplier": 0.0, "clients_per_round": 1}
    config = tiny_config(data=data, **settings)
    found = read_norms(probed(tmp_path, config))
    assert len(found) == len(released) == 3
    for norms, values in zip(found, released, strict=True):
        assert norms.after == pytest.approx(values, rel=1e-5)


def test_norms_are_only_read_from_a_folder_that_is_marked(tmp_path):
    config = tiny_config(output=str(tmp_path / "run"))
    folder = RunFolder.create(config)
    line = {"round": 1, "before": [1.0], "after": [1.0]}
    (folder.path / gradient_norms.FILE).write_text(json.dumps(line) + "\n")
    assert_refused("NOT-PRIVATE", read_norms, folder)


def test_many_norms_are_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_norms, "MOST_NORMS", 5)
    data = write_tiny_npz(tmp_path / "tiny.npz")
    config = tiny_config(data=data, num_rounds=1)
    (norms,) = read_norms(probed(tmp_path, config))
    assert len(norms.before) == len(norms.after) == 5


# ------------------------------------------------------------------ samples, bad input


def test_samples_of_runs_side_by_side(flags, tmp_path, monkeypatch):
    assert figures.main(["iterations", *flags]) == 0
    (run,) = (tmp_path / "out" / "runs").iterdir()
    forbid_training(monkeypatch)
    output = f"--output={tmp_path / 'grids'}"
    assert figures.main(["samples", output, str(run), str(run)]) == 0
    assert (tmp_path / "grids" / "samples.png").read_bytes()[1:4] == b"PNG"
    assert figures.main(["samples", str(tmp_path), output]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["norm"], "figure = 'norm'"),
        (["samples"], "RUN"),
        (["norms", "somewhere"], "RUN"),
        (["iterations", "--adversary=nobody"], "adversary = 'nobody'"),
        (["iterations", "--scale=huge"], "scale = 'huge'"),
        (["noise-scale", "--values=a"], "values = 'a'"),
        (["norms", "--values=1"], "values = 1: only curves vary a setting"),
        (["iterations", "--count=9"], "count = 9: give --count at least 10"),
        (["iterations", "--set=rounds=3"], "rounds"),
        (["iterations", "--data=npz:nowhere.npz"], "nowhere.npz"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    arguments, words, tmp_path, capsys
):
    output = f"--output={tmp_path / 'out'}"
    assert figures.main([*arguments, output]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_norm_pictures_say_that_they_are_not_private():
    norms = [Norms(1, np.array([0.5, 2.0]), np.array([0.5, 1.0]))]
    drawing = figures.figure_drawing
    for draw in (drawing.norm_dynamics, drawing.norm_histograms):
        assert draw(norms, 1.0, "x").get_supxlabel().startswith("NOT PRIVATE")
