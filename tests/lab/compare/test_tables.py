"""Tables say what intervals show, and no more."""

from __future__ import annotations

import csv
import io

from raafl.lab.compare import report

ROW = ("row", "seeds", "failed", "final", "difference", "time_to")


def gap(mean, half, shown, p_holm):
    """Of two pairs; an interval that shows it excludes 0."""
    return {"mean": mean, "half": half, "num": 2, "excludes_0": shown, "shown": shown, "p_holm": p_holm, "tests": 2}


def reached(median_s, number, seeds):
    return {"0.5": {"median_s": median_s, "reached": number, "seeds": seeds}}


FINAL = [{"mean": mean, "half": half, "num": n} for mean, half, n in ((0.9, 0.01, 2), (0.8, 0.2, 2), (0.7, None, 1))]
ROWS = [
    dict(zip(ROW, ("A & B_1", [0, 1], 0, FINAL[0], None, reached(12.5, 2, 2)), strict=True)),
    dict(zip(ROW, ("C", [0, 1], 1, FINAL[1], gap(-0.1, 0.3, False, 0.3), reached(None, 1, 2)), strict=True)),
    dict(zip(ROW, ("D", [0], 0, FINAL[2], gap(0.25, 0.125, True, 0.02), reached(None, 0, 1)), strict=True)),
]
RESULT = {"rows": ROWS, "metric": "accuracy", "reference": "A & B_1"}


def test_cells():
    head, *lines = report.cells(RESULT)
    assert head == ["row", "accuracy", "minus A & B_1", "s to 0.5", "seeds"]
    assert lines == [
        ["A & B_1", "0.900 ± 0.010", "", "12.5 (2/2)", "2"],
        ["C", "0.80 ± 0.20", "-0.10 ± 0.30 (not shown)", "never (1/2)", "2 (1 failed)"],
        ["D", "0.7", "+0.25 ± 0.12", "never (0/1)", "1"],
    ]
    assert report.cells({**RESULT, "rows": ROWS[:1]}) == [
        ["row", "accuracy", "s to 0.5", "seeds"],
        ["A & B_1", "0.900 ± 0.010", "12.5 (2/2)", "2"],
    ], "one row has no difference"


def test_an_interval_without_width_has_no_long_row_of_digits():
    assert report.with_interval({"mean": 0.25, "half": 1.3e-10, "num": 3}) == "0.250000 ± 0.000000"
    assert report.with_interval({"mean": 0.25, "half": 0.00013, "num": 3}) == "0.25000 ± 0.00013"


def test_nothing_is_said_that_an_interval_does_not_show():
    c, d = report.sentences(ROWS, "A & B_1", "accuracy")
    assert c == (
        "C: accuracy is 0.10 ± 0.30 below that of A & B_1 (95 % interval, 2 seeds; 1 run failed), so no difference is shown."
    )
    assert d == "D: accuracy is 0.25 ± 0.12 above that of A & B_1 (95 % interval, 2 seeds)."


def test_a_difference_without_spread_is_undecided():
    equal = gap(0.25, 0.0, False, None) | {"excludes_0": True}
    assert report.difference(equal) == "+0.25 ± 0 (no spread)"
    (found,) = report.sentences([ROWS[2] | {"difference": equal}], "A & B_1", "accuracy")
    assert found.endswith("(95 % interval, 2 seeds): it is the same for all seeds, so no test can show it.")


def test_what_the_number_of_tests_leaves_unshown_is_said():
    gap = ROWS[2]["difference"] | {"shown": False, "p_holm": 0.081, "tests": 3}
    (found,) = report.sentences([ROWS[2] | {"difference": gap}], "A & B_1", "accuracy")
    assert found.endswith("(95 % interval, 2 seeds); with 3 rows tested, no difference is shown (p 0.081 by Holm).")


def measured(label, times, updates):
    """A row with a failed run, and one that is measured at these times and merges so many updates until the last."""
    run = {"curve": [[time, 0.5] for time in times], "time_s": times[-1], "updates": updates}
    return {"row": label, "time_to": {}, "runs": [run, {"error": "killed"}]}


def test_rows_that_were_not_measured_alike_are_warned_of():
    rounds, often = measured("rounds", [0, 12, 24], 20), measured("often", [0, 0, 0.2, 0.6], 3)
    (line,) = report.warnings({"rows": [rounds, often], "eval_every": None})
    assert line == (
        "Rows were not measured alike, from every 0.2 s (often) to every 12.0 s (rounds): the best value may differ for that "
        "alone."
    )
    assert "times to a target and the best value" in report.warnings({"rows": [rounds, often], "smooth": 3})[0]
    assert not report.warnings({"rows": [rounds, often], "eval_every": "2s"})


def test_rows_as_far_apart_in_time_or_in_updates_are_measured_alike():
    assert not report.warnings({"rows": [measured("a", [0, 1, 2], 2), measured("b", [0, 1.05, 2.1], 20)]})
    assert not report.warnings({"rows": [measured("a", [0, 1, 2], 20), measured("b", [0, 7, 14], 20)]})
    assert not report.warnings({"rows": []})


def test_a_search_that_chose_nothing_is_named():
    """Trials that were cut off do not count, and a single one has nothing to differ from."""
    trials = [{"scores": {"10": score}, **cut} for score, cut in ((0.1, {}), (0.1, {}), (0.2, {"cut_after": 0.5}))]
    row = {"row": "MeZO", "difference": None}
    (found,) = report.sentences([row | {"searched": {"trials": trials}}], "MeZO", "accuracy")
    assert found.startswith("MeZO: its 2 trials had the same score, so the search chose nothing")
    assert not report.sentences([row | {"searched": {"trials": trials[1:]}}], "MeZO", "accuracy")
    assert not report.sentences(
        [row | {"searched": {"trials": [{"scores": {"10": 0.3}}, trials[0]]}}], "MeZO", "accuracy"
    )


def test_csv_reads_back_and_latex_escapes():
    table = report.cells(RESULT)
    assert list(csv.reader(io.StringIO(report.as_csv(table)))) == table
    text = report.latex(table)
    assert r"A \& B\_1 & 0.900 $\pm$ 0.010" in text
    assert text.startswith("\\begin{tabular}{lrrrr}") and text.count(r"\\") == len(table)
