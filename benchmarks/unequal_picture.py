"""The figure of Unequal-Bench: `python -m benchmarks.unequal_picture` draws `docs/images/unequal.svg` from the committed results.

For each task and group of machines, a bar for each method: its median time to the target over that of the fastest method.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.drawing import FAINT, GREEN, INK, WIDTH, Picture
from raafl.lab.compare.grid_result import add_rows, load_grid

ROOT = Path(__file__).resolve().parents[1]
RESULT, PICTURE = ROOT / "benchmarks/results/unequal-small.json", ROOT / "docs/images/unequal.svg"
# measured by the rules of the other rows, `--rules 1`
ADDED = ROOT / "benchmarks/results/unequal-fed-raa.json"
LEFT, ROW, HEAD, TOP, GAP = 152.0, 23.0, 76.0, 78.0, 22.0
LONGEST = 4.0  # multiple of the fastest time at which a bar is cut off
DASH, BETWEEN = 5.0, 3.0  # the two dashes in which such a bar ends, and the room before each
TASKS = {
    "mnist-mlp": "A small network learns handwritten digits, up to an accuracy of {target:.0%}",
    "shakespeare-llama": "A small language model learns Shakespeare, down to a loss of {target:g}",
}
MACHINES = {
    "equal": ("12 laptops", "all equal"),
    "four-classes": ("4 kinds of boards", "the slowest 20 times slower"),
    "phones": ("12 phones", "each there 8 hours a day"),
    "gpus": ("4 kinds of GPUs", "speeds 8 : 4 : 2 : 1"),
}


def cell_text(behind: Mapping[str, Any] | None) -> tuple[str, float]:
    """Return the text of a cell, and the length of its bar: 1 = that of the ratio at which bars are cut off.

    `behind`: that field of the row, see `raafl.lab.compare.grid_result`; None = no row of the cell reached the target.
    """
    if behind is None or not behind["reached"]:
        return "never", 0.0
    some = "" if behind["reached"] == behind["seeds"] else f" in {behind['reached']} of {behind['seeds']} runs"
    if behind["ratio"] is None:
        return f"only{some}", 0.0
    return f"{behind['ratio']:.1f}{some}", max(behind["ratio"], 1.0) / LONGEST


def draw(whole: Mapping[str, Any]) -> str:
    """Draw the figure as SVG."""
    tasks, fleets, methods = list(whole["tasks"]), list(whole["fleets"]), list(whole["methods"])
    rows = {(cell["task"], cell["fleet"], row["row"]): row for cell in whole["cells"] for row in cell["rows"]}
    width, block = (WIDTH - LEFT) / len(fleets), HEAD + ROW * len(methods) + GAP
    picture = Picture(TOP + block * len(tasks), "Time to a target by method and group of machines, 1 is the fastest")
    seeds = len(whole["seeds"])
    picture.text(
        0,
        18,
        "How long until the model is good enough? 1 = as fast as the fastest method on the same machines",
        bold=True,
    )
    says = (
        f"Each number is a median of {seeds} simulated runs with unequal data; “in 1 of {seeds} runs”: others did not get there.",
        f"Short bars are better; a bar for more than {LONGEST:g} ends in dashes.",
    )
    for line, text in enumerate(says):
        picture.text(0, 38 + 17 * line, text, size=12.5)
    for number, task in enumerate(tasks):
        top = TOP + block * number
        title = TASKS.get(task, task).format(target=whole["tasks"][task]["targets"][0])
        picture.text(0, top + 18, title, bold=True, size=15)
        for line, label in enumerate(methods):
            picture.text(LEFT - 12, top + HEAD + ROW * (line + 0.66), label, anchor="end")
        for column, fleet in enumerate(fleets):
            x = LEFT + column * width
            name, more = MACHINES.get(fleet, (fleet, ""))
            picture.text(x, top + 42, name, size=13.5, bold=True)
            picture.text(x, top + 59, more, size=12, fill=FAINT)
            for line, label in enumerate(methods):
                _bar(picture, x, top + HEAD + ROW * line, 0.42 * width, label, rows.get((task, fleet, label)))
    return picture.svg()


def _bar(picture: Picture, x: float, y: float, room: float, label: str, row: Mapping[str, Any] | None) -> None:
    """Draw a method's bar at (x, y), at most ``room`` long, and its text beside it."""
    text, length = ("not run", 0.0) if row is None else cell_text(row["behind"])
    best = row is not None and row["behind"] is not None and row["behind"]["of"] == label
    dashes = 2 if length > 1 else 0
    length = min(length, 1.0)
    if length:
        pieces = [(x, room * length - dashes * (DASH + BETWEEN))]
        pieces += [(x + room - DASH - number * (DASH + BETWEEN), DASH) for number in range(dashes)]
        for start, wide in pieces:
            picture.rect(start, y + 4, wide, ROW - 8, GREEN, more=f' fill-opacity="{0.9 if best else 0.45}"')
    fill = INK if length else FAINT
    picture.text(x + room * length + 6, y + ROW * 0.66, text, size=12.5, bold=best, fill=fill)


def beside_grid(added: Mapping[str, Any]) -> dict[str, Any]:
    """Put a row that was measured later above the rows of the committed result."""
    return add_rows(added, RESULT) | {"methods": added["methods"] | load_grid(RESULT)["methods"]}


def whole() -> dict[str, Any]:
    """Return the committed result with the row that was measured later."""
    return beside_grid(load_grid(ADDED))


def main() -> None:
    """Draw the figure from the committed results."""
    PICTURE.write_text(draw(whole()), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
