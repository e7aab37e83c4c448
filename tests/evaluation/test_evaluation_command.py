"""`fedgs evaluate`: its numbers, files and refusals, on a tiny data set."""

import contextlib
import dataclasses
import json
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import printed, refused
from evaluation_data import labelled, refuse, write_mnist
from fedgs.app.evaluation import evaluate as evaluation
from fedgs.app.evaluation import scoring
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.app.evaluation.score_tables import classifier_table
from fedgs.config.run_config import RunConfig
from fedgs.data import sources
from fedgs.data.sources import place_of
from fedgs.errors import UserError
from fedgs.evaluation import classifiers, inception, lenet, quality
from fedgs.gan.models import build_generator
from fedgs.runs import sample
from fedgs.runs.run_folder import RunFolder
from tiny import record_calls, tiny_config

QUICK = ("lda", "gaussian_nb")  # in the place of the thirteen
CLASSIFIERS = ("--metrics", "images,classifiers")
KEYS = {"fid_lenet_mnist", "is_lenet_mnist_10_splits", "lenet_mnist_test_accuracy"}
KEYS |= {f"{n}_lenet_mnist_k5" for n in ("precision", "recall", "density", "coverage")}
KEYS |= {"memorisation_ratio", "memorised_share", "downstream_cnn_accuracy"}


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    write_mnist(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One cache for the file, so that its classifier is trained once per image size."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGS_CACHE_DIR", str(folder))
        patch.setenv("TORCH_HOME", str(folder))
        yield folder


@pytest.fixture
def fedgs(fedgs, monkeypatch, real, tmp_path):
    """Runs `fedgs evaluate SOURCE --data mnist ...` in a new working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(classifiers, "CLASSIFIERS", QUICK)

    def evaluate(source, *arguments, names_data=True):
        if "--data" not in arguments and names_data:
            arguments += ("--data", "mnist", "--data-dir", real)
        return fedgs("evaluate", source, *arguments)

    return evaluate


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A finished run of a generator that was never trained."""
    return finished_run(tmp_path / "run")


def finished_run(path: Path, **settings: object) -> RunFolder:
    values = {"data": "mnist", "num_classes": 10, "output": str(path)} | settings
    config = tiny_config(**values)
    folder = RunFolder.create(config)
    state = build_generator(config, 0).state_dict()
    with contextlib.closing(folder.ledger()) as ledger:
        folder.save_generator(state, state, ledger)
    return folder


def npz(path: Path, count: int = 60) -> Path:
    images, labels = labelled(count, 5, side=28)
    np.savez(path, images=images, labels=labels)
    return path


def result_of(done: tuple[int, str, str]) -> dict:
    return json.loads(printed(done))


# ------------------------------------------------------------------ results


def test_run_is_evaluated_by_every_metric_in_its_folder(fedgs, run, monkeypatch):
    quick = dataclasses.replace(evaluation.FULL, num_steps=10)
    monkeypatch.setattr(evaluation, "FULL", quick)
    done = fedgs(run.path, "-n", 40, "--json")
    found, err = result_of(done), done[2]
    assert set(found) >= KEYS
    assert "fid_inception_v3_pool3" not in found  # its weights are not there
    assert found["num_synthetic"] == found["downstream_cnn_num_synthetic"] == 40
    assert (found["num_real"], found["num_test"]) == (120, 60)
    assert "not covered by the epsilon" in found["privacy"]
    assert set(found["classifiers"]["accuracy"]) == set(QUICK)
    assert set(found["label_efficiency"]) == {"generator", "annotator"}
    assert list(found["label_efficiency"]["annotator"]) == ["10", "30"]
    assert json.loads((run.path / "evaluations.jsonl").read_text()) == found
    with Image.open(run.path / "evaluation" / "samples.png") as picture:
        assert picture.size[0] > 100
    assert "classifiers: 2 of 2" in err
    assert "label efficiency: 4 of 4" in err


def test_file_of_samples_gives_the_numbers_of_its_run(fedgs, run, tmp_path):
    labels = sample.uniform_labels(run.config, 40, 0)
    images = sample.draw(run.config, sample.load_generator(run), labels, 0)
    np.savez(tmp_path / "s.npz", images=images, labels=labels)
    chosen = ("-n", 40, *CLASSIFIERS, "--json")
    found = [result_of(fedgs(path, *chosen)) for path in (run.path, "s.npz")]
    assert found[0].pop("round") == 0
    for result in found:
        del result["source"], result["seconds"], result["reading"]
    assert found[0] == found[1]
    assert (tmp_path / "s.evaluations.jsonl").exists()
    assert (tmp_path / "s.evaluation" / "samples.png").exists()


def test_good_images_score_better_than_noise_and_the_real_ones_are_copies(
    fedgs, tmp_path
):
    good, noise = (
        result_of(fedgs(source, "-n", 60, *CLASSIFIERS, "--json"))
        for source in (npz(tmp_path / "good.npz"), "noise")
    )
    name = "lenet_mnist"
    assert 0 < good[f"fid_{name}"] < 0.5 * noise[f"fid_{name}"]
    assert noise[f"fid_{name}"] > 1
    for score in (f"is_{name}_10_splits", f"precision_{name}_k5"):
        assert good[score] > noise[score]
    assert good["classifiers"]["average"] > 0.8
    assert good["classifiers"]["average"] > noise["classifiers"]["average"] + 0.3
    assert 0.7 < good["memorisation_ratio"] < noise["memorisation_ratio"]
    assert (tmp_path / "noise-mnist.evaluations.jsonl").exists()
    chosen = ("--metrics", "images", "--output", tmp_path / "here", "--json")
    found = result_of(fedgs("real", *chosen))
    assert found["fid_lenet_mnist"] == pytest.approx(0, abs=1e-3)
    assert found["precision_lenet_mnist_k5"] == found["memorised_share"] == 1
    assert found["memorisation_ratio"] == pytest.approx(0, abs=0.05)
    assert (tmp_path / "here" / "evaluations.jsonl").exists()
    assert (tmp_path / "here" / "evaluation" / "samples.png").exists()


def test_second_evaluation_trains_nothing_and_adds_a_line(fedgs, tmp_path, monkeypatch):
    path = npz(tmp_path / "s.npz", count=61)  # no other test has trained on these
    trained = record_calls(monkeypatch, classifiers, "train_and_test")
    fedgs(path, *CLASSIFIERS)
    assert len(trained) == 2
    networks = record_calls(monkeypatch, lenet, "fit")
    _, _, err = fedgs(path, *CLASSIFIERS)
    assert len(trained) == 2
    assert not networks
    assert err.count("(cached)") == 2
    first, second = (tmp_path / "s.evaluations.jsonl").read_text().splitlines()
    first, second = json.loads(first), json.loads(second)
    assert min(first.pop("seconds"), second.pop("seconds")) >= 0
    assert first == second


def test_interrupted_command_continues_by_classifier(fedgs, tmp_path, monkeypatch):
    path, original = npz(tmp_path / "s.npz", count=62), classifiers.train_and_test
    release, fits = threading.Event(), []
    monkeypatch.setattr(classifiers, "NUM_WORKERS", 1)

    def interrupted(task: classifiers.Task, name: str) -> classifiers.Result:
        if name != "lda":
            return original(task, name)
        fits.append(threading.current_thread())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        release.wait(60)
        raise RuntimeError("nobody reads this result")

    monkeypatch.setattr(classifiers, "train_and_test", interrupted)
    # A shell's background job ignores SIGINT, and so would this process.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = fedgs(path, "--metrics", "classifiers")
    finally:
        signal.signal(signal.SIGINT, before)
    (fit,) = fits
    assert fit.is_alive()  # the command did not wait for it,
    assert fit.daemon  # and the interpreter does not either
    release.set()
    assert code == 1
    assert err.endswith("stopped; continue with the same command\n")
    assert list(tmp_path.iterdir()) == [path]  # no empty results
    monkeypatch.setattr(classifiers, "train_and_test", original)
    code, _, err = fedgs(path, "--metrics", "classifiers")
    assert code == 0
    assert re.search(r"1 of 2, gaussian_nb .* \(cached\)", err)
    assert re.search(r"2 of 2, lda .* s\)", err)


def test_scores_are_shown_as_they_come_and_the_slowest_come_last(
    fedgs, tmp_path, monkeypatch
):
    def stopped(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(scoring, "label_efficiency", stopped)
    path = npz(tmp_path / "s.npz")
    code, out, err = fedgs(path, "--metrics", "label-efficiency,images,cnn")
    assert (code, out) == (1, "")
    cnn = err.index("\ndownstream_cnn_accuracy 0.")
    fid = err.index(", fid_lenet_mnist ")
    assert cnn < fid < err.index("stopped; continue with the same command")
    assert not (tmp_path / "s.evaluations.jsonl").exists()


def test_calibrated_divides_by_what_was_evaluated_of_the_real_images(
    fedgs, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluation, "FAST", evaluation.Sizes(30, 80, 45, 20))
    path = npz(tmp_path / "s.npz")
    # A seed of which no other test has trained any.
    chosen = ("--metrics", "classifiers", "--seed", "9", "--fast", "--json")
    results = [result_of(fedgs(source, *chosen)) for source in (path, "real", path)]
    sizes = [results[2][f"num_{what}"] for what in ("synthetic", "real", "test")]
    assert sizes == [30, 80, 45]
    none, real, after = (result["classifiers"] for result in results)
    assert none["calibrated"] == none["real_accuracy"] == {}
    assert after["real_accuracy"] == real["accuracy"]
    ratios = {n: after["accuracy"][n] / real["accuracy"][n] for n in real["accuracy"]}
    assert after["calibrated"] == pytest.approx(ratios)
    assert after["calibrated_average"] == pytest.approx(np.mean([*ratios.values()]))
    assert real["calibrated_average"] == 1


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"data": "mnist", "fast": True}, "lenet_mnist_fast"),
        ({"data": "npz:a-b.npz"}, "lenet_npz"),
        ({"data": "femnist", "reading": {"classes": "merged"}}, "lenet_femnist_merged"),
    ],
)
def test_scores_that_cannot_be_compared_have_other_names(asked, name):
    assert EvaluationRequest("noise", **asked).network == name


def test_table_shows_the_papers_columns_and_accuracies():
    names = classifiers.CLASSIFIERS
    accuracy = dict.fromkeys(names, 0.5)
    table = classifier_table("", "mnist", {"accuracy": accuracy})
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["bernoulli_nb"] == ["0.500", "0.840", "0.770"]
    assert rows["average"] == ["0.500", "0.879", "0.596"]  # A1: 0.88 and 0.60
    failed = {"accuracy": {"mlp": 0.5}, "failed": dict.fromkeys(names[1:], "no")}
    table = classifier_table("", "mnist", failed)
    assert [row[0] for row in table.rows] == ["mlp"]


def test_a_run_is_compared_with_its_own_data_by_default(fedgs, tmp_path, real):
    gone = str(tmp_path / "gone")
    run = finished_run(tmp_path / "run", data_dir=gone)
    chosen = ("-n", 40, "--metrics", "cnn", "--json")
    refused(fedgs(run.path, *chosen, names_data=False), gone)
    found = result_of(fedgs(run.path, *chosen, "--data-dir", real, names_data=False))
    assert found["data"] == "mnist"


def test_a_run_is_compared_with_its_data_as_it_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"background": "light", "image_channels": 3, "data_dir": "x"}
    settings |= {"test_fraction": 0.25, "num_classes": 7}
    config = tiny_config(data=f"npz:{tmp_path}/a.npz", **settings)
    (tmp_path / "alias.npz").symlink_to(tmp_path / "a.npz")
    spellings = (config.data, "npz:a.npz", "npz:x/../a.npz", "npz:alias.npz")
    for data in spellings:
        same = evaluation.reading_of(config, data)
        assert {name: getattr(same, name) for name in settings} == settings
        assert same.image_size == config.image_size
    other = evaluation.reading_of(config, "fashion-mnist")
    assert (other.background, other.test_fraction) == ("auto", 0)
    assert (other.num_classes, other.data_dir) == (None, "x")
    assert (other.image_size, other.image_channels) == (config.image_size, 3)


def test_one_classifier_that_fails_costs_no_other_result(fedgs, tmp_path):
    path, chosen = tmp_path / "s.npz", ("--metrics", "classifiers")
    images = np.random.default_rng(0).random((10, 28, 28), np.float32)
    np.savez(path, images=images, labels=np.arange(10))  # too few for some
    said = "classifiers = lda: it cannot be trained on 10 images"
    for _ in range(2):  # what failed is tried again
        code, out, err = fedgs(path, *chosen)
        assert code == 0
        assert said in " ".join(out.split())
    assert err.count("(cached)") == 1
    *_, last = (tmp_path / "s.evaluations.jsonl").read_text().splitlines()
    found = json.loads(last)["classifiers"]
    assert found["failed"]["lda"].startswith(said)
    assert list(found["accuracy"]) == ["gaussian_nb"]
    assert found["average"] is None


def without_network() -> None:
    raise UserError("download = True: no network; leave out --download")


def test_download_is_of_inceptions_weights_too_and_of_images_alone(
    fedgs, tmp_path, monkeypatch
):
    """Data that nobody downloads need no folder, and a run's own flag counts not."""
    monkeypatch.setattr(inception, "download_weights", lambda: None)  # no network
    fetched = record_calls(monkeypatch, inception, "download_weights")
    original = evaluation.find_spec
    names = {evaluation.FIDELITY}
    monkeypatch.setattr(evaluation, "find_spec", lambda n: n in names or original(n))
    images, labels = labelled(60, 5, side=28)
    test = tmp_path / "test.npz"
    np.savez(test, images=images, labels=labels)
    own = ("--data", f"npz:{npz(tmp_path / 'real.npz')}", "--test", f"npz:{test}")
    path = npz(tmp_path / "s.npz")
    own += ("--fast", "--download", "--metrics")
    assert fedgs(path, *own, "cnn")[0] == 0
    assert fetched == []
    code, out, err = fedgs(path, *own, "images")
    assert code == 0
    assert len(fetched) == 1
    assert f"fetching {inception.WEIGHTS_NAME}" in err
    assert "--download fetches them" in out
    loaded = finished_run(tmp_path / "run", download=True, data_dir=str(tmp_path))
    fedgs(loaded.path, "--metrics", "images", "-n", 40, "--fast")
    assert len(fetched) == 1
    # What cannot be fetched leaves no file of results.
    results = tmp_path / "s.evaluations.jsonl"
    results.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(inception, "download_weights", without_network)
        code, out, err = fedgs(path, *own, "images")
    assert (code, out) == (2, "")
    assert "no network" in err
    assert not results.exists()
    # Without the package that needs them, there is nothing to fetch.
    monkeypatch.setattr(evaluation, "find_spec", {"torchmetrics": 1}.get)
    assert fedgs(path, *own, "images")[0] == 0
    assert len(fetched) == 1
    monkeypatch.setattr(inception, "find_weights", inception.weights_path)
    refused(fedgs(path, *own, "images"), "it needs torch-fidelity; run `pip install")


def test_undefined_scores_are_null_in_the_json(fedgs, tmp_path, monkeypatch):
    scores = {"memorisation_ratio": np.inf, "memorised_share": np.nan}
    monkeypatch.setattr(quality, "memorisation", lambda *images: scores)
    chosen = ("--metrics", "images")
    out = fedgs(npz(tmp_path / "s.npz"), *chosen)[1]
    assert re.search(r"memorisation_ratio\W+undefined", out)
    assert re.search(r"paper_classifier_test_accuracy\W+0\.9925", out)
    assert "fid_inception_v3_pool3 was not computed" in out
    line = (tmp_path / "s.evaluations.jsonl").read_text()
    printed = fedgs(tmp_path / "s.npz", *chosen, "--json")[1]
    for text in (line, printed):
        found = json.loads(text, parse_constant=pytest.fail)
        assert found["memorisation_ratio"] is found["memorised_share"] is None
    assert found["reading"]["test_fraction"] == 0.0
    assert found["versions"]["torch"]


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("own", "arguments", "named"),
    [
        (0.0, ("--test-fraction", "0.3"), "test_fraction = 0.3:"),
        (0.2, ("--test-fraction", "0.3"), "test_fraction = 0.3:"),
        (0.0, (), "data = 'digits':"),
    ],
)
def test_a_run_is_not_tested_on_its_training_data(
    fedgs, tmp_path, own, arguments, named
):
    run = finished_run(tmp_path / "run", data="digits", test_fraction=own)
    refused(fedgs(run.path, *arguments, names_data=False), named)


@pytest.mark.parametrize("spelling", ["npz:{}/x/../a.npz", "npz:{}/alias.npz"])
def test_another_spelling_of_the_data_is_no_other_data(fedgs, tmp_path, spelling):
    images, labels = labelled(60, 5, side=16)
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    (tmp_path / "alias.npz").symlink_to(tmp_path / "a.npz")
    settings = {"test_fraction": 0.1, "num_clients": 2, "partition": "iid"}
    run = finished_run(tmp_path / "run", data=f"npz:{tmp_path / 'a.npz'}", **settings)
    data = spelling.format(tmp_path)
    chosen = ("--data", data, "--test-fraction", "0.5")
    refused(fedgs(run.path, *chosen, names_data=False), "test_fraction = 0.5: the run")
    done = fedgs(run.path, "--test", data, names_data=False)
    refused(done, "test = .*: it is the run's own data, .*; give --test")


def test_a_run_on_a_folder_of_an_archive_has_the_data_of_its_data_dir(tmp_path):
    (tmp_path / "ChestXRay/NORMAL").mkdir(parents=True)
    places = []
    for data in ("chest-xray", f"chest-xray:{tmp_path}/x/../ChestXRay"):
        config = RunConfig(data=data, data_dir=str(tmp_path))
        places.append(place_of(config))
    assert places[0] == places[1]


def test_a_run_is_tested_on_a_part_of_what_it_held_out(fedgs, tmp_path):
    run = finished_run(tmp_path / "run", data="digits", test_fraction=0.3)
    chosen = ("-n", 40, "--metrics", "cnn", "--json", "--test-fraction", 0.2)
    found = result_of(fedgs(run.path, *chosen, names_data=False))
    assert (found["num_test"], found["round"]) == (round(0.2 * 1797), 0)


def test_data_that_hold_out_their_test_images_are_read_once(
    fedgs, tmp_path, monkeypatch
):
    run = finished_run(tmp_path / "run", data="digits", test_fraction=0.3)
    read = record_calls(monkeypatch, sources, "read_records")
    out = printed(fedgs(run.path, "-n", 40, "--metrics", "cnn", names_data=False))
    assert len(read) == 1
    # The table shows the seconds as they were measured, to a tenth.
    seconds = json.loads((run.path / "evaluations.jsonl").read_text())["seconds"]
    assert re.search(rf"\bseconds\W+{seconds}\s", out)


def test_data_without_test_images_name_the_flag_that_gives_others(fedgs, tmp_path):
    data = f"npz:{npz(tmp_path / 'real.npz')}"
    done = fedgs("noise", "--data", data, "--metrics", "cnn")
    refused(done, "data = 'npz:", "--test npz:FILE", "--test-fraction")


def own_test(path: Path, classes: int = 3) -> str:
    """Writes test images of the user's own; returns the value of `test`."""
    images = np.full((24, 20, 20), 90, np.uint8)  # resized, as the data are
    np.savez(path, images=images, labels=np.arange(24) % classes)
    return f"npz:{path}"


def test_a_run_is_tested_on_images_of_the_users_own(fedgs, tmp_path):
    run = finished_run(tmp_path / "run", data="digits")
    test = own_test(tmp_path / "own.npz")
    chosen = ("-n", 40, "--metrics", "cnn", "--json", "--test", test)
    found = result_of(fedgs(run.path, *chosen, names_data=False))
    assert (found["num_test"], found["test"]) == (24, test)
    assert found["downstream_cnn_accuracy"] <= 8 / 24  # all images are alike
    folder = tmp_path / "pictures" / "me"
    for label in ("0", "1"):
        (folder / label).mkdir(parents=True)
        Image.new("L", (28, 28)).save(folder / label / "a.png")
    chosen = (*chosen[:-1], f"folder:{folder.parent}")
    assert result_of(fedgs(run.path, *chosen, names_data=False))["num_test"] == 2


def test_a_deployed_run_is_compared_with_no_data_that_nobody_named(fedgs, tmp_path):
    given = {"nodes": "a,b", "clients_per_node": 3, "engine": "flower"}
    run = finished_run(tmp_path / "run", **given, data="digits")
    words = "data is unset: the images of a deployed run are its clients'; give --data"
    refused(fedgs(run.path, names_data=False), words)


@pytest.mark.parametrize("flag", ["--data", "--test"])
def test_a_copy_of_what_a_run_was_trained_on_is_counted(fedgs, tmp_path, flag):
    """By its pixels: under another name nothing else tells."""
    images, labels = labelled(60, 5, side=16)
    pixels = np.rint(images * 255).astype(np.uint8)
    for name in ("a", "copy"):
        np.savez(tmp_path / f"{name}.npz", images=pixels, labels=labels)
    held_out = {"--data": 0.0, "--test": 0.25}[flag]
    data = f"npz:{tmp_path}/a.npz"
    given = {"data": data, "test_fraction": held_out, "num_classes": 3}
    run = finished_run(tmp_path / "run", **given)
    chosen = (run.path, "-n", 40, "--metrics", "cnn", "--json")
    copied = (flag, f"npz:{tmp_path}/copy.npz")
    if flag == "--data":
        copied = (*copied, "--test-fraction", 0.5)
    code, out, err = fedgs(*chosen, *copied, names_data=False)
    found = json.loads(out)
    expected = {"--data": 30, "--test": 45}[flag]  # all, and all that were not held out
    assert (code, found["num_test_copies"]) == (0, expected)
    assert f"Warning: {expected} of " in err
    # Of other images, and where the run's own data lie elsewhere, nothing is said.
    if flag == "--test":
        code, out, err = fedgs(*chosen, names_data=False)
    else:
        (tmp_path / "a.npz").unlink()
        code, out, err = fedgs(*chosen, *copied, names_data=False)
    assert (code, json.loads(out)["num_test_copies"]) == (0, 0)
    assert "Warning" not in err


def test_a_share_of_so_few_images_that_it_is_none_is_named_as_the_reason(
    fedgs, tmp_path
):
    images, labels = labelled(60, 5, side=16)
    path = tmp_path / "a.npz"
    np.savez(path, images=images, labels=labels, clients=np.arange(60))
    run = finished_run(tmp_path / "run", data=f"npz:{path}", test_fraction=0.1)
    done = fedgs(run.path, "-n", 20, names_data=False)
    refused(done, "no images are held out .*--test npz:FILE .*--test-owners")


@pytest.mark.parametrize(
    ("test", "named"),
    [
        ("mnist", "test = 'mnist':"),
        (
            "npz:no.npz",
            "test = 'npz:no.npz': it cannot be used .*no.npz does not exist",
        ),
        (11, "test = 'npz:.*': label 10, the real labels are 0 to 9"),
        (1, "the test split has one class only"),
        (None, r"test = .*a\.npz':"),
    ],
)
def test_test_images_that_do_not_fit_are_refused_in_one_line(
    fedgs, tmp_path, test, named
):
    settings = {"data": "digits"}
    if test is None:
        settings["data"] = test = own_test(tmp_path / "a.npz")
    if isinstance(test, int):
        test = own_test(tmp_path / "b.npz", test)
    run = finished_run(tmp_path / "run", **settings)
    done = fedgs(run.path, "--test", test, "-n", 20, names_data=False)
    assert refused(done, named).count("Error") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-n", "9"], "count = 9 images:"),
        (["--metrics", "images,fidd"], "metrics = 'fidd':"),
        (["--data", "digits"], "data = 'digits':"),
        (["--seed", "4294967296"], "seed = 4294967296:"),
        (["--device", "cuda"], "device = 'cuda':"),
        (["--output", __file__, "-n", "20"], "output = .*; give --output a fold"),
    ],
)
def test_bad_argument_is_refused_before_anything_is_written(
    fedgs, tmp_path, arguments, named
):
    refused(fedgs("noise", *arguments), named)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("in_the_way", ["s.evaluations.jsonl", "s.evaluation", "out"])
def test_results_that_cannot_be_written_are_refused_before_the_work(
    fedgs, tmp_path, monkeypatch, in_the_way
):
    path = npz(tmp_path / "s.npz", count=62)
    obstacle = tmp_path / in_the_way
    output = ()
    if in_the_way == "out":
        output = ("--output", obstacle / "folder")
    if obstacle.suffix == ".jsonl":
        obstacle.mkdir()
    else:
        obstacle.write_text("kept")
    monkeypatch.setattr(classifiers, "train_and_test", refuse)
    error = refused(fedgs(path, "--metrics", "classifiers", *output))
    assert "cannot be written" in error
    assert set(tmp_path.iterdir()) == {path, obstacle}


def test_bad_source_is_refused(fedgs):
    for count, classes, named in (
        (9, 3, "s.npz = 9 images: fewer than the 10 splits"),
        (20, 1, "s.npz: .*one class .label 0.*--metrics images"),
    ):
        images = np.full((count, 28, 28), 0.5, np.float32)
        np.savez("s.npz", images=images, labels=np.arange(count) % classes)
        refused(fedgs("s.npz"), named)
    refused(fedgs("s.npz", names_data=False), "data is unset: .*give --data")
    assert fedgs("s.npz", "--metrics", "images")[0] == 0  # as images they have scores


@pytest.mark.parametrize(("name", "value"), [("image_size", 32), ("image_channels", 3)])
def test_real_images_of_another_shape_than_the_synthetic_are_refused(
    fedgs, tmp_path, run, name, value
):
    for source in (npz(tmp_path / "s.npz"), run.path):
        done = fedgs(source, f"--{name.replace('_', '-')}", value)
        refused(done, rf"{name} = {value}: .* has \d+, and the real images")


def test_missing_package_is_named_at_once(fedgs, monkeypatch):
    original = evaluation.find_spec
    monkeypatch.setattr(
        evaluation, "find_spec", lambda n: None if n == "xgboost" else original(n)
    )
    refused(fedgs("noise"), r"xgboost is not installed; run `pip install 'fedgs\[eval")
    assert fedgs("noise", "-n", 20, "--metrics", "images")[0] == 0
