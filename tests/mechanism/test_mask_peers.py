"""Pinned peers: a masking key that no known node signed is never masked with."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from fedgs.mechanism.masks import Announced, MaskingKey
from fedgs.mechanism.peers import Peers
from fedgs.privacy.client_limits import ClientRefused
from refusals import assert_refused
from server.launch.certs import make_certificates
from server.launch.submit import client_key

RUN = "0" * 16


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_certificates(folder, [], ["a", "b", "c"])
    return folder / "clients"


@pytest.fixture
def peers(keys):
    return {name: read(keys, name) for name in ("a", "b", "c")}


def read(keys, name: str, least: int | None = None) -> Peers:
    return Peers.read(name, keys / f"{name}.key", keys, least)


def signed_by(peers: dict[str, Peers], run: str = RUN) -> dict[str, Announced]:
    return {n: own.sign(MaskingKey.generate(), run) for n, own in peers.items()}


def test_every_node_takes_the_list_that_all_have_signed(peers):
    keys = signed_by(peers)
    for own in peers.values():
        own.check(keys, RUN)
    assert all(len(key.pack()) <= 32 + 104 for key in keys.values())


def _unsigned(peers):
    return {**signed_by(peers), "b": Announced(MaskingKey.generate().public, b"")}


def _of_the_server(peers):
    """The server's own key, with the signature of the key that it took away."""
    keys = signed_by(peers)
    own = MaskingKey.generate().public
    return {**keys, "b": Announced(own, keys["b"].signature)}


def _of_another_node(peers):
    return {**signed_by(peers), "b": signed_by(peers)["c"]}


def _invented(peers):
    return {**signed_by(peers), "d": peers["c"].sign(MaskingKey.generate(), RUN)}


WRONG = {
    "unsigned": _unsigned,
    "of the server": _of_the_server,
    "of another node": _of_another_node,
    "of an invented node": _invented,
    "of another run": lambda peers: signed_by(peers, "1" * 16),
}


@pytest.mark.parametrize("what", WRONG)
def test_key_that_its_pinned_owner_did_not_sign_for_this_run_is_refused(peers, what):
    with pytest.raises(ClientRefused, match=r"peers: .* of ") as refusal:
        peers["a"].check(WRONG[what](peers), RUN)
    assert refusal.value.setting == "peers"


def test_node_knows_what_it_has_signed_for_a_run(peers):
    keys = signed_by(peers)
    assert peers["a"].has_signed(keys["a"], RUN)
    assert not peers["a"].has_signed(keys["a"], "1" * 16)
    assert not peers["a"].has_signed(keys["b"], RUN)
    torn = Announced(keys["a"].public, keys["a"].signature + b"!")
    assert not peers["a"].has_signed(torn, RUN)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP521R1()])
def test_keys_on_another_curve_than_that_of_certs_are_refused_by_file(
    keys, tmp_path, curve
):
    """A signature on P-521 does not fit into what announces a masking key."""
    own = tmp_path / "a.key"
    peer = tmp_path / "b.pub"
    made = ec.generate_private_key(curve)
    kind = PrivateFormat.OpenSSH
    own.write_bytes(made.private_bytes(Encoding.PEM, kind, NoEncryption()))
    public = made.public_key()
    peer.write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    words = f"{curve.name}, .*; make a new pair with `fedgs deploy certs`"
    asked = ("a", own, keys, None)
    assert_refused(f"key = {own}: .* {words}", Peers.read, *asked)
    asked = ("a", keys / "a.key", tmp_path, None)
    assert_refused(f"peers: {peer}: .* {words}", Peers.read, *asked)
    assert_refused(f"client = b={peer}: .* {words}", client_key, "b", peer)
    # Neither does `certs` take such a key for one of its own.
    others = tmp_path / "certs"
    (others / "clients").mkdir(parents=True)
    own.rename(others / "clients" / "a.key")
    assert_refused(r"a\.key: .* " + words, make_certificates, others, [], ["a"])
    assert not (others / "clients" / "a.pub").exists()


def test_list_of_fewer_nodes_than_the_own_minimum_is_refused(keys, peers):
    two = {n: key for n, key in signed_by(peers).items() if n != "c"}
    words = "min_peers = 3: "  # unset: all of them
    assert_refused(words, peers["a"].check, two, RUN)
    read(keys, "a", least=2).check(two, RUN)


def test_run_with_unknown_or_too_few_nodes_is_refused_at_once(peers):
    own = peers["a"]
    own.check_names(tuple("abc"))
    assert_refused("peers: d ", own.check_names, tuple("abcd"))
    assert_refused("min_peers = 3:", own.check_names, tuple("ab"))


@pytest.mark.parametrize("least", [1, 4])
def test_minimum_that_hides_nothing_or_cannot_be_is_refused(keys, least):
    assert_refused(f"min_peers = {least}: ", read, keys, "a", least)


def test_folder_without_peers_or_with_one_key_twice_is_refused(keys, tmp_path):
    asked = ("a", keys / "a.key", tmp_path, None)
    assert_refused(f"peers = {tmp_path}: ", Peers.read, *asked)
    for name in ("b", "c"):
        (tmp_path / f"{name}.pub").write_bytes((keys / "b.pub").read_bytes())
    assert_refused("same key", Peers.read, *asked)
    (tmp_path / "c.pub").write_text("no key")
    assert_refused(r"c\.pub: ", Peers.read, *asked)
    public = keys / "a.pub"
    assert_refused(r"a\.pub: ", Peers.read, "a", public, keys, None)
