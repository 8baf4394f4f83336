"""Format a plan as text: tables drawn with rich on a terminal, aligned columns in files and pipes."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raafl.config.experiment import Experiment
from raafl.errors import fraction
from raafl.lab.plan.dry import Prediction, World
from raafl.lab.plan.plan import STRAGGLER, Plan, make_plan
from raafl.lab.report.notebook import fragment, rows_html
from raafl.parts.select.axis_report import facts, share
from raafl.submodel.find.trace import MOST_VALUES
from raafl.units import quantity, size

_NO_END = 100_000
_WIDEST_OF_AXES = 120
"""Largest width of a table of axes in columns, also in files and pipes."""

_NO_AXES = "No axes: every client trains all widths whole."
_MOST_SUBMODELS, _MOST_AXES, _MOST_NAMES = 9, 8, 3
_LEFT = ("submodel", "device", "algorithm", "note", "field", "source", "axis", "on it", "reason", "stays whole", "base")

Table = tuple[str, list[str], list[list[str]]]
"""Title, names of the columns, cells."""


def text(plan: Plan, width: int, *, terminal: bool) -> str:
    """Format a plan (the predictions for a run) as text."""
    shown = [table(*one, width, terminal=terminal) for one in _tables(plan)]
    shown.insert(len(shown) - 1, "\n".join(_advice(plan)))
    shown.insert(0, axes_text(plan.axes, width, terminal=terminal, most=_MOST_AXES))
    shown += [f"{one.name} {one.note}." for one in plan.algorithms if one.note]
    if len(plan.algorithms) == 1 and plan.params > MOST_VALUES:
        shown.append(
            "Other algorithms take minutes with a model of this size: --algorithms all, or names, predicts them."
        )
    shown += [f"Times and memory are a guess: {plan.guessed}."] if plan.guessed else []
    reasons = (plan.chosen or {}).get("reasons", ())
    return "\n\n".join([_head(plan), *(["\n".join(reasons)] if reasons else []), *shown])


def axes_text(facts: Mapping[str, Any], width: int, *, terminal: bool, most: int | None = None) -> str:
    """Format the findings about a model's axes (dimensions that shrink together) as text.

    `most`: largest number of rows of a table; None = all rows.
    """
    shown = []
    for title, names, rows in _axes(facts, most):
        rest = 0 if most is None else max(len(rows) - most, 0)
        more = f"\n... and {rest} more: `raafl axes` lists them all" if rest else ""
        lines = table(title, names, rows[: len(rows) - rest], width, terminal=terminal, widest=_WIDEST_OF_AXES)
        shown += [lines + more] if rows else []
    return "\n\n".join(shown if facts["axes"] else [_NO_AXES, *shown])


def _axes(facts: Mapping[str, Any], most: int | None) -> list[Table]:
    """Build three tables: the axes, what remains of the model at each rate, and the dimensions that stay whole.

    `most`: see `axes_text`.
    """
    axes = [[one["name"], str(one["size"]), ", ".join(one["parameters"])] for one in facts["axes"]]
    rates = [[rate, share(one["parameters"]), share(one["flops"])] for rate, one in facts["rates"].items()]
    places: dict[str, list[str]] = {}
    for one in facts["whole"]:
        places.setdefault(one["reason"], []).append(f"{one['parameter']}[{one['dim']}]")
    whole = [[", ".join(_first(names, None if most is None else _MOST_NAMES)), why] for why, names in places.items()]
    return [
        ("Axes, whose units shrink together", ["axis", "size", "on it"], axes),
        ("Parameters and FLOPs that remain at a rate", ["rate", "parameters", "FLOPs"], rates if axes else []),
        ("Dimensions that stay whole, by parameter and [dimension]", ["stays whole", "reason"], whole),
    ]


@dataclass(frozen=True, repr=False)
class AxesReport:
    """A model's axes, the shares that rates keep, and dimensions that cannot shrink; prints as text and in a notebook.

    Attributes:
        facts: the content that `raafl axes --json` prints: `axes`, `whole` and `rates`.
    """

    facts: Mapping[str, Any]

    def __repr__(self) -> str:
        return axes_text(self.facts, _WIDEST_OF_AXES, terminal=False)

    def _repr_html_(self) -> str:
        num = len(self.facts["axes"])
        title = _NO_AXES if not num else "1 axis of the model" if num == 1 else f"{num} axes of the model"
        return fragment(title, *(rows_html(*one) for one in _axes(self.facts, None) if one[2]))


@dataclass(frozen=True, repr=False)
class PlanReport:
    """Predictions for a run, which show themselves as text and in a notebook.

    Attributes:
        plan: the predictions.
    """

    plan: Plan

    @property
    def facts(self) -> dict[str, Any]:
        """The content that `raafl plan --json` prints."""
        return self.plan.to_json()

    def __repr__(self) -> str:
        return text(self.plan, _NO_END, terminal=False)

    def _repr_html_(self) -> str:
        tables = _tables(self.plan)
        notes = [*_advice(self.plan), *(f"{one.name} {one.note}." for one in self.plan.algorithms if one.note)]
        return fragment(_head(self.plan), *(rows_html(*one) for one in tables), notes=notes)


def plan_report(experiment: Experiment, algorithms: str | Sequence[str] | None) -> PlanReport:
    """Predict an experiment without training; the arguments are those of `raafl.lab.plan.plan.make_plan`."""
    return PlanReport(make_plan(experiment, [algorithms] if isinstance(algorithms, str) else algorithms))


def axes_report(experiment: Experiment, rates: float | Sequence[float]) -> AxesReport:
    """Find the axes of an experiment's model, and the share of parameters and FLOPs that remains at each rate."""
    rates = [rates] if isinstance(rates, int | float) else rates
    for rate in rates:
        fraction("rates", rate)
    experiment.check()
    world = World(experiment)
    return AxesReport(facts(world.cut_submodels(), rates, world.batch_size))


def _tables(plan: Plan) -> list[Table]:
    on_gpu = [] if plan.gpu is None else [_gpu(plan)]
    return [_submodels(plan), _devices(plan), *on_gpu, _algorithms(plan)]


def _head(plan: Plan) -> str:
    clients = quantity(plan.num_clients, "client")
    return f"{plan.name}: {plan.params:,} parameters, {clients}, batches of {plan.batch_size}"


def _first(names: Sequence[str], most: int | None) -> list[str]:
    rest = 0 if most is None else max(len(names) - most, 0)
    return [*names[: len(names) - rest], *([f"and {rest} more"] if rest else [])]


def table(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    terminal: bool,
    widest: int = _NO_END,
) -> str:
    """Format a table as text, with a title and numbers aligned to the right."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for name in names:
        drawn.add_column(name, justify="left" if name in _LEFT else "right")
    for row in rows:
        drawn.add_row(*map(Text, row))
    console = Console(
        file=io.StringIO(),
        width=min(width if terminal else _NO_END, widest),
        force_terminal=terminal,
        force_jupyter=False,
        color_system="auto" if terminal else None,
    )
    with console.capture() as captured:
        console.print(Text(title, "italic"), drawn, sep="\n")
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _submodels(plan: Plan) -> Table:
    whole = plan.submodels[0]
    peaks = [f"peak on {base}" for base in whole.peaks] or ["peak memory"]
    names = ["submodel", "parameters", "left", *peaks, "down", "up", "MFLOP/sample", "FLOPs left"]
    rows = [
        [
            row.name,
            f"{row.params:,}",
            share(row.params / max(whole.params, 1)),
            *map(size, row.peaks.values() or [row.peak_bytes]),
            size(row.down_bytes),
            size(row.up_bytes),
            f"{row.flops_per_sample / 1e6:.4g}",
            share(row.flops_per_sample / max(whole.flops_per_sample, 1e-9)),
        ]
        for row in plan.submodels
    ]
    return "What a task costs, by the share of every axis that is kept", names, rows


def _devices(plan: Plan) -> Table:
    submodels, bases = plan.submodels[:_MOST_SUBMODELS], plan.algorithms[0].bases
    base = ["base"] if plan.submodels[0].peaks else []
    names = ["device", "clients", "samples", "GFLOP/s", "memory", *base, *(row.name for row in submodels), "note"]
    rows = []
    for row in plan.devices:
        slow, num = len(row.stragglers), len(row.clients)
        note = "" if not slow else "straggler" if slow == num else f"{slow} of {num} stragglers"
        least, most = row.seconds_range
        if num > 1 and most > least * 1.05:
            note = f"{note}, whole: {seconds(least)} to {seconds(most)}".removeprefix(", ")
        is_client = row.clients[0] > 0
        cells = ["-" if one is None else seconds(one) for one in row.seconds[: len(submodels)]]
        held = [", ".join(sorted({bases[i] for i in row.clients if i in bases})) or "-"] if base else []
        rows.append(
            [
                row.name,
                str(num) if is_client else "-",
                str(row.num_samples),
                f"{row.flops_per_s / 1e9:.4g}",
                size(row.memory_bytes),
                *held,
                *cells,
                note if is_client else "not a client",
            ]
        )
    return "Seconds per task of the middle client of each kind (- does not fit its memory)", names, rows


def _gpu(plan: Plan) -> Table:
    steps = plan.gpu
    assert steps is not None
    names = ["submodel", "eager", "captured", "host, eager", "device", "memory of a graph"]
    rows = [
        [
            row.name,
            *(f"{1e3 * one:.3g}" for one in (row.eager_s, row.captured_s, row.host_s, row.device_s)),
            size(row.pool_bytes),
        ]
        for row in steps.rows[:_MOST_SUBMODELS]
    ]
    return f"Milliseconds of a training step on {steps.device}, the longer of host and device", names, rows


def _advice(plan: Plan) -> list[str]:
    advice, num = plan.advice, plan.num_clients
    lines = [
        f"The whole model takes the median client {seconds(advice.median_s)} s a task, the slowest "
        f"{seconds(advice.slowest_s)} s."
    ]
    varying: dict[str, list[str]] = {}
    for row in plan.devices:
        varying.setdefault(row.varies, []).append(row.name)
    lines += [
        f"Times are at the rates that profiles state; {', '.join(_first(names, _MOST_SUBMODELS))} varies: {how}."
        for how, names in varying.items()
        if how
    ]
    slow = advice.stragglers
    if slow:
        shown = ", ".join(map(str, slow[:12])) + (f" and {len(slow) - 12} more" if len(slow) > 12 else "")
        lines.append(
            f"Stragglers ({STRAGGLER:g} x the median or more, or without the memory): {len(slow)} of {num}: {shown}."
        )
    else:
        lines.append(f"No stragglers: no client takes {STRAGGLER:g} x the median, and the whole model fits everywhere.")
    if advice.fragments is not None and advice.fragment_s is not None:
        lines.append(
            f"fragments: {advice.fragments}: with the smallest the slowest client takes {seconds(advice.fragment_s)} s."
        )
    lines.append(
        f"buffer_size: {advice.buffer_size}: as many as are no stragglers (participation {advice.participation:.2g})."
    )
    lines.append(f"deadline: {seconds(advice.deadline_s)} s: what the slowest of those takes for the whole model.")
    if plan.by_the_loop is None:
        lines.append("batch_clients: possible as far as known; auto tries it, and prints the result.")
    else:
        lines.append(f"batch_clients: has no effect, clients are trained one after the other: {plan.by_the_loop}.")
    if plan.captured is not None:
        possible = "possible as far as known; auto compares the first tasks with eager ones"
        lines.append(f"fabric.capture: {'no effect: ' + '; '.join(plan.captured) if plan.captured else possible}.")
    if plan.batches_captured and not plan.captured:
        lines.append(f"Steps of batches of clients are eager on a GPU: {'; '.join(plan.batches_captured)}.")
    if plan.gpu is not None and not plan.captured:
        lines.append(
            f"Graphs of all these submodels: {size(plan.gpu.pool_bytes)}, which they share, and {size(plan.gpu.fixed_bytes)} "
            "of values, optimizer state and batches."
        )
    return lines


def _algorithms(plan: Plan) -> Table:
    names = ["algorithm", "s/version", "s/update", "utilisation", "staleness", "per update", "tasks", "run", "note"]
    rows = [_prediction(one) for one in sorted(plan.algorithms[1:], key=_order)]
    return "Predicted, with nothing trained", names, [_prediction(plan.algorithms[0]), *rows]


def _order(one: Prediction) -> tuple[float, str]:
    return (math.inf if one.update_s is None else one.update_s, one.name)


def _prediction(one: Prediction) -> list[str]:
    if one.version_s is None or one.update_s is None:
        return [one.name, *["-"] * 7, _short(one.problem or "")]
    return [
        one.name,
        seconds(one.version_s),
        seconds(one.update_s),
        f"{one.utilisation or 0:.0%}",
        f"{one.staleness or 0:.3g}",
        size(one.bytes_per_update or 0),
        f"{one.least} to {one.most}",
        "" if one.run_s is None else _duration(one.run_s),
        "",
    ]


def _short(problem: str) -> str:
    return problem if len(problem) <= 100 else problem[:97] + "..."


def seconds(value: float) -> str:
    """Format a number of seconds with three significant digits; from 1000 on all digits before the point are kept."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _duration(value: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.3g} s"
