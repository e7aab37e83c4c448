"""The Flower ServerApp: opens or creates the run folder and starts the strategy.

`fedgs train --engine flower` passes `run_folder`; a plain `flwr run .` passes the
settings themselves, and the run folder is created here.
"""

import dataclasses
import time
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedgs.config import RunConfig, UserError
from fedgs.preparation import check_capacity, resolve
from fedgs.process import watch_launcher
from fedgs.run_folder import RunFolder, write_json
from fedgs.training import RunStopped
from server.strategy import GsWgan

app = ServerApp()


class StopFile:
    """Is set once the launcher has written the run's stop file."""

    def __init__(self, path: Path) -> None:
        """Watches the given path."""
        self.path = path

    def is_set(self) -> bool:
        """Returns whether the run should stop."""
        return self.path.exists()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains one run; its outcome is in the run folder's `.flower/result.json`.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.
    """
    watch_launcher()
    folder = open_folder(dict(context.run_config))
    torch.set_num_threads(folder.config.num_threads)
    flower = folder.path / ".flower"
    flower.mkdir(exist_ok=True)
    (flower / "result.json").unlink(missing_ok=True)

    def report(metrics: dict[str, Any]) -> None:
        every = max(1, folder.config.num_rounds // 20)
        if metrics["round"] % every == 0:
            log(INFO, "round %d of %d", metrics["round"], folder.config.num_rounds)

    outcome = {"status": "failed", "message": ""}
    try:
        with folder.locked():
            GsWgan(folder, report, StopFile(flower / "stop")).start(grid)
        outcome["status"] = "completed"
    except RunStopped as error:
        outcome = {"status": "stopped", "message": str(error)}
        raise
    except Exception as error:
        outcome["message"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        write_json(flower / "result.json", outcome)


def open_folder(settings: dict[str, Any]) -> RunFolder:
    """Opens the launcher's run folder, or creates one from a plain run's settings.

    Privacy: public.

    Raises:
        UserError: invalid settings.
    """
    run_folder = settings.pop("run_folder", "")
    if run_folder:
        return RunFolder.open(str(run_folder))
    config = RunConfig.from_flat(settings)
    output = config.output or f"run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    path = Path.home() / "fedgs-runs" / output  # an absolute output stays itself
    config = dataclasses.replace(config, engine="flower", output=str(path))
    if path.exists():
        raise UserError(f"output = {path}: exists already; choose another output")
    path.parent.mkdir(parents=True, exist_ok=True)
    config, _ = resolve(config)
    check_capacity(config, path.parent)
    return RunFolder.create(config)
