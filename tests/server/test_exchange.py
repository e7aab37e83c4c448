"""What the exchange makes of replies that Flower's grid cannot even read."""

import time
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from server.messenger import OVER_HTTP, Messenger
from server.progress import Progress
from tiny import tiny_config

pytestmark = pytest.mark.usefixtures("server_process")
ADDRESSES = {0: 70, 1: 71}


class Grid:
    """Gives replies once, as Flower's; raises for those of one node, with all others.

    Attributes:
        sent: message -> address.
    """

    def __init__(self, hostile: int) -> None:
        self.hostile, self.sent = hostile, dict[str, int]()
        self.given: set[str] = set()

    def push_messages(self, messages):
        names = [f"{len(self.sent) + i}" for i, _ in enumerate(messages)]
        addresses = [message.metadata.dst_node_id for message in messages]
        self.sent |= dict(zip(names, addresses, strict=True))
        return names

    def pull_messages(self, names):
        new = [name for name in names if name not in self.given]
        self.given.update(new)
        if self.hostile in [self.sent[name] for name in new]:
            raise KeyError("NoSuchRecord")
        return [self.reply(name) for name in new]

    def reply(self, name: str) -> Message:
        content = RecordDict({"fedgs": ConfigRecord({"from": self.sent[name]})})
        message = Message(content, self.sent[name], "train")
        metadata = {"_reply_to_message_id": name, "_src_node_id": self.sent[name]}
        message.metadata.__dict__.update(metadata)
        return message


def test_a_reply_that_cannot_be_read_is_its_senders_trouble(log):
    roll = SimpleNamespace(active_since={70: "1", 71: "1"}, step=lambda: None)
    progress = Progress(None, tiny_config(), "", 0)
    exchange = Messenger(Grid(70), ADDRESSES, OVER_HTTP, progress, roll)
    empty = RecordDict({"fedgs": ConfigRecord({})})
    for _ in range(2):  # in the next round as well
        requests = {n: Message(empty, to, "train") for n, to in ADDRESSES.items()}
        started = time.monotonic()
        replies = exchange.send_and_receive(requests, timeout=0.5)
        assert [reply.content["fedgs"]["from"] for reply in replies] == [71]
        assert time.monotonic() - started < 5
        assert exchange.reasons == {0: "node 0: a reply that cannot be read"}
    assert "a reply that cannot be read: KeyError" in log
