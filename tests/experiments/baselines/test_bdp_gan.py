"""BDP-GAN: the Bayesian line is of its own gradients, and never a target."""

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from baselines import small_run, small_trainer, train
from experiments.baselines import bayesian_accounting as bayesian
from experiments.baselines import bdp_gan
from experiments.baselines.baseline import Facts
from experiments.baselines.baseline_run import open_run
from experiments.baselines.bdp_gan import BAYESIAN_COSTS, BdpGan
from experiments.baselines.dp_sgd_gan import DPSGDGan, LayeredDiscriminator
from fedgs.files import read_json_lines
from fedgs.gan.models import build
from fedgs.randomness import stream
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from tiny import record_calls

pytestmark = pytest.mark.usefixtures("coarse_poisson")

FACTS = Facts(12, 480, 40, 10, (1, 16, 16))
DELTA = 1e-5


def test_distances_are_the_norms_of_single_clipped_gradients(tmp_path):
    training = small_trainer("bdp-gan", tmp_path, clip=0.05)
    found = training.gradient_norms(0)
    plain = build(LayeredDiscriminator, training.config, 0)
    plain.load_state_dict(training.discriminator._module.state_dict())
    drawn = stream(training.config.noise_seed, "bayesian-records", 0)
    expected = []
    for row in drawn.choice(len(training.labels), 32, replace=False):
        one = slice(row, row + 1)  # one record at a time, by torch's autograd
        score = plain(training.images[one], training.labels[one])
        grads = torch.autograd.grad(F.softplus(-score).sum(), list(plain.parameters()))
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        expected.append(min(0.05, float(norm)))
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(np.unique(training.gradient_norms(1).round(7))) > 1


def test_images_of_an_estimate_are_drawn_by_no_public_seed(tmp_path, monkeypatch):
    drawn = record_calls(monkeypatch, bdp_gan, "stream")
    for name, noise_seed in (("a", None), ("b", None), ("c", 5), ("d", 5)):
        training = small_trainer("bdp-gan", tmp_path / name, noise_seed=noise_seed)
        training.gradient_norms(0)
    seeds = [seed for seed, *_ in drawn]
    assert [len(bytes.fromhex(seed)) for seed in seeds[:2]] == [32, 32]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [5, 5]


def test_estimating_changes_nothing_of_the_training(tmp_path):
    training, alone = (small_trainer("bdp-gan", tmp_path / name) for name in "ab")
    for index in range(2):
        training.step(index)
        DPSGDGan.step(alone, index)
    first, second = training.state(), alone.state()
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_lines_are_bayesian_classical_and_published(tmp_path):
    training = small_trainer("bdp-gan", tmp_path)
    events = [training.step(index) for index in range(4)]
    rows = BdpGan.guarantees(training.settings, FACTS, events, DELTA)
    assert [(r.label, r.unit, r.relation) for r in rows] == [
        ("distributional", "record", "add-or-remove"),
        ("valid", "record", "add-or-remove"),
        ("valid", "user", "add-or-remove"),
        ("as published", "record", "add-or-remove"),
    ]
    costs = np.sum([event[BAYESIAN_COSTS] for event in events], axis=0)
    assert rows[0].epsilon == bayesian.bayesian_epsilon(costs, 4, DELTA)
    assert any("outlier" in condition for condition in rows[0].conditions)
    assert all(
        "nobody is told the Bayesian costs" in row.conditions[-1] for row in rows[1:3]
    )
    assert rows[3].epsilon <= rows[0].epsilon
    assert rows[2].epsilon > rows[1].epsilon


def test_costs_without_noise_are_in_the_private_folder_alone(tmp_path):
    run, data = small_run("bdp-gan", tmp_path / "run", noise_seed=None)
    train(run, data)
    run = open_run(tmp_path / "run")
    files = [path for path in run.folder.path.rglob("*") if path.is_file()]
    telling = [path for path in files if b"bayesian_costs" in path.read_bytes()]
    assert {path.parent.name for path in telling} == {"private"}
    lines = read_json_lines(tmp_path / "run" / "private" / "costs.jsonl")
    assert [line["line"] for line in lines] == [*range(1, len(run.events) + 1)]
    costs = np.sum([line[BAYESIAN_COSTS] for line in lines], axis=0)
    first, *others = run.guarantees(with_private=True)
    epsilon = bayesian.bayesian_epsilon(costs, len(lines), run.config.delta)
    assert (first.label, first.epsilon) == ("distributional", epsilon)
    # What may be published, report and benchmark among it, says the classical ones.
    assert run.guarantees() == others[:-1]
    shutil.rmtree(tmp_path / "run" / "private")
    assert run.guarantees(with_private=True) == others[:-1]


def test_a_repeated_step_counts_with_the_costs_of_each_attempt(tmp_path, monkeypatch):
    run, data = small_run("bdp-gan", tmp_path / "run", checkpoint_every=1)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # counted, and then lost
        patch.setattr(RunFolder, "save_checkpoint", crash)
        with pytest.raises(KeyboardInterrupt):
            train(run, data)
    train(run, data)
    lines = read_json_lines(tmp_path / "run" / "private" / "costs.jsonl")
    assert [line["line"] for line in lines] == [*range(1, len(run.events) + 1)]
    assert len(lines) == run.config.num_rounds + 1
    costs = np.sum([line[BAYESIAN_COSTS] for line in lines], axis=0)
    stated = run.guarantees(with_private=True)[0].epsilon
    assert stated == bayesian.bayesian_epsilon(costs, len(lines), run.config.delta)


def test_without_noise_no_line_is_bounded(tmp_path):
    training = small_trainer("bdp-gan", tmp_path, noise_per_clip=0.0)
    rows = BdpGan.guarantees(training.settings, FACTS, [training.step(0)], DELTA)
    assert {row.epsilon for row in rows} == {None}


def test_too_few_images_for_an_estimate_are_refused(tmp_path):
    few = {"max_images_per_user": 2}
    problem = "data has 24 images: .* give more"
    assert_refused(problem, small_run, "bdp-gan", tmp_path / "run", few)
