"""The loop: what is counted when a run is killed, and what a target then allows."""

import threading

import pytest

from baselines import small_run, train
from experiments.baselines.baseline_run import open_run
from experiments.baselines.loop import BaselineLedger, BaselineRelease
from fedgs.errors import UserError
from fedgs.privacy.gaussian import epsilon_from_mu
from fedgs.round.run import RunStopped
from fedgs.runs.run_folder import RunFolder
from runs import at_round, keep_lines

STEPS = "baselines:Steps"


@pytest.fixture(autouse=True)
def _trusted(monkeypatch):
    monkeypatch.setenv("FEDGS_METHODS", STEPS)


def killed_before_its_checkpoint(run, data, monkeypatch) -> None:
    """The last commit gets its events to the disk, and nothing else."""

    def kill(self, *arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", kill)
        with pytest.raises(KeyboardInterrupt):
            train(run, data)


def rounds(run) -> list[int]:
    return [release.round for release in run.folder.read_ledger(BaselineLedger).events]


def test_a_step_that_is_repeated_after_a_crash_counts_again(tmp_path, monkeypatch):
    run, data = small_run(STEPS, tmp_path / "run", checkpoint_every=4)
    killed_before_its_checkpoint(run, data, monkeypatch)
    train(run, data)
    # A picture is due after every step of four, so one step was counted and lost.
    assert rounds(run) == [1, 1, 2, 3, 4]
    spent = open_run(tmp_path / "run").guarantees()[0].epsilon
    assert spent == epsilon_from_mu(5**0.5, 1e-5)


def test_with_a_target_nothing_is_paid_for_twice(tmp_path, monkeypatch):
    run, data = small_run(STEPS, tmp_path / "run", {"target_epsilon": 9.0})
    killed_before_its_checkpoint(run, data, monkeypatch)
    lines = len(run.events)
    with pytest.raises(UserError, match="target_epsilon = 9"):
        train(run, data)
    assert len(run.events) == lines


def test_with_a_target_the_last_checkpoint_is_the_product(tmp_path, monkeypatch):
    run, data = small_run(STEPS, tmp_path / "run", {"target_epsilon": 9.0})
    stop = threading.Event()
    with pytest.raises(RunStopped):
        train(run, data, at_round(2, stop.set), stop)
    killed_before_its_checkpoint(run, data, monkeypatch)
    with pytest.raises(RunStopped, match="the generator of step 2 is written"):
        train(run, data)
    assert run.folder.is_finished
    assert rounds(run) == [1, 2, 3]


def test_a_ledger_that_lost_lines_is_refused(tmp_path):
    train(*small_run(STEPS, tmp_path / "run"))
    keep_lines(tmp_path / "run" / "ledger.jsonl", 2)
    with pytest.raises(UserError, match=r"line 2 is the last, .* saw 4"):
        open_run(tmp_path / "run").guarantees()


def test_a_ledger_of_another_method_is_refused(tmp_path):
    train(*small_run(STEPS, tmp_path / "run"))
    path = tmp_path / "run" / "baseline.json"
    path.write_text(path.read_text().replace(STEPS, "wgan-gp"))
    with pytest.raises(UserError, match=r"baseline.json: it is not what the run began"):
        open_run(tmp_path / "run").guarantees()


@pytest.mark.parametrize("wrong", [{"round": 0}, {"event": 3}, {"round": "1"}])
def test_a_release_is_checked(wrong):
    values = {"round": 1, "event": {}}
    with pytest.raises(UserError, match=next(iter(wrong))):
        BaselineRelease(**values | wrong)
