"""A deployment under masks, without a network: signed keys, drop-outs, refusals."""

import pytest
from flwr.app import Message

from clients.failures import reason_of
from deployed_grid import NAMES, Deployment, place_of
from experiments.launch.certs import make_certificates
from fedgs.files import read_json
from fedgs.privacy.client_limits import ClientRefused
from runs import at_round, events, interrupt_at, num_answers
from simulated_grid import round_of

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


@pytest.mark.slow
def test_a_killed_server_and_restarted_clients_resume_to_the_same_bytes(
    masked, undisturbed
):
    run = masked(mode="full participation")
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(3))
    for client in run.clients:
        client.restart()
    run.start()
    assert run.product() == undisturbed(run)
    assert run.attempts() == [(1, 1), (2, 1), (3, 1), (3, 2)]


def test_a_killed_client_voids_its_round_and_no_later_one_and_may_come_back(masked):
    run = masked(num_rounds=3, min_nodes=2)
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
    # Whoever answered has released twice in round 2; all of it is in its own count.
    assert [run.counted(index) for index in range(3)] == [
        *([1, 2, 2, 3], [1, 3]),
        [1, 2, 2, 3],
    ]


def test_a_client_says_that_it_released_in_every_attempt(masked):
    """A server whose ledger is restored from a backup hears of each of them."""
    run = masked(min_nodes=2)
    lost: list[Message] = []

    def lose(who: str, request: Message, reply: Message) -> Message | None:
        if who != NAMES[1] or round_of(request) != 2 or len(lost) > 2:
            return reply
        return lost.append(reply)

    run.grid.spoil = lose
    with pytest.raises(KeyboardInterrupt):
        run.start(interrupt_at(2))
    (path,) = run.clients[0].state_dir.glob("*/run.json")
    place = place_of(run, run_id=path.parent.name)
    assert place.join(read_json(path), [("f" * 16, 0)]).released == [1, 2]


@pytest.mark.parametrize(
    ("own", "setting", "problem"),
    [
        ({}, True, "give peers"),
        ({"peers", "key"}, False, "under masks only"),
    ],
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
    joined = place_of(run).join(settings, [("0" * 16, 0)])
    assert isinstance(joined.refusal, ClientRefused)
    assert problem in str(joined.refusal)
    assert reason_of("a", joined.refusal) == "a refused by its clients' limit: peers"
