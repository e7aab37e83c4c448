"""What amplification and clipping rest on: answers change no state, clients share none.

Purity: an answer leaves every bit of a client's state, its data and all random states
as they were. Independence: nothing of one client, however broken, reaches another
one's state or gradients; between two releases, its own clipped share is all that moves.

In tests/federation/test_round.py: who trains; the global random state over a round.
"""

import dataclasses
import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from fedgs.config.run_config import RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.federation.messages import EVERYONE, Clients, FakeBatch
from fedgs.federation.node import Node
from fedgs.federation.round import client_round, public_fakes
from fedgs.gan.client_training import Draws, train_discriminators
from fedgs.gan.discriminators import Discriminators
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, to_dct

ALL = range(len(tiny.SIZES))
CHANGED = 2
OTHERS = [client for client in ALL if client != CHANGED]
ROUNDS = (1, 2)


def _request(config: RunConfig, round: int, participants: Clients) -> FakeBatch:
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


@pytest.mark.parametrize("stacking", ["stacked", "loop"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"spectral_norm": False, "dct_size": 5}],
    ids=["default", "plain"],
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


@pytest.mark.parametrize(
    ("training", "clients_per_node", "stacking"),
    [
        ("every_round", 3, "stacked"),
        ("every_round", 1, "loop"),
        ("frozen", 3, "stacked"),
    ],
)
def test_state_after_many_rounds_is_the_same_whoever_was_selected(
    tmp_path, training, clients_per_node, stacking
):
    """Through the node, with its stored answers, as a run asks it."""
    config = tiny.tiny_config(
        discriminator_training=training,
        clients_per_node=clients_per_node,
        warm_start_rounds=1,
        discriminator_steps=1,
    )
    histories = [((0, 3), (0, 1)), ((), EVERYONE)]
    states = [
        _states_after(config, tmp_path / str(index), history)
        for index, history in enumerate(histories)
    ]
    assert states[0] == states[1]
    assert len(set(states[0])) == len(ALL)
    fresh = _states_after(config, tmp_path / "fresh", ())
    assert (states[0] != fresh) == (training == "every_round")


def test_state_after_selected_only_training_tells_who_was_selected(tmp_path):
    """The other side: condition (b) fails, and these hashes can tell."""
    config = tiny.tiny_config(discriminator_training="selected", warm_start_rounds=1)
    first, second = (
        _states_after(config, tmp_path / str(client), ((client,), (5,)))
        for client in (0, 1)
    )
    differs = [ours != theirs for ours, theirs in zip(first, second, strict=True)]
    assert differs == [client in (0, 1) for client in ALL]


def _states_after(
    config: RunConfig, private: Path, history: tuple[Clients, ...]
) -> list[str]:
    """The hash of every client's state after rounds with these participants."""
    states = []
    for node_id in range(config.num_nodes):
        node = Node(config, node_id, tiny.tiny_data(config), private)
        node.answer(public_fakes(config))
        for round, participants in enumerate(history, start=1):
            node.answer(_request(config, round, participants))
        hosted = range(len(node.hosted))
        states += [tiny.client_digest(node._discriminators, index) for index in hosted]
    return states


# ------------------------------------------------------------------ independence


def _pixels(data: FederatedImages) -> FederatedImages:
    images = data.images.copy()
    images[data.client_records[CHANGED]] ^= 255
    return dataclasses.replace(data, images=images)


def _labels(data: FederatedImages) -> FederatedImages:
    labels = data.labels.copy()
    own = data.client_records[CHANGED]
    labels[own] = (labels[own] + 1) % data.num_classes
    return dataclasses.replace(data, labels=labels)


def _fewer(data: FederatedImages) -> FederatedImages:
    records = list(data.client_records)
    records[CHANGED] = records[CHANGED][:1]
    return dataclasses.replace(data, client_records=tuple(records))


def _more(data: FederatedImages) -> FederatedImages:
    """Ten thousand images; those of all other clients keep their record numbers."""
    own = np.arange(10_000) + len(data.labels)
    rng, shape = np.random.default_rng(1), data.images.shape[1:]
    images = rng.integers(256, size=(len(own), *shape), dtype=np.uint8)
    records = list(data.client_records)
    records[CHANGED] = own
    return dataclasses.replace(
        data,
        images=np.concatenate([data.images, images]),
        labels=np.concatenate([data.labels, rng.integers(3, size=len(own))]),
        client_records=tuple(records),
    )


CHANGES = {"pixels": _pixels, "labels": _labels, "fewer": _fewer, "more": _more}
POISONS = {"NaN": torch.nan, "infinite": torch.inf, "huge": 1e30}


def _rounds(
    config: RunConfig,
    data: FederatedImages,
    hosted: list[int],
    poison: float | None = None,
) -> dict[int, tuple[str, str]]:
    """Each client's state and clipped gradients after some rounds, as hashes."""
    discriminators = Discriminators(config, hosted)
    if poison is not None:
        for name in ("conv1.weight", "linear.weight"):
            discriminators.params[name][hosted.index(CHANGED)] = poison
    outcome = {}
    for round in ROUNDS:
        request = _request(config, round, EVERYONE)
        fakes, labels = request.images, request.labels
        for chunk in discriminators.chunks(range(len(hosted))):
            clients = [hosted[index] for index in chunk.tolist()]
            draws = Draws(config, data, clients, "data", round, None)
            train_discriminators(config, discriminators, chunk, draws, fakes, labels)
            clipped = _clipped(config, discriminators, chunk, fakes, labels)
            assert clipped.isfinite().all()
            for row, client in enumerate(clients):
                state = tiny.client_digest(discriminators, int(chunk[row]))
                outcome[client] = (state, tiny.digest({"clipped": clipped[row]}))
    return outcome


def _clipped(
    config: RunConfig,
    discriminators: Discriminators,
    chunk: Tensor,
    fakes: Tensor,
    labels: Tensor,
) -> Tensor:
    """The clipped gradients of the last B fakes, (n, B, C, k, k)."""
    answered = fakes[-config.batch_size :], labels[-config.batch_size :]
    grads = discriminators.query(chunk, *answered)
    if config.dct_size is not None:
        grads = to_dct(grads, config.dct_size)
    return clip(PerSampleGradients(grads), config.clip_bound).values


def _chunked(**overrides: object) -> RunConfig:
    settings = {"discriminator_training": "every_round", "discriminator_steps": 1}
    settings |= {"clip_bound": 1e-3}
    return tiny.tiny_config(
        **settings | {"discriminator_learning_rate": 0.01} | overrides
    )


@lru_cache
def _untouched(stacking: str, chunk_size: int) -> dict[int, tuple[str, str]]:
    config = _chunked()
    return _rounds(config, tiny.tiny_data(config), list(ALL))


WAYS = [("stacked", 6), ("stacked", 2), ("loop", 6)]
ways = pytest.mark.parametrize(("stacking", "chunk_size"), WAYS)


@ways
@pytest.mark.parametrize("change", [*CHANGES, *POISONS])
def test_one_clients_data_or_broken_weights_change_no_bit_of_another(
    stacking, chunk_size, change
):
    """All in one chunk, or the changed client in a chunk with one other client."""
    config = _chunked()
    ours = _untouched(stacking, chunk_size)
    data = CHANGES.get(change, lambda data: data)(tiny.tiny_data(config))
    theirs = _rounds(config, data, list(ALL), POISONS.get(change))
    for client in OTHERS:
        assert ours[client] == theirs[client]
    assert ours[CHANGED][0] != theirs[CHANGED][0]
    if change in CHANGES:  # a broken client's clipped gradients are zero
        assert ours[CHANGED][1] != theirs[CHANGED][1]


@pytest.mark.parametrize("poison", ["NaN", "infinite"])
def test_poison_reaches_the_clip(poison):
    """The poison of the test above is one: unclipped gradients are not finite."""
    config = _chunked()
    discriminators = Discriminators(config, ALL)
    discriminators.params["linear.weight"][CHANGED] = POISONS[poison]
    request = _request(config, 1, EVERYONE)
    grads = discriminators.query(torch.arange(6), request.images, request.labels)
    is_finite = grads.isfinite().flatten(1).all(dim=1)
    assert is_finite.tolist() == [client != CHANGED for client in ALL]


@pytest.mark.parametrize(("stacking", "chunk_size"), [("loop", 6)])
def test_clients_are_the_same_with_any_neighbours(stacking, chunk_size):
    """Nothing of a client depends on who shares its node, or on its place there."""
    config = _chunked()
    data = tiny.tiny_data(config)
    together = _untouched(stacking, chunk_size)
    for hosted in ([0, 1], [4], [5, 3, 2]):
        for client, outcome in _rounds(config, data, hosted).items():
            assert outcome == together[client]


# ------------------------------------------------------------------ two releases


@pytest.mark.parametrize(
    ("stacking", "chunk_size", "dct_size"), [("stacked", 4, 5), ("loop", 4, None)]
)
@pytest.mark.parametrize("change", CHANGES)
def test_two_releases_differ_by_the_changed_clients_clipped_share_alone(
    tmp_path, stacking, chunk_size, dct_size, change
):
    """With the noise seeded it cancels; what is left must be of one client."""
    config = _chunked(
        client_selection="all",
        clients_per_node=6,
        dct_size=dct_size,
        warm_start_rounds=0,
    )
    data = tiny.tiny_data(config)
    releases, shares = [], []
    for index, own in enumerate((data, CHANGES[change](data))):
        node = Node(config, 0, own, tmp_path / str(index))
        node.answer(public_fakes(config))
        request = _request(config, 1, EVERYONE)
        releases.append(node.answer(request).values.double())
        shares.append(_share(config, own, request))
    moved = releases[0] - releases[1]
    expected = shares[0] - shares[1]
    # 6e-7 of it here, for releases are float32; a shared bit would be far more.
    assert (moved - expected).norm() < 1e-5 * expected.norm()
    assert expected.norm() > config.clip_bound
    bound = 2 * config.clip_bound * (1 + 1e-5)
    assert (moved.flatten(1).norm(dim=1) <= bound).all()


def _share(config: RunConfig, data: FederatedImages, request: FakeBatch) -> Tensor:
    """The clipped gradients of the changed client, computed without its neighbours."""
    discriminators, chunk = Discriminators(config, [CHANGED]), torch.tensor([0])
    fakes, labels = request.images, request.labels
    draws = Draws(config, data, [CHANGED], "data", request.round, None)
    train_discriminators(config, discriminators, chunk, draws, fakes, labels)
    return _clipped(config, discriminators, chunk, fakes, labels)[0]
