"""The figure of Unequal-Bench: what a cell says, and that the committed figure is that of the committed result."""

from __future__ import annotations

import pytest

from benchmarks.unequal_picture import PICTURE, RESULT, cell_text, draw, whole
from raafl.lab.compare.grid_result import load_grid


def behind(ratio, *, shown=False, reached=3, of="A", later=6):
    return {"of": of, "ratio": ratio, "later": later, "pairs": 9, "shown": shown, "reached": reached, "seeds": 3}


@pytest.mark.parametrize(
    ("row", "text", "length"),
    [
        (behind(1.0, of="B", later=None), "1.0", 0.25),
        (behind(2.0, shown=True), "2.0", 0.5),
        (behind(7.0), "7.0", 1.75),
        (behind(1.0, reached=2), "1.0 in 2 of 3 runs", 0.25),
        (behind(None, reached=1), "only in 1 of 3 runs", 0.0),
        (behind(None, reached=0), "never", 0.0),
        (None, "never", 0.0),
    ],
)
def test_a_cell_has_a_bar_as_long_as_the_time(row, text, length):
    assert cell_text(row) == (text, length)


def test_the_committed_figure_is_that_of_the_committed_results():
    assert PICTURE.read_text(encoding="utf-8") == draw(whole())


def test_every_row_of_the_committed_results_is_accepted():
    for result, labels in ((load_grid(RESULT), 8), (whole(), 9)):
        assert all(row["accepted"] is True for cell in result["cells"] for row in cell["rows"])
        assert [len(cell["rows"]) for cell in result["cells"]] == [labels] * 8
