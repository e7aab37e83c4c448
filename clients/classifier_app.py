"""The Flower ClientApp of cohort selection: one node is one client.

    train            trains the server's classifier; replies with its weights
    query.measure    measures its own accuracy, which stays here; replies with nothing
    query.compare    replies whether that accuracy is at most each threshold
    query.join       replies with its cohort, in private mode by randomised response

No reply holds an accuracy or a number of images; weights of all clients count the same.
Of an exception the server learns that there was one: type and text may depend on data.
The accuracy and the answer to `join` are kept in Flower's `Context.state`, which leaves
no node of a deployment (a simulation is one machine, which sees everything).
"""

import dataclasses
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.app import Error as FlowerError
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from clients import CLIENT_APP_RAISED
from clients.flower_speed import hasten_simulation
from fedgs.cohorts import classifier
from fedgs.cohorts.selection import (
    ARRAYS,
    CONFIG,
    WEIGHT,
    membership,
    randomise,
    read_plan,
)
from fedgs.cohorts.selection_settings import CLIP_BOUND, MEMBERSHIP_EPSILON
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.randomness import stream
from fedgs.round.messages import RECORD

OWN = "own"  # what a client keeps
Labelled = tuple[NDArray[np.float32], NDArray[np.int64]]

hasten_simulation()
app = ClientApp()


class Clients:
    """The clients of one process, with their data before and after the planted bug."""

    def __init__(self, folder: Path) -> None:
        """Loads the data of a selection."""
        self.config, self.selection = read_plan(folder)
        self.data = self.before = load_data(self.config)
        if self.config.corruption != "none" and not self.selection.train_corrupted:
            intact = dataclasses.replace(self.config, corruption="none")
            self.before = load_data(intact)
        # Clients of a simulation share the machine: each worker has one core.
        torch.set_num_threads(1)

    def part(self, client_id: int, of: FederatedImages, held_out: bool) -> Labelled:
        """Returns the images that a client trains on, or those that it holds out."""
        images, labels = of.client(client_id)
        name = of.client_names[client_id]
        chosen = classifier.is_held_out(self.config.seed, name, len(labels))
        chosen = chosen if held_out else ~chosen
        return images[chosen], labels[chosen]


@lru_cache(maxsize=1)
def clients_of(folder: str) -> Clients:
    """Returns this process's clients, loaded on the first message of a selection.

    Privacy: reads private data; output private.
    """
    return Clients(Path(folder))


# ------------------------------------------------------------------ messages


Work = Callable[[Clients, Message, Context], RecordDict]


def answering(work: Work) -> Callable[[Message, Context], Message]:
    """Returns what replies to a message with the result of some work.

    Where the work fails, the reply says that it did, and nothing else.

    Privacy: as the work.
    """

    def answer(message: Message, context: Context) -> Message:
        try:
            clients = clients_of(str(message.content.config_records[CONFIG]["folder"]))
            return Message(work(clients, message, context), reply_to=message)
        except Exception:
            reason = f"client {_client_id(context)} failed"
            return Message(FlowerError(CLIENT_APP_RAISED, reason), reply_to=message)

    return answer


@app.query()
def roll_call(message: Message, context: Context) -> Message:
    """Tells the server the client's stable index.

    Privacy: public.
    """
    record = ConfigRecord({"node_id": _client_id(context)})
    return Message(RecordDict({RECORD: record}), reply_to=message)


@app.train()
@answering
def train(clients: Clients, message: Message, context: Context) -> RecordDict:
    """Trains the server's classifier on the client's own images.

    Privacy: reads private data; output private, in private mode with bounded
    sensitivity: the server adds the noise to the sum.
    """
    client_id = _client_id(context)
    config = clients.config
    sent = message.content.array_records[ARRAYS].to_torch_state_dict()
    model = classifier.with_weights(config, sent)
    number = int(str(message.content.config_records[CONFIG]["server-round"]))
    images, labels = clients.part(client_id, clients.before, held_out=False)
    rng = stream(config.seed, "cohorts/batches", client_id, number)
    classifier.train(model, images, labels, rng)
    trained = model.state_dict()
    if clients.selection.is_private:
        trained = classifier.clipped_update(trained, sent, CLIP_BOUND)
    return RecordDict({ARRAYS: ArrayRecord(trained), WEIGHT: MetricRecord({WEIGHT: 1})})


@app.query("measure")
@answering
def measure(clients: Clients, message: Message, context: Context) -> RecordDict:
    """Evaluates the classifier on the client's held-out images and keeps the result.

    Refused once the client has stated its cohort: its answer stays the one it gave.

    Privacy: reads private data; the reply is public.
    """
    client_id = _client_id(context)
    if OWN in context.state.config_records and "cohort" in _own(context):
        raise ValueError("a client measures itself no more after it stated its cohort")
    weights = message.content.array_records[ARRAYS].to_torch_state_dict()
    model = classifier.with_weights(clients.config, weights)
    held_out = clients.part(client_id, clients.data, held_out=True)
    accuracy = classifier.accuracy(model, *held_out)
    context.state[OWN] = ConfigRecord({"accuracy": accuracy})
    return RecordDict({RECORD: ConfigRecord({})})


@app.query("compare")
@answering
def compare(clients: Clients, message: Message, context: Context) -> RecordDict:
    """Tells of one or two thresholds whether the accuracy is at most that.

    Privacy: reads private data; output private: true bits, in private mode too, where
    the server adds noise to their sum over clients. They tell it the cohort.
    """
    thresholds = message.content.config_records[CONFIG]["thresholds"]
    accuracy = float(str(_own(context)["accuracy"]))
    is_at_most = [accuracy <= limit for limit in cast(list[float], thresholds)]
    return RecordDict({RECORD: ConfigRecord({"is_at_most": is_at_most})})


@app.query("join")
@answering
def join(clients: Clients, message: Message, context: Context) -> RecordDict:
    """Tells the client's cohort; the same question always gets the same answer.

    Privacy: in private mode releases (epsilon, 0)-DP output; event: one randomised
    response. Else reads private data; output private.
    """
    request, own = message.content.config_records[CONFIG], _own(context)
    low, high = (float(str(request[name])) for name in ("low", "high"))
    question = f"{low!r} {high!r}"
    # An answer to another question would be a second release.
    if own.setdefault("question", question) != question:
        raise ValueError("a client states its cohort once")
    if "cohort" not in own:
        selection = clients.selection
        cohort = membership(float(str(own["accuracy"])), low, high)
        if selection.is_private:
            # The server knows the seed of the run: with it, it could undo the response.
            rng = random.SystemRandom()
            cohort = randomise(cohort, selection.cohorts, MEMBERSHIP_EPSILON, rng)
        own["cohort"] = cohort
    return RecordDict({RECORD: ConfigRecord({"cohort": own["cohort"]})})


# ------------------------------------------------------------------ shared


def _client_id(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _own(context: Context) -> ConfigRecord:
    return context.state.config_records[OWN]
