"""`fedgs baseline`, and the other commands with a run of it."""

import json
import subprocess
import sys

import pytest

from baselines import DIGITS
from command_line import flags, printed, refused
from fedgs.baselines import METHODS

TINY = DIGITS | {"steps": 3, "batch_size": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory, exit_code):
    path = tmp_path_factory.mktemp("baseline") / "run"
    assert exit_code("baseline", "wgan-gp", *flags(**TINY, output=path)) == 0
    return path


def test_the_list_names_every_method_with_its_unit(fedgs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = printed(fedgs("baseline", "--list"))
    assert all(name in out for name in METHODS)
    assert "who runs it sees all images" in out


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_help_of_a_method_has_its_settings_and_those_of_a_run(fedgs, name):
    out = printed(fedgs("baseline", name, "--help"))
    for flag in ("--target-epsilon", "--max-images-per-user", "--data", "--seed"):
        assert flag in out


def test_privacy_of_a_run_without_noise_says_none(fedgs, run):
    assert "epsilon: none" in printed(fedgs("privacy", run))
    found = json.loads(printed(fedgs("privacy", run, "--json")))
    assert (found["method"], found["unit"], found["guarantees"]) == (
        "wgan-gp",
        "none",
        [],
    )


def test_samples_and_a_finished_run(fedgs, run, tmp_path):
    out = printed(fedgs("sample", run, "-n", 5, "-o", tmp_path / "five.npz"))
    assert out.startswith("5 images in")
    assert "is finished" in printed(fedgs("resume", run))


def test_what_a_baselines_run_does_not_take_is_refused(fedgs, run):
    refused(fedgs("audit", run), "RUN = .*: wgan-gp releases nothing private")
    refused(fedgs("privacy", run, run), "RUN = .*: a baseline's run is accounted alone")
    refused(fedgs("privacy", run, "--at-epsilon", 1), "at_epsilon = 1.0: RUN is of")
    refused(fedgs("privacy", run, "--num-rounds", 1), "num_rounds = 1: RUN is of")
    refused(fedgs("privacy", run, "--delta", 2), "delta = 2.0: give --delta")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("wgan",), "NAME = 'wgan': give one of"),
        (("wgan-gp", "--target-epsilon", 3), "target_epsilon = 3: wgan-gp adds no"),
        (("wgan-gp", "--unit", "record"), "unit = record: wgan-gp guarantees nothing"),
        (("wgan-gp", "--adversary", "server"), "adversary = server: .* is central"),
        (("wgan-gp", "--discriminators", "two"), "discriminators = 'two': give"),
        (("wgan-gp", "--beta1", 1), r"beta1 = 1\.0: give --beta1 a number below 1"),
    ],
)
def test_bad_input_is_one_line(fedgs, words, message):
    refused(fedgs("baseline", *words), message)


def test_the_command_line_starts_without_a_tensor_library():
    code = "import sys, experiments.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
