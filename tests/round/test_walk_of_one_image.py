"""The page's walk of one image, call by call, beside what a deployed run calls."""

import re
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"^\d+\. `([\w.]+)` \(`([\w/.]+)`\)", re.MULTILINE)


def walk_of_the_page() -> list[tuple[str, str]]:
    """File and function of each step."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("### The walk of one image")[1].split("\n## ")[0]
    return [(file, function) for function, file in STEP.findall(section)]


def test_a_round_makes_the_calls_of_the_page_in_their_order(deploy):
    walk = walk_of_the_page()
    assert 2 < len(walk) <= 10
    of_code = {(str(ROOT / file), function) for file, function in walk}
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        call = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and call in of_code:
            file = str(Path(call[0]).relative_to(ROOT))
            if calls[-1:] != [(file, call[1])]:  # steps and chunks repeat a call
                calls.append((file, call[1]))

    run = deploy(mode="selected", num_rounds=1, clients_per_round=1)
    sys.setprofile(note)
    try:
        run.start()
    finally:
        sys.setprofile(None)
    start, asked = walk[:1], walk[1:]
    last = max(i for i, call in enumerate(calls) if call == asked[0])
    assert calls[last:] == asked
    assert start[0] in calls[:last]
