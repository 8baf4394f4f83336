"""The differences that the page of RA-Fed states in its sentences are those of the committed results."""

from __future__ import annotations

import json
import re

import pytest

from raafl.lab.compare.statistics import interval, paired
from tests.habits.source import ROOT

PAGE = ROOT / "docs" / "results" / "ra-fed.md"
RESULTS = ROOT / "benchmarks" / "results"
STATED = (
    ("ram-fed-table-2-mnist", "RAM-Fed L-Arb", "RA-Fed L-Arb"),
    ("ram-fed-table-2-mnist", "RAM-Fed S-Arb", "RA-Fed S-Arb"),
    ("ram-fed-table-2-mnist", "RAM-Fed MIX-Arb", "RA-Fed MIX-Arb"),
    ("ram-fed-table-2-mnist-papers-rate-long", "RAM-Fed L-Arb", "RA-Fed L-Arb"),
    ("ram-fed-table-2-mnist-dirichlet-0.1", "RAM-Fed MIX-Arb", "RA-Fed MIX-Arb"),
    ("ram-fed-table-2-mnist-dirichlet-0.1", "RA-Fed S-Arb", "RAM-Fed S-Arb"),
    ("ra-fed-authors", "as in tests", "[-1, 1]"),
    ("ram-fed-table-2-mnist-dirichlet-0.05", "RAM-Fed L-Arb", "RA-Fed L-Arb"),
    ("ram-fed-table-2-mnist-dirichlet-0.05", "RA-Fed S-Arb", "RAM-Fed S-Arb"),
    ("ram-fed-table-2-mnist-dirichlet-0.01", "RAM-Fed L-Arb", "RA-Fed L-Arb"),
    ("ram-fed-table-2-cifar10", "FedAvg", "RAM-Fed L-Arb"),
    ("ram-fed-table-2-cifar10", "PruneFL L", "RAM-Fed L-Arb"),
    ("ram-fed-table-3-ag-news", "RAM-Fed L-Arb", "PruneFL L"),
    ("ram-fed-table-3-ag-news", "RAM-Fed S-Arb", "RA-Fed S-Arb"),
    ("ram-fed-table-3-ag-news", "RAM-Fed L-Arb", "RA-Fed L-Arb"),
    ("ram-fed-table-3-ag-news", "RAM-Fed MIX-Arb", "RA-Fed MIX-Arb"),
)
"""Result, and the two rows whose difference a sentence states, in the order of the page."""


def stated():
    """Each difference in the page's sentences as it is written, with half its interval; tables have theirs from the results."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if not line.startswith("|")]
    return re.findall(r"(-?\d+\.\d+) ± (\d+\.\d+)", "\n".join(lines))


def difference(name, first, second):
    """The mean difference of two rows at the end of their runs, paired by seed, with its 95 % interval."""
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if name == "ra-fed-authors":
        by_pixels = {row["pixels"]: row["authors_last_seeds"] for row in result["rows"] if row["regions"] == "weights"}
        return interval([one - other for one, other in zip(by_pixels[first], by_pixels[second], strict=True)])
    rows = {row["row"]: {run["seed"]: run["final"] for run in row["runs"]} for row in result["rows"]}
    return paired(rows[first], rows[second])


def test_each_difference_has_its_result():
    assert len(stated()) == len(STATED)


@pytest.mark.parametrize("number", range(len(STATED)))
def test_a_stated_difference_is_that_of_the_result(number):
    found = difference(*STATED[number])
    digits = [len(text.partition(".")[2]) for text in stated()[number]]
    points = [f"{100 * value:.{num}f}" for value, num in zip((found.mean, found.half), digits, strict=True)]
    assert points == list(stated()[number]), STATED[number]
