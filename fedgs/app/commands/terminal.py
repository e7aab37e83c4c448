"""How far a command is: bars with an estimate on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fedgs.app.tables import folded

SLOW = 0.1  # seconds of a step; of shorter ones the pace is how many there are a second
PLAIN_SECONDS = 10.0  # between the lines of a stage where there is no terminal


def say(text: str, is_error: bool = False) -> None:
    """Prints a line without colour; off a terminal as it is, for a program to read."""
    if is_error:
        stream = sys.stderr
    else:
        stream = sys.stdout
    # Flushed: a log that somebody follows shows a line when it is printed.
    print(folded(text, stream), file=stream, flush=True)


class Progress:
    """Shows the stages of a command while it is entered.

    Args:
        console: where; standard error when None.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Shows nothing yet."""
        # Standard error, because standard output may be a table or JSON for a program.
        self.console = console or Console(stderr=True)
        self.printed = time.monotonic()
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[pace]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,  # bars in a file are noise
        )

    def __enter__(self) -> "Progress":
        """Shows the bars."""
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the bars as they are."""
        self.bars.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        # Through the console, which prints above the bars. Nothing of the text is
        # markup: a path may have brackets.
        text = folded(text, self.console.file)
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def stage(self, title: str, unit: str = "step") -> "Stage":
        """Returns what a stage calls with its steps done and all its steps."""
        return Stage(self, title, unit)

    def rounds(self, total: int, title: str = "round") -> Callable[[Any], None]:
        """Returns what a run of so many rounds calls with each round's metrics."""
        stage = self.stage(title, unit=title.split()[-1])
        fit = self.stage("fitting the generator: step")
        warm_start = self.stage("warm start of the discriminators: step")

        def show(metrics: dict[str, Any]) -> None:
            if "fit_step" in metrics:
                stage.first = None  # its time is no round's
                fit(metrics["fit_step"], metrics["fit_steps"])
            elif "warm_start_step" in metrics:
                stage.first = None
                warm_start(metrics["warm_start_step"], metrics["warm_start_steps"])
            else:
                ratio = metrics.get("signal_to_noise")
                if ratio is None:
                    stage.about = ""
                else:
                    stage.about = f", signal/noise {ratio:.3g}"
                stage(metrics["round"], total)

        return show


class Stage:
    """One bar, or its lines; made by `Progress.stage`."""

    def __init__(self, progress: Progress, title: str, unit: str) -> None:
        """Shows nothing before the first call."""
        self.progress = progress
        self.title = title
        self.unit = unit
        # Hidden until the first step: not every run has every stage.
        self.task = progress.bars.add_task(title, total=None, visible=False, pace="")
        self.first: int | None = None
        self.done = 0
        # What is told of the last step
        self.started = 0.0
        self.about = ""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Shows how many steps are done; a note is a result, and its line stays."""
        now = time.monotonic()
        is_again = done < self.done  # the same work once more, as of another node
        self.done = done
        # What came before the first report is no step's time.
        if self.first is None or is_again:
            self.first = done
            self.started = now
        title = f"{self.title} {done} of {total}{self.about}"
        pace = ""
        left = ""
        steps = done - self.first
        if steps:
            seconds = (now - self.started) / steps
            minutes_left = seconds * (total - done) / 60
            if seconds >= SLOW:
                pace = f"{seconds:.2f} s/{self.unit}"
            else:
                pace = f"{1 / max(seconds, 1e-9):.0f} {self.unit}s/s"
            if done < total:
                left = f"about {minutes_left:.1f} min left"
        self.progress.bars.update(
            self.task,
            description=title,
            completed=done,
            total=total,
            pace=pace,
            visible=True,
        )
        # A log gets a line now and then and at the end, not one a step.
        is_due = done == total or now - self.progress.printed > PLAIN_SECONDS
        if note or (is_due and not self.progress.console.is_terminal):
            self.progress.printed = now
            if note:
                words = (title, note)
            else:
                words = (title, pace, left)
            self.progress.say(", ".join(word for word in words if word))
