"""`fedgs deploy`: what it refuses, the commands it prints, the keys it makes."""

import asyncio
import hashlib
import io
import re
import socket
import stat
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from typer.testing import CliRunner

from command_line import flags
from experiments.cli.deploy import CLIENT_DATA
from experiments.cli.main import app, main
from experiments.launch import certs as deploy_certs
from experiments.launch import commands as deploy_commands
from experiments.launch import control as deploy_control
from experiments.launch import submit as deploy_submit
from experiments.launch.flower_app import free_port
from experiments.launch.superlink import MOST_BYTES, Guard, networks_of
from fedgs.config.run_config import RunConfig
from fedgs.errors import UserError
from fedgs.files import read_json
from refusals import assert_refused

PLAN = {
    "num_clients": "2",
    "num_classes": "10",
    "client_selection": "all",
    "noise_multiplier": "1.0",
    "num_rounds": "20",
    "output": "digits-1",
}


SERVER = ("--server", "127.0.0.1:8000")
LOCAL = (*SERVER, "--insecure")
CLIENT = ("client", "a", "--data", "digits")
REMOTE = ("--server", "10.1.2.3:8000")


def deploy(*arguments: object) -> str:
    """Runs a command of `fedgs deploy` in this process and returns what it printed."""
    result = CliRunner().invoke(
        app, ["deploy", *map(str, arguments)], standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    return result.output


def shown(*arguments: object) -> str:
    """What a command would do, which it prints and does not do."""
    return deploy(*arguments, "--print-only")


def refused(named: str, *arguments: object) -> None:
    assert_refused(named, shown, *arguments)


def certs_refused(named: str, *arguments: object, **how: bool) -> None:
    assert_refused(named, deploy_certs.make_certificates, *arguments, **how)


@pytest.fixture
def certs(tmp_path) -> Path:
    folder = tmp_path / "certs"
    deploy_certs.make_certificates(folder, ["10.1.2.3", "gs.example.org"], ["a", "b"])
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ------------------------------------------------------------------ certificates


def test_private_keys_are_for_their_owner_alone(certs):
    for name in ("ca.key", "server.key", "clients/a.key", "clients/b.key"):
        assert mode(certs / name) == 0o600, name
    assert mode(certs) == mode(certs / "clients") == 0o700
    assert not list(certs.rglob(".*"))  # no temporary file is left


def test_server_certificate_names_the_hosts_and_the_loopback(certs):
    certificate = x509.load_pem_x509_certificate((certs / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value
    assert names.get_values_for_type(x509.DNSName) == ["gs.example.org", "localhost"]
    addresses = [str(a) for a in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["10.1.2.3", "127.0.0.1", "::1"]
    authority = x509.load_pem_x509_certificate((certs / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    key = load_pem_private_key((certs / "server.key").read_bytes(), None)
    assert key.public_key() == certificate.public_key()


def server_of(tmp_path: Path, **given: object) -> deploy_commands.Server:
    """A server on a port that is free."""
    return deploy_commands.Server(state=tmp_path, port=free_port(), **given)


def test_server_that_would_start_is_not_refused(certs, tmp_path):
    server_of(tmp_path, certs=certs).check()


@pytest.mark.parametrize("broken", ["ca.crt", "server.crt", "server.key"])
def test_server_with_a_broken_certificate_is_refused(certs, tmp_path, broken):
    (certs / broken).write_text("garbage")
    assert_refused(f"certs = {certs}: .*anew", server_of(tmp_path, certs=certs).check)


def test_server_whose_certificate_is_of_another_key_is_refused(certs, tmp_path):
    deploy_certs.make_certificates(tmp_path / "others", ["10.1.2.3"], [])
    (certs / "server.key").write_bytes((tmp_path / "others/server.key").read_bytes())
    assert_refused("certs = .*mismatch", server_of(tmp_path, certs=certs).check)


def test_server_without_its_port_ends_with_code_2_and_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "fedgs", "deploy", "server", "--insecure"]
        done = subprocess.run(
            [*command, "--port", port, "--state-dir", str(tmp_path / "state")],
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert re.fullmatch(rf"Error: port = {port} .*in use.*another\n", done.stderr)
    assert "in use" in read_json(tmp_path / "state" / "processes.json")["reason"]


def test_client_keys_are_p384_pairs_in_the_form_that_flower_reads(certs):
    private = load_ssh_private_key((certs / "clients/a.key").read_bytes(), None)
    public = load_ssh_public_key((certs / "clients/a.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert private.public_key() == public


def content(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_what_exists_is_kept_and_what_is_missing_is_added(certs):
    before = content(certs)
    deploy_certs.make_certificates(certs, ["10.1.2.3"], ["a", "c"])
    after = content(certs)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"clients/c.key", "clients/c.pub"}


def test_replace_makes_the_named_ones_anew_but_never_the_authority(certs):
    before = content(certs)
    deploy_certs.make_certificates(certs, ["10.9.9.9"], ["a"], replace=True)
    changed = {name for name, old in before.items() if content(certs)[name] != old}
    expected = {"server.crt", "server.key", "clients/a.key", "clients/a.pub"}
    assert changed == expected
    assert mode(certs / "server.key") == mode(certs / "clients/a.key") == 0o600


def test_certificate_of_other_hosts_is_not_overwritten(certs):
    before = content(certs)
    certs_refused(r"is not for 10\.9\.9\.9; add --replace", certs, ["10.9.9.9"], [])
    assert content(certs) == before


@pytest.mark.parametrize(("name", "replace"), [("server.crt", False), ("ca.crt", True)])
def test_file_that_is_no_certificate_is_refused(certs, name, replace):
    (certs / name).write_text("no PEM\n")
    before = content(certs)
    words = rf"{name}: is no certificate in PEM form"
    certs_refused(words, certs, ["10.1.2.3"], [], replace=replace)
    assert content(certs) == before


def test_own_certificate_that_names_no_host_is_refused(certs):
    key, name = ec.generate_private_key(ec.SECP384R1()), deploy_certs._name("own")
    (certs / "server.crt").unlink()
    deploy_certs._certify(certs / "server.crt", name, key, name, key, 30, ())
    words = r"server\.crt: names no host .* add --replace"
    certs_refused(words, certs, ["10.1.2.3"], [])


def test_client_makes_its_own_key_without_an_authority(tmp_path):
    written = deploy_certs.make_certificates(tmp_path / "own", [], ["a"])
    assert sorted(path.name for path in written) == ["a.key", "a.pub"]
    assert sorted(content(tmp_path / "own")) == ["clients/a.key", "clients/a.pub"]


def test_public_key_without_its_private_one_is_not_replaced(certs):
    (certs / "clients/a.key").unlink()
    certs_refused(r"a\.key: is not here; add --replace", certs, [], ["a"])


def test_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    (tmp_path / "ca.key").write_bytes(b"the other one's")
    with pytest.raises(FileExistsError):
        deploy_certs._write(tmp_path / "ca.key", b"ours", 0o600)
    assert (tmp_path / "ca.key").read_bytes() == b"the other one's"
    assert [path.name for path in tmp_path.iterdir()] == ["ca.key"]


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a b", ".a", "a" * 64, 'a"'])
def test_client_names_are_plain(tmp_path, name):
    certs_refused("client = ", tmp_path / "certs", [], [name])
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [("a" * 63, True), ("A.b-c_1", True), ("a" * 64, False), ("_a", False)],
)
def test_a_run_accepts_the_names_that_have_keys(name, is_valid):
    run = RunConfig(engine="flower", nodes=name, client_selection="all")
    for check in (run.validate, lambda: deploy_certs.check_name(name)):
        if is_valid:
            check()
        else:
            assert_refused("at most 63, a letter or digit first", check)


def test_host_with_a_port_is_refused(tmp_path):
    words = r"host = '10\.0\.0\.1:8000': .* no port"
    certs_refused(words, tmp_path / "certs", ["10.0.0.1:8000"], [])


def test_command_prints_modes_and_paths(tmp_path):
    out = deploy("certs", tmp_path / "c", "--host", "10.0.0.1", "--client", "a")
    assert f"600 {tmp_path}/c/clients/a.key\n" in out
    assert f"644 {tmp_path}/c/server.crt\n" in out
    assert deploy("certs", tmp_path / "c", "--host", "10.0.0.1", "--client", "a") == ""


# ------------------------------------------------------------------ server


def test_server_prints_flowers_command_with_tls_and_authentication(certs, tmp_path):
    state = tmp_path / "state"
    where = ["--host", "0.0.0.0", "--port", 8443, "--certs", certs]
    out = shown("server", *where, "--state-dir", state)
    assert out.startswith("+ FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 ")
    assert f"FLWR_HOME={state}/flwr" in out
    assert (
        f"-m experiments.launch.superlink --ssl-ca-certfile {certs}/ca.crt "
        f"--ssl-certfile {certs}/server.crt --ssl-keyfile {certs}/server.key "
        "--enable-supernode-auth --host 0.0.0.0 --port 8443 "
        "--isolation process --disable-runtime-dependency-installation\n"
    ) in out
    runs = f"--root-certificates {certs}/ca.crt --runtime-api-address 127.0.0.1:8443"
    assert f"/flower-superexec {runs}\n" in out
    assert "--insecure" not in out
    assert not state.exists()  # --print-only writes nothing


def test_server_without_certificates_is_refused(tmp_path):
    refused(r"certs = .*ca\.crt: no such file", "server", "--certs", tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gs.example.org"])
def test_insecure_server_on_a_network_needs_a_second_flag(host, tmp_path):
    given = ["server", "--host", host, "--insecure"]
    refused(r"insecure = True: .* add --insecure-network", *given)
    assert f"--insecure --host {host}" in shown(*given, "--insecure-network")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_insecure_server_on_the_loopback_is_asked_for_once(host):
    out = shown("server", "--host", host, "--insecure")
    assert f"launch.superlink --insecure --host {host}" in out
    assert "--enable-supernode-auth" not in out


def test_insecure_network_alone_does_not_drop_tls(certs):
    given = ["server", "--certs", certs, "--insecure-network"]
    refused("goes with --insecure", *given)


# ------------------------------------------------------------------ client


def test_client_prints_flowers_command(certs, tmp_path):
    key = ["--ca", certs / "ca.crt", "--key", certs / "clients/a.key"]
    where = ["--server", "10.1.2.3:8000", "--state-dir", tmp_path / "state"]
    data = ["--data", "npz:/data/a.npz", "--test-fraction", "0.2", "--download"]
    masks = ["--peers", certs / "clients", "--min-peers", 2]
    out = shown("client", "a", *where, *key, *data, *masks)
    assert (
        f"-m clients.resident --superlink 10.1.2.3:8000 "
        f"--root-certificates {certs}/ca.crt "
        f"--auth-supernode-private-key {certs}/clients/a.key"
    ) in out
    config = out.split("--node-config '")[1].split("'")[0]
    assert dict(part.split("=") for part in config.split()) == {
        "name": '"a"',
        "data": '"npz:/data/a.npz"',
        "state-dir": f'"{tmp_path}/state"',
        "test-fraction": "0.2",
        "download": "true",
        "peers": f'"{certs}/clients"',
        "key": f'"{certs}/clients/a.key"',
        "min-peers": "2",
    }
    assert not (tmp_path / "state").exists()


def test_client_has_a_flag_for_every_setting_of_its_own_data():
    from clients.site import OWN_SETTINGS

    assert {"data", *CLIENT_DATA} == OWN_SETTINGS
    more = ["--partition", "dirichlet", "--dirichlet-alpha", 0.3]
    assert " dirichlet-alpha=0.3" in shown(*CLIENT, *LOCAL, *more)


def test_client_without_key_or_authority_is_refused(certs):
    refused("ca is unset: give --ca", *CLIENT, *REMOTE)
    ca = ["--ca", certs / "ca.crt"]
    refused("key is unset: give --key", *CLIENT, *REMOTE, *ca)
    peers = ["--insecure", "--peers", certs / "clients"]
    refused("key is unset: give --key, by which --peers", *CLIENT, *LOCAL, *peers)


def test_insecure_client_on_a_network_needs_a_second_flag():
    given = [*CLIENT, *REMOTE, "--insecure"]
    refused(r"insecure = True: .* add --insecure-network", *given)
    out = shown(*given, "--insecure-network")
    assert "--superlink 10.1.2.3:8000 --insecure " in out


def test_a_clients_numbers_are_in_their_range():
    given = [*CLIENT, *LOCAL, "--min-peers", 1]
    refused("= 1: give --min-peers at least 2", *given)


@pytest.mark.parametrize("server", ["10.1.2.3", ":8000", "host:port", "host:99999"])
def test_server_address_has_a_port(server):
    refused(r"server = .*: give HOST:PORT", *CLIENT, "--server", server)


def test_value_that_would_break_out_of_the_node_config_is_refused():
    given = ["client", "a", *LOCAL, "--data", 'npz:x" name="b']
    refused(r"data = .* double quotes", *given)


def test_state_directory_is_private(tmp_path):
    from experiments.launch.processes import make_state

    assert mode(make_state(tmp_path / "new")) == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    assert_refused(r"has mode 755, .* chmod 700", make_state, tmp_path / "open")


# ------------------------------------------------------------------ submit


def test_submit_prints_registrations_and_the_run(certs):
    clients = [f"--client={n}={certs}/clients/{n}.pub" for n in ("b", "a")]
    given = [*REMOTE, "--ca", certs / "ca.crt", *clients]
    out = shown("submit", *given, *flags(**PLAN))
    assert 'address = "10.1.2.3:8000"' in out
    assert f'root-certificates = "{certs}/ca.crt"' in out
    lines = [line for line in out.splitlines() if line.startswith("+ ")]
    first = f"flwr supernode register {certs}/clients/b.pub server --name b"
    assert lines[0].endswith(first)
    assert lines[1].endswith("a.pub server --name a")
    assert " flwr run " in lines[2]
    app = app_of(out)
    assert app["components"] == {
        "serverapp": "server.server_app:app",
        "clientapp": "clients.client_app:app",
    }
    settings = app["config"]
    assert settings.pop("run_folder") == ""
    assert settings["nodes"] == "b,a"  # the order of the flags
    assert RunConfig.from_flat(settings).num_rounds == 20


@pytest.mark.parametrize(
    ("flag", "run"),
    [([], "from-file"), (["--output", "from-flag"], "from-flag")],
)
def test_output_of_a_file_names_the_run(tmp_path, flag, run):
    (tmp_path / "plan.toml").write_text('output = "from-file"')
    out = shown(*submission(), "--config", tmp_path / "plan.toml", *flag)
    assert app_of(out)["config"]["output"] == run


def test_run_without_a_name_is_named_after_the_time():
    output = app_of(shown(*submission()))["config"]["output"]
    assert re.fullmatch(r"run-\d{8}T\d{6}Z", output)


def submission() -> list[str]:
    plan = {name: value for name, value in PLAN.items() if name != "output"}
    return ["submit", *LOCAL, "--client", "a", "--client", "b", *flags(**plan)]


def app_of(printed: str) -> dict:
    """What Flower is told of the app that a command submits."""
    pyproject = printed[printed.index("[project]") : printed.index("+ ")]
    return tomllib.loads(pyproject)["tool"]["flwr"]["app"]


def test_resume_names_the_run_and_takes_no_settings(certs):
    given = ["submit", *SERVER, "--ca", certs / "ca.crt", "--resume", "digits-1"]
    assert app_of(shown(*given))["config"]["run_folder"] == "digits-1"
    refused("--resume takes the run's own settings", *given, "--num-rounds", 3)


@pytest.mark.parametrize("name", ["../up", "/etc", "a/b", "", ".hidden"])
def test_run_is_named_by_a_plain_word(certs, name):
    given = ["submit", *SERVER, "--ca", certs / "ca.crt", "--resume", name]
    refused(r"resume = .* name of a run folder", *given)


def test_clients_are_named_once_and_with_a_key(certs):
    def read(*texts: str) -> tuple:
        return deploy_submit.Submission(server="s:1", client=[*texts]).clients

    given_twice = (f"a={certs}/clients/a.pub", "a")
    assert_refused("client = a: given twice", read, *given_twice)
    assert_refused(r"client = .*nothing: no such file", read, "a=nothing")
    assert read("a") == (("a", None),)


def test_submit_without_clients_is_refused(certs):
    refused("client", "submit", *SERVER, "--ca", certs / "ca.crt", *flags(**PLAN))


def test_commands_start_without_torch():
    """Its import alone would be half of the time that they take."""
    names = ("commands", "submit", "supervisor")
    imports = "".join(f"import experiments.launch.{name}\n" for name in names)
    check = "import sys; assert not {'torch', 'flwr'} & set(sys.modules), 'slow'"
    subprocess.run([sys.executable, "-c", imports + check], check=True)


class Control:
    """Flower's control interface, with runs that end as they are told to."""

    def __init__(self, status: str = "completed", details: str = "") -> None:
        self.status, self.details = status, details
        self.keys: dict[str, bytes] = {}
        self.apps: list[bytes] = []
        self.asked_after: list[float] = []

    def RegisterNode(self, request):
        if request.public_key in self.keys.values():
            raise refusal(400, '{"code": 23, "detail": "Public key is in use."}')
        self.keys[request.name] = request.public_key

    def StartRun(self, request):
        from flwr.proto.control_pb2 import StartRunResponse

        assert request.fab.hash_str == hashlib.sha256(request.fab.content).hexdigest()
        self.apps.append(request.fab.content)
        return StartRunResponse(run_id=17)

    def StreamLogs(self, request):
        self.asked_after.append(request.after_timestamp)
        if len(self.asked_after) == 1:
            yield SimpleNamespace(log_output="round 1\n", latest_timestamp=5.0)
            raise httpx.ReadError("the server was restarted")
        yield SimpleNamespace(log_output="round 2\n", latest_timestamp=9.0)

    def ListRuns(self, request):
        if len(self.asked_after) == 1:
            raise httpx.ConnectError("refused")
        if self.status == "unknown":
            raise refusal(404, '{"code": 16, "detail": "Run ID not found."}')
        status = {"status": "finished", "sub_status": self.status}
        found = SimpleNamespace(**status, details=self.details)
        return SimpleNamespace(run_dict={17: SimpleNamespace(status=found)})

    def close(self) -> None:
        pass


def refusal(code: int, text: str) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1:8000/v1/control/x")
    response = httpx.Response(code, text=text, request=request)
    return httpx.HTTPStatusError(f"{code}", request=request, response=response)


@pytest.fixture
def control(monkeypatch) -> Control:
    from flwr.supercore.control import ControlHttpClient

    found = Control()
    monkeypatch.setattr(
        ControlHttpClient, "from_server_address", lambda *given, **named: found
    )
    monkeypatch.setattr(deploy_submit, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(deploy_submit, "START_PATIENCE", 0.0)
    return found


def submit(*arguments: object):
    words = ["deploy", "submit", *LOCAL, *map(str, arguments)]
    return CliRunner().invoke(app, words)


def failing(control: Control, monkeypatch, verb: str, error: Exception) -> None:
    """The server answers a question with an error, always."""

    def refuse(request):
        raise error

    monkeypatch.setattr(control, verb, refuse)


def sleeping_is_a_failure(monkeypatch) -> None:
    for module in (deploy_submit, deploy_control):
        monkeypatch.setattr(module.time, "sleep", lambda seconds: sys.exit(9))


def test_submit_registers_starts_and_follows_a_run(
    certs, control, monkeypatch, tmp_path
):
    monkeypatch.setattr(subprocess, "Popen", None)  # no process per question
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))  # and no file
    clients = [f"--client={n}={certs}/clients/{n}.pub" for n in ("a", "b")]
    result = submit(*clients, *flags(**PLAN))
    assert result.exit_code == 0, result.output
    assert list(control.keys) == ["a", "b"]
    public = load_ssh_public_key((certs / "clients/a.pub").read_bytes())
    assert load_pem_public_key(control.keys["a"]) == public
    with zipfile.ZipFile(io.BytesIO(control.apps[0])) as fab:
        project = tomllib.loads(fab.read("pyproject.toml").decode())
    assert project["tool"]["flwr"]["app"]["config"]["nodes"] == "a,b"
    assert control.asked_after == [0.0, 5.0]  # no line twice after a restart
    lines = ("a is registered", "run 17 is submitted", "round 1", "round 2")
    places = [result.output.index(line) for line in lines]
    assert places == sorted(places)
    assert "run 17 is completed" in result.output
    again = submit(*clients, "--resume", "digits-1")
    assert again.output.count("was registered before") == 2


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ("failed", "run 17: finished:failed. why"),
        ("unknown", "Run ID not found.: the server was restarted"),
    ],
)
def test_failed_run_is_exit_code_1_with_the_way_on(control, status, line):
    control.status, control.details = status, "why"
    result = submit("--resume", "digits-1")
    assert result.exit_code == 1
    assert line in " ".join(result.output.split())
    assert "--resume digits-1" in result.output


def test_run_that_the_server_refuses_is_exit_code_2_in_one_sentence(
    control, monkeypatch, capsys
):
    """Systemd and scripts repeat a 1; there is no such run however often one asks."""
    control.status = "failed"
    control.details = "ServerApp failed with exception: the settings of this run are "
    control.details += "refused: /runs/digits-9: no run folder; give another"
    words = ["fedgs", "deploy", "submit", *LOCAL, "--resume", "digits-9"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    refusal = "Error: /runs/digits-9: no run folder; give another\n"
    assert capsys.readouterr().err == refusal


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (refusal(403, "for the server's own machine only"), "403 for the server's own"),
        (refusal(400, '{"code": 22, "detail": "Not valid."}'), "says: Not valid."),
        (httpx.ConnectError("Connection refused"), "Connection refused"),
    ],
)
def test_refusal_of_the_server_is_exit_code_1(certs, control, monkeypatch, error, line):
    failing(control, monkeypatch, "RegisterNode", error)
    result = submit(f"--client=a={certs}/clients/a.pub", "--resume", "x")
    assert result.exit_code == 1
    assert "a cannot be registered: " in result.output
    assert line in result.output
    assert control.apps == []


def test_server_that_is_starting_is_waited_for(certs, control, monkeypatch):
    """So that all commands of a deployment can be started at once."""
    monkeypatch.setattr(deploy_submit, "START_PATIENCE", 30.0)
    monkeypatch.setattr(deploy_control, "RETRY_SECONDS", 0.0)
    errors = 3 * [httpx.ConnectError("[Errno 111] Connection refused")]
    stock = control.RegisterNode

    def register(request):
        if errors:
            raise errors.pop()
        return stock(request)

    monkeypatch.setattr(control, "RegisterNode", register)
    result = submit(f"--client=a={certs}/clients/a.pub", "--resume", "x")
    assert result.exit_code == 0
    assert result.output.count("Connection refused; trying again for 30 s") == 1
    assert list(control.keys) == ["a"]


def test_ctrl_c_leaves_the_run_and_says_so(control, monkeypatch):
    failing(control, monkeypatch, "ListRuns", KeyboardInterrupt())
    result = submit("--resume", "digits-1")
    assert result.exit_code == 130
    assert "run 17 goes on without this command" in result.output


def test_server_that_is_gone_is_given_up(control, monkeypatch):
    monkeypatch.setattr(deploy_submit, "PATIENCE", 0.0)
    result = submit("--resume", "digits-1")
    assert result.exit_code == 1
    assert "run 17: refused" in result.output


@pytest.mark.parametrize("verb", ["RegisterNode", "ListRuns"])
def test_server_of_another_authority_is_given_up(certs, control, monkeypatch, verb):
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed")
    failing(control, monkeypatch, verb, error)
    monkeypatch.setattr(deploy_submit, "START_PATIENCE", 30.0)
    sleeping_is_a_failure(monkeypatch)
    result = submit(f"--client=a={certs}/clients/a.pub", "--resume", "digits-1")
    assert result.exit_code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in result.output


@pytest.mark.parametrize("wrong", ["a.key", "no key"])
def test_file_that_is_no_public_key_is_refused_before_any_work(certs, control, wrong):
    path = certs / "clients" / wrong
    path.touch()
    clients = [f"--client=a={certs}/clients/a.pub", f"--client=b={path}"]
    result = submit(*clients, "--resume", "digits-1")
    assert isinstance(result.exception, UserError)
    assert f"client = b={path}: is no public key" in str(result.exception)
    assert control.keys == {}


def test_one_key_for_two_clients_is_refused_before_any_work(certs, control):
    clients = [f"--client={name}={certs}/clients/a.pub" for name in ("a", "b")]
    result = submit(*clients, "--resume", "digits-1")
    assert "client = b: has the key of a;" in str(result.exception)
    assert control.keys == {}


def test_authority_that_is_no_certificate_is_refused(certs):
    given = ["submit", *SERVER, "--resume", "x", "--ca", certs / "clients/a.pub"]
    assert_refused(r"ca = .*a\.pub: is no certificate", deploy, *given)


# ------------------------------------------------------------------ the guard


def scope(path: str, client: str | None, server: str = "10.0.0.1") -> dict:
    peer = None if client is None else (client, 12345)
    return {"type": "http", "path": path, "client": peer, "server": (server, 8000)}


CONTROL = ("/v1/control/start-run", "/v1/control/register-node", "/docs", "/")
RUNTIME = ("/v1/runtime/acquire-task", "/v1/fleet/../control/start-run")


@pytest.mark.parametrize("path", [*CONTROL, *RUNTIME])
def test_guard_lets_only_this_machine_control(path):
    guard = Guard(None)
    for own in ("127.0.0.1", "::1", "10.0.0.1", "::ffff:127.0.0.1"):
        assert guard.may_pass(scope(path, own)), own
    for other in ("10.0.0.2", "::ffff:10.0.0.2", "2001:db8::1", "unix", None):
        assert not guard.may_pass(scope(path, other)), other


def test_guard_lets_clients_reach_the_fleet():
    assert Guard(None).may_pass(scope("/v1/fleet/pull-messages", "10.0.0.2"))
    assert Guard(None).may_pass(scope("/health", "10.0.0.2"))


def test_guard_knows_the_networks_of_users():
    guard = Guard(None, networks_of("10.5.0.0/16, 2001:db8::/32"))
    assert guard.may_pass(scope("/v1/control/start-run", "10.5.1.1"))
    assert guard.may_pass(scope("/v1/control/start-run", "2001:db8::1"))
    assert not guard.may_pass(scope("/v1/control/start-run", "10.6.1.1"))
    assert_refused(r"control_from = .*give 10\.0\.0\.0/24", networks_of, "10.5.0.1/16")


@pytest.mark.parametrize("size", [None, 0, MOST_BYTES, MOST_BYTES + 1])
@pytest.mark.parametrize("path", ["/v1/fleet/push-object", "/v1/control/start-run"])
def test_what_weighs_more_than_an_answer_is_not_read(path, size):
    """What is read is held several times before its size could be looked at."""
    passed, sent = list[Any](), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope)

    async def send(event: Any) -> None:
        sent.append(event)

    headers = [] if size is None else [(b"content-length", b"%d" % size)]
    asked = scope(path, "127.0.0.1") | {"method": "POST", "headers": headers}
    asyncio.run(Guard(app)(asked, None, send))
    is_refused = "fleet" in path and size in (None, MOST_BYTES + 1)
    assert len(passed) == (not is_refused)
    assert [event.get("status", 413) for event in sent] == 2 * is_refused * [413]


def test_printed_server_is_the_one_that_is_guarded(certs, tmp_path):
    command, _ = deploy_commands.Server(
        host="0.0.0.0", port=8000, state=tmp_path, certs=certs
    ).command()
    assert command[:3] == [sys.executable, "-m", "experiments.launch.superlink"]
