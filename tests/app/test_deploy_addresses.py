"""One grammar for the addresses of all commands, read before anything is started."""

import shlex

import pytest

from clients import resident
from fedgs.deployment import address_of, is_loopback, read_address, read_host
from refusals import assert_refused
from server.launch.certs import make_certificates
from server.launch.flower_app import free_port
from server.launch.server_command import ServerOptions
from server.launch.submit import Submission

GOOD = {
    "gs.example.org:8000": ("gs.example.org", 8000),
    "GS.Example.org:1": ("gs.example.org", 1),
    "my_server-1:65535": ("my_server-1", 65535),
    "localhost:08000": ("localhost", 8000),
    "10.0.0.1:8000": ("10.0.0.1", 8000),
    "[::1]:8111": ("::1", 8111),
    "[0:0:0:0:0:0:0:1]:8111": ("::1", 8111),
    "[2001:DB8::7]:80": ("2001:db8::7", 80),
    "[::ffff:127.0.0.1]:80": ("127.0.0.1", 80),
    f"{'a' * 63}.org:80": (f"{'a' * 63}.org", 80),
}
# Without a port, which some of them have.
BAD_HOSTS = ["", " ", "http://host", "user@host", "host/", "a b", " host", "host\n"]
BAD_HOSTS += ["-a", "a-", "a..b", ".a", "a.", "a,b", "*", "a" * 64, "a." * 127 + "bb"]
BAD_HOSTS += ["münchen.de", "\u212aelvin", "256.1.1.1", "127.1", "2130706433", "0x7f.1"]
BAD_HOSTS += [
    "1.2.3.04",
    "[10.0.0.1]",
    "[host]",
    "[]",
    "[::1",
    "::1]",
    "[fe80::1%eth0]",
]
BAD_HOSTS += ["[::g]", "a:b", "host:80"]
BAD = ["::1:8111", "fe80::1:80", ":::80", "host", "host:", ":80", "", "[::1]", "[::1]:"]
BAD += ["::1", "host:0", "host:65536", "host:-1", "host:+1", "host: 80", "host:80 "]
BAD += ["host:8e1", "host:\uff18\uff10", "host:999999999999", "host:80/", "host:80\n"]
BAD += ["host:80:80", "http://host:80", "[::1]8111", "[[::1]]:80", "host:0x50"]
BAD += [f"{host}:80" for host in BAD_HOSTS if host not in ("host:80", "a:b")]


@pytest.mark.parametrize("text", GOOD)
def test_an_address_is_read_as_flower_is_to_have_it(text):
    assert read_address("server", text) == GOOD[text]
    address = address_of(*GOOD[text])
    assert read_address("server", address) == GOOD[text]
    assert Submission(server=text).server == address


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_address_is_refused_in_one_line(text):
    rule = "^server = .*: give HOST:PORT"
    assert_refused(rule, read_address, "server", text)


@pytest.mark.parametrize("text", BAD_HOSTS)
def test_what_is_no_host_is_refused_in_one_line(text, tmp_path):
    rule = "^host = .*: give "
    assert_refused(rule, read_host, "host", text)
    assert_refused(rule, ServerOptions, host=text)
    assert_refused(rule, make_certificates, tmp_path / "certs", [text], [])
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize("text", ["::1:8111", "host", "http://host:80", "host:0"])
@pytest.mark.parametrize(
    "words",
    [
        "client a --data digits --insecure",
        "submit --insecure --resume x",
        "submit --client a --num-classes 10 --target-epsilon 1 --clients-per-node 100",
    ],
)
def test_every_command_refuses_an_address_before_all_else(
    words, text, fedgs, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    code, out, err = fedgs("deploy", *shlex.split(words), "--server", text)
    assert (code, out) == (2, "")
    assert f"server = {text!r}: give HOST:PORT" in " ".join(err.split())
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_the_process_of_a_client_refuses_one_too(capsys, tmp_path, monkeypatch):
    """Flower's asks again and again for an address that is none."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        resident.main(["--insecure", "--superlink", "::1:8111"])
    assert ended.value.code == 2
    assert "superlink = '::1:8111': give HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0::1"])
def test_a_server_listens_on_the_loopback_of_ipv6(host):
    server = ServerOptions(host=host, port=free_port(), insecure=True)
    command, _ = server.command()
    assert command[command.index("--host") + 1] == "::1"
    assert server.superexec()[-1] == f"[::1]:{server.port}"
    server.check()


def test_a_server_on_an_address_of_another_machine_is_refused(tmp_path):
    for host in ("192.0.2.77", "no-such-host.invalid"):
        server = ServerOptions(
            state=tmp_path, host=host, port=free_port(), insecure=True
        )
        words = f"host = {host} and port = .*give an address of this machine"
        assert_refused(words, server.check)


def test_the_loopback_is_what_is_certainly_this_machine():
    for host in ("localhost", "127.0.0.1", "127.8.9.1", "::1"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "a.localhost"):
        assert not is_loopback(host), host
