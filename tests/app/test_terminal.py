"""Progress on a terminal and elsewhere."""

import io

from rich.console import Console

from fedgs.app.commands import terminal as module
from fedgs.app.commands.terminal import Progress


def lines_of(monkeypatch, seconds: float) -> list[str]:
    """What four rounds show, the first of which follows a warm start of 100 s."""
    times = iter([0.0, *(100 + seconds * i for i in range(4))])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times, 200.0))
    out = io.StringIO()
    with Progress(Console(file=out)) as progress:
        report = progress.rounds(4)
        for number in range(1, 5):
            report({"round": number})
    return out.getvalue().splitlines()


def test_lines_have_the_pace_of_the_rounds_alone_and_are_far_apart(monkeypatch):
    assert lines_of(monkeypatch, 30.0) == [
        "round 1 of 4",
        "round 2 of 4, 30.00 s/round, about 1.0 min left",
        "round 3 of 4, 30.00 s/round, about 0.5 min left",
        "round 4 of 4, 30.00 s/round",
    ]
    fast = lines_of(monkeypatch, 0.05)
    assert fast[-1] == "round 4 of 4, 20 rounds/s"
    few = [line.partition(",")[0] for line in lines_of(monkeypatch, 2.0)]
    assert few == ["round 1 of 4", "round 4 of 4"]


def test_a_second_warm_start_has_a_pace_of_its_own(monkeypatch):
    """In the paper's mode a node has its warm start when it is first selected."""
    times = iter([0.0, 20.0, 40.0, 1000.0, 1020.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times, 2000.0))
    out = io.StringIO()
    with Progress(Console(file=out)) as progress:
        report = progress.rounds(4)
        for step in (10, 20, 10, 20):
            report({"round": 0, "warm_start_step": step, "warm_start_steps": 30})
    title = "warm start of the discriminators: step"
    first = f"{title} 10 of 30"
    second = f"{title} 20 of 30, 2.00 s/step, about 0.3 min left"
    assert out.getvalue().splitlines() == [first, second, first, second]


def test_a_terminal_gets_a_bar_and_no_lines():
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=200)) as progress:
        report = progress.rounds(2)
        report({"round": 1})
        report({"round": 2})
    assert "round 2 of 2" in out.getvalue()
    assert "min left" not in out.getvalue()
