"""The page in a real browser: every chart is drawn, on a desktop and on a phone, light and dark, and nothing runs or loads."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

pytest.importorskip("plotly", reason="needs plotly: pip install '.[report]'")

from raafl.commands.report import build
from raafl.runfolder.reading import read
from tests.lab.report.folders import CONFIG, write
from tests.lab.report.test_page import CHARTS, hostile_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium or google-chrome")
DARK, LIGHT = "0", "1"
DEADLINE_S = 100


def opened(page, folder, *options, scheme=LIGHT):
    """Return the document as the browser has it once its scripts are done, and what it said on the way."""
    command = [
        str(BROWSER),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={scheme}",
        "--enable-logging=stderr",
        "--virtual-time-budget=60000",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page about two groups, one of which has two runs, the other nothing but texts that try to be markup."""
    folder = tmp_path_factory.mktemp("browser")
    runs = [write(folder / "a"), write(folder / "b", config={**CONFIG, "seed": 1}), hostile_run(folder / "c")]
    path = folder / "page.html"
    path.write_text(build([read(run) for run in runs]), encoding="utf-8")
    return path


@pytest.mark.slow("a whole browser draws it")
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_chart_is_drawn_and_no_text_becomes_markup(page, tmp_path, scheme):
    image = pytest.importorskip("PIL.Image")
    picture = tmp_path / "page.png"
    options = ("--window-size=1000,3000", "--hide-scrollbars", "--dump-dom", f"--screenshot={picture}")
    document, said = opened(page, tmp_path, *options, scheme=scheme)
    html = re.match(r"\s*(?:<!DOCTYPE html>)?\s*<html[^>]*>", document)
    assert html and f'data-drawn="{len(CHARTS)}"' in html[0], said
    assert said == ""
    assert "data-owned" not in html[0]
    drawn = re.sub(r"<script.*?</script>", "", document, flags=re.S)
    assert drawn.count("js-plotly-plot") >= len(CHARTS)
    assert not re.search(r"<img|<script", drawn)
    assert ("rgb(230, 232, 236)" in drawn) == (scheme == DARK)  # the colour of dark pages' texts
    assert "&lt;img src=x" in drawn
    pixels = image.open(picture).convert("RGB")
    assert pixels.getpixel((2, 2)) == ((255, 255, 255) if scheme == LIGHT else (20, 22, 27))
    colours = {colour for _, colour in pixels.getcolors(maxcolors=1 << 24)}
    assert {(66, 105, 208), (232, 104, 74)} <= colours  # a merged task, a lost one


@pytest.mark.slow("a whole browser draws it")
def test_a_phone_shows_the_page_without_scrolling_sideways(page, tmp_path):
    holder = tmp_path / "holder.html"
    measured = "const d = this.contentDocument.documentElement; document.title = [d.dataset.drawn, d.clientWidth, d.scrollWidth]"
    holder.write_text(
        f'<iframe src="{page.as_uri()}" style="width:390px;height:800px;border:0" '
        f'onload="setTimeout(() => {{{measured}}}, 20000)"></iframe>'
    )
    document, _ = opened(holder, tmp_path, "--window-size=600,900", "--allow-file-access-from-files", "--dump-dom")
    drawn, shown, whole = re.findall(r"<title>(\d+),(\d+),(\d+)</title>", document)[0]
    assert int(drawn) == len(CHARTS)
    assert whole == shown
    assert 360 <= int(shown) <= 390
