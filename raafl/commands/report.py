"""Write a report page or a figure about runs (`raafl report RUN [RUN ...] --output PAGE.html`)."""

from __future__ import annotations

import base64
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from raafl.atomic_file import atomic_file
from raafl.commands.stored_runs import run_tables
from raafl.config.argv import check_writable, not_written, options_of
from raafl.errors import BadInput
from raafl.lab.report import overview
from raafl.lab.report.clients import Classes, classes_of, participation_chart, partition
from raafl.lab.report.groups import Group, algorithm_of, curves, group_runs, names_of
from raafl.lab.report.notebook import curve_svg
from raafl.lab.report.overview import check_figure, draw
from raafl.lab.report.page import (
    MAX_ROWS,
    Table,
    collapsible,
    escaped,
    page,
    shown,
    table_html,
    thin_rows,
    transpose_wide,
)
from raafl.lab.report.submodels import axes, regions, specs, staleness
from raafl.lab.report.timeline import time_spent, timeline
from raafl.runfolder.books import signature_warning
from raafl.runfolder.reading import RecordedRun, read, sample_images, sample_rows
from raafl.runfolder.schema import SAMPLE_COLUMNS
from raafl.units import quantity, size

if TYPE_CHECKING:
    from raafl.data.federated import FederatedData

_MAX_APART = 8
"""Largest number of runs with a timeline and other charts of their own: the first run of each group."""
_MAX_CONFIG = 100_000


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl report`."""
    found = ArgumentParser(
        prog="raafl report", exit_on_error=False, description="Write one HTML page about one run or several."
    )
    found.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or its URL in an object store")
    found.add_argument(
        "--output", type=Path, metavar="PAGE.html", help="default: report.html, unless --figure is given"
    )
    found.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw the learning curves as a static figure: .svg or .pdf"
    )
    found.add_argument(
        "--labels", action="store_true", help="read the data that the configs name, to show each client's classes"
    )
    found.add_argument(
        "--trust_config",
        action="store_true",
        help="with --labels: import what the configs name, though it is not raafl's",
    )
    return found


def report(argv: Sequence[str]) -> str:
    """Write a report page or a figure; return a line with the path of each file written.

    Raises:
        BadInput: a path is not a run folder, an option is unknown, or the page cannot be written.
    """
    if not argv:
        raise BadInput("raafl report needs a run folder: raafl report RUN [RUN ...] --output PAGE.html")
    options = options_of(parser(), argv)
    figure: Path | None = options.figure
    page: Path | None = options.output or (Path("report.html") if figure is None else None)
    for name, path in (("output", page), ("figure", figure)):
        if path is not None and path.is_dir():
            raise BadInput(f"{name} is '{path}', which is a folder: name a file, such as {path / 'report.html'}")
        if path is not None:
            check_writable(name, path)
    if figure is not None:
        check_figure(figure)
    runs = [read(folder) for folder in {folder.resolve(): folder for folder in map(run_tables, options.runs)}.values()]
    _name_apart(runs)
    lines = []
    if page is not None:
        text = build(runs, labels=options.labels, trusted=options.trust_config)
        lines.append(_written("output", page, text.encode(), len(runs)))
    if figure is not None:
        lines.append(_written("figure", figure, draw(group_runs(runs), figure.suffix.lower()), len(runs)))
    return "\n".join(lines)


def _name_apart(runs: Sequence[RecordedRun]) -> None:
    """Put the names of folders around them before the names of runs that have the same, as many as tell them apart."""
    alike: dict[str, list[RecordedRun]] = {}
    for run in runs:
        alike.setdefault(run.name, []).append(run)
    for some in alike.values():
        parts = [run.path.resolve().parts for run in some]
        depth = next(depth for depth in count(1) if len({path[-depth:] for path in parts}) == len(some))
        for run, path in zip(some, parts, strict=True):
            run.name = "/".join(path[-depth:])


def _written(name: str, path: Path, data: bytes, num_runs: int) -> str:
    """Write ``data`` to ``path`` atomically; return a line about the file, or raise an error that names the option ``name``."""
    try:
        with atomic_file(path) as file:
            file.write(data)
    except OSError as error:
        raise not_written(name, path, error) from None
    return f"{path}: {quantity(num_runs, 'run')}, {size(len(data))}"


def build(runs: Sequence[RecordedRun], *, labels: bool = False, trusted: bool = False) -> str:
    """Create an HTML page that reports on some runs."""
    groups = group_runs(runs)
    names = names_of(groups)
    apart = [(names[id(group.runs[0])], group.runs[0]) for group in groups[:_MAX_APART]]
    left_out = len(runs) - len(apart)
    classes: dict[int, Classes | str] = {}
    if labels:
        classes = {id(run): classes_of(run, partial(_partitioned_data, trusted=trusted)) for _, run in apart}
    charts = [
        replace(curves(groups), still=curve_svg(groups)),
        timeline(apart, left_out),
        time_spent(apart, left_out),
        participation_chart(groups),
        staleness(groups),
        regions(groups),
        specs(groups),
        axes(groups),
        partition(apart, classes, left_out),
    ]
    only = runs[0] if len(runs) == 1 else None
    algorithms = ", ".join(list(dict.fromkeys(map(algorithm_of, runs)))[:_MAX_APART])
    title = f"{only.name}: {groups[0].label}" if only is not None else f"{len(runs)} runs of {algorithms}"
    made = time.strftime("%Y-%m-%d %H:%M")
    subtitle = f"raafl report, made {made}. Times called virtual are those of simulated devices."
    samples = _samples(runs)
    bottom = samples + _configs(groups, runs)
    links = {**({"samples": "Samples"} if samples else {}), "config": "Config"}
    return page(title, subtitle, _top(groups, runs), charts, bottom, links)


def _partitioned_data(run: RecordedRun, *, trusted: bool) -> FederatedData:
    """Load the data that a run's config names, and partition it among the clients as the run did."""
    from raafl.config.parse import load_run
    from raafl.runtime.setup import load_data

    return load_data(load_run(run.path, trusted=trusted, for_replay=True))


def _top(groups: Sequence[Group], runs: Sequence[RecordedRun]) -> str:
    parts: list[str] = []
    books = {
        id(run): [line] if (line := signature_warning(run.path, unsealed=True)) is not None else [] for run in runs
    }
    notes_of = {id(run): [*books[id(run)], *overview.notes_of(run)] for run in runs}
    noted = [f"<li>{escaped(run.name)}: {escaped(note)}</li>" for run in runs for note in notes_of[id(run)]]
    notes = f'<div class="notes"><ul>{"".join(noted[:60])}</ul></div>' if noted else ""
    if len(runs) == 1:
        parts.append(_cards(groups, runs[0]))
    colours = {run.name: group.colour for group in groups for run in group.runs} if len(groups) > 1 else {}
    table = overview.runs_table(groups)
    outcomes = collapsible("How tasks ended", table_html(overview.outcomes_table(groups), colours))
    spread = overview.groups_table(groups)
    if spread is not None:
        by_label = {group.label: group.colour for group in groups}
        parts.append(table_html(transpose_wide(spread), by_label))
        parts.append(collapsible("Each run", table_html(transpose_wide(table), colours)))
    else:
        shown_table = table_html(transpose_wide(table), colours)
        parts.append(collapsible("All figures", shown_table) if len(runs) == 1 else shown_table)
    return f'<section id="overview">{"".join(parts)}{notes}{outcomes}</section>'


def _cards(groups: Sequence[Group], run: RecordedRun) -> str:
    metrics = overview.model_metrics(groups)
    figures = overview.run_totals(run)
    values = dict(zip(metrics[:3], overview.final_metrics(run, metrics[:3]), strict=True))
    wanted = (
        "merged updates",
        "versions",
        "seconds",
        "MB down",
        "MB up",
        "utilisation",
        "mean staleness",
        "lost",
        "ended",
    )
    cards = [(name, f"{value:.4g}") for name, value in values.items()]
    cards += [(name, shown(figures[name])) for name in wanted]
    inner = "".join(
        f"<div><dt>{escaped(name)}</dt><dd{' class=text' if name == 'ended' else ''}>{escaped(value)}</dd></div>"
        for name, value in cards
    )
    return f'<dl class="cards">{inner}</dl>'


def _samples(runs: Sequence[RecordedRun]) -> str:
    """Build the page's section with the texts and images that models generated or classified; "" if no run has any."""
    parts = []
    for run in runs[:_MAX_APART]:
        rows = sample_rows(run.path)
        if rows:
            parts.append(_thumbnails(run))
            latest = max(int(row[0]) for row in rows)
            of_versions = [[row for row in rows if row[0] == version] for version in dict.fromkeys(("0", str(latest)))]
            first_and_last = [row for some in of_versions for row in some[: MAX_ROWS // 2]]
            parts.append(table_html(Table(SAMPLE_COLUMNS, first_and_last, f"{run.name}, first and last model")))
            kept, said = thin_rows(rows)
            parts.append(collapsible(f"All of {run.name}", table_html(Table(SAMPLE_COLUMNS, kept, said))))
    return f'<section id="samples"><h2>Samples</h2>{"".join(parts)}</section>' if parts else ""


def _thumbnails(run: RecordedRun) -> str:
    """Show the recorded images of test samples in HTML, each with its latest prediction; "" if there are none."""
    figures = [
        f'<figure><img alt="test sample {number}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
        f"<figcaption>{escaped(caption)}</figcaption></figure>"
        for number, (content, caption) in sample_images(run.path).items()
    ]
    return f'<div class="thumbnails">{"".join(figures)}</div>' if figures else ""


def _configs(groups: Sequence[Group], runs: Sequence[RecordedRun]) -> str:
    parts = ['<section id="config"><h2>Config</h2>']
    differing = overview.differences_table(groups)
    if differing is not None:
        parts.append('<p class="soft">Where the groups of runs differ; each config is below, whole.</p>')
        parts.append(table_html(differing))
    for run in runs:
        if run.config_text:
            text = run.config_text
            cut = "\n… cut here; the rest is in config.yaml" if len(text) > _MAX_CONFIG else ""
            parts.append(collapsible(run.name, f"<pre>{escaped(text[:_MAX_CONFIG] + cut)}</pre>"))
    if not any(run.config_text for run in runs):
        parts.append('<p class="soft">No run has a config.yaml.</p>')
    return "\n".join([*parts, "</section>"])
