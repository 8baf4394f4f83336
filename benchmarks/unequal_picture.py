"""The figure of Unequal-Bench: `python -m benchmarks.unequal_picture` draws `docs/images/unequal.svg` from the committed result.

For each task a table of methods by fleets: how many times the best method's time to the target a method takes (medians over seeds,
where a run that did not reach it is later than all that did). Bold: the best, and those that are not later in each pair of runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.drawing import FAINT, GREEN, INK, WIDTH, Picture
from raafl.lab.compare.grid_result import load_grid

ROOT = Path(__file__).resolve().parents[1]
RESULT, PICTURE = ROOT / "benchmarks/results/unequal-small.json", ROOT / "docs/images/unequal.svg"
LEFT, ROW, HEAD, TOP = 170.0, 26.0, 30.0, 28.0


def cell_text(behind: Mapping[str, Any] | None, label: str) -> tuple[str, bool, float]:
    """Return the text of a cell, whether it is bold, and its shade, 0 to 1.

    Args:
        behind: behind of the row, see `raafl.lab.compare.grid_result.standings`; None = no row of the cell reached the target.
        label: the row's method.
    """
    if behind is None or not behind["reached"]:
        return "never", False, 0.0
    missing = "" if behind["reached"] == behind["seeds"] else f" ({behind['reached']}/{behind['seeds']})"
    if behind["ratio"] is None:
        return f"late{missing}", False, 0.0
    level = behind["of"] == label or (not behind["shown"] and behind["later"] < behind["pairs"] and not missing)
    return (
        f"{behind['ratio']:.1f}{missing}",
        level,
        0.5 * behind["reached"] / behind["seeds"] / max(behind["ratio"], 1.0),
    )


def draw(whole: Mapping[str, Any]) -> str:
    """Return the figure as SVG."""
    tasks, fleets, methods = list(whole["tasks"]), list(whole["fleets"]), list(whole["methods"])
    rows = {(cell["task"], cell["fleet"], row["row"]): row for cell in whole["cells"] for row in cell["rows"]}
    width = (WIDTH - LEFT) / (len(tasks) * len(fleets))
    picture = Picture(TOP + HEAD + ROW * len(methods) + 48, "Unequal-Bench: time to the target by method and fleet")
    for number, label in enumerate(methods):
        picture.text(LEFT - 12, TOP + HEAD + ROW * (number + 0.68), label, anchor="end")
    for place, (task, fleet) in enumerate((task, fleet) for task in tasks for fleet in fleets):
        x = LEFT + place * width
        if not place % len(fleets):
            targets = " or ".join(f"{target:g}" for target in whole["tasks"][task]["targets"][:1])
            title = f"{task}: {whole['tasks'][task]['metric']} {targets}"
            picture.text(x + width * len(fleets) / 2, TOP - 8, title, anchor="middle", bold=True)
        picture.text(x + width / 2, TOP + HEAD - 12, fleet, anchor="middle", size=12.5)
        for number, label in enumerate(methods):
            y = TOP + HEAD + ROW * number
            row = rows.get((task, fleet, label))
            text, bold, dark = ("not run", False, 0.0) if row is None else cell_text(row["behind"], label)
            picture.rect(x + 1, y + 1, width - 2, ROW - 2, GREEN, more=f' fill-opacity="{dark:.2f}"')
            fill = INK if text[0].isdigit() else FAINT
            picture.text(x + width / 2, y + ROW * 0.68, text, anchor="middle", size=13, bold=bold, fill=fill)
    bottom = TOP + HEAD + ROW * len(methods)
    seeds = len(whole["seeds"])
    picture.text(
        LEFT,
        bottom + 20,
        f"Times the best method's median time to the target, {seeds} seeds; late = few, never = no seed got there.",
        size=12.5,
    )
    picture.text(
        LEFT,
        bottom + 38,
        "Bold: the best, and those that are not later than it in each pair of runs.",
        size=12.5,
    )
    return picture.svg()


def main() -> None:
    """Draw the figure from the committed result."""
    PICTURE.write_text(draw(load_grid(RESULT)), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
