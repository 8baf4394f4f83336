"""A static figure of learning curves."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[report]'")

from raafl.commands.cli import main
from raafl.lab.report.groups import group_runs
from raafl.lab.report.overview import draw
from raafl.runfolder.reading import read
from tests.lab.report.folders import CONFIG, METRICS, SUMMARY, write


def test_the_curve_of_a_run_goes_through_its_evaluations(tmp_path):
    """Accuracy 0.1, 0.5, 0.9 at 0, 5, 9 s: equal steps up, and steps across of five to four."""
    text = draw(group_runs([read(write(tmp_path / "run"))]), ".svg").decode()
    assert "accuracy" in text and "virtual time (s)" in text
    (line,) = re.findall(r'<path d="M ([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #4269d0', text)
    points = [tuple(map(float, point.split())) for point in line.replace("\n", "").split("L ")]
    across = [later[0] - earlier[0] for earlier, later in pairwise(points)]
    up = [earlier[1] - later[1] for earlier, later in pairwise(points)]
    assert len(points) == 3 and across[0] / across[1] == pytest.approx(5 / 4) and up[0] == pytest.approx(up[1])


def test_the_same_runs_give_the_same_file_and_seeds_a_band(tmp_path):
    others = [{**row, "accuracy": row["accuracy"] - 0.05} for row in METRICS]
    folders = [
        write(tmp_path / "a"),
        write(tmp_path / "b", config={**CONFIG, "seed": 1}, metrics=others, summary={**SUMMARY, "seed": 1}),
    ]
    groups = group_runs([read(folder) for folder in folders])
    text = draw(groups, ".svg")
    assert text == draw(groups, ".svg") and b"(2 runs)" in text and b"fill-opacity: 0.2" in text


def test_texts_of_a_folder_are_text(tmp_path, capsys):
    """`$` would begin a formula, which fails where it is none; markup is escaped."""
    config = {**CONFIG, "algorithm": {"class_path": r"raafl.$\nothing{<b>"}}
    summary = {key: value for key, value in SUMMARY.items() if key != "algorithm"}
    folders = [write(tmp_path / "a"), write(tmp_path / "b", config=config, summary=summary)]
    text = draw(group_runs([read(folder) for folder in folders]), ".svg").decode()
    assert "&lt;b" in text and "<b>" not in text


def test_the_command_writes_the_figure_alone_or_beside_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = str(write(tmp_path / "run"))
    assert main(["report", folder, "--figure", "curves.pdf"]) == 0
    assert re.fullmatch(r"curves.pdf: 1 run, [\d.]+ kB\n", capsys.readouterr().out)
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF") and not (tmp_path / "report.html").exists()
    assert main(["report", folder, "--figure", "curves.png"]) == 2
    assert capsys.readouterr().err == "raafl: figure is 'curves.png': name a file that ends in .svg or .pdf\n"
    nothing = str(write(tmp_path / "empty", metrics=[]))
    assert main(["report", nothing, "--figure", "curves.svg"]) == 2
    assert "no run has an evaluation of its model" in capsys.readouterr().err
