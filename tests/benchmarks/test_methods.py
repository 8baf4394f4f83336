"""Methods beside each other: rows from runs that are kept, and what a lead is."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import methods
from benchmarks.methods import Setting, lead, smoothed
from tests.habits.source import ROOT
from tests.helpers.crash import crashed

CONFIG = ROOT / "configs" / "quickstart.yaml"
SHORT = ("--max_updates", "24", "--checkpoint_every", "1")
pytestmark = pytest.mark.timeout(120)


def test_the_lead_is_by_the_time_to_the_others_best():
    theirs = [(1.0, 0.1), (6.0, 0.5), (9.0, 0.4)]  # their best, 0.5, after 6 s
    assert lead([(1.0, 0.2), (3.0, 0.5), (4.0, 0.3)], theirs) == 2.0
    assert lead([(1.0, 0.2), (12.0, 0.6)], theirs) == 0.5
    assert lead([(1.0, 0.2)], theirs) is None


def test_a_smoothed_curve_is_of_means_at_the_time_of_the_last():
    curve = [(1.0, 0.1), (2.0, 0.4), (4.0, 0.1), (5.0, 0.4)]
    assert smoothed(curve, 3) == [(4.0, pytest.approx(0.2)), (5.0, pytest.approx(0.3))]
    assert smoothed(curve, 1) == curve and smoothed([], 3) == []
    assert smoothed(curve[:2], 3) == [(2.0, pytest.approx(0.25))]


@pytest.mark.parametrize("name", sorted(path.stem for path in (methods.HERE / "comparisons").glob("*.yaml")))
def test_each_row_of_each_comparison_can_be_read(name):
    settings, found = methods.read(name)
    assert len(settings) == len(found["rows"]) * len(found["seeds"])
    assert len({setting.name for setting in settings}) == len(settings)
    assert [setting.seed for setting in settings[:: len(found["rows"])]] == found["seeds"]
    for setting in settings[: len(found["rows"])]:
        assert methods.parsed(setting).experiment.seed == found["seeds"][0]


def test_each_row_has_the_value_that_it_does_best_with(monkeypatch):
    """By hand: A ends highest with 0.1; B with 0.1 and 0.5 alike, of which the first counts; the best on the way does not."""
    ends = {"A": {0.05: 0.6, 0.1: 0.9, 0.5: 0.1}, "B": {0.05: 0.6, 0.1: 0.7, 0.5: 0.7}}
    tried = []

    def run_all(wanted, jobs, keep=None):
        tried.extend(wanted)
        return [{"accuracy": ends[s.label[0]][float(s.options[-1])], "best_accuracy": 1.0} for s in wanted]

    monkeypatch.setattr(methods, "run_all", run_all)
    settings = [Setting(label, CONFIG, ("--x", label), seed) for seed in (0, 1) for label in "AB"]
    search = {"option": "--model.lr", "values": [0.05, 0.1, 0.5], "seeds": [100], "options": "--max_updates 9"}
    found = methods.searched(settings, search, 1)
    assert len(tried) == 6 and {one.seed for one in tried} == {100} and len({one.name for one in tried}) == 6
    assert tried[1].options == ("--x", "A", "--max_updates", "9", "--model.lr", "0.1")
    assert [(s.label, s.seed, s.options, s.found) for s in found] == [
        (label, seed, ("--x", label, "--model.lr", "0.1"), "0.1") for seed in (0, 1) for label in "AB"
    ]


class OneAfterTheOther:
    """Stands for the pool of processes, each of which starts from nothing; `make bench` has that."""

    def __init__(self, *_, **__):
        self.map = map

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_a_row_is_the_mean_of_its_seeds(monkeypatch):
    monkeypatch.setattr(methods, "ProcessPoolExecutor", OneAfterTheOther)
    short = ("--max_updates", "6", "--eval_every", "2")
    settings = [Setting(label, CONFIG, short, seed) for label in ("A", "B") for seed in (0, 1)]
    first, second = methods.rows(settings, jobs=2, levels=(0.0, 2.0))
    alone = [methods.run(Setting("A", CONFIG, short, seed)) for seed in (0, 1)]
    one, other = (row["accuracy"] for row in alone)
    assert first["method"] == "A" and first["seeds"] == 2
    assert first["accuracy"] == second["accuracy"] == pytest.approx((one + other) / 2)
    assert first["accuracy_sd"] == pytest.approx(abs(one - other) / math.sqrt(2))
    assert first["time_to_0_s_seeds"] == 2 and first["time_to_0_s"] >= 0 and first["time_to_2_s"] is None
    assert first["lead"] == second["lead"] == 1.0 and second["lead_seeds"] == 2


def test_kept_runs_are_taken_and_those_that_were_cut_off_go_on(tmp_path, monkeypatch):
    setting = Setting("Fed-RAA (K)", CONFIG, SHORT, 3)
    whole = methods.run(setting, tmp_path / "kept")
    folder = tmp_path / "kept" / "fed-raa-k-seed-3"
    assert methods.run(setting, tmp_path / "kept") == whole  # its wall-clock time, too: nothing has run

    (tmp_path / "cut").mkdir()
    crashed(monkeypatch, 13, "--config", str(CONFIG), *SHORT, "--seed=3", f"--output={tmp_path / 'cut' / folder.name}")
    (tmp_path / "cut" / f"{folder.name}.json").write_text(setting.text())
    again = methods.run(setting, tmp_path / "cut")
    assert {**again, "wall_s": 0} == {**whole, "wall_s": 0}
    events = [json.loads(line)["event"] for line in (tmp_path / "cut" / folder.name / "events.jsonl").open()]
    assert events.count("resumed") == 1

    with pytest.raises(SystemExit, match="holds a run with other options"):
        methods.run(Setting("Fed-RAA (K)", CONFIG, ("--max_updates", "12"), 3), tmp_path / "kept")
