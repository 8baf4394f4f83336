"""The figure of Unequal-Bench: what a cell says, and that the committed figure is that of the committed result."""

from __future__ import annotations

import pytest

from benchmarks.unequal_picture import PICTURE, RESULT, cell_text, draw
from raafl.lab.compare.grid_result import load_grid


def behind(ratio, *, shown=False, reached=3, of="A", later=6):
    return {"of": of, "ratio": ratio, "later": later, "pairs": 9, "shown": shown, "reached": reached, "seeds": 3}


@pytest.mark.parametrize(
    ("row", "text", "bold", "shade"),
    [
        (behind(1.0, of="B", later=None), "1.0", True, 0.5),
        (behind(2.0), "2.0", True, 0.25),
        (behind(2.0, shown=True), "2.0", False, 0.25),
        (behind(1.0, reached=2), "1.0 (2/3)", False, 1 / 3),  # a seed did not get there
        (behind(1.5, later=9), "1.5", False, 0.5 / 1.5),
        (behind(None, reached=1), "late (1/3)", False, 0.0),
        (behind(None, reached=0), "never", False, 0.0),
        (None, "never", False, 0.0),
    ],
)
def test_a_cell_says_what_ranks_show(row, text, bold, shade):
    assert cell_text(row, "B") == (text, bold, pytest.approx(shade))


def test_the_committed_figure_is_that_of_the_committed_result():
    assert PICTURE.read_text(encoding="utf-8") == draw(load_grid(RESULT))


def test_every_row_of_the_committed_result_is_accepted():
    whole = load_grid(RESULT)
    assert all(row["accepted"] is True for cell in whole["cells"] for row in cell["rows"])
    assert [cell["not_run"] for cell in whole["cells"]] == [{}] * len(whole["cells"]) and len(whole["cells"]) == 8
