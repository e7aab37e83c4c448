"""The paper's thirteen classifiers, trained on synthetic images, tested on real ones.

The paper's text (library defaults) and its code disagree; its tables are of the code
(`evaluation/eval_sklearn.py`, `eval_cnn.py`), whose settings are restated here for
today's scikit-learn. Differs from the reference: AdaBoost's SAMME.R and logistic
regression's `multi_class` no longer exist (SAMME and multinomial are what is left); the
linear SVC stops at tolerance 1e-4 and 1000 iterations instead of 1e-8 and 10,000, about
half an hour alone; XGBoost's depth 3 and rate 0.1 are its defaults of the time (before
1.0; today 6 and 0.3, which reach 0.97 on MNIST where Table A1 has 0.91).

Calibrated accuracy is acc(synthetic) / acc(real) of each classifier, and its average
the mean of these ratios, as in Tables A1 and A2.

Source: Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020, appendix C.3, Tables A1 and A2.
"""

import importlib
import importlib.metadata
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

from fedgs.errors import UserError, imported, wrap_error
from fedgs.evaluation.cache import content_hash, read_cached, write_cached
from fedgs.evaluation.downstream import Recipe, fit, predict
from fedgs.evaluation.images import LabelledImages

_VERSION = 2  # raise it with any change that CLASSIFIER_SETTINGS does not show
NUM_WORKERS = 2  # classifiers at a time, each on one core

SKLEARN = {  # name in results: (module, class)
    "adaboost": ("sklearn.ensemble", "AdaBoostClassifier"),
    "bagging": ("sklearn.ensemble", "BaggingClassifier"),
    "bernoulli_nb": ("sklearn.naive_bayes", "BernoulliNB"),
    "decision_tree": ("sklearn.tree", "DecisionTreeClassifier"),
    "gaussian_nb": ("sklearn.naive_bayes", "GaussianNB"),
    "gradient_boosting": ("sklearn.ensemble", "GradientBoostingClassifier"),
    "lda": ("sklearn.discriminant_analysis", "LinearDiscriminantAnalysis"),
    "linear_svc": ("sklearn.svm", "LinearSVC"),
    "logistic_regression": ("sklearn.linear_model", "LogisticRegression"),
    "mlp": ("sklearn.neural_network", "MLPClassifier"),
    "random_forest": ("sklearn.ensemble", "RandomForestClassifier"),
    "xgboost": ("xgboost", "XGBClassifier"),
}
# In the order of Tables A1 and A2.
CLASSIFIERS = ("mlp", "cnn", *sorted(SKLEARN.keys() - {"mlp"}))
# So that no worker begins a long fit when the others have nothing left to do.
LONGEST_FIRST = (
    "gradient_boosting",
    "cnn",
    "adaboost",
    "linear_svc",
    "logistic_regression",
    "mlp",
    "random_forest",
    "xgboost",
    "bagging",
    "decision_tree",
    "gaussian_nb",
    "lda",
    "bernoulli_nb",
)
SEEDLESS = {"bernoulli_nb", "gaussian_nb", "lda"}
CLASSIFIER_SETTINGS: dict[str, dict[str, Any]] = {
    "adaboost": {"n_estimators": 100},
    "bagging": {"n_estimators": 20, "max_samples": 0.1},
    "bernoulli_nb": {"binarize": 0.5},
    "decision_tree": {"class_weight": "balanced"},
    "gradient_boosting": {"n_estimators": 50, "subsample": 0.1},
    "lda": {"solver": "eigen", "n_components": 9, "shrinkage": 0.5, "tol": 1e-8},
    "linear_svc": {"loss": "hinge", "tol": 1e-4, "max_iter": 1000},
    "logistic_regression": {"solver": "lbfgs", "max_iter": 5000},
    "random_forest": {"n_estimators": 100, "class_weight": "balanced"},
    "xgboost": {
        "n_estimators": 50,
        "colsample_bytree": 0.1,
        "max_depth": 3,
        "learning_rate": 0.1,
    },
}
Result = dict[str, Any]
RESULT = {"accuracy", "per_class", "converged", "seconds"}
# Name, result (None: it cannot be trained), and whether it was cached.
Report = Callable[[str, Result | None, bool], None]


def build(name: str, shape: tuple[int, ...], num_classes: int, seed: int) -> Any:
    """Returns an untrained classifier for flat float32 images in [0, 1].

    Args:
        name: a key of `CLASSIFIERS`.
        shape: (C, S, S) of the images before they were flattened.
        num_classes: labels in training, 0 to num_classes - 1.
        seed: the seed of everything random in it.

    Raises:
        UserError: scikit-learn or XGBoost is not installed.
    """
    if name == "cnn":
        return _Cnn(shape, num_classes, seed)
    settings = dict(CLASSIFIER_SETTINGS.get(name, {}))
    if name == "lda":  # it has one component less than classes
        settings["n_components"] = min(settings["n_components"], num_classes - 1)
    module, kind = SKLEARN[name]
    package = imported(module, f"classifiers = {name}", "'fedgs[eval]'")
    if name == "xgboost":  # each classifier has one core
        settings["n_jobs"] = 1
    if name not in SEEDLESS:
        settings["random_state"] = seed
    return getattr(package, kind)(**settings)


class _Cnn:
    """The CNN of the reference code with the interface of the others."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, seed: int) -> None:
        self.shape = shape
        self.num_classes = num_classes
        self.seed = seed

    def fit(self, x: NDArray[np.float32], y: NDArray[np.int64]) -> None:
        images = x.reshape(-1, *self.shape)
        train = LabelledImages(images, y)
        self.model = fit(LENET, train, self.num_classes, self.seed)

    def predict(self, x: NDArray[np.float32]) -> NDArray[np.int64]:
        images = x.reshape(-1, *self.shape)
        return predict(self.model, images)


def _lenet(channels: int, side: int, num_classes: int) -> nn.Module:
    """LeNet with 6 and 16 kernels of 5 x 5, as the reference code's CNN."""
    left = (side // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * left**2, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


LENET = Recipe(
    _lenet,
    num_epochs=50,
    batch_size=128,
    optimizer=partial(SGD, lr=0.02, momentum=0.9, weight_decay=1e-4),
    # A tenth of the rate after 40 epochs.
    schedule=lambda sgd, steps: MultiStepLR(sgd, [40 * steps]),
)


# ------------------------------------------------------------------ train and test


class Task(NamedTuple):
    """One column of the table: what all classifiers are trained and tested on."""

    train: LabelledImages
    test: LabelledImages
    num_classes: int
    seed: int


def train_and_test(task: Task, name: str) -> Result:
    """Trains one classifier and returns its accuracy on the test images.

    Privacy: reads private data; output private. The test images are real.

    Returns:
        `accuracy` and `per_class` (None for a class that is not tested), in [0, 1],
        `converged` (None where it does not say) and `seconds`.

    Raises:
        UserError: the classifier cannot be trained on these images.
    """
    started = time.monotonic()
    shape = task.train.images.shape[1:]
    x = _flat(task.train)
    test_x = _flat(task.test)
    # A classifier wants labels from 0 without gaps; synthetic images may lack a class.
    known, y = np.unique(task.train.labels, return_inverse=True)
    classifier = build(name, shape, len(known), task.seed)
    problem = f"classifiers = {name}: it cannot be trained on {len(y)} images"
    with wrap_error((ValueError, np.linalg.LinAlgError), problem, "give more images"):
        classifier.fit(x, y)
        guesses = np.asarray(classifier.predict(test_x))
        found = known[guesses]
    is_correct = found == task.test.labels
    per_class: list[float | None] = []
    for label in range(task.num_classes):
        of_class = is_correct[task.test.labels == label]
        accuracy = None
        if len(of_class):
            accuracy = float(of_class.mean())
        per_class.append(accuracy)
    return {
        "accuracy": float(is_correct.mean()),
        "per_class": per_class,
        "converged": _converged(classifier),
        "seconds": time.monotonic() - started,
    }


def _flat(images: LabelledImages) -> NDArray[np.float32]:
    return images.images.reshape(len(images.labels), -1)


def _converged(classifier: Any) -> bool | None:
    limit = getattr(classifier, "max_iter", None)
    if limit is None:
        return None
    return bool(np.max(classifier.n_iter_) < limit)


def run_classifiers(
    task: Task,
    names: Sequence[str],
    report: Report,
) -> tuple[dict[str, Result], dict[str, str]]:
    """Trains and tests classifiers side by side, and remembers each when it is done.

    A later call with the same images and settings takes what is there from the cache,
    so an interrupted evaluation continues.

    Privacy: reads private data; output private.

    Args:
        task: what to train and test on.
        names: keys of `CLASSIFIERS`.
        report: is called with every result, from this thread.

    Returns:
        The result of every classifier that could be trained, and of the others why not.
    """
    keys = _keys(task, names)
    found = _read(keys)
    for name, result in found.items():
        report(name, result, True)  # True: it was cached
    missing = [name for name in LONGEST_FIRST if name in names and name not in found]
    failed: dict[str, str] = {}
    if not missing:
        return found, failed
    from threadpoolctl import threadpool_limits

    # Each classifier has one core, also those of libraries with threads of their own.
    threads = torch.get_num_threads()
    train = partial(_train_and_keep, task, keys)
    try:
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `converged` says it; unsafe per thread
            _import_all(missing)
            workers = min(NUM_WORKERS, len(missing))
            # Its threads are daemons: Ctrl-C ends a command in the middle of a fit.
            with ThreadPool(workers, torch.set_num_threads, (1,)) as pool:
                for name, result in pool.imap_unordered(train, missing):
                    # What cannot be trained is a result; all else ends the command.
                    if isinstance(result, UserError):
                        failed[name] = str(result)
                    elif isinstance(result, BaseException):
                        raise result
                    else:
                        found[name] = result
                    report(name, found.get(name), False)
    finally:
        torch.set_num_threads(threads)
    return {name: found[name] for name in names if name in found}, failed


def _train_and_keep(
    task: Task,
    keys: dict[str, str],
    name: str,
) -> tuple[str, Result | BaseException]:
    """Returns a new result, or why there is none; what is raised here would be lost."""
    try:
        result = train_and_test(task, name)
        write_cached(keys[name], result)
    except BaseException as error:
        return name, error
    return name, result


def _import_all(names: Sequence[str]) -> None:
    """Makes the libraries import what they import lazily: threads would deadlock."""
    x = np.eye(20, 4, dtype=np.float32)
    y = np.arange(20) % 2
    for name in names:
        if name != "cnn":
            classifier = build(name, shape=(), num_classes=2, seed=0)
            classifier.fit(x, y).predict(x)


def cached_results(task: Task, names: Sequence[str]) -> dict[str, Result]:
    """Returns the results that an earlier evaluation left; trains nothing.

    Privacy: reads private data; output private.
    """
    return _read(_keys(task, names))


def _read(keys: dict[str, str]) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for name, key in keys.items():
        result = read_cached(key)
        if result is not None and result.keys() >= RESULT:
            found[name] = result
    return found


def _keys(task: Task, names: Sequence[str]) -> dict[str, str]:
    """Returns each result's name in the cache: a hash of all that it depends on."""
    data = content_hash(
        task.train.images, task.train.labels, task.test.images, task.test.labels
    )
    versions = {
        package: importlib.metadata.version(package)
        for package in ("scikit-learn", "torch")
    }
    keys: dict[str, str] = {}
    for name in names:
        # Of the others' results, another version of XGBoost changes nothing.
        if name == "xgboost":
            versions["xgboost"] = importlib.import_module("xgboost").__version__
        key = content_hash(
            name=name,
            data=data,
            settings=CLASSIFIER_SETTINGS.get(name, {}),
            num_classes=task.num_classes,
            seed=task.seed,
            versions=versions,
            version=_VERSION,
        )
        keys[name] = f"classifier-{key}"
    return keys


# ------------------------------------------------------------------ averages


def calibrated(
    synthetic: dict[str, Result],
    real: dict[str, Result],
) -> dict[str, float]:
    """Returns acc(synthetic) / acc(real) of each classifier that both have.

    Privacy: reads private data; output private. Accuracies are of real test images.

    >>> calibrated({"mlp": {"accuracy": 0.79}}, {"mlp": {"accuracy": 0.98}})
    {'mlp': 0.806...}
    """
    return {
        name: result["accuracy"] / real[name]["accuracy"]
        for name, result in synthetic.items()
        if name in real and real[name]["accuracy"] > 0
    }
