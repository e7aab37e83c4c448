"""A deployment under masks, without a network: signed keys, drop-outs, refusals."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Message

from clients.failures import reason_of
from deployed_grid import NAMES, Backup, Deployment, place_of
from fedgs.mechanism.masks import KEY_BYTES, Announced, Attempt, MaskingKey
from fedgs.mechanism.peers import Peers
from fedgs.methods import gs_wgan as round
from fedgs.methods import new_state
from fedgs.privacy.client_limits import ClientRefused
from fedgs.round.messages import MaskedRequest
from fedgs.round.node_masks import NodeMasks
from fedgs.round.run import RunStopped
from runs import at_round, events, ignore, num_answers
from server.launch.certs import make_certificates
from server.launch.submit import client_key
from server.strategy import FederatedGan
from simulated_grid import as_on_a_network, round_of
from tiny import next_request, record_calls

MASKED = {"mode": "moments", "secure_aggregation": True, "noise_multiplier": 0.5}


@pytest.fixture
def masked(deploy, tmp_path):
    """A deployment whose clients know each other's keys."""
    make_certificates(tmp_path / "keys", [], NAMES[:3])

    def make(name: str = "run", **settings: object) -> Deployment:
        run = deploy(name, **MASKED | {"num_rounds": 3} | settings)
        for client in run.clients:
            folder = tmp_path / "keys" / "clients"
            own = {"peers": str(folder), "key": str(folder / f"{client.name}.key")}
            client.node_config |= own | {"min-peers": 2}
            client.public_key = client_key("", folder / f"{client.name}.pub")
        return run

    return make


def test_deployment_under_masks_gives_the_bytes_of_the_local_engine(
    masked, undisturbed
):
    run = masked()
    run.start()
    assert run.product() == undisturbed(run)
    answers = [reply for kind, _, reply in run.grid.replies if kind == "train"]
    assert len(answers) == 9
    for reply in answers:
        assert len(reply.content["fedgs"]["next_key"]) > 32 + 90  # signed


def test_a_killed_client_voids_its_round_and_no_later_one_and_may_come_back(
    masked, monkeypatch
):
    trained = record_calls(monkeypatch, round, "train_discriminators")
    run = masked(mode="full participation", min_answers=2)
    gone = run.clients[1]

    def kill(name: str, request: Message) -> bool:
        if round_of(request) == 2 and name == gone.name and gone.starts == 1:
            gone.is_online = False
        return gone.is_online or name != gone.name

    run.grid.on_push = kill
    run.start(at_round(2, gone.restart))
    assert run.attempts() == [(1, 1), (2, 1), (2, 2), (3, 1)]
    assert [e.counted_nodes for e in events(run.folder)] == [3, 3, 2, 3]
    assert num_answers(run.folder) == [3, 2, 3]
    # Once in a round, whatever its attempts.
    assert sum(len(chunk) for _, _, chunk, *_ in trained) == 6 + 4 + 6
    # Whoever answered has released twice in round 2; all of it is in its own count.
    assert [run.counted(index) for index in range(3)] == [
        *([1, 2, 2, 3], [1, 3]),
        [1, 2, 2, 3],
    ]


def test_a_count_that_goes_back_between_two_attempts_of_a_round_is_refused(masked):
    run = masked(min_answers=2)
    backup = Backup(run, 0)

    def lose(who: str, request: Message, reply: Message) -> Message | None:
        return None if (who, round_of(request)) == (NAMES[1], 2) else reply

    def take(name: str, request: Message) -> bool:
        attempt = request.content["fedgs"].get("attempt")
        if (name, round_of(request), attempt) == (NAMES[0], 2, 2):
            backup.take()
        return True

    run.grid.spoil, run.grid.on_push = lose, take
    run.start(at_round(2, backup.put_back))
    assert num_answers(run.folder) == [3, 2, 2]
    assert run.counted(0) == [1, 2]
    words = "lacks the release of round 2"
    # Asked to answer, twice, then for a key, under which others would release in vain.
    assert backup.refusals().count(words) >= 2


def test_an_answer_of_a_node_that_is_not_listed_ends_no_run(masked):
    run = masked()
    strategy = FederatedGan(run.folder, ignore, run.stop)
    strategy.nodes.find(run.grid)
    keys = {node: Announced(MaskingKey.generate().public, b"") for node in (0, 1)}
    first = next_request(run.folder.config, new_state(run.folder.config))
    request = MaskedRequest(first, Attempt(1, keys))
    for node in (1, 2):
        strategy.nodes.roll.add_release(node, request)
    own = (strategy.nodes.roll.start, 1, keys[1].public.hex())
    assert strategy.nodes.roll.answered == {NAMES[1]: own, NAMES[2]: (own[0], 1, "")}


def test_a_false_masking_key_names_its_sender_and_stops_nobody_else(
    masked, tmp_path, log
):
    """Listed, it would have every other client refuse the round."""
    make_certificates(tmp_path / "others", [], NAMES[1:2])
    run = masked(min_answers=2)
    run.clients[1].node_config["key"] = str(tmp_path / "others/clients/b-clinic.key")
    run.start()
    assert run.attempts() == [(1, 1), (2, 1), (3, 1)]
    assert num_answers(run.folder) == [2, 2, 2]
    assert any("the masking key of b-clinic is not signed" in line for line in log)
    assert not (run.clients[1].state_dir / "releases" / "releases-00000.jsonl").exists()


def test_a_false_key_with_an_answer_is_not_listed(masked):
    """Its sender, or who sits between, is asked for another one."""
    run = masked()

    def spoil(who: str, request: Message, reply: Message) -> Message:
        record = reply.content["fedgs"]
        if who == NAMES[1] and record.get("is_empty") == 0:
            record["next_key"] = MaskingKey.generate().public + b"signature"
        return reply

    run.grid.spoil = spoil
    run.start()
    assert num_answers(run.folder) == [3, 3, 3]
    asked = [who for kind, who, _ in run.grid.replies if kind == "query.key"]
    assert asked.count(NAMES[1]) == 3
    assert asked.count(NAMES[0]) == 1


def signed(tmp_path: Path, name: str, public: bytes, run_id: str) -> Announced:
    """Any bytes as the masking key of a client, signed with its registered key."""
    folder = tmp_path / "keys" / "clients"
    own = Peers.read(name, folder / f"{name}.key", folder, None)
    return own.sign(SimpleNamespace(public=public), run_id)


def announce_always(
    run: Deployment,
    tmp_path: Path,
    names: list[str],
    public: bytes,
    kinds: tuple[str, ...] = ("query.key", "train"),
) -> None:
    """Has hostile clients announce one key in their replies to these requests."""

    def spoil(who: str, request: Message, reply: Message) -> Message:
        is_theirs = who in names and request.metadata.message_type in kinds
        if is_theirs and "next_key" in reply.content["fedgs"]:
            run_id = request.content["fedgs"]["run_id"]
            other = signed(tmp_path, who, public, run_id)
            reply.content["fedgs"]["next_key"] = other.pack()
        return reply

    run.grid.spoil = spoil


def has_counted(run: Deployment, index: int) -> bool:
    folder = run.clients[index].state_dir / "releases"
    return (folder / "releases-00000.jsonl").exists()


ORDERS = {"order 2": bytes(32), "order 4": bytes([1]) + bytes(31)}


@pytest.mark.parametrize("public", ORDERS.values(), ids=ORDERS)
def test_a_masking_key_that_hides_nothing_names_its_sender_and_stops_nobody_else(
    masked, tmp_path, log, public
):
    """Its own registered key has signed it, so that only the key itself tells."""
    run = masked(min_answers=2)
    announce_always(run, tmp_path, [NAMES[1]], public)
    run.start()
    assert run.attempts() == [(1, 1), (2, 1), (3, 1)]
    assert num_answers(run.folder) == [2, 2, 2]
    assert [run.counted(index) for index in (0, 2)] == [[1, 2, 3], [1, 2, 3]]
    assert not has_counted(run, 1)
    assert any("the masking key of b-clinic is none that" in line for line in log)


def test_a_masking_key_that_hides_nothing_charges_nobody_where_all_are_needed(
    masked, tmp_path
):
    run = masked()
    announce_always(run, tmp_path, [NAMES[1]], bytes(32))
    for _ in range(2):  # as often as it is resumed
        with pytest.raises(RunStopped, match=r"2 nodes .*\n.*of b-clinic is none that"):
            run.start()
        assert not any(has_counted(run, index) for index in range(3))
    assert run.attempts() == []
    run.grid.spoil = lambda who, request, reply: reply
    run.start()
    assert num_answers(run.folder) == [3, 3, 3]


def test_a_masking_key_of_a_wrong_size_names_its_sender(masked, log):
    run = masked(**ONE_RELEASE, min_answers=2)

    def spoil(who: str, request: Message, reply: Message) -> Message:
        if who == NAMES[1] and "next_key" in reply.content["fedgs"]:
            reply.content["fedgs"]["next_key"] = bytes(KEY_BYTES - 1)
        return reply

    run.grid.spoil = spoil
    run.start()
    assert num_answers(run.folder) == [2]
    words = "round 1: b-clinic: the message has a masking key of a wrong size"
    assert any(words in line for line in log)


def test_an_answer_counts_whose_next_masking_key_hides_nothing(masked, tmp_path):
    """It has masked the sum under another one; its sender is asked for a new key."""
    run = masked()
    announce_always(run, tmp_path, [NAMES[1]], bytes(32), kinds=("train",))
    run.start()
    assert run.attempts() == [(1, 1), (2, 1), (3, 1)]
    assert num_answers(run.folder) == [3, 3, 3]
    asked = [who for kind, who, _ in run.grid.replies if kind == "query.key"]
    assert asked.count(NAMES[1]) == 3


def test_a_masking_key_of_two_clients_names_both_and_the_later_one_is_left_out(
    masked, tmp_path, log
):
    """Listed twice, it would have every client refuse the round."""
    run = masked(min_answers=2)
    announced: dict[str, bytes] = {}

    def spoil(who: str, request: Message, reply: Message) -> Message:
        content = reply.content["fedgs"]
        if "next_key" in content:
            announced[who] = content["next_key"][:KEY_BYTES]
        if who == NAMES[2] and "next_key" in content:
            run_id = request.content["fedgs"]["run_id"]
            copy = signed(tmp_path, who, announced[NAMES[1]], run_id)
            content["next_key"] = copy.pack()
        return reply

    run.grid.spoil = spoil
    run.start()
    assert run.attempts() == [(1, 1), (2, 1), (3, 1)]
    assert [run.counted(index) for index in (0, 1)] == [[1, 2, 3], [1, 2, 3]]
    assert not has_counted(run, 2)
    words = "the masking key of c-clinic is that of b-clinic too"
    assert any(words in line for line in log)


def test_a_client_that_was_killed_as_it_wrote_its_next_key_goes_on_with_another(
    masked, monkeypatch
):
    """The end of the longer key before was still behind it."""
    run = masked()
    make = NodeMasks.new_key

    def killed(self: NodeMasks) -> Announced:
        announced = make(self)
        path = run.states(1) / "masking.key"
        if path.read_bytes().endswith(announced.signature):
            monkeypatch.setattr(NodeMasks, "new_key", make)
            with open(path, "ab") as file:
                file.write(b"!")
            sys.exit()
        return announced

    def tear(metrics: dict) -> None:
        if metrics["round"] == 1:
            monkeypatch.setattr(NodeMasks, "new_key", killed)

    run.restart_killed()
    with pytest.raises(RunStopped, match="round 2: 2 of 3 nodes"):
        run.start(tear)
    run.start()
    assert run.attempts() == [(1, 1), (2, 1), (2, 2), (3, 1)]
    assert num_answers(run.folder) == [3, 3, 3]


@pytest.mark.parametrize(
    ("own", "setting", "problem"),
    [({}, True, "--peers"), ({"peers", "key"}, False, "--peers")],
)
def test_a_client_with_peers_releases_under_masks_only_and_without_them_never(
    masked, own, setting, problem
):
    run = masked(secure_aggregation=setting)
    config = run.clients[0].node_config
    if not own:
        for name in ("peers", "key", "min-peers"):
            del config[name]
    settings = run.folder.config.to_flat()
    joined = place_of(run).join(settings)
    assert isinstance(joined.refusal, ClientRefused)
    assert problem in str(joined.refusal)
    assert reason_of("a", joined.refusal).endswith("own limit peers forbids it")


# ------------------------------------------------------------------ a hostile server

Keys = dict[int, Announced]
Lie = Callable[[dict], dict]  # what a request has -> what it has instead
ONE_RELEASE = {"phases": "means", "num_rounds": 1}
A, B, C = range(3)  # the first one is lied to


def told(request: Message, lie: Lie) -> Message:
    """Returns a request with something else in it."""
    other = as_on_a_network(request)
    other.content["fedgs"].update(lie(dict(request.content["fedgs"])))
    return other


def lie_about_keys(change: Callable[[Keys], Keys]) -> Lie:
    def lie(content: dict) -> dict:
        keys = Attempt.unpack(1, content["masking_keys"], 3).keys
        return {"masking_keys": Attempt(1, change(dict(keys))).packed}

    return lie


def lie_about_the_centre(content: dict) -> dict:
    tensors = bytearray(content["tensors"])
    tensors[-3] ^= 1
    return {"tensors": bytes(tensors)}


def lie_about_the_noise(content: dict) -> dict:
    settings = json.loads(content["settings"])
    more = {"noise_multiplier": 1.01 * settings["noise_multiplier"]}
    return {"settings": json.dumps(settings | more)}


def by_the_server(keys: Keys, node: int) -> Announced:
    """The server's own key, with a signature that it has seen."""
    return Announced(MaskingKey.generate().public, keys[node].signature)


without_c = lie_about_keys(lambda k: {A: k[A], B: k[B]})
KEY_LISTS = {
    "key of b-clinic is not signed": lambda k: k | {B: by_the_server(k, B)},
    "key of c-clinic is not signed": lambda k: k | {C: by_the_server(k, B)},
    "fewer than 2 nodes": lambda k: {A: k[A]},
    "names a node that is not asked": lambda k: k | {3: by_the_server(k, C)},
    "than its last one": lambda k: {B: k[B], C: k[C]},
}


def when_asked(
    run: Deployment, act: Callable[[Message], Message], kind: str = "train"
) -> None:
    """Does something with the first client's request before it arrives."""

    def push(name: str, request: Message) -> bool:
        if name == NAMES[A] and request.metadata.message_type == kind:
            request.content["fedgs"] = act(request).content["fedgs"]
        return True

    run.grid.on_push = push


def with_key_of_b(keys: Keys, key: Announced) -> Keys:
    return keys | {B: key}


def own_key(request: Message) -> bytes:
    """The masking key of the first client, as a server lists it."""
    content = request.content["fedgs"]["masking_keys"]
    return Attempt.unpack(1, content, 3).keys[A].public


def test_a_client_answers_no_list_that_a_server_could_unmask_it_by(masked, tmp_path):
    run = masked(**ONE_RELEASE)
    victim = run.clients[A]

    def try_all(request: Message) -> Message:
        for problem, change in KEY_LISTS.items():
            other = told(request, lie_about_keys(change))
            assert run.grid.answer(victim, other).has_error()
            assert problem in (victim.state_dir / "error.log").read_text()
        # Of a server and a peer that work together.
        run_id = request.content["fedgs"]["run_id"]
        weak = signed(tmp_path, NAMES[B], bytes(32), run_id)
        twice = signed(tmp_path, NAMES[B], own_key(request), run_id)
        for problem, key in (("is none that", weak), ("is that of a-clinic", twice)):
            lie = lie_about_keys(partial(with_key_of_b, key=key))
            assert run.grid.answer(victim, told(request, lie)).has_error()
            text = (victim.state_dir / "error.log").read_text()
            assert f"the masking key of b-clinic {problem}" in text
        victim.node_config["min-peers"] = 3
        victim.restart()
        assert run.grid.answer(victim, told(request, without_c)).has_error()
        text = (victim.state_dir / "error.log").read_text()
        assert "min_peers = 3: only 2" in text
        assert not (victim.state_dir / "releases" / "releases-00000.jsonl").exists()
        return request

    when_asked(run, try_all)
    run.start()  # none of it has used up the key of the honest list
    assert run.counted(A) == [1]


def test_a_sum_of_clients_that_were_told_different_things_is_noise(masked):
    """None of them can notice: what each was told could be true."""
    honest = masked("honest", **ONE_RELEASE)
    honest.start()
    for lie, kind, differs in (
        (without_c, "train", "request"),
        (lie_about_the_centre, "train", "request"),
        (lie_about_the_noise, "query.join", "noise_std"),
    ):
        lied_to = masked(lie.__name__, **ONE_RELEASE)
        when_asked(lied_to, partial(told, lie=lie), kind)
        with pytest.raises(RunStopped, match=f"its {differs} is another"):
            lied_to.start()
        # Seeded noise: the sums would differ by a bit of the centre, or by noise.
        difference = (opened(lied_to) - opened(honest)).view(np.int32)
        assert np.median(np.abs(difference.astype(np.int64))) > 2**28


def opened(run: Deployment) -> np.ndarray:
    """What a server without scruples adds up, modulo 2^32."""
    train = [(who, reply) for kind, who, reply in run.grid.replies if kind == "train"]
    parts = {who: reply.content["fedgs"]["tensors"] for who, reply in train}
    assert len(parts) == 3
    return sum(np.frombuffer(part, np.uint32) for part in parts.values())
