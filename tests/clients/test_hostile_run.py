"""Hostile clients of a whole run: what a server does about them."""

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app import Error as FlowerError

from runs import attempts, num_answers
from simulated_grid import FakeGrid, Make, Spoil, product, round_of, start

SECRET = 4711  # must not be in the log


def victim(makes: dict[int, Make]) -> Spoil:
    """Spoils what the first node that is asked in a round replies in it."""
    victims: dict[int, int] = {}

    def spoil(node: int, request: Message, reply: Message) -> Message | None:
        round = round_of(request)
        if round not in makes or victims.setdefault(round, node) != node:
            return reply
        return makes[round](request, reply)

    return spoil


def lose(request: Message, reply: Message) -> None:
    """Loses a reply."""


def of_other_noise(request: Message, reply: Message) -> Message:
    reply.content["fedgs"]["noise_std"] = 0.1
    return reply


def failed(request: Message, reply: Message) -> Message:
    text = "all is well\n2026-01-01 INFO the run is complete\x1b[2J" * 200_000
    return Message(FlowerError(2, text), reply_to=request)


def with_more_records(request: Message, reply: Message) -> Message:
    reply.content[f"loss-{SECRET}"] = ConfigRecord({"loss": 47.11})
    return reply


def without_record(request: Message, reply: Message) -> Message:
    content = RecordDict({"other": ConfigRecord({"loss": float(SECRET)})})
    return Message(content, reply_to=request)


def of_another_sender(request: Message, reply: Message) -> Message:
    reply.metadata.__dict__["_src_node_id"] = SECRET
    return reply


SPOILT: list[tuple[Make, str]] = [
    (of_other_noise, "its noise_std is another"),
    (failed, "says: all is well?2026-01-01 INFO the run"),  # an error of 10 MB
    (with_more_records, "more than its one record"),
    (without_record, "has no record"),
    (of_another_sender, "from another sender"),
]


def test_a_spoilt_reply_is_a_failed_answer(create, log):
    """Asked twice, logged in a line without data; the run is one without that node."""
    last = len(SPOILT)
    settings = {"min_answers": 1, "num_rounds": last}
    folder, silent = create("hostile", **settings), create("silent", **settings)
    makes = {number: make for number, (make, _) in enumerate(SPOILT, 1)}
    start(folder, FakeGrid(6, victim(makes)))
    assert attempts(folder) == [(number, 1) for number in makes]
    assert num_answers(folder) == last * [1]
    for number, (_, words) in enumerate(SPOILT, 1):
        of_round = (f"round {number}:", "answer of node")
        lines = [line for line in log if line.startswith(of_round)]
        assert sum(words in line for line in lines) == 2
        assert all(line.isprintable() and len(line) < 300 for line in lines)
        assert any(
            line.startswith(f"round {number}: ") and line.endswith("did not answer")
            for line in log
        )
    assert str(SECRET) not in "".join(log)
    start(silent, FakeGrid(6, victim(dict.fromkeys(makes, lose))))
    assert product(folder) == product(silent)
