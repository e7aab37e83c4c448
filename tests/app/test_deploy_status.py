"""`fedgs deploy status`: how a run stands, by the files of its folder."""

import json
import re
import shutil
from pathlib import Path

import pytest

import runs
from fedgs.app.commands import deploy_status
from fedgs.app.commands.deploy_status import status_of, statuses_in
from fedgs.files import write_json
from fedgs.runs import epsilons
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from report_folders import make_run
from server.progress import RunProgress
from tiny import FULL_PARTICIPATION, tiny_config, tiny_data

# What a run writes down of its nodes; files of an older version lack some fields.
SAID = {
    "phase": "training",
    "time": 1.8e9,
    "waiting_for": ["hospital-b"],
    "nodes": {
        "hospital-a": {"online": True, "last_answer": 3, "reason": ""},
        "hospital-b": {
            "online": False,
            "last_answer": 2,
            "last_answer_time": 1799999999,
            "resends": 4,
            "failures": 1,
            "last_failure": "hospital-b: it did not answer in time",
            "reason": "hospital-b: it has not joined",
        },
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    output = str(tmp_path_factory.mktemp("finished") / "run")
    folder = RunFolder.create(tiny_config(**FULL_PARTICIPATION, output=output))
    runs.train(folder, data=tiny_data(folder.config))
    return folder.path


@pytest.fixture
def trained(finished, tmp_path) -> RunFolder:
    return RunFolder.open(shutil.copytree(finished, tmp_path / "run"))


def test_status_has_the_numbers_that_other_commands_print(trained):
    status = status_of(trained.path)
    found = (status["run"], status["round"], status["num_rounds"], status["released"])
    assert found == ("run", 3, 3, 3)
    stated = epsilons.of_run(trained.path)
    shown = [(e["adversary"], e["relation"], e["epsilon"]) for e in status["epsilons"]]
    assert shown == [(s.adversary, s.relation, s.epsilon) for s in stated]
    assert not any(e["guarantee"] for e in status["epsilons"])  # the noise is seeded
    assert (status["phase"], status["nodes"]) == (None, None)  # it was not deployed


def test_status_leaves_out_what_masks_would_give_and_are_not_there(tmp_path):
    path = make_run(tmp_path / "run", engine="flower")
    stated = {row.adversary for row in epsilons.of_run(path)}
    assert stated == {"release", "server", "secagg"}
    shown = {entry["adversary"] for entry in status_of(path)["epsilons"]}
    assert shown == {"release", "server"}


def test_round_is_that_of_the_checkpoint_where_metrics_were_lost(trained):
    (trained.path / "metrics.jsonl").write_text('{"round": 2}\n{"round": 3, "sec')
    assert status_of(trained.path)["round"] == 3
    shutil.rmtree(trained.path / "checkpoint")
    assert status_of(trained.path)["round"] == 2


def test_a_fit_is_shown_until_the_run_is_finished(trained):
    """It follows the last answers, and takes longer than all rounds."""
    (trained.path / ".flower").mkdir()
    steps = {"fit_step": 300, "fit_steps": 3000}
    (trained.path / ".flower" / "fit.json").write_text(json.dumps(steps))
    assert status_of(trained.path)["fit"] is None
    (trained.path / "generator.safetensors").unlink()
    status = status_of(trained.path)
    assert status["fit"] == "step 300 of 3000"
    assert ("fitting the generator", "step 300 of 3000") in deploy_status._rows(status)


def test_nobody_is_waited_for_once_all_have_answered(tmp_path):
    """Written at once: what follows says nothing for long."""
    path = tmp_path / "nodes.json"
    config = tiny_config(nodes="a,b", clients_per_node=3, engine="flower")
    found = RunProgress(path, config, "run", 1)
    found.set_joined(0)
    found.set_waiting({0: "", 1: ""})
    found.set_waiting({})
    assert json.loads(path.read_text())["waiting_for"] == []


@pytest.mark.parametrize(
    "said",
    [{"nodes": 5}, {"nodes": {"h1": {}}}, {"phase": "training"}, {"waiting_for": [1]}],
)
def test_a_damaged_record_hides_no_other_run(trained, fedgs, said):
    other = shutil.copytree(trained.path, trained.path.with_name("other"))
    (other / ".flower").mkdir()
    write_json(other / ".flower" / "nodes.json", said)
    code, out, _ = fedgs("deploy", "status", trained.path.parent, "--json")
    assert code == 1
    damaged, whole = sorted(json.loads(out), key=len)
    assert "nodes.json: it is damaged" in damaged["error"]
    assert whole["round"] == 3
    code, out, _ = fedgs("deploy", "status", trained.path.parent)
    assert (code, "cannot be read" in out) == (1, True)


def test_command_shows_nodes_and_a_broken_run_beside_others(trained, fedgs):
    torn = shutil.copytree(trained.path, trained.path.with_name("broken"))
    runs.keep_lines(torn / "ledger.jsonl", 1)
    (trained.path / ".flower").mkdir()
    write_json(trained.path / ".flower" / "nodes.json", SAID)
    code, out, _ = fedgs("deploy", "status", trained.path.parent, "--json")
    assert code == 1
    first, second = json.loads(out)
    assert sorted(first) == ["error", "run"]
    assert re.search(r"ledger.jsonl: line \d is the last, .* saw 3", first["error"])
    assert second["nodes"] == SAID["nodes"]
    code, out, _ = fedgs("deploy", "status", trained.path.parent)
    assert code == 1
    words = " ".join(out.split())
    assert "cannot be read" in words
    assert "training, as of 2027-01-15 08:00:00 UTC" in words
    assert "waiting for │ hospital-b" in words
    assert "3 of 3" in words
    assert "(NO guarantee)" in words
    assert "07:59:59" in words


def test_runs_of_a_server_are_found_by_its_state_directory(trained, tmp_path):
    def names(place: Path) -> list[str]:
        return [status["run"] for status in statuses_in(place)]

    state = tmp_path / "state"
    (state / "runs").mkdir(parents=True)
    assert_refused(f"^{state}: ", statuses_in, state)
    shutil.copytree(trained.path, state / "runs" / "digits")
    assert names(state) == names(state / "runs") == ["digits"]
    assert names(trained.path) == ["run"]
