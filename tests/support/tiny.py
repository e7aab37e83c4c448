"""The tiny problem that tests share: 6 clients, 40 images of two strokes, 3 classes."""

import dataclasses
import hashlib
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from fedgs.config.run_config import ResolvedConfig, RunConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.discriminators import Discriminators
from fedgs.methods import new_state, phase_at, phase_with_discriminators
from fedgs.methods.base import Hosted, Request, State
from fedgs.methods.gs_wgan import METHOD as GS_WGAN
from fedgs.round.answer import answer_of, summed
from fedgs.round.codec import rounded

SIZES = (6, 4, 9, 1, 12, 8)  # unequal; client 3 owns a single image
SINGLE_IMAGE_CLIENT = 3
OWNERS = np.repeat(np.arange(len(SIZES)), SIZES)
NUM_CLASSES = 3
SIDE = 16

SETTINGS = {
    "data": "tiny",
    "image_size": SIDE,
    "image_channels": 1,
    "num_classes": NUM_CLASSES,
    "num_clients": len(SIZES),
    "clients_per_round": 2,
    "noise_multiplier": 0.5,
    "batch_size": 4,
    "num_rounds": 3,
    "discriminator_steps": 2,
    "discriminator_batch_size": 4,
    "warm_start_rounds": 2,
    "generator": "upsample",
    "generator_dim": 4,
    "discriminator_dim": 4,
    "latent_dim": 4,
    "num_workers": 1,
    "seed": 5,
    "noise_seed": 7,
}

FULL_PARTICIPATION: dict[str, Any] = {"client_selection": "all", "dct_size": 8}
FULL_PARTICIPATION |= {"clients_per_node": 2, "fakes_per_round": 8}
FULL_PARTICIPATION |= {"discriminator_training": "every_round"}

# Three releases of moments, and nothing else.
MOMENTS: dict[str, Any] = {"client_selection": "all", "clients_per_node": 2}
MOMENTS |= {"phases": "means:0.5,scatter:1,moments:2", "moment_size": 4}
MOMENTS |= {"generator": "gaussian", "latent": "normal"}

# One release of groups of clients: of every node, or of two cohorts.
BY_NODE: dict[str, Any] = {"phases": "group-means", "num_rounds": 1, "moment_size": 4}
BY_NODE |= {"generator": "gaussian", "latent": "normal", "client_selection": "all"}
BY_NODE |= {"num_clients": 24, "clients_per_node": 8}
BY_COHORT = BY_NODE | {"healthy": "v1", "suspicious": "v2", "cohorts": "cohorts.csv"}

# Two releases, then a round of GS-WGAN.
WITH_RELEASES = FULL_PARTICIPATION | MOMENTS | {"phases": "means:0.5,scatter:2,gs-wgan"}

# Moments, and a refiner fitted to features.
REFINED = MOMENTS | {"phases": MOMENTS["phases"] + ",features:2", "num_rounds": 4}
REFINED |= {"generator": "refined", "generator_dim": 2}


def run_config(**settings: object) -> RunConfig:
    """Returns settings as a user gives them, of GS-WGAN unless they say another."""
    return RunConfig.from_flat(settings)


def tiny_config(
    kind: Any = ResolvedConfig,
    defaults: dict[str, Any] | None = None,
    **overrides: object,
) -> Any:
    """Returns a resolved and valid configuration of the tiny problem.

    A `RunConfig` is one as a user gives it: some settings may be unset.
    `client_selection="all"` sets clients_per_round to all clients by itself. Of the
    `defaults`, settings that no phase of the run has are left out.
    """
    base = SETTINGS | (defaults or {})
    settings = base | overrides
    if settings.get("client_selection") == "all":
        overrides["clients_per_round"] = settings["num_clients"]
    if issubclass(kind, ResolvedConfig):
        # Without a run folder, which draws one: who takes part follows from the seed.
        overrides = {"selection_key": str(settings["seed"])} | overrides
    return kind.from_flat(overrides, run_config(**base)).validate()


def tiny_data(config: RunConfig) -> FederatedImages:
    """Returns the images of the first `config.num_clients` clients."""
    images, labels = strokes()
    kept = range(config.num_clients or len(SIZES))
    return FederatedImages(
        np.repeat(images, config.image_channels, axis=1),
        labels,
        tuple(np.flatnonzero(client == OWNERS) for client in kept),
        tuple(str(client) for client in kept),
        NUM_CLASSES,
        config.data,
    )


def write_tiny_npz(path: Path, clients: Iterable[int] = range(len(SIZES))) -> str:
    """Writes images of some clients for `npz:PATH`; returns that value of `data`."""
    images, labels = strokes()
    kept = np.isin(OWNERS, list(clients))
    np.savez(path, images=images[kept], labels=labels[kept], clients=OWNERS[kept])
    return f"npz:{path}"


def digest(tensors: dict[str, Tensor]) -> str:
    """Returns the hash of every bit of some state."""
    content = save({name: value.contiguous() for name, value in tensors.items()})
    return hashlib.sha256(content).hexdigest()


def client_digest(discriminators: Discriminators, index: int) -> str:
    """Returns the hash of every bit of one client's state."""
    return digest({n: value[index] for n, value in discriminators.state().items()})


def global_state() -> str:
    """Every random state of the process, and what else a call could leave behind."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    numbers = torch.get_rng_state().tolist(), keys.tolist(), rest
    flags = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.initial_seed())
    content = repr((kind, numbers, random.getstate(), flags))
    return hashlib.sha256(content.encode()).hexdigest()


def draw_fakes(config: RunConfig, server: State) -> tuple[Request, Any]:
    """Returns a gradient round's request as it is sent, and what waits for answers."""
    request, pending = GS_WGAN.begin(gs_wgan_of(config), server)
    return rounded(request, config), pending


def gs_wgan_of(config: RunConfig) -> Any:
    """Returns a run's settings as its phase of GS-WGAN sees them."""
    return phase_with_discriminators(config).config


def public_fakes(config: RunConfig, server: State | None = None) -> Request:
    """Returns the request of the warm start as it is sent."""
    server = server or new_state(config)
    return rounded(GS_WGAN.prepare(gs_wgan_of(config), server), config)


def next_request(config: RunConfig, server: State) -> Request:
    """Returns the request of the next round, whatever phase it is in."""
    method, own = phase_at(config, server.round + 1)
    return method.begin(own, server)[0]


def client_round(config, discriminators, data, hosted, request, node_id) -> Any:
    """Returns what a node answers in a round of any method."""
    return answer_of(config, Hosted(data, hosted, node_id, discriminators), request)


def embedding_round(config, data, hosted, request, node_id) -> Any:
    """Returns what a node without discriminators answers."""
    return client_round(config, None, data, hosted, request, node_id)


def server_round(config, server: State, pending: Any, answers) -> None:
    """Has the server learn from the answers of the next round."""
    round = server.round + 1
    released = summed(config, round, answers)
    method, own = phase_at(config, round)
    method.finish(own, server, pending, released)


def changed(request: Request, **changes: Any) -> Request:
    """Returns a request with other tensors and fields."""
    own = {n: changes.pop(n) for n in list(changes) if n in request.tensors}
    return dataclasses.replace(request, tensors=request.tensors | own, **changes)


def request_of(config: RunConfig, at: int = 1, **changes: Any) -> Request:
    """Returns the request of a round, as a server that starts there makes it."""
    server = new_state(config)
    server.round = at - 1
    return changed(draw_fakes(config, server)[0], **changes)


def record_calls(monkeypatch, owner: object, name: str) -> list[tuple]:
    """Returns the arguments of every later call of `owner.name`, which happens."""
    calls, original = [], getattr(owner, name)

    def recorded(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, recorded)
    return calls


def strokes(
    count: int = len(OWNERS), seed: int = 0, side: int = SIDE, alone: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (count, 1, side, side), and labels: the stroke that is alone, or lacks."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % NUM_CLASSES
    images = np.zeros((count, 1, side, side), np.uint8)
    for image, label in zip(images[:, 0], labels, strict=True):
        row, column = rng.integers(3, side - 4, size=2)
        along = np.arange(2, side - 2)
        if (label == 0) == alone:
            image[row : row + 2, along] = rng.integers(180, 256)  # horizontal
        if (label == 1) == alone:
            image[along, column : column + 2] = rng.integers(180, 256)  # vertical
        if (label == 2) == alone:
            image[along, along] = rng.integers(180, 256)  # diagonal
    return images, labels
