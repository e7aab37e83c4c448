"""`fedgs deploy`: the keys it makes, what it starts, what it submits and refuses."""

import asyncio
import hashlib
import io
import re
import shlex
import shutil
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
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from clients import client_command
from clients.client_command import ClientOptions
from clients.deployed_client import OWN_SETTINGS
from command_line import flags, plain_flags, printed, refused
from fedgs.app.cli.deploy_flags import CLIENT_DATA
from fedgs.app.commands.forecast import stated
from fedgs.config.phases import Phase
from fedgs.config.run_config import RunConfig
from fedgs.deployment import check_name
from fedgs.privacy.accountant import statements
from fedgs.privacy.plan import Plan
from fedgs.round.preparation import resolve_deployed
from refusals import assert_refused
from server.launch import certs as deploy_certs
from server.launch import control as deploy_control
from server.launch import server_command, supervisor
from server.launch import submit as deploy_submit
from server.launch.certs import check_issued, make_certificates
from server.launch.flower_app import free_port
from server.launch.server_command import ServerOptions
from server.launch.superlink import MOST_BYTES, Guard
from tiny import run_config

PLAN = {
    "num_clients": 2,
    "num_classes": 10,
    "client_selection": "all",
    "noise_multiplier": 1.0,
    "num_rounds": 20,
}
SUBMIT = ("deploy", "submit", "--server", "127.0.0.1:8000", "--insecure")


@pytest.fixture
def certs(tmp_path) -> Path:
    folder = tmp_path / "certs"
    make_certificates(folder, ["10.1.2.3", "gs.example.org"], ["a", "b"])
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def content(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# ------------------------------------------------------------------ certificates


def test_command_makes_private_keys_for_their_owner_alone(tmp_path, fedgs):
    folder = tmp_path / "c"
    words = ("deploy", "certs", folder, "--host", "10.0.0.1", "--client", "a")
    _, out, _ = fedgs(*words)
    assert f"{folder}/clients/a.key (mode 600, private: " in out
    assert f"{folder}/server.crt (mode 644, public)\n" in out
    for name in ("ca.key", "server.key", "clients/a.key"):
        assert mode(folder / name) == 0o600, name
    assert mode(folder) == mode(folder / "clients") == 0o700
    assert not list(folder.rglob(".*"))  # no temporary file is left
    assert fedgs(*words) == (0, "", "")  # all is there


def test_certificates_and_keys_are_those_that_tls_and_flower_read(certs):
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
    private = load_ssh_private_key((certs / "clients/a.key").read_bytes(), None)
    assert private.curve.name == "secp384r1"
    public = load_ssh_public_key((certs / "clients/a.pub").read_bytes())
    assert private.public_key() == public


def test_what_exists_is_kept_and_what_is_missing_is_added(certs):
    before = content(certs)
    (certs / "server.crt").unlink()
    make_certificates(certs, ["10.9.9.9"], ["a", "c"])
    after = content(certs)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"server.crt", "clients/c.key", "clients/c.pub"}


def test_client_makes_its_own_key_without_an_authority(tmp_path):
    make_certificates(tmp_path / "own", [], ["a"])
    assert sorted(content(tmp_path / "own")) == ["clients/a.key", "clients/a.pub"]


def spoil(certs: Path, removed: str, garbled: str) -> None:
    for name in removed.split():
        (certs / name).unlink()
    for name in garbled.split():
        (certs / name).write_text("no PEM\n")


@pytest.mark.parametrize(
    ("removed", "garbled", "host", "words"),
    [
        ("", "", "10.9.9.9", r"is not for 10\.9\.9\.9; delete it"),
        ("", "", "10.0.0.1:8000", r"host = '10\.0\.0\.1:8000': .* no port"),
        ("", "", "", "give --host of the server"),
        ("", "server.crt", "10.1.2.3", "server.crt: it is no certificate of a host"),
        ("server.crt", "ca.crt", "10.1.2.3", "ca.crt: it is no certificate"),
        ("server.crt", "ca.key", "10.1.2.3", "ca.key: it is no private key"),
        ("server.crt ca.key", "", "10.1.2.3", "ca.key: it is not here"),
        ("server.key", "", "10.1.2.3", "server.key: it is not here; put .* server.crt"),
        ("clients/a.key", "", "a", "a.key: it is not here; put the right .* a.pub to"),
    ],
)
def test_certificates_that_cannot_be_made_are_refused_and_nothing_is_written(
    certs, removed, garbled, host, words
):
    spoil(certs, removed, garbled)
    before, clients = content(certs), ["a"] if host == "a" else []
    hosts = [] if clients or not host else [host]
    assert_refused(words, make_certificates, certs, hosts, clients)
    assert content(certs) == before


@pytest.mark.parametrize(
    ("exchanged", "hosts", "words"),
    [
        ("clients/a.key", [], "a.key: it is not the key of a.pub; put the right one"),
        ("server.key", ["10.1.2.3"], "server.key: it is not the key of server.crt"),
        ("ca.key", ["10.1.2.3"], "ca.key: it is not the key of ca.crt"),
        ("ca.crt", ["10.1.2.3"], "server.crt: .*ca.crt did not sign it; delete it"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    certs, tmp_path, exchanged, hosts, words
):
    make_certificates(tmp_path / "others", ["10.1.2.3"], ["a"])
    shutil.copy(tmp_path / "others" / exchanged, certs / exchanged)
    if exchanged == "ca.key":
        (certs / "server.crt").unlink()
    before = content(certs)
    assert_refused(words, make_certificates, certs, hosts, ["a"])
    assert content(certs) == before


def test_a_certificate_may_be_signed_by_one_between(certs, tmp_path):
    """A company's own authority signs others, which sign its machines."""
    make_certificates(tmp_path / "others", ["10.1.2.3"], [])
    other = tmp_path / "others/ca.crt"
    assert_refused("did not sign it", check_issued, certs / "server.crt", other)
    chain = (certs / "server.crt").read_bytes() + (certs / "ca.crt").read_bytes()
    (certs / "server.crt").write_bytes(chain)
    check_issued(certs / "server.crt", other)


def test_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    (tmp_path / "ca.key").write_bytes(b"the other one's")
    with pytest.raises(FileExistsError):
        deploy_certs._write(tmp_path / "ca.key", b"ours", 0o600)
    assert content(tmp_path) == {"ca.key": b"the other one's"}


def test_a_run_accepts_the_names_that_have_keys():
    def checks(name):
        run = run_config(engine="flower", nodes=name, client_selection="all")
        return run.validate, lambda: check_name(name)

    for name in ("a" * 63, "A.b-c_1"):
        for check in checks(name):
            check()
    for name in ("a" * 64, "_a", "../a", "a/b", "a b", ".a", 'a"'):
        for check in checks(name):
            assert_refused("at most 63, a letter or digit first", check)


# ------------------------------------------------------------------ server


def test_server_starts_flowers_with_tls_authentication_and_the_guard(certs, tmp_path):
    server = ServerOptions(
        state=tmp_path / "state", host="0.0.0.0", port=8443, certs=certs
    )
    command, environment = server.command()
    assert command[:3] == [sys.executable, "-m", "server.launch.superlink"]
    words = " ".join(command)
    for given in (
        f"--ssl-ca-certfile {certs}/ca.crt --ssl-certfile {certs}/server.crt "
        f"--ssl-keyfile {certs}/server.key --enable-supernode-auth",
        "--host 0.0.0.0 --port 8443",
        "--isolation process --disable-runtime-dependency-installation",
    ):
        assert given in words
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_HOME"] == f"{tmp_path}/state/flwr"
    runs = f"--root-certificates {certs}/ca.crt --runtime-api-address 127.0.0.1:8443"
    assert " ".join(server.superexec()).endswith(runs)
    assert "--insecure" not in [*command, *server.superexec()]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_insecure_server_is_asked_for_once_on_the_loopback_alone(host):
    server = ServerOptions(host=host, insecure=True)
    assert "--insecure" in server.command()[0]
    assert "--insecure" in server.superexec()


def test_server_with_a_broken_certificate_is_refused(certs, tmp_path):
    server = ServerOptions(state=tmp_path, port=free_port(), certs=certs)
    server.check()
    intact = content(certs)
    make_certificates(tmp_path / "others", ["10.1.2.3"], [])
    other = (tmp_path / "others/server.key").read_bytes()
    authority = (tmp_path / "others/ca.crt").read_bytes()
    for name, wrong, words in (
        ("ca.crt", b"no PEM\n", "broken.*anew"),
        ("server.crt", b"no PEM\n", "broken.*anew"),
        ("server.key", b"no PEM\n", "broken.*anew"),
        ("server.key", other, "mismatch"),
    ):
        (certs / name).write_bytes(wrong)
        assert_refused(f"certs = {certs}: .*{words}", server.check)
        (certs / name).write_bytes(intact[name])
    (certs / "ca.crt").write_bytes(authority)
    assert_refused("server.crt: .*ca.crt did not sign it", server.check)


def test_server_without_its_port_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = ServerOptions(
            state=tmp_path, port=other.getsockname()[1], insecure=True
        )
        assert_refused(r"port = \d+ .*in use.*another", server.check)


# ------------------------------------------------------------------ client


def test_client_becomes_flowers_with_its_own_data(certs, tmp_path):
    command, _ = ClientOptions(
        name="a",
        server="10.1.2.3:8000",
        state=tmp_path / "state",
        ca=certs / "ca.crt",
        key=certs / "clients/a.key",
        data="npz:/data/a.npz",
        peers=certs / "clients",
        min_peers=2,
        settings={"test_fraction": 0.2, "download": True},
    ).command()
    *words, config = command
    assert " ".join(words[1:]) == (
        f"-m clients.resident --superlink 10.1.2.3:8000 "
        f"--root-certificates {certs}/ca.crt "
        f"--auth-supernode-private-key {certs}/clients/a.key --node-config"
    )
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
    assert {"data", *CLIENT_DATA} == OWN_SETTINGS  # each has a flag


# ------------------------------------------------------------------ refused

PLAIN = r"insecure = True: .* give certificates"
CLIENT = "client a --data digits --server"
SELECT = "select-clients --server [::1]:1 --insecure --below 0.5"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("server --certs /nowhere", r"certs = .*ca\.crt:"),
        ("server --insecure --host 0.0.0.0", PLAIN),
        ("server --insecure --host gs.example.org", PLAIN),
        (f"{CLIENT} a:1 --insecure", PLAIN),
        (f"{CLIENT} a:1", "ca is unset: .*give --ca"),
        (f"{CLIENT} a:1 --ca {__file__}", "key is unset: .*give --key"),
        (
            f"{CLIENT} [::1]:1 --insecure --peers .",
            "key is unset: .*--key",
        ),
        (f"{CLIENT} [::1]:1 --insecure --limits no.toml", "limits = .*:"),
        (f"{CLIENT} [::1]:1 --min-peers 1", "give --min-peers at least 2"),
        (f"{CLIENT} 10.1.2.3", "server = .*:"),
        (f"{CLIENT} host:99999", "server = .*:"),
        (f"{CLIENT} [::1]:1 --insecure --data 'npz:\"x'", "data = .* double quotes"),
        ("submit --server [::1]:1 --client a=no", "client = .*no:"),
        ("submit --server [::1]:1 --client a --client a", "a: given twice"),
        ("submit --server [::1]:1 --num-classes 3", "client is unset"),
        ("submit --server [::1]:1 --resume x", "ca is unset: .*give --ca"),
        (f"submit --server [::1]:1 --resume x --ca {__file__}", "is no certificate"),
        ("submit --server [::1]:1 --resume x --num-rounds 3", "keeps its own settings"),
        ("submit --server [::1]:1 --resume ../up", "resume = .* names a run folder"),
        ("submit --server [::1]:1 --resume ''", "resume = .* names a run folder"),
        ("submit --server [::1]:1 --client a --cohort ''", "cohort is empty: give"),
        ("select-clients --server [::1]:1 --client a", "below is unset: give --below"),
        (f"{SELECT} --client a", "noise_per_clip is unset: .* --noise-per-clip"),
        (f"{SELECT} --noise-per-clip 2", "client is unset"),
        (f"{SELECT} --client a --resume x", "resume = x: .* leave out --resume"),
        (
            f"{SELECT} --client a --noise-per-clip 2 --set clip_bound=2",
            "clip_bound = 2.*: the selection decides this",
        ),
        (
            f"{SELECT} --client a --noise-per-clip 2 --set target_epsilon=2.5",
            "target_epsilon = 2.5: the selection states its cost by --noise-per-clip",
        ),
        (
            f"{SELECT} --client a --noise-per-clip 1e-3 --set num_clients=100000",
            "noise_per_clip = 0.001: so little noise .* a larger number, such as 2",
        ),
        (
            f"{SELECT} --client a --noise-per-clip 1e200",
            "noise_per_clip = 1e.200: give --noise-per-clip at most 1e.100",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(words, problem, fedgs):
    code, _, error = fedgs("deploy", *shlex.split(words))
    assert code == 2
    assert re.search(problem, " ".join(error.split()))


# ------------------------------------------------------------------ submit


def test_commands_start_without_torch():
    """Its import alone would be half of the time that they take."""
    modules = (client_command, server_command, deploy_submit, supervisor)
    imports = "".join(f"import {module.__name__}\n" for module in modules)
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

    def ListNodes(self, request):
        from flwr.proto.control_pb2 import ListNodesResponse
        from flwr.proto.node_pb2 import NodeInfo

        infos = [NodeInfo(name=n, public_key=key) for n, key in self.keys.items()]
        return ListNodesResponse(nodes_info=infos)

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
        status = {"status": "finished", "sub_status": self.status}
        found = SimpleNamespace(**status, details=self.details)
        return SimpleNamespace(run_dict={17: SimpleNamespace(status=found)})

    def close(self) -> None:
        pass

    @property
    def app(self) -> dict:
        """What the server was told of the last submitted app."""
        with zipfile.ZipFile(io.BytesIO(self.apps[-1])) as fab:
            project = tomllib.loads(fab.read("pyproject.toml").decode())
        return project["tool"]["flwr"]["app"]


def refusal(code: int, text: str) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1:8000/v1/control/x")
    response = httpx.Response(code, text=text, request=request)
    return httpx.HTTPStatusError(f"{code}", request=request, response=response)


UNKNOWN = refusal(404, '{"code": 16, "detail": "Run ID not found."}')


@pytest.fixture
def control(monkeypatch) -> Control:
    from flwr.supercore.control import ControlHttpClient

    found = Control()
    monkeypatch.setattr(
        ControlHttpClient, "from_server_address", lambda *given, **named: found
    )
    monkeypatch.setattr(deploy_submit, "STATUS_SECONDS", 0.0)
    return found


def client(certs: Path, name: str) -> str:
    return f"--client={name}={certs}/clients/{name}.pub"


def test_a_target_epsilon_alone_submits_the_default_recipe(control, fedgs):
    plan = {"num_classes": 10, "target_epsilon": 10.0, "clients_per_node": 100}
    plan["image_size"] = 28
    code, _, _ = fedgs(*SUBMIT, "--client", "a", "--client", "b", *flags(**plan))
    assert code == 0
    settings = control.app["config"]
    del settings["run_folder"]
    sent = RunConfig.from_flat(settings)
    assert sent.phases[-1] == Phase("pretrained-features", share=1.0)
    assert sent.moment_size == 10


def test_a_dry_run_says_what_a_run_costs_and_sends_nothing(control, fedgs):
    plan = {"node_sizes": "300,200", "num_classes": 3, "image_size": 28}
    plan["target_epsilon"] = 3.0
    clients = ("--client", "a", "--client", "b")
    code, out, _ = fedgs(*SUBMIT, *clients, *flags(**plan), "--dry-run")
    assert code == 0
    assert control.apps == []
    assert control.keys == {}
    assert re.search(r"time: .*then about \d+ (seconds|minutes) on the server", out)
    # Each guarantee of the run that the same command would submit.
    code, _, _ = fedgs(*SUBMIT, *clients, *flags(**plan))
    assert code == 0
    config = resolve_deployed(submitted(control))
    rows = stated(config)
    # Nothing of sums alone: without masks the server sees each answer.
    assert {row[0] for row in rows} == {"release", "server"}
    assert len(rows) == 4
    assert "secagg" not in out
    for row in rows:
        assert re.search(r"\W+".join(map(re.escape, row)), out)
    code, _, error = fedgs(*SUBMIT, *clients, "--resume", "digits-1", "--dry-run")
    assert code == 2
    assert "dry_run = True" in error


def test_a_deployment_has_no_other_engine(control, fedgs, tmp_path):
    where = ["--client", "a", "--set", "num_classes=10"]
    refused(
        fedgs(*SUBMIT, *where, "--set", "engine=local"), "engine = 'local': .*leave"
    )
    refused(fedgs(*SUBMIT, *where, "--engine", "flower"), "The setting engine")
    assert not control.apps
    # A file of all settings names the engine of simulations.
    path = tmp_path / "all.toml"
    path.write_text(printed(fedgs("settings", "moments")))
    of_images = ["--node-sizes", "30", "--image-size", "28"]
    printed(fedgs(*SUBMIT, *where, *of_images, "--config", path))
    assert control.app["config"]["engine"] == "flower"


def test_submit_registers_starts_and_follows_a_run(certs, control, fedgs, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)  # no process per question
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # and no file
    clients = [client(certs, name) for name in ("b", "a")]
    code, out, _ = fedgs(*SUBMIT, *clients, *flags(recipe="algorithm-2", **PLAN))
    assert code == 0
    assert list(control.keys) == ["b", "a"]
    public = load_ssh_public_key((certs / "clients/a.pub").read_bytes())
    assert load_pem_public_key(control.keys["a"]) == public
    assert control.app["components"] == {
        "serverapp": "server.server_app:app",
        "clientapp": "clients.client_app:app",
    }
    settings = control.app["config"]
    assert settings.pop("run_folder") == ""
    assert settings["nodes"] == "b,a"  # the order of the flags
    assert re.fullmatch(r"algorithm-2-\d{8}T\d{6}Z", settings["output"])
    assert RunConfig.from_flat(settings).num_rounds == 20
    assert control.asked_after == [0.0, 5.0]  # no line twice after a restart
    lines = ("a is registered", "run 17 is submitted", "round 1", "round 2")
    places = [out.index(line) for line in (*lines, "run 17 is completed")]
    assert places == sorted(places)
    assert out.endswith("-o report.html` shows what came of it\n")
    _, out, _ = fedgs(*SUBMIT, *clients, "--resume", "digits-1")
    assert out.endswith("shows what came of it, unless it was a selection of owners\n")
    assert out.count("was registered before") == 2
    assert control.app["config"]["run_folder"] == "digits-1"
    swapped: list[str] = []
    for name, other in ("ab", "ba"):
        swapped += ["--client", f"{name}={certs / 'clients' / other}.pub"]
    *done, err = fedgs(*SUBMIT, *swapped, "--resume", "digits-1")
    assert (done[0], len(control.apps)) == (2, 2)
    assert re.search("client = [ab]: its key is registered for [ab]; give the key", err)


def test_a_selection_is_submitted_with_its_rounds_and_the_noise_of_its_nodes(
    control, fedgs
):
    words = [*SUBMIT[:1], "select-clients", *SUBMIT[2:], "--client=a", "--client=b"]
    plan = {"below": 25, "above": 75, "num_rounds": 10, "noise_per_clip": 2.0}
    plan |= {"node_sizes": "40,60", "num_classes": 10, "image_size": 28}
    code, out, _ = fedgs(*words, *plain_flags(**plan), "--percentiles")
    assert code == 0
    # There is no generator to report on.
    assert "/cohorts.json has the thresholds and the noisy counts" in out
    assert "fedgs report" not in out
    sent = control.app["config"]
    del sent["run_folder"]
    config = RunConfig.from_flat(sent)
    first, last = config.phases
    assert first == Phase("cohort-classifier", rounds=10)
    # mu^2 of 9 pairs of counts with noise sqrt(100) / 2, in rounds of (2 / 2)^2.
    assert last == Phase("cohort-counts", rounds=9, share=9 * 2 * 2.0**2 / 100)
    assert config.noise_multiplier * 2 * 2**0.5 == pytest.approx(2.0)
    assert (config.num_clients, config.num_rounds) == (100, 19)
    assert (config.below, config.above, config.are_percentiles) == (25, 75, True)


DEBUG = ("deploy", "debug", *SUBMIT[2:], "--client", "a", "--client", "b")
SITES = {"num_classes": 10, "image_size": 28, "target_epsilon": 3, "each": True}
SITES |= {"node_sizes": "300,200"}


def submitted(control: Control) -> RunConfig:
    settings = control.app["config"]
    del settings["run_folder"]
    return RunConfig.from_flat(settings)


def test_sites_are_compared_by_group_means_after_a_look_at_the_power(control, fedgs):
    plan, rest = flags(**SITES), ("--groups", "5", "--alpha", "0.1")
    code, out, _ = fedgs(*DEBUG, *plan, *rest, "--dry-run")
    assert code == 0
    assert "Recipe group-means" in out
    assert "40 clients in each group and epsilon 3" in out
    assert re.search(r"server\W+zero-out\W+3\W", out)
    assert "nothing was sent" in out
    assert control.apps == []
    code, again, _ = fedgs(*DEBUG, *plan, *rest)
    assert code == 0
    assert again.startswith(out.partition("rounds:")[0])
    sent = submitted(control)
    own = sent.at_phase(0)
    assert (own.compares_nodes, own.suspicious, own.groups) == (True, None, 5)
    assert (sent.alpha, sent.node_sizes, sent.nodes) == (0.1, "300,200", "a,b")
    assert sent.output.startswith("group-means-")


@pytest.mark.parametrize("adversary", ["release", "server", "secagg"])
def test_a_site_alone_has_the_target_epsilon_whoever_looks(control, fedgs, adversary):
    assert fedgs(*DEBUG, *flags(**SITES, adversary=adversary))[0] == 0
    config = resolve_deployed(submitted(control))
    rows = statements(Plan.from_config(config), config.delta)
    found = {row.adversary: row.epsilon for row in rows if row.relation == "zero-out"}
    assert {*found} >= {"release", "server"}
    assert all(2.9 < epsilon <= 3 for epsilon in found.values())


def test_one_site_or_two_values_are_compared(control, fedgs):
    plan = flags(**SITES | {"each": None})
    for given, wanted in (
        (("--suspicious", "b"), (True, None, "b")),
        (("--healthy", "v1", "--suspicious", "v2"), (False, "v1", "v2")),
    ):
        assert fedgs(*DEBUG, *plan, *given)[0] == 0
        own = submitted(control).at_phase(0)
        assert (own.compares_nodes, own.healthy, own.suspicious) == wanted


def test_a_comparison_goes_on_as_it_was_started(control, fedgs):
    assert fedgs(*DEBUG, "--resume", "sites-1")[0] == 0
    assert control.app["config"]["run_folder"] == "sites-1"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"each": None}, "suspicious is unset: "),
        (
            {"each": None, "healthy": "", "suspicious": "v2"},
            "healthy is empty: give --healthy the name of a cohort, or leave it out",
        ),
        ({"suspicious": "a"}, "--each compares every node with all others"),
        ({"each": None, "suspicious": "c"}, "give --suspicious one of a, b"),
        ({"secure_aggregation": True}, "secure_aggregation = True: nodes are compared"),
        ({"node_sizes": "300,3"}, "the smallest node has 3 clients for 4 groups"),
        ({"target_epsilon": 0.01}, "the noise hides every bug"),
        ({"resume": "x"}, "each = True: a resumed run"),
        ({"each": None, "resume": "x"}, "keeps its own settings"),
        ({"num_classes": None}, "num_classes is unset"),
    ],
)
def test_a_comparison_that_says_nothing_is_not_submitted(
    control, fedgs, given, problem
):
    code, _, err = fedgs(*DEBUG, *flags(**SITES | given))
    assert code == 2
    assert problem in " ".join(err.split())
    assert control.apps == []


def test_a_run_on_one_cohort_says_what_is_public_of_it(control, fedgs):
    plan = {"num_classes": 10, "image_size": 28, "target_epsilon": 10}
    words = ("--client", "a", "--cohort", "v2", "--node-sizes", 300)
    assert fedgs(*SUBMIT, *words, *flags(recipe="moments", **plan))[0] == 0
    sent = submitted(control)
    assert sent.cohort_value == "v2"
    (condition,) = [text for text in sent.public_conditions if "v2" in text]
    assert condition.startswith("public: how many clients with cohort_value = v2")


REFUSED = "ServerApp failed with exception: the settings of this run are refused: "
OTHER_AUTHORITY = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed")


@pytest.mark.parametrize(
    ("details", "code", "error"),
    [
        ("why", 1, "^run 17 .*finished:failed.*why\n.* --resume digits-1"),
        # Systemd and scripts repeat a 1; there is no such run however often one asks.
        (f"{REFUSED}/runs/x: no run folder", 2, "^Error: /runs/x: no run folder\n$"),
    ],
)
def test_a_run_that_failed_or_is_refused_ends_the_command(
    control, fedgs, details, code, error
):
    control.status, control.details = "failed", details
    found, _, err = fedgs(*SUBMIT, "--resume", "digits-1")
    assert found == code
    assert re.search(error, err)


@pytest.mark.parametrize(
    ("verb", "error", "code", "line"),
    [
        ("RegisterNode", refusal(403, "for itself"), 1, "a cannot.*: 403 for itself"),
        ("RegisterNode", refusal(400, '{"code": 22, "detail": "No."}'), 1, "says: No."),
        ("RegisterNode", OTHER_AUTHORITY, 1, "CERTIFICATE_VERIFY_FAILED"),
        ("ListRuns", OTHER_AUTHORITY, 1, "CERTIFICATE_VERIFY_FAILED"),
        ("ListRuns", httpx.ConnectError("refused"), 1, "run 17: refused"),
        ("ListRuns", UNKNOWN, 1, "Run ID not found.: the server was restarted"),
        ("ListRuns", KeyboardInterrupt(), 130, "run 17 goes on without this command"),
    ],
)
def test_what_waiting_does_not_mend_ends_the_command(
    certs, control, fedgs, monkeypatch, verb, error, code, line
):
    def fail(request):
        raise error

    def sleep(seconds):
        raise AssertionError("waited")

    monkeypatch.setattr(control, verb, fail)
    monkeypatch.setattr(deploy_submit, "PATIENCE", 0.0)
    for module in (deploy_submit, deploy_control):
        monkeypatch.setattr(module.time, "sleep", sleep)
    found, _, err = fedgs(*SUBMIT, client(certs, "a"), "--resume", "x")
    assert found == code
    assert re.search(line, err)


def test_server_that_is_starting_is_waited_for(certs, control, fedgs, monkeypatch):
    """So that all commands of a deployment can be started at once."""
    monkeypatch.setattr(deploy_control, "RETRY_SECONDS", 0.0)
    errors = 3 * [httpx.ConnectError("[Errno 111] Connection refused")]
    stock = control.RegisterNode

    def register(request):
        if errors:
            raise errors.pop()
        return stock(request)

    monkeypatch.setattr(control, "RegisterNode", register)
    code, out, _ = fedgs(*SUBMIT, client(certs, "a"), "--resume", "x")
    assert code == 0
    assert out.count("Connection refused; trying again for 30 s") == 1
    assert list(control.keys) == ["a"]


@pytest.mark.parametrize(
    ("key", "problem"), [("a.key", "is no public key"), ("a.pub", "has the key of a;")]
)
def test_a_wrong_key_is_refused_before_any_work(certs, control, fedgs, key, problem):
    path = certs / "clients" / key
    words = (client(certs, "a"), f"--client=b={path}", "--resume", "digits-1")
    code, _, err = fedgs(*SUBMIT, *words)
    assert code == 2
    assert re.search(f"client = b.*{problem}", err)
    assert control.keys == {}


# ------------------------------------------------------------------ the guard


def scope(path: str, client: str | None, server: str = "10.0.0.1") -> dict:
    peer = None if client is None else (client, 12345)
    return {"type": "http", "path": path, "client": peer, "server": (server, 8000)}


OPEN = ("/v1/fleet/pull-messages", "/health")
CLOSED = ("/v1/control/start-run", "/v1/runtime/acquire-task", "/")


@pytest.mark.parametrize("path", [*OPEN, *CLOSED, "/v1/fleet/../control/start-run"])
def test_guard_lets_only_this_machine_control(path):
    guard = Guard(None)
    for own in ("127.0.0.1", "::1", "10.0.0.1", "::ffff:127.0.0.1"):
        assert guard.may_pass(scope(path, own)), own
    for other in ("10.0.0.2", "::ffff:10.0.0.2", "2001:db9::1", "unix", None):
        assert guard.may_pass(scope(path, other)) == (path in OPEN), other


@pytest.mark.parametrize("size", [None, 0, MOST_BYTES, MOST_BYTES + 1])
@pytest.mark.parametrize("path", ["/v1/fleet/push-object", "/v1/control/start-run"])
def test_what_weighs_more_than_an_answer_is_not_read(path, size):
    """What is read is held twice before its size could be looked at."""
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
