"""All metrics of one source of images against real ones, by their names."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.app.commands.terminal import Progress
from fedgs.app.evaluation.report import classifier_stage
from fedgs.app.evaluation.request import EvaluationRequest
from fedgs.evaluation import classifiers, downstream, inception, lenet, quality
from fedgs.evaluation.images import YARDSTICK, LabelledImages, RealImages
from fedgs.evaluation.label_efficiency import NUM_LABELS, NUM_STEPS, label_efficiency
from fedgs.runs.run_folder import versions


@dataclass(frozen=True)
class Sizes:
    """How many images each part of an evaluation uses, at most.

    Attributes:
        synthetic: images drawn, unless the user gives a number.
        real: real training images.
        test: real test images; None is all.
        neighbours: images on each side of precision and recall, and synthetic and test
            images whose nearest training image is searched.
        num_labels: the numbers of labels of the label efficiency.
        num_steps: the number of steps of a student in it, at least.
    """

    synthetic: int = 60_000
    real: int = 60_000
    test: int | None = None
    neighbours: int = 10_000
    num_labels: tuple[int, ...] = NUM_LABELS
    num_steps: int = NUM_STEPS


@dataclass(frozen=True)
class Scoring:
    """One evaluation at work.

    Attributes:
        request: with all settings of the data.
        sizes: how many images to use.
        real: the real images.
        synthetic: the synthetic ones.
        progress: the progress of the stages.
    """

    request: EvaluationRequest
    sizes: Sizes
    real: RealImages
    synthetic: LabelledImages
    progress: Progress

    def result(self) -> dict[str, Any]:
        """Returns the metrics that are asked for, and what they are of.

        Privacy: reads private data; output private.
        """
        request = self.request
        # Where the data lie on this machine changes no score, and is nobody's business.
        places = ("data_dir", "download")
        reading = {n: v for n, v in request.reading.items() if n not in places}
        result: dict[str, Any] = {
            "source": request.source,
            "data": request.data,
            "test": request.test or request.data,
            "reading": reading,
            "versions": versions(),
            "seed": request.seed,
            "fast": request.fast,
            "num_synthetic": len(self.synthetic.labels),
            "num_real": len(self.real.train.labels),
            "num_test": len(self.real.test.labels),
            "num_test_copies": self.real.num_copies,
            "privacy": "computed from real images: not covered by the epsilon of a run",
        }
        # The fast ones come first, and each is shown as soon as it is known: whoever
        # waits, or stops the command, has seen the others by then.
        parts = {
            "cnn": self._cnn,
            "images": self._image_metrics,
            "classifiers": self._classifiers,
            "label-efficiency": self._label_efficiency,
        }
        for metric, scores_of in parts.items():
            if metric in request.metrics:
                scores = scores_of()
                self._show(scores)
                result |= scores
        if {"images", "label-efficiency"} & set(request.metrics):
            about, _ = self._network
            result |= about
        return result

    def _show(self, scores: dict[str, Any]) -> None:
        """Prints the numbers among the scores, in a line that stays."""
        numbers = {n: v for n, v in scores.items() if isinstance(v, float)}
        if numbers:
            shown = [f"{name} {value:.4f}" for name, value in numbers.items()]
            self.progress.say(", ".join(shown))

    @cached_property
    def _network(self) -> tuple[dict[str, Any], lenet.LeNet]:
        """Trains the network of the real data, once, and tells what it is."""
        request = self.request
        real = self.real
        stage = self.progress.stage(f"training {request.network}:", "epoch")
        network, model = lenet.cached_lenet(
            real.train, real.num_classes, request.device, stage
        )
        accuracy = lenet.test_accuracy(lenet.outputs(model, real.test.images), real)
        about: dict[str, Any] = {
            "network": network,
            f"{request.network}_test_accuracy": accuracy,
        }
        kind = request.data.split(":")[0]
        if kind in lenet.PAPER_TEST_ACCURACY:
            about["paper_classifier_test_accuracy"] = lenet.PAPER_TEST_ACCURACY[kind]
        return about, model

    @cached_property
    def _outputs(self) -> lenet.Outputs:
        """What the network says of the synthetic images."""
        _, model = self._network
        return lenet.outputs(model, self.synthetic.images)

    def _image_metrics(self) -> dict[str, Any]:
        """Returns IS, FID, precision and recall, and memorisation."""
        name = self.request.network
        seed = self.request.seed
        real = self.real
        synthetic = self.synthetic
        _, model = self._network
        real_features = lenet.outputs(model, real.train.images).features
        features = self._outputs.features
        mean, std = quality.inception_score(self._outputs.logits, seed)
        result: dict[str, Any] = {
            f"is_{name}_{quality.NUM_SPLITS}_splits": mean,
            f"is_{name}_{quality.NUM_SPLITS}_splits_std": std,
            f"fid_{name}": quality.fid(real_features, features),
        }
        self.progress.say(
            "precision, recall, density, coverage, nearest training images"
        )
        # Each comparison is of all pairs, so its cost grows with the square.
        rows = self._some_rows(synthetic)
        real_rows = self._some_rows(real.train)
        test_rows = self._some_rows(real.test)
        scores = quality.manifold_scores(real_features[real_rows], features[rows])
        k = quality.NUM_NEIGHBOURS
        result |= {f"{score}_{name}_k{k}": value for score, value in scores.items()}
        # Memorisation needs all training images: the copied one may be any of them.
        result |= quality.memorisation(
            _flat(real.train.images),
            _flat(real.test.images[test_rows]),
            _flat(synthetic.images[rows]),
        )
        result["num_neighbour_images"] = min(len(rows), len(real_rows), len(test_rows))
        return result | self._inception_fid()

    def _some_rows(self, part: LabelledImages) -> NDArray[np.int64]:
        """Returns the places of at most `Sizes.neighbours` images, at random."""
        order = np.random.default_rng(self.request.seed).permutation(len(part.labels))
        return order[: self.sizes.neighbours]

    def _label_efficiency(self) -> dict[str, Any]:
        real = self.real
        curves = label_efficiency(
            self.synthetic,
            self._outputs.logits.argmax(1),
            real.test,
            real.num_classes,
            seed=self.request.seed,
            report=self.progress.stage("label efficiency:"),
            num_labels=self.sizes.num_labels,
            num_steps=self.sizes.num_steps,
            device=self.request.device,
        )
        return {"label_efficiency": curves}

    def _inception_fid(self) -> dict[str, Any]:
        """Returns the FID by Inception's weights, where the user has them."""
        weights = inception.find_weights()
        if weights is None:
            return {}
        seed = self.request.seed
        stage = self.progress.stage("Inception-v3:")
        drawn = self.synthetic.subset(inception.FID_IMAGES, seed, "inception")
        fid = inception.fid_inception_v3_pool3(
            self.real.train.images, drawn.images, weights, self.request.device, stage
        )
        return {
            "fid_inception_v3_pool3": fid,
            "fid_inception_v3_pool3_num_synthetic": len(drawn.labels),
        }

    def _cnn(self) -> dict[str, Any]:
        seed = self.request.seed
        real = self.real
        train = self.synthetic.subset(downstream.CNN_IMAGES, seed, "cnn")
        accuracy = downstream.cnn_accuracy(
            train,
            real.test,
            real.num_classes,
            seed,
            self.request.device,
            report=self.progress.stage("training the CNN:", "epoch"),
        )
        return {
            "downstream_cnn_accuracy": accuracy,
            "downstream_cnn_num_synthetic": len(train.labels),
        }

    def _classifiers(self) -> dict[str, Any]:
        """Returns the column of the table, calibrated where the real one is known."""
        request = self.request
        real = self.real
        task = classifiers.Task(
            self.synthetic, real.test, real.num_classes, request.seed
        )
        names = classifiers.CLASSIFIERS
        stage = classifier_stage(self.progress, "classifiers:", len(names))
        results, failed = classifiers.run_classifiers(task, names, stage)
        # Of `fedgs evaluate real`: the same number as synthetic ones if fast, else all.
        train = real.train
        if request.fast:
            train = train.subset(self.sizes.synthetic, request.seed, YARDSTICK)
        # Only read, never trained here: on all real images they would take hours.
        on_real = classifiers.cached_results(task._replace(train=train), [*results])
        ratios = classifiers.calibrated(results, on_real)
        accuracy = {name: result["accuracy"] for name, result in results.items()}
        # An average of some classifiers only would not be comparable with any other.
        average = None
        if not failed:
            average = float(np.mean([*accuracy.values()]))
        content = {
            "failed": failed,
            "accuracy": accuracy,
            "average": average,
            "per_class": {name: r["per_class"] for name, r in results.items()},
            "unconverged": [n for n, r in results.items() if r["converged"] is False],
            "seconds": {n: round(r["seconds"], 1) for n, r in results.items()},
            "real_accuracy": {n: r["accuracy"] for n, r in on_real.items()},
            "calibrated": ratios,
        }
        # Likewise, only if the real data's results of all classifiers are known.
        if len(ratios) == len(names):
            content["calibrated_average"] = float(np.mean([*ratios.values()]))
        return {"classifiers": content}


def _flat(images: NDArray[np.float32]) -> NDArray[np.float32]:
    return images.reshape(len(images), -1)
