"""How the benchmarks measure: seconds of a call, and memory of a process of its own."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def seconds_of(function: Callable[[], object], device: str = "cpu") -> float:
    """Returns the seconds of one call, with all work on the device done.

    On a CPU they are those of this process, which other work on the machine disturbs
    little.
    """
    clock = time.process_time if device == "cpu" else time.perf_counter
    _wait_for(device)
    started = clock()
    function()
    _wait_for(device)
    return clock() - started


def median_seconds(function: Callable[[], object], device: str = "cpu") -> float:
    """Returns the median time of five calls after one that does not count."""
    return medians_in_turn({"": function}, device)[""]


def medians_in_turn(
    functions: Mapping[str, Callable[[], object]], device: str = "cpu"
) -> dict[str, float]:
    """Returns the median time of five calls of each, in turn, after one of each."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(6):
        for name, function in functions.items():
            found[name].append(seconds_of(function, device))
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def _wait_for(device: str) -> None:
    if device != "cpu":
        import torch  # not in a process whose memory is measured without it

        torch.cuda.synchronize()


def printed_by(code: str) -> list[str]:
    """Returns the words that Python code prints in a process of its own."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def memory_bytes(name: str) -> int:
    """Returns this process's memory by its name in /proc: VmRSS, or VmHWM, the peak.

    Not by `resource`: its peak cannot be set back, and holds the parent's.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
