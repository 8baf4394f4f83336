"""The pictures of README.md and the docs' home, as SVG: `python -m benchmarks.pictures` (or `make pictures`) draws them anew.

- `learning-curve.svg`: the quick start beside FedAvg on the same clients, over virtual time, some seeds each.
- `timeline.svg`: the first seconds of both, from what `raafl report` draws as "Who did what when".
- `way-of-an-update.svg`: what happens to an update, as a diagram.
- `architecture.svg`: the same in the code, see `benchmarks.architecture`.

The background is the page's, and colours are such as can be read on white and on black. Runs are kept, and not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import architecture
from benchmarks.drawing import BLUE, BROWN, FAINT, GREEN, INK, WIDTH, Picture
from raafl.commands.cli import main as raafl
from raafl.lab.report.timeline import timeline
from raafl.runfolder.reading import RecordedRun, read

ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS = {"fed_raa": ("Fed-RAA", "#2f7fd6"), "fed_avg": ("FedAvg", "#d5702a")}
WAITS = {"fed_raa": "each answer is merged when it arrives", "fed_avg": "each round waits for its slowest client"}
METRIC, TARGET, LEAST = "accuracy", 0.95, 0.6
Floats = npt.NDArray[np.float64]


class Scale:
    """Linear scale from values to pixels."""

    def __init__(self, values: tuple[float, float], places: tuple[float, float]) -> None:
        """Store the first and the last value, and their positions."""
        self.values, self.places = values, places

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        share = (value - self.values[0]) / (self.values[1] - self.values[0])
        return self.places[0] + share * (self.places[1] - self.places[0])


def ticks(most: float) -> list[float]:
    """Return about six round numbers from 0 to ``most``."""
    step = next(
        step for power in (0.01, 0.1, 1, 10, 100, 1000) for step in (power, 2 * power, 5 * power) if most / step <= 7
    )
    return [step * count for count in range(int(most / step + 1e-9) + 1)]


def mean_curve(runs: Sequence[RecordedRun], seconds: float, points: int = 300) -> tuple[Floats, Floats]:
    """Return times up to ``seconds`` and the mean over runs at these, `(points,)`; runs are linear between evaluations."""
    times = np.linspace(0, seconds, points)
    return times, np.mean([np.interp(times, run.metrics["time_s"], run.metrics[METRIC]) for run in runs], axis=0)


def learning_curve(runs: dict[str, list[RecordedRun]], seconds: float) -> str:
    """Draw accuracy over virtual time: a thin line for each seed, a thick one for their mean."""
    seeds = len(next(iter(runs.values())))
    picture = Picture(400, f"Accuracy of {' and '.join(name for name, _ in ALGORITHMS.values())} over virtual seconds")
    left, right, top, bottom = 66.0, WIDTH - 100, 46.0, 342.0
    x, y = Scale((0, seconds), (left, right)), Scale((LEAST, 1), (bottom, top))
    told = f"mean of {seeds} seeds, each seed thin" if seeds > 1 else "one seed"
    picture.text(left, 24, f"Accuracy on held-out digits, quick start ({told})", size=15, bold=True)
    for percent in range(round(100 * LEAST), 101, 10):
        at = y(percent / 100)
        picture.line([(left, at), (right, at)], FAINT, more=' stroke-opacity="0.3"')
        picture.text(left - 10, at + 5, f"{percent} %", anchor="end")
    for second in ticks(seconds):
        picture.text(x(second), bottom + 22, f"{second:g}", anchor="middle")
    picture.text((left + right) / 2, bottom + 46, "virtual seconds since the start", anchor="middle")
    picture.line([(left, y(TARGET)), (right, y(TARGET))], INK, more=' stroke-dasharray="5 5"')
    picture.text(right + 10, y(TARGET) + 5, f"{TARGET:.0%} target".replace("%", " %"), size=13)
    picture.parts.append(
        f'<clipPath id="panel"><rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"/></clipPath>'
    )
    for algorithm, (name, colour) in ALGORITHMS.items():
        inside = ' clip-path="url(#panel)"'
        for run in runs[algorithm]:
            own = zip(run.metrics["time_s"], run.metrics[METRIC], strict=True)
            picture.line([(x(s), y(v)) for s, v in own], colour, width=1.2, more=f' stroke-opacity="0.45"{inside}')
        times, mean = mean_curve(runs[algorithm], seconds)
        picture.line([(x(s), y(v)) for s, v in zip(times, mean, strict=True)], colour, width=3.2, more=inside)
        label = np.searchsorted(times, 0.3 * seconds)
        above = -22 if algorithm == "fed_raa" else 34
        picture.text(x(times[label]), max(y(mean[label]), top) + above, name, size=16, fill=colour, bold=True)
    return picture.svg()


def who_did_what(runs: dict[str, list[RecordedRun]], seconds: float) -> str:
    """Draw the first seconds of one run of each algorithm, like the timeline of `raafl report`."""
    left, right, step = 110.0, WIDTH - 20, 28.0
    num_lanes = max(len(some[0].client_ids()) for some in runs.values())
    panel = 62 + step * num_lanes
    picture = Picture(
        panel * len(runs) + 74, f"Who did what in the first {seconds:g} virtual seconds, with each algorithm"
    )
    x = Scale((0, seconds), (left, right))
    for place, (algorithm, some) in enumerate(runs.items()):
        run, top = some[0], panel * place
        at_work = f"clients at work {(run.summary or {})['utilisation']:.0%} of the time".replace("%", " %")
        picture.text(left, top + 24, f"{ALGORITHMS[algorithm][0]}: {WAITS[algorithm]}", size=15, bold=True)
        picture.text(right, top + 24, at_work, anchor="end")
        (view,) = timeline([("", run)]).views.values()
        lanes = {label: top + 40 + step * lane for lane, label in enumerate(view.layout["yaxis"]["categoryarray"])}
        for label, y in lanes.items():
            picture.text(left - 10, y + 15, label, anchor="end")
        for trace in view.data:
            height = step * trace["width"]
            fill = FAINT if trace["name"] == "waiting" else trace["marker"]["color"]
            more = ' fill-opacity="0.45"' if trace["name"] == "waiting" else ""
            bars = zip(trace["y"], trace["base"], trace["x"], strict=True)
            for label, since, lasts in (bar for bar in bars if bar[1] < seconds):
                width = round(max(x(min(since + lasts, seconds)) - x(since) - 1.2, 0.6), 1)
                picture.rect(round(x(since), 1), lanes[label] + 10 - height / 2, width, height, fill, more=more)
    bottom = panel * len(runs)
    for second in ticks(seconds):
        picture.line([(x(second), bottom - 8), (x(second), bottom - 2)], FAINT)
        picture.text(x(second), bottom + 14, f"{second:g}", anchor="middle")
    picture.text((left + right) / 2, bottom + 36, "virtual seconds since the start", anchor="middle")
    picture.rect(left, bottom + 50, 26, 14, "#4269d0")
    picture.text(left + 34, bottom + 62, "a task whose update was merged")
    picture.rect(left + 290, bottom + 54, 26, 6, FAINT, more=' fill-opacity="0.45"')
    picture.text(left + 324, bottom + 62, "waiting for a task")
    return picture.svg()


def _model(picture: Picture, x: float, y: float, merged: str | None, label: str) -> None:
    """Draw the global model, centred at x, as ten units in three fragments; all but the fragment just merged are pale."""
    for unit, colour in enumerate([BLUE] * 2 + [BROWN] * 3 + [GREEN] * 5):
        pale = "" if merged in (None, colour) else ' fill-opacity="0.35"'
        picture.rect(x - 49.5 + 10 * unit, y, 8, 48, colour, more=pale)
    picture.text(x, y + 68, label, anchor="middle")


def _task(picture: Picture, since: float, to: float, y: float, units: int, colour: str, lines: Sequence[str]) -> None:
    """Draw a task as a box from its beginning to its end, with the units of its fragment."""
    picture.rect(since, y, to - since, 58, "none", radius=8, more=f' stroke="{colour}" stroke-width="1.8"')
    for unit in range(units):
        picture.rect(since + 12 + 10 * unit, y + 11, 8, 36, colour)
    for row, line in enumerate(lines):
        picture.text(since + 20 + 10 * units, y + 25 + 18 * row, line, size=13)


def _ways(picture: Picture, fast: float, slow: float, starts: Sequence[float], ends: Sequence[float]) -> None:
    """Draw arrows for the fragments that go down to the clients and come back."""
    picture.arrow(214, 134, fast - 3, INK)
    for x, colour in ((ends[0], GREEN), (ends[1], BROWN)):
        picture.arrow(x, fast, 132, colour)
    for x in (starts[1] + 22, starts[2] + 22):
        picture.arrow(x, 134, fast - 3, INK)
    picture.line([(166, 134), (166, slow + 29), (190, slow + 29)], INK, width=2)
    picture.parts.append(f'<path d="M{starts[0] - 2:g} {slow + 29:g}l-9 -5.5v11z" fill="{INK}"/>')
    picture.line([(ends[2] - 10, slow), (ends[2] - 10, fast + 64)], BLUE, width=2)
    picture.line([(ends[2] - 10, fast - 6), (ends[2] - 10, 141)], BLUE, width=2)
    picture.parts.append(f'<path d="M{ends[2] - 10:g} 132l-5.5 9h11z" fill="{BLUE}"/>')


def way_of_an_update() -> str:
    """Draw a server and two clients over time: fragments are cut, trained, sent back, and merged as they arrive."""
    title = (
        "The way of an update: the server cuts a piece of the model for each client, the client trains it on its own data, "
        "and the trained piece is folded into the global model as it arrives, while other clients go on."
    )
    picture = Picture(418, title)
    server, fast, slow = 56.0, 206.0, 312.0
    for y, name, device in (
        (server, "server", ""),
        (fast, "client 1", "a fast device"),
        (slow, "client 2", "a slow device"),
    ):
        picture.text(14, y + 26, name, size=15, bold=True)
        picture.text(14, y + 45, device or "global model", size=13)
    for y in (168.0, 286.0):
        picture.line([(14, y), (WIDTH - 14, y)], FAINT, more=' stroke-opacity="0.4" stroke-dasharray="2 5"')
    starts, ends = (200.0, 424.0, 640.0), (410.0, 626.0, 838.0)
    _model(picture, 186, server, None, "version t")
    _model(picture, ends[0], server, GREEN, "t + 1")
    _model(picture, ends[1], server, BROWN, "t + 2")
    _model(picture, ends[2] - 10, server, BLUE, "t + 3")
    picture.text(136, 24, "1  a piece is cut to the device", size=13.5, bold=True)
    fold = "4  it is folded in when it arrives; what is stale counts less"
    picture.text(WIDTH - 14, 24, fold, size=13.5, bold=True, anchor="end")
    _task(picture, starts[0], ends[0] + 8, fast, 5, GREEN, ("2  it is trained", "on its own data"))
    _task(picture, starts[1] + 8, ends[1] + 8, fast, 3, BROWN, ("the next piece,", "without waiting"))
    _task(picture, starts[2] + 8, WIDTH - 14, fast, 5, GREEN, ("and so on", ""))
    _task(
        picture,
        starts[0],
        ends[2] + 8,
        slow,
        2,
        BLUE,
        (
            "a smaller piece, and still it takes longer: two versions",
            "have passed when it arrives, so its staleness is 2",
        ),
    )
    _ways(picture, fast, slow, starts, ends)
    picture.text(ends[0] - 12, 160, "3  it is sent back", size=13.5, bold=True, anchor="end")
    picture.line([(136, 396), (WIDTH - 26, 396)], FAINT, width=1.4)
    picture.parts.append(f'<path d="M{WIDTH - 14:g} 396l-11 -5v10z" fill="{FAINT}"/>')
    picture.text(136, 413, "time", size=13)
    return picture.svg()


def simulated(folder: Path, seeds: int, seconds: float) -> dict[str, list[RecordedRun]]:
    """Return runs of the quick start by algorithm, one for each seed; runs that ``folder`` has already are read.

    `seconds`: virtual seconds of each run.
    """
    runs: dict[str, list[RecordedRun]] = {}
    for algorithm, seed in itertools.product(ALGORITHMS, range(seeds)):
        run = folder / f"{algorithm}-{seed}"
        if not (run / "summary.json").exists():
            config = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--algorithm", algorithm]
            limits = ["--max_updates", "1000000", "--max_time", f"{seconds:g}"]
            options = [*limits, "--seed", str(seed), "--output", str(run), "--progress", "quiet", "--json"]
            with contextlib.redirect_stdout(io.StringIO()):
                code = raafl(["simulate", *config, *options])
            if code:
                raise SystemExit(f"{run} ended with {code}")
        runs.setdefault(algorithm, []).append(read(run))
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the pictures into a folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "pictures", help="folder of the runs; kept")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual seconds of each run")
    options = parser.parse_args(argv)
    runs = simulated(options.runs, options.seeds, options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    pictures = {
        "learning-curve": learning_curve(runs, options.seconds),
        "timeline": who_did_what(runs, min(options.seconds, 8.0)),
        "way-of-an-update": way_of_an_update(),
        "architecture": architecture.draw(),
    }
    for name, svg in pictures.items():
        (options.out / f"{name}.svg").write_text(svg, encoding="utf-8")
        print(options.out / f"{name}.svg")


if __name__ == "__main__":
    main()
