"""The page in a real browser: its script runs, nothing is logged, and no request is made."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from events.pages import Page, hostile_run, large_run
from events.synthetic_run import SyntheticRun
from events.test_goodput import own
from events.test_report_faults import run_without_a_host
from outlast.events.report import build, render_html
from outlast.events.types import CheckpointRestored

pytestmark = pytest.mark.slow

_NET_S = 120

_PHONE = """<!doctype html><body><p></p><iframe width="360" src="measured.html"></iframe><script>
addEventListener("message", (event) => document.querySelector("p").append(event.data));
</script></body>"""

_MEASURE = """
const tables = [...document.querySelectorAll(".scroll")].filter((each) => each.clientWidth > 0);
const scrolled = tables.filter((each) => each.scrollWidth > each.clientWidth);
const broken = [];
for (const cell of tables.flatMap((each) => [...each.querySelectorAll("th, td")])) {
  for (const text of [...cell.childNodes].filter((each) => each.nodeType === Node.TEXT_NODE)) {
    for (const word of text.data.matchAll(/\\w+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (range.getClientRects().length > 1) broken.push(word[0]);
    }
  }
}
const named = (names) => names.join(", ") || "none";
const labels = scrolled.map((each) => each.getAttribute("aria-label"));
parent.postMessage(`scrolled: ${named(labels)}; broken: ${named(broken)}`, "*");
"""


@pytest.fixture
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium here: install it, or run `make services` as root")


def opened(browser: str, page: str, folder: Path) -> tuple[Page, list[str], list[str]]:
    """The page after its script has run, the lines of the console, and the URLs it asked for."""
    file, net = folder / "page.html", folder / "net.json"
    file.write_text(page, encoding="utf-8")
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", "--disable-extensions", "--disable-default-apps"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"),
        *(f"--user-data-dir={folder / 'profile'}", f"--log-net-log={net}"),
        *("--virtual-time-budget=2000", "--dump-dom", file.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_NET_S, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = json.loads(net.read_text())["events"]
    asked = {str(event.get("params", {}).get("url", "")) for event in events}
    return Page(done.stdout), console, sorted(url for url in asked if "a.test" in url)


def test_a_page_of_ten_thousand_events_is_shown(browser: str, tmp_path: Path) -> None:
    page = render_html(build(large_run().events), title="a run")
    shown, console, _ = opened(browser, page, tmp_path)
    assert console == []
    assert len(shown.elements) < 8_000
    # The script has run: it puts the first mark, and no other, into the order of the Tab key.
    marks = [each for each in shown.named("svg") if "mark" in each.get("class", "")]
    assert [mark.get("tabindex") for mark in marks].count("0") == 1


def test_a_page_with_markup_from_logs_asks_for_nothing(browser: str, tmp_path: Path) -> None:
    page = render_html(build(hostile_run().events), title="a run")
    shown, console, asked = opened(browser, page, tmp_path)
    assert (console, asked) == ([], [])
    assert shown.named("img") == []


def test_the_policy_stops_what_was_not_escaped(browser: str, tmp_path: Path) -> None:
    page = render_html(build(run_without_a_host().events), title="a run")
    bad = '<img src="http://a.test/x"><script>document.title = "taken over"</script></main>'
    spoiled = page.replace("</main>", bad)
    shown, console, asked = opened(browser, spoiled, tmp_path)
    assert len(console) == 2, "the browser says what it refused"
    assert asked == []
    assert "taken over" not in shown.text.replace(bad, "")
    # Without the policy, both are seen: the test can fail.
    (folder := tmp_path / "without").mkdir()
    free = spoiled.replace("Content-Security-Policy", "nothing")
    _, _, asked = opened(browser, free, folder)
    assert asked == ["http://a.test/x"]


def test_tables_fit_a_phone_without_broken_words(browser: str, tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.fault(1, at=10.0)
    run.restart(at=10.0)
    own(run, 0, CheckpointRestored(step=10, source="ranks", seconds=0.0109), 11.0)
    run.complete(at=20.0)
    page = render_html(build(run.events), title="a run")
    page = page.replace("Content-Security-Policy", "nothing")  # which forbids to measure it
    measured = page.replace("</body>", f"<script>{_MEASURE}</script></body>")
    (tmp_path / "measured.html").write_text(measured, encoding="utf-8")
    shown, _, _ = opened(browser, _PHONE, tmp_path)
    ten_columns = "The recovery of each restart"
    assert shown.text.strip() == f"scrolled: {ten_columns}; broken: none"
