"""Draw a run of sites as an SVG: the accuracy of the global model above what each client did, over the same seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from raafl.lab.report.timeline import timeline
from raafl.runfolder.reading import RecordedRun, read

WIDTH, LEFT, RIGHT, CURVE, LANE = 900, 110, 20, 170, 28
INK, FAINT, BLUE = "#767c85", "#8a9099", "#4a74d6"


def draw(folder: Path, file: Path, labels: dict[int, str]) -> None:
    """Draw a run to an SVG file.

    Args:
        folder: run folder.
        file: SVG file.
        labels: name of each client.
    """
    run = read(folder)
    (view,) = timeline([("", run)]).views.values()
    lanes = list(view.layout["yaxis"]["categoryarray"])
    bottom = CURVE + 30 + LANE * len(lanes)
    parts = _curve(run) + _lanes(run, view, lanes, labels)
    parts += [_text(x, bottom + 18, f"{s:g}", "middle") for s, x in _ticks(run)]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, "seconds since the start", "middle"))
    title = escape(f"{run.name}: accuracy, and who did what when")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 48}" font-family="system-ui, sans-serif" '
        f'font-size="13" role="img" aria-labelledby="title"><title id="title">{title}</title>'
    )
    file.write_text("\n".join([head, *parts, "</svg>"]) + "\n", encoding="utf-8")


def _x(run: RecordedRun, seconds: float) -> float:
    return LEFT + min(seconds / run.end_s, 1) * (WIDTH - LEFT - RIGHT)


def _ticks(run: RecordedRun) -> list[tuple[float, float]]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if run.end_s / step <= 10)
    return [(s, _x(run, s)) for s in range(0, int(run.end_s) + 1, step)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'


def _curve(run: RecordedRun) -> list[str]:
    values = run.metrics["accuracy"]
    least, most = 0.0, max(float(values.max()), 0.1)
    y = [CURVE - (value - least) / (most - least) * (CURVE - 30) for value in values]
    points = " ".join(f"{_x(run, s):.1f},{b:.1f}" for s, b in zip(run.metrics["time_s"], y, strict=True))
    lines = []
    for share in (0.0, 0.5, 1.0):
        at = CURVE - share * (CURVE - 30)
        lines.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{FAINT}" stroke-opacity="0.3"/>')
        lines.append(_text(LEFT - 10, at + 4, f"{least + share * (most - least):.2f}", "end"))
    line = f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="2.5"/>'
    return [*lines, line, _text(LEFT, 18, "accuracy on the server's test set", "start")]


def _lanes(run: RecordedRun, view: Any, lanes: list[str], labels: dict[int, str]) -> list[str]:
    tops = {label: CURVE + 24 + LANE * place for place, label in enumerate(lanes)}
    parts = [_text(LEFT - 10, top + 15, labels.get(int(label.split()[0]), label), "end") for label, top in tops.items()]
    for trace in view.data:
        height, waits = LANE * trace["width"], trace["name"] == "waiting"
        fill = FAINT if waits else trace["marker"]["color"]
        for label, since, lasts in zip(trace["y"], trace["base"], trace["x"], strict=True):
            x = _x(run, since)
            width = max(_x(run, since + lasts) - x - 0.8, 0.6)
            y = tops[label] + 10 - height / 2
            more = ' fill-opacity="0.45"' if waits else ""
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{fill}"{more}/>'
            )
    return parts
