"""What `fedgs evaluate` does: all metrics of one source of images against real ones."""

import dataclasses
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

from fedgs.app.commands.terminal import Progress
from fedgs.app.evaluation import report as evaluation_report
from fedgs.app.evaluation.request import METRICS, READING, SHAPE, EvaluationRequest
from fedgs.app.evaluation.scoring import Scoring
from fedgs.app.evaluation.scoring import Sizes as Sizes
from fedgs.config.checks import DOWNLOADED, check_data
from fedgs.config.method_settings import settings_with
from fedgs.config.run_config import RunConfig
from fedgs.data import sources
from fedgs.errors import UserError, check_names, reject
from fedgs.evaluation import downstream, images, inception, quality
from fedgs.evaluation.images import LabelledImages, RealImages
from fedgs.files import without_nan
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import check_draws_images

NEEDED = {  # package: the metrics that need it
    "torchmetrics": {"images"},
    "sklearn": {"classifiers"},
    "xgboost": {"classifiers"},
}

FIDELITY = "torch_fidelity"  # of whose network Inception's weights are
HOLDING_OUT = ("test_fraction", "test_owners")  # settings that hold images out
NATURAL_COPIES = 0.01  # share of test images; archives have an image twice now and then
FULL = Sizes()
FAST = Sizes(
    synthetic=2_000,
    real=10_000,
    test=2_000,
    neighbours=2_000,
    num_labels=(10, 100, 1000),
    num_steps=60,
)


def evaluate(request: EvaluationRequest, as_json: bool) -> dict[str, Any]:
    """Evaluates, appends one line of results, prints tables and writes a picture.

    Returns:
        The line.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: Ctrl-C (code 1); what is in the cache is not computed again.
    """
    check(request)
    evaluation_report.check_private(request)
    request = with_data(request)
    is_fetching = _fetches_weights(request)
    sizes = _sizes(request)
    started = time.monotonic()
    try:
        with Progress() as progress:
            request, real, synthetic = _load(request, progress)
            if is_fetching:
                progress.say(f"fetching {inception.WEIGHTS_NAME} unless it is there")
                inception.download_weights()
            # Scoring takes up to hours, so a full or read-only disk is found first.
            # After the download: this makes the file of results, and that may fail.
            evaluation_report.check_writable(request)
            scoring = Scoring(request, sizes, real, synthetic, progress)
            result = scoring.result()
    except KeyboardInterrupt as error:
        # Networks and classifiers are in the cache as soon as each is trained.
        print("stopped; continue with the same command", file=sys.stderr)
        raise typer.Exit(1) from error
    # A run that trains on can be evaluated again. Its round tells the lines apart.
    if _is_run(request):
        folder = RunFolder.open(request.source)
        if not folder.is_published:
            result["round"] = folder.last_round
    result["seconds"] = round(time.monotonic() - started, 1)
    # A number that is not defined becomes null: NaN is no JSON.
    result = without_nan(result)
    evaluation_report.write(request, result, real, synthetic)
    evaluation_report.show(request, result, as_json)
    return result


def check(request: EvaluationRequest) -> None:
    """Checks what needs no data.

    Raises:
        UserError: an unknown name, a count below the splits, a missing package.
    """
    check_names("metrics", request.metrics, METRICS)
    if request.count is not None:
        _check_count("count", request.count)
    if request.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda': no GPU is available; give --device cpu")
    for package, metrics in NEEDED.items():
        # Looked for and not imported, which would take seconds for each of them.
        if metrics & set(request.metrics) and find_spec(package) is None:
            raise UserError(
                f"metrics: {package} is not installed; run "
                "`pip install 'fedgs[eval,report]'`"
            )
    # Weights that are there may also be broken.
    if inception.find_weights() is not None and find_spec(FIDELITY) is None:
        raise UserError(
            f"{inception.weights_path()}: it needs torch-fidelity; run `pip install "
            "torch-fidelity`, or remove the file"
        )


def _fetches_weights(request: EvaluationRequest) -> bool:
    """Tells whether the weights of a metric are downloaded, which nothing else needs.

    A run that downloaded its data asked for no weights, so the flag is this command's.
    """
    is_asked = request.reading.get("download", False)
    return is_asked and "images" in request.metrics and find_spec(FIDELITY) is not None


def with_data(request: EvaluationRequest) -> EvaluationRequest:
    """Returns the request with its data: by default those of the run.

    Raises:
        UserError: no data where no run says which, or no run folder.
    """
    if request.data:
        return request
    if not _is_run(request):
        raise UserError(
            "data is unset: synthetic images are compared with real ones; give --data"
        )
    folder = RunFolder.open(request.source)
    if folder.is_published:
        raise UserError(
            "data is unset: a published folder does not say what it was trained on; "
            "give --data with real images to compare with"
        )
    run = folder.config
    if run.nodes is not None:
        raise UserError(
            "data is unset: the images of a deployed run are its clients'; give --data "
            "with others that you may compare with"
        )
    return dataclasses.replace(request, data=run.data)


def _is_run(request: EvaluationRequest) -> bool:
    """Tells whether the source is a run folder, not a file or a yardstick."""
    is_file = Path(request.source).suffix == ".npz"
    return not is_file and request.source not in images.YARDSTICKS


def _sizes(request: EvaluationRequest) -> Sizes:
    if request.fast:
        return FAST
    return FULL


def _load(
    request: EvaluationRequest,
    progress: Progress,
) -> tuple[EvaluationRequest, RealImages, LabelledImages]:
    """Returns the request with all settings of its data, the real and the synthetic."""
    path = Path(request.source)
    folder = None
    synthetic = None
    config = RunConfig()
    # A file or a run has images of one shape already, and the real ones must be read in
    # that shape. For a yardstick the user's flags decide.
    if path.suffix == ".npz":
        synthetic = images.read_npz(path)
        config = _with_shape(config, synthetic)
        _check_shape(request, config)
    elif _is_run(request):
        folder = RunFolder.open(path)
        check_draws_images(folder)
        config = reading_of(folder.config, request.data)
        _check_shape(request, config)
        _check_held_out(request, folder.config)
    config = dataclasses.replace(config, data=request.data, **_given(request))
    check_data(config)
    if (config.image_size or images.SMALLEST_SIDE) < images.SMALLEST_SIDE:
        raise UserError(
            f"image_size = {config.image_size}: give --image-size at least "
            f"{images.SMALLEST_SIDE}"
        )
    sizes = _sizes(request)
    seed = request.seed
    real = images.load_real(config, sizes.real, request.test)
    real = _with_copies(real, config, folder)
    _warn_of_copies(real, progress)
    # The line of results records how the data were read, defaults included, so that
    # scores are compared only with scores on the same images.
    config = _with_shape(config, real.train)
    names = [name for name in (*READING, *SHAPE) if name != "data"]
    reading = {name: getattr(config, name) for name in names}
    request = dataclasses.replace(request, reading=reading)
    if sizes.test is not None:
        # The seed is fixed: another part of the test images would give other scores.
        part = real.test.subset(sizes.test, 0, "fast")
        real = real._replace(test=part)
    count = request.count or sizes.synthetic
    if folder is not None:
        # Drawing is slow on a CPU, so no more are drawn than a metric uses.
        count = request.count or min(count, _num_used(request, real))
        stage = progress.stage("images drawn:", "image")
        synthetic = images.draw_from_run(folder, count, seed, stage)
    elif synthetic is None:
        synthetic = images.yardstick(request.source, real, seed, count)
    images.check_labels(request.source, synthetic, real.num_classes)
    synthetic = synthetic.subset(count, seed, "synthetic")
    _check_synthetic(request, synthetic)
    return request, real, synthetic


def _with_copies(
    real: RealImages,
    source: RunConfig,
    folder: RunFolder | None,
) -> RealImages:
    """Returns real images that know how many of them test on what a run has seen.

    A copy of the run's data may have another name, and hold out other images.
    """
    if folder is None or _is_own_data(source, folder.config):
        return real
    try:
        trained = images.trained_images(folder.config)
    except UserError:  # the run's data lie elsewhere
        return real
    num_copies = images.count_copies(real.test, trained)
    return real._replace(num_copies=max(num_copies, real.num_copies))


def _warn_of_copies(real: RealImages, progress: Progress) -> None:
    num_test = len(real.test.labels)
    if real.num_copies > NATURAL_COPIES * num_test:
        progress.say(
            f"Warning: {real.num_copies} of {num_test} test images have the pixels of "
            "training images, so the scores are too good; give --test images that "
            "nothing was trained on"
        )


def _given(request: EvaluationRequest) -> dict[str, Any]:
    """Returns the settings that say how the data are read, as they were given."""
    given = dict(request.reading)
    if request.data.partition(":")[0] not in DOWNLOADED:
        # Of such data, the flag asks for the weights of a metric alone.
        given.pop("download", None)
    return given


def _check_synthetic(request: EvaluationRequest, synthetic: LabelledImages) -> None:
    """Refuses images of which the metrics that are asked for cannot be computed."""
    _check_count(request.source, len(synthetic.labels))
    classes = np.unique(synthetic.labels)
    if len(classes) < 2 and set(request.metrics) != {"images"}:
        raise UserError(
            f"{request.source}: it has only one class (label {classes[0]}), but "
            "classifiers need two; give --metrics images"
        )


def _with_shape(config: RunConfig, part: LabelledImages) -> RunConfig:
    """Returns the settings with the shape that images have."""
    _, channels, side, _ = part.images.shape
    return dataclasses.replace(config, image_channels=channels, image_size=side)


def _check_shape(request: EvaluationRequest, source: RunConfig) -> None:
    """Refuses another shape than that of the synthetic images."""
    for name in SHAPE:
        value = getattr(source, name)
        given = request.reading.get(name, value)
        if given != value:
            reject(
                {name: given},
                f"{request.source} has {value}, and the real images must have the "
                "same; give other --data, or leave out",
            )


def _check_held_out(request: EvaluationRequest, run: RunConfig) -> None:
    """Refuses to test on images of owners that the run may have trained on.

    The images, or owners, of a share are a part of those of a larger one.
    """
    source = _source_of(request.data, request.reading, run)
    if not _is_own_data(source, run):
        return
    _, options = sources.place_of(source)
    _, own_options = sources.place_of(run)
    shares = {name: getattr(run, name) for name in HOLDING_OUT}
    has_held_out = any(shares.values())
    if has_held_out and options != own_options:
        raise UserError(
            f"data = {request.data}: the run read its data in another way "
            f"({run.data}), so you would test on images that it was trained on; leave "
            "out --data"
        )
    for name, share in shares.items():
        flag = f"--{name.replace('_', '-')}"
        given = request.reading.get(name, share)
        # A smaller share is allowed, because it holds out fewer of the same images.
        if given > share:
            raise UserError(
                f"{name} = {given}: the run held out {share} and was trained on all "
                f"other images, so that these cannot test it; leave out {flag}, give "
                "other --data, or train again with it"
            )
    # Owners are held out at random among all of them. If the images had other owners,
    # the test would contain images of owners that the run was trained on.
    for name in {*settings_with("owners")} - {"data", *HOLDING_OUT}:
        value = getattr(run, name)
        if has_held_out and request.reading.get(name, value) != value:
            raise UserError(
                f"{name} = {request.reading[name]!r}: the run held out images with "
                f"{value!r}, and another value would test on images that it was "
                f"trained on; leave out --{name.replace('_', '-')}"
            )


def reading_of(run: RunConfig, data: str) -> RunConfig:
    """Returns the run's size of images, and how and where it reads its data.

    Of other data only the folder is taken from the run.
    """
    names = [*SHAPE, "data_dir"]
    if _is_own_data(_source_of(data, {}, run), run):
        names += READING
    return RunConfig(**{name: getattr(run, name) for name in names})


def _is_own_data(source: RunConfig, run: RunConfig) -> bool:
    """Tells whether images lie where the run has read its own, if this is known."""
    if run.nodes is not None:
        return False
    place, _ = sources.place_of(source)
    own_place, _ = sources.place_of(run)
    return place == own_place


def _source_of(data: str, reading: Mapping[str, Any], run: RunConfig) -> RunConfig:
    """Returns settings that say where images lie, by default in the run's folder."""
    data_dir = reading.get("data_dir", run.data_dir)
    return RunConfig(data=data, data_dir=data_dir)


def _num_used(request: EvaluationRequest, real: RealImages) -> int:
    """Returns how many images of a run to draw: those that a metric uses.

    Other metrics than the CNN's compare as many as there are real ones; it has its own
    number also where real ones are few.
    """
    if {*request.metrics} == {"cnn"}:
        return downstream.CNN_IMAGES
    return max(len(real.train.labels), downstream.CNN_IMAGES)


def _check_count(what: str, count: int) -> None:
    if count < quality.NUM_SPLITS:
        raise UserError(
            f"{what} = {count} images: fewer than the {quality.NUM_SPLITS} splits of "
            f"the Inception Score; give at least {quality.NUM_SPLITS}"
        )
