"""What crosses the network: Request down, SanitizedGradients up, nothing else.

A message is encoded as a flat dictionary of scalars and bytes (tensors as
`fedgs.round.codec` packs them, never pickle), so that any transport can
carry it. `encode_answer` is the one place that encodes a reply, and it accepts
sanitized gradients only.

Both decoders take the other side for hostile. They compare the size of everything with
what the run's settings allow before they decode it, take no key, type or value but the
expected, and raise `UserError` with a text that quotes nothing of the message. Which
inputs were tried: docs/security.md.
"""

import hashlib
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from fedgs.config.integers import noise_units
from fedgs.config.rounds import terms_at
from fedgs.config.run_config import ResolvedConfig
from fedgs.errors import UserError, malformed
from fedgs.mechanism.answer_bounds import check_norms
from fedgs.mechanism.integer_sums import IntegerSum, from_integers
from fedgs.mechanism.masks import Announced, Attempt, MaskedSum, received_masked, unmask
from fedgs.mechanism.sanitizer import SanitizedGradients, received
from fedgs.methods import phase_at, phase_with_discriminators
from fedgs.methods.base import Request, joined
from fedgs.methods.schedule import EVERYONE, Clients, clients_of
from fedgs.round.codec import (
    pack_masked,
    pack_release,
    pack_request,
    unpack_masked,
    unpack_release,
    unpack_request,
)

Payload = dict[str, str | int | float | bytes]
PAYLOAD_RECORD = "fedgs"  # the name under which client and server carry a payload
TOLD = "told"  # beside it, to a deployed node: the server's start, its last answer
ADDRESS_FIELDS = frozenset({"run_folder", "run_id"})  # with a request, for clients/
REQUEST_FIELDS = frozenset(
    {"round", "participants", "trainees", "keep_round", "tensors"}
)
ATTEMPT_FIELDS = frozenset({"attempt", "masking_keys"})  # with secure aggregation
ANSWER_FIELDS = frozenset(
    {
        "is_empty",
        "round",
        "node_id",
        "request",
        "noise_std",
        "clip_bound",
        "tensors",
    }
)
NEXT_KEY = "next_key"  # of a masked answer
Answer = SanitizedGradients | MaskedSum  # in Flower
NodeRelease = Answer | IntegerSum  # the last one in the local engine
MOST_ATTEMPTS = 10_000  # of one round
FOREIGN_CHARACTERS = 200  # of a foreign text, in one log line


@dataclass(frozen=True)
class MaskedRequest:
    """An envelope around a request whose answers are added up under masks.

    A method sees what is inside only.

    Attributes:
        request: the request.
        attempt: the nodes whose sums are added up, and the keys of their masks.
    """

    request: Request
    attempt: Attempt

    def digest(self) -> str:
        """Returns the hash of what is asked, of which nodes, under which keys."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        request = self.request
        fields = (
            request.round,
            joined(request.participants),
            joined(request.trainees),
            self.attempt.digest,
            request.common_digest(),
        )
        return hashlib.sha256(repr(fields).encode()).hexdigest()


SentRequest = Request | MaskedRequest  # as it crosses the network


def content_of(sent: SentRequest) -> Request:
    """Returns a request without its envelope, if it has one."""
    if isinstance(sent, MaskedRequest):
        return sent.request
    return sent


def encode_request(
    sent: SentRequest,
    config: ResolvedConfig,
    tensors: bytes | None = None,
) -> Payload:
    """Encodes a request.

    Args:
        sent: what the run has drawn, in an envelope if its answers are masked.
        config: the run's.
        tensors: its tensors, packed already by `pack_request`.
    """
    request = content_of(sent)
    if tensors is None:
        tensors = pack_request(request.tensors, config)
    payload: Payload = {
        "round": request.round,
        "participants": joined(request.participants),
        "trainees": joined(request.trainees),
        "keep_round": request.keep_round,
        "tensors": tensors,
    }
    if isinstance(sent, MaskedRequest):
        payload["attempt"] = sent.attempt.number
        payload["masking_keys"] = sent.attempt.packed
    return payload


def decode_request(
    payload: Mapping[str, object],
    config: ResolvedConfig,
) -> SentRequest:
    """Decodes a request and checks it against the run's configuration and method.

    Raises:
        UserError: wrong keys, sizes, shapes, types or values; nothing of the request
            is used, and the text quotes nothing of it.
    """
    round, participants, trainees, keep_round = _decode_asked(payload, config)
    if round:
        phase = phase_at(config, round)
    else:
        phase = phase_with_discriminators(config)
    if phase is None:
        raise malformed("the request is of round 0, which the phases do not have")
    # A method counts the rounds of its own phase.
    round_of_phase = round - phase.config.rounds_before
    declared = phase.method.declared(phase.config, round_of_phase)
    request = Request(
        round,
        unpack_request(payload["tensors"], declared, config),
        participants=participants,
        trainees=trainees,
        keep_round=keep_round,
    )
    phase.method.check(phase.config, request)
    if round == 0 or not config.is_masked:
        return request
    number = _integer(payload, "attempt", 1, MOST_ATTEMPTS)
    keys = payload.get("masking_keys")
    return MaskedRequest(request, Attempt.unpack(number, keys, config.num_nodes))


def _decode_asked(
    payload: Mapping[str, object],
    config: ResolvedConfig,
) -> tuple[int, Clients, Clients, int]:
    """Returns round, participants, trainees and keep_round of a request, checked.

    Raises:
        UserError: as `decode_request`.
    """
    if config.is_masked:
        masked = ATTEMPT_FIELDS
    else:
        masked = frozenset[str]()
    _check_fields(payload, REQUEST_FIELDS, ADDRESS_FIELDS | masked)
    round = _integer(payload, "round", 0, config.num_rounds)
    participants = _split(payload, "participants", config)
    most = 0  # nobody answers a warm start
    if round > 0:
        most = config.clients_per_round
    num_participants = len(participants)
    if participants == EVERYONE:
        num_participants = config.num_clients
    if num_participants > most:
        raise malformed(f"the request has more than {most} participants")
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


def decode_key(payload: Mapping[str, object], where: str) -> Announced:
    """Returns the masking key that a node announces; it is not checked.

    Args:
        payload: the fields of the message that came.
        where: names round and node for people.

    Raises:
        UserError: wrong keys or values.
    """
    try:
        _check_fields(payload, {NEXT_KEY})
        return Announced.unpack(payload[NEXT_KEY])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def encode_answer(
    answer: NodeRelease | None,
    config: ResolvedConfig,
    sent: SentRequest,
) -> Payload:
    """Encodes a reply: sanitized gradients, or an empty one from a node that trained.

    With secure aggregation it is a masked sum, and nothing else is encoded.

    Privacy: post-processing of DP output; the only function that encodes a reply.

    Args:
        answer: the node's answer.
        config: the run's.
        sent: the request that was sent.

    Raises:
        TypeError: anything but sanitized gradients, or what is not masked in a run
            with secure aggregation.
    """
    if answer is None:
        return {"is_empty": 1}
    only = SanitizedGradients
    if config.is_masked:
        only = MaskedSum
    # The very type: a subclass could carry more.
    if type(answer) is not only:
        raise TypeError(
            f"{type(answer).__name__}: it must not leave a client; answer with "
            f"{only.__name__} only"
        )
    terms = terms_at(config, content_of(sent).round)
    payload: Payload = {
        "is_empty": 0,
        "round": answer.round,
        "node_id": answer.node_id,
        "noise_std": terms.noise_std,
        "clip_bound": terms.clip_bound,
        "request": bytes.fromhex(sent.digest()),
    }
    if isinstance(answer, MaskedSum):
        payload["tensors"] = pack_masked(answer.values)
        payload[NEXT_KEY] = answer.next_key
    else:
        payload["tensors"] = pack_release(answer.values, config, terms)
    return payload


def decode_answer(
    payload: Mapping[str, object],
    config: ResolvedConfig,
    sent: SentRequest,
    node_id: int,
) -> Answer | None:
    """Decodes a reply and checks that it answers this request with the agreed noise.

    Privacy: post-processing of DP output.

    Args:
        payload: the fields of the message that came.
        config: the run's.
        sent: the request that was sent.
        node_id: the node that it was sent to.

    Raises:
        UserError: wrong keys, round, node, request, size, shape or noise, non-finite
            values, or a larger norm than honest answers have. The text names node and
            round, and quotes nothing of the reply.
    """
    try:
        return _decode_answer(payload, config, sent, node_id)
    except UserError as error:
        round = content_of(sent).round
        where = f"answer of {config.node_title(node_id)} to round {round}"
        raise UserError(f"{where}: {error}") from None


def _decode_answer(
    payload: Mapping[str, object],
    config: ResolvedConfig,
    sent: SentRequest,
    node_id: int,
) -> Answer | None:
    request = content_of(sent)
    terms = terms_at(config, request.round)
    hosted = config.hosting.hosted(node_id)
    participating = len(clients_of(request.participants, hosted))
    if _integer(payload, "is_empty", 0, 1):
        _check_fields(payload, {"is_empty"})
        if participating:
            raise malformed("it is empty, although its clients take part")
        return None
    fields = set(ANSWER_FIELDS)
    if config.is_masked:
        fields.add(NEXT_KEY)
    _check_fields(payload, fields)
    if not participating:
        raise malformed("it has values, although none of its clients takes part")
    agreed = {
        "round": request.round,
        "node_id": node_id,
        "request": bytes.fromhex(sent.digest()),
        "noise_std": terms.noise_std,
        "clip_bound": terms.clip_bound,
    }
    for name, value in agreed.items():
        # Types too, for True equals 1 and 1 equals 1.0.
        told = payload[name]
        if type(told) is not type(value) or told != value:
            raise malformed(f"its {name} is another one than this run and round have")
    if config.is_masked:
        masked = unpack_masked(payload["tensors"], terms)
        next_key = b""
        # A node whose limits allow no further release announces no key.
        if payload[NEXT_KEY] != b"":
            next_key = Announced.unpack(payload[NEXT_KEY]).pack()
        return received_masked(masked, request.round, node_id, next_key)
    values = unpack_release(payload["tensors"], config, terms)
    check_norms(values, config, participating, terms)
    return received(values, request.round, node_id, terms.noise_std, terms.clip_bound)


def sum_of(
    config: ResolvedConfig,
    request: Request,
    answers: Sequence[NodeRelease],
) -> SanitizedGradients:
    """Returns what a secure aggregation opens: the sum of all listed nodes' releases.

    Privacy: post-processing of DP output.

    Args:
        config: the run's.
        request: the request that was answered.
        answers: one of each of them, masked or, in the local engine, as integers.

    Raises:
        UserError: a larger norm than honest sums have; nobody can tell whose fault.
    """
    terms = terms_at(config, request.round)
    masked = [answer for answer in answers if isinstance(answer, MaskedSum)]
    if masked:
        total = unmask(masked)
    else:  # the local engine's
        plain = [answer.values for answer in answers if isinstance(answer, IntegerSum)]
        total = torch.stack(plain).sum(0)
    units = config.units(terms)
    values = from_integers(total, units / terms.clip_bound).float()
    # Of the sum, by the noise that was added: its integer std is rounded up.
    multiplier = noise_units(terms.noise_multiplier, units) / (2 * units)
    of_sum = replace(terms, noise_multiplier=multiplier * len(answers) ** 0.5)
    participants = clients_of(request.participants, range(config.num_clients))
    check_norms(values, config, len(participants), of_sum)
    return received(
        values=values,
        round=request.round,
        node_id=answers[0].node_id,
        noise_std=of_sum.noise_std,
        clip_bound=terms.clip_bound,
    )


def one_line(text: object) -> str:
    """Returns a foreign text for a log: printable, short and on one line.

    Privacy: public; of public texts only.
    """
    start = str(text)[:FOREIGN_CHARACTERS]
    return "".join(each if each.isprintable() else "?" for each in start)


def _check_fields(
    payload: Mapping[str, object],
    names: Set[str],
    others: Set[str] = frozenset(),
) -> None:
    if not names <= set(payload) <= names | others:
        raise malformed(f"the message has other fields than {sorted(names)}")


def _integer(payload: Mapping[str, object], name: str, least: int, most: int) -> int:
    value = payload.get(name)
    if type(value) is not int or not least <= value <= most:  # True is no integer
        raise malformed(f"the message's {name} is no integer from {least} to {most}")
    return value


def _split(payload: Mapping[str, object], name: str, config: ResolvedConfig) -> Clients:
    """Reads "all", or the increasing numbers of clients exactly as `joined` writes."""
    text = payload[name]
    if text == EVERYONE:
        return EVERYONE
    num_clients = config.num_clients
    longest = num_clients * (len(str(num_clients)) + 1)
    if isinstance(text, str) and len(text) <= longest:
        with suppress(ValueError):
            parts = [part for part in text.split(",") if part]
            clients = tuple(map(int, parts))
            bounded = (-1, *clients, num_clients)
            is_increasing = all(low < high for low, high in pairwise(bounded))
            # One form for each list: not " 1", "+1", "01" or "1,,2".
            if is_increasing and joined(clients) == text:
                return clients
    raise malformed(f"the message's {name} is no list of clients below {num_clients}")
