"""The report in a real browser, headless: what it shows, that nothing overflows, that no foreign script runs."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sweeps.report import write_report
from tests.sweeps.made_up_nights import Planted, history, keep
from tests.sweeps.page_reader import read_page

pytestmark = [pytest.mark.slow, pytest.mark.services]

WIDTHS = (1280, 390)
MEASURE = """
<script>
addEventListener('load', function () {
  var wide = [], outside = [], small = 0, tiles = {};
  document.querySelectorAll('body *').forEach(function (element) {
    if (element.closest('.scroll, pre, nav, svg, details:not([open])')) { return; }
    var box = element.getBoundingClientRect();
    if (box.width && (box.right > innerWidth + 1 || box.left < -1)) {
      wide.push(element.tagName + ' ' + element.className);
    }
  });
  document.querySelectorAll('svg.chart').forEach(function (chart) {
    var frame = chart.getBoundingClientRect();
    chart.querySelectorAll('text').forEach(function (text) {
      var box = text.getBoundingClientRect();
      var isInside = box.left >= frame.left - 2 && box.right <= frame.right + 2
        && box.top >= frame.top - 2 && box.bottom <= frame.bottom + 2;
      if (!isInside) { outside.push(chart.querySelector('title').textContent + ': ' + text.textContent); }
      if (box.width && box.height < 9 && box.width > 9) { small += 1; }
    });
  });
  document.querySelectorAll('.tile').forEach(function (tile) {
    tiles[tile.querySelector('span').innerText] = tile.querySelector('b').innerText;
  });
  parent.postMessage(JSON.stringify({
    inner: innerWidth, scroll: document.documentElement.scrollWidth,
    wide: wide, outside: outside, small: small, tiles: tiles,
    headline: document.getElementById('headline').innerText,
    copyable: document.querySelectorAll('button.copy:not([hidden])').length,
    commands: document.querySelectorAll('.command').length,
    charts: document.querySelectorAll('svg.chart').length
  }), '*');
});
</script>
"""
FRAME = """<!DOCTYPE html><body style="margin:0"><pre id="told"></pre><script>
addEventListener('message', function (told) { document.getElementById('told').textContent = told.data; });
</script><iframe src="copy.html" width="WIDTH" height="900" style="border:0"></iframe></body>
"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no chromium: install Debian's package chromium")
        pytest.skip("no chromium: install Debian's package chromium")
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nights")
    nights = history(12, 160, seed=2, planted=Planted(slower_data=0.12, bad_node="dgx03"), num_nodes=12)
    paths, _ = write_report(root, *nights[-1], keep(root, nights))
    return paths.html


def browse(chromium: str, folder: Path, *options: str) -> str:
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--virtual-time-budget=3000", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )  # fmt: skip
    return done.stdout


def measured(chromium: str, page: Path, folder: Path, width: int) -> dict[str, Any]:
    """In a frame of that width, for a browser's own window may have a least one; the frame tells its parent."""
    text = page.read_text()
    # A copy, whose policy lets the measuring script run.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    (folder / "copy.html").write_text(text.replace("</body>", f"{MEASURE}</body>"))
    outer = folder / "outer.html"
    outer.write_text(FRAME.replace("WIDTH", str(width)))
    shown = browse(chromium, folder, f"--window-size={max(width, 800)},1000", "--dump-dom", outer.as_uri())
    told = re.search(r"<pre id=\"told\">(.*?)</pre>", shown, re.DOTALL)
    assert told and told[1], shown[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_and_the_figures_are_there(chromium: str, page: Path, tmp_path: Path, width: int) -> None:
    found = measured(chromium, page, tmp_path, width)
    assert found["inner"] == width and found["scroll"] <= width
    assert found["wide"] == [] and found["outside"] == [] and found["small"] == 0
    figures = json.loads((page.parent / "report.json").read_text())
    assert found["headline"] == figures["headline"]
    accounts = figures["accounts"]
    assert found["tiles"]["done, trained to the end"] == str(accounts["num_done"])
    assert found["tiles"]["failed"] == str(accounts["num_failed"])
    assert float(found["tiles"]["GPU-hours allocated"]) == pytest.approx(accounts["allocated"] / 3600, rel=5e-3)
    tree = read_page(page.read_text())
    assert found["charts"] == len(tree.all("svg", class_="chart")) > 20
    assert found["copyable"] == found["commands"] > 10, "the page's own script shows the buttons"


def test_a_foreign_script_does_not_run(chromium: str, page: Path, tmp_path: Path) -> None:
    """Even if some text were not escaped: the page's policy allows its own script alone."""
    attack = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    copy = tmp_path / "attacked.html"
    copy.write_text(page.read_text().replace("<main>", f"<main>{attack}"))
    shown = browse(chromium, tmp_path, "--dump-dom", copy.as_uri())
    assert "<title>Night" in shown and "<title>taken" not in shown
    assert not re.search(r'<button class="copy" type="button" hidden', shown), "the page's own script ran"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_screenshot_is_taken(chromium: str, page: Path, tmp_path: Path, width: int) -> None:
    """For people to look at; SWEEPS_SCREENSHOTS names a folder to keep it in."""
    target = Path(os.environ.get("SWEEPS_SCREENSHOTS") or tmp_path) / f"report_{width}.png"
    browse(chromium, tmp_path, f"--window-size={width},2400", f"--screenshot={target}", page.as_uri())
    header = target.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[20:24], "big") == 2400 and target.stat().st_size > 50_000
