"""`fedgs report` in a real browser: no errors, no overflow, usable by keyboard."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedgs.app.report.page import report
from report_folders import compared_site, make_diagnosed, make_run

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (390, 1440)  # a phone and a desk
PAGES = ("one", "two", "sites")
SCHEMES = ("light", "dark")
PATIENCE = 300_000  # ms: on a busy machine a browser starves


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """A page of one run, of two, and of one that compares sites with long names."""
    root = tmp_path_factory.mktemp("pages")
    one = make_run(root / "a-run-with-a-rather-long-name-as-people-do")
    two = make_run(root / "noise-free", noise_multiplier=0.0)
    names = [f"{letter * 70}" for letter in "wxyz"]
    compared = [compared_site(name, sentence=f"It is {name}.") for name in names]
    sites = make_diagnosed(root / "sites", comparisons=compared, rows=names)
    report([one], root / "one.html")
    report([one, two], root / "two.html")
    report([sites], root / "sites.html")
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs Chromium: none of {', '.join(BROWSERS)} is installed")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium's has no use for root
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(
            executable_path=found, args=sandbox, timeout=PATIENCE
        )
        yield launched
        launched.close()


@pytest.fixture(params=PAGES)
def name(request) -> str:
    return request.param


def opened(browser: Any, path: Path, width: int, scheme: str = "light") -> Any:
    """Opens a page; what it complains about or asks for is in `page.complaints`."""
    page = browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    page.set_default_timeout(PATIENCE)
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("requestfailed", lambda request: page.complaints.append(request.url))
    page.requests = []
    page.on("request", lambda request: page.requests.append(request.url[:40]))
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_page_is_whole_readable_and_asks_for_nothing(
    browser, pages, name, width, scheme
):
    page = opened(browser, pages / f"{name}.html", width, scheme)
    assert page.complaints == []
    asked = [url for url in page.requests if not url.startswith("data:")]
    assert asked == [(pages / f"{name}.html").as_uri()[:40]]
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    wide, there = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= there == width
    outside = page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter(element => {
          const box = element.getBoundingClientRect();
          return box.right > innerWidth + 1 && !element.closest('.scroll, .skip, svg')
        }).map(element => element.outerHTML.slice(0, 100))"""
    )
    assert outside == []
    images = page.evaluate(
        "[...document.images].map(i => [i.alt.length, i.complete && i.naturalWidth])"
    )
    assert images
    assert all(length > 20 and there > 0 for length, there in images)
    assert page.evaluate(POOR_CONTRAST) == []
    page.close()


def test_keyboard_reaches_every_link_and_fold(browser, pages, name):
    page = opened(browser, pages / f"{name}.html", WIDTHS[1])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    targets, hidden = page.evaluate(
        """['a[href], summary, [tabindex="0"]', 'details:not([open]) a[href],'
          + ' details:not([open]) [tabindex="0"], details:not([open]) details summary']
          .map(which => document.querySelectorAll(which).length)"""
    )
    where = "[...document.querySelectorAll('*')].indexOf(document.activeElement)"
    reached = {page.evaluate(where)}
    for _ in range(targets):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(where))
    assert len(reached - {-1}) >= targets - hidden
    page.locator("summary").last.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").last.get_attribute("open") is not None
    page.close()


# Of text below 4.5 to 1 (WCAG AA), drawings included.
POOR_CONTRAST = """() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => numbers(colour).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = new Set();
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(n => n.nodeType == 3 && n.data.trim());
    if (!own || element.closest('style')) continue;
    const style = getComputedStyle(element);
    const ink = element.closest('svg') ? style.fill : style.color;
    const [a, b] = [light(ink), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) {
      found.add(`${element.tagName} ${ink} on ${behind(element)}`);
    }
  }
  return [...found];
}"""
