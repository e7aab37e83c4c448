"""What crosses the network: Request down, SanitizedGradients up, nothing else.

A message is encoded as a flat dictionary of scalars and bytes (tensors as
`fedgs.federation.codec` packs them, never pickle), so that any transport can
carry it. `encode_answer` is the one place that encodes a reply, and it accepts
sanitized gradients only.

Both decoders take the other side for hostile. They compare the size of everything with
what the run's settings allow before they decode it, take no key, type or value but the
expected, and raise `UserError` with a text that quotes nothing of the message. Which
inputs were tried: docs/security.md.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, Self

import torch
from torch import Tensor

from fedgs.config.integers import noise_units
from fedgs.config.placement import Placement
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError
from fedgs.federation.codec import (
    pack_fakes,
    pack_masked,
    pack_release,
    pack_stage,
    unpack_fakes,
    unpack_masked,
    unpack_release,
    unpack_stage,
)
from fedgs.mechanism.answer_bounds import check_norms
from fedgs.mechanism.integers import IntegerSum, from_integers
from fedgs.mechanism.masks import Announced, Attempt, MaskedSum, received_masked, unmask
from fedgs.mechanism.sanitizer import SanitizedGradients, received
from fedgs.shapes import Images, Labels, TensorDict

Payload = dict[str, str | int | float | bytes]
Clients = Sequence[int] | Literal["all"]
RECORD = "fedgs"  # the name under which client and server carry a payload
TOLD = "told"  # beside it, to a deployed node: the server's start, its last answer
EVERYONE: Literal["all"] = "all"
ADDRESS_FIELDS = frozenset({"run_folder", "run_id"})  # with a request, for clients/
REQUEST_FIELDS = frozenset(
    {"round", "participants", "trainees", "keep_round", "tensors"}
)
ATTEMPT_FIELDS = frozenset({"attempt", "masking_keys"})  # with secure aggregation
ANSWER_FIELDS = frozenset(
    {
        *("is_empty", "round", "node_id", "request"),
        *("noise_std", "clip_bound", "tensors"),
    }
)
NEXT_KEY = "next_key"  # of a masked answer
Answer = SanitizedGradients | MaskedSum  # in Flower
Release = Answer | IntegerSum  # the last one in the local engine
MOST_ATTEMPTS = 10_000  # of one round
SHOWN_CHARACTERS = 200  # of a foreign text, in one log line


@dataclass(frozen=True)
class Request:
    """What a `FakeBatch` and a `StageRequest` have in common: who is asked, and when.

    Attributes:
        round: the round, 0 for the warm start.
        participants: the clients that answer, or "all".
        trainees: the clients of the nodes that are asked, or "all".
        keep_round: the last committed checkpoint; a node keeps its state of then.
        attempt: whose sums are added up under masks; None without masks.
    """

    round: int
    _: KW_ONLY
    participants: Clients = EVERYONE
    trainees: Clients = EVERYONE
    keep_round: int = 0
    attempt: Attempt | None = None

    def digest(self) -> str:
        """Returns the hash of what is asked: the same request, the same answer."""
        return self._digest

    def common_digest(self) -> str:
        """Returns the hash of what all nodes are asked with, whoever takes part."""
        return self._common_digest

    def content(self) -> Iterable[Tensor]:
        """Returns the tensors that the nodes compute with."""
        raise NotImplementedError

    def per_node(self, hosting: Placement, nodes: Iterable[int]) -> dict[int, Self]:
        """Returns each node's request, in the given order; it names no other's clients.

        "all" stays, for the run's settings say that everybody is meant. Nodes with the
        same content share one request, and with it its digest.
        """
        distinct: dict[tuple[Clients, Clients], Self] = {}
        requests: dict[int, Self] = {}
        for node in nodes:
            hosted = hosting.hosted(node)
            taking_part = _of_node(self.participants, hosted)
            training = _of_node(self.trainees, hosted)
            if (key := (taking_part, training)) not in distinct:
                names = {"participants": taking_part, "trainees": training}
                distinct[key] = replace(self, **names)
            requests[node] = distinct[key]
        return requests

    @cached_property
    def _digest(self) -> str:
        # Without keep_round: a checkpoint between two sendings makes no new question.
        fields = (self.round, _join(self.participants), _join(self.trainees))
        if self.attempt is None:
            return self._hash(fields)
        masked = (*fields, self.attempt.digest, self._common_digest)
        return hashlib.sha256(repr(masked).encode()).hexdigest()

    @cached_property
    def _common_digest(self) -> str:
        return self._hash((self.round,))

    def _hash(self, fields: tuple[int | str, ...]) -> str:
        content = hashlib.sha256(repr(fields).encode())
        for tensor in self.content():
            content.update(tensor.numpy().tobytes())
        return content.hexdigest()


@dataclass(frozen=True)
class FakeBatch(Request):
    """The request of a gradient round.

    Round 0 is the warm start on public fakes: nobody answers it.

    Attributes:
        images: the fakes, shape (F, C, S, S), float32 in [0, 1], 0 = background; the
            participants answer on the last `batch_size` ones.
        labels: shape (F,), int64.
    """

    images: Images
    labels: Labels

    def content(self) -> Iterable[Tensor]:
        """Returns images and labels."""
        return (self.images, self.labels)


@dataclass(frozen=True)
class StageRequest(Request):
    """The request of a stage: what every client computes its embedding with.

    The kind of the networks is that of the run's settings.

    Attributes:
        networks: the tensors of each feature network.
        centre: what is subtracted, shape (networks, classes, features), float32.
    """

    networks: tuple[TensorDict, ...]
    centre: Tensor

    def content(self) -> Iterable[Tensor]:
        """Returns the tensors of all networks, by name, and the centre."""
        for net in self.networks:
            yield from (net[name] for name in sorted(net))
        yield self.centre


def fakes_of(request: Request) -> FakeBatch:
    """Returns the request of a gradient round, or of the warm start.

    Raises:
        UserError: it is of a stage.
    """
    if not isinstance(request, FakeBatch):
        raise UserError(f"round {request.round} is a stage: it answers no fakes")
    return request


def clients_of(clients: Clients, hosted: Sequence[int]) -> list[int]:
    """Returns which of a node's hosted clients are meant by a request."""
    if clients == EVERYONE:
        return list(hosted)
    wanted = set(clients)
    return [client for client in hosted if client in wanted]


def _of_node(clients: Clients, hosted: Sequence[int]) -> Clients:
    return EVERYONE if clients == EVERYONE else tuple(clients_of(clients, hosted))


def pack_request(request: Request, config: ResolvedConfig) -> bytes:
    """Returns the tensors of a request as bytes; the same for every node."""
    if isinstance(request, StageRequest):
        return pack_stage(request.networks, request.centre)
    batch = fakes_of(request)
    return pack_fakes(batch.images, batch.labels, config)


def encode_batch(
    batch: Request, config: ResolvedConfig, tensors: bytes | None = None
) -> Payload:
    """Encodes a request.

    Args:
        batch: the request.
        config: the run's.
        tensors: its tensors, packed already by `pack_request`.
    """
    if tensors is None:
        tensors = pack_request(batch, config)
    payload: Payload = {
        "round": batch.round,
        "participants": _join(batch.participants),
        "trainees": _join(batch.trainees),
        "keep_round": batch.keep_round,
        "tensors": tensors,
    }
    if batch.attempt is not None:
        keys = {"attempt": batch.attempt.number, "masking_keys": batch.attempt.packed}
        payload |= keys
    return payload


def decode_batch(
    payload: Mapping[str, object], config: ResolvedConfig
) -> FakeBatch | StageRequest:
    """Decodes a request and checks it against the run's configuration.

    Raises:
        UserError: wrong keys, sizes, shapes, types or values; nothing of the request
            is used, and the text quotes nothing of it.
    """
    round, participants, trainees, keep_round = decode_asked(payload, config)
    attempt = None
    if round and config.is_masked:
        number = _integer(payload, "attempt", 1, MOST_ATTEMPTS)
        attempt = Attempt.unpack(number, payload.get("masking_keys"), config.num_nodes)
    if 1 <= round <= config.num_stages:
        if (participants, trainees) != (EVERYONE, EVERYONE):
            raise UserError("request for a stage that is not to everyone: refused")
        networks, centre = unpack_stage(payload["tensors"], config, round)
        return StageRequest(
            round, networks, centre, keep_round=keep_round, attempt=attempt
        )
    images, labels = unpack_fakes(payload["tensors"], config)
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise UserError("fakes outside [0, 1]: refused")
    num_classes = config.num_classes
    if not bool(((labels >= 0) & (labels < num_classes)).all()):
        raise UserError(f"labels outside [0, {num_classes}): refused")
    return FakeBatch(
        round,
        images,
        labels,
        participants=participants,
        trainees=trainees,
        keep_round=keep_round,
        attempt=attempt,
    )


def decode_asked(
    payload: Mapping[str, object], config: ResolvedConfig
) -> tuple[int, Clients, Clients, int]:
    """Returns round, participants, trainees and keep_round of a request, checked.

    Raises:
        UserError: as `decode_batch`.
    """
    masked = ATTEMPT_FIELDS if config.is_masked else frozenset[str]()
    _check_fields(payload, REQUEST_FIELDS, ADDRESS_FIELDS | masked)
    round = _integer(payload, "round", 0, config.num_rounds)
    participants = _split(payload, "participants", config)
    most = config.clients_per_round if round > 0 else 0  # nobody answers a warm start
    everyone = config.num_clients
    if (everyone if participants == EVERYONE else len(participants)) > most:
        raise UserError(f"request with more than {most} participants: refused")
    trainees = _split(payload, "trainees", config)
    # A later one would have the node delete what a resumed run goes on from.
    keep_round = _integer(payload, "keep_round", 0, max(round - 1, 0))
    return round, participants, trainees, keep_round


def decode_key_request(payload: Mapping[str, object], config: ResolvedConfig) -> int:
    """Returns the round that a masking key is asked for.

    Raises:
        UserError: wrong keys or values.
    """
    _check_fields(payload, {"round"}, ADDRESS_FIELDS)
    return _integer(payload, "round", 1, config.num_rounds)


def decode_key(payload: Mapping[str, object]) -> Announced:
    """Returns the masking key that a node announces.

    Raises:
        UserError: wrong keys or values.
    """
    _check_fields(payload, {NEXT_KEY})
    return Announced.unpack(payload[NEXT_KEY])


def encode_answer(
    answer: Release | None, config: ResolvedConfig, request: Request
) -> Payload:
    """Encodes a reply: sanitized gradients, or an empty one from a node that trained.

    With secure aggregation it is a masked sum, and nothing else is encoded.

    Privacy: post-processing of DP output; the only function that encodes a reply.

    Args:
        answer: of the node.
        config: the run's.
        request: what was asked.

    Raises:
        TypeError: anything but sanitized gradients, or what is not masked in a run
            with secure aggregation.
    """
    if answer is None:
        return {"is_empty": 1}
    only = MaskedSum if config.is_masked else SanitizedGradients
    # The very type: a subclass could carry more.
    if type(answer) is not only:
        raise TypeError(
            f"{type(answer).__name__} must not leave a client: only {only.__name__}"
        )
    terms = config.terms(request.round)
    if isinstance(answer, MaskedSum):
        own: Payload = {"tensors": pack_masked(answer.values)}
        own |= {NEXT_KEY: answer.next_key}
    else:
        own = {"tensors": pack_release(answer.values, config, terms)}
    return {
        "is_empty": 0,
        "round": answer.round,
        "node_id": answer.node_id,
        "noise_std": terms.noise_std,
        "clip_bound": terms.clip_bound,
        "request": bytes.fromhex(request.digest()),
        **own,
    }


def decode_answer(
    payload: Mapping[str, object],
    config: ResolvedConfig,
    request: Request,
    node_id: int,
) -> Answer | None:
    """Decodes a reply and checks that it answers this request with the agreed noise.

    Privacy: post-processing of DP output.

    Args:
        payload: what came.
        config: the run's.
        request: what was sent.
        node_id: to whom.

    Raises:
        UserError: wrong keys, round, node, request, size, shape or noise, non-finite
            values, or a larger norm than honest answers have. The text names node and
            round, and quotes nothing of the reply.
    """
    try:
        return _decode_answer(payload, config, request, node_id)
    except UserError as error:
        where = f"answer of {config.node_title(node_id)} to round {request.round}"
        raise UserError(f"{where}: {error}") from None


def _decode_answer(
    payload: Mapping[str, object],
    config: ResolvedConfig,
    request: Request,
    node_id: int,
) -> Answer | None:
    terms = config.terms(request.round)
    hosted = config.hosting.hosted(node_id)
    participating = len(clients_of(request.participants, hosted))
    if _integer(payload, "is_empty", 0, 1):
        _check_fields(payload, {"is_empty"})
        if participating:
            raise UserError("empty, though its clients take part")
        return None
    own = {NEXT_KEY} if config.is_masked else set[str]()
    _check_fields(payload, ANSWER_FIELDS | own)
    if not participating:
        raise UserError("gradients, though none of its clients takes part")
    agreed = {
        "round": request.round,
        "node_id": node_id,
        "request": bytes.fromhex(request.digest()),
        "noise_std": terms.noise_std,
        "clip_bound": terms.clip_bound,
    }
    for name, value in agreed.items():
        # Types too, for True equals 1 and 1 equals 1.0.
        if type(payload[name]) is not type(value) or payload[name] != value:
            raise UserError(f"another {name} than this run and round have")
    if config.is_masked:
        masked = unpack_masked(payload["tensors"], terms)
        key = payload[NEXT_KEY]
        # None is announced by a node whose limits allow no further release.
        next_key = b"" if key == b"" else Announced.unpack(key).pack()
        return received_masked(masked, request.round, node_id, next_key)
    values = unpack_release(payload["tensors"], config, terms)
    check_norms(values, config, participating, terms)
    return received(values, request.round, node_id, terms.noise_std, terms.clip_bound)


def sum_of(
    config: ResolvedConfig, request: Request, answers: Sequence[Release]
) -> SanitizedGradients:
    """Returns what a secure aggregation opens: the sum of all listed nodes' releases.

    Privacy: post-processing of DP output.

    Args:
        config: the run's.
        request: what was answered.
        answers: of all of them, masked or, in the local engine, as integers.

    Raises:
        UserError: a larger norm than honest sums have; nobody can tell whose fault.
    """
    terms = config.terms(request.round)
    masked = [answer for answer in answers if isinstance(answer, MaskedSum)]
    plain = [answer.values for answer in answers if isinstance(answer, IntegerSum)]
    total = unmask(masked) if masked else torch.stack(plain).sum(0)
    units = config.units(terms)
    values = from_integers(total, units / terms.clip_bound).float()
    # Of the sum, by the noise that was added: its integer std is rounded up.
    multiplier = noise_units(terms.noise_multiplier, units) / (2 * units)
    of_sum = replace(terms, noise_multiplier=multiplier * len(answers) ** 0.5)
    participants = clients_of(request.participants, range(config.num_clients))
    check_norms(values, config, len(participants), of_sum)
    place = (request.round, answers[0].node_id)
    return received(values, *place, of_sum.noise_std, terms.clip_bound)


def one_line(text: object) -> str:
    """Returns a foreign text for a log: printable, short and on one line.

    Privacy: public; of public texts only.
    """
    start = str(text)[:SHOWN_CHARACTERS]
    return "".join(c if c.isprintable() else "?" for c in start)


def _check_fields(
    payload: Mapping[str, object], names: Set[str], others: Set[str] = frozenset()
) -> None:
    if not names <= set(payload) <= names | others:
        raise UserError(f"message with other fields than {sorted(names)}: refused")


def _integer(payload: Mapping[str, object], name: str, least: int, most: int) -> int:
    value = payload.get(name)
    if type(value) is not int or not least <= value <= most:  # True is no integer
        raise UserError(
            f"message whose {name} is no integer from {least} to {most}: refused"
        )
    return value


def _join(clients: Clients) -> str:
    if isinstance(clients, str):
        return clients
    return ",".join(str(client) for client in clients)


def _split(payload: Mapping[str, object], name: str, config: ResolvedConfig) -> Clients:
    """Reads "all", or the increasing numbers of clients exactly as `_join` writes."""
    text, num_clients = payload[name], config.num_clients
    if text == EVERYONE:
        return EVERYONE
    problem = f"message whose {name} is no list of clients below {num_clients}: refused"
    longest = num_clients * (len(str(num_clients)) + 1)
    if isinstance(text, str) and len(text) <= longest:
        with suppress(ValueError):
            clients = tuple(int(part) for part in text.split(",") if part)
            is_increasing = all(a < b for a, b in pairwise((-1, *clients, num_clients)))
            if is_increasing and _join(clients) == text:  # not " 1", "+1", "01", "1,,2"
                return clients
    raise UserError(problem)
