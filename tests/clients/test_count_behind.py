"""A client's own count that went back is seen, whatever releases and whoever joined."""

import shutil
from pathlib import Path

import pytest

from deployed_grid import Deployment
from fedgs.federation.training import RunStopped
from runs import Report, num_answers

BEHIND = "own count was rolled back or deleted: it has no release of round"


def goes_back(run: Deployment, index: int, backup: Path) -> Report:
    """A client's state of round 1 comes back after round 2, while the run goes on."""
    client = run.clients[index]

    def report(metrics: dict) -> None:
        if "fit_step" in metrics:
            return
        if metrics["round"] == 1:
            shutil.copytree(client.state_dir, backup)
        if metrics["round"] == 2:
            shutil.rmtree(client.state_dir)
            shutil.copytree(backup, client.state_dir)
            client.restart()

    return report


def error_of(run: Deployment, index: int) -> str:
    return (run.clients[index].state_dir / "error.log").read_text()


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("full participation", {"min_nodes": 2}),
        ("moments", {"num_rounds": 3}),
        ("moments", {"num_rounds": 3, "min_nodes": 2}),
    ],
)
def test_a_count_that_goes_back_while_a_run_goes_on_is_refused(
    deploy, tmp_path, mode, settings
):
    run = deploy(mode=mode, **settings)
    report = goes_back(run, 1, tmp_path / "backup")
    if "min_nodes" in settings:
        run.start(report)
        assert set(num_answers(run.folder)) == {3, 2}
    else:
        with pytest.raises(RunStopped, match="b-clinic failed; its own error"):
            run.start(report)
    assert run.counted(1) == [1]
    assert f"{BEHIND} 2 of run" in error_of(run, 1)


@pytest.mark.slow
def test_a_killed_client_with_an_older_state_answers_no_more(deployment):
    """Real processes; the run goes on meanwhile, without it."""
    live = deployment
    server, clients = live.serve(), {name: live.join(name) for name in live.names}
    submitted = live.start_run(num_rounds=200, min_nodes=1, round_timeout=15)
    state, backup = live.folder / "fedgs-client-b", live.folder / "backup"
    count = state / "releases" / "releases-00000.jsonl"
    live.until_round(3, server, submitted, *clients.values())
    shutil.copytree(state, backup)
    live.until_round(6, server, submitted, *clients.values())
    live.machines.kill(clients["b"])
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    before = count.read_bytes()
    client = live.join("b")
    log = state / "error.log"
    live.until(log.exists, server, submitted, client)
    live.until_next_round(server, submitted, client)
    live.until_next_round(server, submitted, client)
    assert BEHIND in log.read_text()
    assert count.read_bytes() == before
