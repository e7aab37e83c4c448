"""What `fedgs evaluate` does: all metrics of one source of images against real ones."""

import dataclasses
import sys
import time
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
from fedgs.config.checks import check_data
from fedgs.config.method_settings import settings_with
from fedgs.config.run_config import RunConfig
from fedgs.data import sources
from fedgs.errors import UserError, check_names, reject
from fedgs.evaluation import downstream, images, inception, quality
from fedgs.evaluation.images import LabelledImages, RealImages
from fedgs.files import without_nan
from fedgs.runs.run_folder import RunFolder

NEEDED = {  # package: the metrics that need it
    "torchmetrics": {"images"},
    "sklearn": {"classifiers"},
    "xgboost": {"classifiers"},
}

FULL = Sizes()
FAST = Sizes(2_000, 10_000, 2_000, 2_000, (10, 100, 1000), 60)


def evaluate(request: EvaluationRequest, as_json: bool) -> dict[str, Any]:
    """Evaluates, appends one line of results, prints tables and writes a picture.

    Returns:
        The line.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: Ctrl-C (code 1); what is in the cache is not computed again.
    """
    check(request)
    request = with_data(request)
    started = time.monotonic()
    try:
        with Progress() as progress:
            request, real, synthetic = _load(request, progress)
            evaluation_report.check_writable(request)
            sizes = FAST if request.fast else FULL
            scoring = Scoring(request, sizes, real, synthetic, progress)
            result = scoring.result()
    except KeyboardInterrupt as error:
        print("stopped; continue with the same command", file=sys.stderr)
        raise typer.Exit(1) from error
    if _is_run(request):
        result["round"] = RunFolder.open(request.source).last_round
    result["seconds"] = round(time.monotonic() - started, 1)
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
        if metrics & set(request.metrics) and find_spec(package) is None:
            raise UserError(
                f"metrics: {package} is not installed; run "
                "`pip install 'fedgs[eval,report]'`"
            )
    inception.find_weights()


def with_data(request: EvaluationRequest) -> EvaluationRequest:
    """Returns the request with its data: by default those of the run.

    Raises:
        UserError: no data where no run says which, or no run folder.
    """
    if request.data:
        return request
    if not _is_run(request):
        raise UserError("data is unset: give --data, real data with a test split")
    data = RunFolder.open(request.source).config.data
    return dataclasses.replace(request, data=data)


def _is_run(request: EvaluationRequest) -> bool:
    """Tells whether the source is a run folder, not a file or a yardstick."""
    is_file = Path(request.source).suffix == ".npz"
    return not is_file and request.source not in images.YARDSTICKS


def _load(
    request: EvaluationRequest, progress: Progress
) -> tuple[EvaluationRequest, RealImages, LabelledImages]:
    """Returns the request with all settings of its data, the real and the synthetic."""
    path = Path(request.source)
    folder = None
    synthetic = None
    config = RunConfig()
    if path.suffix == ".npz":
        synthetic = images.read_npz(path)
        channels, side = synthetic.images.shape[1:3]
        config = dataclasses.replace(config, image_channels=channels, image_size=side)
        _check_shape(request, config)
    elif _is_run(request):
        folder = RunFolder.open(path)
        config = reading_of(folder.config, request.data)
        _check_shape(request, config)
        _check_held_out(request, folder.config)
    config = dataclasses.replace(config, data=request.data, **request.reading)
    check_data(config)
    if (config.image_size or images.SMALLEST_SIDE) < images.SMALLEST_SIDE:
        raise UserError(
            f"image_size = {config.image_size}: give --image-size at least "
            f"{images.SMALLEST_SIDE}"
        )
    sizes = FAST if request.fast else FULL
    seed = request.seed
    real = images.load_real(config, sizes.real, request.test)
    channels, side = real.train.images.shape[1:3]
    config = dataclasses.replace(config, image_channels=channels, image_size=side)
    names = [name for name in (*READING, *SHAPE) if name != "data"]
    request = dataclasses.replace(
        request, reading={name: getattr(config, name) for name in names}
    )
    if sizes.test is not None:
        real = real._replace(test=real.test.subset(sizes.test, 0, "fast"))
    count = request.count or sizes.synthetic
    if folder is not None:
        count = request.count or min(count, _num_used(request, real))
        stage = progress.stage("images drawn:", "image")
        synthetic = images.draw_from_run(folder, count, seed, stage)
    elif synthetic is None:
        synthetic = images.yardstick(request.source, real, seed, count)
    images.check_labels(request.source, synthetic, real.num_classes)
    synthetic = synthetic.subset(count, seed, "synthetic")
    _check_count(request.source, len(synthetic.labels))
    classes = np.unique(synthetic.labels)
    if len(classes) < 2 and set(request.metrics) != {"images"}:
        raise UserError(
            f"{request.source}: one class only (label {classes[0]}), classifiers need "
            "two; give --metrics images"
        )
    return request, real, synthetic


def _check_shape(request: EvaluationRequest, source: RunConfig) -> None:
    """Refuses another shape than that of the synthetic images."""
    for name in SHAPE:
        value = getattr(source, name)
        given = request.reading.get(name, value)
        reject(
            {name: given if given != value else None},
            f"{request.source} has {value}, and real images must be alike; give other "
            "--data, or leave out",
        )


def _check_held_out(request: EvaluationRequest, run: RunConfig) -> None:
    """Refuses to test on images of owners that the run may have trained on.

    Of one fraction the images held out are a part of those of a larger one.
    """
    data = sources.with_absolute_path(request.data)
    if data.partition("?")[0] != run.data.partition("?")[0]:
        return
    if run.test_fraction and data != run.data:
        raise UserError(
            f"data = {data}: is read in another way than {run.data}, so other images "
            "would be held out; leave out --data"
        )
    fraction = request.reading.get("test_fraction", run.test_fraction)
    if fraction > run.test_fraction:
        raise UserError(
            f"test_fraction = {fraction}: the run held out {run.test_fraction} of its "
            "clients' images and was trained on all others, so they cannot test it; "
            "leave out --test-fraction, give other --data, or train with it"
        )
    for name in {*settings_with("owners")} - {"data", "test_fraction"}:
        value = getattr(run, name)
        if run.test_fraction and request.reading.get(name, value) != value:
            raise UserError(
                f"{name} = {request.reading[name]!r}: with another than the run's, "
                f"{value!r}, other images would be held out; leave out "
                f"--{name.replace('_', '-')}"
            )


def reading_of(run: RunConfig, data: str) -> RunConfig:
    """Returns the run's size of images, and how and where it reads its data.

    Of other data only the folder is taken from the run.
    """
    is_same = sources.with_absolute_path(data) == run.data
    names = [*SHAPE, "data_dir", *(READING if is_same else ())]
    return RunConfig(**{name: getattr(run, name) for name in names})


def _num_used(request: EvaluationRequest, real: RealImages) -> int:
    """Returns how many images of a run to draw: those that a metric uses.

    Other metrics than the CNN's compare as many as there are real ones; it has its own
    number also where real ones are few.
    """
    is_cnn = {*request.metrics} == {"cnn"}
    return max(0 if is_cnn else len(real.train.labels), downstream.CNN_IMAGES)


def _check_count(what: str, count: int) -> None:
    if count < quality.NUM_SPLITS:
        raise UserError(
            f"{what} = {count} images: fewer than the {quality.NUM_SPLITS} splits of "
            f"the Inception Score; give at least {quality.NUM_SPLITS}"
        )
