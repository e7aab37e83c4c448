"""How many clients a classifier is right about: the questions of a deployed selection.

After the rounds of `fedgs.methods.cohort_classifier`, in each round

    server                                   node, for its clients
    the classifier, P thresholds t --------> each client: its accuracy on images that it
                                               never trained on
                                               C / sqrt(P) where it is at most t,
                                               else -C / sqrt(P): of norm C
    sums -> counts  <----------------------- sum over its clients + Gaussian noise
                                               (one release, B = 1)

P is 1 or 2. The rounds search for percentiles, if these are asked for, and the last one
counts the cohorts. No client says which one it is in: its node computes that from the
last question (`cohorts_of`), and tells nobody.

Source: as `fedgs.cohorts.selection`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedgs.cohorts import classifier
from fedgs.cohorts.selection import membership, thresholds_after
from fedgs.cohorts.selection_settings import (
    ABOVE,
    REST,
    SELECTED,
    Thresholds,
)
from fedgs.config.fields import Problem, entry
from fedgs.config.plugins import COHORT_CLASSIFIER
from fedgs.config.run_config import ResolvedConfig
from fedgs.config.settings import Settings as PlainSettings
from fedgs.config.terms import Terms
from fedgs.data.federated import ClientImages, FederatedImages
from fedgs.errors import UserError
from fedgs.methods.base import (
    Declared,
    Method,
    OneClient,
    Released,
    Request,
    State,
    asked,
)
from fedgs.methods.cohort_classifier import accuracy_of

THRESHOLDS = "thresholds"  # beside the classifier's weights in a request
COUNTS = "counts"  # the part of a checkpoint, and its tensor


@dataclass(frozen=True)
class CountSettings(PlainSettings):
    """What divides the cohorts, as in `Thresholds`."""

    below: float | None = entry(None)
    above: float | None = entry(None)
    are_percentiles: bool = entry(False)

    @property
    def thresholds(self) -> Thresholds:
        """The same, checked; raises `UserError`."""
        return Thresholds(self.below, self.above, self.are_percentiles)

    def problems(self) -> Iterator[Problem]:
        """Yields why the rounds are not those of a selection."""
        yield from super().problems()
        if self.client_selection != "all":
            yield "client_selection", "all clients are counted; give all"
        known = [phase.method for phase in self.phases]
        num_rounds = self.num_rounds - self.rounds_before
        wanted = self.thresholds.num_questions
        if known != [COHORT_CLASSIFIER, self.method] or num_rounds != wanted:
            remedy = f"{COHORT_CLASSIFIER}, then {self.method}*{wanted}"
            yield "phases", f"give {remedy}, as `fedgs deploy select-clients` does"


@dataclass(frozen=True)
class CountConfig(ResolvedConfig, CountSettings):
    """What this phase uses."""


class CohortCounts(Method[CountConfig]):
    """Clients answer whether their own accuracy is at most each threshold."""

    Settings = CountSettings
    recipe = MappingProxyType({"clients_per_node": 1})
    has_generator = False
    commits_every_round = True
    hides_duration = True

    def terms(self, config: CountConfig, round: int) -> Terms:
        """Returns one count for each threshold, clipped to C as a whole."""
        shape = (1, 1, 1, len(config.thresholds.bounds))
        return Terms("count", config.noise_multiplier, config.clip_bound, shape)

    def state(self, config: CountConfig) -> State:
        """Refuses to begin a run: there is no classifier yet."""
        raise UserError(f"phases = {config.methods}: begin with {COHORT_CLASSIFIER}")

    def join(self, config: CountConfig, state: State) -> None:
        """Adds the counts, shape (questions, P)."""
        thresholds = config.thresholds
        shape = (thresholds.num_questions, len(thresholds.bounds))
        part = nn.Module()
        part.register_buffer(COUNTS, torch.zeros(shape, dtype=torch.float64))
        state.parts[COUNTS] = part

    def declared(self, config: CountConfig, round: int) -> Mapping[str, Declared]:
        """Returns the weights of the classifier by name, and the thresholds."""
        declared: dict[str, Declared] = {}
        for name, shape in classifier.shapes(config).items():
            declared[name] = Declared(shape)
        num_thresholds = len(config.thresholds.bounds)
        declared[THRESHOLDS] = Declared((num_thresholds,))
        return declared

    def begin(self, config: CountConfig, state: State) -> tuple[Request, None]:
        """Returns the classifier and the next thresholds; draws nothing.

        Privacy: post-processing of DP output.
        """
        thresholds = _thresholds_after(config, state, _num_asked(config, state))
        sent = torch.tensor([*thresholds.values()], dtype=torch.float32)
        tensors = dict(state.generator.state_dict())
        tensors[THRESHOLDS] = sent
        return asked(config, state, tensors), None

    def answer(
        self,
        config: CountConfig,
        client: OneClient,
        request: Request,
    ) -> Tensor:
        """Returns C / sqrt(P) for each threshold not exceeded, else -C / sqrt(P).

        Privacy: reads private data; output private.
        """
        accuracy, thresholds = _measured(config, client, request)
        is_at_most: list[bool] = []
        for name, limit in thresholds.items():
            if name == "below":
                is_at_most.append(accuracy <= limit)
            else:
                # Also of NaN: who holds out nothing is not above.
                is_at_most.append(not accuracy > limit)
        answers = torch.tensor(is_at_most, dtype=torch.float32)
        signs = 2.0 * answers - 1.0  # 1 or -1
        values = _step(config) * signs
        return values[None, None, None]

    def finish(
        self,
        config: CountConfig,
        state: State,
        pending: None,
        released: Released,
    ) -> None:
        """Keeps the noisy counts.

        Privacy: post-processing of DP output.
        """
        # Of K clients a add a step, and K - a take one off.
        steps = released.total.flatten() / _step(config)
        counts = (config.num_clients + steps) / 2
        _counts(state)[_num_asked(config, state)] = counts
        state.round += 1


METHOD = CohortCounts()


def cohorts_of(
    config: CountConfig,
    data: FederatedImages,
    hosted: Sequence[int],
    request: Request,
) -> dict[str, str]:
    """Returns the cohort of each client of a node, by its name.

    Privacy: reads private data; output private, and stays at the node.

    Args:
        config: the phase's configuration.
        data: the data of the node.
        hosted: the numbers of its clients.
        request: the last question.
    """
    cohorts: dict[str, str] = {}
    for number in hosted:
        client = data.of(number)
        accuracy, thresholds = _measured(config, client, request)
        cohorts[client.name] = membership(accuracy, thresholds)
    return cohorts


def outcome_of(config: CountConfig, state: State) -> dict[str, Any]:
    """Returns the thresholds, and the noisy count of each cohort.

    Privacy: post-processing of DP output.

    Args:
        config: the configuration of the phase, whose rounds are done.
        state: the state of the run.
    """
    last = config.thresholds.num_questions - 1
    thresholds = _thresholds_after(config, state, last)
    at_most = _counts(state)[last].tolist()
    counts: dict[str, float] = {}
    if "below" in thresholds:
        counts[SELECTED] = at_most[0]
    if "above" in thresholds:
        counts[ABOVE] = config.num_clients - at_most[-1]
    num_counted = sum(counts.values())
    counts[REST] = config.num_clients - num_counted
    return {"thresholds": thresholds, "noisy_counts": counts}


def _thresholds_after(
    config: CountConfig,
    state: State,
    num_asked: int,
) -> dict[str, float]:
    """Returns what is asked after so many questions."""
    counts = _counts(state)[:num_asked].tolist()
    return thresholds_after(config.thresholds, config.num_clients, counts)


def _measured(
    config: CountConfig,
    client: ClientImages,
    request: Request,
) -> tuple[float, dict[str, float]]:
    """Returns a client's accuracy, and the thresholds by the names of their settings.

    Privacy: reads private data; output private.
    """
    weights = {name: request.tensors[name] for name in classifier.shapes(config)}
    accuracy = accuracy_of(config, client, weights)
    sent = request.tensors[THRESHOLDS].tolist()
    thresholds = dict(zip(config.thresholds.bounds, sent, strict=True))
    # As thresholds are sent: 0.7 is at most 0.7.
    return float(np.float32(accuracy)), thresholds


def _step(config: CountConfig) -> float:
    num_thresholds = len(config.thresholds.bounds)
    return config.clip_bound / math.sqrt(num_thresholds)


def _num_asked(config: CountConfig, state: State) -> int:
    return state.round - config.rounds_before


def _counts(state: State) -> Tensor:
    part = state.parts[COUNTS]
    assert isinstance(part, nn.Module)  # noqa: S101 - of `join`
    return part.get_buffer(COUNTS)
