"""The page's walks of one image, call by call, beside what a deployed run calls."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"^\d+\. .*?(?=^\d+\. |^#|\Z)", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"`([\w.]+)`(?:\s+\(`([\w/.]+)`\))?")
# A phase of moments does not refine; each node has one client, as on the page.
DEFAULT = {"mode": "moments", "phases": "means", "clients_per_node": 1}
GS_WGAN = {"mode": "selected", "num_rounds": 1, "clients_per_round": 1}


def walk_of_the_page(title: str) -> list[tuple[str, str]]:
    """File and function of each call; a file stands where a function is first named."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = {name: file for name, file in CALL.findall(page) if file}
    section = page.split(f"### {title}\n")[1].split("\n## ")[0].split("\n### ")[0]
    calls = [name for step in STEP.findall(section) for name, _ in CALL.findall(step)]
    return [(files[name], name) for name in calls if name in files]


@pytest.mark.parametrize(
    ("title", "settings"),
    [("One image in the default run", DEFAULT), ("One image in GS-WGAN", GS_WGAN)],
)
def test_a_round_makes_the_calls_of_the_page_in_their_order(deploy, title, settings):
    walk = walk_of_the_page(title)
    if settings is DEFAULT:
        assert walk.pop() == ("fedgs/gan/refinement.py", "refine")
    assert 2 < len(walk) <= 10
    of_code = {(str(ROOT / file), function) for file, function in walk}
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        call = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and call in of_code:
            file = str(Path(call[0]).relative_to(ROOT))
            if calls[-1:] != [(file, call[1])]:  # steps and chunks repeat a call
                calls.append((file, call[1]))

    run = deploy(**settings)
    sys.setprofile(note)
    try:
        run.start()
    finally:
        sys.setprofile(None)
    start, asked = walk[:1], walk[1:]
    last = max(i for i, call in enumerate(calls) if call == asked[0])
    assert calls[last:] == asked
    assert start[0] in calls[:last]
