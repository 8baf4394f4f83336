from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import against

HERE = against.ROOT


def rows(ratio, cpu=None, **more):
    return [
        {"workload": "mlp", "processes": 1, "ratio": ratio, **({} if cpu is None else {"cpu_seconds": cpu}), **more}
    ]


def test_trees_run_in_turns_and_speed_is_the_median_of_each_rounds_ratio():
    order, there = [], Path("there")
    answers = {HERE: iter([rows(0.9), rows(0.6), rows(0.8)]), there: iter([rows(0.6), rows(0.6), rows(1.0)])}

    def run(tree, what):
        order.append(tree)
        assert what == "overhead:few"
        return next(answers[tree])

    (row,) = against.in_turns("overhead:few", there, 3, run)
    assert order == [HERE, there, there, HERE, HERE, there]
    assert (row["benchmark"], row["row"], row["figure"]) == ("overhead", "mlp, 1", "ratio")
    assert (row["speed"], row["least"], row["most"]) == (1.0, pytest.approx(0.8), pytest.approx(1.5))
    assert (row["there"], row["here"], row["fell"]) == (0.6, 0.8, "")


def test_cpu_seconds_come_before_ratios_and_fewer_are_faster():
    (row,) = against.compare("wire", [rows(1.0, cpu=2.0)], [rows(1.0, cpu=1.5)])
    assert (row["figure"], row["speed"], row["fell"]) == ("cpu_seconds", 0.75, "fell")
    (row,) = against.compare("wire", [rows(0.97)], [rows(1.0, cpu=1.5)])  # only one tree counts CPU seconds
    assert (row["figure"], row["speed"], row["fell"]) == ("ratio", 0.97, "")


def test_rows_that_only_one_tree_has_are_left_out():
    assert against.compare("x", [rows(1.0, at_work=2)], [rows(1.0)]) == []
    assert against.compare("x", [[{"workload": "mlp", "bytes_a_session": 3}]] * 2, [rows(1.0)] * 2) == []


def test_a_commit_is_compared_from_a_worktree_that_is_removed(monkeypatch, tmp_path, capsys):
    root = tmp_path / "project"
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "__init__.py").touch()
    bench = root / "benchmarks" / "tiny.py"

    def git(*args):
        subprocess.run(["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b", *args], check=True)

    few = "def few():\n    return rows(5.0)\n"
    bench.write_text("def rows(seconds=3.0):\n    return [{'workload': 'tiny', 'cpu_seconds': seconds}]\n" + few)
    git("init", "-q"), git("add", "."), git("commit", "-qm", "first")
    bench.write_text("def rows(seconds=2.0):\n    return [{'workload': 'tiny', 'cpu_seconds': seconds}]\n" + few)
    monkeypatch.setattr(against, "ROOT", root)
    against.main(["HEAD", "tiny", "tiny:few", "--rounds", "1", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [row["speed"] for row in result["rows"]] == [1.5, 1.0] and result["rounds"] == 1 and result["against"]
    listed = subprocess.run(["git", "-C", root, "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1
    against.main(["HEAD", "tiny", "--rounds", "1"])
    assert "this tree against" in (text := capsys.readouterr().out) and "cpu_seconds" in text
