"""What amplification and clipping rest on: answers change no state, clients share none.

Purity: an answer leaves every bit of a client's state, its data and all random states
as they were. Independence: nothing of one client, however broken, reaches another
one's state or gradients; between two releases, its own clipped share is all that moves.

In tests/round/test_round.py: who trains; the global random state over a round.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.discriminators import Discriminators
from fedgs.mechanism.sanitizer import PerSampleGradients, clip
from fedgs.methods.base import Hosted, Request
from fedgs.methods.schedule import EVERYONE, Clients
from fedgs.round.answer import raw_answers
from fedgs.round.node import Node
from tiny import client_round, public_fakes

ALL = range(len(tiny.SIZES))
CHANGED = 2


def _request(config: RunConfig, round: int, participants: Clients) -> Request:
    """The same fakes whoever takes part, as far as a discriminator can tell."""
    is_all = config.discriminator_training == "every_round"
    trainees = EVERYONE if is_all else participants
    return tiny.request_of(config, round, participants=participants, trainees=trainees)


def _data_digest(data: FederatedImages) -> str:
    arrays = (data.images, data.labels, *data.client_records)
    content = hashlib.sha256(repr((data.client_names, data.num_classes)).encode())
    for array in arrays:
        content.update(array.tobytes())
    return content.hexdigest()


# ------------------------------------------------------------------ purity


@pytest.mark.parametrize(
    ("stacking", "settings"),
    [("stacked", {}), ("loop", {"spectral_norm": False, "dct_size": 5})],
)
@pytest.mark.parametrize("chunk_size", [2])
def test_answering_changes_no_bit_of_anything(stacking, chunk_size, settings):
    frozen = tiny.tiny_config(discriminator_training="frozen", **settings)
    learning = dataclasses.replace(frozen, discriminator_training="every_round")
    data, discriminators = tiny.tiny_data(frozen), Discriminators(frozen, ALL)
    # Trained, so that moments, step counts and spectral vectors are not at their start.
    client_round(learning, discriminators, data, ALL, _request(learning, 1, ()), 0)
    assert discriminators.steps.tolist() == [2] * 6

    def everything() -> tuple[str, ...]:
        template = discriminators.template.state_dict()
        states = tiny.digest(discriminators.state()), tiny.digest(template)
        return (*states, _data_digest(data), tiny.global_state())

    before, answers = everything(), []
    for round, participants in ((2, (0,)), (3, (1, 4)), (4, EVERYONE), (4, EVERYONE)):
        request = _request(frozen, round, participants)
        asked = request.digest()
        answer = client_round(frozen, discriminators, data, ALL, request, 0)
        answers.append(answer)
        assert everything() == before
        assert request.digest() == asked
    assert torch.equal(answers[-1].values, answers[-2].values)  # the same question
    held = {value.data_ptr() for value in discriminators.state().values()}
    assert held.isdisjoint(answer.values.data_ptr() for answer in answers)


@pytest.mark.parametrize("training", ["every_round", "frozen"])
def test_state_after_many_rounds_is_the_same_whoever_was_selected(tmp_path, training):
    """Through the node, with its stored answers, as a run asks it."""
    settings = {"warm_start_rounds": 1, "discriminator_steps": 1, "clients_per_node": 3}
    config = tiny.tiny_config(discriminator_training=training, **settings)
    histories = {"some": ((0, 3), (0, 1)), "others": ((), EVERYONE), "nobody": ()}
    states: dict[str, list[str]] = {}
    for name, history in histories.items():
        states[name] = []
        for node_id in range(config.num_nodes):
            node = Node(config, node_id, tiny.tiny_data(config), tmp_path / name)
            node.answer(public_fakes(config))
            for round, participants in enumerate(history, start=1):
                node.answer(_request(config, round, participants))
            nets = node.state.discriminators
            states[name] += [tiny.client_digest(nets, index) for index in range(3)]
    assert states["some"] == states["others"]
    assert len(set(states["some"])) == len(ALL)
    assert (states["some"] != states["nobody"]) == (training == "every_round")


# ------------------------------------------------------------------ independence


def _others(data: FederatedImages) -> FederatedImages:
    """Inverted images with other labels."""
    images, labels = data.images.copy(), data.labels.copy()
    records = data.client_records[CHANGED]
    images[records] ^= 255
    labels[records] = (labels[records] + 1) % data.num_classes
    return dataclasses.replace(data, images=images, labels=labels)


def _more(data: FederatedImages) -> FederatedImages:
    """Ten thousand images; those of all other clients keep their record numbers."""
    added = np.arange(10_000) + len(data.labels)
    rng, shape = np.random.default_rng(1), data.images.shape[1:]
    images = rng.integers(256, size=(len(added), *shape), dtype=np.uint8)
    records = list(data.client_records)
    records[CHANGED] = added
    return dataclasses.replace(
        data,
        images=np.concatenate([data.images, images]),
        labels=np.concatenate([data.labels, rng.integers(3, size=len(added))]),
        client_records=tuple(records),
    )


CHANGES = {"others": _others, "more": _more}
POISONS = {"NaN": torch.nan, "huge": 1e30}


def _config(dct_size: int | None) -> RunConfig:
    settings = {"discriminator_training": "every_round", "discriminator_steps": 1}
    settings |= {"clip_bound": 1e-3, "discriminator_learning_rate": 0.01}
    return tiny.tiny_config(**settings, dct_size=dct_size)


def _outcome(
    config: RunConfig,
    data: FederatedImages,
    hosted: Sequence[int],
    poison: float | None = None,
) -> tuple[Tensor, dict[int, tuple[str, Tensor]]]:
    """The second round's release; each client's state and clipped gradients of it."""
    discriminators = Discriminators(config, hosted)
    if poison is not None:
        for name in ("conv1.weight", "linear.weight"):
            discriminators.params[name][hosted.index(CHANGED)] = poison
    for round in (1, 2):
        request = _request(config, round, EVERYONE)
        release = client_round(config, discriminators, data, hosted, request, 0)
    # Asked again, with the discriminators as they are.
    frozen = dataclasses.replace(config, discriminator_training="frozen")
    answers = raw_answers(frozen, Hosted(data, hosted, 0, discriminators), request)
    clients: dict[int, tuple[str, Tensor]] = {}
    chunks = discriminators.chunks(range(len(hosted)))
    for chunk, grads in zip(chunks, answers, strict=True):
        clipped = clip(PerSampleGradients(grads), config.clip_bound).values
        for index, values in zip(chunk.tolist(), clipped, strict=True):
            state = tiny.client_digest(discriminators, index)
            clients[hosted[index]] = state, values.double()
    return release.values.double(), clients


@lru_cache
def _untouched(
    stacking: str, chunk_size: int, dct_size: int | None
) -> tuple[Tensor, dict[int, tuple[str, Tensor]]]:
    config = _config(dct_size)
    return _outcome(config, tiny.tiny_data(config), ALL)


@pytest.mark.parametrize(
    ("stacking", "chunk_size", "dct_size"), [("stacked", 2, 5), ("loop", 6, None)]
)
@pytest.mark.parametrize("change", [*CHANGES, *POISONS])
def test_one_clients_data_or_broken_weights_move_its_own_clipped_share_alone(
    stacking, chunk_size, dct_size, change
):
    """No bit of another client, also not of the one in the same chunk.

    The noise is seeded, so it cancels in the difference of the two releases.
    """
    config = _config(dct_size)
    before, ours = _untouched(stacking, chunk_size, dct_size)
    data = CHANGES.get(change, lambda data: data)(tiny.tiny_data(config))
    after, theirs = _outcome(config, data, ALL, POISONS.get(change))
    for client in ALL:
        is_same = ours[client][0] == theirs[client][0]
        assert is_same == (client != CHANGED)
        assert torch.equal(ours[client][1], theirs[client][1]) == is_same
    moved, expected = before - after, ours[CHANGED][1] - theirs[CHANGED][1]
    # 6e-7 of it here, for releases are float32; a shared bit would be far more.
    assert (moved - expected).norm() < 1e-5 * expected.norm()
    bound = 2 * config.clip_bound * (1 + 1e-5)
    assert (moved.flatten(1).norm(dim=1) <= bound).all()


@pytest.mark.parametrize(("stacking", "chunk_size"), [("loop", 6)])
def test_clients_are_the_same_with_any_neighbours(stacking, chunk_size):
    """Nothing of a client depends on who shares its node, or on its place there."""
    config = _config(None)
    _, together = _untouched(stacking, chunk_size, None)
    for hosted in ([4], [5, 3, 2]):
        _, clients = _outcome(config, tiny.tiny_data(config), hosted)
        for client, (state, clipped) in clients.items():
            assert state == together[client][0]
            assert torch.equal(clipped, together[client][1])
