"""What a notebook shows of runs: escaped tables, and a curve whose points are those of the metrics."""

from __future__ import annotations

import re

import pytest

from raafl.lab.report.groups import Group, group_runs
from raafl.lab.report.notebook import curve_svg, fragment, run_html, ticks
from raafl.runfolder.reading import read
from raafl.runfolder.schema import METRICS

SCRIPT = "<script>alert(1)</script>"


def folder_of(path, *rows: str):
    path.mkdir()
    (path / METRICS).write_text("version,time_s,wall_s,accuracy\n" + "".join(f"{row}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.11, 0.93, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3, 7, [-4, -2, 0, 2, 4, 6, 8]),
        (0, 1234, [0, 500, 1000, 1500]),
        (0.5, 0.5, [0.5, 0.6]),
        (0, 0, [0, 0.2]),
        (1, 1 + 2**-52, [1, 1.00005]),  # a metric that changes by rounding alone
        (0, 5e-324, [0, 5e-301]),
        (-1.7e308, 1.7e308, [-1e300, -5e299, 0, 5e299, 1e300]),
    ],
)
def test_ticks_are_round_numbers_around_the_values(least, most, expected):
    assert ticks(least, most) == pytest.approx(expected)


def test_a_curve_goes_from_corner_to_corner(tmp_path):
    run = read(folder_of(tmp_path / "run", "0,0,0,0", "1,5,1,0.5", "2,10,2,1"))
    svg = curve_svg([Group("mine", "#123456", (run,), {})])
    (points,) = re.findall(r'<polyline points="([^"]+)" fill="none" stroke="#123456"', svg)
    assert points == "64.0,220.0 336.0,116.0 608.0,12.0"  # of 620 x 260, less the margins 64, 12, 12 and 40
    assert "polygon" not in svg and "> mine</span>" in svg


def test_a_metric_that_changes_by_rounding_alone_is_a_flat_line(tmp_path):
    run = read(folder_of(tmp_path / "run", "0,0,0,0.7", "1,10,1,0.7000000000000001"))
    svg = curve_svg([Group("mine", "#123456", (run,), {})])
    assert '<polyline points="64.0,220.0 608.0,220.0"' in svg and ">0.70002</text>" in svg


def test_several_runs_are_a_mean_in_a_band(tmp_path):
    runs = [read(folder_of(tmp_path / f"{i}", "0,0,0,0", f"1,10,1,{y}")) for i, y in enumerate((0.6, 1))]
    svg = curve_svg([Group("mine", "#123456", tuple(runs), {})])
    assert '<polyline points="64.0,220.0 608.0,53.6"' in svg  # 0.8 of the way up
    assert '<polygon points="64.0,220.0 608.0,95.2 608.0,12.0 64.0,220.0"' in svg


def test_without_a_metric_there_is_no_curve(tmp_path):
    assert curve_svg(group_runs([read(folder_of(tmp_path / "run"))])) == ""


def test_all_text_is_escaped(tmp_path):
    run = read(folder_of(tmp_path / "run", "0,0,0,0", "1,1,1,1"))
    shown = [
        curve_svg([Group(SCRIPT, "#123456", (run,), {})]),
        fragment(SCRIPT, notes=[SCRIPT], code=SCRIPT),
        run_html(tmp_path / "run", {"algorithm": SCRIPT, "final": {SCRIPT: 1.0}}),
        run_html(tmp_path / SCRIPT.replace("/", ""), {"algorithm": SCRIPT, "final": {SCRIPT: 1.0}, "finished": SCRIPT}),
    ]
    assert not any("<script" in text for text in shown)
    assert all("&lt;script" in text for text in shown)


def test_a_run_whose_folder_is_gone_shows_its_summary(tmp_path):
    summary = {"algorithm": "fed_avg", "final": {"accuracy": 0.5}, "finished": "interrupted", "updates_merged": 7}
    shown = run_html(tmp_path / "gone", summary)
    assert "<td>0.5</td>" in shown and "interrupted" in shown and "<svg" not in shown
