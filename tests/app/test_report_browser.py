"""`fedgs report` in a real browser: no errors, no overflow, usable by keyboard."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedgs.app.report.page import report
from report_folders import make_debug, make_run

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (390, 1440)  # a phone and a desk
PAGES = ("one", "two", "debug")
SCHEMES = ("light", "dark")
PATIENCE = 300_000  # ms: on a busy machine a browser starves


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """A page of one run, of two and of a debug folder."""
    root = tmp_path_factory.mktemp("pages")
    one = make_run(root / "a-run-with-a-rather-long-name-as-people-do")
    two = make_run(root / "noise-free", noise_multiplier=0.0)
    debug = make_debug(root / "debug")
    report([one], root / "one.html")
    report([one, two], root / "two.html")
    report([debug], root / "debug.html")
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
def test_page_loads_without_errors_or_requests(browser, pages, name, width, scheme):
    page = opened(browser, pages / f"{name}.html", width, scheme)
    assert page.complaints == []
    asked = [url for url in page.requests if not url.startswith("data:")]
    assert asked == [(pages / f"{name}.html").as_uri()[:40]]
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows(browser, pages, name, width):
    page = opened(browser, pages / f"{name}.html", width)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    widths = "[document.documentElement.scrollWidth, innerWidth]"
    wide, there = page.evaluate(widths)
    assert wide <= there == width
    outside = page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter(element => {
          const box = element.getBoundingClientRect();
          return box.right > innerWidth + 1 && !element.closest('.scroll, .skip, svg')
        }).map(element => element.outerHTML.slice(0, 100))"""
    )
    assert outside == []
    page.close()


def test_pictures_are_loaded_and_have_text_alternatives(browser, pages, name):
    page = opened(browser, pages / f"{name}.html", WIDTHS[0])
    images = page.evaluate(
        "[...document.images].map(i => [i.alt.length, i.complete && i.naturalWidth])"
    )
    assert images
    assert all(length > 20 and width > 0 for length, width in images)
    page.close()


def test_keyboard_reaches_every_link_and_fold(browser, pages, name):
    page = opened(browser, pages / f"{name}.html", WIDTHS[1])
    targets = page.evaluate(
        "document.querySelectorAll('a[href], summary, [tabindex=\"0\"]').length"
    )
    hidden = page.evaluate(
        """[...document.querySelectorAll('details:not([open]) *')].filter(
          e => e.matches('a[href], [tabindex="0"], details details summary')).length"""
    )
    reached = set()
    for _ in range(targets + 1):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                """[...document.querySelectorAll('*')].indexOf(document.activeElement)"""
            )
        )
    assert len(reached - {-1}) >= targets - hidden
    page.locator("summary").last.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").last.get_attribute("open") is not None
    page.close()


def test_skip_link_is_first_and_leads_to_the_content(browser, pages):
    page = opened(browser, pages / "one.html", WIDTHS[1])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.url.endswith("#main")
    page.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_has_contrast(browser, pages, name, scheme):
    """At least 4.5 to 1 (WCAG AA) for all text, drawings included."""
    page = opened(browser, pages / f"{name}.html", WIDTHS[1], scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate(POOR_CONTRAST) == []
    page.close()


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
