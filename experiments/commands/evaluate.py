"""What `fedgs evaluate` does: all metrics of one source of images against real ones."""

import dataclasses
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from experiments.commands import evaluation_report
from experiments.commands.evaluation_request import (
    METRICS,
    READING,
    SHAPE,
    EvaluationRequest,
)
from experiments.commands.progress import Progress
from fedgs.config.checks import check_data
from fedgs.config.run_config import RunConfig
from fedgs.data import sources
from fedgs.errors import UserError, refuse
from fedgs.evaluation import classifiers, downstream, images, inception, quality
from fedgs.evaluation.images import LabelledImages, RealImages
from fedgs.evaluation.label_efficiency import (
    NUM_LABELS,
    NUM_STEPS,
    label_efficiency,
)
from fedgs.evaluation.lenet import (
    PAPER_TEST_ACCURACY,
    Outputs,
    cached_lenet,
    outputs,
    test_accuracy,
)
from fedgs.files import without_nan
from fedgs.runs.run_folder import RunFolder, versions

ALL = classifiers.NAMES
NEEDED = {  # package: the metrics that need it
    "torchmetrics": {"images"},
    "sklearn": {"classifiers"},
    "xgboost": {"classifiers"},
    "matplotlib": set(METRICS),
}


@dataclass(frozen=True)
class Sizes:
    """How many images each part of an evaluation uses, at most.

    Attributes:
        synthetic: images drawn, unless the user gives a number.
        real: real training images.
        test: real test images; None is all.
        neighbours: images on each side of precision and recall, and synthetic and test
            images whose nearest training image is searched.
        num_labels: of the label efficiency.
        num_steps: of a student in it, at least.
    """

    synthetic: int = 60_000
    real: int = 60_000
    test: int | None = None
    neighbours: int = 10_000
    num_labels: tuple[int, ...] = NUM_LABELS
    num_steps: int = NUM_STEPS


FULL = Sizes()
FAST = Sizes(2_000, 10_000, 2_000, 2_000, (10, 100, 1000), 60)


def evaluate(request: EvaluationRequest, as_json: bool) -> None:
    """Evaluates, appends one line of results, prints a table and writes pictures.

    Raises:
        UserError: bad input; nothing was written.
        typer.Exit: Ctrl-C (code 1); what is in the cache is not computed again.
    """
    check(request)
    request = with_data(request)
    started = time.monotonic()
    request, real, synthetic = _load(request)
    evaluation_report.check_writable(request)
    try:
        with Progress() as progress:
            result = _result(request, real, synthetic, progress)
    except KeyboardInterrupt as error:
        print("stopped; continue with the same command", file=sys.stderr)
        raise typer.Exit(1) from error
    result["seconds"] = round(time.monotonic() - started, 1)
    result = without_nan(result)
    evaluation_report.write(request, result, real, synthetic)
    evaluation_report.show(request, result, as_json)


def check(request: EvaluationRequest) -> None:
    """Checks what needs no data.

    Raises:
        UserError: an unknown name, a count below the splits, a missing package.
    """
    given = {
        "metrics": (request.metrics, METRICS),
        "protocol": ((request.protocol,), classifiers.PROTOCOLS),
        "classifiers": (request.classifiers, ALL),
    }
    for setting, (names, known) in given.items():
        wrong = [name for name in names if name not in known]
        if wrong:
            raise UserError(
                f"{setting} = {','.join(wrong)!r}: give --{setting} of "
                f"{', '.join(known)}"
            )
    if request.count is not None:
        _check_count("count", request.count)
    if len(set(request.classifiers)) < len(request.classifiers):
        raise UserError(
            f"classifiers = {','.join(request.classifiers)}: give each one once"
        )
    if request.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda': no GPU is available; give --device cpu")
    for package, metrics in NEEDED.items():
        if metrics & set(request.metrics) and find_spec(package) is None:
            raise UserError(
                f"metrics: {package} is not installed; run "
                "`pip install 'fedgs[eval,report]'`"
            )
    inception.find_weights(request.inception_weights)


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


def _sizes(request: EvaluationRequest) -> Sizes:
    return FAST if request.fast else FULL


def _is_run(request: EvaluationRequest) -> bool:
    """Tells whether the source is a run folder, not a file or a yardstick."""
    is_file = Path(request.source).suffix == ".npz"
    return not is_file and request.source not in images.YARDSTICKS


def _load(
    request: EvaluationRequest,
) -> tuple[EvaluationRequest, RealImages, LabelledImages]:
    """Returns the request with all settings of its data, the real and the synthetic."""
    path, folder, synthetic = Path(request.source), None, None
    config = RunConfig()
    if path.suffix == ".npz":
        synthetic = images.read_npz(path)
        channels, side = synthetic.images.shape[1:3]
        config = dataclasses.replace(config, image_channels=channels, image_size=side)
        _check_shape(request, config)
    elif _is_run(request):
        folder = RunFolder.open(path)
        config = _reading_of(folder.config, request.data)
        _check_shape(request, config)
        _check_held_out(request, folder.config)
    config = dataclasses.replace(config, data=request.data, **request.reading)
    check_data(config)
    if config.image_size < images.SMALLEST_SIDE:
        raise UserError(
            f"image_size = {config.image_size}: give --image-size at least "
            f"{images.SMALLEST_SIDE}"
        )
    names = [name for name in (*READING, *SHAPE) if name != "data"]
    request = dataclasses.replace(
        request, reading={name: getattr(config, name) for name in names}
    )
    sizes, seed = _sizes(request), request.seed
    real = images.load_real(config, sizes.real)
    if sizes.test is not None:
        real = real._replace(test=real.test.subset(sizes.test, 0, "fast"))
    count = request.count or sizes.synthetic
    if folder is not None:
        synthetic = images.draw_from_run(folder, count, seed)
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
        refuse(
            {name: given if given != value else None},
            f"{request.source} has {value}, and real images must be alike; give other "
            "--data, or leave out",
        )


def _check_held_out(request: EvaluationRequest, run: RunConfig) -> None:
    """Refuses to test on images of owners that the run may have trained on.

    Of one fraction the images held out are a part of those of a larger one.
    """
    if sources.with_absolute_path(request.data) != run.data:
        return
    fraction = request.reading.get("test_fraction", run.test_fraction)
    if fraction > run.test_fraction:
        raise UserError(
            f"test_fraction = {fraction}: the run held out {run.test_fraction} of its "
            "clients' images and was trained on all others, so they cannot test it; "
            "leave out --test-fraction, give other --data, or train with it"
        )
    for name in ("classes", "hf_options"):
        value = getattr(run, name)
        if run.test_fraction and request.reading.get(name, value) != value:
            raise UserError(
                f"{name} = {request.reading[name]!r}: with another than the run's, "
                f"{value!r}, other images would be held out; leave out "
                f"--{name.replace('_', '-')}"
            )


def _reading_of(run: RunConfig, data: str) -> RunConfig:
    """Returns the run's size of images, and how and where it reads its data.

    Of other data only the folder is taken from the run.
    """
    is_same = sources.with_absolute_path(data) == run.data
    names = [*SHAPE, "data_dir", *(READING if is_same else ())]
    return RunConfig(**{name: getattr(run, name) for name in names})


def _check_count(what: str, count: int) -> None:
    if count < quality.NUM_SPLITS:
        raise UserError(
            f"{what} = {count} images: fewer than the {quality.NUM_SPLITS} splits of "
            f"the Inception Score; give at least {quality.NUM_SPLITS}"
        )


def _result(
    request: EvaluationRequest,
    real: RealImages,
    synthetic: LabelledImages,
    progress: Progress,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "source": request.source,
        "data": request.data,
        "reading": {
            name: value
            for name, value in request.reading.items()
            if name not in ("data_dir", "download")
        },
        "versions": versions(),
        "seed": request.seed,
        "fast": request.fast,
        "num_synthetic": len(synthetic.labels),
        "num_real": len(real.train.labels),
        "num_test": len(real.test.labels),
        "privacy": "computed from real images: not covered by the epsilon of a run",
    }
    if _is_run(request):
        result["round"] = RunFolder.open(request.source).last_round
    if {"images", "label-efficiency"} & set(request.metrics):
        result["network"], model = cached_lenet(
            real.train,
            real.num_classes,
            request.device,
            progress.stage(f"training {request.network}:"),
        )
        found = outputs(model, real.test.images)
        result[f"{request.network}_test_accuracy"] = test_accuracy(found, real)
        kind = request.data.split(":")[0]
        if kind in PAPER_TEST_ACCURACY:
            result["paper_classifier_test_accuracy"] = PAPER_TEST_ACCURACY[kind]
        ours = outputs(model, synthetic.images)
        if "images" in request.metrics:
            theirs = outputs(model, real.train.images)
            seen = (ours, theirs.features)
            result |= _image_metrics(request, real, synthetic, *seen, progress)
        if "label-efficiency" in request.metrics:
            result["label_efficiency"] = label_efficiency(
                synthetic,
                ours.logits.argmax(1),
                real.test,
                real.num_classes,
                request.seed,
                progress.stage("label efficiency:"),
                _sizes(request).num_labels,
                _sizes(request).num_steps,
                request.device,
            )
    if "cnn" in request.metrics:
        train = synthetic.subset(downstream.NUM_IMAGES, request.seed, "cnn")
        result["downstream_cnn_accuracy"] = downstream.cnn_accuracy(
            train, real.test, real.num_classes, request.seed, request.device
        )
        result["downstream_cnn_num_synthetic"] = len(train.labels)
    if "classifiers" in request.metrics:
        result["classifiers"] = _classifiers(request, real, synthetic, progress)
    return result


def _image_metrics(
    request: EvaluationRequest,
    real: RealImages,
    synthetic: LabelledImages,
    ours: Outputs,
    theirs: NDArray[np.float32],
    progress: Progress,
) -> dict[str, Any]:
    """Returns IS, FID, precision and recall, and memorisation, by name.

    Args:
        request: seed, sizes and the name of the network.
        real: the real images.
        synthetic: the synthetic ones.
        ours: what the network says of the synthetic images.
        theirs: its features of the real training images.
        progress: of the stages.
    """
    name, seed, count = request.network, request.seed, _sizes(request).neighbours
    mean, std = quality.inception_score(ours.logits, seed)
    result: dict[str, Any] = {
        f"is_{name}_{quality.NUM_SPLITS}_splits": mean,
        f"is_{name}_{quality.NUM_SPLITS}_splits_std": std,
        f"fid_{name}": quality.fid(theirs, ours.features),
    }
    progress.say("precision, recall, density, coverage, nearest training images")
    rows, real_rows, test_rows = (
        np.random.default_rng(seed).permutation(len(part.labels))[:count]
        for part in (synthetic, real.train, real.test)
    )
    scores = quality.manifold_scores(theirs[real_rows], ours.features[rows])
    k = quality.NUM_NEIGHBOURS
    result |= {f"{score}_{name}_k{k}": value for score, value in scores.items()}
    compared = (real.train.images, real.test.images[test_rows], synthetic.images[rows])
    result |= quality.memorisation(*(x.reshape(len(x), -1) for x in compared))
    result["num_neighbour_images"] = min(len(rows), len(real_rows), len(test_rows))
    weights = inception.find_weights(request.inception_weights)
    if weights is not None:
        compared = synthetic.subset(inception.NUM_SYNTHETIC, seed, "inception")
        result["fid_inception_v3_pool3"] = inception.fid_inception_v3_pool3(
            real.train.images,
            compared.images,
            weights,
            request.device,
            progress.stage("Inception-v3:"),
        )
        result["fid_inception_v3_pool3_num_synthetic"] = len(compared.labels)
    return result


def _classifiers(
    request: EvaluationRequest,
    real: RealImages,
    synthetic: LabelledImages,
    progress: Progress,
) -> dict[str, Any]:
    """Returns the column of the table, calibrated where the real one is known."""
    task = classifiers.Task(
        synthetic, real.test, real.num_classes, request.protocol, request.seed
    )
    names, workers = request.classifiers or ALL, request.num_workers
    report = evaluation_report.classifier_stage(
        progress, "classifiers on synthetic images:", len(names)
    )
    ours, failed = classifiers.run_classifiers(task, names, workers, report)
    names = [name for name in names if name not in failed]
    accuracy = {name: ours[name]["accuracy"] for name in names}
    result = {
        "protocol": request.protocol,
        "failed": failed,
        "accuracy": accuracy,
        "average": None if failed else float(np.mean([*accuracy.values()])),
        "per_class": {name: ours[name]["per_class"] for name in names},
        "unconverged": [name for name in names if ours[name]["converged"] is False],
        "seconds": {name: round(ours[name]["seconds"], 1) for name in names},
        "cpu_seconds": {name: round(ours[name]["cpu_seconds"], 1) for name in names},
    }
    # The real column is as large as the synthetic one in --fast, else all real images.
    if request.fast:
        train = real.train.subset(FAST.synthetic, request.seed, "calibration")
    else:
        train = real.train
    task = task._replace(train=train)
    calibrate = request.calibrate
    if calibrate is None:  # the defaults of the libraries would take hours twice
        calibrate = request.fast or request.protocol == "reference-settings"
    theirs = classifiers.cached_results(task, names)
    if calibrate and len(theirs) < len(names):
        report = evaluation_report.classifier_stage(
            progress, "classifiers on real images:", len(names)
        )
        theirs, _ = classifiers.run_classifiers(task, names, workers, report)
    ratios = classifiers.calibrated(ours, theirs)
    result["real_accuracy"] = {n: theirs[n]["accuracy"] for n in names if n in theirs}
    result["calibrated"] = ratios
    if len(ratios) == len(names) and not failed:
        result["calibrated_average"] = float(np.mean(list(ratios.values())))
    return result
