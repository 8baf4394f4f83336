"""Collect the result of a comparison and write it as JSON, CSV, LaTeX, a figure and an HTML page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from raafl.atomic_file import atomic_file
from raafl.config.experiment import Experiment
from raafl.config.options import distance, seconds
from raafl.core.select import time_on
from raafl.core.types import Work
from raafl.devices.measure import measure_machine
from raafl.devices.profiles import Profile
from raafl.errors import BadInput, installing
from raafl.lab.compare.comparison import Comparison
from raafl.lab.compare.results import differences, gains, measure, rules_of, summarize
from raafl.lab.compare.runs import Outcome, machine_name, parsed, provenance
from raafl.lab.compare.search import Trial, rungs
from raafl.lab.plan.dry import Prediction, World, predict
from raafl.lab.report.groups import COLOURS, Group, curves
from raafl.lab.report.overview import draw
from raafl.lab.report.page import Table, escaped, page, table_html
from raafl.runfolder.reading import read
from raafl.submodel import FULL
from raafl.units import duration, quantity, size


def result(
    comparison: Comparison,
    outcomes: Sequence[Outcome],
    trials: Mapping[str, Sequence[Trial]],
    best: Mapping[str, Trial],
    root: Path,
) -> dict[str, Any]:
    """Return the result of a comparison as JSON: the measured values of every run and trial, commands, and versions."""
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in comparison.rows}
    for outcome in outcomes:
        runs[outcome.run.label].append(measure(outcome, comparison, root))
    gaps, gaining = differences(runs, comparison.reference), gains(runs, comparison.reference)
    rows = []
    for label, some in runs.items():
        row = summarize(label, some, comparison) | {"difference": gaps[label]}
        if gaining[label] is not None:
            row["clients_gaining"] = gaining[label]
        if label in comparison.published:
            row["published"] = comparison.published[label]
        if label in trials:
            row["searched"] = _searched(trials[label], best[label])
        rows.append(row | {"runs": some})
    return {
        "name": comparison.name,
        "about": comparison.about,
        "config": comparison.config,
        "metric": comparison.metric,
        "options": list(comparison.options),
        "smooth": comparison.smooth,
        "eval_every": comparison.eval_every,
        "reference": comparison.reference,
        **provenance(),
        "rules": rules_of(rows),
        "rows": rows,
    }


def _searched(trials: Sequence[Trial], best: Trial) -> dict[str, Any]:
    listed = [
        {
            "settings": list(trial.settings),
            # JSON has no infinity, which is the score of a run that missed the target
            "scores": {str(seed): one if math.isfinite(one) else None for seed, one in trial.scores.items()},
            **({"cut_after": trial.fraction} if trial.fraction < best.fraction else {}),
        }
        for trial in trials
    ]
    return {"settings": list(best.settings), "trials": listed}


def write(result: Mapping[str, Any], folder: Path, *, draws: bool = True) -> list[Path]:
    """Write result.json, table.csv, table.tex, index.html, and with matplotlib curves.svg; return their paths."""
    table = cells(result)
    paths = _save(
        folder,
        {
            "result.json": (json.dumps(result, indent=1) + "\n").encode(),
            "table.csv": as_csv(table).encode(),
            "table.tex": latex(table).encode(),
        },
    )
    # after the numbers were saved: an error while drawing loses nothing
    groups = groups_of(result, folder) if draws else []
    if groups:
        curves_file = {} if missing_drawing() else {"curves.svg": draw(groups, ".svg")}
        paths += _save(folder, {**curves_file, "index.html": _page(result, table, groups).encode()})
    return paths


def _save(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    for name, data in files.items():
        with atomic_file(folder / name) as file:
            file.write(data)
    return [folder / name for name in files]


def groups_of(found: Mapping[str, Any], folder: Path) -> list[Group]:
    """Read the runs of each row of a result as a group; rows whose runs all failed are left out."""
    groups = []
    for place, row in enumerate(found["rows"]):
        folders = [folder / run["folder"] for run in row["runs"] if "error" not in run]
        if folders:
            groups.append(Group(row["row"], COLOURS[place % len(COLOURS)], tuple(map(read, folders)), {}))
    return groups


def _page(found: Mapping[str, Any], table: Sequence[Sequence[str]], groups: Sequence[Group]) -> str:
    colours = {group.label: group.colour for group in groups}
    about = "".join(f"<p>{escaped(line)}</p>" for line in found["about"].split("\n\n") if line.strip())
    shown = "".join(
        f"<li>{escaped(line)}</li>"
        for line in (*warnings(found), *sentences(found["rows"], found["reference"], found["metric"]))
    )
    note = (
        "Mean ± half of the 95 % interval over seeds (Student's t). Differences are paired by seed, and shown where their "
        "p-value is at most 0.05 after Holm's correction for all rows of the table. Times to a target are medians over all "
        "seeds; a seed that never got there counts as later."
    )
    top = (
        f'<section id="overview">{about}{table_html(Table(table[0], table[1:], note), colours)}'
        f'<div class="notes"><ul>{shown}</ul></div></section>'
    )
    searched = _search_tables(found)
    commands = "".join(f"<pre>{escaped(run['command'])}</pre>" for row in found["rows"] for run in row["runs"][:1])
    bottom = f'{searched}<section id="commands"><h2>Commands</h2>{commands}</section>'
    title = f"{found['name']}: {len(found['rows'])} rows"
    subtitle = f"raafl compare, {found['date'][:10]}, {machine_name(found['hardware'])}, commit {found['commit']}"
    return page(title, subtitle, top, [curves(groups, first=found["metric"])], bottom, {"commands": "Commands"})


def _search_tables(found: Mapping[str, Any]) -> str:
    trials = [
        (row["row"], trial) for row in found["rows"] if row.get("searched") for trial in row["searched"]["trials"]
    ]
    if not trials:
        return ""
    seeds = sorted({seed for _, trial in trials for seed in trial["scores"]}, key=int)
    is_cut = any("cut_after" in trial for _, trial in trials)
    rows = []
    for label, trial in trials:
        scores = ("-" if (one := trial["scores"].get(seed)) is None else f"{one:.4g}" for seed in seeds)
        budget = [f"{trial.get('cut_after', 1):.0%}"] if is_cut else []
        rows.append([label, " ".join(trial["settings"]), *budget, *scores])
    head = ["row", "settings", *(["budget"] if is_cut else []), *(f"seed {seed}" for seed in seeds)]
    note = "Each row had the same number of trials, scored on training data that no client had, on seeds not reported."
    note += " Scores after a part of the budget are of trials that ended early." if is_cut else ""
    return f'<section id="search"><h2>Search</h2>{table_html(Table(head, rows, note))}</section>'


def missing_drawing() -> str:
    """Return a text that says why a comparison has no curves.svg: matplotlib is not installed; empty if it is."""
    if find_spec("matplotlib") is not None:
        return ""
    return f"there will be no curves.svg, which matplotlib draws: {installing('report')}"


def load(folder: Path) -> dict[str, Any]:
    """Read the result of a comparison from its folder; raise `BadInput` if the folder has none."""
    path = folder / "result.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"'{path}' is not a result of raafl compare ({error}): run the comparison first") from None
    return found


Cells = list[list[str]]
_MOST_DECIMALS = 6

_FIGURES = (
    ("best", "best"),
    ("megabytes", "MB"),
    ("updates", "updates"),
    ("utilisation", "utilisation"),
    ("participation", "participation"),
    ("participation_gini", "Gini"),
    ("clients_gaining", "clients gaining"),
    ("clients_mean", "clients' own test"),
    ("worst_client", "worst client"),
    ("peak_memory_mb", "peak MB"),
    ("energy_kj", "kJ"),
)


def cells(result: Mapping[str, Any]) -> Cells:
    """Format the result of a comparison as a table of texts, with mean ± half of the 95 % interval over seeds."""
    rows, metric, reference = result["rows"], result["metric"], result["reference"]
    targets = list(rows[0]["time_to"]) if rows else []
    published = any("published" in row for row in rows)
    searched = any(row.get("searched") for row in rows)
    figures = [(name, title) for name, title in _FIGURES if any(name in row for row in rows)]
    head = ["row", *(["settings"] if searched else []), *(["published"] if published else []), metric]
    compared = [f"minus {reference}"] if len(rows) > 1 else []
    head += [*compared, *(f"s to {target}" for target in targets), *(title for _, title in figures), "seeds"]
    table = [head]
    for row in rows:
        line = [row["row"]]
        line += [" ".join((row.get("searched") or {}).get("settings", []))] if searched else []
        line += [str(row.get("published", ""))] if published else []
        line += [with_interval(row.get("final")), *(difference(row.get("difference")) for _ in compared)]
        line += [time_cell(row["time_to"][target]) for target in targets]
        line += [short(row[name]["mean"]) if name in row else "" for name, _ in figures]
        table.append([*line, str(len(row["seeds"])) + (f" ({row['failed']} failed)" if row["failed"] else "")])
    return table


def with_interval(figure: Mapping[str, Any] | None) -> str:
    """Format a mean and half of its interval: `0.912 ± 0.004`; for a single seed only the mean."""
    if figure is None:
        return "-"
    return short(figure["mean"]) if figure["half"] is None else _rounded(figure["mean"], figure["half"])


def difference(figure: Mapping[str, Any] | None) -> str:
    """Format a difference with its interval; add the remark that the runs show none, after Holm's correction for the table."""
    if figure is None:
        return ""
    sign = "+" if figure["mean"] >= 0 else "-"
    size = abs(figure["mean"])
    if figure["half"] is None:
        return f"{sign}{short(size)} (one seed)"
    remark = "" if figure["shown"] else " (no spread)" if figure["p_holm"] is None else " (not shown)"
    return sign + _rounded(size, figure["half"]) + remark


def quoted(label: str) -> str:
    """Put a row's label into quotation marks if it has a comma."""
    return f'"{label}"' if "," in label else label


def _rounded(mean: float, half: float) -> str:
    """Format a mean and half of its interval with two significant digits of the half, but at most six decimals."""
    if not (math.isfinite(mean) and math.isfinite(half) and half > 0):
        return f"{short(mean)} ± {short(half)}"
    decimals = min(max(0, 1 - math.floor(math.log10(half))), _MOST_DECIMALS)
    return f"{mean:,.{decimals}f} ± {half:,.{decimals}f}"


def time_cell(cell: Mapping[str, Any]) -> str:
    """Format a median time to a target, and the number of seeds that reached it: `12.5 (4/5)`, or `never (1/5)`."""
    time_s = "never" if cell["median_s"] is None else short(cell["median_s"])
    return f"{time_s} ({cell['reached']}/{cell['seeds']})"


def short(value: float) -> str:
    """Format a number with four significant digits; large numbers have no decimals."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def p_value(value: float) -> str:
    """Format a p-value with two significant digits; small ones as a bound."""
    return "below 0.001" if value < 0.001 else f"{value:.2g}"


def warnings(result: Mapping[str, Any]) -> list[str]:
    """Return warnings if the rows of a comparison were not trained, or not measured, alike."""
    return [*_mixed_modes(result), *_unlike_evaluations(result)]


def _mixed_modes(result: Mapping[str, Any]) -> list[str]:
    """Warn if some rows were trained with ``batch_clients: fast`` and others not, since results then differ in the last bits."""
    is_fast = {row["row"]: any(run.get("batch_clients") == "fast" for run in row["runs"]) for row in result["rows"]}
    if len(set(is_fast.values())) < 2:
        return []
    names = ", ".join(quoted(label) for label, fast in is_fast.items() if fast)
    return [
        f"Rows were not trained in one mode: {names} with batch_clients fast, whose last bits differ, the others not."
    ]


def _unlike_evaluations(result: Mapping[str, Any]) -> list[str]:
    """Warn if rows were evaluated at unlike intervals, such as each after a number of its own versions.

    Rows are alike if the intervals are about equal either in virtual time or in merged updates.
    """
    if result.get("eval_every") is not None:
        return []
    seconds, updates = (
        {row["row"]: _spacing(row["runs"], name) for row in result["rows"]} for name in ("time_s", "updates")
    )
    known = {label: one for label, one in seconds.items() if one is not None}
    if not known or _are_alike(known.values()) or _are_alike(one for one in updates.values() if one is not None):
        return []
    often, rarely = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    affected = "the best value"
    if result["rows"][0]["time_to"] or result.get("smooth", 1) > 1:
        affected = "times to a target and the best value"
    return [
        f"Rows were not measured alike, from every {duration(known[often])} ({quoted(often)}) to every "
        f"{duration(known[rarely])} ({quoted(rarely)}): {affected} may differ for that alone."
    ]


def _are_alike(distances: Iterable[float]) -> bool:
    """Check whether the rows' intervals between evaluations differ by at most 10 %."""
    known = list(distances)
    return bool(known) and max(known) <= 1.1 * min(known)


def _spacing(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Compute the mean interval between evaluations of a row's runs, in seconds or updates, as ``name`` says.

    Runs with fewer than two evaluations, or without that field, are left out; None if no run remains.
    """
    counted = [run for run in runs if len(run.get("curve", ())) > 1 and run.get(name) is not None]
    num = sum(len(run["curve"]) - 1 for run in counted)
    return sum(run[name] for run in counted) / num if num else None


def text(table: Cells) -> str:
    """Format a table as text in aligned columns."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def as_csv(table: Cells) -> str:
    """Format a table as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(table)
    return file.getvalue()


def latex(table: Cells) -> str:
    r"""Format a table as LaTeX (`tabular` with booktabs)."""
    lines = [" & ".join(map(_escaped, line)) + r" \\" for line in table]
    columns = "l" + "r" * (len(table[0]) - 1)
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


def _escaped(cell: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in cell)


def _whole_trials(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the trials of a row's search that ran to their end, without those that a pruner stopped."""
    searched = row.get("searched") or {"trials": []}
    return [trial for trial in searched["trials"] if "cut_after" not in trial]


def sentences(rows: Sequence[Mapping[str, Any]], reference: str, metric: str) -> list[str]:
    """Describe in a sentence for each row whether it differs from the reference row; also name searches without a result."""
    found = [
        f"{row['row']}: its {len(some)} trials had the same score, so the search chose nothing: the searched options have no "
        "effect on it, its trials are too short, or the metric is too coarse."
        for row in rows
        if len(some := _whole_trials(row)) > 1 and all(trial["scores"] == some[0]["scores"] for trial in some)
    ]
    for row in rows:
        gap = row.get("difference")
        if gap is None:
            continue
        if gap["half"] is None:
            found.append(f"{row['row']}: compared with {reference} on one seed only, so no difference can be shown.")
        else:
            size, side = _rounded(abs(gap["mean"]), gap["half"]), "above" if gap["mean"] >= 0 else "below"
            end = "." if gap["shown"] else ", so no difference is shown."
            if gap["p_holm"] is None:
                end = ": it is the same for all seeds, so no test can show it."
            elif gap["excludes_0"] and not gap["shown"]:
                end = f"; with {gap['tests']} rows tested, no difference is shown (p {p_value(gap['p_holm'])} by Holm)."
            failed = f"; {quantity(row['failed'], 'run')} failed" if row.get("failed") else ""
            found.append(
                f"{row['row']}: {metric} is {size} {side} that of {quoted(reference)} "
                f"(95 % interval, {gap['num']} seeds{failed}){end}"
            )
    return found


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted cost of one row of a comparison."""

    row: str  # label of the row
    runs: int  # number of reported runs of the row, one for each seed
    trials: float  # number of runs for the search; trials that end early count as fractions
    updates: int = 0  # number of merged updates of a run
    time_s: float = 0.0  # virtual seconds of a run
    num_bytes: float = 0.0  # number of bytes sent and received by all clients in a run
    here_s: float = 0.0  # seconds that one process on this machine needs for one run, with its evaluations
    problem: str | None = None  # reason why the row cannot be predicted; all numbers are then 0

    @property
    def total_s(self) -> float:
        """Seconds that one process on this machine needs for all runs of the row."""
        return self.here_s * (self.runs + self.trials)


def forecast(comparison: Comparison) -> list[Forecast]:
    """Predict the cost of each row of a comparison without training.

    A run for the search is assumed to take as long as a reported run.

    Raises:
        BadInput: an option of a row is wrong; the message names the row.
    """
    machine = measure_machine()
    return [_row(comparison, label, machine) for label in comparison.rows]


def as_table(rows: Sequence[Forecast]) -> Cells:
    """Format the predictions as a table of texts: a header, a row for each row of the comparison, and the sum."""
    table = [["row", "runs", "trials", "updates", "virtual time", "sent", "a run here", "all here"]]
    for row in rows:
        counts = [row.row, str(row.runs), f"{row.trials:g}"]
        if row.problem:
            table.append([*counts, f"unknown: {row.problem}", "", "", "", ""])
            continue
        table.append(
            [
                *counts,
                f"{row.updates:,}",
                duration(row.time_s),
                size(row.num_bytes),
                duration(row.here_s),
                duration(row.total_s),
            ]
        )
    return [*table, ["all rows", "", "", "", "", "", "", duration(sum(row.total_s for row in rows))]]


def as_json(rows: Sequence[Forecast]) -> list[dict[str, Any]]:
    """Convert the predictions to plain data."""
    return [asdict(row) | {"total_s": row.total_s} for row in rows]


def _row(comparison: Comparison, label: str, machine: Profile) -> Forecast:
    experiment = parsed(comparison.config, label, comparison.options_of(label), comparison.seeds[0]).experiment
    search = comparison.search
    trials = 0.0
    if search is not None:
        num = len(search.settings(label)) if search.sampler is None else search.trials or 0
        trials = num * len(search.seeds) * _share(comparison)
    row = Forecast(label, len(comparison.seeds), trials)
    world = World(experiment)
    found = predict(world, experiment.algorithm, machine=machine)
    if found.problem or not found.updates:
        return replace(row, problem=found.problem or "no update in time")
    updates = _updates(experiment, found)
    factor = updates / found.updates
    evaluation_s = time_on(
        machine, world.submodels(experiment.algorithm).cost(FULL, world.batch_size), 0.0, _tested(world)
    )
    evaluations = _evaluations(experiment, world, found, factor)
    return replace(
        row,
        updates=updates,
        time_s=found.time_s * factor,
        num_bytes=(found.bytes_per_update or 0.0) * updates,
        here_s=(found.here_s or 0.0) * factor + evaluations * evaluation_s.compute_s,
    )


def _evaluations(experiment: Experiment, world: World, found: Prediction, factor: float) -> float:
    """Estimate how often a run is evaluated, at most once for each version of the model.

    `found`: prediction of a shorter run. `factor`: length of the run as a multiple of that one's.
    """
    versions, every = found.versions * factor, distance("eval_every", experiment.eval_every)
    if every is None:
        return versions / len(world.clients)
    if every.unit == "versions":
        return versions / every.size
    sizes = [client.num_samples for client in world.clients]
    each = experiment.train.trained_samples(Work(), round(fmean(sizes)), world.batch_size, world.data.drop_last)
    samples = each * found.updates * factor
    return min(versions, (found.time_s * factor if every.unit == "seconds" else samples) / every.size)


def _updates(experiment: Experiment, found: Prediction) -> int:
    """Predict how many updates a run merges until its time or update limit; a target, which could end it sooner, is ignored."""
    limit_s, updates = seconds("max_time", experiment.max_time), experiment.max_updates
    in_time = None if limit_s is None or not found.update_s else int(limit_s / found.update_s)
    return min((limit for limit in (in_time, updates) if limit is not None), default=found.updates)


def _tested(world: World) -> int:
    return sum(count for _, count in world.data.test_batches(world.batch_size))


def _share(comparison: Comparison) -> float:
    """Compute how much training a trial gets on average under successive halving, as a share of a full run."""
    halving = comparison.search.halving if comparison.search else None
    spent, left = 0.0, 1.0
    for fraction in rungs(halving):
        spent += left * fraction  # each stage starts its trials from scratch
        left *= halving.keep if halving else 1.0
    return spent
