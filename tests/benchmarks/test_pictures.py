"""The pictures of README and docs: what the command draws, and where a value lies in them."""

from __future__ import annotations

import functools
import importlib
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import architecture, pictures
from tests.habits.source import ROOT


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_command_draws_all(tmp_path, capsys):
    options = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs"), "--seeds", "1", "--seconds", "1"]
    pictures.main(options)
    drawn = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert {str(tmp_path / "out" / name) for name in drawn} == set(capsys.readouterr().out.split())
    assert set(drawn) == {"architecture.svg", "learning-curve.svg", "timeline.svg", "way-of-an-update.svg"}
    assert {"Fed-RAA", "FedAvg", "60 %", "95 % target"} <= set(texts(drawn["learning-curve.svg"]))
    assert {"1 fast", "4 slowest", "waiting for a task"} <= set(texts(drawn["timeline.svg"]))
    pictures.main(options)  # from the same runs, the same pictures
    assert drawn == {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    "name, draw", [("way-of-an-update", pictures.way_of_an_update), ("architecture", architecture.draw)]
)
def test_the_diagrams_of_the_docs_are_what_is_drawn(name, draw):
    assert (ROOT / "docs" / "images" / f"{name}.svg").read_text() == draw()


@pytest.mark.parametrize("step", architecture.STEPS, ids=lambda step: step.name)
def test_every_name_in_the_architecture_exists(step):
    assert callable(functools.reduce(getattr, step.name.split("."), importlib.import_module(step.module)))


def test_a_value_lies_where_it_should():
    y = pictures.Scale((0.6, 1.0), (342, 46))  # 296 pixels for 40 points
    assert [y(0.6), y(1.0), y(0.8)] == pytest.approx([342, 46, 194])


@pytest.mark.parametrize(
    ("most", "expected"), [(60, [0, 10, 20, 30, 40, 50, 60]), (8, [0, 2, 4, 6, 8]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1])]
)
def test_ticks_are_round(most, expected):
    assert pictures.ticks(most) == pytest.approx(expected)


def test_the_mean_is_over_seeds_and_linear_between_evaluations():
    runs = [
        SimpleNamespace(metrics={"time_s": np.array([0.0, 4.0]), "accuracy": np.array([0.0, 0.8])}),
        SimpleNamespace(metrics={"time_s": np.array([0.0, 2.0]), "accuracy": np.array([0.2, 0.6])}),
    ]
    times, mean = pictures.mean_curve(runs, 4.0, points=3)  # at 0, 2, 4: 0, 0.4, 0.8 and 0.2, 0.6, 0.6
    assert times == pytest.approx([0, 2, 4]) and mean == pytest.approx([0.1, 0.5, 0.7])
