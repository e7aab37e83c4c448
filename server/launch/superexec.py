"""Flower's SuperExec, whose runs say what they do where the server does.

Flower sends the output of a run's process nowhere but to its own database. On a full
disk the reason why a run has ended would be lost.
"""

import sys
from importlib import import_module


def main() -> None:
    """Runs flower-superexec with the output of runs shown, or not at all."""
    try:
        plugin = import_module("flwr.supercore.superexec.plugin.base_exec_plugin")
        shown = plugin.AutoExecPlugin.visible_output_task_types
        kinds = {*shown, plugin.TaskType.SERVER_APP}
        plugin.AutoExecPlugin.visible_output_task_types = frozenset(kinds)
        from flwr.supercore.cli import flower_superexec
    except (ImportError, AttributeError) as error:
        sys.exit(f"this Flower is not known ({error}); install flwr 1.41")
    flower_superexec()


if __name__ == "__main__":
    main()
