r"""A client in one process: Flower's SuperNode with the ClientApp inside it.

    python -m clients.resident --superlink HOST:PORT --root-certificates ca.crt \
        --auth-supernode-private-key KEY --node-config 'name="a" data="..." ...'

The options are those of `flower-supernode`. The stock SuperNode starts an operating
system process per message, which imports torch and reads every state again, and sleeps
for seconds between looks. Here the models stay loaded; no port is opened, because
nobody else answers; only the installed fedgs is run, never code that a server sends;
and it connects again for as long as it is asked to run. For that a handful of Flower's
functions are replaced (`clients.flower_speed`); a Flower without them is refused.

Exit codes: 0 after SIGTERM or Ctrl-C, 2 for bad input, 1 for any other end.
"""

import argparse
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from fedgs.process import end_on_signals, notify

if __name__ == "__main__":  # before what takes seconds to be imported
    end_on_signals()

from clients.deployed_client import DeploymentConfig
from clients.flower_speed import RESIDENT, is_possible, make_resident
from fedgs.config.checks import check_data
from fedgs.config.run_config import RunConfig
from fedgs.config.settings import IMAGE_SIZES
from fedgs.data import sources
from fedgs.data.cohort import for_all_clients, keep_cohort
from fedgs.data.load import split_records
from fedgs.data.records import check_owners
from fedgs.deployment import FLOWER_REMEDY, private_key, read_address
from fedgs.errors import UserError, printable, wrap_error


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a client until it is told to end; see the module.

    Privacy: releases (epsilon, delta)-DP output; events: in the clients' own count.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    try:
        if options.superlink is not None:
            read_address("superlink", options.superlink)
        site = _site(options.node_config)
        _check_files(options.root_certificates, options.auth_supernode_private_key)
        # Kept by nobody: before systemd is told, it must be clear that they are there.
        # A run will say which size of images it has; any size shows that they are read.
        settings = {"image_size": IMAGE_SIZES[0], **site.settings}
        config = RunConfig.from_flat(settings)
        # The client's own settings contradict each other in every run.
        check_data(config)
        print(f"reading {config.data} ...", flush=True)
        records = sources.read_records(config)
        check_owners(config.data, records)
        if config.cohorts is not None:
            keep_cohort(config, split_records(for_all_clients(config), records))
        if not is_possible("the client in one process", RESIDENT):
            raise UserError(
                f"flwr: this version of Flower is not known; {FLOWER_REMEDY}"
            )
        site.open()
        print("The data can be read. This client waits for the server.", flush=True)
        notify("READY=1")  # it may still have to wait for the server
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(2)
    # This isolation starts no process for an app; who answers is replaced below.
    sys.argv = ["flower-supernode", *given, "--isolation", "process"]
    from clients.client_app import app

    make_resident(app)
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


def _options(given: Sequence[str]) -> argparse.Namespace:
    """Reads the options that are looked at here; Flower reads the others."""
    parser = argparse.ArgumentParser("resident", add_help=False, allow_abbrev=False)
    files = ("root-certificates", "auth-supernode-private-key")
    for name in ("superlink", "node-config", *files):
        parser.add_argument(f"--{name}")
    return parser.parse_known_args(given)[0]


def _site(text: str | None) -> DeploymentConfig:
    """Reads `--node-config` as Flower does, to refuse a wrong one at once."""
    from flwr.common.config import parse_config_args

    if text is None:
        raise UserError(
            "--node-config is unset: a client needs a name, data and a folder; give "
            "name, data and state-dir"
        )
    problem = f"--node-config {text}: it cannot be read"
    with wrap_error(Exception, problem, 'give name="..." data="..." ...'):
        return DeploymentConfig.read(parse_config_args([text]))


def _check_files(ca: str | None, key: str | None) -> None:
    """Refuses files that Flower would end with a traceback or another code for."""
    if ca:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
        except OSError as error:
            reason = error.strerror
            if isinstance(error, ssl.SSLError):  # it was read, and is something else
                reason = "no PEM certificate"
            raise UserError(f"ca = {ca}: {reason}; give the server's ca.crt") from error
    if key:
        private_key(f"key = {key}", Path(key).expanduser())


if __name__ == "__main__":
    main()
