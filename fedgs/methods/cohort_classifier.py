"""The classifier that cohorts are selected by: its rounds.

    server                                   node, for its clients
    the classifier ------------------------> each client: SGD steps of a copy, on images
                                               that it does not hold out
                                               update = copy - sent, clipped to C whole
    classifier += sum / m  <---------------- sum over its clients + Gaussian noise
                                               (one release, B = 1)

Without privacy there is no noise, and C restricts nothing
(`fedgs.cohorts.selection.training_settings`). Afterwards every client measures its own
accuracy (`accuracy_of`), by which cohorts are divided: see `fedgs.cohorts.selection`.

Source: McMahan et al., "Learning differentially private recurrent language models",
ICLR 2018, with flat clipping; the network is that of `fedgs.cohorts.classifier`.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedgs.cohorts import classifier
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.terms import Terms
from fedgs.data.federated import ClientImages, to_float
from fedgs.methods.base import (
    Declared,
    Method,
    OneClient,
    Released,
    Request,
    State,
    asked,
)
from fedgs.randomness import stream
from fedgs.shapes import TensorDict


class CohortClassifier(Method[ResolvedConfig]):
    """Clients answer with the clipped update of a classifier that all share."""

    has_generator = False

    def terms(self, config: ResolvedConfig, round: int) -> Terms:
        """Returns one update, clipped to C, as a row of weights."""
        num_weights = sum(map(math.prod, classifier.shapes(config).values()))
        shape = (1, 1, 1, num_weights)
        return Terms("update", config.noise_multiplier, config.clip_bound, shape)

    def declared(self, config: ResolvedConfig, round: int) -> Mapping[str, Declared]:
        """Returns the weights of the classifier by name."""
        return {n: Declared(shape) for n, shape in classifier.shapes(config).items()}

    def state(self, config: ResolvedConfig) -> State:
        """Initialises the classifier, in a generator's place, from the seed."""
        return State.of(classifier.build_classifier(config))

    def begin(self, config: ResolvedConfig, state: State) -> tuple[Request, None]:
        """Returns the classifier as it is; draws nothing.

        Privacy: post-processing of DP output.
        """
        return asked(config, state, state.generator.state_dict()), None

    def answer(
        self,
        config: ResolvedConfig,
        client: OneClient,
        request: Request,
    ) -> Tensor:
        """Returns the client's update: one sample, clipped as a whole.

        Privacy: reads private data; output private.
        """
        model = classifier.with_weights(config, request.tensors)
        before = parameters_to_vector(model.parameters()).detach()
        # Not on those on which the client measures itself later: its accuracy would
        # tell what was learned by heart.
        images, labels = images_of(config, client, is_held_out=False)
        rng = stream(config.seed, "cohorts/batches", client.number, request.round)
        classifier.train(model, images, labels, rng)
        update = parameters_to_vector(model.parameters()).detach() - before
        return update[None, None, None]

    def finish(
        self,
        config: ResolvedConfig,
        state: State,
        pending: None,
        released: Released,
    ) -> None:
        """Moves the classifier by the mean update.

        Privacy: post-processing of DP output.
        """
        weights = parameters_to_vector(state.generator.parameters()).detach()
        # By the planned number, whoever answered: a missing node makes the step
        # smaller, and its noise no larger.
        mean = (released.total.flatten() / config.clients_per_round).to(weights)
        vector_to_parameters(weights + mean, state.generator.parameters())
        # A classifier is not averaged over rounds; a run folder holds both all the
        # same.
        state.ema.load_state_dict(state.generator.state_dict())
        state.round += 1


METHOD = CohortClassifier()


def images_of(
    config: ResolvedConfig,
    client: ClientImages,
    is_held_out: bool,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns the images that a client evaluates itself on, or all others, with labels.

    Privacy: reads private data; output private.
    """
    count = len(client.labels)
    held_out = classifier.is_held_out(config.seed, client.name, count)
    chosen = held_out == is_held_out
    return to_float(client.images[chosen]), client.labels[chosen]


def accuracy_of(
    config: ResolvedConfig,
    client: ClientImages,
    weights: TensorDict,
) -> float:
    """Returns a classifier's accuracy on what a client holds out; NaN where nothing.

    Privacy: reads private data; output private.
    """
    model = classifier.with_weights(config, weights)
    held_out, labels = images_of(config, client, is_held_out=True)
    return classifier.accuracy(model, held_out, labels)
