"""Draw the learning curves of runs as an SVG or PDF figure, for papers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raafl.errors import BadInput, installing
from raafl.lab.report.curves import TIME, band, curve
from raafl.lab.report.groups import Group
from raafl.lab.report.overview import model_metrics
from raafl.sanitize import sanitize_text

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
    # text stays text, and the same runs give the same file
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
    lines = [line for line in (curve(run, metric, TIME) for run in group.runs) if len(line[0])]
    if not lines:
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
    """Return a text of a run folder's as plain text: `$` would begin a formula."""
    return sanitize_text(text, _MAX_LABEL).replace("$", r"\$")
