"""What is learnt of a small grid, by hand: updates to the target, settings, and choices for each fleet by the other one."""

import json
import math

import pytest

from benchmarks import choices
from raafl.lab.plan.choose import Candidate, Cell, Features, FleetSummary, Table

NEAR = Features(0.0, 0.0, 0.0, 1.0, 1.0, 1.0)
FAR = Features(3.0, 1.0, 0.0, 1.0, 1.0, 1.0)


def run(seed, time_s, updates, to):
    return {"seed": seed, "time_s": time_s, "updates": updates, "time_to": {"0.8": to, "0.9": None}}


def test_updates_to_a_target_are_those_until_its_time():
    """100 s have 50 updates: 40 s have 20, and 60 s have 30; what is not reached counts as 100 updates, in the table alone."""
    row = {
        "runs": [run(0, 100.0, 50, 40.0), run(1, 100.0, 50, None), run(2, 100.0, 50, 60.0), {"seed": 3, "error": "x"}]
    }
    found = choices.MethodRuns.of(row)
    assert found == choices.MethodRuns((40.0, None, 60.0, None), 30.0)
    assert (found.reached, found.median_s) == (2, math.inf)  # of four the later of the two in the middle
    assert choices.MethodRuns((40.0, None, 60.0), 30.0).over(choices.MethodRuns((10.0, 20.0, 30.0), 1.0)) == 3.0
    assert found.over(choices.MethodRuns((10.0,), 1.0)) == math.inf and found.over(found) is None
    assert choices.MethodRuns.of({"runs": [{"seed": 0, "error": "diverged"}]}) is None


def test_settings_are_the_method_s_and_those_of_its_search():
    method = {
        "options": [
            "--algorithm",
            "fed_buff",
            "--algorithm.buffer_size",
            "4",
            "--algorithm.submodel",
            "raafl.parts.RateSelect",
            "--algorithm.submodel.seconds",
            "{task_s}",
        ],
        "tasks": {"mnist": ["--algorithm.staleness", "constant"]},
    }
    searched = {"settings": ["--model.lr", "0.1", "--algorithm.server_lr", "0.5"]}
    grid = {"cells": [{"task": "mnist", "fleet": "a", "rows": [{"row": "Mine", "searched": searched}]}]}
    fleet = FleetSummary(NEAR, 12, 2.0, 2.0, 10)
    assert choices.candidate("Mine", method, grid, "mnist", fleet) == Candidate(
        "Mine",
        "fed_buff",
        {"buffer_size": 4, "submodel": {"seconds": "{task_s}"}, "staleness": "constant", "server_lr": 0.5},
        12,
        10,
    )


def test_of_the_search_only_rates_that_had_a_choice_count():
    """On mnist two of three methods have 0.1; FADAS had one rate alone. The other fleet has the same search."""

    def row(label, best, *rates):
        trials = [{"settings": ["--model.lr", rate, "--other", "1"]} for rate in rates]
        return {"row": label, "searched": {"settings": ["--model.lr", best], "trials": trials}}

    rows = [
        row("A", "0.1", "0.1", "0.3"),
        row("B", "0.1", "0.1", "0.3"),
        row("C", "0.3", "0.1", "0.3"),
        row("FADAS", "0.1", "0.1"),
    ]
    grid = {
        "cells": [{"task": "mnist", "rows": rows}, {"task": "mnist", "rows": rows}, {"task": "text", "rows": rows[:1]}]
    }
    rates = choices.learning_rates(grid)
    assert rates == [
        {"method": "A", "mnist": 0.1, "text": 0.1},
        {"method": "B", "mnist": 0.1},
        {"method": "C", "mnist": 0.3},
    ]
    assert choices.agreement(rates) == {"pairs": 4, "same": 3}


def seen(**seconds):
    """A cell's rows: two seeds each, an update each second, who all reached the target; None = neither did."""
    return {label: choices.MethodRuns((at, at), at) for label, at in seconds.items()}


@pytest.fixture
def learnt():
    """Where updates take as long as each other, each fleet's best is the other's second."""
    cells = {("a", "mnist"): seen(FedBuff=100.0, FedAvg=50.0), ("b", "mnist"): seen(FedBuff=40.0, FedAvg=80.0)}
    features = {"a": NEAR, "b": FAR}
    updates = [
        Cell(*key, features[key[0]], {name: one.updates for name, one in rows.items()}) for key, rows in cells.items()
    ]
    return Table([Candidate("FedBuff", "fed_buff"), Candidate("FedAvg", "fed_avg")], updates), cells


def test_a_fleet_is_chosen_for_by_the_others_alone(learnt):
    """What is best elsewhere takes 100 s over 50 s on a, and 80 s over 40 s on b, which is twice FedBuff's time there."""

    def best_elsewhere(key, others):
        (cell,) = others.cells
        assert cell.fleet != key[0]
        return min(cell.updates, key=cell.updates.get)

    rows = choices.left_out(*learnt, best_elsewhere)
    assert [(row["fleet"], row["chosen"], row["best"], row["ratio"]) for row in rows] == [
        ("a", "FedBuff", "FedAvg", 2.0),
        ("b", "FedAvg", "FedBuff", 2.0),
    ]
    assert [row["over_fedbuff"] for row in rows] == [1.0, pytest.approx(2.0)]
    assert [row["sooner_fedbuff"] for row in rows] == ["2 of 4", "0 of 4"]
    found = choices.summary(rows, learnt[1], ["FedBuff", "FedAvg"])
    assert (found["median"], found["worst"], found["cells"]) == (2.0, 2.0, 2)
    assert found["over"]["over_fedbuff"]["ratio"] == pytest.approx(math.sqrt(2))
    assert list(found["over"]) == ["over_fedbuff"]
    # on a all four runs are level; on b, of the 6 divisions of two and two runs, 2 have all pairs on one side
    beside = found["over"]["over_fedbuff"]
    assert (beside["later"], beside["pairs"], beside["p_holm"]) == (6, 8, pytest.approx(2 / 6))
    assert found["always"] == {label: {"median": 1.5, "worst": 2.0} for label in ("FedBuff", "FedAvg")}


def test_a_cell_whose_median_run_does_not_arrive_is_the_worst_and_has_no_ratio(learnt):
    table, cells = learnt
    cells = {("a", "mnist"): cells["a", "mnist"], ("b", "mnist"): seen(FedBuff=40.0, FedAvg=None)}
    rows = choices.left_out(table, cells, lambda key, others: "FedAvg")
    assert [row["ratio"] for row in rows] == [1.0, None] and [row["reached"] for row in rows] == [2, 0]
    found = choices.summary(rows, cells, ["FedBuff", "FedAvg"])
    assert (found["median"], found["worst"]) == (None, None)
    assert found["over"]["over_fedbuff"]["cells"] == 1 and found["over"]["over_fedbuff"]["ratio"] == 0.5
    assert [row["median"] for row in choices.rules(found)] == ["not reached", "1.50", "not reached"]


def test_of_a_grid_with_auto_its_choice_and_its_time_are_told(tmp_path):
    """auto's median of 50 s (of two the later) over 100 s of another row, which another result has."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "events.jsonl").write_text(
        json.dumps({"chosen": {"method": "fed_avg"}}) + '\n{"event":"adjusted"}\n'
    )
    rows = [
        {"row": "auto", "runs": [{**run(i, 100.0, 50, 40.0 + 10 * i), "folder": "runs/a"} for i in range(2)]},
        {"row": "FedBuff, defaults", "runs": [run(i, 100.0, 50, 80.0 + 20 * i) for i in range(2)]},
        {"row": "TimelyFL", "runs": [run(i, 100.0, 50, 20.0 + 5 * i) for i in range(2)]},
        {"row": "FedAsync", "runs": [run(i, 100.0, 50, None) for i in range(2)]},
    ]
    for name, row in zip(("a.json", "b.json", "c.json", "d.json"), rows, strict=True):
        (tmp_path / name).write_text(json.dumps({"cells": [{"fleet": "f", "task": "t", "rows": [row]}]}))
    found = choices.unseen([tmp_path / f"{name}.json" for name in "abcd"])
    assert found == [
        {
            "fleet": "f",
            "task": "t",
            "seeds": 2,
            "reached": 2,
            "chosen": "fed_avg",
            "adjusted": 1,
            "best": "TimelyFL",
            "ratio": 2.0,
            "always TimelyFL": 1.0,
            "always FedAsync": None,
            "other seeds": 1.0,
            "seconds": {
                "auto": [40.0, 50.0],
                "FedBuff, defaults": [80.0, 100.0],
                "TimelyFL": [20.0, 25.0],
                "FedAsync": [None, None],
            },
            "over_fedbuff-defaults": pytest.approx(0.5),
            "sooner_fedbuff-defaults": "4 of 4",
            "over_timelyfl": pytest.approx(2.0),
            "sooner_timelyfl": "0 of 4",
            "over_fedasync": 0.0,
            "sooner_fedasync": "4 of 4",
        }
    ]
    assert choices.unseen_rules(found) == [
        {"rule": "auto", "cells": 1, "median": "2.00", "worst": "2.00"},
        {"rule": "the best by the other seeds", "cells": 1, "median": "1.00", "worst": "1.00"},
        {"rule": "always TimelyFL", "cells": 1, "median": "1.00", "worst": "1.00"},
        {"rule": "always FedAsync", "cells": 1, "median": "not reached", "worst": "not reached"},
    ]
    # rows of before serve for the methods that are not run again
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"rows": [{"part": "cell", **found[0]}, {"part": "rule", "rule": "auto"}]}))
    assert choices.unseen([earlier]) == found
    rows[0]["runs"] = [{**run(i, 100.0, 50, 30.0), "folder": "runs/a"} for i in range(2)]
    (tmp_path / "a.json").write_text(json.dumps({"cells": [{"fleet": "f", "task": "t", "rows": rows[:1]}]}))
    (again,) = choices.unseen([tmp_path / "a.json", earlier])
    assert again["seconds"] == {**found[0]["seconds"], "auto": [30.0, 30.0]} and again["ratio"] == pytest.approx(1.2)


def test_who_knows_the_other_seeds_does_not_always_take_the_best():
    """By seeds 1 and 2 A is first (2 + 2 against 3 + 3), by 0 and 2 and by 0 and 1 B (1 + 3 against 9 + 2): 9, 3 and 3 s over 2."""
    runs = {"A": (9.0, 2.0, 2.0), "B": (1.0, 3.0, 3.0), "auto": (1.0, 1.0, 1.0)}
    here = {label: choices.MethodRuns(seconds, 1) for label, seconds in runs.items()}
    assert choices._by_other_seeds(here) == 3.0 / 2.0


def test_a_fleet_counts_once_whatever_its_tasks():
    """1/2 and 2 on one fleet are 1 together; beside 1/4 of another that is 1/2. The one left out has 4: (1 x 1/4 x 4)^(1/3) = 1.

    By runs: auto is sooner in 2.5 of the 4 pairs of the first cell, where one run of each did not arrive and they are level.
    """

    def cell(fleet, ratio, ours, theirs, label="FedBuff, defaults"):
        return {"fleet": fleet, "over_fedbuff-defaults": ratio, "seconds": {"auto": ours, label: theirs}}

    rows = [
        cell("a", 0.5, [1.0, None], [2.0, None]),
        cell("a", 2.0, [2.0], [1.0]),
        cell("b", 0.25, [1.0], [4.0]),
        cell("b", None, [None], [None]),
    ]
    last = {"fleet": "c", "over_fedbuff-10": 4.0, "seconds": {"auto": [4.0], "FedBuff-10": [1.0]}}
    new, left, together = choices.all_fleets(rows, [last])
    assert new["ratio"] == pytest.approx(0.5) and (new["number"], new["cells"], new["slower"]) == (2, 3, 0)
    assert new["sooner"] == "4 of 7"  # 2.5 of 4, 0, 1, and half of a pair without a difference
    assert left["ratio"] == pytest.approx(4.0) and left["low"] is None and left["sooner"] == "0 of 1"
    assert together["ratio"] == pytest.approx(1.0) and (together["number"], together["slower"]) == (3, 1)
    assert together["sooner"] == "4 of 8"
