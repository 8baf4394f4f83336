"""Create tables of the runs' figures, the outcomes of their tasks, and differences in their configs."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raafl.errors import BadInput, installing
from raafl.lab.report.groups import TIME, Group, algorithm_of, band, lines_of, metric_names
from raafl.lab.report.page import Cell, Table, rounded
from raafl.runfolder.outcome import REASONS
from raafl.runfolder.reading import RecordedRun, number
from raafl.runfolder.schema import CLIENT, KINDS, MERGED, TRAIN, is_metric
from raafl.sanitize import sanitize_text

_MAX_METRICS = 8


def run_totals(run: RecordedRun) -> dict[str, Cell]:
    """Return a run's results and totals by name, such as seconds and merged updates.

    Values come from the run's summary, or from its other files if there is no summary.
    """
    summary, tasks = run.summary or {}, run.tasks
    merged = tasks.are(MERGED)
    stale = tasks["staleness"][merged & np.isfinite(tasks["staleness"])]
    clock = {"simulated": "virtual", "distributed": "wall"}.get(run.runtime, run.runtime)
    found: dict[str, Cell] = {
        "algorithm": algorithm_of(run),
        "clock": clock,
        "seed": None if run.seed is None else str(run.seed),
        "ended": end_reason(run),
        "merged updates": _whole(summary.get("updates_merged"), int(merged.sum())),
        "versions": _whole(summary.get("versions"), int(np.nanmax(tasks["merged_version"], initial=0.0))),
    }
    for kind in KINDS[1:]:
        found[kind] = int(tasks.are(kind).sum())
    down_and_up = [_last(run, "bytes_down"), _last(run, "bytes_up")]
    seconds = number(summary.get("time_s"))
    staleness, coverage, memory = (_entry(run, name) for name in ("staleness", "coverage", "peak_memory"))
    some: dict[str, float] = {
        "seconds": run.end_s if math.isnan(seconds) else seconds,
        "wall seconds": _either(summary.get("wall_s"), _last(run, "wall_s")),
        "MB down": _either(summary.get("bytes_down"), down_and_up[0]) / 1e6,
        "MB up": _either(summary.get("bytes_up"), down_and_up[1]) / 1e6,
        "utilisation": _either(summary.get("utilisation"), _last(run, "utilisation")),
        "mean staleness": _either(staleness.get("mean"), float(stale.mean()) if len(stale) else math.nan),
        "most staleness": _either(staleness.get("max"), float(stale.max()) if len(stale) else math.nan),
        "coverage": _either(coverage.get("mean"), _last(run, "coverage")),
        "peak MB": _either(memory.get("predicted_bytes"), _last(run, "peak_bytes")) / 1e6,
    }
    return found | dict(zip(some, rounded(list(some.values())), strict=True))


def end_reason(run: RecordedRun) -> str:
    """Describe in words why a run ended."""
    reason = (run.summary or {}).get("finished")
    return "not ended" if reason is None else REASONS.get(str(reason), str(reason))


def final_metrics(run: RecordedRun, metrics: Sequence[str]) -> list[float]:
    """Return a run's final value of each metric, or that of its last evaluation if the run has not ended; NaN if unknown."""
    known = _entry(run, "final")
    return [number(known[name]) if name in known else _evaluated_last(run, name) for name in metrics]


def _evaluated_last(run: RecordedRun, name: str) -> float:
    """Return a metric at the run's last evaluation: NaN of a model that has diverged, and not what it had before.

    What clients and their training measure is not in each row, so of these the last value counts.
    """
    values = run.metrics.get(name, np.empty(0))
    later = name.startswith((CLIENT, TRAIN.rstrip("/")))
    return _last(run, name) if later or not len(values) else float(values[-1])


def model_metrics(groups: Sequence[Group]) -> list[str]:
    """Return the names of the model's metrics, without numbers about the run itself, such as bytes."""
    return [name for name in metric_names(groups) if is_metric(name)][:_MAX_METRICS]


def runs_table(groups: Sequence[Group]) -> Table:
    """Return a table with a row for each run."""
    metrics = model_metrics(groups)
    rows: list[list[Cell]] = []
    columns: list[str] = []
    for group in groups:
        for run in group.runs:
            found = run_totals(run)
            columns = list(found)
            rows.append([run.name, *rounded(final_metrics(run, metrics)), *found.values()])
    return Table(["run", *metrics, *columns], rows)


def groups_table(groups: Sequence[Group]) -> Table | None:
    """Return a table with mean and range of each group's results; None if every group has a single run."""
    if all(len(group.runs) == 1 for group in groups):
        return None
    metrics = model_metrics(groups)
    targets = list(dict.fromkeys(t for group in groups for run in group.runs for t in _entry(run, "time_to")))
    names = [*metrics, *(f"seconds to {target}" for target in targets), "seconds", "mean staleness", "utilisation"]
    rows: list[list[Cell]] = []
    for group in groups:
        results = []
        for run in group.runs:
            own = run_totals(run)
            to_target = [number(_entry(run, "time_to").get(target)) for target in targets]
            results.append([*final_metrics(run, metrics), *to_target, *(number(own[name]) for name in names[-3:])])
        rows.append([group.label, len(group.runs), *(_spread(column) for column in zip(*results, strict=True))])
    return Table(["group", "runs", *names], rows, "Mean over runs, and from the least to the most.")


def outcomes_table(groups: Sequence[Group]) -> Table:
    """Return a table with the number of tasks by outcome, a row for each run."""
    counts = {id(run): Counter(run.tasks.outcome) for group in groups for run in group.runs}
    outcomes = sorted({o for some in counts.values() for o in some}, key=lambda o: (o != MERGED, o))[:40]
    rows: list[list[Cell]] = [
        [run.name, *(counts[id(run)][outcome] for outcome in outcomes)] for group in groups for run in group.runs
    ]
    return Table(["run", *outcomes], rows)


def differences_table(groups: Sequence[Group]) -> Table | None:
    """Return a table of the config fields in which the groups differ; None if there is only one group."""
    fields = list(groups[0].differs)
    if len(groups) < 2 or not fields:
        return None
    rows = [[name, *(group.differs.get(name, "") for group in groups)] for name in fields]
    return Table(["field", *(group.label for group in groups)], rows[:300])


def notes_of(run: RecordedRun) -> list[str]:
    """List the problems of a run to be shown in its report: missing files, rows that could not be written, warnings."""
    summary = run.summary or {}
    notes = list(run.notes)
    notes += [f"{count} of {name} could not be written" for name, count in _entry(run, "unwritten").items()]
    warnings = summary.get("warnings")
    notes += [str(warning) for warning in warnings[:20]] if isinstance(warnings, list) else []
    if str(summary.get("finished", "")).startswith("failed"):
        notes.append(str(summary["finished"]))
    return notes


def _entry(run: RecordedRun, name: str) -> Mapping[str, Any]:
    """Return a mapping in the run's summary by its name; empty if there is none."""
    found = (run.summary or {}).get(name)
    return found if isinstance(found, Mapping) else {}


def _spread(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    text = f"{sum(known) / len(known):.4g}"
    if len(values) > 1:
        text += f" ({min(known):.4g} to {max(known):.4g})"
    return text if len(known) == len(values) else f"{text}, {len(known)} of {len(values)} runs"


def _whole(value: object, otherwise: int) -> int:
    found = number(value)
    return otherwise if math.isnan(found) else int(found)


def _either(value: object, otherwise: float) -> float:
    found = number(value)
    return otherwise if math.isnan(found) else found


def _last(run: RecordedRun, name: str) -> float:
    values = run.metrics.get(name, np.empty(0))
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


FORMATS = (".svg", ".pdf")
_MAX_PANELS, _MAX_LABEL, _MAX_POINTS = 2, 60, 1000
_PANEL_INCHES = (4.2, 3.0)


def check_figure(path: Path) -> None:
    """Raise `BadInput` unless the installed packages can write the format that a path names by its suffix."""
    if path.suffix.lower() not in FORMATS:
        raise BadInput(f"figure is '{path}': name a file that ends in {' or '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadInput(f"--figure draws with matplotlib, which is not installed: {installing('report')}") from None


def draw(groups: Sequence[Group], suffix: str) -> bytes:
    """Draw the first two metrics of the model against time, with one line for each group; return the figure's bytes.

    Runs that differ only by seed become one line, their mean, with a band from the smallest to the largest value.

    Raises:
        BadInput: no run has an evaluation.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    metrics = model_metrics(groups)[:_MAX_PANELS]
    if not metrics:
        raise BadInput(
            "no run has an evaluation of its model, so there is nothing to draw: give a run that was evaluated"
        )
    # SVG and PDF keep text as text, and a fixed salt makes the ids in SVG reproducible
    with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "raafl"}):
        width, height = _PANEL_INCHES
        figure = Figure(figsize=(width * len(metrics), height), layout="constrained")
        for place, metric in enumerate(metrics):
            axes = figure.add_subplot(1, len(metrics), place + 1)
            for group in groups:
                _line(axes, group, metric)
            axes.set_xlabel(f"{_clock(groups)} (s)")
            axes.set_ylabel(_text(metric))
            axes.grid(alpha=0.3)
        if len(groups) > 1 or len(groups[0].runs) > 1:
            figure.axes[0].legend(fontsize="small")
        file = io.BytesIO()
        dates = {"Date": None} if suffix == ".svg" else {"CreationDate": None}
        figure.savefig(file, format=suffix.removeprefix("."), metadata=dates)
    return file.getvalue()


def _line(axes: Any, group: Group, metric: str) -> None:
    if not (lines := lines_of(group, metric, TIME)):
        return
    label = _text(group.label) + (f" ({len(lines)} runs)" if len(lines) > 1 else "")
    x, mean, least, most = band(lines, _MAX_POINTS)
    axes.plot(x, mean, color=group.colour, label=label, marker="o" if len(x) == 1 else None)
    if len(lines) > 1:
        axes.fill_between(x, least, most, color=group.colour, alpha=0.2, linewidth=0)


def _clock(groups: Sequence[Group]) -> str:
    simulated = np.array([run.is_simulated for group in groups for run in group.runs])
    return "virtual time" if simulated.all() else "time" if simulated.any() else "wall-clock time"


def _text(text: str) -> str:
    """Sanitise a text from a run folder and escape its ``$``, which matplotlib reads as the start of a formula."""
    return sanitize_text(text, _MAX_LABEL).replace("$", r"\$")
