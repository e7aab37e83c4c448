"""What crosses the network: FakeBatch down, SanitizedGradients up, nothing else.

A message is encoded as a flat dictionary of scalars and bytes (tensors as safetensors,
never pickle), so that any transport can carry it. `encode_answer` is the one place
that encodes a reply, and it accepts sanitized gradients only.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedgs.config import RunConfig, UserError
from fedgs.sanitizer import SanitizedGradients, received
from fedgs.shapes import Images, Labels

Payload = dict[str, str | int | float | bytes]
Clients = Sequence[int] | Literal["all"]
RECORD = "fedgs"  # the name under which client and server carry a payload
EVERYONE: Literal["all"] = "all"


@dataclass(frozen=True)
class FakeBatch:
    """The server's request of one round: public, computed from DP outputs only.

    Round 0 is the warm start on public fakes: nobody answers it.

    Attributes:
        round: the round, 0 for the warm start.
        images: the fakes, shape (F, C, S, S), float32 in [0, 1], 0 = background.
        labels: shape (F,), int64.
        participants: the clients that answer on the last `batch_size` fakes.
        trainees: the clients whose discriminators train on the fakes, or "all".
        keep_round: the last committed checkpoint; a node keeps its state of then.
    """

    round: int
    images: Images
    labels: Labels
    participants: Clients
    trainees: Clients
    keep_round: int = 0

    def digest(self) -> str:
        """Returns the hash of what is asked: the same request, the same answer.

        Privacy: public.
        """
        asked = (self.round, _join(self.participants), _join(self.trainees))
        content = hashlib.sha256(repr(asked).encode())
        content.update(self.images.numpy().tobytes())
        content.update(self.labels.numpy().tobytes())
        return content.hexdigest()


def clients_of(clients: Clients, hosted: Sequence[int]) -> list[int]:
    """Returns which of a node's hosted clients are meant by a request.

    Privacy: public.
    """
    if clients == EVERYONE:
        return list(hosted)
    wanted = set(clients)
    return [client for client in hosted if client in wanted]


def encode_batch(batch: FakeBatch) -> Payload:
    """Encodes a request.

    Privacy: public.
    """
    return {
        "round": batch.round,
        "participants": _join(batch.participants),
        "trainees": _join(batch.trainees),
        "keep_round": batch.keep_round,
        "tensors": save({"images": batch.images, "labels": batch.labels}),
    }


def decode_batch(payload: Mapping[str, object], config: RunConfig) -> FakeBatch:
    """Decodes a request and checks it against the run's configuration.

    Privacy: public.

    Raises:
        UserError: wrong shapes, types or values; nothing of the request is used.
    """
    tensors = _tensors(payload, {"images", "labels"})
    images, labels = tensors["images"], tensors["labels"]
    side = config.image_size
    shape = (config.fakes_sent, config.image_channels, side, side)
    if tuple(images.shape) != shape or images.dtype != torch.float32:
        raise UserError(f"fakes of shape {tuple(images.shape)}: expected {shape}")
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise UserError("fakes outside [0, 1]: refused")
    num_classes = config.num_classes or 1
    if tuple(labels.shape) != shape[:1] or labels.dtype != torch.int64:
        raise UserError(f"labels of shape {tuple(labels.shape)}: expected {shape[:1]}")
    if not bool(((labels >= 0) & (labels < num_classes)).all()):
        raise UserError(f"labels outside [0, {num_classes}): refused")
    return FakeBatch(
        round=_integer(payload, "round"),
        images=images,
        labels=labels,
        participants=_split(payload.get("participants")),
        trainees=_split(payload.get("trainees")),
        keep_round=_integer(payload, "keep_round"),
    )


def encode_answer(answer: SanitizedGradients | None) -> Payload:
    """Encodes a reply: sanitized gradients, or an empty one from a node that trained.

    Privacy: post-processing of DP output; the only function that encodes a reply.

    Raises:
        TypeError: anything but sanitized gradients.
    """
    if answer is None:
        return {"is_empty": 1}
    if type(answer) is not SanitizedGradients:
        raise TypeError(
            f"{type(answer).__name__} must not leave a client: only SanitizedGradients"
        )
    return {
        "is_empty": 0,
        "round": answer.round,
        "node_id": answer.node_id,
        "noise_std": answer.noise_std,
        "clip_bound": answer.clip_bound,
        "tensors": save({"gradients": answer.values.contiguous()}),
    }


def decode_answer(
    payload: Mapping[str, object], config: RunConfig, round: int, node_id: int
) -> SanitizedGradients | None:
    """Decodes a reply and checks that it answers this round with the agreed noise.

    Privacy: post-processing of DP output.

    Raises:
        UserError: wrong round, node, shape, noise, or non-finite values. The text
            quotes no value of the reply.
    """
    if payload.get("is_empty") == 1:
        return None
    values = _tensors(payload, {"gradients"})["gradients"]
    where = f"answer of node {node_id} to round {round}"
    if tuple(values.shape) != config.release_shape or values.dtype != torch.float32:
        raise UserError(
            f"{where}: shape {tuple(values.shape)}, expected {config.release_shape}"
        )
    if not bool(values.isfinite().all()):
        raise UserError(f"{where}: non-finite values")
    if _integer(payload, "round") != round or _integer(payload, "node_id") != node_id:
        raise UserError(f"{where}: belongs to another round or node")
    agreed = (config.noise_std, config.clip_bound)
    if (payload.get("noise_std"), payload.get("clip_bound")) != agreed:
        raise UserError(f"{where}: another noise or clip bound than the run's")
    return received(values, round, node_id, *agreed)


def _tensors(payload: Mapping[str, object], names: set[str]) -> dict[str, torch.Tensor]:
    content = payload.get("tensors")
    if not isinstance(content, bytes):
        raise UserError("message without tensors: refused")
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError):  # KeyError: an unknown dtype
        # Without the cause: its text quotes the sender's bytes.
        raise UserError("message that cannot be decoded: refused") from None
    if set(tensors) != names:
        raise UserError(f"message with other tensors than {sorted(names)}: refused")
    return tensors


def _integer(payload: Mapping[str, object], name: str) -> int:
    value = payload.get(name)
    if not isinstance(value, int):
        raise UserError(f"message without an integer {name}: refused")
    return value


def _join(clients: Clients) -> str:
    if isinstance(clients, str):
        return clients
    return ",".join(str(client) for client in clients)


def _split(text: object) -> Clients:
    if text == EVERYONE:
        return EVERYONE
    try:
        return tuple(int(part) for part in str(text).split(",") if part)
    except ValueError as error:
        raise UserError("message with a malformed list of clients: refused") from error
